"""How this package gets inside an engine: hooks for plugins, seams, settings, doctor.

Importing it is free: what it exports is loaded at the first use, because engines load us in every process they have.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .plugins import engines, has_hook, implementations, plugin_manager
    from .seams import Seam, State
    from .settings import ConfigurationError, Setting, Settings, Source, Value
    from .sources import Presence
    from .specs import EngineDescription, hookimpl, hookspec

__all__ = [
    "ConfigurationError",
    "EngineDescription",
    "Presence",
    "Seam",
    "Setting",
    "Settings",
    "Source",
    "State",
    "Value",
    "engines",
    "has_hook",
    "hookimpl",
    "hookspec",
    "implementations",
    "plugin_manager",
]

_HOMES = {
    "plugins": ("engines", "has_hook", "implementations", "plugin_manager"),
    "seams": ("Seam", "State"),
    "sources": ("Presence",),
    "settings": ("ConfigurationError", "Setting", "Settings", "Source", "Value"),
    "specs": ("EngineDescription", "hookimpl", "hookspec"),
}


def __getattr__(name: str) -> Any:
    """Load the module that holds an exported name, at the name's first use."""
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
