"""What is refused before the engine sees it, on every worker."""

from __future__ import annotations

import math

import grpc
import pytest
from client import TIMEOUT, Client, new_id
from google.protobuf import struct_pb2
from smg_grpc_proto import sglang_scheduler_pb2 as sgl
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


PIXELS = sgl.TensorData(data=bytes(8), shape=[1, 2], dtype="float32")


def media(**fields) -> sgl.MultimodalInputs:
    """One image at the second prompt token, with `fields` in place of its own."""
    place = [sgl.PlaceholderRange(offset=1, length=1)]
    return sgl.MultimodalInputs(**({"pixel_values": PIXELS, "mm_placeholders": place} | fields))


def custom(**values) -> struct_pb2.Struct:
    message = struct_pb2.Struct()
    message.update(values)
    return message


SGLANG_REFUSED = [
    ({"request_id": "HEALTH_CHECK_1"}, "request_id", "HEALTH_CHECK"),
    ({"prompt": []}, "input_ids", "empty"),
    ({"prompt": [1, 5000, 2]}, "input_ids", "5000"),
    ({"prompt": [2**32 - 1]}, "input_ids", "4294967295"),
    ({"temperature": -0.1}, "temperature", "-0.1"),
    ({"temperature": math.nan}, "temperature", "nan"),
    ({"temperature": math.inf}, "temperature", "inf"),
    ({"top_p": 1.5}, "top_p", "1.5"),
    ({"top_p": math.nan}, "top_p", "nan"),
    ({"min_p": 1.1}, "min_p", "1.1"),
    ({"frequency_penalty": 2.5}, "frequency_penalty", "2.5"),
    ({"presence_penalty": -3}, "presence_penalty", "-3"),
    ({"repetition_penalty": -1}, "repetition_penalty", "-1"),
    ({"repetition_penalty": 2.5}, "repetition_penalty", "2.5"),
    ({"top_k": -2}, "top_k", "-2"),
    ({"max_tokens": 10**6}, "max_new_tokens", "1000000"),
    ({"min_tokens": 9}, "min_new_tokens", "9"),
    ({"n": 100_000, "temperature": 1}, "n", "100000"),
    ({"stop": ["a", ""]}, "stop", "empty"),
    ({"stop_token_ids": [2048]}, "stop_token_ids", "2048"),
    ({"logit_bias": {2048: 1.0}}, "logit_bias", "2048"),
    ({"logit_bias": {"x": 1.0}}, "logit_bias", "'x'"),
    ({"logit_bias": {"07": 1.0}}, "logit_bias", "'07'"),
    ({"logit_bias": {"9" * 5000: 1.0}}, "logit_bias", "999"),
    ({"logit_bias": {1: math.nan}}, "logit_bias", "nan"),
    ({"stream_interval": 0}, "stream_interval", "0"),
    ({"stream_interval": -4}, "stream_interval", "-4"),
    ({"return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num", "-1"),
    ({"return_logprob": True, "top_logprobs_num": 5000}, "top_logprobs_num", "5000"),
    ({"return_logprob": True, "logprob_start_len": -2}, "logprob_start_len", "-2"),
    ({"return_logprob": True, "logprob_start_len": 5}, "logprob_start_len", "5"),
    ({"return_logprob": True, "logprob_start_len": -1, "token_ids_logprob": [2048]}, "token_ids_logprob", "2048"),
    ({"regex": "a\0b"}, "regex", "NUL"),
    ({"json_schema": " "}, "json_schema", "empty"),
    ({"grammar": ""}, "ebnf_grammar", "empty"),
    ({"structural_tag": ""}, "structural_tag", "empty"),
    ({"custom_params": custom(a=math.nan)}, "custom_params", "nan"),
    ({"custom_params": custom(a=[{"b": math.inf}])}, "custom_params", "inf"),
    ({"data_parallel_rank": 17}, "data_parallel_rank", "17"),
    ({"data_parallel_rank": -1}, "data_parallel_rank", "-1"),
    ({"disaggregated_params": sgl.DisaggregatedParams(bootstrap_port=70000)}, "bootstrap_port", "70000"),
    ({"disaggregated_params": sgl.DisaggregatedParams(bootstrap_room=-1)}, "bootstrap_room", "-1"),
    ({"mm_inputs": media(pixel_values=None)}, "pixel_values", "missing"),
    ({"mm_inputs": media(pixel_values=sgl.TensorData(shape=[0], dtype="float32"))}, "pixel_values", "empty"),
    ({"mm_inputs": media(pixel_values=sgl.TensorData(data=b"x", dtype="float64"))}, "pixel_values", "float64"),
    ({"mm_inputs": media(pixel_values=sgl.TensorData(data=b"123", shape=[1], dtype="float32"))}, "pixel_values", "3"),
    ({"mm_inputs": media(pixel_values=sgl.TensorData(data=b"1", shape=[1] * 9, dtype="uint8"))}, "pixel_values", "9"),
    ({"mm_inputs": media(model_specific_tensors={"grid": sgl.TensorData(dtype="int8")})}, "grid", "int8"),
    ({"mm_inputs": media(mm_placeholders=[])}, "mm_placeholders", "empty"),
    ({"mm_inputs": media(mm_placeholders=[sgl.PlaceholderRange(offset=3, length=2)])}, "mm_placeholders", "2"),
    ({"mm_inputs": media(mm_placeholders=[sgl.PlaceholderRange(offset=3)])}, "mm_placeholders", "0"),
    ({"mm_inputs": media(mm_placeholders=[sgl.PlaceholderRange(offset=1, length=2)] * 2)}, "mm_placeholders", "1"),
    ({"mm_inputs": media(image_urls=["http://127.0.0.1/"])}, "image_urls", "pixel_values"),
    ({"mm_inputs": media(pixel_values=None, image_urls=[""])}, "image_urls", "empty"),
]


@pytest.mark.contract("sglang")
@pytest.mark.parametrize(("fields", "field", "value"), SGLANG_REFUSED, ids=lambda item: str(item)[:50])
def test_a_bad_value_of_sglangs_is_refused_by_name_and_value(client: Client, fields, field: str, value: str):
    code, sentence = client.refused(**fields)
    assert code == "INVALID_ARGUMENT"
    assert field in sentence
    assert value in sentence


SGLANG_UNSERVED = [
    ({"mm_inputs": media(video_urls=["http://127.0.0.1/"])}, "mm_inputs.video_urls"),
    ({"mm_inputs": media(audio_urls=["http://127.0.0.1/"])}, "mm_inputs.audio_urls"),
    ({"mm_inputs": media(image_data=[b"x"])}, "mm_inputs.image_data"),
    ({"mm_inputs": media(video_data=[b"x"])}, "mm_inputs.video_data"),
    ({"mm_inputs": media(audio_data=[b"x"])}, "mm_inputs.audio_data"),
    ({"mm_inputs": media(modalities=["image", "video"])}, "mm_inputs.modalities"),
    ({"input_embeds": [0.5]}, "input_embeds"),
]


@pytest.mark.contract("sglang")
@pytest.mark.parametrize(("fields", "field"), SGLANG_UNSERVED, ids=lambda item: str(item)[:50])
def test_what_nobody_serves_is_refused_not_dropped(client: Client, fields, field: str):
    code, sentence = client.refused(**fields)
    assert code == "UNIMPLEMENTED"
    assert field in sentence


@pytest.mark.contract("sglang")
@pytest.mark.parametrize("request_id", ["", "HEALTH_CHECK_5"])
def test_an_abort_of_no_clients_id_is_refused(client: Client, request_id: str):
    with pytest.raises(grpc.RpcError) as error:
        client.abort(request_id)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "request_id" in error.value.details()


@pytest.mark.contract("vllm")
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
    message = client.pb.GenerateRequest(request_id=new_id())
    with pytest.raises(grpc.RpcError) as error:
        list(client.stub.Generate(message, timeout=TIMEOUT))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert {"vllm": "input", "sglang": "tokenized"}[client.contract] in error.value.details()


def test_a_prompt_that_fills_the_context_is_refused(client: Client):
    for prompt in ([1] * client.context, [1] * (client.context + 1)):
        code, sentence = client.refused(prompt=prompt, max_tokens=None)
        assert code == "INVALID_ARGUMENT"
        if client.kind != "rust":
            assert str(client.context) in sentence


@pytest.mark.contract("vllm")
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
