"""Calls as the requests that SGLang's schedulers take; what they would choke on is refused here."""

from __future__ import annotations

import contextlib
import itertools
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from ..serving import errors
from ..serving.engine import Limits, Range
from ..wire.calls import Bootstrap, Call, ConstraintKind, EmbedCall, InvalidCall, Sampling
from . import facts
from .admission import Admission
from .media import media_input

# SamplingParams.verify's own bounds (SGLang 0.5.20 to 0.5.23); n and top_k are integers.
_RANGES = {
    "temperature": Range(0, 3.4e38),
    "top_p": Range(0, 1, open_low=True),
    "min_p": Range(0, 1),
    "frequency_penalty": Range(-2, 2),
    "presence_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, 2, open_low=True),
    "top_k": Range(0, 2**31 - 1),
    "n": Range(1, 1024),
}
_CONSTRAINT_FIELD = {
    ConstraintKind.JSON_SCHEMA: "json_schema",
    ConstraintKind.REGEX: "regex",
    ConstraintKind.GRAMMAR: "ebnf",
    ConstraintKind.STRUCTURAL_TAG: "structural_tag",
}
_CALL_FIELD = {
    "bootstrap_room": "bootstrap",
    "ebnf": "grammar",
    "logprob_start_len": "prompt_logprobs_from",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop",
    "return_hidden_states": "hidden_states",
    "sampling_seed": "seed",
    "token_ids_logprob": "logprob_token_ids",
    "top_logprobs_num": "logprobs",
}
_PROBE_TOKEN = 0


def limits(model: Any, tokenizer: Any, max_input: int) -> Limits:
    """What this worker accepts; `max_input` is the shortest prompt that is too long."""
    return Limits(
        vocab_size=model.vocab_size,
        max_prompt_token_id=model.vocab_size - 1,
        max_context=model.context_len,
        max_prompt=max_input - 1,
        max_logprobs=model.vocab_size,
        data_parallel_ranks=facts.data_parallel_ranks(),
        ranges=_RANGES,
        generates=bool(model.is_generation),
        embeds=not model.is_generation,
        tokenizes=tokenizer is not None,
        min_max_tokens=0,
    )


class Requests:
    """Builds requests for the configuration that this process published; `admission` checks each."""

    def __init__(self, model: Any, admission: Admission) -> None:
        from sglang.srt.disaggregation.utils import DisaggregationMode
        from sglang.srt.runtime_context import get_disagg, get_observability, get_schedule, get_serving

        self.model, self.admission = model, admission
        self.preferred = get_serving().preferred_sampling_params or {}
        self.mode = DisaggregationMode(get_disagg().disaggregation_mode)
        self.disaggregated = self.mode is not DisaggregationMode.NULL
        self.prefills = self.mode is DisaggregationMode.PREFILL
        self.traced = bool(get_observability().enable_trace)
        schedule = get_schedule()
        self.priority = schedule.default_priority_value if schedule.enable_priority_scheduling else None
        self._rooms = itertools.count() if get_disagg().disaggregation_transfer_backend == "fake" else None

    def generate(self, call: Call, keys: Sequence[str]) -> list[Any]:
        """One request a choice. InvalidCall names a sampling field or one of the call."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

        asked = call.sampling
        if asked.constraint is not None and asked.constraint.kind not in _CONSTRAINT_FIELD:
            raise InvalidCall(asked.constraint.kind.value, "is not a constraint of SGLang's")
        if call.image_urls:
            raise InvalidCall("image_urls", "this worker does not fetch images")
        bootstrap = self._bootstrap(call)
        shared: dict[str, Any] = {
            "input_text": None,
            "input_ids": array("q", call.token_ids),
            "input_embeds": None,
            "mm_inputs": media_input(call.media) if call.media is not None else None,
            "token_type_ids": None,
            "return_logprob": _wants_logprobs(asked),
            "token_ids_logprob": list(asked.logprob_token_ids) or None,
            "stream": call.stream,
            "return_hidden_states": call.hidden_states,
            "lora_id": call.lora_id,
            "custom_logit_processor": call.custom_logit_processor,
            "routed_dp_rank": call.data_parallel_rank,
            "require_reasoning": call.require_reasoning,
            "priority": self.priority,
        }
        if bootstrap is not None:
            shared |= {"bootstrap_host": bootstrap.host, "bootstrap_port": bootstrap.port}
            shared["bootstrap_room"] = bootstrap.room
        requests = []
        for index, key in enumerate(keys):
            request = TokenizedGenerateReqInput(
                rid=key,
                sampling_params=self._sampling(asked, index),
                time_stats=self._time_stats(key, call, bootstrap),
                **shared,
                **_logprob_columns(asked, index, len(call.token_ids)),
            )
            with _named_as_calls_do():
                self.admission.check_generation(request)
            request.wrap_pickle_fields()
            requests.append(request)
        return requests

    def embed(self, call: EmbedCall, key: str) -> Any:
        """The request of an embedding."""
        from sglang.srt.managers.io_struct import TokenizedEmbeddingReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        types = list(call.token_type_ids) if call.token_type_ids else None
        request = TokenizedEmbeddingReqInput(
            rid=key,
            input_text=None,
            input_ids=array("q", call.token_ids),
            mm_inputs=None,
            token_type_ids=types,
            sampling_params=SamplingParams(max_new_tokens=0),
            routed_dp_rank=call.data_parallel_rank,
            priority=self.priority,
        )
        with _named_as_calls_do():
            self.admission.check_embedding(request)
        request.wrap_pickle_fields()
        return request

    def probe(self, key: str) -> Any:
        """A request of one token that asks whether the schedulers work."""
        from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

        if not self.model.is_generation:
            return self.embed(EmbedCall(request_id=key, token_ids=[_PROBE_TOKEN]), key)
        call = Call(
            request_id=key,
            token_ids=[_PROBE_TOKEN],
            sampling=Sampling(max_tokens=1, temperature=0.0),
            bootstrap=Bootstrap(FAKE_BOOTSTRAP_HOST, None, 0) if self.disaggregated else None,
        )
        return self.generate(call, [key])[0]

    def _bootstrap(self, call: Call) -> Bootstrap | None:
        """Where a disaggregated call meets its other half; a scheduler dies of one that does not say."""
        if not self.disaggregated:
            return None
        bootstrap = call.bootstrap
        if bootstrap is None:
            if self._rooms is None:
                raise InvalidCall("bootstrap", f"is missing, and this is a {self.mode.value} worker")
            return Bootstrap(None, None, next(self._rooms))
        if bootstrap.room < 0:
            raise InvalidCall("bootstrap", f"bootstrap_room {bootstrap.room} is below 0")
        rank, ranks = call.data_parallel_rank, facts.data_parallel_ranks()
        if self.prefills and rank is not None and rank != bootstrap.room % ranks:
            problem = f"{rank} is not the rank of bootstrap_room {bootstrap.room}: {bootstrap.room % ranks}"
            raise InvalidCall("data_parallel_rank", problem)
        return bootstrap

    def _sampling(self, asked: Sampling, index: int) -> Any:
        """The request's values over --preferred-sampling-params, those over SGLang's own defaults."""
        from sglang.srt.sampling.sampling_params import SamplingParams

        given: dict[str, Any] = {
            "max_new_tokens": asked.max_tokens,
            "stop": list(asked.stop) or None,
            "stop_token_ids": set(asked.stop_token_ids) or None,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k or None,
            "min_p": asked.min_p or None,
            "frequency_penalty": asked.frequency_penalty or None,
            "presence_penalty": asked.presence_penalty or None,
            "repetition_penalty": asked.repetition_penalty,
            "min_new_tokens": asked.min_tokens or None,
            "stream_interval": asked.stream_interval,
            "logit_bias": {str(token): bias for token, bias in (asked.logit_bias or {}).items()} or None,
            "custom_params": asked.custom_params,
            "sampling_seed": asked.seed + index if asked.seed is not None else None,
        }
        if asked.constraint is not None:
            given[_CONSTRAINT_FIELD[asked.constraint.kind]] = asked.constraint.value
        values = {"max_new_tokens": None} | self.preferred
        values |= {name: value for name, value in given.items() if value is not None}
        values |= {
            "n": 1,
            "ignore_eos": asked.ignore_eos,
            "skip_special_tokens": asked.skip_special_tokens,
            "spaces_between_special_tokens": asked.spaces_between_special_tokens,
            "no_stop_trim": asked.include_stop,
        }
        try:
            return SamplingParams(**values)
        except (ValueError, TypeError) as error:
            raise errors.Invalid(f"sampling_params: {error}") from error

    def _time_stats(self, key: str, call: Call, bootstrap: Bootstrap | None) -> Any:
        """What traces and disaggregated schedulers read; the others make their own."""
        if not self.disaggregated and not self.traced:
            return None
        from sglang.srt.observability.req_time_stats import APIServerReqTimeStats

        stats = APIServerReqTimeStats(disagg_mode=self.mode)
        if self.traced:
            headers = dict(call.trace_headers) if call.trace_headers else None
            stats.init_trace_ctx(key, bootstrap.room if bootstrap is not None else None, headers)
        stats.set_created_time()
        return stats


@contextlib.contextmanager
def _named_as_calls_do() -> Iterator[None]:
    """A refusal of SGLang's fields names the call's."""
    try:
        yield
    except InvalidCall as error:
        if error.field == "sampling_params":  # nobody knows which
            raise errors.Invalid(str(error)) from error
        raise InvalidCall(_CALL_FIELD.get(error.field, error.field), error.problem) from error


def _wants_logprobs(asked: Sampling) -> bool:
    return asked.logprobs is not None or asked.prompt_logprobs is not None or bool(asked.logprob_token_ids)


def _logprob_columns(asked: Sampling, index: int, prompt: int) -> dict[str, int]:
    """The prompt's logprobs come with the first choice alone; a start behind the prompt is output alone."""
    wanted = asked.prompt_logprobs is not None and index == 0
    return {
        "logprob_start_len": asked.prompt_logprobs_from if wanted else prompt if _wants_logprobs(asked) else -1,
        "top_logprobs_num": max(asked.logprobs or 0, asked.prompt_logprobs or 0 if wanted else 0),
    }
