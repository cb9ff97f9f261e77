"""Reads in an engine's source files what it defines, without importing it."""

import ast
import enum
import importlib.util
from collections.abc import Iterator
from importlib.machinery import all_suffixes
from pathlib import Path


class Presence(enum.Enum):
    """What an engine's source says about an attribute."""

    PRESENT = "present"
    ASSUMED = "assumed"
    """The name or its class is there, but it is inherited, assigned or imported, or the source cannot be read."""
    ABSENT = "absent"
    """The module is there and does not have it."""
    NO_MODULE = "no module"

    @property
    def usable(self) -> bool:
        """Whether it can be expected to be there."""
        return self in (Presence.PRESENT, Presence.ASSUMED)


def locate(module: str) -> Path | None:
    """Return a module's file, or None where there is none.

    importlib's find_spec() imports the parents of a submodule, so only the top package is looked up with it.
    """
    top, *parts = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not parts:
        return Path(spec.origin) if spec.has_location and spec.origin else None
    folders = [Path(place) for place in spec.submodule_search_locations or ()]
    for part in parts[:-1]:
        folders = [folder / part for folder in folders]
    candidates = (
        [parts[-1] + "/__init__" + suffix for suffix in all_suffixes()]
        + [parts[-1] + suffix for suffix in all_suffixes()]
    )  # fmt: skip
    return next((folder / name for folder in folders for name in candidates if (folder / name).is_file()), None)


def presence(module: str, path: str) -> Presence:
    """Tell whether a module defines an attribute path such as "Class.method"."""
    file = locate(module)
    if file is None:
        return Presence.NO_MODULE
    if file.suffix != ".py":
        return Presence.ASSUMED
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # unreadable, or written for another Python
        return Presence.ASSUMED
    return _find(body, path.split("."), inherits=False)


def _find(body: list[ast.stmt], path: list[str], *, inherits: bool) -> Presence:
    """Follow a path through the statements of a module or class; the last definition of a name counts."""
    name, *rest = path
    found: ast.stmt | None = None
    for statement in _statements(body):
        if name in _names(statement):
            found = statement
        elif isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
            inherits = True
    if found is None:
        return Presence.ASSUMED if inherits else Presence.ABSENT
    if isinstance(found, ast.ClassDef) and rest:
        bases = [base for base in found.bases if not (isinstance(base, ast.Name) and base.id == "object")]
        return _find(found.body, rest, inherits=bool(bases or found.keywords))
    if isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not rest:
        return Presence.PRESENT
    return Presence.ASSUMED


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements in order, those within if, try, with, for and while included."""
    for statement in body:
        yield statement
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        for part in ("body", "orelse", "handlers", "finalbody"):
            for inner in getattr(statement, part, ()):
                yield from _statements(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def _names(statement: ast.stmt) -> set[str]:
    """Return the names that a statement binds."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
    return set()
