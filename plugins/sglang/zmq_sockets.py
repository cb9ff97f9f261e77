"""The sockets between one scheduler rank and SMG's router, and the handshake that opens them."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

from ..wire import sglang_frames as frames

logger = logging.getLogger("sglang.smg_grpc_servicer.zmq")

_PATIENCE_SECS = 600.0
_SAY_SECS = 30.0
_LAST_WORDS_MS = 2000  # that the end of a rank takes at most for what it still has to send


class HandshakeFailed(Exception):
    """The router did not say where to connect; the message is a sentence."""


class Wire:
    """A rank's connection to the router, used from the scheduler's thread alone.

    `address` is where the router answers handshakes, `index` the rank's number behind it.
    """

    def __init__(self, address: str, index: int, patience: float = _PATIENCE_SECS) -> None:
        import zmq

        self.address, self.index, self._patience = address, index, patience
        self._zmq: Any = zmq
        self._context = self._zmq.Context()
        self._identity = index.to_bytes(2, "little")
        self._handshake: Any = None
        self._outputs: Any = None
        self.inputs: Any = None

    def connect(self, ready: frames.Ready) -> None:
        """Greet the router, connect where it says and report ready; HandshakeFailed when it does not answer."""
        zmq = self._zmq
        self._handshake = self._socket(zmq.DEALER, self.address)
        self._handshake.send(frames.HELLO)
        addresses = self._await_init().addresses
        self._outputs = self._socket(zmq.PUSH, addresses.outputs[0])
        self.inputs = self._socket(zmq.DEALER, addresses.inputs[0])
        self._handshake.send(frames.READY)
        self.inputs.send(frames.encode(ready))

    def receive(self) -> list[bytes] | None:
        """The frames of the next request, None when none waits."""
        try:
            return self.inputs.recv_multipart(self._zmq.NOBLOCK)
        except self._zmq.Again:
            return None

    def send(self, frame: bytes) -> None:
        """Queue one output; does not wait for the router."""
        self._outputs.send(frame, self._zmq.NOBLOCK)

    def close(self) -> None:
        """Say that the rank is dead, and close."""
        if self._outputs is not None:
            with contextlib.suppress(self._zmq.ZMQError):
                self.send(frames.DEAD)
        for socket in (self._outputs, self.inputs, self._handshake):
            if socket is not None:
                socket.close(linger=_LAST_WORDS_MS)
        self._context.term()

    def _socket(self, kind: int, address: str) -> Any:
        zmq = self._zmq
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        if kind == zmq.DEALER:
            socket.setsockopt(zmq.IDENTITY, self._identity)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            raise HandshakeFailed(f"cannot connect to {address!r}: {error}") from error
        return socket

    def _await_init(self) -> frames.Init:
        began = time.monotonic()
        while not self._handshake.poll(1000 * min(_SAY_SECS, self._patience)):
            waited = time.monotonic() - began
            if waited >= self._patience:
                raise HandshakeFailed(f"no router answered at {self.address} in {waited:.0f} s")
            logger.warning("waiting for a router at %s, %.0f s so far", self.address, waited)
        try:
            return frames.decode_init(self._handshake.recv())
        except frames.Undecodable as error:
            raise HandshakeFailed(f"the router's answer at {self.address} is not understood: {error}") from error
