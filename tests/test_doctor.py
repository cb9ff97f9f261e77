"""The doctor: what is installed, whether it can serve, and one line for each thing to do."""

import importlib
import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smg_grpc_servicer.hooks import doctor, plugins
from smg_grpc_servicer.hooks.seams import Seam
from smg_grpc_servicer.hooks.specs import EngineDescription

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install distributions with their entry points and modules, as pip would leave them."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("smg", "demoengine")]:
        monkeypatch.delitem(sys.modules, name)

    def install(distribution: str, entry_points: str = "", **modules: str) -> None:
        info = tmp_path / f"{distribution.replace('-', '_')}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(textwrap.dedent(entry_points))
        for name, source in modules.items():
            file = tmp_path / (name.replace("__", "/") + ".py")
            file.parent.mkdir(exist_ok=True)
            (file.parent / "__init__.py").write_text(
                "" if file.parent.name == "smg" else "raise RuntimeError('imported')"
            )
            file.write_text(textwrap.dedent(source))
        importlib.invalidate_caches()

    yield install
    for name in [name for name in sys.modules if name.partition(".")[0] in ("smg", "demoengine")]:
        del sys.modules[name]


def engine(**changes: Any) -> EngineDescription:
    values: dict[str, Any] = {
        "name": "demo",
        "distributions": ("demo-engine", "demo-engine-cpu"),
        "service": "demo.grpc.Engine",
        "entry_points": (("demo.plugins", "smg-demo"),),
        "filter_variable": "DEMO_PLUGINS",
        "seams": (SEAM,),
        "rust_server": "DemoGrpcServer",
    }
    return EngineDescription(**{**values, **changes})


SEAM = Seam(
    "demo.launcher",
    ("demoengine.launchers:serve", "demoengine.old:serve"),
    "takes the launcher over",
    "1.4 - 1.9",
    "nowhere:wrap",
)
ENTRY = "[demo.plugins]\nsmg-demo = demoengine_plugin:register\n"
LAUNCHER = {"demoengine__launchers": "def serve(): ...\n"}


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> dict[str, EngineDescription]:
    """The engines that the doctor hears of."""
    described = {"demo": engine()}
    monkeypatch.setattr(plugins, "engines", lambda: described)
    monkeypatch.setattr(plugins, "problems", list)
    return described


Engines = dict[str, EngineDescription]


def test_an_engine_that_can_serve_needs_nothing(install: Install, engines: Engines) -> None:
    install("demo-engine-cpu", ENTRY, **LAUNCHER)
    report = doctor.examine({})
    assert report.healthy
    assert report.todo == ()
    (found,) = report.engines
    assert (found.distribution, found.version, found.hidden) == ("demo-engine-cpu", "1.5", ())
    assert found.entry_points == (doctor.EntryPointReport("demo.plugins", "smg-demo", True),)
    assert [(seam.name, seam.presence) for seam in found.seams] == [("demo.launcher", "present")]
    assert not any(name.startswith("demoengine") for name in sys.modules)
    assert "everything that is installed can serve" in doctor.render(report)


def test_the_first_distribution_installed_is_the_one_spoken_of(install: Install, engines: Engines) -> None:
    install("demo-engine-cpu", ENTRY, **LAUNCHER)
    install("demo-engine")
    assert doctor.examine({}).engines[0].distribution == "demo-engine"


def test_without_any_engine_there_is_something_to_do(engines: Engines) -> None:
    report = doctor.examine({})
    assert report.engines[0].version is None
    assert report.todo == ("install an engine next to smg-grpc-servicer: demo-engine",)
    assert "demo: not installed (demo-engine)" in doctor.render(report)


def test_an_engine_not_installed_does_not_matter_beside_one_that_is(install: Install, engines: Engines) -> None:
    install("demo-engine", ENTRY, **LAUNCHER)
    engines["other"] = engine(name="other", distributions=("other-engine",))
    report = doctor.examine({})
    assert report.healthy
    assert "other: not installed (other-engine)" in doctor.render(report)


def test_an_entry_point_that_is_not_registered_is_to_be_reinstalled(install: Install, engines: Engines) -> None:
    install("demo-engine", **LAUNCHER)
    (line,) = doctor.examine({}).todo
    assert line.startswith("pip install --force-reinstall --no-deps smg-grpc-servicer: entry point 'smg-demo'")


@pytest.mark.parametrize(
    ("value", "hidden"),
    [(None, False), ("smg-demo", False), ("a,smg-demo", False), ("", True), ("a", True), ("a, smg-demo", True)],
)
def test_the_filter_variable_may_hide_us(install: Install, engines: Engines, value: str | None, hidden: bool) -> None:
    install("demo-engine", ENTRY, **LAUNCHER)
    report = doctor.examine({} if value is None else {"DEMO_PLUGINS": value})
    assert report.engines[0].hidden == (("smg-demo",) if hidden else ())
    assert report.healthy is not hidden
    assert [line.partition(":")[0] for line in report.todo] == (
        [f"unset DEMO_PLUGINS, or set DEMO_PLUGINS={value + ',' if value else ''}smg-demo"] if hidden else []
    )


@pytest.mark.parametrize(
    ("modules", "presence"),
    [({}, "no module"), ({"demoengine__old": "def other(): ...\n"}, "absent")],
)
def test_a_seam_that_the_engine_lacks_names_the_releases_that_have_it(
    install: Install, engines: Engines, modules: dict[str, str], presence: str
) -> None:
    install("demo-engine", ENTRY, **modules)
    report = doctor.examine({})
    assert report.todo == (
        f"install a release 1.4 - 1.9 of demo-engine: 1.5 has no seam demo.launcher ({presence}), "
        "which takes the launcher over",
    )


def test_an_optional_seam_is_only_a_line(install: Install, engines: Engines) -> None:
    install("demo-engine", ENTRY)
    engines["demo"] = engine(
        seams=(Seam("demo.extra", ("nowhere:x",), "does more", "1.9", "nowhere:wrap", required=False),)
    )
    report = doctor.examine({})
    assert report.healthy
    assert "seam demo.extra: no module (1.9, optional) - does more" in doctor.render(report)


def test_a_missing_package_of_ours_is_to_be_installed(
    install: Install, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("demo-engine", ENTRY, **LAUNCHER)
    monkeypatch.setattr(doctor, "PROTO", "smg-grpc-proto-of-another-world")
    (line,) = doctor.examine({}).todo
    assert line.startswith("pip install smg-grpc-proto-of-another-world")


SERVER = """
    class DemoGrpcServer:
        def __init__(self, host, port=0, *, metrics_port=None, **rest): ...
"""


def test_the_wheels_server_tells_what_it_takes(install: Install, engines: Engines) -> None:
    install("demo-engine", ENTRY, **LAUNCHER)
    install("smg", smg__servicer=SERVER)
    report = doctor.examine({})
    assert report.versions["smg"] == "1.5"
    assert report.engines[0].rust == doctor.RustReport("DemoGrpcServer", ("host", "port", "metrics_port"))
    assert "smg.servicer.DemoGrpcServer: takes host, port, metrics_port" in doctor.render(report)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise OSError('wrong libc')", "OSError: wrong libc"),
        ("", "AttributeError"),
        ("DemoGrpcServer = 3", "TypeError"),
    ],
)
def test_a_wheel_that_cannot_be_read_is_said_and_harms_nothing(
    install: Install, engines: Engines, source: str, said: str
) -> None:
    install("demo-engine", ENTRY, **LAUNCHER)
    install("smg", smg__servicer=source)
    report = doctor.examine({})
    assert report.healthy
    assert f"smg.servicer.DemoGrpcServer: {said}" in doctor.render(report)


def test_plugins_that_are_not_used_are_listed(
    install: Install, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("demo-engine", ENTRY, **LAUNCHER)
    monkeypatch.setattr(plugins, "problems", lambda: ["plugin 'x' of y is not used"])
    report = doctor.examine({})
    assert report.healthy
    assert "plugin 'x' of y is not used" in doctor.render(report)


def test_run_prints_json_with_stable_keys_and_returns_the_exit_code(
    install: Install, engines: Engines, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("demo-engine", ENTRY, **LAUNCHER)
    monkeypatch.delenv("DEMO_PLUGINS", raising=False)
    assert doctor.run(json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["python", "versions", "engines", "plugins", "todo", "healthy"]
    assert list(report["engines"][0]) == [
        "name",
        "distribution",
        "version",
        "service",
        "entry_points",
        "filter_variable",
        "filter_value",
        "hidden",
        "seams",
        "rust",
    ]
    monkeypatch.setenv("DEMO_PLUGINS", "")
    assert doctor.run() == 1
    assert "\ndo: unset DEMO_PLUGINS" in capsys.readouterr().out
