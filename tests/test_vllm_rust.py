"""What must hold before vLLM is served from Rust; a stand-in for vLLM's sources, the installed smg wheel."""

from __future__ import annotations

import argparse
import re
import sys
import types
from pathlib import Path

import pytest

import smg_grpc_servicer.vllm as package
from smg_grpc_servicer.hooks import plugins, seams
from smg_grpc_servicer.hooks.settings import ConfigurationError
from smg_grpc_servicer.hooks.specs import hookimpl
from smg_grpc_servicer.vllm import engine, rust

SOURCES = {
    "entrypoints/grpc_server.py": "async def serve_grpc(args): ...",
    "v1/serial_utils.py": (
        "class MsgpackDecoder:\n    def decode(self): ...\nclass MsgpackEncoder:\n    def encode_into(self): ..."
    ),
    "v1/engine/core.py": (
        "class EngineCore:\n    def preprocess_add_request(self): ...\n    def add_request(self): ...\n"
        "class EngineCoreProc(EngineCore):\n    def _handle_request_preproc_error(self): ..."
    ),
}


@pytest.fixture
def vllm(tmp_path, monkeypatch) -> Path:
    """The folder of a package `vllm` that is found first; it is never imported."""
    folder = tmp_path / "vllm"
    for name, text in ({"__init__.py": "raise ImportError"} | SOURCES).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    for name in ("SMG_VLLM_SERVICER_IMPL", "SMG_VLLM_ENGINE_GUARD"):
        monkeypatch.delenv(name, raising=False)
    return folder


def namespace(**values: object) -> argparse.Namespace:
    return argparse.Namespace(**({"host": None, "port": 8000, "data_parallel_backend": "mp"} | values))


def problems(args: argparse.Namespace) -> list[str]:
    with pytest.raises(ConfigurationError) as error:
        rust.check(args)
    return list(error.value.lines)


def test_launchers_import_the_names_from_the_package_without_importing_vllm():
    assert package.serve_rust is rust.serve_rust
    assert package.resolve_servicer_impl is rust.resolve_servicer_impl
    assert package.require_upstream_hook is rust.require_upstream_hook
    assert "vllm" not in sys.modules
    with pytest.raises(AttributeError):
        package.nobody  # noqa: B018


@pytest.mark.parametrize(
    ("flag", "variable", "expected"),
    [(None, None, "python"), (None, "RUST", "rust"), ("rust", "python", "rust"), ("Python", "rust", "python")],
)
def test_the_flag_wins_over_the_variable_in_any_case(monkeypatch, flag, variable, expected):
    if variable is not None:
        monkeypatch.setenv("SMG_VLLM_SERVICER_IMPL", variable)
    assert rust.resolve_servicer_impl(argparse.Namespace(servicer_impl=flag)) == expected


def test_a_known_launcher_is_served(vllm):
    assert rust.upstream_hook_installed()
    rust.require_upstream_hook()
    settings, wheel = rust.check(namespace())
    assert settings["implementation"] == "python"
    assert wheel.name == "VllmGrpcServer"


@pytest.mark.parametrize("plugins_shown", ["", "other", "other,smg"])
def test_a_filter_without_our_plugin_is_named(vllm, monkeypatch, plugins_shown):
    monkeypatch.setenv("VLLM_PLUGINS", plugins_shown)
    assert not rust.upstream_hook_installed()
    with pytest.raises(RuntimeError, match=re.escape(f"VLLM_PLUGINS={plugins_shown!r}")):
        rust.require_upstream_hook()
    (line,) = problems(namespace())
    assert "smg-servicer" in line
    monkeypatch.setenv("VLLM_PLUGINS", f"{plugins_shown},smg-servicer")
    assert rust.upstream_hook_installed()


def test_a_vllm_without_a_launcher_that_we_know_is_named(vllm):
    (vllm / "entrypoints/grpc_server.py").write_text("def serve(): ...")
    assert not rust.upstream_hook_installed()
    (line,) = problems(namespace())
    assert "vllm.entrypoints.grpc_server:serve_grpc" in line


def test_a_launcher_of_somebody_elses_is_served_where_it_serves_from_rust(vllm, tmp_path, monkeypatch):
    main = types.ModuleType("__main__")
    main.serve_grpc = lambda args: None
    main.__file__ = str(tmp_path / "launch.py")
    monkeypatch.setitem(sys.modules, "__main__", main)
    Path(main.__file__).write_text("async def serve_grpc(args): ...")
    try:
        (line,) = problems(namespace())
        assert main.__file__ in line
        Path(main.__file__).write_text("from smg_grpc_servicer.vllm import serve_rust")
        rust.check(namespace())
    finally:
        for seam in engine.smg_engine().seams:
            seams.unbind(seam)


def test_a_core_that_cannot_be_guarded_is_refused_unless_the_guard_is_off(vllm, monkeypatch):
    (vllm / "v1/engine/core.py").write_text("class EngineCore: ...")
    (line,) = problems(namespace())
    assert "SMG_VLLM_ENGINE_GUARD" in line
    assert "EngineCore.preprocess_add_request" in line
    monkeypatch.setenv("SMG_VLLM_ENGINE_GUARD", "0")
    rust.check(namespace())


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"node_rank": 1}, "--node-rank 1"),
        ({"data_parallel_rank": 0}, "--data-parallel-rank 0"),
        ({"data_parallel_start_rank": 2}, "--data-parallel-start-rank 2"),
        ({"data_parallel_hybrid_lb": True}, "--data-parallel-hybrid-lb"),
        ({"data_parallel_external_lb": True}, "--data-parallel-external-lb"),
        ({"data_parallel_backend": "ray"}, "--data-parallel-backend ray"),
        ({"ssl_certfile": "c.pem"}, "TLS"),
        ({"metrics_host": "127.0.0.1"}, "--metrics-port"),
    ],
)
def test_what_rust_does_not_serve_is_refused_by_name(vllm, values, expected):
    (line,) = problems(namespace(**values))
    assert expected in line


def test_every_problem_is_told_at_once(vllm, monkeypatch):
    monkeypatch.setenv("SMG_SERVICER_WORKER_THREADS", "none")
    monkeypatch.setenv("SMG_VLLM_SERVICER_HANDSHAKE_PORT", "99999")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    lines = problems(namespace(node_rank=3))
    for expected in ("WORKER_THREADS", "HANDSHAKE_PORT", "VLLM_PLUGINS", "--node-rank"):
        assert [line for line in lines if expected in line], expected


def test_one_port_for_two_uses_is_refused(vllm, monkeypatch):
    monkeypatch.setenv("SMG_VLLM_SERVICER_HANDSHAKE_PORT", "8000")
    (line,) = problems(namespace(port=8000))
    assert "8000" in line


def test_a_plugin_that_admits_calls_is_not_bypassed(vllm):
    class Plugin:
        @hookimpl
        def smg_admit(self, call): ...

    manager = plugins.plugin_manager()
    plugin = Plugin()
    manager.register(plugin)
    try:
        (line,) = problems(namespace())
        assert "smg_admit" in line
    finally:
        manager.unregister(plugin)
