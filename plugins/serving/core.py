"""What every RPC stands on: the engine, the live calls, the step pump, and how failures are answered."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from ..wire.calls import Call, Usage
from .contract import Contract
from .engine import Engine
from .errors import EngineDead, Failure, Internal, Unavailable, known
from .health import Health, State
from .loads import LoadTracker
from .streams import StreamTable

logger = logging.getLogger(__name__)

Admit = Callable[[Call, str], Call]
Finished = Callable[[Call, Usage, str], None]


def rpc(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Answer a failure of an RPC with its status; what nobody knows is logged and answered as INTERNAL."""

    @functools.wraps(method)
    async def answered(self: Core, request: Any, context: Any) -> Any:
        try:
            return await method(self, request, context)
        except Exception as error:  # noqa: BLE001  the boundary to the client: no traceback goes out
            failure = self.explain(error)
        return await context.abort(failure.code, str(failure))

    return answered


class Core:
    """One contract served from one engine.

    It exists before its engine does: until `serve` is called every RPC but the health ones answers
    UNAVAILABLE. `admit` and `finished` are third parties' hooks; without one the call costs nothing.
    """

    def __init__(
        self,
        contract: Contract,
        health: Health,
        *,
        admit: Admit | None = None,
        finished: Finished | None = None,
        started: float | None = None,
    ) -> None:
        self.contract = contract
        self.health = health
        self.table = StreamTable()
        self.load_tracker = LoadTracker(self.table)
        self.engine: Engine | None = None
        self._admit, self._finished = admit, finished
        self.started = time.time() if started is None else started
        self._background: set[asyncio.Task[Any]] = set()
        self._steps: asyncio.Task[None] | None = None
        self.dead = asyncio.Event()

    # Life

    def serve(self, engine: Engine) -> None:
        """Take the engine's steps and its calls from now on."""
        self.engine = engine
        self._steps = asyncio.create_task(self._take_steps(engine), name="smg-steps")
        self.health.set(State.SERVING)

    def drain(self) -> None:
        """Refuse new calls; live ones go on."""
        self.health.set(State.DRAINING)

    def end_calls(self, failure: Failure) -> None:
        """End every live call with `failure`, in the engine too."""
        keys = self.table.fail(failure)
        if keys and self.engine is not None:
            self.spawn(self.quietly(self.engine.cancel(keys)))

    async def settle(self) -> None:
        """Wait for what was started on the side, such as aborts on their way to the engine."""
        if self._background:
            await asyncio.wait(self._background, timeout=1.0)

    async def close(self) -> None:
        """Take no more steps."""
        await self.settle()
        if self._steps is not None:
            self._steps.cancel()
            await asyncio.wait([self._steps])

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _take_steps(self, engine: Engine) -> None:
        feed, note = self.table.feed, self.load_tracker.note
        failure: Failure = EngineDead("the engine stopped")
        try:
            async for batch in engine.steps():
                feed(batch)
                note(batch)
        except Exception as error:  # noqa: BLE001  whatever ends the step source ends the engine for us
            failure = error if isinstance(error, EngineDead) else EngineDead(f"the engine is dead: {error}")
            # A terminal's Ctrl-C reaches the engine's processes too: nothing is lost where nothing ran.
            expected = self.health.state is State.DRAINING and not len(self.table)
            logger.log(logging.INFO if expected else logging.ERROR, "the engine is dead: %s", error)
        self.health.set(State.DEAD)
        self.table.fail(failure)
        self.dead.set()

    async def quietly(self, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001  nobody waits for the answer, and a dead engine has none
            logger.warning("a message to the engine failed: %s", error)

    def explain(self, error: Exception) -> Failure:
        """The failure to answer for an exception."""
        failure = known(error)
        if failure is not None:
            return failure
        if self.engine is not None:
            failure = self.engine.failure(error)
        if failure is None or isinstance(failure, Internal):
            logger.error("a request failed inside the engine", exc_info=error)
        return failure or Internal("internal error; the worker's log has the cause")

    def serving(self) -> Engine:
        """The engine for new work."""
        state = self.health.state
        if state is not State.SERVING or self.engine is None:
            raise Unavailable(state.value)
        return self.engine

    def known_engine(self) -> Engine:
        """The engine for a question about it."""
        if self.engine is None:
            raise Unavailable(State.STARTING.value)
        return self.engine
