"""A real headless SGLang scheduler behind a front end of the test's own: it serves, it refuses, it lives."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang_wire import generate

from .zmq_front_end import ABORT, ADD, CONTROL, SglangHeadless, new_id, sampling

pytestmark = pytest.mark.engine

VOCABULARY = 2048  # of the tiny model
CONTEXT = 4096


@pytest.fixture(scope="module")
def shared(sglang_python, tiny, tmp_path_factory) -> Iterator[SglangHeadless]:
    log = tmp_path_factory.mktemp("headless") / "headless.log"
    headless = SglangHeadless(sglang_python, tiny("qwen3"), log, "--stream-interval", "1")
    with contextlib.closing(headless):
        headless.connect()
        yield headless


@pytest.fixture
def headless(shared) -> Iterator[SglangHeadless]:
    """The scheduler; a test leaves it alive and empty."""
    yield shared
    rid = shared.add(new_id())
    assert shared.finish(rid)[0].reason == "length"
    assert len(shared.tokens[rid]) == 8
    shared.read(lambda: shared.load[:2] == (0, 0), "the scheduler does not get empty")
    assert {rid: ends for rid, ends in shared.ends.items() if len(ends) != 1} == {}


def counted(headless: SglangHeadless, rid: str, name: str) -> list[Any]:
    return [row[name] for row in headless.rows[rid]]


# It serves


def test_it_says_what_it_is(headless):
    facts = headless.facts
    assert facts["max_model_len"] == CONTEXT
    assert facts["vllm_version"].startswith("sglang-0.5.")
    assert facts["dtype"] in ("float32", "bfloat16")
    assert facts["num_gpu_blocks"] * facts["block_size"] == facts["kv_cache_size_tokens"] == 8192
    assert (facts["data_parallel_size"], facts["data_parallel_rank"], facts["world_size"]) == (1, 0, 1)
    assert facts["max_num_seqs"] > 0


@pytest.mark.parametrize("tail", [[None, None, 0, 0, False, False], [None, None, None, 0, 0, False, False], []])
def test_requests_of_every_layout_are_served_alike(headless, tail):
    rids = [new_id(), new_id()]
    headless.add(rids[0], stream=True)
    headless.send(generate(rid=rids[1], input_ids=[5, 6, 7, 8], sampling_params=sampling()[:26] + tail))
    headless.finish(*rids)
    assert headless.tokens[rids[0]] == headless.tokens[rids[1]]


def test_a_stream_brings_every_step_with_counts_so_far(headless):
    streamed, whole = headless.add(new_id(), stream=True), headless.add(new_id(), stream=False)
    headless.finish(streamed, whole)
    assert counted(headless, streamed, "completion_tokens") == list(range(1, 9))
    assert [len(ids) for ids in counted(headless, streamed, "output_ids")] == [1] * 8
    assert counted(headless, streamed, "prompt_tokens") == [4] * 8
    assert headless.tokens[whole] == headless.tokens[streamed]
    assert counted(headless, whole, "finished_reasons") == ["length"]


def test_a_stop_token_and_a_stop_string_are_named(headless):
    plain = headless.add(new_id())
    headless.finish(plain)
    third = headless.tokens[plain][2]
    rid = headless.add(new_id(), stop_token_ids=[third], ignore_eos=False)
    (end,) = headless.finish(rid)
    assert (end.reason, end.matched) == ("stop", third)
    rid = headless.add(new_id(), stop=["e"], max_new_tokens=200, ignore_eos=False)
    (end,) = headless.finish(rid)
    assert (end.reason, end.matched) == ("stop", "e")


def test_logprobs_of_outputs_prompt_and_named_tokens(headless):
    rid = headless.add(
        new_id(), return_logprob=True, top_logprobs_num=2, logprob_start_len=0, token_ids_logprob=[7, 9], stream=True
    )
    headless.finish(rid)
    values = [value for row in counted(headless, rid, "output_token_logprobs_val") for value in row]
    ids = [token for row in counted(headless, rid, "output_token_logprobs_idx") for token in row]
    assert ids == headless.tokens[rid]
    assert all(value < 0 for value in values)
    ranked = [position for row in counted(headless, rid, "output_top_logprobs_idx") for position in row]
    assert [position[0] for position in ranked] == ids  # greedy
    assert {len(position) for position in ranked} == {2}
    named = [position for row in counted(headless, rid, "output_token_ids_logprobs_idx") for position in row]
    assert named == [[7, 9]] * 8
    prompt = [row["input_token_logprobs_val"] for row in headless.rows[rid] if row.get("input_token_logprobs_val")]
    (first,) = prompt
    assert first[0] is None
    assert len(first) == 4
    ranked_prompt = headless.rows[rid][0]["input_top_logprobs_val"]
    assert [len(position) for position in ranked_prompt] == [0, 2, 2, 2]


def test_requests_without_logprobs_share_a_batch_with_those_that_have_them(headless):
    with_them = headless.add(new_id(), return_logprob=True, logprob_start_len=-1, max_new_tokens=30, stream=True)
    without = headless.add(new_id(), max_new_tokens=30, stream=True)
    headless.finish(with_them, without)
    assert all(counted(headless, with_them, "output_token_logprobs_val"))
    assert not any(counted(headless, without, "output_token_logprobs_val"))


def test_zeros_are_unset_and_preferences_of_sampling_are_kept(headless):
    rid = headless.add(new_id(), top_p=0.0, top_k=0, repetition_penalty=0.0, temperature=0.0)
    assert headless.finish(rid)[0].reason == "length"


def test_a_constraint_shapes_the_output(headless):
    rid = headless.add(new_id(), regex="[ab]{3}", ignore_eos=False, max_new_tokens=20)
    (end,) = headless.finish(rid)
    assert end.reason == "stop"
    assert len(headless.tokens[rid]) <= 4


# It refuses

_REASONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": [VOCABULARY]}, f"input_ids: token id {VOCABULARY} is outside the vocabulary of {VOCABULARY}"),
    ({"prompt": [-1]}, "input_ids: token id -1"),
    ({"prompt": [2**63]}, "input_ids: holds an id outside"),
    ({"prompt": [5] * CONTEXT}, "input_ids: 4096 tokens"),
    ({"max_new_tokens": CONTEXT}, "max_new_tokens: 4096 and a prompt of 4 tokens exceed the context"),
    ({"max_new_tokens": -1}, "max_new_tokens: must be at least 0"),
    ({"min_new_tokens": 9}, "min_new_tokens: must be in"),
    ({"temperature": float("nan")}, "temperature: must be"),
    ({"temperature": -0.5}, "temperature: must be"),
    ({"top_p": 1.5}, "top_p: must be in (0, 1]"),
    ({"top_p": float("nan")}, "top_p: must be in (0, 1]"),
    ({"top_k": -2, "temperature": 1.0}, "top_k: must be"),
    ({"min_p": 2.0}, "min_p: must be in [0, 1]"),
    ({"repetition_penalty": 3.0}, "repetition_penalty: must be in (0, 2]"),
    ({"presence_penalty": float("inf")}, "presence_penalty: must be in [-2, 2]"),
    ({"n": 2}, "n: 2 choices"),
    ({"beam_width": 4}, "beam_width: 4"),
    ({"logit_bias": {str(VOCABULARY): 1.0}}, "logit_bias: must"),
    ({"logit_bias": {"a": 1.0}}, "sampling_params: invalid literal"),
    ({"logit_bias": {"5": float("nan")}}, "logit_bias: nan for token 5"),
    ({"stop_token_ids": [VOCABULARY], "min_new_tokens": 3}, "stop_token_ids: token id 2048"),
    ({"stop": [""]}, "stop: holds an empty string"),
    ({"stop": ["x"] * 33}, "sampling_params: at most 32 stop strings"),
    ({"stop_regex": "("}, "sampling_params:"),
    ({"sampling_seed": 2**63}, "sampling_seed:"),
    ({"regex": "a", "json_schema": "{}"}, "sampling_params: Only one of"),
    ({"stream_interval": -1}, "stream_interval: -1"),
    ({"custom_params": {"__sglang_reasoning_end_token_ids": [VOCABULARY]}}, "sampling_params: request reasoning end"),
    ({"return_logprob": True, "top_logprobs_num": VOCABULARY + 1}, "top_logprobs_num: 2049"),
    ({"return_logprob": True, "logprob_start_len": -2}, "logprob_start_len: -2"),
    ({"return_logprob": True, "logprob_start_len": 5}, "logprob_start_len: 5"),
    ({"return_logprob": True, "token_ids_logprob": [VOCABULARY]}, "token_ids_logprob: token id 2048"),
    ({"mm_inputs": {"mm_items": []}}, "mm_inputs: is not served over this wire"),
    ({"input_embeds": [[0.5]]}, "input_embeds: is not served over this wire"),
    ({"sampling_params": [1, 2, 3]}, "Expected"),
    ({"stream": None}, "Expected `bool`, got `None` - at `$[13]`"),
]
_MORE = (False, False, False, False, 0, False, None, None)


@pytest.mark.parametrize(("fields", "reason"), _REASONS, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_what_the_scheduler_cannot_serve_is_refused_with_its_reason(headless, fields, reason):
    rid = headless.add(new_id(), **fields)
    assert reason in headless.refused(rid)


def test_an_empty_prompt_is_refused(headless):
    rid = new_id()
    headless.send(generate(rid=rid, input_ids=[], sampling_params=sampling()))
    assert headless.refused(rid) == "input_ids: is empty"


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ((*_MORE, "some-id"), "lora_id: this server runs without LoRA"),
        ((*_MORE, None, "{}"), "custom_logit_processor: this server runs without --enable-custom-logit-processor"),
        ((False, False, True), "return_hidden_states: this server runs without"),
        ((False, False, "every"), "return_hidden_states: 'every'"),
    ],
)
def test_what_the_server_runs_without_is_refused(headless, more, reason):
    assert reason in headless.refused(headless.add(new_id(), more=more))


def test_an_embedding_is_refused_where_the_model_generates(headless):
    rid = new_id()
    headless.send(["TokenizedEmbeddingReqInput", rid, None, None, [5, 6], None, None, sampling()])
    assert "input_ids: this model generates" in headless.refused(rid)


def test_an_id_that_is_in_use_is_refused_and_the_first_goes_on(headless):
    rid = headless.add(new_id(), max_new_tokens=100, stream=True)
    headless.read(lambda: headless.tokens.get(rid), "no token")
    headless.add(rid)
    headless.finish(rid)
    headless.read(lambda: len(headless.ends[rid]) == 2, "one of them has no end")
    refused, whole = sorted(headless.ends.pop(rid), key=lambda end: end.reason)
    assert refused.message == "rid: a request of this id is still running"
    assert whole.reason == "length"
    assert len(headless.tokens[rid]) == 100


def test_a_grammar_that_does_not_compile_ends_its_request_alone(headless):
    broken, whole = headless.add(new_id(), regex="(((("), headless.add(new_id())
    first, second = headless.finish(broken, whole)
    assert (first.reason, first.status) == ("abort", 400), first
    assert second.reason == "length"


def test_messages_that_name_no_request_are_dropped_with_a_line(headless):
    before = headless.output().count("is dropped")
    headless.send(b"\xc1")
    headless.send(["TokenizedGenerateReqInput"])
    headless.send([], b"\x09")
    headless.send(7, ABORT)
    headless.send({}, CONTROL)
    headless.send(["EncoderDispatchErrorReq", "x", None, "no encoder", 503])
    headless.finish(headless.add(new_id()))
    assert headless.output().count("is dropped") == before + 5
    assert "request 'x' waits for no encoder" in headless.output()


# It lives

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
_STEADY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@_STEADY
@given(st.sampled_from([ADD, ABORT, CONTROL, b"\x03", b""]), st.binary(max_size=200))
def test_any_bytes_leave_it_alive(headless, kind, body):
    headless.send(body, kind)


@_STEADY
@given(st.dictionaries(st.sampled_from([3, 4, 5, 6, 7, 9, 10, 11, 12, 13]), _VALUES, min_size=1, max_size=3))
def test_any_values_in_a_request_end_it_or_serve_it(headless, slots):
    rid = new_id()
    message = generate(rid=rid, input_ids=[5, 6], sampling_params=sampling(max_new_tokens=2))
    for slot, value in slots.items():
        message[slot] = value
    headless.send(message)
    headless.finish(rid)


_SAMPLING = st.one_of(
    _VALUES,
    st.floats(-3, 3),
    st.integers(-3, 40),
    st.dictionaries(st.integers(-5, 3000).map(str), st.floats(), max_size=3),
    st.lists(st.integers(-5, 3000), max_size=3),
)


@_STEADY
@given(st.dictionaries(st.integers(1, 25), _SAMPLING, min_size=1, max_size=4))
def test_any_sampling_ends_a_request_or_serves_it(headless, slots):
    rid = new_id()
    values = sampling(max_new_tokens=3)
    for slot, value in slots.items():
        values[slot] = value
    headless.send(generate(rid=rid, input_ids=[5, 6], sampling_params=values))
    headless.finish(rid)


@_STEADY
@given(st.sampled_from(["flush_cache", "stop_profile", "x"]), st.lists(_VALUES, max_size=2))
def test_any_control_call_of_an_idle_scheduler_is_answered(headless, method, arguments):
    assert isinstance(headless.call(method, *arguments)[0], bool)


# Aborts


def test_an_abort_ends_that_request_and_none_that_begins_with_its_id(headless):
    name = new_id()
    rids = [headless.add(rid, max_new_tokens=2000, stream=True) for rid in (name, f"{name}0", f"{name}-1")]
    headless.read(lambda: all(headless.tokens.get(rid) for rid in rids), "no tokens")
    headless.send([rids[0], "nobody", ""], ABORT)
    (end,) = headless.finish(rids[0])
    assert end.reason == "abort"
    assert not any(rid in headless.ends for rid in rids[1:])
    headless.send(rids[1:], ABORT)
    assert [end.reason for end in headless.finish(*rids[1:])] == ["abort", "abort"]


def test_an_id_can_be_used_again_as_soon_as_it_is_aborted(headless):
    rid = headless.add(new_id(), max_new_tokens=2000, stream=True)
    headless.read(lambda: headless.tokens.get(rid), "no token")
    headless.send([rid], ABORT)
    headless.add(rid, prompt=[9, 9, 9], max_new_tokens=5)
    headless.tokens[rid].clear()
    headless.read(lambda: rid in headless.ends, "no end")
    headless.finish(headless.add(new_id()))
    assert [end.reason for end in headless.ends[rid]] == ["length"]


def test_a_storm_of_ids_that_are_prefixes_aborted_and_used_again_ends_each_exactly_once(headless):
    dice = random.Random(7)
    names = [f"storm{'-1' * depth}{tail}" for depth in range(6) for tail in ("", "0", "00")]
    aborted: set[str] = set()
    for _ in range(8):
        for name in dice.sample(names, len(names)):
            headless.ends.pop(name, None)
            headless.add(name, max_new_tokens=dice.choice([1, 3, 40]), stream=dice.random() < 0.5)
        aborted = set(dice.sample(names, len(names) // 2))
        headless.send(list(aborted), ABORT)
        headless.finish(*(set(names) - aborted))
        headless.finish(*aborted)
        assert {name: len(headless.ends[name]) for name in names} == dict.fromkeys(names, 1)


# Control calls


def test_the_cache_is_flushed(headless):
    headless.finish(headless.add(new_id()))
    assert headless.call("flush_cache", 5.0) == (True, None)
    again = headless.add(new_id())
    headless.finish(again)
    assert counted(headless, again, "cached_tokens")[-1] == 0


def test_a_flush_waits_for_running_requests(headless):
    rid = headless.add(new_id(), max_new_tokens=2000, stream=True)
    headless.read(lambda: headless.tokens.get(rid), "no token")
    headless.send([rid], ABORT)
    assert headless.call("flush_cache", 20.0) == (True, None)
    assert headless.ends[rid][0].reason == "abort"


def test_what_is_wrong_with_a_control_call_is_its_reply(headless, tmp_path):
    assert headless.call("restart")[0] is False
    assert "timeout_s" in (headless.call("flush_cache", "soon")[1] or "")
    file = tmp_path / "file"
    file.touch()
    success, message = headless.call("start_profile", {"output_dir": str(file)})
    assert success is False
    assert "output_dir" in (message or "")
    assert "num_steps" in (headless.call("start_profile", {"profile_by_stage": True})[1] or "")
    assert "'rid' is not known" in (headless.call("start_profile", {"rid": "x"})[1] or "")
    assert headless.call("stop_profile")[0] is False


def test_profiles_are_written_where_asked(headless, tmp_path):
    assert headless.call("start_profile", {"output_dir": str(tmp_path), "activities": ["CPU"]})[0] is True
    headless.finish(headless.add(new_id()))
    assert headless.call("stop_profile")[0] is True
    assert list(tmp_path.iterdir())


def test_trace_headers_are_taken(headless):
    rid = new_id()
    request = generate(rid=rid, input_ids=[5, 6], sampling_params=sampling())
    meta = msgpack.packb({"trace_headers": {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}})
    headless.send(request, ADD, meta)
    assert headless.finish(rid)[0].reason == "length"
