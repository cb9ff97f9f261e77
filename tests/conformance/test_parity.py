"""The two implementations on the same engine and model, request by request."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from client import TIMEOUT, Client, chunks, completes, new_id, request
from smg_grpc_proto import vllm_engine_pb2 as pb

pytestmark = pytest.mark.engine

LONG = [(i * 37) % 2000 for i in range(600)]
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'

REQUESTS = {
    "plain": {},
    "eos": {"ignore_eos": False, "max_tokens": 200},
    "long prompt": {"prompt": LONG, "max_tokens": 20},
    "to the end of the context": {"prompt": LONG * 3, "max_tokens": 2048 - 3 * len(LONG)},
    "stop token": {"stop_token_ids": [218], "max_tokens": 30},
    "min tokens": {"stop_token_ids": [499], "min_tokens": 6, "max_tokens": 30},
    "penalties": {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.3, "max_tokens": 40},
    "logit bias": {"logit_bias": {7: 100.0}, "max_tokens": 4},
    "logprobs": {"logprobs": 4, "max_tokens": 10},
    "logprobs of the token alone": {"logprobs": 0, "max_tokens": 10},
    "prompt logprobs": {"prompt_logprobs": 3, "max_tokens": 4},
    "prompt logprobs of a long prompt": {"prompt": LONG, "prompt_logprobs": 1, "max_tokens": 2},
    "seeded choices": {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 12},
    "seeded, with every filter": {
        "temperature": 0.8, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "seed": 3, "max_tokens": 20,
    },
    "regex": {"regex": "[ab]{4}", "max_tokens": 8},
    "json schema": {"json_schema": SCHEMA, "max_tokens": 30},
    "choice": {"choice": pb.ChoiceConstraint(choices=["yes", "no"]), "ignore_eos": False, "max_tokens": 8},
    "grammar": {"grammar": 'root ::= "x" | "yy"', "ignore_eos": False, "max_tokens": 8},
    "past the end of a grammar": {"grammar": 'root ::= "x"', "max_tokens": 8},
    "the tokenizer's EOS": {"logit_bias": {2047: 100.0}, "ignore_eos": False, "max_tokens": 8},
    "another EOS": {"logit_bias": {2045: 100.0}, "ignore_eos": False, "max_tokens": 8},
}  # fmt: skip


@pytest.fixture(scope="module")
def python(vllm_worker) -> Iterator[Client]:
    with Client(vllm_worker.address) as client:
        yield client


@pytest.fixture(scope="module")
def rust(rust_worker) -> Iterator[Client]:
    with Client(rust_worker.address) as client:
        yield client


def logprobs(message) -> dict:
    """Output logprobs by token id."""
    tops = [dict(zip(top.token_ids, top.values, strict=True)) for top in message.top_logprobs]
    return {"ids": list(message.token_ids), "values": list(message.token_logprobs), "tops": tops}


def prompt_logprobs(message) -> dict:
    tops = [dict(zip(top.token_ids, top.values, strict=True)) for top in message.top_logprobs]
    values = [entry.value if entry.HasField("value") else None for entry in message.token_logprobs]
    return {"ids": list(message.token_ids), "values": values, "tops": tops}


def differences(ours: object, theirs: object, where: str = "") -> list[str]:
    """Where two answers differ, floats by more than 1e-4; a diff of whole answers would take pytest minutes."""
    if isinstance(ours, float) and isinstance(theirs, float):
        return [] if abs(ours - theirs) <= 1e-4 else [f"{where}: {ours} != {theirs}"]
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        return [line for key in ours for line in differences(ours[key], theirs[key], f"{where}.{key}")]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [line for index, (a, b) in pairs for line in differences(a, b, f"{where}[{index}]")]
    return [] if ours == theirs else [f"{where}: {ours!r:.200} != {theirs!r:.200}"]


def answer(messages) -> dict:
    """What a client learns from an answer, however its tokens were cut into chunks."""
    choices = {}
    for complete in completes(messages):
        parts = chunks(messages, complete.index)
        choices[complete.index] = {
            "streamed": [token for part in parts for token in part.token_ids],
            "tokens": list(complete.output_ids),
            "reason": complete.finish_reason,
            "counts": (complete.prompt_tokens, complete.completion_tokens, complete.cached_tokens),
            "matched": (complete.matched_stop_str, complete.matched_token_id),
            "logprobs": logprobs(complete.output_logprobs),
        }
    prompts = [
        prompt_logprobs(part.input_logprobs)
        for message in messages
        for part in (message.chunk, message.complete)
        if part.HasField("input_logprobs")
    ]
    return {"choices": choices, "prompt": prompts[:1]}


@pytest.mark.parametrize("stream", [False, True], ids=["reply", "stream"])
@pytest.mark.parametrize("name", REQUESTS)
def test_the_same_request_has_the_same_answer(python: Client, rust: Client, name: str, stream: bool):
    fields = REQUESTS[name]
    for client in (python, rust):
        client.flush()
    ours, theirs = (answer(client.generate(stream=stream, **fields)) for client in (python, rust))
    assert not differences(ours, theirs)[:5]


@pytest.mark.parametrize("stop", ["import", "\n", "a", " ", "e"])
def test_a_stop_string_matches_alike(python: Client, rust: Client, stop: str):
    ends = []
    for client in (python, rust):
        complete = client.complete(stop=[stop, "never there"], max_tokens=300)
        ends.append((complete.finish_reason, complete.matched_stop_str, list(complete.output_ids)))
    assert ends[0] == ends[1]


def test_a_repeated_prefix_is_cached_alike(python: Client, rust: Client):
    counts = []
    for client in (python, rust):
        client.flush()
        counts.append([client.complete(prompt=LONG).cached_tokens for _ in range(2)])
    assert counts[0] == counts[1]
    assert counts[0][1] > 0


def test_the_model_facts_are_equal(python: Client, rust: Client):
    assert rust.stub.GetModelInfo(pb.GetModelInfoRequest()) == python.stub.GetModelInfo(pb.GetModelInfoRequest())


def test_the_server_facts_are_equal(python: Client, rust: Client):
    ours, theirs = (client.stub.GetServerInfo(pb.GetServerInfoRequest()) for client in (python, rust))
    for info in (ours, theirs):
        info.ClearField("uptime_seconds")
        info.ClearField("last_receive_timestamp")
    assert theirs == ours


def test_the_loads_of_an_idle_worker_are_equal(python: Client, rust: Client):
    loads = []
    for client in (python, rust):
        client.flush()
        client.complete(max_tokens=1)
        client.check_empty()
        answer = client.stub.GetLoads(pb.GetLoadsRequest())
        for load in answer.loads:
            load.ClearField("gen_throughput")
            load.ClearField("cache_hit_rate")
        loads.append((answer.version, answer.dp_rank_count, list(answer.loads)))
    assert loads[0] == loads[1]


def test_what_the_core_refuses_is_internal_and_touches_nobody_else(rust: Client):
    expected = rust.complete(max_tokens=100)
    running = rust.stub.Generate(request(max_tokens=100, stream=True), timeout=TIMEOUT)
    for fields in ({"prompt": []}, {"prompt": [5000]}, {"temperature": 2.5}, {"logit_bias": {5000: 1.0}}):
        code, _ = rust.refused(**fields)
        assert code == "INTERNAL"
    assert rust.generate(prompt_logprobs=2, max_tokens=2)
    messages = list(running)
    assert [token for part in chunks(messages) for token in part.token_ids] == list(expected.output_ids)


def test_an_id_that_the_fan_out_of_a_live_call_uses_is_refused(rust: Client):
    name = new_id()
    call = rust.stub.Generate(request(name, n=2, temperature=1.0, stream=True, max_tokens=200), timeout=TIMEOUT)
    next(call)
    with pytest.raises(grpc.RpcError) as error:
        rust.generate(f"{name}-0")
    assert error.value.code() is grpc.StatusCode.INTERNAL
    assert {complete.completion_tokens for complete in completes(list(call))} == {200}
