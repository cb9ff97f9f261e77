"""Finds the plugins that are installed and asks them what they offer."""

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import importlib_metadata
import pluggy

from . import specs
from .specs import EngineDescription

logger = logging.getLogger(__name__)


@dataclass
class _Loaded:
    """The plugins of this process, and a line for each that is unusable in whole or in part."""

    manager: pluggy.PluginManager
    problems: list[str] = field(default_factory=list)

    def warn(self, problem: str) -> None:
        self.problems.append(problem)
        logger.warning("%s", problem)


def plugin_manager() -> pluggy.PluginManager:
    """Return this process's plugin manager, with every installed plugin registered under "distribution:entry"."""
    return _loaded().manager


def problems() -> list[str]:
    """Return a sentence for each plugin that could not be used, as it was logged."""
    return list(_loaded().problems)


def engines() -> dict[str, EngineDescription]:
    """Return the engines that plugins describe, by name, whether installed or not."""
    return dict(_engines())


def implementations(hook_name: str) -> list[str]:
    """Return the names of the plugins that implement a hook; raises AttributeError for a hook that does not exist."""
    return [impl.plugin_name for impl in _implementations(hook_name)]


def has_hook(hook_name: str) -> bool:
    """Tell whether any plugin implements a hook, so that a hot path can leave it out."""
    return bool(_implementations(hook_name))


def admit(engine: str, call: Any, peer: str) -> Any:
    """Ask every `smg_admit` in turn, and return the call as they leave it; what a plugin raises is a refusal."""
    for _, ask in _callers("smg_admit"):
        altered = ask(engine=engine, call=call, peer=peer)
        call = call if altered is None else altered
    return call


def reset() -> None:
    """Forget the plugins, so that the next question looks for them again."""
    _engines.cache_clear()
    _loaded.cache_clear()


@functools.cache
def _loaded() -> _Loaded:
    manager = pluggy.PluginManager(specs.PROJECT)
    manager.add_hookspecs(specs)
    loaded = _Loaded(manager)
    for entry in importlib_metadata.entry_points(group=specs.GROUP):
        distribution = entry.dist.name if entry.dist is not None else "unknown distribution"
        _register(loaded, entry, distribution)
    for plugin_name, unknown in _unknown_hooks(manager).items():
        loaded.warn(f"plugin {plugin_name} implements hooks that do not exist: {', '.join(unknown)}")
    return loaded


def _register(loaded: _Loaded, entry: importlib_metadata.EntryPoint, distribution: str) -> None:
    name = f"{distribution}:{entry.name}"
    try:
        plugin = entry.load()
        loaded.manager.register(plugin, name)
    # Whatever somebody else's module does at import, sys.exit() included, must not end an engine.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        # pluggy 1.5 leaves a plugin half registered when one of its hooks has wrong arguments.
        if loaded.manager.has_plugin(name):
            loaded.manager.unregister(name=name)
        loaded.warn(
            f"plugin {entry.name!r} of {distribution} ({entry.value}) is not used: {type(error).__name__}: {error}"
        )


def _unknown_hooks(manager: pluggy.PluginManager) -> dict[str, list[str]]:
    """Return the misnamed hooks by plugin; pluggy's check_pending() would stop at the first."""
    unknown: dict[str, list[str]] = {}
    for hook_name, caller in vars(manager.hook).items():
        if hook_name.startswith("_") or caller.has_spec():
            continue
        for impl in caller.get_hookimpls():
            if not impl.optionalhook:
                unknown.setdefault(impl.plugin_name, []).append(hook_name)
    return unknown


@functools.cache
def _engines() -> dict[str, EngineDescription]:
    found: dict[str, EngineDescription] = {}
    loaded = _loaded()
    for plugin_name, describe in _callers("smg_engine"):
        try:
            engine = describe()
        # One engine that cannot describe itself must not take the others with it.
        except Exception as error:  # noqa: BLE001
            loaded.warn(f"plugin {plugin_name} cannot describe its engine: {type(error).__name__}: {error}")
            continue
        if engine is None:
            continue
        if not isinstance(engine, EngineDescription):
            loaded.warn(f"plugin {plugin_name} describes its engine with {engine!r} instead of an EngineDescription")
        elif engine.name in found:
            loaded.warn(f"plugin {plugin_name} describes engine {engine.name!r}, which another plugin described before")
        else:
            found[engine.name] = engine
    return found


def _implementations(hook_name: str) -> list[pluggy.HookImpl]:
    caller: pluggy.HookCaller = getattr(plugin_manager().hook, hook_name)
    return caller.get_hookimpls()


def _callers(hook_name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield (plugin name, callable) of each plain implementation in pluggy's order; wrappers are left out."""
    for impl in reversed(_implementations(hook_name)):
        if not (impl.hookwrapper or impl.wrapper):
            yield impl.plugin_name, functools.partial(_call, impl)


def _call(impl: pluggy.HookImpl, **arguments: Any) -> Any:
    return impl.function(*(arguments[name] for name in impl.argnames))
