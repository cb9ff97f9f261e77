"""Named places in an engine that this package wraps: declare, bind, unbind, state, probe."""

import enum
import functools
import importlib
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

if TYPE_CHECKING:
    from .sources import Presence

logger = logging.getLogger(__name__)

Wrapper: TypeAlias = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]
"""Called in place of the wrapped callable: (wrapped, instance, args, kwargs), as wrapt has it."""

_ABSENT = object()
_lock = threading.RLock()
_bindings: dict[str, "_Binding"] = {}
_hooked: set[str] = set()
_watched: dict[str, tuple[ModuleType, type[ModuleType]]] = {}


@dataclass(frozen=True)
class Seam:
    """Names a place in an engine that we wrap; seams of one name are the same seam."""

    name: str
    targets: tuple[str, ...]
    """Places such as "module:Class.method", best first; each that exists is wrapped."""
    purpose: str
    """What it does, as it stands after "which": "adds our flags to the parser"."""
    releases: str
    """Releases of the engine that have it: "0.28 - 0.33"."""
    wrapper: Wrapper | str
    """The wrapper, or "module:attribute" of one that is imported at the first call."""
    required: bool = True  # the engine cannot serve without it


class State(enum.Enum):
    """What a seam is in this process."""

    UNBOUND = "unbound"
    BOUND = "bound"
    PENDING = "pending"
    """No target's module is loaded; it will be bound when one is."""
    MISSING = "missing"
    """A target's module is loaded and does not have the attribute."""


@dataclass
class _Site:
    """One attribute that holds our wrapper; `own` tells whether `owner` defined it itself."""

    owner: Any
    attribute: str
    original: Any
    wrapper: Any
    own: bool

    def restore(self) -> None:
        # Somebody who wrapped on top of us keeps their wrapper; ours below it only passes on from now.
        if _namespace(self.owner).get(self.attribute) is not self.wrapper:
            return
        if self.own:
            setattr(self.owner, self.attribute, self.original)
        else:
            delattr(self.owner, self.attribute)


@dataclass
class _Binding:
    """What became of one seam name; it outlives unbind, because callers may hold a wrapper for ever."""

    seam: Seam
    active: bool = False
    sites: dict[tuple[str, str], _Site] = field(default_factory=dict)
    wrappers: list[Any] = field(default_factory=list)

    def call(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        wrapper = self.seam.wrapper
        return (_resolve(wrapper) if isinstance(wrapper, str) else wrapper)(wrapped, instance, args, kwargs)

    def attach(self, key: str, module: ModuleType, path: str) -> bool:
        """Wrap the attribute in a loaded module, and tell whether it is wrapped now; never raises."""
        owner, attribute, current = _look_up(module, path)
        known = self.sites.get((key, path))
        if current is _ABSENT or (known is not None and known.owner is owner):
            return current is not _ABSENT
        own = attribute in _namespace(owner)
        try:
            found = inspect.unwrap(current, stop=self._made)
            if self._made(found):  # a module that imported the attribute from one where it is wrapped
                self.sites[key, path] = _Site(owner, attribute, found.__wrapped__, found, own)
                return True
            wrapper = _function_wrapper()(current, self.call, enabled=lambda: self.active)
            setattr(owner, attribute, wrapper)
        except (AttributeError, TypeError, ValueError) as error:  # a type of an extension module, a circle of wrappers
            logger.debug("seam %s cannot be bound at %s:%s: %s", self.seam.name, key, path, error)
            return False
        self.wrappers.append(wrapper)
        self.sites[key, path] = _Site(owner, attribute, current, wrapper, own)
        return True

    def _made(self, item: Any) -> bool:
        return any(item is wrapper for wrapper in self.wrappers)


def bind(seam: Seam) -> State:
    """Wrap every target of a seam, now or as soon as its module is loaded; a seam that is bound is only completed.

    Call it again once a half-imported module, or a launcher that runs as `__main__`, has defined the attribute.
    Imports no target. Returns the state that it leads to.
    """
    _function_wrapper()
    with _lock:
        binding = _bindings.setdefault(seam.name, _Binding(seam))
        if not binding.active:
            binding.seam, binding.active = seam, True
        for name, path in _targets(binding.seam):
            for key, module in _loaded(name):
                if not binding.attach(key, module, path) and _initializing(module):
                    _watch(name, module)
            if sys.modules.get(name) is None:
                _hook(name)
        return state(seam)


def unbind(seam: Seam) -> None:
    """Restore what a seam wrapped, and wait for its modules no longer; references to a wrapper only pass on."""
    with _lock:
        binding = _bindings.get(seam.name)
        if binding is None:
            return
        binding.active = False
        for site in binding.sites.values():
            site.restore()
        binding.sites.clear()
        for name in list(_watched):
            if not any(True for _ in _waiting(name)):
                _unwatch(name)


def state(seam: Seam) -> State:
    """Tell what a seam is in this process."""
    with _lock:
        for name in list(_watched):
            _settle(name)
        binding = _bindings.get(seam.name)
        if binding is None or not binding.active:
            return State.UNBOUND
        if binding.sites:
            return State.BOUND
        loaded = [module for name, _ in _targets(binding.seam) for _, module in _loaded(name)]
        return State.MISSING if any(not _initializing(module) for module in loaded) else State.PENDING


def probe(seam: Seam) -> "Presence":
    """Read in the source files, without importing anything, whether a seam would be found; the best target counts."""
    from .sources import Presence, presence

    order = list(Presence)
    return min((presence(*target) for target in _targets(seam)), key=order.index, default=Presence.NO_MODULE)


def _targets(seam: Seam) -> Iterator[tuple[str, str]]:
    for target in seam.targets:
        name, _, path = target.partition(":")
        yield name, path


def _loaded(name: str) -> Iterator[tuple[str, ModuleType]]:
    """Yield (key in sys.modules, module) wherever a module's code is loaded, under its name or as `__main__`."""
    module = sys.modules.get(name)
    if module is not None:
        yield name, module
    main = sys.modules.get("__main__")
    if main is not None and name != "__main__" and _runs(main, name):
        yield "__main__", main


def _runs(main: ModuleType, name: str) -> bool:
    """Tell whether `__main__` is that module, started as `python -m` or by its file, and not a child's copy of it."""
    processes = sys.modules.get("multiprocessing.process")
    if main.__name__ != "__main__" or (processes is not None and processes.parent_process() is not None):
        return False
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return bool(spec.name == name)
    file = getattr(main, "__file__", None)
    if file is None or os.path.basename(file) != name.rpartition(".")[2] + ".py":
        return False
    from .sources import locate

    source = locate(name)
    return source is not None and os.path.exists(file) and os.path.samefile(file, source)


def _initializing(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _namespace(owner: Any) -> Any:
    return getattr(owner, "__dict__", {})


def _look_up(module: ModuleType, path: str) -> tuple[Any, str, Any]:
    """Return (owner, attribute, raw value or _ABSENT), without running descriptors or a module's `__getattr__`."""
    owner: Any = None
    value: Any = module
    attribute = ""
    for attribute in path.split("."):
        owner = value
        value = inspect.getattr_static(owner, attribute, _ABSENT)
        if value is _ABSENT:
            break
    return owner, attribute, value


def _hook(name: str) -> None:
    """Have a module's seams bound at the end of its import."""
    import wrapt

    def loaded(module: ModuleType) -> None:
        with _lock:
            _hooked.discard(name)
            for binding, path in _waiting(name):
                binding.attach(name, module, path)

    if name not in _hooked:
        _hooked.add(name)
        wrapt.register_post_import_hook(loaded, name)


def _waiting(name: str) -> Iterator[tuple[_Binding, str]]:
    """Yield the active bindings that have a target in a module, each with its path there."""
    for binding in list(_bindings.values()):
        if binding.active:
            yield from ((binding, path) for module_name, path in _targets(binding.seam) if module_name == name)


def _watch(name: str, module: ModuleType) -> None:
    """Look into a half-imported module at every read of it, so that whoever imports it next finds the wrapper.

    A post-import hook would come too late: it can only be set on an import before that begins.
    """
    if name in _watched:
        return
    plain = type(module)

    def read(self: ModuleType, attribute: str) -> Any:
        if attribute not in ("__dict__", "__spec__", "__class__"):
            _settle(name)
        return plain.__getattribute__(self, attribute)

    _watched[name] = (module, plain)
    module.__class__ = type(plain.__name__, (plain,), {"__getattribute__": read, "__module__": plain.__module__})


def _settle(name: str) -> None:
    """Bind what a watched module has defined by now, and stop watching it once it is loaded."""
    with _lock:
        if name not in _watched:
            return
        module, _ = _watched[name]
        if sys.modules.get(name) is not module:  # its import failed
            _unwatch(name)
            _hook(name)
            return
        loaded = not _initializing(module)
        attached = [binding.attach(name, module, path) for binding, path in _waiting(name)]
        if loaded or all(attached):
            _unwatch(name)


def _unwatch(name: str) -> None:
    module, plain = _watched.pop(name)
    module.__class__ = plain


@functools.cache
def _function_wrapper() -> Any:
    """Return wrapt's function wrapper, made picklable by name: engines hand functions to spawned processes."""
    import wrapt

    return type("SeamWrapper", (wrapt.FunctionWrapper,), {"__reduce_ex__": lambda self, _: self.__qualname__})


@functools.cache
def _resolve(wrapper: str) -> Wrapper:
    module, _, path = wrapper.partition(":")
    return cast(Wrapper, functools.reduce(getattr, path.split("."), importlib.import_module(module)))
