"""Real SGLang workers, and what they are started with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import environments
import numpy as np
import pytest
from workers import SglangWorker

from smg_grpc_servicer.demo.weights import write_safetensors

RANK = 4

# SGLang's LoRA layers ask for pinned memory, which there is none of without an accelerator.
UNPINNED = """
import functools
import torch

def register():
    for name in ("tensor", "empty", "zeros"):
        made = getattr(torch, name)

        @functools.wraps(made)
        def unpinned(*args, made=made, pin_memory=False, **kwargs):
            return made(*args, **kwargs)

        setattr(torch, name, unpinned)
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
"""


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    """The python of the SGLang environment with this checkout."""
    return environments.ensure("sglang")


@pytest.fixture(scope="module")
def new_worker(sglang_python, tiny, tmp_path_factory) -> Callable[..., SglangWorker]:
    """Makes a worker that is not started yet, of the tiny Qwen3 where no model is named."""
    folder = tmp_path_factory.mktemp("sglang")

    def new(*arguments: str, model: Path | None = None, **options: Any) -> SglangWorker:
        log = folder / f"{len(list(folder.iterdir()))}.log"
        return SglangWorker(sglang_python, model or tiny("qwen3"), log, *arguments, **options)

    return new


def write_adapter(folder: Path, seed: int, hidden: int = 64, heads: int = 4 * 32) -> Path:
    """A LoRA adapter of the tiny Qwen3 that changes what it says: rank 4 on its output projections."""
    folder.mkdir()
    generator = np.random.default_rng(seed)
    weights = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        weights[f"{name}.lora_A.weight"] = generator.standard_normal((RANK, heads)).astype("float32")
        weights[f"{name}.lora_B.weight"] = generator.standard_normal((hidden, RANK)).astype("float32")
    write_safetensors(folder / "adapter_model.safetensors", weights, bfloat16=False)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["o_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"task_type": "CAUSAL_LM", "lora_dropout": 0.0}))
    return folder


@pytest.fixture(scope="session")
def unpinned(tmp_path_factory) -> Path:
    """A folder with a plugin of SGLang's that lets LoRA run on the CPU."""
    folder = tmp_path_factory.mktemp("unpinned")
    (folder / "unpinned.py").write_text(UNPINNED)
    info = folder / "unpinned-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: unpinned\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nunpinned = unpinned:register\n")
    return folder


@pytest.fixture(scope="session")
def adapters(tmp_path_factory) -> list[Path]:
    """Folders of two adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / name, seed) for seed, name in enumerate(("one", "two"))]
