"""A real engine core behind a front end that checks nothing: it refuses what would end it, and serves on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from headless import ABORT, ERROR, Headless, new_id, request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.engine

VOCABULARY, CONTEXT = 2048, 2048  # of the tiny model, and of VLLM_ARGUMENTS
IMAGE = {"data": None, "modality": "image", "identifier": "x", "mm_position": {"offset": 0, "length": 2}}


@pytest.fixture(scope="module")
def core(vllm_python, tiny, tmp_path_factory) -> Iterator[Headless]:
    core = Headless(vllm_python, tiny("qwen3"), tmp_path_factory.mktemp("guard") / "vllm.log")
    try:
        core.connect()
        yield core
    finally:
        core.close()


@pytest.fixture(scope="module")
def expected(core) -> list[int]:
    """What a good request is answered where no bad one is beside it."""
    asked = request(new_id())
    core.ask(asked)
    return core.tokens[asked[0]]


def lines(core: Headless, request_id: str) -> list[str]:
    """The log lines that name a request."""
    return [line for line in core.output().splitlines() if repr(request_id) in line]


BAD_SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 3.0},
    "temperature nan": {"temperature": float("nan")},
    "temperature text": {"temperature": "hot"},
    "top_p": {"top_p": 0.0},
    "top_k": {"top_k": -2},
    "min_p": {"min_p": 1.5},
    "presence": {"presence_penalty": 9.0},
    "repetition": {"repetition_penalty": 0.0},
    "max_tokens 0": {"max_tokens": 0},
    "max_tokens none": {"max_tokens": None},
    "max_tokens over the context": {"max_tokens": CONTEXT},
    "min_tokens": {"min_tokens": 2**40, "max_tokens": 2**40},
    "seed": {"seed": 2**63},
    "n": {"n": 0},
    "logprobs": {"logprobs": 10**6},
    "prompt_logprobs": {"prompt_logprobs": -2},
    "logprob_token_ids": {"logprob_token_ids": [VOCABULARY]},
    "stop_token_ids": {"stop_token_ids": [VOCABULARY]},
    "all stop ids": {"_all_stop_token_ids": [VOCABULARY], "min_tokens": 4},
    "logit_bias": {"logit_bias": {VOCABULARY: 1.0}},
    "logit_bias nan": {"logit_bias": {5: float("nan")}},
    "allowed empty": {"allowed_token_ids": []},
    "allowed": {"allowed_token_ids": [-1]},
    "bad words": {"_bad_words_token_ids": [[]]},
    "thinking budget": {"thinking_token_budget": 5},
    "kv transfer": {"extra_args": {"kv_transfer_params": [1]}},
    "no constraint": {"structured_outputs": {}},
    "two constraints": {"structured_outputs": {"regex": "a", "json": "{}"}},
    "regex": {"structured_outputs": {"regex": "("}},
    "regex nul": {"structured_outputs": {"regex": "a\0"}},
    "grammar empty": {"structured_outputs": {"grammar": " "}},
    "grammar": {"structured_outputs": {"grammar": "root ::= ("}},
    "json empty": {"structured_outputs": {"json": ""}},
    "json": {"structured_outputs": {"json": '{"type": "nothing"}'}},
    "json deep": {"structured_outputs": {"json": "[" * 5000 + "]" * 5000}},
    "json_object": {"structured_outputs": {"json_object": False}},
    "choice": {"structured_outputs": {"choice": []}},
    "structural tag": {"structured_outputs": {"structural_tag": "{}"}},
}
BAD_FIELDS: dict[str, dict[str, Any]] = {
    "prompt empty": {"prompt_token_ids": []},
    "prompt missing": {"prompt_token_ids": None},
    "prompt outside": {"prompt_token_ids": [VOCABULARY * 10]},
    "prompt negative": {"prompt_token_ids": [-5]},
    "prompt as long as the context": {"prompt_token_ids": [5] * CONTEXT},
    "prompt over the context": {"prompt_token_ids": [5] * (CONTEXT + 1)},
    "prompt text": {"prompt_token_ids": "text"},
    "embeddings": {"prompt_embeds": ["float32", [4, 64], b"\0" * 1024]},
    "nothing asked": {"sampling_params": None},
    "sampling of another type": {"sampling_params": [1]},
    "pooling": {"sampling_params": None, "pooling_params": [None, None, None, None, "embed"]},
    "both": {"pooling_params": [None, None, None, None, "embed"]},
    "lora": {"lora_request": ["adapter", 1, "/nowhere"]},
    "lora id": {"lora_request": ["adapter", 0, "/nowhere"]},
    "media": {"mm_features": [IMAGE]},
    "media junk": {"mm_features": [7]},
    "client": {"client_index": 9},
    "client below": {"client_index": -1},
    "salt": {"cache_salt": 5},
}
BAD = {name: {"sampling": changes} for name, changes in BAD_SAMPLING.items()} | BAD_FIELDS


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_ends_alone_and_in_one_line(core, expected, case):
    bad, good, after = request(new_id(), **BAD[case]), request(new_id()), request(new_id())
    core.ask(good, bad, after)
    assert (core.finished[bad[0]], core.tokens[bad[0]]) == (ERROR, [])
    assert core.tokens[good[0]] == core.tokens[after[0]] == expected
    (line,) = lines(core, bad[0])
    assert "is refused: " in line


def test_a_request_cut_short_is_answered_under_its_id(core, expected):
    bad, good = [new_id()], request(new_id())
    core.ask(bad, good)
    assert core.finished[bad[0]] == ERROR
    assert core.tokens[good[0]] == expected


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x80", b"\x91\x07"])
def test_a_frame_without_an_id_ends_nothing(core, expected, frame):
    dropped = core.output().count("dropped without an answer")
    core.send(frame)
    good = request(new_id())
    core.ask(good)
    assert core.tokens[good[0]] == expected
    assert core.output().count("dropped without an answer") == dropped + 1


def test_a_second_request_under_a_living_id_is_refused(core, expected):
    name = new_id()
    core.send(request(name, sampling={"max_tokens": 400}))
    core.ask(request(name))
    assert core.finished[name] == ERROR
    core.send([name], ABORT)
    good = request(new_id())
    core.ask(good)
    assert core.tokens[good[0]] == expected


@pytest.mark.parametrize("backend", ["xgrammar", "guidance", "outlines", "nothing"])
def test_the_front_ends_guess_of_a_grammar_backend_does_not_count(core, backend):
    constraint = {"choice": ["yes"], "_backend": backend}
    asked = request(new_id(), sampling={"structured_outputs": constraint, "ignore_eos": False})
    core.ask(asked)
    assert core.finished[asked[0]] != ERROR


def test_what_only_looks_odd_is_served(core, expected):
    odd = {"top_k": -1, "stop_token_ids": [2047], "extra_args": {"kv_transfer_params": {"do_remote_decode": False}}}
    asked = request(new_id(), sampling=odd, priority=-(2**63), current_wave=2**40, cache_salt="")
    core.ask(asked)
    assert core.tokens[asked[0]] == expected


def test_no_refusal_writes_a_traceback(core):
    assert "Traceback" not in core.output()


# Fuzz

NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.integers(-2, 40) | st.sampled_from([VOCABULARY - 1, VOCABULARY, 2**31])
FLOATS = st.floats() | st.floats(-2, 2) | st.floats(0, 1)
TEXT = st.text(max_size=8)
SCALARS = st.none() | st.booleans() | NUMBERS | FLOATS | TEXT | st.binary(max_size=4)
JUNK = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))
IDS = st.lists(st.integers(0, VOCABULARY - 1) | st.sampled_from([-1, VOCABULARY, 2**40]), max_size=6)


def without_bytes(item: Any) -> Any:
    """As JSON has it."""
    if isinstance(item, dict):
        return {name: without_bytes(value) for name, value in item.items()}
    if isinstance(item, list):
        return [without_bytes(value) for value in item]
    return item.hex() if isinstance(item, bytes) else item


# No repetition counts: a grammar library takes minutes and gigabytes for some, here as in vLLM itself.
PATTERNS = st.text("ab|()[]*+?\\.^$-,", max_size=10)
TYPES = st.sampled_from(["object", "array", "string", "integer", "number", "null", "nothing"])
SCHEMAS = st.recursive(
    st.fixed_dictionaries({}, optional={"type": TYPES, "pattern": PATTERNS, "enum": st.lists(SCALARS, max_size=2)}),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "type": TYPES,
            "properties": st.dictionaries(TEXT, inner, max_size=2),
            "items": inner,
            "anyOf": st.lists(inner, max_size=2),
            "additionalProperties": st.booleans() | inner,
            "required": st.lists(TEXT, max_size=2),
            "$ref": st.sampled_from(["#", "#/properties/a", "nowhere"]),
            "minimum": NUMBERS,
        },
    ),
    max_leaves=4,
)
CONSTRAINTS = st.one_of(
    st.fixed_dictionaries({"json": SCHEMAS.map(without_bytes)}),
    st.fixed_dictionaries({"json": SCHEMAS.map(without_bytes).map(json.dumps) | TEXT}),
    st.fixed_dictionaries({"regex": PATTERNS | TEXT}),
    st.fixed_dictionaries({"choice": st.lists(TEXT, max_size=3)}),
    st.fixed_dictionaries({"grammar": st.sampled_from(['root ::= "a"', "root ::= root", 'start: "a"', ""]) | TEXT}),
    st.fixed_dictionaries({"json_object": st.booleans()}),
    st.fixed_dictionaries({"structural_tag": TEXT | SCHEMAS.map(without_bytes).map(json.dumps)}),
)
PLACES = st.fixed_dictionaries({"offset": st.integers(-1, 5), "length": st.integers(-1, 5)})
ITEMS = st.fixed_dictionaries({"data": st.none(), "modality": TEXT, "identifier": TEXT, "mm_position": PLACES})
SAMPLING = (
    dict.fromkeys("temperature top_p min_p presence_penalty frequency_penalty repetition_penalty".split(), FLOATS)
    | dict.fromkeys("top_k seed max_tokens min_tokens n routed_experts_prompt_start".split(), NUMBERS)
    | dict.fromkeys("logprobs prompt_logprobs thinking_token_budget".split(), NUMBERS)
    | dict.fromkeys("stop_token_ids allowed_token_ids logprob_token_ids _all_stop_token_ids".split(), IDS)
    | {
        "logit_bias": st.dictionaries(st.integers(-1, VOCABULARY), FLOATS, max_size=3),
        "_bad_words_token_ids": st.lists(IDS, max_size=3),
        "structured_outputs": CONSTRAINTS,
        "repetition_detection": st.fixed_dictionaries({"max_pattern_size": NUMBERS, "min_count": NUMBERS}),
        "extra_args": st.dictionaries(st.sampled_from(["kv_transfer_params", "x"]), JUNK, max_size=2),
    }
)
FIELD = {
    "prompt_token_ids": IDS,
    "mm_features": st.lists(ITEMS, max_size=2),
    "pooling_params": st.tuples(st.none(), NUMBERS, st.none(), st.none(), st.sampled_from(["embed", "classify"])),
    "lora_request": st.tuples(TEXT, NUMBERS, TEXT),
    "cache_salt": TEXT,
    "prompt_embeds": st.tuples(st.just("float32"), st.lists(st.integers(-1, 3), max_size=2), st.binary(max_size=8)),
    "prompt_is_token_ids": st.lists(st.booleans(), max_size=5),
    "client_index": NUMBERS,
    "priority": st.integers(-(2**63), 2**63 - 1),
    "trace_headers": st.dictionaries(TEXT, TEXT, max_size=2),
    "reasoning_ended": st.booleans(),
    "reasoning_parser_kwargs": st.dictionaries(TEXT, JUNK, max_size=2),
    "session_id": TEXT,
}


def some(values: dict[str, Any], most: int) -> st.SearchStrategy[dict[str, Any]]:
    """A few fields with values: more of them would hide each other's problems."""
    return st.lists(st.sampled_from(sorted(values)), max_size=most, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: values[name] for name in names})
    )


TYPED = st.tuples(some(SAMPLING, 2), some(FIELD, 1))
UNTYPED = st.tuples(some(dict.fromkeys(SAMPLING, JUNK), 1), some(dict.fromkeys((*FIELD, "sampling_params"), JUNK), 1))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.lists(TYPED | TYPED | UNTYPED, min_size=1, max_size=8))
def test_whatever_a_front_end_sends_is_answered_and_the_next_request_is_served(core, expected, asked):
    bad = [request(new_id(), sampling=sampling, **fields) for sampling, fields in asked]
    good = request(new_id())
    core.ask(*bad, good)
    assert core.tokens[good[0]] == expected
    assert core.running()
