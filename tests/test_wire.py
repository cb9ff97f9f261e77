"""The codec and the tokenizer archive on their own, and whatever a client may send."""

from __future__ import annotations

import io
import zipfile

import grpc
import pytest
from client import TIMEOUT, Client, chunks
from client import request as generate_request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from smg_grpc_proto import vllm_engine_pb2 as pb

from smg_grpc_servicer.wire import tokenizer_bundle
from smg_grpc_servicer.wire.calls import InvalidCall, UnsupportedCall
from smg_grpc_servicer.wire.contracts.vllm import VllmContract

FLOATS = st.floats(width=32) | st.sampled_from([0.0, 0.5, 1.0, 2.0])
IDS = st.lists(st.integers(0, 3000) | st.integers(0, 2**32 - 1), max_size=20)
INT32 = st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 30)
UINT32 = st.integers(0, 2**32 - 1) | st.integers(0, 20)
TEXT = st.text(max_size=20)

sampling = st.fixed_dictionaries(
    {},
    optional={
        "temperature": FLOATS,
        "top_p": FLOATS,
        "top_k": UINT32,
        "min_p": FLOATS,
        "frequency_penalty": FLOATS,
        "presence_penalty": FLOATS,
        "repetition_penalty": FLOATS,
        "max_tokens": st.integers(1, 20) | UINT32,
        "min_tokens": UINT32,
        "stop": st.lists(TEXT, max_size=3),
        "stop_token_ids": IDS,
        "n": st.integers(0, 4) | UINT32,
        "logprobs": INT32,
        "prompt_logprobs": INT32,
        "seed": INT32,
        "logit_bias": st.dictionaries(INT32, FLOATS, max_size=3),
        "truncate_prompt_tokens": INT32,
        "ignore_eos": st.booleans(),
    },
)
constraint = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"json_schema": TEXT}),
    st.fixed_dictionaries({"regex": TEXT}),
    st.fixed_dictionaries({"json_object": st.booleans()}),
    st.fixed_dictionaries({"choice": st.builds(lambda c: pb.ChoiceConstraint(choices=c), st.lists(TEXT, max_size=3))}),
)
requests = st.fixed_dictionaries(
    {"request_id": st.text(max_size=5), "stream": st.booleans()},
    optional={
        "kv_transfer_params_json": TEXT | st.just('{"do_remote_prefill": true}'),
        "data_parallel_rank": INT32,
    },
)
inputs = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"text": TEXT}),
    st.fixed_dictionaries({"tokenized": st.builds(lambda ids: pb.TokenizedInput(input_ids=ids), IDS)}),
)


def message_of(request: dict, prompt: dict, fields: dict, bound: dict) -> pb.GenerateRequest:
    """A request of random fields that asks for 20 tokens at most: nobody needs to wait for a whole context."""
    message = pb.GenerateRequest(**request, **prompt, sampling_params=pb.SamplingParams(**fields, **bound))
    if message.sampling_params.max_tokens > 20 or not message.sampling_params.HasField("max_tokens"):
        message.sampling_params.max_tokens = 20
    return message


REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)
# smg's Rust server gives what the engine core refuses no other code.
RUST_REFUSALS = (*REFUSALS, grpc.StatusCode.INTERNAL)


def answered(client: Client, message: pb.GenerateRequest, refusals: tuple[grpc.StatusCode, ...] = REFUSALS) -> bool:
    """Whether a request was served; a refusal is a sentence under a code of the client's."""
    try:
        answers = list(client.stub.Generate(message, timeout=30))
    except grpc.RpcError as error:
        assert error.code() in refusals, error
        assert error.details()
        return False
    completes = sum(answer.WhichOneof("response") == "complete" for answer in answers)
    assert completes == (message.sampling_params.n or 1)
    return True


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests, inputs, sampling, constraint)
def test_whatever_a_client_sends_is_answered_or_refused_with_a_sentence(fake_worker, request, prompt, fields, bound):
    with Client(fake_worker.address) as client:
        if answered(client, message_of(request, prompt, fields, bound)):
            call, _ = fake_worker.engine.submitted[-1]
            assert 0 < len(call.token_ids) < 512
            assert max(call.token_ids) < 2048
        client.check_empty()


@pytest.mark.engine
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests, inputs, sampling, constraint)
def test_whatever_a_client_sends_the_engine_serves_the_next_call(vllm_worker, request, prompt, fields, bound):
    with Client(vllm_worker.address) as client:
        answered(client, message_of(request, prompt, fields, bound))
        assert client.complete(max_tokens=2).completion_tokens == 2


@pytest.mark.engine
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests, inputs, sampling, constraint)
def test_whatever_a_client_sends_through_rust_touches_nobody_else(rust_worker, request, prompt, fields, bound):
    with Client(rust_worker.address) as client:
        message = message_of(request, prompt, fields, bound)
        message.sampling_params.n %= 5  # the server makes as many requests of one as it is asked for
        expected = list(client.complete(max_tokens=12).output_ids)
        other = client.stub.Generate(generate_request(max_tokens=12, stream=True), timeout=TIMEOUT)
        answered(client, message, RUST_REFUSALS)
        assert [token for chunk in chunks(list(other)) for token in chunk.token_ids] == expected


@given(st.binary(max_size=200))
def test_any_bytes_that_parse_become_a_call_or_a_named_refusal(data: bytes):
    message = pb.GenerateRequest()
    try:
        message.ParseFromString(data)
    except Exception:  # noqa: BLE001  protobuf's own refusal, before the codec
        return
    try:
        call = VllmContract().generate_call(message, [("traceparent", "x")])
    except (InvalidCall, UnsupportedCall) as refusal:
        assert str(refusal)
    else:
        assert call.request_id == message.request_id


def test_the_archive_holds_tokenizer_files_alone_in_order_and_is_the_same_each_time(tmp_path):
    for name in ("merges.txt", "config.json", "tokenizer.json", "extra.tiktoken", "model.safetensors", "chat.jinja"):
        (tmp_path / name).write_text(name * 10)
    (tmp_path / "vocab.json").mkdir()
    archive = tokenizer_bundle.build(tmp_path)
    names = zipfile.ZipFile(io.BytesIO(archive)).namelist()
    assert names == ["tokenizer.json", "config.json", "merges.txt", "extra.tiktoken", "chat.jinja"]
    (tmp_path / "tokenizer.json").touch()
    assert tokenizer_bundle.build(tmp_path) == archive
    parts = list(tokenizer_bundle.chunks(b"x" * (tokenizer_bundle.CHUNK_BYTES * 2 + 1)))
    assert [len(data) for data, _ in parts] == [65536, 65536, 1]
    assert [bool(digest) for _, digest in parts] == [False, False, True]


def test_an_empty_directory_makes_no_archive(tmp_path):
    with pytest.raises(FileNotFoundError):
        tokenizer_bundle.build(tmp_path)
