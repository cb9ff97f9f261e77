"""`VllmEngineServicer`, under the name that vLLM's own launcher imports."""

from __future__ import annotations

import weakref
from typing import Any

from ..serving import extensions
from ..serving.health import Health
from ..serving.servicer import Servicer
from ..wire.contracts.vllm import SERVICE, VllmContract
from .engine import NAME

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

        super().__init__(
            VllmContract(),
            health_of(async_llm),
            admit=extensions.admit(NAME),
            finished=extensions.finished(NAME),
            started=start_time,
        )
        self.serve(VllmEngine(async_llm))
