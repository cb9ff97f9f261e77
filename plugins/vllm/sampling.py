"""Sampling values as vLLM takes them, and what it accepts."""

from __future__ import annotations

import copy
from typing import Any

from ..serving.engine import Limits, Range
from ..wire.calls import Call, Constraint, ConstraintKind, Sampling

# SamplingParams' own bounds (vLLM 0.28 to 0.33); n and top_k are integers.
_RANGES = {
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, open_low=True),
    "min_p": Range(0, 1),
    "frequency_penalty": Range(-2, 2),
    "presence_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, 3.4e38, open_low=True),
    "top_k": Range(0, 2**31 - 1),
}

_STRUCTURED_FIELD = {
    ConstraintKind.JSON_SCHEMA: "json",
    ConstraintKind.REGEX: "regex",
    ConstraintKind.GRAMMAR: "grammar",
    ConstraintKind.STRUCTURAL_TAG: "structural_tag",
    ConstraintKind.CHOICE: "choice",
    ConstraintKind.JSON_OBJECT: "json_object",
}


def limits(vllm_config: Any, tokenizer: Any) -> Limits:
    """What this engine accepts. A prompt's ids may be the tokenizer's or the model's, as vLLM has it."""
    from vllm import envs

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    vocabulary = model.get_vocab_size()
    local = getattr(parallel, "local_engines_only", False)
    return Limits(
        vocab_size=vocabulary,
        max_prompt_token_id=max(vocabulary - 1, getattr(tokenizer, "max_token_id", 0)),
        max_context=model.max_model_len,
        max_logprobs=model.max_logprobs,
        data_parallel_ranks=parallel.data_parallel_size_local if local else parallel.data_parallel_size,
        ranges=_RANGES | {"n": Range(1, envs.VLLM_MAX_N_SEQUENCES)},
        greedy_allows_choices=False,
        generates=model.runner_type == "generate",
        embeds=model.runner_type == "pooling",
        tokenizes=tokenizer is not None,
    )


def sampling_params(call: Call) -> Any:
    """The SamplingParams of one choice (n is 1); raises vLLM's validation errors."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    asked = call.sampling
    return SamplingParams(
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        frequency_penalty=asked.frequency_penalty,
        presence_penalty=asked.presence_penalty,
        repetition_penalty=1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
        max_tokens=asked.max_tokens,
        min_tokens=asked.min_tokens,
        stop=list(asked.stop),
        stop_token_ids=list(asked.stop_token_ids),
        include_stop_str_in_output=asked.include_stop,
        skip_special_tokens=asked.skip_special_tokens,
        spaces_between_special_tokens=asked.spaces_between_special_tokens,
        ignore_eos=asked.ignore_eos,
        seed=asked.seed,
        logprobs=asked.logprobs,
        prompt_logprobs=asked.prompt_logprobs,
        logit_bias=asked.logit_bias,
        structured_outputs=_structured_outputs(asked.constraint),
        detokenize=bool(asked.stop),
        output_kind=RequestOutputKind.DELTA,
        extra_args={"kv_transfer_params": call.kv_transfer} if call.kv_transfer is not None else None,
        skip_clone=True,  # nobody else holds it
    )


def choice_params(params: Any, sampling: Sampling, index: int) -> Any:
    """The params of choice `index`: its own seed, and prompt logprobs for the first choice alone."""
    if index == 0 or (params.seed is None and sampling.prompt_logprobs is None):
        return params
    own = copy.copy(params)
    if own.seed is not None:
        own.seed = params.seed + index
    if own.prompt_logprobs is not None:
        own.prompt_logprobs = None
        own.skip_reading_prefix_cache = False
    return own


def _structured_outputs(constraint: Constraint | None) -> Any:
    if constraint is None:
        return None
    from vllm.sampling_params import StructuredOutputsParams

    value: Any = constraint.value
    if constraint.kind is ConstraintKind.JSON_OBJECT:
        value = True
    elif constraint.kind is ConstraintKind.CHOICE:
        value = list(constraint.value)
    return StructuredOutputsParams(**{_STRUCTURED_FIELD[constraint.kind]: value})
