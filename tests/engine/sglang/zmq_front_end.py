"""The front end of a headless SGLang (0.5.20 to 0.5.23) over ZMQ, which sends whatever a test has it send."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack
import zmq
from sglang_wire import COLUMNS, SAMPLING, generate
from workers import SGLANG_ARGUMENTS, SGLANG_ENVIRONMENT, START_SECS, Process, descendants, free_port

IDENTITY = b"\0\0"  # of engine 0
ADD, ABORT, CONTROL = b"\0", b"\1", b"\2"
_REPLY_SECS = 30.0
_numbers = itertools.count()


def new_id() -> str:
    return f"test-{next(_numbers)}"


def sampling(**values: Any) -> list[Any]:
    """Sampling as smg 1.13.0 writes it: greedy, 8 tokens that nothing ends early; `values` change it by name."""
    chosen = SAMPLING | {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True, "min_new_tokens": 0}
    return [*(chosen | values).values(), None, None, 0, 0, False, False]


class End:
    """How a request ended."""

    def __init__(self, reason: str, message: str | None, status: int | None, matched: Any) -> None:
        self.reason, self.message, self.status, self.matched = reason, message, status, matched

    def __repr__(self) -> str:
        return f"{self.reason} {self.status} {self.message!r}"


class SglangHeadless(Process):
    """`python -m smg_grpc_servicer.sglang.headless`, and the front end that it connects to.

    Keeps the tokens and the ends of every request, what control calls were answered, and the rows of all columns.
    """

    def __init__(
        self, python: Path, model: Path, log: Path, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.context = zmq.Context()
        self.handshake, self.inputs = self.context.socket(zmq.ROUTER), self.context.socket(zmq.ROUTER)
        self.outputs = self.context.socket(zmq.PULL)
        port = self.handshake.bind_to_random_port("tcp://127.0.0.1")
        self.addresses = {
            "inputs": [f"tcp://127.0.0.1:{self.inputs.bind_to_random_port('tcp://127.0.0.1')}"],
            "outputs": [f"tcp://127.0.0.1:{self.outputs.bind_to_random_port('tcp://127.0.0.1')}"],
        }
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, list[End]] = {}
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.replies: dict[int, tuple[bool, str | None]] = {}
        self.load: tuple[int, ...] = ()
        self.facts: dict[str, Any] = {}
        self.dead = False
        command = [str(python), "-m", "smg_grpc_servicer.sglang.headless", "--zmq-engine-index", "0"]
        command += ["--zmq-handshake-address", f"tcp://127.0.0.1:{port}", "--model-path", str(model)]
        command += ["--port", str(free_port()), "--sleep-on-idle"]
        everything = dict(SGLANG_ENVIRONMENT) | dict(environment or {})
        super().__init__([*command, *SGLANG_ARGUMENTS, *arguments], log, everything)

    def connect(self) -> None:
        """Start it and go through the handshake, until it is ready for requests."""
        self.start()
        assert self._receive(self.handshake)["status"] == "HELLO"
        self.handshake.send_multipart([IDENTITY, msgpack.packb({"addresses": self.addresses, "parallel_config": {}})])
        assert self._receive(self.handshake)["status"] == "READY"
        self.facts = self._receive(self.inputs)

    def close(self) -> None:
        self.stop()
        self.context.destroy(linger=0)

    def send(self, payload: Any, kind: bytes = ADD, *more: bytes) -> None:
        """Hand a frame to the scheduler; bytes go as they are."""
        body = payload if isinstance(payload, bytes) else msgpack.packb(payload)
        self.inputs.send_multipart([IDENTITY, kind, body, *more])

    def add(self, rid: str, prompt: list[int] | None = None, more: tuple[Any, ...] = (), **fields: Any) -> str:
        """Send a generation; `fields` are slots of the request, or of its sampling."""
        own = {name: fields.pop(name) for name in list(fields) if name in SAMPLING}
        values = {"rid": rid, "input_ids": prompt or [5, 6, 7, 8], "sampling_params": sampling(**own)}
        self.send(generate(more=more, **values | fields))
        return rid

    def call(self, method: str, *arguments: Any) -> tuple[bool, str | None]:
        """Make a control call and return its reply."""
        call_id = next(_numbers)
        self.send([call_id, method, list(arguments)], CONTROL)
        self.read(lambda: call_id in self.replies, f"no reply to {method}")
        return self.replies[call_id]

    def finish(self, *rids: str) -> list[End]:
        """Read outputs until these requests have ended, once each; returns how."""
        self.read(lambda: all(rid in self.ends for rid in rids), f"no end of {[r for r in rids if r not in self.ends]}")
        return [self.ends[rid][-1] for rid in rids]

    def refused(self, rid: str) -> str:
        """The reason that a request was refused for."""
        (end,) = self.finish(rid)
        assert (end.reason, end.status) == ("abort", 400), end
        return end.message or ""

    def read(self, until: Any, what: str, seconds: float = _REPLY_SECS) -> None:
        """Take outputs in until a condition holds."""
        deadline = time.monotonic() + seconds
        while not until():
            if self.dead:
                self.fail("the scheduler died")
            if not self.outputs.poll(max(0, 1000 * (deadline - time.monotonic()))):
                self.fail(what)
            self._take(self.outputs.recv_multipart())

    def _take(self, received: list[bytes]) -> None:
        (frame,) = received
        if frame == b"ENGINE_CORE_DEAD":
            self.dead = True
            return
        tag, *columns = msgpack.unpackb(frame, strict_map_key=False)
        if tag == "ControlReplySlim":
            self.replies[columns[0]] = (columns[1], columns[2])
        elif tag == "BatchEmbeddingSlimOutput":
            self.load = tuple(columns[8:12])
            for rid, embedding, *_, reason, message, status in zip(*columns[:7], strict=True):
                self.rows.setdefault(rid, []).append({"embedding": embedding})
                self._end(rid, End(reason, message, status, None))
        else:
            assert tag == "BatchTokenIDSlimOutput"
            self._take_tokens(dict(zip(COLUMNS, columns, strict=True)))

    def _take_tokens(self, columns: dict[str, Any]) -> None:
        names = ("num_running", "num_waiting", "kv_used_tokens", "kv_total_tokens")
        self.load = tuple(columns[name] for name in names)
        count = len(columns["rids"])
        lists = {name: values for name, values in columns.items() if isinstance(values, list)}
        assert {len(values) for values in lists.values()} == {count}, lists
        for index, rid in enumerate(columns["rids"]):
            row = {name: values[index] for name, values in lists.items()}
            self.rows.setdefault(rid, []).append(row)
            self.tokens.setdefault(rid, []).extend(row["output_ids"])
            if row["finished_reasons"]:
                matched, status = row["finished_matched"], row["finished_status"]
                self._end(rid, End(row["finished_reasons"], row["finished_messages"], status, matched))

    def _end(self, rid: str, end: End) -> None:
        self.ends.setdefault(rid, []).append(end)

    def _receive(self, socket: Any) -> Any:
        deadline = time.monotonic() + START_SECS
        while not socket.poll(500):
            if not self.running() or time.monotonic() > deadline:
                self.fail("the scheduler does not connect")
        identity, message = socket.recv_multipart()
        assert identity == IDENTITY
        return msgpack.unpackb(message)


# smg 1.13.0 reads the number of workers where SGLang's parser, which it takes over, does not put it: without this,
# `smg serve --backend sglang` ends with an AttributeError in every mode.
_SERVE = """
import sys
from smg import serve
parse = serve.parse_serve_args
def parse_serve_args(argv=None):
    backend, args, rest = parse(argv)
    args.data_parallel_size = getattr(args, "data_parallel_size", args.dp_size)
    return backend, args, rest
serve.parse_serve_args = parse_serve_args
serve.serve_main(sys.argv[1:])
"""


class SglangServe(Process):
    """`smg serve --backend sglang --connection-mode zmq` of the published router, and what it starts."""

    def __init__(
        self, python: Path, model: Path, log: Path, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [str(python), "-c", _SERVE, "--backend", "sglang", "--connection-mode", "zmq"]
        command += ["--model-path", str(model), "--router-model-path", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--worker-base-port", str(free_port())]
        command += ["--router-prometheus-port", str(free_port()), "--sleep-on-idle"]
        everything = dict(SGLANG_ENVIRONMENT) | dict(environment or {})
        super().__init__([*command, *SGLANG_ARGUMENTS, *arguments], log, everything)

    def stop(self) -> None:
        below = descendants(self.pid) if self.process is not None else []
        super().stop()
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
