"""A client of the vLLM engine contract, with what tests ask of it most; client_sglang.py has the other contract's."""

from __future__ import annotations

import functools
import itertools
import time
import uuid
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc
from smg_grpc_proto.generated import common_pb2 as common

PROMPT = (5, 6, 7, 8)
TIMEOUT = 60.0

_REQUEST_FIELDS = {"kv_transfer_params_json", "kv_transfer_params", "data_parallel_rank", "media_refs", "mm_inputs"}
_numbers = itertools.count()


def new_id() -> str:
    return f"test-{uuid.uuid4().hex[:8]}-{next(_numbers)}"


def request(
    request_id: str | None = None,
    prompt: Sequence[int] | str = PROMPT,
    *,
    stream: bool = False,
    **fields: Any,
) -> pb.GenerateRequest:
    """A greedy request of 8 tokens; `fields` are SamplingParams' and, where it has them, the request's own.

    A field that is None is left out.
    """
    own = {name: fields.pop(name) for name in list(fields) if name in _REQUEST_FIELDS}
    fields = {"temperature": 0, "max_tokens": 8, "ignore_eos": True} | fields
    sampling = pb.SamplingParams(**{name: value for name, value in fields.items() if value is not None})
    message = pb.GenerateRequest(
        request_id=new_id() if request_id is None else request_id, sampling_params=sampling, stream=stream, **own
    )
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.tokenized.input_ids.extend(prompt)
    return message


class Client:
    """A blocking client on a channel of its own; `kind` and `worker` are what it was made for."""

    contract = "vllm"
    service = "vllm.grpc.engine.VllmEngine"
    pb: Any = pb
    stub_class: Any = pb_grpc.VllmEngineStub
    request = staticmethod(request)

    def __init__(self, address: str, kind: str = "", worker: Any = None) -> None:
        self.address, self.kind, self.worker = address, kind, worker
        self.channel = grpc.insecure_channel(address)
        self.stub = self.stub_class(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    @functools.cached_property
    def long(self) -> int:
        """The most tokens that a call on PROMPT can ask for: one that runs until somebody ends it."""
        return self.context - len(PROMPT)

    @functools.cached_property
    def context(self) -> int:
        """The tokens of prompt and output together."""
        return int(self.stub.GetModelInfo(self.pb.GetModelInfoRequest(), timeout=TIMEOUT).max_context_length)

    def start(self, *args: Any, timeout: float = TIMEOUT, **fields: Any) -> Any:
        """A call whose messages are read as they come."""
        return self.stub.Generate(self.request(*args, **fields), timeout=timeout)

    def generate(self, *args: Any, timeout: float = TIMEOUT, **fields: Any) -> list[Any]:
        """Every message of a call."""
        return list(self.start(*args, timeout=timeout, **fields))

    def complete(self, *args: Any, **fields: Any) -> Any:
        """The one complete of a call that does not stream."""
        (message,) = self.generate(*args, **fields)
        assert message.WhichOneof("response") == "complete"
        return message.complete

    def refused(self, *args: Any, **fields: Any) -> tuple[str, str]:
        """The status and the sentence of a call that must fail."""
        try:
            messages = self.generate(*args, **fields)
        except grpc.RpcError as error:
            return error.code().name, error.details()
        raise AssertionError(f"answered {messages}")

    def abort(self, *request_ids: str) -> None:
        self.stub.Abort(pb.AbortRequest(request_ids=request_ids), timeout=TIMEOUT)

    def active(self) -> int:
        return self.stub.GetServerInfo(self.pb.GetServerInfoRequest(), timeout=TIMEOUT).active_requests

    def running(self) -> int:
        """What the engine's scheduler holds."""
        answer = self.stub.GetLoads(self.pb.GetLoadsRequest(), timeout=TIMEOUT)
        return sum(load.num_total_reqs for load in answer.loads)

    def check_empty(self, timeout: float = 10.0) -> None:
        """Neither the worker nor its engine holds a call.

        An engine reports its statistics with its steps, so a short call asks for them anew.
        """
        deadline = time.monotonic() + timeout
        while self.active() or self.running():
            assert time.monotonic() < deadline, f"{self.active()} calls live, {self.running()} in the engine"
            self.generate(max_tokens=1)

    def flush(self, timeout_s: float = 0.0) -> common.FlushCacheResponse:
        return self.stub.FlushCache(common.FlushCacheRequest(timeout_s=timeout_s), timeout=TIMEOUT)


def chunks(messages: Sequence[Any], index: int = 0) -> list[Any]:
    """The chunks of one choice."""
    return [m.chunk for m in messages if m.WhichOneof("response") == "chunk" and m.chunk.index == index]


def completes(messages: Sequence[Any]) -> list[Any]:
    """The completes of a call, as they came."""
    return [m.complete for m in messages if m.WhichOneof("response") == "complete"]
