"""`VllmHealthServicer`, under the name that vLLM's own launcher imports."""

from __future__ import annotations

from typing import Any

from grpc_health.v1 import health_pb2_grpc

from ..serving.health import State
from .servicer import health_of


class VllmHealthServicer(health_pb2_grpc.HealthServicer):
    """grpc.health.v1 of an AsyncLLM."""

    def __init__(self, async_llm: Any) -> None:
        self._health = health_of(async_llm)
        self.Check, self.Watch, self.List = self._health.Check, self._health.Watch, self._health.List

    def set_not_serving(self) -> None:
        """Say NOT_SERVING from now on, and let watchers go: the launcher is about to stop the server."""
        self._health.set(State.DRAINING)
        self._health.close()
