"""What an SGLang configuration says about the model and the worker."""

from __future__ import annotations

import enum
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..serving.errors import Precondition
from ..serving.host import shm_namespace_id
from ..wire.calls import ModelFacts, ServerFacts

_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_ROUTED_MODALITIES = ("image", "video")
_SECRET_WORDS = frozenset("key apikey secret password passwd passphrase credential auth authorization bearer".split())
_TOKEN = "token"  # a secret where it is text, a count where it is a number
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|[0-9]+")
_USERINFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_MASK = "***"


def model_facts(model: Any, scheduler_info: Mapping[str, Any]) -> ModelFacts:
    """Facts for GetModelInfo, from SGLang's ModelConfig and its published configuration."""
    from sglang.srt.runtime_context import get_model, get_serving

    serving, hf = get_serving(), model.hf_config
    preferred = serving.preferred_sampling_params or {}
    defaults = model.get_default_sampling_params() | preferred
    labels = _labels(model)
    return ModelFacts(
        model_path=get_model().model_path,
        is_generation=bool(model.is_generation),
        max_context_length=model.context_len,
        vocab_size=model.vocab_size,
        supports_vision=bool(model.is_multimodal),
        served_model_name=serving.served_model_name or get_model().model_path,
        tokenizer_path=serving.tokenizer_path or "",
        model_type=getattr(hf, "model_type", "") or "",
        architectures=tuple(getattr(hf, "architectures", None) or ()),
        eos_token_ids=tuple(sorted(model.hf_eos_token_id or ())),
        pad_token_id=_token_id(model, "pad_token_id"),
        bos_token_id=_token_id(model, "bos_token_id"),
        max_input_length=int(scheduler_info.get("max_req_input_len") or model.context_len),
        default_sampling={name: value for name, value in defaults.items() if name in _SAMPLING_DEFAULTS},
        preferred_sampling_json=json.dumps(preferred) if preferred else "",
        weight_version=serving.weight_version or "",
        id2label_json=json.dumps(labels) if labels else "",
        num_labels=len(labels),
    )


def server_facts(server_args: Any, model: Any, scheduler_info: Mapping[str, Any], max_running: int) -> ServerFacts:
    """Facts for GetServerInfo: the arguments as resolved, without secrets, and what the scheduler said.

    `max_running` is what the schedulers report, where no flag sets it.
    """
    from sglang.srt.runtime_context import get_mm, get_schedule, get_serving
    from sglang.version import __version__

    serving = get_serving()
    arguments = masked(server_args.resolved_dict())
    if serving.skip_tokenizer_init:
        arguments["grammar_backend"] = "none"
    elif not arguments.get("grammar_backend"):
        arguments["grammar_backend"] = "xgrammar"
    return ServerFacts(
        server_type="grpc",
        version=__version__,
        data_parallel_size=data_parallel_ranks(),
        shm_namespace_id=shm_namespace_id(),
        model_dtype=str(model.dtype),
        pairing_protocol=os.environ.get("SMG_PAIRING_PROTOCOL", "").strip(),
        max_num_seqs=get_schedule().max_running_requests or max_running,
        mm_item_limits=_item_limits(get_mm().limit_mm_data_per_request),
        reasoning_parser=serving.reasoning_parser or "",
        constrained_decoding_start="after_reasoning" if serving.reasoning_parser else "first_token",
        max_total_tokens=int(scheduler_info.get("max_total_num_tokens") or 0),
        arguments=arguments,
        scheduler=masked(dict(scheduler_info)),
    )


def data_parallel_ranks() -> int:
    """How many schedulers calls are spread over."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return int(getattr(parallel, "num_dp_ranks", None) or parallel.dp_size)  # num_dp_ranks: 0.5.22


def tokenizer_directory() -> Path:
    """Where the tokenizer lies: a directory, or the local snapshot of a hub id (nothing is downloaded)."""
    from sglang.srt.runtime_context import get_model, get_serving

    name = get_serving().tokenizer_path
    if not name:
        raise Precondition("this worker runs without a tokenizer")
    if Path(name).is_dir():
        return Path(name)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=get_model().revision, local_files_only=True))
    except Exception as error:
        raise Precondition(f"the tokenizer {name!r} is neither a directory nor in the local hub cache") from error


def masked(values: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping as JSON has it, with every secret in it masked: by its key at any depth, JSON text included."""
    return {str(name): _masked(str(name), value) for name, value in values.items()}


def _masked(name: str, value: Any) -> Any:
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, Mapping):
        return masked(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_masked(name, item) for item in value]
    if value is None or isinstance(value, bool) or value == "":
        return value
    words = {word.lower().removesuffix("s") for word in _WORD.findall(name)}
    number = isinstance(value, (int, float))
    if words & _SECRET_WORDS or (_TOKEN in words and not number):
        return _MASK
    if number:
        return value if math.isfinite(value) else str(value)
    return _masked_text(str(value))


def _masked_text(text: str) -> str:
    if text[:1] in "{[" and text:
        try:
            inner = json.loads(text)
        except ValueError:
            inner = None
        if isinstance(inner, (dict, list)):
            clean = _masked("", inner)
            return text if clean == inner else json.dumps(clean)
    return _USERINFO.sub(_MASK, text)


def _labels(model: Any) -> dict[str, str]:
    """The names of a classifier's classes; transformers gives every other model two made-up ones."""
    labels = getattr(model.hf_config, "id2label", None) or {}
    if model.is_generation or labels == {0: "LABEL_0", 1: "LABEL_1"}:
        return {}
    return {str(number): str(label) for number, label in labels.items()}


def _token_id(model: Any, name: str) -> int:
    value = getattr(model.hf_config, name, None)
    if value is None:
        value = getattr(model.hf_text_config, name, None)
    if isinstance(value, (list, tuple)):
        value = value[0] if value else None
    return value if isinstance(value, int) else 0


def _item_limits(limits: Mapping[str, int] | None) -> str:
    known = limits or {}
    return ",".join(f"{name}={known[name]}" for name in sorted(known) if name in _ROUTED_MODALITIES)
