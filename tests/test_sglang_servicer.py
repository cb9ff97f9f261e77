"""The core behind the SGLang contract: what its RPCs say beyond the conformance suite's calls."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from client import PROMPT, TIMEOUT, chunks, completes
from client_sglang import SglangClient, pb
from fake_engine import next_token
from smg_grpc_proto.generated import common_pb2 as common

from smg_grpc_servicer.serving.errors import EngineDead
from smg_grpc_servicer.wire.calls import (
    DisaggregationLoad,
    EngineLoad,
    Finish,
    FinishReason,
    LoadSections,
    LoraLoad,
    MemoryLoad,
    ProfileOptions,
    QueueLoad,
    SpeculativeLoad,
)


@pytest.fixture
def client(sglang) -> Iterator[SglangClient]:
    with SglangClient(sglang.address, worker=sglang) as client:
        yield client


def refused(call, message) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as error:
        call(message, timeout=TIMEOUT)
    return error.value.code().name, error.value.details()


# Calls


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "INVALID_ARGUMENT"),
        (404, "NOT_FOUND"),
        (408, "DEADLINE_EXCEEDED"),
        (429, "RESOURCE_EXHAUSTED"),
        (500, "INTERNAL"),
        (503, "UNAVAILABLE"),
        (504, "DEADLINE_EXCEEDED"),
        (507, "INTERNAL"),
    ],
)
def test_an_abort_with_a_status_is_that_status(client: SglangClient, status: int, code: str, stream: bool):
    client.worker.engine.fail_at["a"] = Finish(FinishReason.ABORT, status=status, message="the queue is full")
    assert client.refused("a", stream=stream) == (code, "the queue is full")


def test_an_abort_without_a_status_ends_the_choice(client: SglangClient):
    client.worker.engine.fail_at["a"] = Finish(FinishReason.ABORT, message="by the operator")
    complete = client.complete("a")
    assert (complete.finish_reason, complete.completion_tokens) == ("abort", 1)


def test_a_constraint_that_the_engine_broke_is_told_in_a_trailer(client: SglangClient):
    client.worker.engine.fail_at["a"] = Finish(FinishReason.ABORT, status=500, message="no", constraint_failed=True)
    with pytest.raises(grpc.RpcError) as error:
        client.generate("a", stream=True)
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert ("smg-constraint-failed", "engine") in error.value.trailing_metadata()
    client.worker.engine.fail_at["b"] = Finish(FinishReason.ABORT, status=500, message="no")
    with pytest.raises(grpc.RpcError) as error:
        client.generate("b", stream=True)
    assert not error.value.trailing_metadata()


@pytest.mark.parametrize("stream", [False, True])
def test_every_message_names_its_request_and_choice(client: SglangClient, stream: bool):
    messages = client.generate("mine", n=3, temperature=1.0, stream=stream)
    assert {message.request_id for message in messages} == {"mine"}
    for index in range(3):
        tokens = [next_token(PROMPT, index, position) for position in range(8)]
        (complete,) = (c for c in completes(messages) if c.index == index)
        assert list(complete.output_ids) == tokens
        if stream:
            assert [t for part in chunks(messages, index) for t in part.token_ids] == tokens


def test_reasoning_tokens_are_counted_so_far_and_in_all(client: SglangClient):
    messages = client.generate(stream=True, require_reasoning=True)
    for part in chunks(messages):
        assert part.reasoning_tokens == part.completion_tokens // 2
    assert completes(messages)[0].reasoning_tokens == 4
    assert client.complete(require_reasoning=False).reasoning_tokens == 0


def test_hidden_states_come_with_their_chunks_and_all_at_the_end(client: SglangClient):
    messages = client.generate(stream=True, return_hidden_states=True, max_tokens=3)
    rows = [list(row.values) for row in completes(messages)[0].all_hidden_states]
    assert rows == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [2, 0]]
    assert [value for part in chunks(messages) for value in part.hidden_states] == [v for row in rows for v in row]
    assert [row.position for row in completes(messages)[0].all_hidden_states] == list(range(6))
    assert not client.complete().all_hidden_states


def test_named_tokens_have_logprobs_at_every_output_position(client: SglangClient):
    fields = {"logprobs": 0, "token_ids_logprob": [9, 4], "max_tokens": 3}
    messages = client.generate(stream=True, **fields)
    rows = [[-9, -4], [-10, -5], [-11, -6]]
    complete = completes(messages)[0].output_logprobs
    assert [list(row.values) for row in complete.token_ids_logprobs] == rows
    assert {tuple(row.token_ids) for row in complete.token_ids_logprobs} == {(9, 4)}
    sent = [list(row.values) for part in chunks(messages) for row in part.output_logprobs.token_ids_logprobs]
    assert sent == rows


def test_a_prefill_alone_is_scored(client: SglangClient):
    complete = client.complete(logprobs=0, token_ids_logprob=[9], max_tokens=0)
    assert (complete.completion_tokens, complete.finish_reason) == (0, "length")
    (row,) = complete.output_logprobs.token_ids_logprobs
    assert list(row.values) == [-9]


@pytest.mark.parametrize(("start", "ids"), [(0, [5, 6, 7, 8]), (2, [7, 8]), (3, [8]), (4, [])])
def test_prompt_logprobs_begin_where_they_are_asked_for(client: SglangClient, start: int, ids: list[int]):
    prompt = client.complete(logprobs=1, prompt_logprobs=1, logprob_start_len=start).input_logprobs
    assert list(prompt.token_ids) == ids
    assert [entry.HasField("value") for entry in prompt.token_logprobs] == [False, True, True, True][: len(ids)]
    assert [len(top.values) for top in prompt.top_logprobs] == ([0, 1, 1, 1][: len(ids)] if len(ids) > 1 else [])


def test_an_abort_says_whether_it_ended_something(client: SglangClient):
    client.worker.engine.pause()
    call = client.start("a", n=2, temperature=1.0, max_tokens=100)
    answer = client.stub.Abort(pb.AbortRequest(request_id="a", reason="enough"), timeout=TIMEOUT)
    while not answer.success:  # the call is on its way
        answer = client.stub.Abort(pb.AbortRequest(request_id="a"), timeout=TIMEOUT)
    assert [complete.finish_reason for complete in completes(list(call))] == ["abort", "abort"]
    answer = client.stub.Abort(pb.AbortRequest(request_id="a"), timeout=TIMEOUT)
    assert not answer.success
    assert answer.message


def test_an_embedding_goes_to_its_rank_with_its_type_ids(client: SglangClient):
    message = pb.EmbedRequest(
        request_id="e",
        tokenized=pb.TokenizedInput(input_ids=PROMPT),
        token_type_ids=[0, 0, 1, 1],
        data_parallel_rank=1,
    )
    answer = client.stub.Embed(message, timeout=TIMEOUT)
    assert (list(answer.embedding), answer.prompt_tokens, answer.embedding_dim) == ([5, 6, 7, 8], 4, 4)
    ((_, call),) = client.worker.engine.embedded
    assert (call.token_type_ids, call.data_parallel_rank) == ([0, 0, 1, 1], 1)
    client.worker.engine.fail_at["e"] = Finish(FinishReason.ABORT, status=400, message="too long")
    assert refused(client.stub.Embed, message) == ("INVALID_ARGUMENT", "too long")
    client.worker.engine.fail_at["e"] = Finish(FinishReason.ABORT)
    assert refused(client.stub.Embed, message)[0] == "ABORTED"


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"request_id": ""}, "INVALID_ARGUMENT", "request_id"),
        ({"tokenized": None}, "INVALID_ARGUMENT", "tokenized"),
        ({"token_type_ids": [0]}, "INVALID_ARGUMENT", "token_type_ids"),
        ({"token_type_ids": [0, 0, -1, 0]}, "INVALID_ARGUMENT", "token_type_ids"),
        ({"data_parallel_rank": 9}, "INVALID_ARGUMENT", "data_parallel_rank"),
        ({"tokenized": pb.TokenizedInput(input_ids=[1] * 513)}, "INVALID_ARGUMENT", "input_ids"),
        ({"is_cross_encoder": True}, "UNIMPLEMENTED", "is_cross_encoder"),
        ({"mm_inputs": pb.MultimodalInputs(image_urls=["a"])}, "UNIMPLEMENTED", "mm_inputs"),
    ],
)
def test_a_bad_embedding_request_is_refused_by_name(client: SglangClient, fields, code: str, field: str):
    message = {"request_id": "e", "tokenized": pb.TokenizedInput(input_ids=PROMPT)} | fields
    answer = refused(client.stub.Embed, pb.EmbedRequest(**message))
    assert answer[0] == code
    assert field in answer[1]
    assert not client.worker.engine.embedded


# The worker


def test_adapters_are_loaded_listed_and_unloaded(client: SglangClient):
    one = pb.LoadLoRAAdapterRequest(lora_name="poet", lora_path="/adapters/poet", pinned=True, lora_id="id-1")
    assert client.stub.LoadLoRAAdapter(one) == pb.LoadLoRAAdapterResponse(success=True, loaded_lora_ids=["id-1"])
    again = client.stub.LoadLoRAAdapter(one)
    assert (again.success, list(again.loaded_lora_ids)) == (False, ["id-1"])
    assert "id-1" in again.message
    (listed,) = client.stub.ListLoadedLoRAAdapters(pb.ListLoadedLoRAAdaptersRequest()).loaded_adapters
    expected = pb.LoadedLoRAAdapter(lora_id="id-1", lora_name="poet", lora_path="/adapters/poet", pinned=True)
    assert listed == expected
    missing = client.stub.UnloadLoRAAdapter(pb.UnloadLoRAAdapterRequest(lora_name="nobody"))
    assert (missing.success, list(missing.loaded_lora_ids)) == (False, ["id-1"])
    gone = client.stub.UnloadLoRAAdapter(pb.UnloadLoRAAdapterRequest(lora_name="poet", lora_id="id-1"))
    assert gone == pb.UnloadLoRAAdapterResponse(success=True)


@pytest.mark.parametrize("field", ["lora_name", "lora_path", "lora_id"])
@pytest.mark.parametrize("value", ["", " ", "a\0b"])
def test_an_adapter_without_a_part_is_refused_by_name(client: SglangClient, field: str, value: str):
    parts = {"lora_name": "poet", "lora_path": "/adapters/poet", "lora_id": "id-1"} | {field: value}
    code, sentence = refused(client.stub.LoadLoRAAdapter, pb.LoadLoRAAdapterRequest(**parts))
    assert code == "INVALID_ARGUMENT"
    assert field in sentence
    assert not client.worker.engine.loaded


def test_health_is_what_the_engine_answers_to_a_probe(client: SglangClient):
    assert client.stub.HealthCheck(pb.HealthCheckRequest()).healthy
    client.worker.engine.sickness = "no output for 20 s with requests pending"
    answer = client.stub.HealthCheck(pb.HealthCheckRequest())
    assert (answer.healthy, answer.message) == (False, "no output for 20 s with requests pending")


def test_an_engine_that_fails_its_probe_is_not_healthy(client: SglangClient):
    async def probe() -> None:
        raise EngineDead("the scheduler died")

    client.worker.engine.probe = probe
    answer = client.stub.HealthCheck(pb.HealthCheckRequest(), timeout=TIMEOUT)
    assert (answer.healthy, answer.message) == (False, "the scheduler died")


def test_profile_options_reach_an_engine_that_takes_them(client: SglangClient):
    engine = client.worker.engine
    message = common.StartProfileRequest(output_dir="/traces", num_steps=3, activities=["CPU"], with_stack=False)
    assert refused(client.stub.StartProfile, message)[0] == "INVALID_ARGUMENT"
    engine.takes_profile_options = True
    assert client.stub.StartProfile(message).success
    assert engine.profile_options == ProfileOptions(
        output_dir="/traces", num_steps=3, activities=("CPU",), with_stack=False
    )
    for bad in (common.StartProfileRequest(num_steps=0), common.StartProfileRequest(start_step=-1)):
        assert refused(client.stub.StartProfile, bad)[0] == "INVALID_ARGUMENT"


SECTIONS = LoadSections(
    memory=MemoryLoad(weight_gb=1.5, kv_cache_gb=2.0, graph_gb=0.5, token_capacity=1000),
    speculative=SpeculativeLoad(accept_length=2.5, accept_rate=0.5),
    lora=LoraLoad(slots_used=1, slots_total=4, utilization=0.25),
    disaggregation=DisaggregationLoad(mode="prefill", prefill_prealloc_queue_reqs=3, kv_transfer_latency_ms=1.5),
    queues=QueueLoad(waiting=1, grammar=2, paused=3, retracted=4),
)
NAMES = ("memory", "speculative", "lora", "disaggregation", "queues")


def report(engine) -> None:
    """What the ranks' schedulers say of themselves."""
    shared = {"used_tokens": 50, "capacity_tokens": 100, "max_running": 4, "waiting_uncached_tokens": 11}
    rates = {"cache_hit_rate": 0.25}
    engine.reports = {
        0: EngineLoad(
            running=2, waiting=1, kv_usage=0.5, generated_per_second=8.0, sections=SECTIONS, **shared, **rates
        ),
        1: EngineLoad(running=1, waiting=0, kv_usage=0.25, generated_per_second=4.0, **shared, **rates),
    }


@pytest.mark.parametrize(
    ("include", "sent"),
    [
        ([], ()),
        (["core"], ()),
        (["memory", "spec"], ("memory", "speculative")),
        (["disagg", "core", "queues"], ("disaggregation", "queues")),
        (["all"], NAMES),
        (["lora"], ("lora",)),
    ],
)
def test_loads_have_the_sections_that_are_asked_for(client: SglangClient, include: list[str], sent: tuple[str, ...]):
    report(client.worker.engine)
    first, second = client.stub.GetLoads(pb.GetLoadsRequest(include=include)).loads
    assert [name for name in NAMES if first.HasField(name)] == [name for name in NAMES if name in sent]
    assert not any(second.HasField(name) for name in NAMES)
    if "disaggregation" in sent:
        assert (first.disaggregation.mode, first.disaggregation.prefill_prealloc_queue_reqs) == ("prefill", 3)
    if "memory" in sent:
        assert first.memory == pb.MemoryMetrics(weight_gb=1.5, kv_cache_gb=2.0, graph_gb=0.5, token_capacity=1000)


def test_an_unknown_section_is_refused_by_name(client: SglangClient):
    code, sentence = refused(client.stub.GetLoads, pb.GetLoadsRequest(include=["core", "everything"]))
    assert code == "INVALID_ARGUMENT"
    assert "include" in sentence
    assert "'everything'" in sentence


def test_loads_are_the_schedulers_own_with_sums_and_means(client: SglangClient):
    report(client.worker.engine)
    answer = client.stub.GetLoads(pb.GetLoadsRequest())
    first = answer.loads[0]
    assert (first.num_running_reqs, first.num_waiting_reqs, first.num_total_reqs) == (2, 1, 3)
    assert (first.num_used_tokens, first.max_total_num_tokens, first.max_running_requests) == (50, 100, 4)
    assert (first.gen_throughput, first.cache_hit_rate, first.num_waiting_uncached_tokens) == (8.0, 0.25, 11)
    total = answer.aggregate
    assert (total.total_running_reqs, total.total_waiting_reqs, total.total_reqs) == (3, 1, 4)
    assert (total.avg_throughput, total.avg_token_usage, total.avg_utilization) == (6.0, 0.375, 0.375)
    one = client.stub.GetLoads(pb.GetLoadsRequest(dp_rank=1))
    assert [load.dp_rank for load in one.loads] == [1]
    assert one.aggregate.total_reqs == 1


def test_server_info_holds_json_safe_arguments_and_the_routers_labels(client: SglangClient):
    info = client.stub.GetServerInfo(pb.GetServerInfoRequest())
    arguments = info.server_args
    assert (arguments["model_path"], arguments["port"], arguments["odd"]) == ("/models/fake", 1, None)
    assert list(arguments["nested"]["list"]) == [1, None]
    assert (arguments["pairing_protocol"], arguments["max_running_requests"]) == ("p1", 8)
    assert "mm_item_limits" not in arguments
    assert info.scheduler_info["status"] == "ready"
    assert (info.sglang_version, info.server_type, info.max_total_num_tokens) == ("1.2.3", "fake-grpc", 2000)


def test_model_info_has_the_contracts_own_facts(client: SglangClient):
    info = client.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.weight_version, info.preferred_sampling_params) == ("7", '{"top_k": 5}')
    assert (info.id2label_json, info.num_labels) == ('{"0": "no"}', 1)
    assert info.default_sampling_params_json == '{"temperature":0.6}'
