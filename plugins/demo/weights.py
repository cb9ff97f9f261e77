"""Seeded random weights of tiny models, and the safetensors file that holds them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .vocabulary import SIZE

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]
    Weights = dict[str, Array]

HIDDEN = 64
LAYERS = 2
HEAD_DIM = 32
SEED = 20240229


def write_safetensors(path: Path, weights: Weights, *, bfloat16: bool) -> None:
    """Write float32 arrays as a safetensors file, as bf16 (rounded to nearest even) or as they are.

    The format: a little-endian 64-bit header length, the header (JSON, padded to 8 bytes), the raw bytes.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs: list[bytes] = []
    end = 0
    for name, array in sorted(weights.items()):
        blob = _bfloat16(array) if bfloat16 else array.astype("<f4").tobytes()
        start, end = end, end + len(blob)
        dtype = "BF16" if bfloat16 else "F32"
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [start, end]}
        blobs.append(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def _bfloat16(array: Array) -> bytes:
    """The upper 16 bits of each float32, rounded to nearest even."""
    bits: Array = array.astype("<f4").view("<u4").astype("<u8")
    rounded: Array = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    blob: bytes = rounded.astype("<u2").tobytes()
    return blob


class Random:
    """Seeded arrays; a linear layer of scale 1 keeps the variance of its input."""

    def __init__(self) -> None:
        import numpy as np

        self.generator = np.random.default_rng(SEED)

    def normal(self, *shape: int, std: float) -> Array:
        array: Array = self.generator.standard_normal(shape) * std
        return array

    def linear(self, outputs: int, inputs: int, scale: float = 1.0) -> Array:
        return self.normal(outputs, inputs, std=scale / math.sqrt(inputs))


def _constant(value: float, size: int) -> Array:
    import numpy as np

    return np.full(size, value, dtype="float32")


# The text model. Plain random weights make greedy decoding repeat itself and leave the best two
# tokens so close that a rounding error of another batch shape swaps them. So every embedding is the
# next point of a walk around HIDDEN / 2 circles, layer 0 attends to the token itself and steps on,
# and the rest is random: small in the MLPs, larger in layer 1's attention, which brings the context in
# and now and then wins. About 0.5% of greedy choices are within a bf16 rounding of the second best.
EMBEDDING_RMS = 0.2
STEP_GAIN = 2.0
CONTEXT_GAIN = 3.5


def _walk(random: Random) -> tuple[Array, Array]:
    """Embeddings [SIZE, HIDDEN] in a shuffled walk, and the matrix [HIDDEN, HIDDEN] of one step."""
    import numpy as np

    circles = HIDDEN // 2
    angles, phases = random.generator.uniform(0, 2 * math.pi, (2, circles))
    turns = np.arange(SIZE)[:, None] * angles + phases
    points = np.stack([np.cos(turns), np.sin(turns)], axis=2).reshape(SIZE, HIDDEN)
    step = np.zeros((HIDDEN, HIDDEN))
    for circle, angle in enumerate(angles):
        at = slice(2 * circle, 2 * circle + 2)
        step[at, at] = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
    embeddings = np.empty_like(points)
    embeddings[random.generator.permutation(SIZE)] = points
    return embeddings * EMBEDDING_RMS * math.sqrt(2), step


def _step_attention(step: Array, heads: int, groups: int, sharpness: float) -> tuple[Array, ...]:
    """Query, key, value and output weights of attention that sees its own token and steps on from it."""
    import numpy as np

    identity = np.eye(HIDDEN)
    per_group = heads // groups
    queries = np.repeat(identity.reshape(groups, HEAD_DIM, HIDDEN), per_group, axis=0).reshape(-1, HIDDEN)
    # The residual's own point is taken back out; the norm before has scaled the value by 1 / RMS.
    output = (STEP_GAIN * step - identity) * EMBEDDING_RMS / per_group
    output = np.repeat(output.reshape(HIDDEN, groups, HEAD_DIM), per_group, axis=1).reshape(HIDDEN, -1)
    return queries * sharpness, identity * sharpness, identity, output


def text_weights(random: Random, heads: int, groups: int, *, qwen3: bool) -> Weights:
    """Weights of a Qwen3 or Qwen2 decoder: ``heads`` query heads that share ``groups`` key-value heads."""
    embeddings, step = _walk(random)
    weights: Weights = {"model.embed_tokens.weight": embeddings, "model.norm.weight": _constant(1, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        if layer == 0:
            # Norm weights (below) sharpen Qwen3's attention; Qwen2 has none.
            attention = _step_attention(step, heads, groups, 1.0 if qwen3 else 2.0)
        else:
            sizes = (heads, groups, groups)
            inputs = [random.linear(size * HEAD_DIM, HIDDEN) for size in sizes]
            gain = CONTEXT_GAIN * STEP_GAIN * EMBEDDING_RMS
            attention = (*inputs, random.linear(HIDDEN, heads * HEAD_DIM, gain))
        for part, weight in zip("qkvo", attention, strict=True):
            weights[f"{prefix}self_attn.{part}_proj.weight"] = weight
            if not qwen3 and part != "o":
                weights[f"{prefix}self_attn.{part}_proj.bias"] = _constant(0, len(weight))
        if qwen3:
            for part in "qk":
                weights[f"{prefix}self_attn.{part}_norm.weight"] = _constant(2 if layer == 0 else 1.5, HEAD_DIM)
        weights[prefix + "mlp.gate_proj.weight"] = random.linear(2 * HIDDEN, HIDDEN)
        weights[prefix + "mlp.up_proj.weight"] = random.linear(2 * HIDDEN, HIDDEN)
        weights[prefix + "mlp.down_proj.weight"] = random.linear(HIDDEN, 2 * HIDDEN, STEP_GAIN * EMBEDDING_RMS / 4)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{norm}.weight"] = _constant(1, HIDDEN)
    return weights


def vision_weights(random: Random) -> Weights:
    width, merged = 64, 64 * 4
    weights: Weights = {"visual.patch_embed.proj.weight": random.normal(width, 3, 2, 14, 14, std=0.03)}
    linears = {"visual.merger.mlp.0": (merged, merged), "visual.merger.mlp.2": (HIDDEN, merged)}
    norms = ["visual.merger.ln_q"]
    for block in range(2):
        prefix = f"visual.blocks.{block}."
        linears |= {prefix + "attn.qkv": (3 * width, width), prefix + "attn.proj": (width, width)}
        linears |= {prefix + "mlp.fc1": (4 * width, width), prefix + "mlp.fc2": (width, 4 * width)}
        norms += [prefix + "norm1", prefix + "norm2"]
    for name, (outputs, inputs) in linears.items():
        # The merger's output stands beside token embeddings, so it has their size.
        scale = EMBEDDING_RMS * 2 if name == "visual.merger.mlp.2" else 1.0
        weights[name + ".weight"] = random.linear(outputs, inputs, scale)
        weights[name + ".bias"] = random.normal(outputs, std=0.02)
    for name in norms:
        weights |= {name + ".weight": _constant(1, width), name + ".bias": _constant(0, width)}
    return weights


def bert_weights(random: Random) -> Weights:
    weights: Weights = {
        "embeddings.word_embeddings.weight": random.normal(SIZE, HIDDEN, std=0.2),
        "embeddings.position_embeddings.weight": random.normal(512, HIDDEN, std=0.05),
        "embeddings.token_type_embeddings.weight": random.normal(2, HIDDEN, std=0.05),
    }
    linears = {"pooler.dense": (HIDDEN, HIDDEN)}
    norms = ["embeddings.LayerNorm"]
    for layer in range(LAYERS):
        prefix = f"encoder.layer.{layer}."
        linears |= {f"{prefix}attention.self.{part}": (HIDDEN, HIDDEN) for part in ("query", "key", "value")}
        linears |= {prefix + "attention.output.dense": (HIDDEN, HIDDEN)}
        linears |= {prefix + "intermediate.dense": (2 * HIDDEN, HIDDEN), prefix + "output.dense": (HIDDEN, 2 * HIDDEN)}
        norms += [prefix + "attention.output.LayerNorm", prefix + "output.LayerNorm"]
    for name, (outputs, inputs) in linears.items():
        weights[name + ".weight"] = random.linear(outputs, inputs)
        weights[name + ".bias"] = random.normal(outputs, std=0.02)
    for name in norms:
        weights |= {name + ".weight": _constant(1, HIDDEN), name + ".bias": _constant(0, HIDDEN)}
    return weights
