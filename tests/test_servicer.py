"""The core's rules that need a fault or a moment which no real engine can be asked for."""

from __future__ import annotations

import asyncio
import contextlib
import json

import grpc
import pytest
from client import PROMPT, completes, request
from fake_engine import FakeEngine
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc
from smg_grpc_proto.generated import common_pb2 as common

from smg_grpc_servicer.serving.errors import Unavailable
from smg_grpc_servicer.serving.health import Health, State
from smg_grpc_servicer.serving.server import server_options
from smg_grpc_servicer.serving.servicer import Servicer
from smg_grpc_servicer.wire.calls import Finish, FinishReason
from smg_grpc_servicer.wire.contracts.vllm import VllmContract

DECODE = json.dumps({"do_remote_prefill": True, "remote_block_ids": [1, 2], "remote_engine_id": "p"})


class Worker:
    """A servicer over a fake engine with a client, on this test's loop."""

    def __init__(self, engine: FakeEngine, max_message_bytes: int = -1, **hooks) -> None:
        self.engine = engine
        contract = VllmContract()
        self.health = Health([contract.service])
        self.servicer = Servicer(contract, self.health, **hooks)
        self.server = grpc.aio.server(options=server_options(max_message_bytes))
        contract.register(self.servicer, self.server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")

    async def __aenter__(self):
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}")
        self.stub = pb_grpc.VllmEngineStub(self.channel)
        self.health_stub = health_pb2_grpc.HealthStub(self.channel)
        return self

    def serve(self):
        self.servicer.serve(self.engine)
        return self

    async def __aexit__(self, *_):
        await self.channel.close()
        await self.server.stop(0)
        await self.servicer.close()

    async def generate(self, *args, **fields):
        return [message async for message in self.stub.Generate(request(*args, **fields), timeout=20)]

    async def refused(self, *args, **fields) -> tuple[str, str]:
        with pytest.raises(grpc.RpcError) as error:
            await self.generate(*args, **fields)
        return error.value.code().name, error.value.details()


@pytest.fixture
async def worker():
    async with Worker(FakeEngine()) as worker:
        yield worker.serve()


async def test_before_the_engine_is_ready_everything_but_health_is_unavailable():
    async with Worker(FakeEngine()) as worker:
        assert await worker.refused() == ("UNAVAILABLE", "the engine is starting")
        with pytest.raises(grpc.RpcError) as error:
            await worker.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        answer = await worker.stub.HealthCheck(pb.HealthCheckRequest())
        assert (answer.healthy, answer.message) == (False, "the engine is starting")
        status = await worker.health_stub.Check(health_pb2.HealthCheckRequest())
        assert status.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_watch_tells_every_change_of_a_workers_life():
    async with Worker(FakeEngine()) as worker:
        watch = worker.health_stub.Watch(health_pb2.HealthCheckRequest())
        seen = [(await watch.read()).status]
        worker.serve()
        seen.append((await watch.read()).status)
        worker.servicer.drain()
        seen.append((await watch.read()).status)
        worker.health.close()
        assert await watch.read() is grpc.aio.EOF
        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        assert seen == [not_serving, serving, not_serving]


async def test_the_engines_death_ends_every_call_and_is_told(worker: Worker):
    worker.engine.pause()
    calls = [asyncio.create_task(worker.refused(stream=i % 2 == 0)) for i in range(6)]
    await worker.engine.until(lambda: len(worker.engine.held) == 6)
    worker.engine.die()
    assert {(await call)[0] for call in calls} == {"UNAVAILABLE"}
    assert (await worker.refused())[0] == "UNAVAILABLE"
    assert worker.servicer.dead.is_set()
    status = await worker.health_stub.Check(health_pb2.HealthCheckRequest())
    assert status.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_draining_worker_refuses_new_calls_and_finishes_live_ones(worker: Worker):
    worker.engine.pause()
    call = asyncio.create_task(worker.generate(stream=True))
    await worker.engine.until(lambda: worker.engine.held)
    worker.servicer.drain()
    assert await worker.refused() == ("UNAVAILABLE", "the worker is shutting down")
    worker.engine.resume()
    assert completes(await call)[0].completion_tokens == 8
    await asyncio.wait_for(worker.servicer.table.idle(), 5)


async def test_calls_that_outlive_the_drain_end_in_the_engine_too(worker: Worker):
    worker.engine.pause()
    call = asyncio.create_task(worker.refused())
    await worker.engine.until(lambda: worker.engine.held)
    worker.servicer.end_calls(Unavailable("too late"))
    assert await call == ("UNAVAILABLE", "too late")
    await worker.engine.until(lambda: not worker.engine.held)


async def test_an_engine_error_of_one_call_is_that_calls_alone(worker: Worker):
    worker.engine.fail_at["bad"] = Finish(FinishReason.ERROR, message="the KV load failed")
    worker.engine.fail_at["again"] = Finish(FinishReason.ERROR, message="try again", retryable=True)
    good = asyncio.create_task(worker.generate(stream=True))
    assert await worker.refused("bad") == ("INTERNAL", "the KV load failed")
    assert await worker.refused("again", stream=True) == ("UNAVAILABLE", "try again")
    assert completes(await good)[0].completion_tokens == 8


async def test_one_choice_that_fails_ends_its_siblings_in_the_engine(worker: Worker):
    worker.engine.pause()
    call = asyncio.create_task(worker.refused("bad", n=3, temperature=1))
    await worker.engine.until(lambda: len(worker.engine.held) == 3)
    key = next(iter(worker.engine.held))
    worker.engine.held[key].wanted = 1
    worker.engine.fail_at["bad"] = Finish(FinishReason.ERROR, message="broken")
    worker.engine.resume()
    assert await call == ("INTERNAL", "broken")
    await worker.engine.until(lambda: not worker.engine.held)


async def test_what_submit_raises_is_answered_without_a_traceback(worker: Worker):
    worker.engine.submit_error = RuntimeError("some internals")
    assert await worker.refused() == ("INTERNAL", "some internals")
    worker.engine.submit_error = None
    assert len(await worker.generate()) == 1


async def test_a_refused_call_never_reaches_the_engine(worker: Worker):
    for fields in ({"temperature": 9}, {"prompt": [99999]}, {"n": 10**6}, {"stop_token_ids": [5000]}):
        await worker.refused(**fields)
    assert not worker.engine.submitted


async def test_keys_are_ours_unique_and_free_of_each_others_prefixes(worker: Worker):
    for request_id in ("a", "ab", "a"):
        await worker.generate(request_id, n=2, temperature=1)
    keys = [key for _, keys in worker.engine.submitted for key in keys]
    assert len(set(keys)) == 6
    assert len({len(key) for key in keys}) == 1
    assert not any("ab" in key.split("-")[2:] for key in keys)


@pytest.mark.parametrize("fields", [{"temperature": 9}, {"prompt": [99999]}, {"mm_inputs": pb.MultimodalInputs()}])
async def test_a_refused_decode_call_tells_the_connector_once_with_its_rank(worker: Worker, fields):
    await worker.refused(kv_transfer_params_json=DECODE, data_parallel_rank=1, **fields)
    await worker.engine.until(lambda: worker.engine.released)
    assert worker.engine.released == [(json.loads(DECODE), 1)]


async def test_a_decode_call_that_a_draining_worker_refuses_tells_the_connector(worker: Worker):
    worker.servicer.drain()
    await worker.refused(kv_transfer_params_json=DECODE)
    await worker.engine.until(lambda: worker.engine.released)
    assert worker.engine.released == [(json.loads(DECODE), None)]


async def test_a_decode_call_cancelled_before_admission_tells_the_connector_once():
    engine = FakeEngine()
    reached = asyncio.Event()

    async def tokenize(text, keep):
        reached.set()
        await asyncio.Event().wait()

    engine.tokenize = tokenize
    async with Worker(engine) as worker:
        worker.serve()
        call = worker.stub.Generate(request(prompt="hello", kv_transfer_params_json=DECODE))
        reading = asyncio.create_task(call.read())
        await reached.wait()
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        await engine.until(lambda: engine.released)
        assert engine.released == [(json.loads(DECODE), None)]
        assert not engine.submitted


async def test_an_admitted_decode_call_or_a_duplicate_tells_the_connector_nothing(worker: Worker):
    worker.engine.pause()
    call = asyncio.create_task(worker.generate("same", kv_transfer_params_json=DECODE))
    await worker.engine.until(lambda: worker.engine.held)
    assert (await worker.refused("same", kv_transfer_params_json=DECODE))[0] == "ALREADY_EXISTS"
    worker.engine.resume()
    (message,) = await call
    assert json.loads(message.complete.kv_transfer_params_json) == json.loads(DECODE)
    assert not worker.engine.released


async def test_handoff_numbers_that_json_cannot_write_become_null(worker: Worker):
    worker.engine.pause()
    call = asyncio.create_task(worker.generate(kv_transfer_params_json='{"a": 1}'))
    await worker.engine.until(lambda: worker.engine.held)
    (held,) = worker.engine.held.values()
    held.call.kv_transfer = {"a": float("nan"), "remote_host": "h", "remote_port": 7}
    worker.engine.resume()
    (message,) = await call
    assert json.loads(message.complete.kv_transfer_params_json) == {"a": None, "remote_host": "h", "remote_port": 7}
    assert message.complete.kv_transfer_params == pb.KvTransferParams(remote_host="h", remote_port=7)


async def test_an_abort_while_the_prompt_is_tokenized_submits_nothing():
    engine = FakeEngine()
    reached, go = asyncio.Event(), asyncio.Event()

    async def tokenize(text, keep):
        reached.set()
        await go.wait()
        return [1, 2, 3]

    engine.tokenize = tokenize
    async with Worker(engine) as worker:
        worker.serve()
        call = asyncio.create_task(worker.generate("early", prompt="text"))
        await reached.wait()
        await worker.stub.Abort(pb.AbortRequest(request_ids=["early"]))
        go.set()
        assert completes(await call)[0].finish_reason == "abort"
        assert not engine.submitted


async def test_a_consumer_that_lags_gets_its_steps_merged(worker: Worker):
    call = worker.stub.Generate(request(stream=True, max_tokens=300))
    worker.engine.pause()
    reader = asyncio.create_task(call.read())
    await worker.engine.until(lambda: worker.engine.held)
    # Steps that arrive before the consumer looks again are one chunk.
    for _ in range(5):
        worker.servicer.table.feed(worker.engine.step())
    first = await reader
    assert len(first.chunk.token_ids) == 5
    call.cancel()


async def test_flush_retries_until_the_engine_is_idle_or_time_is_up(worker: Worker):
    worker.engine.flushes = [False, False, True]
    assert (await worker.stub.FlushCache(common.FlushCacheRequest(timeout_s=5))).success
    worker.engine.flushes = [False] * 100
    assert not (await worker.stub.FlushCache(common.FlushCacheRequest(timeout_s=0.3))).success
    worker.engine.flushes = [False, True]
    assert not (await worker.stub.FlushCache(common.FlushCacheRequest())).success


async def test_an_engine_that_does_not_answer_a_flush_is_a_deadline():
    engine = FakeEngine()

    async def flush_cache():
        await asyncio.Event().wait()

    engine.flush_cache = flush_cache
    async with Worker(engine) as worker:
        worker.serve()
        with pytest.raises(grpc.RpcError) as error:
            await worker.stub.FlushCache(common.FlushCacheRequest(timeout_s=0.2))
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "0.2" in error.value.details()


async def test_profiling_starts_and_stops(worker: Worker):
    assert (await worker.stub.StartProfile(common.StartProfileRequest())).success
    assert worker.engine.profiling
    assert (await worker.stub.StopProfile(common.StopProfileRequest())).success
    assert not worker.engine.profiling


async def test_an_embedding_comes_back_and_its_failures_are_statuses(worker: Worker):
    message = pb.EmbedRequest(request_id="e", tokenized=pb.TokenizedInput(input_ids=PROMPT))
    answer = await worker.stub.Embed(message)
    assert (list(answer.embedding), answer.prompt_tokens, answer.embedding_dim) == ([5, 6, 7, 8], 4, 4)
    ends = {
        "ABORTED": Finish(FinishReason.ABORT),
        "INTERNAL": Finish(FinishReason.ERROR, message="broken"),
        "UNAVAILABLE": Finish(FinishReason.ERROR, message="again", retryable=True),
    }
    for code, finish in ends.items():
        worker.engine.fail_at["e"] = finish
        with pytest.raises(grpc.RpcError) as error:
            await worker.stub.Embed(message)
        assert error.value.code().name == code
    for bad in (pb.EmbedRequest(request_id="e"), pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=[1]))):
        with pytest.raises(grpc.RpcError) as error:
            await worker.stub.Embed(bad)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("empty_directory", [True, False])
async def test_no_tokenizer_is_a_failed_precondition(worker: Worker, tmp_path, empty_directory: bool):
    worker.engine.tokenizer = tmp_path if empty_directory else None
    with pytest.raises(grpc.RpcError) as error:
        [part async for part in worker.stub.GetTokenizer(common.GetTokenizerRequest())]
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_plugin_may_alter_or_refuse_a_call_and_hears_of_its_end():
    ended = []

    def admit(call, peer):
        if call.request_id == "no":
            raise PermissionError("not for you")
        if call.request_id == "bad":
            raise ValueError("odd")
        call.token_ids = [*call.token_ids, 9]
        return call

    def finished(call, usage, status):
        ended.append((call.request_id, usage.prompt_tokens, usage.completion_tokens, status))

    async with Worker(FakeEngine(), admit=admit, finished=finished) as worker:
        worker.serve()
        await worker.generate("yes")
        assert await worker.refused("no") == ("PERMISSION_DENIED", "not for you")
        assert await worker.refused("bad") == ("INVALID_ARGUMENT", "odd")
        assert await worker.refused("long", max_tokens=509) is not None
    assert ended[0] == ("yes", 5, 8, "OK")
    assert ended[1][0] == "long"
    assert ended[1][3] == "INVALID_ARGUMENT"


async def test_a_message_over_the_ceiling_is_refused_and_one_under_it_served():
    async with Worker(FakeEngine(), max_message_bytes=1000) as worker:
        worker.serve()
        assert (await worker.refused(prompt=[1000] * 600))[0] == "RESOURCE_EXHAUSTED"
        assert (await worker.refused(prompt=[1000] * 10, max_tokens=5, logprobs=100))[0] == "RESOURCE_EXHAUSTED"
        assert completes(await worker.generate())[0].completion_tokens == 8


async def test_state_does_not_go_back():
    health = Health(["s"])
    health.set(State.SERVING)
    health.set(State.DRAINING)
    health.set(State.SERVING)
    assert health.state is State.DRAINING
    health.set(State.DEAD)
    health.set(State.SERVING)
    assert health.state is State.DEAD
