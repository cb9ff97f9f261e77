"""`VllmEngineServicer`, under the name that vLLM's own launcher imports."""

from __future__ import annotations

import os
import weakref
from typing import Any

from ..serving import extensions
from ..serving.health import Health
from ..serving.servicer import Servicer
from ..wire.contracts.vllm import SERVICE, VllmContract
from .engine import NAME
from .plugin import is_launcher
from .settings import IMPLEMENTATION

_healths: weakref.WeakKeyDictionary[Any, Health] = weakref.WeakKeyDictionary()


def health_of(async_llm: Any) -> Health:
    """The one health state of an engine, shared by its servicers."""
    if async_llm not in _healths:
        _healths[async_llm] = Health([SERVICE])
    return _healths[async_llm]


class VllmEngineServicer(Servicer):
    """The vLLM contract over an AsyncLLM that somebody else built and ends; create it on the serving loop."""

    def __init__(self, async_llm: Any, start_time: float) -> None:
        from .adapter import VllmEngine

        if asked_for() != "python":
            raise RuntimeError(f"{IMPLEMENTATION.variable}={asked_for()}, and this launcher serves from Python alone")
        super().__init__(
            VllmContract(),
            health_of(async_llm),
            admit=extensions.admit(NAME),
            finished=extensions.finished(NAME),
            started=start_time,
        )
        self.serve(VllmEngine(async_llm))


def asked_for() -> str:
    """The implementation that the environment names."""
    return os.environ.get(IMPLEMENTATION.variable, "").casefold() or IMPLEMENTATION.default


def refuse_a_launcher_without_plugin() -> None:
    """End vLLM's own launcher, which imports this module, where it cannot serve as the environment asks.

    Without the plugin nothing of ours sees its command line: this import is the last moment before the model loads.
    """
    if asked_for() == "python" or not is_launcher():
        return
    from ..hooks.command_line import end_start
    from .rust import hook_problem

    problem = hook_problem()
    if problem is not None:
        end_start([f"{IMPLEMENTATION.label()}: {asked_for()!r} cannot be served: {problem}"])


refuse_a_launcher_without_plugin()
