"""Tells whether the engines of this environment can serve through this package, and what to do where they cannot."""

import importlib
import inspect
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from json import dumps
from typing import Any

import importlib_metadata

from . import plugins, seams
from .sources import Presence
from .specs import EngineDescription

OURS = "smg-grpc-servicer"
PROTO = "smg-grpc-proto"
GRPC = "grpcio"
WHEEL = "smg"


@dataclass(frozen=True)
class EntryPointReport:
    """Whether this environment registers an entry point that the engine must see."""

    group: str
    name: str
    registered: bool


@dataclass(frozen=True)
class SeamReport:
    """What an engine's source says about a seam."""

    name: str
    purpose: str
    releases: str
    required: bool
    presence: str
    """A value of `Presence`."""


@dataclass(frozen=True)
class RustReport:
    """What the installed `smg` wheel's server for an engine takes; `error` says why that is not known."""

    server: str
    parameters: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class EngineReport:
    """One engine; without a version it is not installed, and nothing else is examined."""

    name: str
    distribution: str
    version: str | None
    service: str
    entry_points: tuple[EntryPointReport, ...] = ()
    filter_variable: str | None = None
    filter_value: str | None = None
    hidden: tuple[str, ...] = ()
    """Entry names that the filter variable keeps from the engine."""
    seams: tuple[SeamReport, ...] = ()
    rust: RustReport | None = None


@dataclass(frozen=True)
class Report:
    """What the doctor found; `todo` has a line for each problem that keeps something from serving."""

    python: str
    versions: dict[str, str | None]
    """Versions of the distributions that every engine needs, and of the optional `smg` wheel."""
    engines: tuple[EngineReport, ...]
    plugins: tuple[str, ...]
    """A sentence for each plugin that is not used, or only in part."""
    todo: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        """Whether everything that is installed can serve."""
        return not self.todo


def examine(environ: Mapping[str, str] = os.environ) -> Report:
    """Examine this environment, without importing an engine."""
    versions = {name: _version(name) for name in (OURS, PROTO, GRPC, WHEEL)}
    engines = tuple(_engine(description, environ) for description in plugins.engines().values())
    return Report(
        python=platform.python_version(),
        versions=versions,
        engines=engines,
        plugins=tuple(plugins.problems()),
        todo=(*_todo_packages(versions), *_todo_engines(engines)),
    )


def render(report: Report) -> str:
    """Write a report for a person."""
    lines = [f"{OURS} {report.versions[OURS] or 'not installed'}, Python {report.python}"]
    for name, version in report.versions.items():
        if name != OURS:
            lines.append(f"  {name:<15} {version or 'not installed'}")
    for engine in report.engines:
        lines += ["", *_render_engine(engine)]
    if report.plugins:
        lines += ["", "plugins", *(f"  {problem}" for problem in report.plugins)]
    lines += ["", *(f"do: {line}" for line in report.todo)]
    if report.healthy:
        lines.append("everything that is installed can serve")
    return "\n".join(lines)


def run(json: bool = False) -> int:
    """Print a report of this environment; return 0 if everything that is installed can serve, 1 otherwise."""
    report = examine()
    print(dumps({**asdict(report), "healthy": report.healthy}, indent=2) if json else render(report))
    return 0 if report.healthy else 1


def _version(distribution: str) -> str | None:
    try:
        return importlib_metadata.version(distribution)
    except importlib_metadata.PackageNotFoundError:
        return None


def _engine(engine: EngineDescription, environ: Mapping[str, str]) -> EngineReport:
    installed = ((name, version) for name in engine.distributions if (version := _version(name)) is not None)
    distribution, version = next(installed, (engine.distributions[0] if engine.distributions else engine.name, None))
    if version is None:
        return EngineReport(engine.name, distribution, None, engine.service)
    value = environ.get(engine.filter_variable) if engine.filter_variable else None
    names = [name for _, name in engine.entry_points]
    # Engines compare the names as they stand: no space around a comma, and an empty value is one empty name.
    hidden = () if value is None else tuple(name for name in names if name not in value.split(","))
    return EngineReport(
        name=engine.name,
        distribution=distribution,
        version=version,
        service=engine.service,
        entry_points=tuple(EntryPointReport(g, n, _registered(g, n)) for g, n in engine.entry_points),
        filter_variable=engine.filter_variable,
        filter_value=value,
        hidden=hidden,
        seams=tuple(_seam(seam) for seam in engine.seams),
        rust=None if engine.rust_server is None else _rust(engine.rust_server),
    )


def _registered(group: str, name: str) -> bool:
    return bool(importlib_metadata.entry_points(group=group, name=name))


def _seam(seam: seams.Seam) -> SeamReport:
    return SeamReport(seam.name, seam.purpose, seam.releases, seam.required, seams.probe(seam).value)


def _rust(server: str) -> RustReport:
    try:
        constructor: Callable[..., Any] = getattr(importlib.import_module("smg.servicer"), server)
        parameters = inspect.signature(constructor).parameters.values()
    # A compiled wheel can fail in its own ways; none of them may end the doctor.
    except Exception as error:  # noqa: BLE001
        return RustReport(server, error=f"{type(error).__name__}: {error}")
    by_name = (p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))
    return RustReport(server, tuple(p.name for p in by_name))


def _todo_packages(versions: Mapping[str, str | None]) -> Iterator[str]:
    for name in (OURS, PROTO, GRPC):
        if versions[name] is None:
            yield f"pip install {name} (in the environment of this Python)"


def _todo_engines(engines: tuple[EngineReport, ...]) -> Iterator[str]:
    installed = [engine for engine in engines if engine.version is not None]
    if not installed:
        known = ", ".join(engine.distribution for engine in engines) or "none is known: see the plugins' warnings"
        yield f"install an engine next to {OURS}: {known}"
    for engine in installed:
        for entry in engine.entry_points:
            if not entry.registered:
                yield (
                    f"pip install --force-reinstall --no-deps {OURS}: entry point {entry.name!r} of {entry.group} "
                    f"is not registered, so {engine.name} does not load us"
                )
        for name in engine.hidden:
            names = ",".join(part for part in [*(engine.filter_value or "").split(","), name] if part)
            yield (
                f"unset {engine.filter_variable}, or set {engine.filter_variable}={names}: it hides {name!r} "
                f"from {engine.name}"
            )
        for seam in engine.seams:
            if seam.required and not Presence(seam.presence).usable:
                yield (
                    f"install a release {seam.releases} of {engine.distribution}: {engine.version} has no seam "
                    f"{seam.name} ({seam.presence}), which {seam.purpose}"
                )


def _render_engine(engine: EngineReport) -> Iterator[str]:
    if engine.version is None:
        yield f"{engine.name}: not installed ({engine.distribution})"
        return
    yield f"{engine.name}: {engine.distribution} {engine.version}, serves {engine.service}"
    for entry in engine.entry_points:
        yield f"  entry point {entry.name} of {entry.group}: {'registered' if entry.registered else 'NOT REGISTERED'}"
    if engine.filter_variable is not None:
        value = "unset" if engine.filter_value is None else repr(engine.filter_value)
        yield f"  {engine.filter_variable} is {value}" + (
            f": hides {', '.join(engine.hidden)}" if engine.hidden else ""
        )
    for seam in engine.seams:
        optional = "" if seam.required else ", optional"
        yield f"  seam {seam.name}: {seam.presence} ({seam.releases}{optional}) - {seam.purpose}"
    if engine.rust is not None:
        takes = f"takes {', '.join(engine.rust.parameters) or 'nothing'}"
        yield f"  smg.servicer.{engine.rust.server}: {engine.rust.error or takes}"
