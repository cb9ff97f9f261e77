"""grpc.health.v1 over one state: Check, List and a Watch that tells every change.

The library's own asyncio servicer has no List, holds its lock while it writes to a watcher, and keeps
its watchers through a shutdown.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_Status = health_pb2.HealthCheckResponse


class State(enum.Enum):
    """Where a worker is in its life."""

    STARTING = "the engine is starting"
    SERVING = "serving"
    DRAINING = "the worker is shutting down"
    DEAD = "the engine is dead"


class Health(health_pb2_grpc.HealthServicer):
    """Health of the given services: SERVING in one state, NOT_SERVING in the others."""

    def __init__(self, services: Iterable[str], state: State = State.STARTING) -> None:
        self._services = ("", *services)
        self._state = state
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def state(self) -> State:
        return self._state

    def set(self, state: State) -> None:
        """Move to `state` and tell the watchers. A dead or draining worker does not serve again."""
        if state is self._state or self._state is State.DEAD:
            return
        if self._state is State.DRAINING and state is not State.DEAD:
            return
        self._state = state
        self._notify()

    def close(self) -> None:
        """End the watchers, so that none holds up a shutdown."""
        self._closed = True
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _status(self) -> int:
        return _Status.SERVING if self._state is State.SERVING else _Status.NOT_SERVING

    async def Check(self, request: Any, context: Any) -> Any:
        """The status of a service; NOT_FOUND for one that this server does not have."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service!r}")
        return _Status(status=self._status())

    async def List(self, request: Any, context: Any) -> Any:
        """The status of every service."""
        return health_pb2.HealthListResponse(statuses={name: _Status(status=self._status()) for name in self._services})

    async def Watch(self, request: Any, context: Any) -> None:
        """The status of a service, at once and after every change; SERVICE_UNKNOWN stays open."""
        known = request.service in self._services
        last = None
        while True:
            changed = self._changed
            status = self._status() if known else _Status.SERVICE_UNKNOWN
            if status != last:
                await context.write(_Status(status=status))
                last = status
            elif self._closed:
                return
            if changed is self._changed and not self._closed:
                await changed.wait()
