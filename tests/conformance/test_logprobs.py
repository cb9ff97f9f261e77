"""Logprobs of output and prompt, on every worker."""

from __future__ import annotations

import pytest
from client import PROMPT, Client, chunks, completes


def test_none_are_sent_unless_asked_for(client: Client):
    complete = client.complete()
    assert not complete.HasField("output_logprobs")
    assert not complete.HasField("input_logprobs")


def test_zero_is_the_sampled_token_alone(client: Client):
    logprobs = client.complete(max_tokens=3, logprobs=0).output_logprobs
    assert len(logprobs.token_logprobs) == len(logprobs.token_ids) == 3
    assert not logprobs.top_logprobs


@pytest.mark.parametrize("count", [1, 5])
def test_a_count_is_that_many_best_sorted_without_a_duplicate(client: Client, count: int):
    complete = client.complete(max_tokens=4, logprobs=count)
    logprobs = complete.output_logprobs
    assert list(logprobs.token_ids) == list(complete.output_ids)
    assert len(logprobs.top_logprobs) == 4
    for top in logprobs.top_logprobs:
        values = list(top.values)
        assert len(values) == len(set(top.token_ids)) == count
        assert values == sorted(values, reverse=True)


@pytest.mark.contract("vllm")
def test_minus_one_is_the_whole_vocabulary(client: Client):
    vocabulary = client.stub.GetModelInfo(client.pb.GetModelInfoRequest()).vocab_size
    (top,) = client.complete(max_tokens=1, logprobs=-1).output_logprobs.top_logprobs
    assert sorted(top.token_ids) == list(range(vocabulary))


def test_a_sampled_token_outside_the_best_is_not_among_them(client: Client):
    seed = {"seed": 5} if client.contract == "vllm" else {}
    complete = client.complete(max_tokens=20, logprobs=1, temperature=2.0, **seed)
    logprobs = complete.output_logprobs
    outside = 0
    for token, value, top in zip(logprobs.token_ids, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert len(top.values) == 1
        assert top.values[0] >= value - 1e-6 or client.kind.startswith("fake")
        outside += token != top.token_ids[0]
    assert outside


def test_streamed_logprobs_add_up_to_those_of_the_complete(client: Client):
    messages = client.generate(stream=True, max_tokens=10, logprobs=2)
    (complete,) = completes(messages)
    parts = [part.output_logprobs for part in chunks(messages)]
    assert [i for part in parts for i in part.token_ids] == list(complete.output_logprobs.token_ids)
    assert [v for part in parts for v in part.token_logprobs] == list(complete.output_logprobs.token_logprobs)
    assert sum(len(part.top_logprobs) for part in parts) == len(complete.output_logprobs.top_logprobs) == 10


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_prompt_logprobs_come_once(client: Client, stream: bool, n: int):
    messages = client.generate(stream=stream, n=n, temperature=1.0, prompt_logprobs=2, max_tokens=3)
    found = [
        part.input_logprobs
        for message in messages
        for part in (message.chunk, message.complete)
        if part.HasField("input_logprobs")
    ]
    (prompt,) = found
    assert list(prompt.token_ids) == list(PROMPT)
    assert [entry.HasField("value") for entry in prompt.token_logprobs] == [False, True, True, True]
    assert [len(top.values) for top in prompt.top_logprobs] == [0, 2, 2, 2]


def test_prompt_logprobs_of_zero_are_the_prompt_alone(client: Client):
    prompt = client.complete(prompt_logprobs=0, max_tokens=1).input_logprobs
    assert len(prompt.token_logprobs) == len(PROMPT)
    assert not prompt.top_logprobs


def test_a_long_prompt_has_a_logprob_at_every_position(client: Client):
    prompt = [(i * 37) % 2000 for i in range(400)]
    answer = client.complete(prompt=prompt, prompt_logprobs=1, max_tokens=1).input_logprobs
    assert list(answer.token_ids) == prompt
    assert sum(entry.HasField("value") for entry in answer.token_logprobs) == len(prompt) - 1
