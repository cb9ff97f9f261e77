"""The RPCs about a worker: health, cache, profiler, facts, loads, tokenizer."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Sequence
from typing import Any

from ..wire import tokenizer_bundle
from ..wire.calls import Activity, Adapter
from .core import Core, rpc
from .engine import Engine
from .errors import Failure, Invalid, Precondition, Rejected, TimedOut, Unsupported
from .health import State

FLUSH_SECS = 30.0
PROFILE_SECS = 600.0
PROBE_SECS = 60.0
ADAPTER_SECS = 600.0
_FLUSH_RETRY_SECS = 0.1
_PAUSED_SECS = 1.0


class Administration(Core):
    """The RPCs that touch no call."""

    _archive: asyncio.Future[bytes] | None = None

    @rpc
    async def HealthCheck(self, request: Any, context: Any) -> Any:
        """Whether the engine serves: what the worker knows of it, then what it answers itself."""
        state, engine = self.health.state, self.engine
        if state is State.SERVING and engine is not None and not engine.healthy():
            state = State.DEAD
        if state is not State.SERVING or engine is None:
            return self.contract.health(False, state.value)
        try:
            reason = await _within(engine.probe(), _bounded(PROBE_SECS, context))
        except Failure as failure:
            reason = str(failure)
        return self.contract.health(reason is None, reason or state.value)

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
        """Start the engine's profiler."""
        engine = self.serving()
        await _within(engine.profile(self.contract.profile_options(request)), _bounded(PROFILE_SECS, context))
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
            started=self.started,
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
        query = self.contract.load_query(request)
        loads = self.load_tracker.loads(engine)
        if query.rank is not None:
            loads = [load for load in loads if load.rank == query.rank]
            if not loads:
                raise Invalid(f"dp_rank: this worker manages no rank {query.rank}")
        return self.contract.loads(loads, engine.server_facts().version, query.sections)

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
    async def LoadLoRAAdapter(self, request: Any, context: Any) -> Any:
        """Load a LoRA adapter from a folder that the engine reads; says what is loaded afterwards."""
        engine, adapter = self.serving(), self.contract.adapter(request)
        return await self._adapter_change(request, context, engine, engine.load_adapter(adapter))

    @rpc
    async def UnloadLoRAAdapter(self, request: Any, context: Any) -> Any:
        """Unload a LoRA adapter; says what is loaded afterwards."""
        engine, adapter = self.serving(), self.contract.adapter(request)
        return await self._adapter_change(
            request, context, engine, engine.unload_adapter(adapter.name, adapter.lora_id)
        )

    async def _adapter_change(
        self, request: Any, context: Any, engine: Engine, change: Awaitable[Sequence[Adapter]]
    ) -> Any:
        seconds = _bounded(ADAPTER_SECS, context)
        try:
            return self.contract.adapter_changed(request, True, "", await _within(change, seconds))
        except Rejected as refusal:
            return self.contract.adapter_changed(
                request, False, str(refusal), await _within(engine.adapters(), seconds)
            )

    @rpc
    async def ListLoadedLoRAAdapters(self, request: Any, context: Any) -> Any:
        """Every LoRA adapter that is loaded."""
        loaded = await _within(self.serving().adapters(), _bounded(ADAPTER_SECS, context))
        return self.contract.adapters(loaded)

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
