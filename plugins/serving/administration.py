"""The RPCs about a worker: health, cache, profiler, facts, loads, tokenizer."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable
from typing import Any

from ..wire import tokenizer_bundle
from ..wire.calls import Activity
from .core import Core, rpc
from .engine import Engine
from .errors import Invalid, Precondition, TimedOut, Unsupported
from .health import State

FLUSH_SECS = 30.0
PROFILE_SECS = 600.0
_FLUSH_RETRY_SECS = 0.1
_PAUSED_SECS = 1.0


class Administration(Core):
    """The RPCs that touch no call."""

    _archive: asyncio.Future[bytes] | None = None

    @rpc
    async def HealthCheck(self, request: Any, context: Any) -> Any:
        """Whether the engine serves."""
        state = self.health.state
        if state is State.SERVING and self.engine is not None and not self.engine.healthy():
            state = State.DEAD
        return self.contract.health(state is State.SERVING, state.value)

    @rpc
    async def FlushCache(self, request: Any, context: Any) -> Any:
        """Invalidate the prefix cache; with a timeout, wait for the engine to be idle first."""
        engine = self.serving()
        timeout = request.timeout_s
        if not math.isfinite(timeout) or timeout < 0:
            raise Invalid(f"timeout_s: {timeout:g} is not a number of seconds, 0 or more")
        bound = _bounded(timeout or FLUSH_SECS, context)
        deadline = time.monotonic() + bound
        while True:
            if await _within(engine.flush_cache(), deadline - time.monotonic()):
                return self.contract.flushed(True, "the prefix cache is empty")
            if not timeout or deadline - time.monotonic() <= _FLUSH_RETRY_SECS:
                return self.contract.flushed(False, "not flushed: requests hold blocks of the cache")
            await asyncio.sleep(_FLUSH_RETRY_SECS)

    @rpc
    async def StartProfile(self, request: Any, context: Any) -> Any:
        """Start the engine's profiler as its launch configured it."""
        engine = self.serving()
        options = self.contract.profile_options(request)
        if options:
            raise Invalid(f"{', '.join(options)}: the profiler is configured at the engine's launch, not by request")
        await _within(engine.start_profile(), _bounded(PROFILE_SECS, context))
        return self.contract.profiled(True, "the profiler runs")

    @rpc
    async def StopProfile(self, request: Any, context: Any) -> Any:
        """Stop the engine's profiler and write its traces."""
        await _within(self.serving().stop_profile(), _bounded(PROFILE_SECS, context))
        return self.contract.profiled(True, "the profiler has stopped")

    @rpc
    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        """Facts of the model."""
        return self.contract.model_info(self.known_engine().model_facts())

    @rpc
    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        """Facts of the worker, and what it is doing."""
        engine = self.known_engine()
        activity = Activity(
            active_requests=len(self.table),
            paused=await self._paused(engine, context),
            last_received=self.load_tracker.last_received,
            uptime=time.time() - self.started,
        )
        return self.contract.server_info(engine.server_facts(), activity)

    async def _paused(self, engine: Engine, context: Any) -> bool:
        """Whether the engine is paused; one that is dead, or too busy with a step to say, is not."""
        try:
            return not self.dead.is_set() and await _within(engine.paused(), _bounded(_PAUSED_SECS, context))
        except TimedOut:
            return False

    @rpc
    async def GetLoads(self, request: Any, context: Any) -> Any:
        """Load by data-parallel rank."""
        engine = self.known_engine()
        loads = self.load_tracker.loads(engine)
        rank = self.contract.load_rank(request)
        if rank is not None:
            loads = [load for load in loads if load.rank == rank]
            if not loads:
                raise Invalid(f"dp_rank: this worker manages no rank {rank}")
        return self.contract.loads(loads, engine.server_facts().version)

    @rpc
    async def GetTokenizer(self, request: Any, context: Any) -> None:
        """The tokenizer's files as one archive, in pieces."""
        engine = self.known_engine()
        if self._archive is None:
            directory = engine.tokenizer_directory()
            work = asyncio.to_thread(tokenizer_bundle.build, directory)
            self._archive = asyncio.ensure_future(work)
        try:
            archive = await asyncio.shield(self._archive)
        except OSError as error:
            self._archive = None
            raise Precondition(f"no tokenizer to send: {error}") from error
        for data, digest in tokenizer_bundle.chunks(archive):
            await context.write(self.contract.tokenizer_chunk(data, digest))

    @rpc
    async def SubscribeKvEvents(self, request: Any, context: Any) -> None:
        """KV cache events."""
        raise Unsupported("this worker publishes no KV events")


def _bounded(seconds: float, context: Any) -> float:
    """`seconds`, or what the client's deadline leaves of them."""
    left = context.time_remaining()
    return seconds if left is None else min(seconds, max(left, 0.0))


async def _within(work: Awaitable[Any], seconds: float) -> Any:
    try:
        return await asyncio.wait_for(work, seconds)
    except (TimeoutError, asyncio.TimeoutError):
        raise TimedOut(f"the engine did not answer within {seconds:.3g} s") from None
