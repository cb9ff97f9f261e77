"""What the SGLang contract has beyond the others, on every worker that serves it."""

from __future__ import annotations

import pytest
from client import PROMPT, TIMEOUT, Client, chunks, completes, new_id

pytestmark = pytest.mark.contract("sglang")


@pytest.mark.parametrize("stream", [False, True])
def test_every_message_names_its_request(client: Client, stream: bool):
    name = new_id()
    messages = client.generate(name, n=2, temperature=1.0, stream=stream)
    assert {message.request_id for message in messages} == {name}


def test_what_proto_cannot_leave_unset_is_unset_by_zero(client: Client):
    expected = client.complete().output_ids
    assert client.complete(top_p=0, top_k=0, repetition_penalty=0, n=0).output_ids == expected
    assert client.complete(top_k=-1).output_ids == expected


def test_prompt_logprobs_begin_where_they_are_asked_for(client: Client):
    whole = client.complete(logprobs=2, prompt_logprobs=2, max_tokens=1).input_logprobs
    client.flush()
    part = client.complete(logprobs=2, prompt_logprobs=2, logprob_start_len=2, max_tokens=1).input_logprobs
    assert list(part.token_ids) == list(PROMPT[2:])
    assert [entry.HasField("value") for entry in part.token_logprobs] == [False, True]
    assert part.token_logprobs[1].value == pytest.approx(whole.token_logprobs[3].value, abs=1e-3)
    assert [len(top.values) for top in part.top_logprobs] == [0, 2]


def test_named_tokens_have_logprobs_at_every_output_position(client: Client):
    messages = client.generate(stream=True, logprobs=0, token_ids_logprob=[9, 4], max_tokens=5)
    rows = list(completes(messages)[0].output_logprobs.token_ids_logprobs)
    assert [list(row.token_ids) for row in rows] == [[9, 4]] * 5
    assert all(value < 0 for row in rows for value in row.values)
    assert [row for part in chunks(messages) for row in part.output_logprobs.token_ids_logprobs] == rows


def test_a_prefill_alone_is_scored(client: Client):
    complete = client.complete(logprobs=0, token_ids_logprob=[9, 4], max_tokens=0)
    assert (complete.completion_tokens, complete.finish_reason) == (0, "length")
    (row,) = complete.output_logprobs.token_ids_logprobs
    assert list(row.token_ids) == [9, 4]


def test_an_abort_says_whether_it_ended_something(client: Client):
    name = new_id()
    call = client.start(name, stream=True, max_tokens=client.long)
    messages = [next(call)]
    answer = client.stub.Abort(client.pb.AbortRequest(request_id=name, reason="enough"), timeout=TIMEOUT)
    assert answer.success
    assert completes([*messages, *call])[0].finish_reason == "abort"
    answer = client.stub.Abort(client.pb.AbortRequest(request_id=name), timeout=TIMEOUT)
    assert not answer.success
    assert answer.message


def test_loads_add_up(client: Client):
    answer = client.stub.GetLoads(client.pb.GetLoadsRequest(include=["all"]), timeout=TIMEOUT)
    assert answer.aggregate.total_reqs == sum(load.num_total_reqs for load in answer.loads)
    assert 0 <= answer.aggregate.avg_token_usage <= 1
