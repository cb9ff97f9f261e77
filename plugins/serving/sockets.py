"""Addresses of a worker that is served from Rust: its port, the engine's handshake, and its socket directory."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..hooks.settings import ConfigurationError, Settings
from .settings import SOCKET_DIRECTORY

_LONGEST_PATH = 107  # sun_path, without its NUL
_ENDS = ("-in.sock", "-out.sock")
_CONNECT_MILLISECONDS = 2000
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def join(host: str, port: int) -> str:
    """`host:port`, an IPv6 host in brackets."""
    host = host.strip("[]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def from_here(address: str) -> str:
    """Where a client on this machine finds a server that listens on `host:port`."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    return join(_LOOPBACK.get(host, host), int(port))


class Reservation:
    """A TCP port that is kept for whoever is to serve on it."""

    def __init__(self, host: str, port: int, name: str) -> None:
        """Take `port` (0: a free one); ConfigurationError, naming it as `name`, where that cannot be done."""
        self.host = host.strip("[]")
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                self.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._bind = partial(_bound, family, kind, protocol)
            self._socket = self._bind(address)
        except OSError as error:
            problem = f"{name}: cannot listen on {join(host, port)}: {error.strerror or error}"
            raise ConfigurationError([problem]) from error
        try:
            self._socket.listen(1)  # of two that bind with SO_REUSEADDR only one can
        except OSError as error:
            self._socket.close()
            raise ConfigurationError([f"{name}: cannot listen on {join(host, port)}: {error.strerror}"]) from error
        self.port: int = self._socket.getsockname()[1]

    @property
    def address(self) -> str:
        """`host:port`, an IPv6 host in brackets."""
        return join(self.host, self.port)

    def offer(self) -> None:
        """Let a server with SO_REUSEADDR bind the port, and still keep it from those who look for a free one."""
        address = self._socket.getsockname()
        self._socket.close()
        with contextlib.suppress(OSError):  # somebody was faster: the server will say so
            self._socket = self._bind(address)

    def release(self) -> None:
        """Free the port; safe to call twice."""
        self._socket.close()


def _bound(family: int, kind: int, protocol: int, address: Any) -> socket.socket:
    bound = socket.socket(family, kind, protocol)
    try:
        # As the server will: a port whose last connections still wait to be forgotten is free.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


@dataclass(frozen=True)
class Places:
    """What a worker that is served from Rust needs of this machine: two ports, and where its sockets begin."""

    port: Reservation
    handshake: Reservation
    base: Path


def reserve(host: str, port: int, handshake_name: str, settings: Settings) -> Places:
    """Take all of them; ConfigurationError has a line for each that cannot be had."""
    problems: list[str] = []

    def take(what: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return what(*arguments)
        except ConfigurationError as error:
            problems.extend(error.lines)

    places = Places(
        port=take(Reservation, host, port, "--host/--port"),
        handshake=take(Reservation, "127.0.0.1", settings["handshake_port"], handshake_name),
        base=take(socket_base, settings),
    )
    if problems:
        raise ConfigurationError(problems)
    return places


def socket_base(settings: Settings) -> Path:
    """Where this process's sockets begin, in a directory that only this user can enter.

    Makes the directory (mode 0700). ConfigurationError names one that is somebody else's, open to others,
    not writable, or too long for a socket's address.
    """
    given = settings["socket_directory"]
    directory = Path(given) if given else Path(f"/tmp/smg-zmq-{os.getuid()}")
    label = SOCKET_DIRECTORY.label()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise ConfigurationError([f"{label}: {str(directory)!r} cannot be made: {error.strerror}"]) from error
    mode = stat.S_IMODE(status.st_mode)
    problem = None
    if not stat.S_ISDIR(status.st_mode):
        problem = "is not a directory"
    elif status.st_uid != os.getuid():
        problem = f"belongs to uid {status.st_uid}, not to this process's {os.getuid()}"
    elif mode & 0o077:
        problem = f"is open to others (mode {mode:04o})"
    elif not os.access(directory, os.W_OK | os.X_OK):
        problem = "is not writable"
    base = directory.absolute() / f"servicer-{os.getpid()}"
    if problem is None and len(os.fsencode(str(base))) + len(max(_ENDS, key=len)) > _LONGEST_PATH:
        problem = f"is too long for a socket's address ({_LONGEST_PATH} bytes)"
    if problem is not None:
        raise ConfigurationError([f"{label}: {str(directory)!r} {problem}; expected {SOCKET_DIRECTORY.accepted}"])
    return base


def socket_files(base: Path) -> Iterator[Path]:
    """The sockets that a Rust server makes under a base: requests to the engine, outputs from it."""
    for end in _ENDS:
        yield base.with_name(base.name + end)


def remove_sockets(base: Path) -> None:
    """Remove what a server that ended has left; never raises."""
    for file in socket_files(base):
        with contextlib.suppress(OSError):
            file.unlink()


def stand_in(base: Path, engines: Iterable[int]) -> Callable[[], None]:
    """Take the place of engines that died, by their indices, at a server's requests; returns what leaves it. Blocking.

    Raises TimeoutError when the server does not take it.
    A server whose write to an engine fails ends every call as INTERNAL, and to end a call it writes to its engine.
    """
    import zmq

    requests, _ = socket_files(base)
    context = zmq.Context()
    places: list[Any] = []  # pyzmq closes a socket that nobody holds

    def leave() -> None:
        context.destroy(0)
        places.clear()

    for index in engines:
        place = context.socket(zmq.DEALER)
        places.append(place)
        place.setsockopt(zmq.IDENTITY, index.to_bytes(2, "little"))
        connected = place.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        place.connect(f"ipc://{requests}")
        taken = connected.poll(_CONNECT_MILLISECONDS)
        place.disable_monitor()
        if not taken:
            leave()
            raise TimeoutError(f"no connection to {requests} within {_CONNECT_MILLISECONDS} ms")
    return leave
