"""What a generation call answers, on every worker."""

from __future__ import annotations

import json

import grpc
import pytest
from client import PROMPT, Client, chunks, completes, new_id
from smg_grpc_proto import vllm_engine_pb2 as pb


def test_a_call_that_does_not_stream_answers_one_complete(client: Client):
    complete = client.complete(max_tokens=5)
    assert len(complete.output_ids) == 5
    assert (complete.prompt_tokens, complete.completion_tokens) == (len(PROMPT), 5)
    assert complete.finish_reason == "length"
    assert complete.WhichOneof("matched_stop") is None


def test_a_stream_carries_new_tokens_cumulative_counts_and_a_whole_complete(client: Client):
    messages = client.generate(stream=True, max_tokens=12)
    parts = chunks(messages)
    (complete,) = completes(messages)
    assert messages[-1].complete == complete
    assert [token for part in parts for token in part.token_ids] == list(complete.output_ids)
    counts = [part.completion_tokens for part in parts]
    assert counts == sorted(set(counts))
    assert counts[-1] == complete.completion_tokens == 12
    assert {part.prompt_tokens for part in parts} == {len(PROMPT)}


def test_streamed_or_not_the_complete_is_the_same(client: Client):
    streamed = completes(client.generate(stream=True, max_tokens=10))[0]
    assert streamed.output_ids == client.complete(max_tokens=10).output_ids


@pytest.mark.contract("vllm")
def test_a_text_prompt_is_tokenized_by_the_worker(client: Client):
    complete = client.complete(prompt="import os")
    assert complete.prompt_tokens > 0
    assert len(complete.output_ids) == 8


@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_has_its_index_and_one_complete(client: Client, stream: bool):
    messages = client.generate(stream=stream, n=3, temperature=1.0, max_tokens=6)
    ends = completes(messages)
    assert sorted(complete.index for complete in ends) == [0, 1, 2]
    for complete in ends:
        assert len(complete.output_ids) == complete.completion_tokens == 6
        if stream:
            sent = [token for part in chunks(messages, complete.index) for token in part.token_ids]
            assert sent == list(complete.output_ids)
    assert len({tuple(complete.output_ids) for complete in ends}) == 3


def test_choices_that_do_not_stream_come_in_order(client: Client):
    messages = client.generate(n=3, temperature=1.0, max_tokens=4)
    assert [complete.index for complete in completes(messages)] == [0, 1, 2]


@pytest.mark.contract("vllm")
def test_the_same_seed_gives_the_same_tokens(client: Client):
    first = client.complete(temperature=1.0, seed=11)
    assert client.complete(temperature=1.0, seed=11).output_ids == first.output_ids


def test_a_stop_token_ends_the_choice_and_is_named(client: Client):
    tokens = list(client.complete(max_tokens=8).output_ids)
    stop = next(token for token in tokens[1:] if token != tokens[0])
    complete = client.complete(max_tokens=8, stop_token_ids=[stop])
    assert complete.finish_reason == "stop"
    assert complete.matched_token_id == stop
    assert list(complete.output_ids) == tokens[: tokens.index(stop) + 1]


@pytest.mark.contract("vllm")
def test_a_prompt_is_truncated_to_its_last_tokens(client: Client):
    long = [9, 9, 9, *PROMPT]
    complete = client.complete(prompt=long, truncate_prompt_tokens=len(PROMPT))
    assert complete.prompt_tokens == len(PROMPT)
    assert complete.output_ids == client.complete().output_ids


@pytest.mark.contract("vllm")
def test_a_text_is_truncated_to_its_last_tokens_however_long_it_is(client: Client):
    text = "import os and sys; " * 3000
    assert client.refused(prompt=text)[0] == "INVALID_ARGUMENT"
    complete = client.complete(prompt=text, truncate_prompt_tokens=16)
    assert complete.prompt_tokens == 16
    assert complete.output_ids == client.complete(prompt=text[19:], truncate_prompt_tokens=16).output_ids


@pytest.mark.contract("vllm")
def test_truncation_to_the_context_leaves_room_for_the_output(client: Client):
    context = client.context
    complete = client.complete(prompt=[3] * (context + 10), truncate_prompt_tokens=-1, max_tokens=4)
    assert complete.prompt_tokens == context - 4
    assert complete.completion_tokens == 4


def test_max_tokens_may_fill_the_context_exactly(client: Client):
    context = client.context
    complete = client.complete(prompt=[3] * (context - 2), max_tokens=2)
    assert complete.completion_tokens == 2


def test_without_max_tokens_the_context_is_the_end(client: Client):
    context = client.context
    complete = client.complete(prompt=[3] * (context - 5), max_tokens=None)
    assert complete.completion_tokens == 5
    assert complete.finish_reason == "length"


def test_trace_headers_are_accepted(client: Client):
    metadata = (("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"), ("x-other", "1"))
    (message,) = client.stub.Generate(client.request(), metadata=metadata, timeout=60)
    assert message.complete.completion_tokens == 8


def test_a_pinned_rank_is_served(client: Client):
    assert client.complete(data_parallel_rank=0).completion_tokens == 8


@pytest.mark.contract("vllm")
def test_kv_transfer_parameters_are_accepted_as_json_and_as_the_legacy_pair(client: Client):
    assert client.complete(kv_transfer_params_json=json.dumps({"note": [1, {"a": None}]})).completion_tokens == 8
    legacy = pb.KvTransferParams(remote_host="127.0.0.1", remote_port=9)
    assert client.complete(kv_transfer_params=legacy).completion_tokens == 8


def test_a_live_id_is_refused_and_the_first_run_untouched(client: Client):
    request_id = new_id()
    call = client.start(request_id, stream=True, max_tokens=200)
    first = next(call)
    assert client.refused(request_id, max_tokens=2)[0] == "ALREADY_EXISTS"
    messages = [first, *call]
    assert completes(messages)[0].completion_tokens == 200
    assert client.complete(request_id, max_tokens=2).completion_tokens == 2


def test_an_abort_ends_exactly_the_named_call_with_what_it_has(client: Client):
    name = new_id()
    other = client.start(f"{name}-other", stream=True, max_tokens=300)
    call = client.start(name, stream=True, max_tokens=client.long, n=1)
    messages = [next(call)]
    client.abort(name, "nobody")
    messages += call
    (complete,) = completes(messages)
    assert complete.finish_reason == "abort"
    assert complete.completion_tokens < client.long
    assert [t for part in chunks(messages) for t in part.token_ids] == list(complete.output_ids)
    assert completes(list(other))[0].finish_reason == "length"


def test_an_abort_ends_every_choice(client: Client):
    name = new_id()
    call = client.start(name, stream=True, max_tokens=client.long, n=3, temperature=1.0)
    messages = [next(call)]
    client.abort(name)
    messages += call
    assert sorted((c.index, c.finish_reason) for c in completes(messages)) == [(i, "abort") for i in range(3)]


def test_an_abort_of_an_id_that_only_begins_like_a_live_one_does_nothing(client: Client):
    name = new_id()
    call = client.start(name, stream=True, max_tokens=100)
    messages = [next(call)]
    client.abort(name[:-1], name + "0")
    messages += call
    assert completes(messages)[0].finish_reason == "length"


@pytest.mark.contract("vllm")
def test_an_abort_of_an_empty_id_does_nothing(client: Client):
    call = client.start(stream=True, max_tokens=100)
    messages = [next(call)]
    client.abort("")
    messages += call
    assert completes(messages)[0].finish_reason == "length"


def test_a_client_that_cancels_leaves_nothing_behind(client: Client):
    call = client.start(stream=True, max_tokens=client.long)
    next(call)
    call.cancel()
    client.check_empty()


def test_a_deadline_ends_the_call_in_the_engine_too(client: Client):
    with pytest.raises(grpc.RpcError) as error:
        list(client.start(max_tokens=client.long, timeout=0.05))
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    client.check_empty()
