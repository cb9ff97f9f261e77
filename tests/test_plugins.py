"""Plugins: found through entry points, and never able to break a start."""

import importlib
import logging
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smg_grpc_servicer.hooks import plugins, specs

Install = Callable[..., None]


@pytest.fixture(autouse=True)
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install distributions with a plugin each, as pip would leave them; ours registers nothing meanwhile."""
    monkeypatch.syspath_prepend(tmp_path)
    found = plugins.importlib_metadata.entry_points

    def without_ours(**params: Any) -> list[Any]:
        return [entry for entry in found(**params) if entry.dist.name != "smg-grpc-servicer"]

    monkeypatch.setattr(plugins.importlib_metadata, "entry_points", without_ours)
    before = set(sys.modules)

    def install(distribution: str, source: str | None, entry: str = "demo") -> None:
        module = distribution.replace("-", "_")
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[smg_grpc_servicer]\n{entry} = {module}\n")
        if source is not None:
            header = "from smg_grpc_servicer.hooks import EngineDescription, hookimpl\n"
            (tmp_path / f"{module}.py").write_text(header + textwrap.dedent(source))
        importlib.invalidate_caches()
        plugins.reset()

    plugins.reset()
    yield install
    plugins.reset()
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


ENGINE = """
    @hookimpl
    def smg_engine():
        return EngineDescription(name="{0}", distributions=("{0}",), service="{0}.Engine")
"""


def test_a_plugin_is_found_by_its_entry_point_and_its_hooks_are_called(install: Install) -> None:
    install("good", "@hookimpl\ndef smg_media_fetcher(scheme):\n    return scheme.upper if scheme == 's3' else None\n")
    hook = plugins.plugin_manager().hook
    assert hook.smg_media_fetcher(scheme="s3")() == "S3"
    assert hook.smg_media_fetcher(scheme="gs") is None
    assert plugins.problems() == []


def test_the_manager_is_made_once() -> None:
    assert plugins.plugin_manager() is plugins.plugin_manager()


BROKEN = {
    "missing-module": (None, "ModuleNotFoundError"),
    "fails-at-import": ("raise RuntimeError('no luck')", "RuntimeError: no luck"),
    "exits-at-import": ("raise SystemExit(3)", "SystemExit: 3"),
    "wrong-arguments": (
        "@hookimpl\ndef smg_media_fetcher(scheme): return 1\n@hookimpl\ndef smg_servicer_implementation(nonsense): ...",
        "PluginValidationError",
    ),
}


@pytest.mark.parametrize("distribution", BROKEN)
def test_a_broken_plugin_is_one_warning_and_the_others_work(
    install: Install, caplog: pytest.LogCaptureFixture, distribution: str
) -> None:
    source, error = BROKEN[distribution]
    install(distribution, source, entry="breaks")
    install("good", "@hookimpl\ndef smg_media_fetcher(scheme): return 'good'\n")
    assert plugins.plugin_manager().hook.smg_media_fetcher(scheme="s3") == "good"
    assert plugins.implementations("smg_media_fetcher") == ["good:demo"]
    (warning,) = warnings(caplog)
    assert all(part in warning for part in ("'breaks'", distribution, error))
    assert plugins.problems() == [warning]


def test_a_misnamed_hook_is_one_warning_and_the_rest_of_the_plugin_works(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install(
        "typo",
        """
        @hookimpl
        def smg_finnished(call): ...
        @hookimpl
        def smg_admitt(call): ...
        @hookimpl(optionalhook=True)
        def smg_of_a_later_release(call): ...
        @hookimpl
        def smg_media_fetcher(scheme): return "works"
        """,
    )
    assert plugins.plugin_manager().hook.smg_media_fetcher(scheme="s3") == "works"
    (warning,) = warnings(caplog)
    assert warning == "plugin typo:demo implements hooks that do not exist: smg_admitt, smg_finnished"


def test_two_plugins_may_use_the_same_entry_name(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install("one", ENGINE.format("one"))
    install("two", ENGINE.format("two"))
    assert sorted(plugins.engines()) == ["one", "two"]
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("body", "said"),
    [("raise RuntimeError('no luck')", "RuntimeError: no luck"), ("return {'name': 'bad'}", "EngineDescription")],
)
def test_an_engine_that_cannot_be_described_is_one_warning(
    install: Install, caplog: pytest.LogCaptureFixture, body: str, said: str
) -> None:
    install("bad", f"@hookimpl\ndef smg_engine():\n    {body}\n")
    install("good", ENGINE.format("good"))
    assert list(plugins.engines()) == ["good"]
    assert list(plugins.engines()) == ["good"]
    (warning,) = warnings(caplog)
    assert "bad:demo" in warning
    assert said in warning


def test_an_engine_described_twice_is_one_warning(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install("one", ENGINE.format("same"))
    install("two", ENGINE.format("same"))
    assert list(plugins.engines()) == ["same"]
    assert len(warnings(caplog)) == 1


def test_a_hook_nobody_implements_can_be_left_out(install: Install) -> None:
    assert not plugins.has_hook("smg_admit")
    install("policy", "@hookimpl\ndef smg_admit(call): ...\n")
    assert plugins.has_hook("smg_admit")
    assert plugins.implementations("smg_admit") == ["policy:demo"]


def test_asking_for_a_hook_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(AttributeError):
        plugins.has_hook("smg_nonsense")


def test_every_plugin_admits_the_call_as_the_one_before_left_it(install: Install) -> None:
    install("one", "@hookimpl(trylast=True)\ndef smg_admit(call): return call + ' last'\n")
    install(
        "two", "@hookimpl(tryfirst=True)\ndef smg_admit(peer, call, engine): return f'{call} {engine} {peer} first'\n"
    )
    install("three", "@hookimpl\ndef smg_admit(): return None\n")
    assert plugins.admit("demo", "call", "ipv4:1.2.3.4:5") == "call demo ipv4:1.2.3.4:5 first last"


def test_a_plugin_refuses_a_call_by_raising(install: Install) -> None:
    install("alters", "@hookimpl(tryfirst=True)\ndef smg_admit(call): return call\n")
    install("refuses", "@hookimpl\ndef smg_admit(call): raise PermissionError('not you')\n")
    with pytest.raises(PermissionError, match="not you"):
        plugins.admit("demo", "call", "peer")


def test_every_hook_says_when_where_and_what_raising_does() -> None:
    manager = plugins.plugin_manager()
    hooks = {name: getattr(specs, name) for name in vars(manager.hook) if name.startswith("smg_")}
    assert set(hooks) == {
        "smg_add_arguments",
        "smg_admit",
        "smg_engine",
        "smg_finished",
        "smg_interceptors",
        "smg_media_fetcher",
        "smg_servicer_implementation",
    }
    for name, hook in hooks.items():
        assert hook.__doc__ is not None, name
        assert "Called" in hook.__doc__, name
        assert "Raising" in hook.__doc__, name
