"""Facts, loads, cache, tokenizer and health, on every worker."""

from __future__ import annotations

import hashlib
import io
import time
import zipfile

import grpc
import pytest
from client import TIMEOUT, Client
from grpc_health.v1 import health_pb2
from smg_grpc_proto.generated import common_pb2 as common


def refused(call, message) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as error:
        call(message, timeout=TIMEOUT)
    return error.value.code(), error.value.details()


def test_the_engine_is_healthy_by_every_name(client: Client):
    answer = client.stub.HealthCheck(client.pb.HealthCheckRequest(), timeout=TIMEOUT)
    assert answer.healthy
    for service in ("", client.service):
        status = client.health.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT).status
        assert status == health_pb2.HealthCheckResponse.SERVING
    listed = client.health.List(health_pb2.HealthListRequest(), timeout=TIMEOUT).statuses
    assert set(listed) == {"", client.service}


def test_a_watch_stays_open(client: Client):
    call = client.health.Watch(health_pb2.HealthCheckRequest(service=client.service), timeout=1.0)
    assert next(call).status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as error:
        next(call)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_an_unknown_service_is_not_found_and_its_watch_says_so(client: Client):
    message = health_pb2.HealthCheckRequest(service="nobody.Knows")
    assert refused(client.health.Check, message)[0] is grpc.StatusCode.NOT_FOUND
    call = client.health.Watch(message, timeout=TIMEOUT)
    assert next(call).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    call.cancel()


def test_model_facts_are_complete(client: Client):
    info = client.stub.GetModelInfo(client.pb.GetModelInfoRequest(), timeout=TIMEOUT)
    assert info.model_path
    assert info.served_model_name
    assert info.tokenizer_path
    assert info.model_type
    assert info.is_generation
    assert not info.supports_vision
    assert info.vocab_size == 2048
    assert info.max_context_length >= info.max_req_input_len > 0
    assert len(info.architectures) == 1
    assert len(info.eos_token_ids) == 2, "the model config's and the generation config's"


def test_server_facts_are_complete(client: Client):
    info = client.stub.GetServerInfo(client.pb.GetServerInfoRequest(), timeout=TIMEOUT)
    client.complete()
    later = client.stub.GetServerInfo(client.pb.GetServerInfoRequest(), timeout=TIMEOUT)
    assert info.server_type in ("vllm-grpc", "fake-grpc", "grpc")
    assert later.uptime_seconds > info.uptime_seconds > 0
    assert time.time() - 60 < later.last_receive_timestamp <= time.time()
    assert not later.is_paused


@pytest.mark.contract("vllm")
def test_server_facts_name_what_runs(client: Client):
    info = client.stub.GetServerInfo(client.pb.GetServerInfoRequest(), timeout=TIMEOUT)
    assert info.data_parallel_size >= 1
    assert info.max_num_seqs > 0
    assert not info.mm_processor


@pytest.mark.contract("sglang")
def test_server_facts_hold_the_arguments_and_what_the_router_reads(client: Client):
    info = client.stub.GetServerInfo(client.pb.GetServerInfoRequest(), timeout=TIMEOUT)
    assert info.server_args["model_path"]
    assert info.server_args["max_running_requests"] > 0
    assert dict(info.scheduler_info)
    assert info.sglang_version
    assert info.max_total_num_tokens > 0
    assert abs(info.start_time.seconds + info.uptime_seconds - time.time()) < 60


def test_active_requests_are_counted(client: Client):
    before = client.active()
    call = client.start(stream=True, max_tokens=client.long)
    next(call)
    assert client.active() == before + 1
    call.cancel()


def test_loads_name_every_rank_and_can_be_asked_for_one(client: Client):
    client.complete()
    answer = client.stub.GetLoads(client.pb.GetLoadsRequest(), timeout=TIMEOUT)
    assert answer.timestamp
    assert answer.version
    assert answer.dp_rank_count == len(answer.loads) >= 1
    assert [load.dp_rank for load in answer.loads] == list(range(len(answer.loads)))
    first = answer.loads[0]
    assert first.max_total_num_tokens > 0
    assert first.max_running_requests > 0
    assert first.gen_throughput > 0
    one = client.stub.GetLoads(client.pb.GetLoadsRequest(dp_rank=0), timeout=TIMEOUT)
    assert [load.dp_rank for load in one.loads] == [0]
    assert refused(client.stub.GetLoads, client.pb.GetLoadsRequest(dp_rank=99))[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_a_running_call_shows_in_the_loads(client: Client):
    call = client.start(stream=True, max_tokens=client.long)
    for _ in range(3):
        next(call)
    load = client.stub.GetLoads(client.pb.GetLoadsRequest(), timeout=TIMEOUT).loads[0]
    assert load.num_running_reqs >= 1
    assert load.num_total_reqs == load.num_running_reqs + load.num_waiting_reqs
    call.cancel()


def test_the_cache_is_flushed_when_nothing_runs(client: Client):
    assert client.flush().success
    assert client.flush(timeout_s=10).success


@pytest.mark.parametrize("timeout", [-1.0, float("nan"), float("inf")])
def test_a_flush_timeout_is_a_number_of_seconds(client: Client, timeout: float):
    code, sentence = refused(client.stub.FlushCache, common.FlushCacheRequest(timeout_s=timeout))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "timeout_s" in sentence


def test_a_flush_with_calls_in_flight_is_refused_or_waits_for_them(client: Client):
    client.flush()
    call = client.start(prompt=[3] * 300, stream=True, max_tokens=150)
    next(call)
    answer = client.flush()
    assert not answer.success
    assert answer.message
    assert client.flush(timeout_s=30).success
    list(call)


@pytest.mark.contract("vllm")
def test_profile_options_are_refused(client: Client):
    code, sentence = refused(client.stub.StartProfile, common.StartProfileRequest(num_steps=3, with_stack=True))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "num_steps" in sentence
    assert "with_stack" in sentence


def test_kv_events_are_not_served_yet(client: Client):
    call = client.stub.SubscribeKvEvents(common.SubscribeKvEventsRequest(), timeout=TIMEOUT)
    with pytest.raises(grpc.RpcError) as error:
        next(call)
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_the_tokenizer_comes_as_an_archive_with_its_digest(client: Client, tiny):
    if client.kind.startswith("fake"):
        client.worker.engine.tokenizer = tiny("qwen3")
    parts = list(client.stub.GetTokenizer(common.GetTokenizerRequest(), timeout=TIMEOUT))
    archive = b"".join(part.data for part in parts)
    assert [bool(part.sha256) for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].sha256 == hashlib.sha256(archive).hexdigest()
    names = zipfile.ZipFile(io.BytesIO(archive)).namelist()
    assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= set(names)
    again = list(client.stub.GetTokenizer(common.GetTokenizerRequest(), timeout=TIMEOUT))
    assert again[-1].sha256 == parts[-1].sha256
