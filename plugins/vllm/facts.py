"""What a vLLM configuration says about the model and the worker."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..serving.engine import Capacity
from ..serving.errors import Precondition
from ..serving.host import shm_namespace_id
from ..wire.calls import ModelFacts, ServerFacts

logger = logging.getLogger(__name__)

_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_ENCODER_DTYPES = ("float32", "float16", "bfloat16")
_ROUTED_MODALITIES = ("image", "video")
_P2P = ("MooncakeConnector", "NixlConnector", "MoRIIOConnector")
_STORES = ("MooncakeStoreConnector", "SharedStorageConnector", "FlexKV", "HF3FS")


def model_facts(config: Any) -> ModelFacts:
    """Facts for GetModelInfo."""
    model = config.model_config
    hf = model.hf_config
    served = model.served_model_name
    return ModelFacts(
        model_path=model.model,
        is_generation=model.runner_type == "generate",
        max_context_length=model.max_model_len,
        vocab_size=model.get_vocab_size(),
        supports_vision=bool(model.is_multimodal_model),
        served_model_name=served[0] if isinstance(served, (list, tuple)) else served or model.model,
        tokenizer_path=model.tokenizer or "",
        model_type=getattr(hf, "model_type", "") or "",
        architectures=tuple(getattr(hf, "architectures", None) or ()),
        eos_token_ids=_eos_token_ids(model),
        pad_token_id=_token_id(model, "pad_token_id"),
        bos_token_id=_token_id(model, "bos_token_id"),
        max_input_length=model.max_model_len,
        default_sampling={k: v for k, v in model.get_diff_sampling_param().items() if k in _SAMPLING_DEFAULTS},
    )


def server_facts(config: Any) -> ServerFacts:
    """Facts for GetServerInfo."""
    from vllm.version import __version__

    model, cache = config.model_config, config.cache_config
    connector, engine_id, role = _kv_transfer(config.kv_transfer_config)
    multimodal = getattr(model, "multimodal_config", None) if model.is_multimodal_model else None
    budget = _encoder_budget(config) if multimodal is not None else None
    dtype = str(model.dtype)
    return ServerFacts(
        server_type="vllm-grpc",
        version=__version__,
        kv_connector=connector,
        kv_role=role,
        kv_engine_id=engine_id,
        data_parallel_size=config.parallel_config.data_parallel_size,
        shm_namespace_id=shm_namespace_id(),
        kv_cache_dtype=str(cache.cache_dtype),
        block_size=cache.block_size or 0,
        attention_backend=_attention_backend(config),
        model_dtype=dtype,
        pairing_protocol=os.environ.get("SMG_PAIRING_PROTOCOL", "").strip(),
        mm_device_do_normalize=bool(getattr(multimodal, "mm_device_do_normalize", False)),
        max_num_seqs=config.scheduler_config.max_num_seqs,
        mm_item_limits=_item_limits(budget.mm_limits) if budget is not None else "",
        mm_encoder_dtype=_encoder_dtype(dtype),
        mm_encoder_budget=budget.get_encoder_budget() if budget is not None else 0,
        reasoning_parser=_structured(config, "reasoning_parser") or "",
        constrained_decoding_start=_constrained_decoding_start(config),
    )


def capacity(config: Any, core: Any) -> Capacity:
    """What each managed rank holds. `num_gpu_blocks` is summed over ranks, so it is not used under DP."""
    cache = config.cache_config
    ranks = tuple(getattr(core, "engine_ranks_managed", None) or (0,))
    tokens = getattr(cache, "kv_cache_size_tokens", None)
    if tokens is None:
        tokens = (cache.num_gpu_blocks or 0) * (cache.block_size or 0) // len(ranks)
    return Capacity(ranks=ranks, tokens_per_rank=tokens, max_running=config.scheduler_config.max_num_seqs)


def tokenizer_directory(model: Any) -> Path:
    """Where the tokenizer lies: a directory, or the local snapshot of a hub id (nothing is downloaded)."""
    name = model.tokenizer
    if not name:
        raise Precondition("this worker runs without a tokenizer")
    if Path(name).is_dir():
        return Path(name)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=model.tokenizer_revision, local_files_only=True))
    except Exception as error:
        raise Precondition(f"the tokenizer {name!r} is neither a directory nor in the local hub cache") from error


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    """The tokenizer's own id first: it ends a choice without being named as what was matched."""
    ids: list[int] = []
    for value in (_config_value(model, "eos_token_id"), model.try_get_generation_config().get("eos_token_id")):
        if isinstance(value, int):
            ids.append(value)
        elif value:
            ids += value
    own = _tokenizer_eos(model)
    return tuple(dict.fromkeys([own, *ids] if own in ids else ids))


def _tokenizer_eos(model: Any) -> int | None:
    """The id of the tokenizer's EOS token, from its files; None where they do not tell."""
    try:
        folder = tokenizer_directory(model)
        settings = json.loads((folder / "tokenizer_config.json").read_bytes())
        token = settings["eos_token"]
        content = token["content"] if isinstance(token, dict) else token
        added = settings.get("added_tokens_decoder")
        if added:
            return next((int(number) for number, entry in added.items() if entry["content"] == content), None)
        entries = json.loads((folder / "tokenizer.json").read_bytes())["added_tokens"]
        return next((entry["id"] for entry in entries if entry["content"] == content), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, Precondition):
        return None


def _token_id(model: Any, name: str) -> int:
    value = _config_value(model, name)
    if isinstance(value, (list, tuple)):
        value = value[0] if value else None
    return value if isinstance(value, int) else 0


def _config_value(model: Any, name: str) -> Any:
    value = getattr(model.hf_config, name, None)
    return value if value is not None else getattr(model.hf_text_config, name, None)


def _kv_transfer(transfer: Any) -> tuple[str, str, str]:
    """Connector, engine id and role; of a MultiConnector the one child that pairing is about."""
    if transfer is None or not transfer.kv_connector:
        return "", "", ""
    connector, engine_id = transfer.kv_connector, transfer.engine_id or ""
    if connector == "MultiConnector":
        children = (transfer.kv_connector_extra_config or {}).get("connectors") or []
        names = [child.get("kv_connector", "") for child in children if isinstance(child, dict)]
        peers = [name for name in names if name in _P2P]
        stores = [name for name in names if name.startswith(_STORES)]
        chosen = peers if len(peers) == 1 else stores
        if peers == ["MoRIIOConnector"] and len(stores) == 1:
            chosen = stores
        if len(chosen) == 1:
            child = children[[c.get("kv_connector") for c in children].index(chosen[0])]
            connector, engine_id = chosen[0], child.get("engine_id") or engine_id
    return connector, engine_id, transfer.kv_role or ""


def _attention_backend(config: Any) -> str:
    backend = getattr(getattr(config, "attention_config", None), "backend", None)
    return getattr(backend, "name", None) or (str(backend) if backend else "")


def _structured(config: Any, name: str) -> Any:
    return getattr(config.structured_outputs_config, name, None)


def _constrained_decoding_start(config: Any) -> str:
    if config.structured_outputs_config is None:
        return ""
    gated = _structured(config, "reasoning_parser") and not _structured(config, "enable_in_reasoning")
    return "after_reasoning" if gated else "first_token"


def _encoder_dtype(dtype: str) -> str:
    name = dtype.removeprefix("torch.")
    return name if name in _ENCODER_DTYPES else ""


def _encoder_budget(config: Any) -> Any:
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import MultiModalBudget

    try:
        return MultiModalBudget(config, MULTIMODAL_REGISTRY)
    except Exception:  # a fact left out, not a worker that does not start
        logger.warning("the encoder budget is not known", exc_info=True)
        return None


def _item_limits(limits: Mapping[str, int]) -> str:
    return ",".join(f"{name}={limits[name]}" for name in sorted(limits) if name in _ROUTED_MODALITIES)
