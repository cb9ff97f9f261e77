"""Probing: what an engine's source says about a seam, read without importing it."""

import sys
import textwrap
from pathlib import Path

import pytest

from smg_grpc_servicer.hooks.seams import Seam, probe
from smg_grpc_servicer.hooks.sources import Presence

SOURCE = """
    from other import borrowed
    class Base: pass
    class Plain:
        def method(self): pass
        assigned = len
    class Derived(Base):
        class Inner:
            async def deep(self): pass
    try:
        def guarded(): pass
    except ImportError:
        guarded = None
    if True:
        async def conditional(): pass
    alias = Plain
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the package of an engine that says so when it is imported; `part` is a folder without `__init__`."""
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "eng"
    (package / "part").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "old.py").write_text("def serve(): ...")
    (package / "part" / "source.py").write_text(textwrap.dedent(SOURCE))
    (package / "part" / "broken.py").write_text("def (:")
    return package


def seam(*targets: str) -> Seam:
    return Seam("demo.seam", targets, "test", "all", "nowhere:wrap")


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("eng.part.source:Plain", Presence.PRESENT),
        ("eng.part.source:Plain.method", Presence.PRESENT),
        ("eng.part.source:Plain.assigned", Presence.ASSUMED),
        ("eng.part.source:Plain.nothing", Presence.ABSENT),
        ("eng.part.source:Derived.method", Presence.ASSUMED),
        ("eng.part.source:Derived.Inner.deep", Presence.PRESENT),
        ("eng.part.source:Derived.Inner.shallow", Presence.ABSENT),
        ("eng.part.source:conditional", Presence.PRESENT),
        ("eng.part.source:guarded", Presence.ASSUMED),
        ("eng.part.source:borrowed", Presence.ASSUMED),
        ("eng.part.source:alias.method", Presence.ASSUMED),
        ("eng.part.source:nothing", Presence.ABSENT),
        ("eng.part.broken:anything", Presence.ASSUMED),
        ("eng.part.nowhere:serve", Presence.NO_MODULE),
        ("eng.nowhere.source:serve", Presence.NO_MODULE),
        ("nowhere:serve", Presence.NO_MODULE),
        ("math:sqrt", Presence.ASSUMED),
        ("json:JSONEncoder.encode", Presence.ASSUMED),
        ("json.encoder:JSONEncoder.encode", Presence.PRESENT),
    ],
)
def test_probe_reads_the_source(engine: Path, target: str, expected: Presence) -> None:
    assert probe(seam(target)) is expected


def test_probe_takes_the_best_target_and_imports_nothing(engine: Path) -> None:
    assert probe(seam("eng.nowhere:serve", "eng.part.source:nothing", "eng.old:serve")) is Presence.PRESENT
    assert not any(name.partition(".")[0] == "eng" for name in sys.modules)
