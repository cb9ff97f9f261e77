"""What is refused before the engine sees it, on every worker."""

from __future__ import annotations

import math

import grpc
import pytest
from client import TIMEOUT, Client, new_id, request
from smg_grpc_proto import vllm_engine_pb2 as pb

REFUSED = [
    ({"prompt": []}, "input_ids", "empty"),
    ({"prompt": [1, 5000, 2]}, "input_ids", "5000"),
    ({"prompt": [2**32 - 1]}, "input_ids", "4294967295"),
    ({"prompt": ""}, "text", "empty"),
    ({"temperature": 2.5}, "temperature", "2.5"),
    ({"temperature": -0.1}, "temperature", "-0.1"),
    ({"temperature": math.nan}, "temperature", "nan"),
    ({"temperature": math.inf}, "temperature", "inf"),
    ({"top_p": 1.5}, "top_p", "1.5"),
    ({"top_p": -0.5}, "top_p", "-0.5"),
    ({"top_p": math.nan}, "top_p", "nan"),
    ({"min_p": 1.1}, "min_p", "1.1"),
    ({"frequency_penalty": 2.5}, "frequency_penalty", "2.5"),
    ({"presence_penalty": -3}, "presence_penalty", "-3"),
    ({"repetition_penalty": -1}, "repetition_penalty", "-1"),
    ({"repetition_penalty": math.inf}, "repetition_penalty", "inf"),
    ({"top_k": 2**32 - 1}, "top_k", "4294967295"),
    ({"max_tokens": 0}, "max_tokens", "0"),
    ({"max_tokens": 10**6}, "max_tokens", "1000000"),
    ({"min_tokens": 9}, "min_tokens", "9"),
    ({"n": 100_000, "temperature": 1}, "n", "100000"),
    ({"stop": ["a", ""]}, "stop", "empty"),
    ({"stop_token_ids": [2048]}, "stop_token_ids", "2048"),
    ({"logit_bias": {2048: 1.0}}, "logit_bias", "2048"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias", "-1"),
    ({"logit_bias": {1: math.nan}}, "logit_bias", "nan"),
    ({"logit_bias": {1: 500.0}}, "logit_bias", "500"),
    ({"logprobs": -2}, "logprobs", "-2"),
    ({"prompt_logprobs": -7}, "prompt_logprobs", "-7"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "0"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "-2"),
    ({"json_object": False}, "json_object", "false"),
    ({"json_schema": " "}, "json_schema", "empty"),
    ({"grammar": ""}, "grammar", "empty"),
    ({"structural_tag": ""}, "structural_tag", "empty"),
    ({"regex": "a\0b"}, "regex", "NUL"),
    ({"choice": pb.ChoiceConstraint()}, "choice", "alternatives"),
    ({"choice": pb.ChoiceConstraint(choices=["a", ""])}, "choice", "alternatives"),
    ({"data_parallel_rank": 17}, "data_parallel_rank", "17"),
    ({"data_parallel_rank": -1}, "data_parallel_rank", "-1"),
    ({"kv_transfer_params_json": "[1]"}, "kv_transfer_params_json", "list"),
    ({"kv_transfer_params_json": "{"}, "kv_transfer_params_json", "JSON"),
    ({"kv_transfer_params_json": '{"a": NaN}'}, "kv_transfer_params_json", "NaN"),
    ({"kv_transfer_params_json": "[" * 100_000}, "kv_transfer_params_json", "JSON"),
    ({"kv_transfer_params": pb.KvTransferParams(remote_port=5)}, "remote_host", "empty"),
    ({"kv_transfer_params": pb.KvTransferParams(remote_host="h", remote_port=70000)}, "remote_port", "70000"),
]


@pytest.mark.parametrize(("fields", "field", "value"), REFUSED, ids=lambda item: str(item)[:50])
def test_a_bad_value_is_refused_by_name_and_value(client: Client, fields, field: str, value: str):
    code, sentence = client.refused(**fields)
    assert code == "INVALID_ARGUMENT"
    assert field.rpartition(".")[2] in sentence
    if client.kind != "rust":  # its sentences name the field, not always the value
        assert value in sentence


def test_an_empty_id_is_refused(client: Client):
    code, sentence = client.refused("")
    assert code == "INVALID_ARGUMENT"
    assert "request_id" in sentence


def test_a_request_without_input_is_refused(client: Client):
    message = pb.GenerateRequest(request_id=new_id())
    with pytest.raises(grpc.RpcError) as error:
        list(client.stub.Generate(message, timeout=TIMEOUT))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "input" in error.value.details()


def test_a_prompt_that_fills_the_context_is_refused(client: Client):
    context = client.stub.GetModelInfo(pb.GetModelInfoRequest()).max_context_length
    for prompt in ([1] * context, [1] * (context + 1)):
        message = request(prompt=prompt)
        message.sampling_params.ClearField("max_tokens")
        with pytest.raises(grpc.RpcError) as error:
            list(client.stub.Generate(message, timeout=TIMEOUT))
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        if client.kind != "rust":
            assert str(context) in error.value.details()


@pytest.mark.parametrize(
    "fields",
    [
        {"mm_inputs": pb.MultimodalInputs(im_token_id=3)},
        {"media_refs": pb.MediaRefs(items=[pb.MediaRef(url="http://127.0.0.1/")])},
    ],
)
def test_media_is_refused_not_dropped(client: Client, fields):
    code, sentence = client.refused(**fields)
    assert code == "UNIMPLEMENTED"
    assert next(iter(fields)) in sentence


def test_what_is_refused_leaves_its_id_free(client: Client):
    request_id = new_id()
    client.refused(request_id, temperature=9)
    assert client.complete(request_id).completion_tokens == 8
