"""Checks on a call before the engine sees it; every refusal names the field, the value and what is accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..wire.calls import Call, InvalidCall, Sampling
from .engine import Limits, Range

_CHECKED_FLOATS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_GREEDY_BELOW = 1e-5
_LOGIT_BIAS = Range(-100, 100)


def check_request_id(request_id: str) -> None:
    """An id is any text that is not empty."""
    if not request_id:
        raise InvalidCall("request_id", "is empty")


def check_prompt(token_ids: Sequence[int], limits: Limits, field: str = "input_ids") -> None:
    """A prompt is not empty, inside the vocabulary and shorter than the context."""
    if not token_ids:
        raise InvalidCall(field, "is empty")
    if len(token_ids) > limits.max_context:
        raise InvalidCall(field, f"{len(token_ids)} tokens are more than the context of {limits.max_context}")
    if limits.max_prompt is not None and len(token_ids) > limits.max_prompt:
        raise InvalidCall(field, f"{len(token_ids)} tokens are more than this worker holds, {limits.max_prompt}")
    largest = max(token_ids)
    if largest > limits.max_prompt_token_id:
        raise InvalidCall(field, _outside(largest, limits.max_prompt_token_id + 1))


def check_rank(rank: int | None, limits: Limits) -> None:
    """A pinned data-parallel rank is one that this worker has."""
    if rank is not None and not 0 <= rank < limits.data_parallel_ranks:
        raise InvalidCall("data_parallel_rank", f"{rank} is not in [0, {limits.data_parallel_ranks - 1}]")


def check_truncation(keep: int | None, limits: Limits, field: Callable[[str], str]) -> None:
    """A prompt is cut to -1 (what the context holds) or to a number of tokens inside the context."""
    if keep is not None and (keep == 0 or not -1 <= keep <= limits.max_context):
        raise InvalidCall(field("truncate_prompt_tokens"), f"{keep} is not -1 or in [1, {limits.max_context}]")


def truncate(call: Call, limits: Limits) -> None:
    """Keep the prompt's last tokens as the call asks; -1 leaves room for the output."""
    keep = call.truncate_prompt_tokens
    if keep is None:
        return
    if keep == -1:
        keep = max(1, limits.max_context - (call.sampling.max_tokens or 1))
    if len(call.token_ids) > keep:
        call.token_ids = call.token_ids[-keep:]


def _outside(token_id: int, vocabulary: int) -> str:
    return f"token id {token_id} is outside the vocabulary of {vocabulary}"


def _check_token_ids(token_ids: Sequence[int], limits: Limits, field: str) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidCall(field, _outside(token_id, limits.vocab_size))


def check_sampling(sampling: Sampling, limits: Limits, field: Callable[[str], str]) -> None:
    """Every sampling value is one that the engine accepts. `field` names a field as the contract does."""
    for name in _CHECKED_FLOATS:
        value = getattr(sampling, name)
        if value is not None and value not in limits.ranges[name]:
            raise InvalidCall(field(name), f"{value:g} is not in {limits.ranges[name]}")
    for name in ("n", "top_k"):
        if getattr(sampling, name) not in limits.ranges[name]:
            raise InvalidCall(field(name), f"{getattr(sampling, name)} is not in {limits.ranges[name]}")
    greedy = sampling.temperature is not None and sampling.temperature < _GREEDY_BELOW
    if sampling.n > 1 and greedy and not limits.greedy_allows_choices:
        raise InvalidCall(field("n"), f"{sampling.n} choices need a temperature above 0")
    if sampling.stop and not all(sampling.stop):
        raise InvalidCall(field("stop"), "holds an empty string")
    if sampling.stop and not limits.tokenizes:
        raise InvalidCall(field("stop"), "stop strings need a tokenizer, and this worker runs without one")
    if sampling.constraint is not None and not limits.tokenizes:
        raise InvalidCall(field(sampling.constraint.kind.value), "needs a tokenizer, and this worker runs without one")
    _check_token_ids(sampling.stop_token_ids, limits, field("stop_token_ids"))
    for token_id, bias in (sampling.logit_bias or {}).items():
        _check_token_ids((token_id,), limits, field("logit_bias"))
        accepted = limits.ranges.get("logit_bias", _LOGIT_BIAS)
        if bias not in accepted:
            raise InvalidCall(field("logit_bias"), f"{bias:g} for token {token_id} is not in {accepted}")
    for name in ("logprobs", "prompt_logprobs"):
        _check_logprobs(getattr(sampling, name), limits, field(name))
    _check_token_ids(sampling.logprob_token_ids, limits, field("logprob_token_ids"))
    if sampling.stream_interval is not None and sampling.stream_interval < 1:
        raise InvalidCall(field("stream_interval"), f"{sampling.stream_interval} is not at least 1")


def _check_logprobs(count: int | None, limits: Limits, field: str) -> None:
    if count is None:
        return
    most = limits.vocab_size if limits.max_logprobs == -1 else limits.max_logprobs
    if count < -1:
        raise InvalidCall(field, f"{count} is not -1 (the whole vocabulary) or in [0, {most}]")
    wanted = limits.vocab_size if count == -1 else count
    if wanted > most:
        raise InvalidCall(field, f"{wanted} candidates are more than this worker's maximum of {most}")


def check_length(call: Call, limits: Limits, field: Callable[[str], str]) -> None:
    """Prompt and output fit the context."""
    sampling, prompt = call.sampling, len(call.token_ids)
    room = limits.max_context - prompt
    if room < 1:
        raise InvalidCall("input_ids", f"{prompt} tokens leave no room for output in a context of {limits.max_context}")
    if sampling.max_tokens is not None:
        if sampling.max_tokens < limits.min_max_tokens:
            raise InvalidCall(field("max_tokens"), f"{sampling.max_tokens} is not at least {limits.min_max_tokens}")
        if sampling.max_tokens > room:
            raise InvalidCall(
                field("max_tokens"),
                f"{sampling.max_tokens} and a prompt of {prompt} tokens exceed the context of {limits.max_context}",
            )
    if sampling.prompt_logprobs_from > prompt:
        raise InvalidCall(
            field("prompt_logprobs_from"), f"{sampling.prompt_logprobs_from} is beyond the prompt of {prompt} tokens"
        )
    most = sampling.max_tokens if sampling.max_tokens is not None else room
    if sampling.min_tokens > most:
        raise InvalidCall(field("min_tokens"), f"{sampling.min_tokens} is more than max_tokens {most}")
