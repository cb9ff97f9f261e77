"""Tiny models made from nothing, that engines load like real ones: ``write("qwen3", directory)``.

Written without torch, transformers or safetensors; numpy and tokenizers are imported when a model is written.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Relative, so that tests/models.py can load this folder where the package is not installed.
from .vocabulary import BERT_TOKENS, CHAT_TOKENS, END_OF_TEXT, SIZE, TURN_END, VISION_TOKENS, byte_level_bpe, word_piece
from .weights import (
    HEAD_DIM,
    HIDDEN,
    LAYERS,
    Random,
    bert_weights,
    text_weights,
    vision_weights,
    write_safetensors,
)

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'text' %}
{{- part.text }}
{%- elif part.type in ('image', 'image_url') %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type in ('video', 'video_url') %}
{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def write(name: str, directory: str | Path) -> Path:
    """Write model ``name`` (one of ``MODELS``) into ``directory`` and return it; the same bytes every time.

    Raises ValueError on another name and ImportError, with the command that helps, where numpy or
    tokenizers is missing.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}: expected one of {', '.join(sorted(MODELS))}")
    for module in ("numpy", "tokenizers"):
        _need(module)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    MODELS[name](folder)
    return folder


def _need(module: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"a tiny model needs {module}, which is not installed: pip install 'smg-grpc-servicer[demo]'"
        ) from error


def _write_json(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _write_chat_tokenizer(folder: Path, special: tuple[str, ...]) -> dict[str, int]:
    """Write the tokenizer's files and return the ids of its special tokens."""
    tokenizer = byte_level_bpe(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in special}
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "model_max_length": 4096,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "bos_token": None,
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "unk_token": None,
            "added_tokens_decoder": {str(number): {"content": token, **flags} for token, number in ids.items()},
            "chat_template": CHAT_TEMPLATE,
        },
    )
    end_ids = [ids[TURN_END], ids[END_OF_TEXT]]
    _write_json(folder / "generation_config.json", {"eos_token_id": end_ids, "pad_token_id": ids[END_OF_TEXT]})
    return ids


def _text_config(ids: dict[str, int], heads: int, groups: int) -> dict[str, Any]:
    return {
        "vocab_size": SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": ids[END_OF_TEXT],
        "eos_token_id": ids[TURN_END],
        "pad_token_id": ids[END_OF_TEXT],
    }


def _write_qwen3(folder: Path) -> None:
    ids = _write_chat_tokenizer(folder, CHAT_TOKENS)
    config = _text_config(ids, heads=4, groups=2)
    config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    config |= {"head_dim": HEAD_DIM, "attention_bias": False, "rope_scaling": None}
    _write_json(folder / "config.json", config)
    weights = text_weights(Random(), heads=4, groups=2, qwen3=True)
    write_safetensors(folder / "model.safetensors", weights, bfloat16=True)


VISION = {
    "depth": 2,
    "embed_dim": 64,
    "hidden_size": HIDDEN,
    "num_heads": 4,
    "mlp_ratio": 4,
    "in_chans": 3,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "hidden_act": "quick_gelu",
    "model_type": "qwen2_vl",
}


def _write_qwen2vl(folder: Path) -> None:
    ids = _write_chat_tokenizer(folder, CHAT_TOKENS + VISION_TOKENS)
    config = _text_config(ids, heads=2, groups=2)
    config |= {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl"}
    keys = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    config |= {key: ids[token] for key, token in zip(keys, VISION_TOKENS, strict=True)}
    config |= {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}, "vision_config": VISION}
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2VLProcessor",
            "min_pixels": 3136,
            "max_pixels": 200704,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
        },
    )
    random = Random()
    weights = text_weights(random, heads=2, groups=2, qwen3=False) | vision_weights(random)
    write_safetensors(folder / "model.safetensors", weights, bfloat16=True)


def _write_minilm(folder: Path) -> None:
    tokenizer = word_piece()
    tokenizer.save(str(folder / "tokenizer.json"))
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word, _ in words), encoding="utf-8")
    names = ("pad", "unk", "cls", "sep", "mask")
    tokens = {f"{name}_token": token for name, token in zip(names, BERT_TOKENS, strict=True)}
    _write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 512, **tokens},
    )
    config = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HIDDEN // HEAD_DIM,
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }
    _write_json(folder / "config.json", config)
    modules = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    _write_json(
        folder / "modules.json",
        [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (path, kind) in enumerate(modules)
        ],
    )
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": 512, "do_lower_case": False})
    pooling = {"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    _write_json(folder / "1_Pooling" / "config.json", pooling)
    write_safetensors(folder / "model.safetensors", bert_weights(Random()), bfloat16=False)


MODELS: dict[str, Callable[[Path], None]] = {
    "minilm": _write_minilm,
    "qwen2vl": _write_qwen2vl,
    "qwen3": _write_qwen3,
}
