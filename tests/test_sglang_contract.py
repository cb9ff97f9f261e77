"""The SGLang codec on its own, and whatever a client may send."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
from client_sglang import SglangClient, pb, request
from google.protobuf import struct_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smg_grpc_servicer.wire.calls import (
    Bootstrap,
    Constraint,
    ConstraintKind,
    Finish,
    FinishReason,
    InvalidCall,
    Logprobs,
    MediaTensors,
    Output,
    Sampling,
    Tensor,
    UnsupportedCall,
)
from smg_grpc_servicer.wire.contracts.sglang import SglangContract

CONTRACT = SglangContract()


def sampling_of(**fields) -> Sampling:
    return CONTRACT.generate_call(request(**fields), None).sampling


def test_a_request_of_nothing_but_tokens_has_no_value_that_only_proto_has():
    message = pb.GenerateRequest(request_id="a", tokenized=pb.TokenizedInput(input_ids=[1]))
    call = CONTRACT.generate_call(message, None)
    assert call.sampling == Sampling(temperature=0.0)
    assert (call.lora_id, call.custom_logit_processor, call.bootstrap, call.media) == (None,) * 4
    assert call.data_parallel_rank is None


def test_every_sampling_field_is_read():
    custom = struct_pb2.Struct()
    custom.update({"a": {"b": [1, "x", None, True]}})
    sampling = sampling_of(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        max_tokens=9,
        min_tokens=3,
        stop=["x"],
        stop_token_ids=[4],
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
        ignore_eos=True,
        no_stop_trim=True,
        n=2,
        stream_interval=5,
        logit_bias={7: 2.5},
        custom_params=custom,
        ebnf_grammar='root ::= "x"',
    )
    assert sampling == Sampling(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        max_tokens=9,
        min_tokens=3,
        stop=("x",),
        stop_token_ids=(4,),
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
        ignore_eos=True,
        include_stop=True,
        n=2,
        stream_interval=5,
        logit_bias={7: 2.5},
        custom_params={"a": {"b": [1.0, "x", None, True]}},
        constraint=Constraint(ConstraintKind.GRAMMAR, 'root ::= "x"'),
    )


def test_every_field_beside_sampling_is_read():
    call = CONTRACT.generate_call(
        request(
            "a",
            [1, 2, 3],
            stream=True,
            data_parallel_rank=0,
            lora_id="l",
            custom_logit_processor="p",
            require_reasoning=True,
            return_hidden_states=True,
            disaggregated_params=pb.DisaggregatedParams(bootstrap_host="h", bootstrap_port=7, bootstrap_room=3),
        ),
        [("traceparent", "t"), ("other", "x")],
    )
    assert (call.request_id, list(call.token_ids), call.stream, call.data_parallel_rank) == ("a", [1, 2, 3], True, 0)
    assert (call.lora_id, call.custom_logit_processor) == ("l", "p")
    assert call.require_reasoning
    assert call.hidden_states
    assert call.bootstrap == Bootstrap("h", 7, 3)
    assert call.trace_headers == {"traceparent": "t"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"return_logprob": False, "top_logprobs_num": 3, "token_ids_logprob": [1]}, (None, None, 0, ())),
        ({"return_logprob": True, "logprob_start_len": -1}, (0, None, 0, ())),
        ({"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": 3}, (3, None, 0, ())),
        ({"return_logprob": True}, (0, 0, 0, ())),
        ({"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 4}, (2, 2, 4, ())),
        ({"return_logprob": True, "logprob_start_len": -1, "token_ids_logprob": [5, 6]}, (0, None, 0, (5, 6))),
    ],
)
def test_logprobs_are_of_the_output_or_from_a_prompt_position_on(fields, expected):
    asked = sampling_of(**fields)
    assert (asked.logprobs, asked.prompt_logprobs, asked.prompt_logprobs_from, asked.logprob_token_ids) == expected


@pytest.mark.parametrize("top_k", [0, -1])
def test_top_k_is_off_by_zero_and_minus_one(top_k: int):
    assert sampling_of(top_k=top_k).top_k == 0


def test_a_room_without_a_host_and_port_is_one_of_the_engines_own():
    call = CONTRACT.generate_call(request(disaggregated_params=pb.DisaggregatedParams()), None)
    assert call.bootstrap == Bootstrap(None, None, 0)


def test_preprocessed_images_are_read_with_their_places():
    pixels = pb.TensorData(data=bytes(range(8)), shape=[2, 2], dtype="bfloat16")
    grid = pb.TensorData(data=bytes(24), shape=[1, 3], dtype="int64")
    places = [pb.PlaceholderRange(offset=0, length=2), pb.PlaceholderRange(offset=2, length=1)]
    message = pb.MultimodalInputs(
        pixel_values=pixels,
        model_specific_tensors={"image_grid_thw": grid},
        im_token_id=9,
        mm_placeholders=places,
        modalities=["image", "IMAGE"],
    )
    assert CONTRACT.generate_call(request(mm_inputs=message), None).media == MediaTensors(
        pixel_values=Tensor(bytes(range(8)), (2, 2), "bfloat16"),
        tensors={"image_grid_thw": Tensor(bytes(24), (1, 3), "int64")},
        token_id=9,
        placeholders=((0, 2), (2, 1)),
    )


def test_image_addresses_are_read_and_an_empty_message_is_no_media():
    message = pb.MultimodalInputs(image_urls=["http://127.0.0.1/a", "b"])
    call = CONTRACT.generate_call(request(mm_inputs=message), None)
    assert (call.media, call.image_urls) == (None, ("http://127.0.0.1/a", "b"))
    call = CONTRACT.generate_call(request(mm_inputs=pb.MultimodalInputs()), None)
    assert (call.media, call.image_urls) == (None, ())


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("temperature", "sampling_params.temperature"),
        ("max_tokens", "sampling_params.max_new_tokens"),
        ("grammar", "sampling_params.ebnf_grammar"),
        ("include_stop", "sampling_params.no_stop_trim"),
        ("prompt_logprobs_from", "logprob_start_len"),
        ("lora_id", "lora_id"),
        ("bootstrap", "disaggregated_params"),
        ("hidden_states", "return_hidden_states"),
    ],
)
def test_a_field_has_the_contracts_name(name: str, field: str):
    assert CONTRACT.field(name) == field


@pytest.mark.parametrize(
    ("finish", "reason", "token", "text"),
    [
        (Finish(FinishReason.STOP, matched=5), "stop", 5, ""),
        (Finish(FinishReason.STOP, matched=0), "stop", 0, ""),
        (Finish(FinishReason.STOP, matched="end"), "stop", 0, "end"),
        (Finish(FinishReason.LENGTH), "length", 0, ""),
        (Finish(FinishReason.ABORT), "abort", 0, ""),
    ],
)
def test_an_end_is_said_with_what_matched(finish: Finish, reason: str, token: int, text: str):
    output = Output(
        request_id="a",
        index=1,
        token_ids=[1, 2],
        prompt_tokens=3,
        completion_tokens=2,
        cached_tokens=1,
        reasoning_tokens=1,
        draft_tokens=6,
        accepted_tokens=4,
    )
    response = CONTRACT.complete(output, finish)
    complete = response.complete
    assert (response.request_id, complete.index, list(complete.output_ids)) == ("a", 1, [1, 2])
    assert (complete.prompt_tokens, complete.completion_tokens, complete.cached_tokens) == (3, 2, 1)
    assert (complete.reasoning_tokens, complete.spec_draft_tokens, complete.spec_accepted_tokens) == (1, 6, 4)
    assert (complete.finish_reason, complete.matched_token_id, complete.matched_stop_str) == (reason, token, text)
    assert (complete.WhichOneof("matched_stop") is None) == (finish.matched is None)


def test_an_end_without_a_token_is_still_a_complete():
    output = Output(request_id="", index=0, token_ids=[], prompt_tokens=0, completion_tokens=0, cached_tokens=0)
    assert CONTRACT.complete(output, Finish(FinishReason.ABORT)).WhichOneof("response") == "complete"
    assert CONTRACT.chunk(output).WhichOneof("response") == "chunk"


def test_logprobs_of_the_token_stand_beside_the_ranked_and_the_named():
    ids, values = np.array([[7, 1, 2]]), np.array([[-3.0, -1.0, -2.0]])
    named = Logprobs(np.array([[9]]), np.array([[-4.0]]))
    output = Output(
        request_id="a",
        index=0,
        token_ids=[7],
        prompt_tokens=1,
        completion_tokens=1,
        cached_tokens=0,
        logprobs=Logprobs(ids, values),
        token_id_logprobs=named,
    )
    logprobs = CONTRACT.chunk(output).chunk.output_logprobs
    assert (list(logprobs.token_ids), list(logprobs.token_logprobs)) == ([7], [-3.0])
    assert list(logprobs.top_logprobs) == [pb.TopLogProbs(values=[-1.0, -2.0], token_ids=[1, 2])]
    assert list(logprobs.token_ids_logprobs) == [pb.TopLogProbs(values=[-4.0], token_ids=[9])]


@given(st.binary(max_size=300))
def test_any_bytes_that_parse_become_a_call_or_a_named_refusal(data: bytes):
    for kind, read in ((pb.GenerateRequest, CONTRACT.generate_call), (pb.EmbedRequest, CONTRACT.embed_call)):
        message = kind()
        try:
            message.ParseFromString(data)
        except Exception:  # noqa: BLE001  protobuf's own refusal, before the codec
            continue
        try:
            call = read(message, None)
        except (InvalidCall, UnsupportedCall) as refusal:
            assert str(refusal)
        else:
            assert call.request_id == message.request_id


# Fields that are likely enough together to be served, now and then.
FLOATS = st.floats(width=32) | st.sampled_from([0.0, 0.5, 1.0, 2.0])
IDS = st.lists(st.integers(0, 2500), max_size=4)
INT32 = st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 8)
TEXT = st.text(max_size=8)
VALUES = st.recursive(st.none() | st.booleans() | st.floats() | TEXT, lambda inner: st.lists(inner, max_size=2))


def struct_of(values: dict) -> struct_pb2.Struct:
    message = struct_pb2.Struct()
    message.update(values)
    return message


TENSORS = st.builds(
    lambda data, shape, dtype: pb.TensorData(data=data, shape=shape, dtype=dtype),
    st.binary(max_size=16),
    st.lists(st.integers(0, 4) | st.integers(0, 2**32 - 1), max_size=3),
    st.sampled_from(["float32", "uint8", "int64", "complex64", ""]),
)
MEDIA = st.builds(
    lambda fields, places: pb.MultimodalInputs(
        mm_placeholders=[pb.PlaceholderRange(offset=o, length=n) for o, n in places], **fields
    ),
    st.fixed_dictionaries(
        {},
        optional={
            "pixel_values": TENSORS,
            "model_specific_tensors": st.dictionaries(TEXT, TENSORS, max_size=2),
            "image_urls": st.lists(TEXT, max_size=2),
            "image_data": st.lists(st.binary(max_size=3), max_size=1),
            "modalities": st.lists(st.sampled_from(["image", "video"]), max_size=2),
        },
    ),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=2),
)
FIELDS = st.fixed_dictionaries(
    {"request_id": TEXT, "prompt": IDS, "stream": st.booleans(), "max_tokens": st.integers(0, 20)},
    optional={
        "temperature": FLOATS,
        "top_p": FLOATS,
        "top_k": INT32,
        "min_p": FLOATS,
        "repetition_penalty": FLOATS,
        "min_tokens": st.integers(0, 30),
        "stop": st.lists(TEXT, max_size=3),
        "stop_token_ids": IDS,
        "n": st.integers(0, 4) | st.integers(0, 2**32 - 1),
        "stream_interval": INT32,
        "logit_bias": st.dictionaries(TEXT | st.integers(0, 3000), FLOATS, max_size=3),
        "custom_params": st.builds(struct_of, st.dictionaries(TEXT, VALUES, max_size=2)),
        "return_logprob": st.booleans(),
        "logprob_start_len": INT32,
        "top_logprobs_num": INT32,
        "token_ids_logprob": IDS,
        "return_hidden_states": st.booleans(),
        "require_reasoning": st.booleans(),
        "data_parallel_rank": INT32,
        "lora_id": TEXT,
        "disaggregated_params": st.builds(
            lambda host, port, room: pb.DisaggregatedParams(
                bootstrap_host=host, bootstrap_port=port, bootstrap_room=room
            ),
            TEXT,
            INT32,
            INT32,
        ),
        "mm_inputs": MEDIA,
        "input_embeds": st.lists(FLOATS, max_size=1),
    },
)
REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(FIELDS)
def test_whatever_a_client_sends_is_answered_or_refused_with_a_sentence(fake_sglang_worker, fields):
    message = request(**fields)
    with SglangClient(fake_sglang_worker.address) as client:
        try:
            answers = list(client.stub.Generate(message, timeout=30))
        except grpc.RpcError as error:
            assert error.code() in REFUSALS, error
            assert error.details()
        else:
            ends = [answer for answer in answers if answer.WhichOneof("response") == "complete"]
            assert len(ends) == (message.sampling_params.n or 1)
            call, _ = fake_sglang_worker.engine.submitted[-1]
            assert 0 < len(call.token_ids) < 512
            assert max(call.token_ids) < 2048
        client.check_empty()
