"""The package as it is installed, and the limits that keep it readable."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from importlib import metadata, resources
from pathlib import Path

import pytest

import smg_grpc_servicer

CHECKOUT = Path(__file__).resolve().parent.parent
SOURCES = sorted(file for folder in ("plugins", "hooks", "wire") for file in (CHECKOUT / folder).rglob("*.py"))
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(smg_grpc_servicer.__path__, "smg_grpc_servicer.")
    if not module.name.endswith("__main__")
)


@pytest.mark.parametrize("module", MODULES)
def test_a_bare_interpreter_imports_every_module(module: str):
    importlib.import_module(module)


def test_importing_everything_loads_no_engine_and_no_extra():
    code = f"import importlib, sys; [importlib.import_module(m) for m in {MODULES!r}]; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    roots = {name.partition(".")[0] for name in out.split()}
    assert not roots & {"vllm", "sglang", "mlx", "torch", "redis", "prometheus_client", "smg", "tokenizers", "zmq"}


def test_the_distribution_is_what_engines_look_for():
    distribution = metadata.distribution("smg-grpc-servicer")
    assert distribution.version == "1.0.0"
    entries = {(entry.group, entry.name): entry.value for entry in distribution.entry_points}
    assert entries["vllm.general_plugins", "smg-servicer"] == "smg_grpc_servicer.vllm.plugin:register"
    assert ("console_scripts", "smg-servicer") in entries
    assert (resources.files(smg_grpc_servicer) / "py.typed").is_file()


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(CHECKOUT)))
def test_no_file_is_over_500_lines_and_no_function_over_60(file: Path):
    text = file.read_text()
    assert len(text.splitlines()) <= 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, node.name


def command(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "smg_grpc_servicer", *arguments], capture_output=True, text=True, check=False
    )
    return done.stdout


def test_the_doctor_and_the_demo_are_commands_of_the_package():
    assert {"doctor", "demo"} <= set(command("--help").replace(",", " ").split())
    assert '"healthy"' in command("doctor", "--json")
    assert "--keep" in command("demo", "--help")
