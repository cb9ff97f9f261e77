"""The ZMQ wire of headless SGLang: captured frames by name, any bytes, and what we send read by another library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_wire import COLUMNS, SAMPLING, TAILS, generate

from smg_grpc_servicer.wire import sglang_frames as frames
from smg_grpc_servicer.wire.sglang_frames import LoadTail, TokenBatch, Undecodable

CAPTURES = json.loads((Path(__file__).parent / "captures" / "sglang_smg_1.13.0.json").read_text())


def captured(name: str) -> Any:
    (capture,) = (item for item in CAPTURES["frames"] if item["request"] == name)
    return frames.decode([bytes.fromhex(frame) for frame in capture["hex"]])


def decode(message: Any, kind: bytes = frames.ADD) -> Any:
    return frames.decode([kind, message if isinstance(message, bytes) else msgpack.packb(message)])


# Requests


@pytest.mark.parametrize(
    ("capture", "fields", "sampling"),
    [
        (
            "plain",
            {"rid": "cap-1", "input_ids": [1, 2, 3], "stream": True, "return_logprob": False},
            {"max_new_tokens": 4, "temperature": 0.5, "top_p": pytest.approx(0.9), "top_k": 5},
        ),
        (
            "constraint and logprobs",
            {"rid": "cap-2", "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0, "stream": False},
            {
                "max_new_tokens": 4,
                "temperature": 0,
                "stop": ["x", "yy"],
                "stop_token_ids": [7],
                "json_schema": '{"type":"object"}',
                "logit_bias": {"5": 1.0},
            },
        ),
        (
            "lora and custom logit processor",
            {"rid": "cap-3", "lora_id": "L1", "custom_logit_processor": "CLP", "require_reasoning": False},
            {"regex": "a+", "ignore_eos": True, "min_new_tokens": 1},
        ),
        (
            "penalties and grammar",
            {"rid": "cap-4", "lora_id": None},
            {
                "min_p": pytest.approx(0.1),
                "frequency_penalty": pytest.approx(0.1),
                "presence_penalty": pytest.approx(0.2),
                "repetition_penalty": pytest.approx(1.1),
                "ebnf": 'root ::= "a"',
                "no_stop_trim": True,
                "stream_interval": 2,
            },
        ),
    ],
)
def test_a_captured_request_is_read_by_name(capture: str, fields: dict[str, Any], sampling: dict[str, Any]):
    request = captured(capture)
    assert {name: getattr(request, name) for name in fields} == fields
    given = request.sampling_params.given()
    assert {name: given.get(name) for name in sampling} == sampling
    assert not {"top_p", "top_k"} & (given.keys() - sampling.keys())  # 0 on the wire


def test_a_captured_control_call_is_read():
    assert captured("flush cache control") == frames.Control(1, "flush_cache", [0.0])


@pytest.mark.parametrize("tail", TAILS)
def test_what_follows_the_fields_of_a_client_makes_no_difference(tail: str):
    assert decode(generate(tail)).sampling_params == decode(generate()).sampling_params


def test_zeros_that_mean_nothing_are_unset_and_others_are_kept():
    values = SAMPLING | {"temperature": 0.0, "min_p": 0.0, "max_new_tokens": 0, "n": 0, "stream_interval": 0}
    given = decode(generate(sampling_params=list(values.values()))).sampling_params.given()
    assert given == {"temperature": 0.0, "min_p": 0.0, "max_new_tokens": 0}


def test_slots_of_a_newer_router_are_ignored():
    more = (*[None] * 9, True, "later", {"of": "any"})
    request = decode(generate(more=(False, False, False, False, 0, False, None, None, "L", None, *more)))
    assert (request.lora_id, request.require_reasoning) == ("L", True)


@pytest.mark.parametrize("field", frames.GenerateFields.unserved)
def test_what_has_no_place_is_refused_by_name(field: str):
    index = frames.GenerateFields.__struct_fields__.index(field)
    message = generate(more=(False, False, False, False, 0, False, None, None, None, None, None))
    message[1 + index] = [1]
    with pytest.raises(Undecodable, match=field) as error:
        decode(message)
    assert error.value.rid == "r"


def test_an_embedding_is_read_by_name():
    head = ["TokenizedEmbeddingReqInput", "e", None, "some text", [1, 2], None, None, list(SAMPLING.values())]
    request = decode([*head, None, None, None, None, 8])
    assert (request.rid, request.input_ids, request.dimensions) == ("e", [1, 2], 8)
    assert decode(head).dimensions is None


def test_a_dispatch_error_and_aborts_are_read():
    error = decode(["EncoderDispatchErrorReq", "d", None, "no encoder", 503])
    assert (error.rid, error.error_msg, error.error_code) == ("d", "no encoder", 503)
    assert decode(["a", "b"], frames.ABORT) == frames.Aborts(["a", "b"])


@pytest.mark.parametrize(
    ("message", "rid"),
    [
        (generate(input_ids="text"), "r"),
        (generate(input_ids=[1.5]), "r"),
        (generate(sampling_params=None), "r"),
        (generate(sampling_params=["many"]), "r"),
        (generate()[:9], "r"),
        (["SomethingElse", "x"], "x"),
        (generate(rid=None), None),
        (generate(rid=7), None),
        ([], None),
        ({}, None),
        (b"", None),
        (b"\xc1", None),
        (b"\x91" * 100_000, None),
    ],
)
def test_what_is_no_request_says_whose_it_was(message: Any, rid: str | None):
    with pytest.raises(Undecodable) as error:
        decode(message)
    assert error.value.rid == rid


@pytest.mark.parametrize("received", [[], [frames.ADD], [b"", b"\x90"], [b"\x07", b"\x90"], [frames.ABORT, b"\x01"]])
def test_frames_without_a_message_are_undecodable(received: list[bytes]):
    with pytest.raises(Undecodable):
        frames.decode(received)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text() | st.integers(0, 9), inner, max_size=5),
    max_leaves=40,
)


@given(st.lists(st.binary(max_size=400) | st.sampled_from([frames.ADD, frames.ABORT, frames.CONTROL]), max_size=4))
def test_any_frames_are_a_message_or_undecodable(received: list[bytes]):
    _message_or_undecodable(received)


@given(st.integers(0, 13), _VALUES, st.sampled_from([frames.ADD, frames.ABORT, frames.CONTROL]))
def test_any_value_in_any_slot_is_a_message_or_undecodable(slot: int, value: Any, kind: bytes):
    message = generate()
    message[slot] = value
    for payload in (message, value):
        _message_or_undecodable([kind, msgpack.packb(payload)])


@given(st.integers(0, 25), _VALUES)
def test_any_value_in_any_sampling_slot_is_a_message_or_undecodable(slot: int, value: Any):
    sampling = list(SAMPLING.values())
    sampling[slot] = value
    _message_or_undecodable([frames.ADD, msgpack.packb(generate(sampling_params=sampling))])


def _message_or_undecodable(received: list[bytes]) -> None:
    try:
        assert isinstance(frames.decode(received), frames.Message)
    except Undecodable as error:
        assert str(error)
    assert isinstance(frames.trace_headers(received), dict)


@pytest.mark.parametrize(
    ("meta", "headers"),
    [
        ({"trace_headers": {"traceparent": "00-1-2-01"}}, {"traceparent": "00-1-2-01"}),
        ({"trace_headers": None}, {}),
        ({"other": 1}, {}),
        ([], {}),
    ],
)
def test_trace_headers_are_those_of_the_third_frame(meta: Any, headers: dict[str, str]):
    assert frames.trace_headers([frames.ADD, b"\x90", msgpack.packb(meta)]) == headers
    assert frames.trace_headers([frames.ADD, b"\x90"]) == {}


# Handshake


def test_the_routers_answer_says_where_to_connect():
    answer = {"addresses": {"inputs": ["ipc://in"], "outputs": ["ipc://out"], "coordinator_input": None}}
    init = frames.decode_init(msgpack.packb(answer | {"parallel_config": {}}))
    assert (init.addresses.inputs, init.addresses.outputs) == (["ipc://in"], ["ipc://out"])


@pytest.mark.parametrize("answer", [{}, [], {"addresses": {"inputs": [], "outputs": ["x"]}}, {"addresses": None}])
def test_an_answer_without_sockets_is_undecodable(answer: Any):
    with pytest.raises(Undecodable):
        frames.decode_init(msgpack.packb(answer))


def test_greetings_are_maps_with_a_status():
    assert msgpack.unpackb(frames.HELLO)["status"] == "HELLO"
    assert msgpack.unpackb(frames.READY)["status"] == "READY"


def test_ready_has_what_the_router_asks_for():
    numbers = dict.fromkeys(frames.Ready.__struct_fields__, 1)
    sent = msgpack.unpackb(
        frames.encode(frames.Ready(**numbers | {"dtype": "bfloat16", "vllm_version": "sglang-0.5.23"}))
    )
    wanted = "max_model_len num_gpu_blocks block_size dtype vllm_version world_size data_parallel_size".split()
    assert set(wanted) <= sent.keys()


# Outputs


def test_a_batch_is_its_name_and_27_columns_in_order():
    values = {name: [name] for name in COLUMNS}
    sent = msgpack.unpackb(frames.encode(TokenBatch(**values)))
    assert sent == ["BatchTokenIDSlimOutput", *([name] for name in COLUMNS)]
    assert len(sent) == 1 + 27


def test_arrays_of_any_library_are_sent_as_lists():
    batch = frames.aborted("x", "no", 400, 3, LoadTail(1, 2, 3, 4))
    assert isinstance(batch, TokenBatch)
    batch.output_hidden_states = [np.ones((1, 2), dtype=np.float32)]
    assert msgpack.unpackb(frames.encode(batch))[27] == [[[1.0, 1.0]]]
    batch.output_hidden_states = [object()]
    with pytest.raises(NotImplementedError, match="object cannot be sent"):
        frames.encode(batch)


def test_the_end_of_a_request_that_made_nothing():
    load = LoadTail(running=1, waiting=2, used_tokens=3, total_tokens=4)
    sent = msgpack.unpackb(frames.encode(frames.aborted("x", "no", 400, 3, load)))
    row = dict(zip(COLUMNS, sent[1:], strict=True))
    assert row["rids"] == ["x"]
    assert (row["finished_reasons"], row["finished_messages"], row["finished_status"]) == (["abort"], ["no"], [400])
    assert (row["engine_index"], row["num_running"], row["num_waiting"]) == (3, 1, 2)
    assert (row["kv_used_tokens"], row["kv_total_tokens"]) == (3, 4)
    assert row["output_ids"] == row["output_token_logprobs_val"] == row["output_token_logprobs_idx"] == [[]]


def test_the_end_of_an_embedding_that_made_nothing():
    sent = msgpack.unpackb(frames.encode(frames.aborted("x", "no", 503, 3, LoadTail(1, 2, 3, 4), generates=False)))
    assert sent == ["BatchEmbeddingSlimOutput", ["x"], [[]], [0], [0], ["abort"], ["no"], [503], 3, 1, 2, 3, 4]


def test_a_reply_to_a_control_call():
    assert msgpack.unpackb(frames.encode(frames.ControlReply(5, True, None, 1))) == [
        "ControlReplySlim",
        5,
        True,
        None,
        1,
    ]
