"""Refuses in vLLM's engine core what would end it; front ends that are not vLLM's own check little or nothing.

A refusal is an InvalidCall, one line in the log and an error output under the request's id.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import msgspec

from ..serving import admission
from ..wire.calls import Call, InvalidCall, Sampling
from . import sampling

logger = logging.getLogger("vllm.smg_grpc_servicer.guard")

_LONGEST = 300  # characters of a client's text in a line of the log
_INT64 = 2**63

_outer = msgspec.msgpack.Decoder(list[msgspec.Raw])


class Unreadable(Exception):
    """A frame in which not even the request's id can be read."""


class _Undecoded(threading.local):
    """The input thread's request that could not be decoded, and why."""

    request: Any = None
    problem: Exception | None = None


_undecoded = _Undecoded()
_guards: weakref.WeakKeyDictionary[Any, Guard | None] = weakref.WeakKeyDictionary()


# Seams


def decode(wrapped: Any, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps MsgpackDecoder.decode, which vLLM calls outside of any try: a request in its place is refused next."""
    try:
        return wrapped(*args, **kwargs)
    except Exception as error:
        expected = decoder.decoder.type
        if getattr(expected, "__name__", None) != "EngineCoreRequest":
            raise
        frames = args[0] if args else kwargs["bufs"]
        return _stand_in(expected, frames, error)


def preprocess_add_request(wrapped: Any, core: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps EngineCore.preprocess_add_request, on the input thread; what is raised becomes an error output."""
    request = args[0] if args else kwargs["request"]
    if request is _undecoded.request:
        problem, _undecoded.request, _undecoded.problem = _undecoded.problem, None, None
        assert problem is not None
        raise problem
    guard = _guard(core)
    if guard is None:
        return wrapped(*args, **kwargs)
    guard.check(request)
    result = wrapped(*args, **kwargs)
    if request.reasoning_parser_kwargs:
        guard.check_reasoner(result[0])
    return result


def handle_request_preproc_error(wrapped: Any, core: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wraps EngineCoreProc._handle_request_preproc_error, which logs a traceback: a refusal is one line."""
    error = sys.exc_info()[1]
    request = args[0] if args else kwargs["request"]
    if isinstance(error, Unreadable):
        logger.error("a request is dropped without an answer: %s", _short(error))
    elif isinstance(error, InvalidCall):
        _refuse(core, request, error)
    else:
        wrapped(*args, **kwargs)


def add_request(wrapped: Any, core: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps EngineCore.add_request, on the core's own thread, where no other request comes between check and use."""
    request = args[0] if args else kwargs["request"]
    living = getattr(core.scheduler, "requests", {}).get(request.request_id)  # an operator's scheduler may have none
    pooling = request.pooling_params
    if living is not None and living.streaming_queue is None:
        return _refuse(core, request, InvalidCall("request_id", "a request of this id is still running"))
    if pooling is not None and pooling.task not in core.get_supported_tasks():
        return _refuse(core, request, InvalidCall("pooling_params.task", f"this model does not do {pooling.task!r}"))
    return wrapped(*args, **kwargs)


def _guard(core: Any) -> Guard | None:
    if core not in _guards:
        try:
            _guards[core] = Guard(core)
        except Exception:  # a release that is laid out differently must serve as it would without us
            logger.exception("requests are not checked in this engine core: what it accepts cannot be read")
            _guards[core] = None
    return _guards[core]


def _refuse(core: Any, request: Any, error: InvalidCall) -> None:
    logger.warning("request %s is refused: %s", _short(repr(request.request_id)), _short(error))
    client = request.client_index if 0 <= request.client_index < len(core.addresses.outputs) else 0
    core._send_error_outputs_to_client([request.request_id], client)


def _stand_in(expected: Any, frames: Any, error: Exception) -> Any:
    """A request that is refused for `error`, under the id and for the client of the one that `frames` hold."""
    values: dict[str, Any] = dict.fromkeys(expected.__struct_fields__[: -len(expected.__struct_defaults__) or None])
    values |= {"request_id": "", "arrival_time": 0.0}
    problem: Exception = InvalidCall("request", f"cannot be decoded: {error}")
    try:
        fields = _outer.decode(frames[0] if isinstance(frames, (list, tuple)) else frames)
        values["request_id"] = msgspec.msgpack.decode(fields[0], type=str)
        index = expected.__struct_fields__.index("client_index")
        values["client_index"] = msgspec.msgpack.decode(fields[index], type=int) if index < len(fields) else 0
    except Exception as unreadable:  # noqa: BLE001  whatever the frame is, the input thread must go on
        if not values["request_id"]:
            problem = Unreadable(f"{error}; {unreadable}")
    request = expected(**values)
    _undecoded.request, _undecoded.problem = request, problem
    return request


def _short(item: Any) -> str:
    """Text of a client's on one line of a bearable length."""
    text = " ".join(str(item)[: 2 * _LONGEST].split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


# Rules


class Guard:
    """What one engine core accepts; every check raises InvalidCall."""

    def __init__(self, core: Any) -> None:
        config = core.vllm_config
        self.config, self.model = config, config.model_config
        self.structured = core.structured_output_manager
        self.tokenizer = getattr(self.structured, "tokenizer", None)  # none with --skip-tokenizer-init
        self.limits = sampling.limits(config, self.tokenizer)
        self.clients = len(core.addresses.outputs)
        self.caches_media = core.mm_receiver_cache is not None
        self.encoder_budget = min(
            core.scheduler.max_num_encoder_input_tokens, core.scheduler.encoder_cache_manager.cache_size
        )
        self.reasons = bool(config.reasoning_config is not None and config.reasoning_config.enabled)
        self.table_widths = _table_widths() if config.use_v2_model_runner else {}

    def check(self, request: Any) -> None:
        """A request is one that this engine core can serve."""
        admission.check_request_id(request.request_id)
        if not 0 <= request.client_index < self.clients:
            raise InvalidCall("client_index", f"{request.client_index} is not in [0, {self.clients - 1}]")
        if request.lora_request is not None and self.config.lora_config is None:
            raise InvalidCall("lora_request", "this engine runs without LoRA")
        length = self._check_prompt(request)
        if request.mm_features:
            self._check_media(request.mm_features, length)
        params, pooling = request.sampling_params, request.pooling_params
        if (params is None) == (pooling is None):
            raise InvalidCall("sampling_params", "exactly one of sampling_params and pooling_params is needed")
        if params is None:
            self._check_pooling(pooling)
            return
        if not self.limits.generates:
            raise InvalidCall("sampling_params", "this model does not generate")
        self._check_sampling(params, request.request_id, length)
        if params.extra_args:
            _check_transfers(params.extra_args)

    def check_reasoner(self, request: Any) -> None:
        """The reasoning parser takes what the front end gives it; it is kept, as vLLM would build it later."""
        try:
            self.structured._get_reasoner(request)
        except Exception as error:
            raise InvalidCall("reasoning_parser_kwargs", f"{type(error).__name__}: {error}") from error

    def _check_prompt(self, request: Any) -> int:
        """The prompt's length in tokens."""
        token_ids, embeds, are_ids = request.prompt_token_ids, request.prompt_embeds, request.prompt_is_token_ids
        if embeds is None:
            if are_ids is not None:
                raise InvalidCall("prompt_is_token_ids", "needs prompt_embeds")
            self._check_ids(token_ids or ())
            return len(token_ids)
        self._check_embeds(embeds)
        length = len(embeds)
        if token_ids is None:
            if are_ids is not None:
                raise InvalidCall("prompt_is_token_ids", "needs prompt_token_ids")
            return length
        if len(token_ids) != length:
            raise InvalidCall("prompt_token_ids", f"{len(token_ids)} tokens beside {length} embeddings")
        if are_ids is not None:
            if len(are_ids) != length:
                raise InvalidCall("prompt_is_token_ids", f"{len(are_ids)} values for {length} tokens")
            token_ids = [token_id for token_id, is_id in zip(token_ids, are_ids, strict=True) if is_id] or [0]
        self._check_ids(token_ids)
        return length

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        admission.check_prompt(token_ids, self.limits, "prompt_token_ids")
        if min(token_ids) < 0:
            raise InvalidCall("prompt_token_ids", f"token id {min(token_ids)} is below 0")

    def _check_embeds(self, embeds: Any) -> None:
        if not self.model.enable_prompt_embeds:
            raise InvalidCall("prompt_embeds", "this engine runs without --enable-prompt-embeds")
        width = self.model.get_inputs_embeds_size()
        if embeds.ndim != 2 or embeds.shape[1] != width or not embeds.is_floating_point():
            raise InvalidCall(
                "prompt_embeds", f"{embeds.dtype} of shape {tuple(embeds.shape)} is not [tokens, {width}]"
            )
        if not 0 < len(embeds) <= self.limits.max_context:
            raise InvalidCall("prompt_embeds", f"{len(embeds)} tokens are not in [1, {self.limits.max_context}]")

    def _check_pooling(self, params: Any) -> None:
        if not self.limits.embeds:
            raise InvalidCall("pooling_params", "this model generates")
        try:
            params.verify(self.model)
        except ValueError as error:
            raise InvalidCall("pooling_params", str(error)) from error

    # Sampling

    def _check_sampling(self, params: Any, request_id: str, length: int) -> None:
        if params.max_tokens is None:
            raise InvalidCall("max_tokens", "is missing")
        self._drop_unreachable_ends(params)
        asked = Sampling(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),  # -1 is off as well
            min_p=params.min_p,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            repetition_penalty=params.repetition_penalty,
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=params.stop_token_ids,
            n=params.n,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            logit_bias=params.logit_bias,
        )
        admission.check_sampling(asked, self.limits, str)
        call = Call(request_id=request_id, token_ids=range(length), sampling=asked)
        admission.check_length(call, self.limits, str)
        if params.seed is not None and not -_INT64 <= params.seed < _INT64:
            raise InvalidCall("seed", f"{params.seed} is not a signed integer of 64 bits")
        self._check_token_lists(params)
        self._verify(params)
        self._check_features(params, length)

    def _drop_unreachable_ends(self, params: Any) -> None:
        """Take out the model's own end tokens that lie outside the vocabulary: the sampler indexes logits by them."""
        vocabulary = self.limits.vocab_size
        every = params.all_stop_token_ids
        if every and (min(every) < 0 or max(every) >= vocabulary):
            outside = {token_id for token_id in every if not 0 <= token_id < vocabulary}
            for token_id in outside - self._ends:
                raise InvalidCall("stop_token_ids", f"token id {token_id} is outside the vocabulary of {vocabulary}")
            every -= outside
            params.stop_token_ids = [token_id for token_id in params.stop_token_ids if token_id not in outside]

    @cached_property
    def _ends(self) -> set[int]:
        """The model's own end tokens, wherever one is named."""
        named = [
            self.model.try_get_generation_config().get("eos_token_id"),
            getattr(self.model.hf_config, "eos_token_id", None),
            getattr(self.tokenizer, "eos_token_id", None),
        ]
        return {end for ends in named for end in (ends if isinstance(ends, list) else [ends]) if end is not None}

    def _check_token_lists(self, params: Any) -> None:
        vocabulary = self.limits.vocab_size
        for name in ("allowed_token_ids", "logprob_token_ids"):
            _check_inside(getattr(params, name, None) or (), vocabulary, name)
        words = params.bad_words_token_ids or ()
        for word in words:
            if not word:
                raise InvalidCall("bad_words", "holds an empty one")
            _check_inside(word, vocabulary, "bad_words")
        if not self.table_widths:
            return
        # The newer model runner keeps these in tables of a fixed width, and its worker ends at a wider one.
        widths = {
            "allowed_token_ids": len(params.allowed_token_ids or ()),
            "logit_bias": len(params.logit_bias or ()),
            "stop_token_ids": len(params.all_stop_token_ids) if params.min_tokens else 0,
            "bad_words": len(words),
            "bad_words tokens": sum(map(len, words)),
        }
        for name, width in widths.items():
            if width > self.table_widths[name]:
                raise InvalidCall(name, f"{width} are more than this engine's maximum of {self.table_widths[name]}")

    def _check_features(self, params: Any, length: int) -> None:
        """What vLLM's own front end refuses where the engine was started without it."""
        if params.thinking_token_budget is not None and not self.reasons:
            raise InvalidCall("thinking_token_budget", "this engine runs without a reasoning parser")
        if getattr(params, "trace_decode_token_ids", None) and not self.model.enable_trace_replay:  # 0.29
            raise InvalidCall("trace_decode_token_ids", "this engine runs without --enable-trace-replay")
        start = params.routed_experts_prompt_start
        if not 0 <= start <= length:
            raise InvalidCall("routed_experts_prompt_start", f"{start} is not in [0, {length}]")
        rows = getattr(params, "prompt_logprob_token_ids", None)  # 0.31
        if rows is None:
            return
        if not self.config.use_v2_model_runner or self.config.cache_config.kv_sharing_fast_prefill:
            raise InvalidCall("prompt_logprob_token_ids", "this engine's model runner does not score them")
        scored = max(length - 1 - (params.prompt_logprob_start or 0), 0)
        if getattr(rows, "ndim", 1) == 2 and len(rows) != scored:  # 0.32
            raise InvalidCall("prompt_logprob_token_ids", f"{len(rows)} rows for {scored} scored tokens")

    def _verify(self, params: Any) -> None:
        """SamplingParams' own checks; vLLM's rule chooses the backend of a constraint, not the front end."""
        constraint = params.structured_outputs
        if constraint is not None:
            constraint._backend, constraint._backend_was_auto = None, False
        config = self.config
        try:
            params.verify(self.model, config.speculative_config, config.structured_outputs_config, self.tokenizer)
        except Exception as error:  # grammar libraries raise whatever they like
            field = getattr(error, "parameter", None)
            default = "sampling_params" if constraint is None else "structured_outputs"
            raise InvalidCall(str(field or default), str(error) or type(error).__name__) from error

    # Media

    def _check_media(self, features: Iterable[Any], length: int) -> None:
        """Placeholders lie in order inside the prompt, each position is one item's, and each item can be scheduled."""
        if not self.model.is_multimodal_model:
            raise InvalidCall("mm_features", "this model takes text alone")
        offset = end = 0
        taken: set[int] | None = None  # positions of the items that `place` could overlap, None: those of `last`
        last: Any = None
        for feature in features:
            place = feature.mm_position
            self._check_item(feature, length)
            if place.offset < offset or place.offset + place.length < end:
                raise InvalidCall("mm_features", f"{_item(feature)} is out of order")
            if place.offset >= end:
                taken = None
            else:  # the sound of a video lies between its frames
                taken, here = _positions(last) if taken is None else taken, _positions(place)
                if taken & here:
                    raise InvalidCall("mm_features", f"{_item(feature)} overlaps another")
                taken |= here
            offset, end, last = place.offset, place.offset + place.length, place

    def _check_item(self, feature: Any, length: int) -> None:
        place, mask = feature.mm_position, feature.mm_position.is_embed
        if place.length < 1 or place.offset < 0:
            raise InvalidCall("mm_features", f"{_item(feature)} is empty or begins before the prompt")
        if place.offset + place.length > length and not self.model.is_encoder_decoder:
            raise InvalidCall("mm_features", f"{_item(feature)} is outside a prompt of {length} tokens")
        if mask is not None and (str(mask.dtype) != "torch.bool" or tuple(mask.shape) != (place.length,)):
            raise InvalidCall("mm_features", f"{_item(feature)} has a mask of {mask.dtype}, {tuple(mask.shape)}")
        if place.get_num_embeds() > self.encoder_budget:
            raise InvalidCall("mm_features", f"{_item(feature)} is more than the encoder's {self.encoder_budget}")
        if feature.data is None and not self.caches_media:
            raise InvalidCall("mm_features", f"{_item(feature)} has no data, and this engine keeps none")


def _item(feature: Any) -> str:
    return f"the {feature.modality} of {feature.mm_position.length} tokens at {feature.mm_position.offset}"


def _positions(place: Any) -> set[int]:
    """Where an item's embeddings go in the prompt."""
    if place.is_embed is None:
        return set(range(place.offset, place.offset + place.length))
    return {place.offset + index for index, embeds in enumerate(place.is_embed.tolist()) if embeds}


def _check_inside(token_ids: Sequence[int], vocabulary: int, field: str) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocabulary:
            raise InvalidCall(field, f"token id {token_id} is outside the vocabulary of {vocabulary}")


def _check_transfers(extra: dict[str, Any]) -> None:
    """Parameters of KV and encoder cache transfers are mappings, or the scheduler ends."""
    for name in ("kv_transfer_params", "ec_transfer_params"):
        value = extra.get(name)
        if value is not None and not (isinstance(value, dict) and all(isinstance(key, str) for key in value)):
            raise InvalidCall(name, "is not a mapping by names")


def _table_widths() -> dict[str, int]:
    from vllm import envs
    from vllm.v1.worker.gpu.sample import logit_bias

    return {
        "allowed_token_ids": logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS,
        "logit_bias": logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS,
        "stop_token_ids": logit_bias.MAX_NUM_STOP_TOKEN_IDS,
        "bad_words": envs.VLLM_MAX_NUM_BAD_WORDS,
        "bad_words tokens": envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS,
    }
