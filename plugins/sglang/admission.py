"""What an SGLang scheduler may be handed: checks on SGLang's own request objects, whoever made them.

SGLang's tokenizer manager does these where it stands before the scheduler; what is not refused here would end the
scheduler, for everybody. Every refusal is an InvalidCall.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..wire.calls import InvalidCall

_INT64 = 2**63
_LARGEST_BIAS = 100.0
_ACTIVITIES = ("CPU", "GPU", "CUDA_PROFILER", "MEM", "RPD")


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What one server accepts; lengths in tokens.

    `max_input` is the shortest prompt that is too long. `hidden_states` is 0 for none, 1 for the last position, 2 for
    all. `dimensions` are those an embedding can be cut to: None for no cutting, empty for any up to `hidden_size`.
    """

    vocab_size: int
    context: int
    max_input: int
    generates: bool
    truncates: bool = False
    logit_processors: bool = False
    lora: bool = False
    needs_room: bool = False
    hidden_states: int = 0
    dimensions: tuple[int, ...] | None = None
    hidden_size: int = 0
    token_types: int | None = None


def read_rules(model_config: Any, max_input: int) -> Rules:
    """The rules of the configuration that this process published; `max_input` is the scheduler's max_req_input_len."""
    from sglang.srt.model_executor.forward_batch_info import get_server_return_hidden_states_mode
    from sglang.srt.runtime_context import get_disagg, get_exec, get_lora, get_serving

    disaggregation = get_disagg()
    matryoshka = getattr(model_config, "is_matryoshka", False)
    return Rules(
        vocab_size=model_config.vocab_size,
        context=model_config.context_len,
        max_input=max_input,
        generates=model_config.is_generation,
        truncates=bool(get_serving().allow_auto_truncate),
        logit_processors=bool(get_exec().features.enable_custom_logit_processor),
        lora=bool(get_lora().enable_lora),
        needs_room=disaggregation.disaggregation_mode != "null"
        and disaggregation.disaggregation_transfer_backend != "fake",
        hidden_states={"NULL": 0, "LAST": 1}.get(get_server_return_hidden_states_mode().name, 2),
        dimensions=tuple(model_config.matryoshka_dimensions or ()) if matryoshka else None,
        hidden_size=model_config.hidden_size,
        token_types=getattr(model_config.hf_config, "type_vocab_size", None),
    )


class Admission:
    """Checks tokenized requests, and normalizes their sampling parameters as SGLang's tokenizer manager does.

    `tokenizer` is None with --skip-tokenizer-init; `adapters` gives the ids of the LoRA adapters that are loaded now.
    """

    def __init__(self, rules: Rules, tokenizer: Any, adapters: Callable[[], Container[str]] = tuple) -> None:
        self.rules, self._tokenizer, self.adapters = rules, tokenizer, adapters

    def check_generation(self, request: Any) -> None:
        """A TokenizedGenerateReqInput is one that the scheduler can serve."""
        rules = self.rules
        if not rules.generates:
            raise InvalidCall("sampling_params", "this model does not generate")
        self._check_prompt(request)
        length = len(request.input_ids)
        if rules.needs_room and request.bootstrap_room is None:
            raise InvalidCall("bootstrap_room", "is missing, and this server is one half of a disaggregated pair")
        self._check_adapter(request.lora_id)
        self._check_logprobs(request, length)
        self._check_logit_processor(request.custom_logit_processor)
        self._check_hidden_states(request.return_hidden_states)
        self.check_sampling(request.sampling_params)
        self._check_total(request.sampling_params, length)

    def check_embedding(self, request: Any) -> None:
        """A TokenizedEmbeddingReqInput is one that the scheduler can serve; it makes no tokens."""
        if self.rules.generates:
            raise InvalidCall("input_ids", "this model generates; embeddings need --is-embedding")
        self._check_prompt(request)
        self._check_adapter(request.lora_id)
        self._check_dimensions(request.dimensions)
        types = request.token_type_ids
        if types is not None:
            if len(types) != len(request.input_ids):
                raise InvalidCall("token_type_ids", f"{len(types)} for a prompt of {len(request.input_ids)} tokens")
            known = self.rules.token_types
            if min(types) < 0 or (known is not None and max(types) >= known):
                raise InvalidCall("token_type_ids", f"{min(types)} to {max(types)} are not in [0, {(known or 1) - 1}]")
        request.sampling_params.max_new_tokens = 0
        self.check_sampling(request.sampling_params)

    def check_sampling(self, params: Any) -> None:
        """SamplingParams are ones that the sampler can work with; they are normalized."""
        if params.n != 1:
            raise InvalidCall("n", f"{params.n} choices are one request each")
        if getattr(params, "beam_width", None) not in (None, 1):
            raise InvalidCall("beam_width", f"{params.beam_width}: beam search is not served")
        for name, bias in (params.logit_bias or {}).items():
            if not math.isfinite(bias) or abs(bias) > _LARGEST_BIAS:
                raise InvalidCall("logit_bias", f"{bias:g} for token {name} is not in [-100, 100]")
        _check_inside(params.stop_token_ids or (), self.rules.vocab_size, "stop_token_ids")
        stops = params.stop if not isinstance(params.stop, str) else (params.stop,)
        if stops and not all(stops):
            raise InvalidCall("stop", "holds an empty string")
        seed = params.sampling_seed
        if seed is not None and not -_INT64 <= seed < _INT64:
            raise InvalidCall("sampling_seed", f"{seed} is not a signed integer of 64 bits")
        if params.stream_interval is not None and params.stream_interval < 1:
            raise InvalidCall("stream_interval", f"{params.stream_interval} is not at least 1")
        try:
            if not params.is_normalized:
                params.normalize(self._tokenizer)
            params.verify(self.rules.vocab_size)
        except Exception as error:  # a tokenizer and the parser of regular expressions raise whatever they like
            raise _invalid(params, error) from error

    def _check_prompt(self, request: Any) -> None:
        rules, token_ids = self.rules, request.input_ids
        if not request.rid:
            raise InvalidCall("rid", "is empty")
        if not token_ids:
            raise InvalidCall("input_ids", "is empty")
        _check_inside((min(token_ids), max(token_ids)), rules.vocab_size, "input_ids")
        if len(token_ids) >= rules.max_input and not rules.truncates:
            raise InvalidCall("input_ids", f"{len(token_ids)} tokens are not fewer than {rules.max_input}")

    def _check_total(self, params: Any, length: int) -> None:
        asked, room = params.max_new_tokens, self.rules.context - length
        if asked is None or asked <= room:
            return
        if not self.rules.truncates:
            text = f"{asked} and a prompt of {length} tokens exceed the context of {self.rules.context}"
            raise InvalidCall("max_new_tokens", text)
        params.max_new_tokens = max(0, room)

    def _check_adapter(self, lora_id: str | None) -> None:
        if lora_id is None:
            return
        if not self.rules.lora:
            raise InvalidCall("lora_id", "this server runs without LoRA")
        if lora_id not in self.adapters():
            raise InvalidCall("lora_id", f"{lora_id!r} is no adapter that is loaded")

    def _check_logprobs(self, request: Any, length: int) -> None:
        vocabulary = self.rules.vocab_size
        if not 0 <= request.top_logprobs_num <= vocabulary:
            raise InvalidCall("top_logprobs_num", f"{request.top_logprobs_num} is not in [0, {vocabulary}]")
        if not -1 <= request.logprob_start_len <= length:
            raise InvalidCall("logprob_start_len", f"{request.logprob_start_len} is not in [-1, {length}]")
        if request.token_ids_logprob is not None and not request.token_ids_logprob:
            raise InvalidCall("token_ids_logprob", "is empty")
        _check_inside(request.token_ids_logprob or (), vocabulary, "token_ids_logprob")

    def _check_logit_processor(self, text: str | None) -> None:
        """It is code: it is loaded only where the operator allows that."""
        if text is None:
            return
        if not self.rules.logit_processors:
            raise InvalidCall("custom_logit_processor", "this server runs without --enable-custom-logit-processor")
        from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

        try:
            processor = CustomLogitProcessor.from_str(text)
        except Exception as error:
            raise InvalidCall("custom_logit_processor", f"cannot be loaded: {type(error).__name__}: {error}") from error
        if not callable(processor):
            raise InvalidCall("custom_logit_processor", f"{type(processor).__name__} cannot be called")

    def _check_hidden_states(self, asked: bool | str) -> None:
        if isinstance(asked, str) and asked != "last":
            raise InvalidCall("return_hidden_states", f"{asked[:20]!r} is not a boolean or 'last'")
        wanted = 1 if asked == "last" else 2 * bool(asked)
        if wanted > self.rules.hidden_states:
            raise InvalidCall("return_hidden_states", "this server runs without --return-hidden-states-mode")

    def _check_dimensions(self, wanted: int | None) -> None:
        allowed, most = self.rules.dimensions, self.rules.hidden_size
        if wanted is None:
            return
        if allowed is None:
            raise InvalidCall("dimensions", "the embeddings of this model cannot be cut")
        if (allowed and wanted not in allowed) or not 1 <= wanted <= most:
            raise InvalidCall("dimensions", f"{wanted} is not in {list(allowed) if allowed else f'[1, {most}]'}")


def check_profile(options: Mapping[str, Any]) -> None:
    """A profile's options are ones that the scheduler's profiler can start with; its folder is made here."""
    for activity in options.get("activities") or ():
        if activity not in _ACTIVITIES:
            raise InvalidCall("activities", f"{activity!r} is not one of {', '.join(_ACTIVITIES)}")
    for name in ("start_step", "num_steps"):
        value = options.get(name)
        if value is not None and not 0 <= value < _INT64:
            raise InvalidCall(name, f"{value} is not a number of steps")
    if options.get("profile_by_stage") and not options.get("num_steps"):
        raise InvalidCall("num_steps", "is needed to profile by stage")
    folder = options.get("output_dir")
    if folder:
        path = Path(folder).expanduser()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise InvalidCall("output_dir", str(error)) from error
        if not os.access(path, os.W_OK | os.X_OK):
            raise InvalidCall("output_dir", f"{folder} cannot be written to")


def _check_inside(token_ids: Sequence[int] | set[int], vocabulary: int, field: str) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocabulary:
            raise InvalidCall(field, f"token id {token_id} is outside the vocabulary of {vocabulary}")


def _invalid(params: Any, error: Exception) -> InvalidCall:
    """SGLang's sentence, which begins with the field's name where it is about one field."""
    text = str(error) or type(error).__name__
    name, _, rest = text.partition(" ")
    return InvalidCall(name, rest) if name in params.__struct_fields__ else InvalidCall("sampling_params", text)
