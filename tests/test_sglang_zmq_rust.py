"""What we send is read by the Rust server of the published smg wheel; a stand-in is the scheduler behind it."""

from __future__ import annotations

import contextlib
import threading
import time
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from sglang_wire import FlushCacheReqOutput, tokens
from smg.servicer import SglangGrpcServer
from smg_grpc_proto import sglang_scheduler_pb2 as pb
from smg_grpc_proto import sglang_scheduler_pb2_grpc as pb_grpc
from smg_grpc_proto.generated import common_pb2 as common
from workers import free_port

from smg_grpc_servicer.sglang.zmq_outbox import Outbox
from smg_grpc_servicer.sglang.zmq_requests import Requests
from smg_grpc_servicer.sglang.zmq_sockets import HandshakeFailed, Wire
from smg_grpc_servicer.wire import sglang_frames as frames

_READY_SECS = 20
_TIMEOUT = 10
READY = frames.Ready(
    max_model_len=4096, num_gpu_blocks=100, block_size=1, dtype="bfloat16", vllm_version="sglang-0.5.23", world_size=1,
    data_parallel_size=1, data_parallel_rank=0, tensor_parallel_size=1, pipeline_parallel_size=1, max_num_seqs=8,
    max_num_batched_tokens=0, kv_cache_size_tokens=100,
)  # fmt: skip


class Scheduler:
    """Gives each request its own tokens back, one a step, between our inbox's decoder and our outbox."""

    def __init__(self, address: str) -> None:
        self.wire, self.outbox = Wire(address, 0, _READY_SECS), Outbox(Requests())
        self.load = SimpleNamespace(
            num_running_reqs=1, num_waiting_reqs=0, num_used_tokens=9, max_total_num_tokens=100
        )  # fmt: skip
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        self.wire.connect(READY)
        self.outbox.open(self.wire, lambda: self.load, generates=True)
        while not self.stopped.is_set():
            if self.wire.inputs.poll(20):
                received = self.wire.receive()
                assert received is not None
                self.take(frames.decode(received))
            self.outbox.settle()
        self.wire.close()

    def take(self, message: Any) -> None:
        if isinstance(message, frames.Control):
            self.outbox.expect("control", message.call_id)
            self.outbox.send_output(FlushCacheReqOutput(success=True), SimpleNamespace(rid="control"))
        elif isinstance(message, frames.GenerateFields):
            if message.input_ids[0] == 13:
                self.outbox.refuse(message.rid, "input_ids: no", 400)
                return
            key = self.outbox.requests.add(message.rid)
            for count, token in enumerate(message.input_ids, 1):
                last = count == len(message.input_ids)
                columns = {"output_ids": [array("q", [token])], "completion_tokens": [count]}
                columns["finished_reasons"] = [{"type": "length", "length": count} if last else None]
                self.outbox.send_output(tokens([key], **columns))


@pytest.fixture
def scheduler(tmp_path_factory) -> Iterator[tuple[Scheduler, pb_grpc.SglangSchedulerStub]]:
    folder, port, handshake = tmp_path_factory.mktemp("ipc"), free_port(), f"tcp://127.0.0.1:{free_port()}"
    server = SglangGrpcServer(f"127.0.0.1:{port}", f"ipc://{folder}/engine", handshake, "model", vocab_size=2048)
    made = Scheduler(handshake)
    made.thread.start()
    try:
        deadline = time.monotonic() + _READY_SECS
        while not server.engine_ready:
            assert time.monotonic() < deadline, server.last_error
            made.stopped.wait(0.02)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield made, pb_grpc.SglangSchedulerStub(channel)
    finally:
        made.stopped.set()
        made.thread.join(_TIMEOUT)
        server.stop()


def generate(stub: pb_grpc.SglangSchedulerStub, *token_ids: int, rid: str = "a") -> list[Any]:
    request = pb.GenerateRequest(request_id=rid, stream=True)
    request.tokenized.input_ids.extend(token_ids)
    return list(stub.Generate(request, timeout=_TIMEOUT))


def test_the_rust_server_streams_what_a_scheduler_sends(scheduler):
    _, stub = scheduler
    for _ in range(3):  # the id is free again each time
        *chunks, last = generate(stub, 5, 6, 7)
        assert [token for chunk in chunks for token in chunk.chunk.token_ids] == [5, 6, 7]
        assert list(last.complete.output_ids) == [5, 6, 7]
        assert last.complete.finish_reason == "length"


def test_a_refusal_is_a_status_with_its_reason(scheduler):
    _, stub = scheduler
    with pytest.raises(grpc.RpcError) as error:
        generate(stub, 13)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "input_ids: no" in error.value.details()


def test_a_control_call_is_answered(scheduler):
    _, stub = scheduler
    assert stub.FlushCache(common.FlushCacheRequest(), timeout=_TIMEOUT).success is True


def test_an_idle_schedulers_load_is_told(scheduler):
    made, stub = scheduler

    def used() -> int:
        (load,) = stub.GetLoads(pb.GetLoadsRequest(), timeout=_TIMEOUT).loads
        return load.num_used_tokens

    generate(stub, 5)
    assert used() == 9
    made.load.num_running_reqs, made.load.num_used_tokens = 0, 4
    deadline = time.monotonic() + _TIMEOUT
    while used() != 4:
        assert time.monotonic() < deadline
    assert generate(stub, 5)


def test_a_scheduler_that_ends_says_so(scheduler):
    made, stub = scheduler
    made.stopped.set()
    made.thread.join(_TIMEOUT)
    deadline = time.monotonic() + _TIMEOUT
    while stub.HealthCheck(pb.HealthCheckRequest(), timeout=_TIMEOUT).healthy:
        assert time.monotonic() < deadline


def test_a_router_that_does_not_answer_is_a_sentence():
    wire = Wire(f"tcp://127.0.0.1:{free_port()}", 0, 0.2)
    with contextlib.closing(wire), pytest.raises(HandshakeFailed, match="no router answered at tcp://"):
        wire.connect(READY)
