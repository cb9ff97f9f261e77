"""Write a tiny model for the engines to load: ``python tests/models.py NAME DIR``.

Runs in any environment with numpy and tokenizers, whether or not the package is installed there.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parent.parent / "plugins" / "demo"


def load() -> ModuleType:
    """The checkout's ``smg_grpc_servicer.demo.models``, from its folder, under a name of its own."""
    name = "smg_demo_of_checkout"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
        )
        assert spec is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{name}.models")


def main(arguments: list[str]) -> int:
    models = load()
    accepted = ",".join(sorted(models.MODELS))
    if len(arguments) != 2:
        print(f"usage: python tests/models.py {{{accepted}}} DIR", file=sys.stderr)
        return 2
    try:
        print(models.write(*arguments))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except ImportError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
