"""The front end of a headless vLLM (0.28 to 0.33) over ZMQ, which sends whatever a test has it send."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import zmq
from workers import START_SECS, VLLM_ARGUMENTS, VLLM_ENVIRONMENT, Process

IDENTITY = b"\0\0"  # of engine 0
ADD, ABORT = b"\0", b"\1"
ERROR = 3  # vLLM's FinishReason
PROMPT = (5, 6, 7, 8)
# EngineCoreRequest as an array, as the published Rust front end writes it for these releases.
FIELDS = (
    "request_id prompt_token_ids mm_features sampling_params pooling_params arrival_time lora_request cache_salt "
    "data_parallel_rank prompt_embeds prompt_is_token_ids client_index current_wave priority trace_headers resumable "
    "external_req_id reasoning_ended reasoning_parser_kwargs abort_immediately session_id"
).split()
_DEFAULTS = dict.fromkeys(FIELDS) | {
    "client_index": 0,
    "current_wave": 0,
    "priority": 0,
    "resumable": False,
    "abort_immediately": False,
}
_FINISH_REASON = 5  # in EngineCoreOutput
_numbers = itertools.count()


def new_id() -> str:
    return f"test-{next(_numbers)}"


def request(request_id: str, *, sampling: Any = None, **fields: Any) -> list[Any]:
    """A greedy request of 8 tokens; `sampling` changes its sampling parameters, `fields` the request's own."""
    params = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "stop_token_ids": []}
    values = {"prompt_token_ids": list(PROMPT), "sampling_params": params | (sampling or {}), "arrival_time": 1.0}
    return list((_DEFAULTS | values | {"request_id": request_id} | fields).values())


class Headless(Process):
    """`vllm serve MODEL --headless`, and the front end that it connects to."""

    def __init__(self, python: Path, model: Path, log: Path, *arguments: str, environment: Any = None) -> None:
        self.context = zmq.Context()
        self.handshake, self.inputs = self.context.socket(zmq.ROUTER), self.context.socket(zmq.ROUTER)
        self.outputs = self.context.socket(zmq.PULL)
        port = self.handshake.bind_to_random_port("tcp://127.0.0.1")
        self.addresses = {
            "inputs": [f"tcp://127.0.0.1:{self.inputs.bind_to_random_port('tcp://127.0.0.1')}"],
            "outputs": [f"tcp://127.0.0.1:{self.outputs.bind_to_random_port('tcp://127.0.0.1')}"],
        }
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, int] = {}
        command = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--headless"]
        command += ["--data-parallel-size", "1", "--data-parallel-size-local", "1"]
        command += ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(port)]
        super().__init__([*command, *VLLM_ARGUMENTS, *arguments], log, VLLM_ENVIRONMENT | (environment or {}))

    def connect(self) -> None:
        """Start it and go through the handshake, until it is ready for requests."""
        self.start()
        assert self._receive(self.handshake)["status"] == "HELLO"
        init = {"addresses": self.addresses, "parallel_config": {}}
        self.handshake.send_multipart([IDENTITY, msgpack.packb(init)])
        self.facts = self._receive(self.inputs)
        assert self._receive(self.handshake)["status"] == "READY"

    def close(self) -> None:
        self.stop()
        self.context.destroy(linger=0)

    def send(self, payload: Any, kind: bytes = ADD) -> None:
        """Hand a request to the engine core; bytes go as they are."""
        body = payload if isinstance(payload, bytes) else msgpack.packb(payload)
        self.inputs.send_multipart([IDENTITY, kind, body])

    def finish(self, *request_ids: str, timeout: float = 30.0) -> None:
        """Read outputs until these requests have ended."""
        deadline = time.monotonic() + timeout
        while not all(request_id in self.finished for request_id in request_ids):
            if not self.outputs.poll(max(0, 1000 * (deadline - time.monotonic()))):
                self.fail(f"no end of {[name for name in request_ids if name not in self.finished]}")
            frames = self.outputs.recv_multipart()
            if frames == [b"ENGINE_CORE_DEAD"]:
                self.fail("the engine core died")
            self._read(msgpack.unpackb(frames[0], strict_map_key=False))

    def ask(self, *requests: Sequence[Any]) -> None:
        """Send requests and wait for the end of each."""
        for asked in requests:
            self.send(asked)
        self.finish(*(asked[0] for asked in requests))

    def _read(self, outputs: Sequence[Any]) -> None:
        for request_id, token_ids, *rest in outputs[1] if len(outputs) > 1 else ():
            self.tokens.setdefault(request_id, []).extend(token_ids)
            reason = rest[_FINISH_REASON - 2] if len(rest) > _FINISH_REASON - 2 else None
            if reason is not None:
                assert request_id not in self.finished, f"{request_id} ended twice"
                self.finished[request_id] = reason

    def _receive(self, socket: Any) -> Any:
        deadline = time.monotonic() + START_SECS
        while not socket.poll(500):
            if not self.running() or time.monotonic() > deadline:
                self.fail("the engine core does not connect")
        identity, message = socket.recv_multipart()
        assert identity == IDENTITY
        return msgpack.unpackb(message)
