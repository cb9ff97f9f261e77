"""The RPCs of every contract, over any engine: validation, streaming, cancellation, errors to statuses."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from ..wire import tokenizer_bundle
from ..wire.calls import Activity, Call, Finish, FinishReason, Usage, join_logprobs
from . import admission
from .contract import Contract
from .engine import Engine
from .errors import (
    Aborted,
    AlreadyLive,
    EngineDead,
    Failure,
    Forbidden,
    Internal,
    Invalid,
    Precondition,
    TimedOut,
    Unavailable,
    Unsupported,
    known,
)
from .health import Health, State
from .loads import LoadTracker
from .streams import Choice, Stream, StreamTable

logger = logging.getLogger(__name__)

FLUSH_SECS = 30.0
PROFILE_SECS = 600.0
_FLUSH_RETRY_SECS = 0.1

Admit = Callable[[Call, str], Call]
Finished = Callable[[Call, Usage, str], None]


def _rpc(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Answer a failure of an RPC with its status; what nobody knows is logged and answered as INTERNAL."""

    @functools.wraps(method)
    async def answered(self: Servicer, request: Any, context: Any) -> Any:
        try:
            return await method(self, request, context)
        except Exception as error:  # noqa: BLE001  the boundary to the client: no traceback goes out
            failure = self.explain(error)
        return await context.abort(failure.code, str(failure))

    return answered


class Servicer:
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
        self._engine: Engine | None = None
        self._admit, self._finished = admit, finished
        self._started = time.time() if started is None else started
        self._background: set[asyncio.Task[Any]] = set()
        self._archive: asyncio.Future[bytes] | None = None
        self.dead = asyncio.Event()

    # Life

    def serve(self, engine: Engine) -> None:
        """Take the engine's steps and its calls from now on."""
        self._engine = engine
        self._spawn(self._take_steps(engine))
        self.health.set(State.SERVING)

    def drain(self) -> None:
        """Refuse new calls; live ones go on."""
        self.health.set(State.DRAINING)

    def end_calls(self, failure: Failure) -> None:
        """End every live call with `failure`, in the engine too."""
        keys = self.table.fail(failure)
        if keys and self._engine is not None:
            self._spawn(self._quietly(self._engine.cancel(keys)))

    async def settle(self) -> None:
        """Wait for what was started on the side, such as aborts on their way to the engine."""
        pending = [task for task in self._background if not task.get_name().startswith("steps")]
        if pending:
            await asyncio.wait(pending, timeout=1.0)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str = "side") -> None:
        task = asyncio.create_task(work, name=name)
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
            logger.error("the engine is dead: %s", error)
        self.health.set(State.DEAD)
        self.table.fail(failure)
        self.dead.set()

    async def _quietly(self, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001  nobody waits for the answer, and a dead engine has none
            logger.warning("a message to the engine failed: %s", error)

    def explain(self, error: Exception) -> Failure:
        """The failure to answer for an exception."""
        failure = known(error)
        if failure is not None:
            return failure
        if self._engine is not None:
            failure = self._engine.failure(error)
        if failure is None or isinstance(failure, Internal):
            logger.error("a request failed inside the engine", exc_info=error)
        return failure or Internal("internal error; the worker's log has the cause")

    def _serving(self) -> Engine:
        """The engine for new work."""
        state = self.health.state
        if state is not State.SERVING or self._engine is None:
            raise Unavailable(state.value)
        return self._engine

    def _known_engine(self) -> Engine:
        """The engine for a question about it."""
        if self._engine is None:
            raise Unavailable(State.STARTING.value)
        return self._engine

    # Generation

    async def Generate(self, request: Any, context: Any) -> None:  # noqa: N802
        """Run one call; chunks as tokens come when it streams, one complete a choice.

        The token loop stands here, not in a coroutine of its own: every level between gRPC and
        `write` is paid for with every token.
        """
        stream, failure = None, None
        submitted, status = False, "CANCELLED"
        try:
            stream = self._open(request, context)
            submitted = await self._submit(stream)
            write, streaming, prompt_tokens = context.write, stream.streaming, len(stream.call.token_ids)
            plain = [self.contract.plain_chunks(choice.index, prompt_tokens) for choice in stream.choices]
            unfinished = len(plain)
            while unfinished:
                while stream.quiet:
                    await stream.change()
                for choice in stream.take():
                    # Read before a write lets more arrive: a complete follows its last chunk.
                    finish, sent = choice.finish, choice.sent
                    if streaming and sent < len(choice.token_ids):
                        choice.sent = len(choice.token_ids)
                        if choice.logprobs or choice.prompt_logprobs:
                            await write(self._chunk(choice, sent, prompt_tokens))
                        else:
                            new = choice.token_ids[sent:]
                            await write(plain[choice.index](new, choice.sent, choice.cached_tokens))
                    if finish is not None:
                        unfinished -= 1
                        await write(self._complete(choice, finish, prompt_tokens))
            status = "OK"
        except Exception as error:  # noqa: BLE001  the boundary to the client: no traceback goes out
            failure = self.explain(error)
            status = failure.code.name
        finally:
            if not submitted and status != AlreadyLive.code.name:
                self._release_handoff(request)
            if stream is not None:
                self._close(stream, status)
        if failure is not None:
            await context.abort(failure.code, str(failure))

    def _open(self, request: Any, context: Any) -> Stream:
        """Check everything of a request that needs no tokenizer, and register it as live."""
        call = self.contract.generate_call(request, context.invocation_metadata())
        engine = self._serving()
        if not engine.limits.generates:
            raise Unsupported("this model does not generate text")
        if self._admit is not None:
            call = self._admitted(self._admit, call, context.peer())
        admission.check_request_id(call.request_id)
        admission.check_sampling(call.sampling, engine.limits, self.contract.field)
        admission.check_rank(call.data_parallel_rank, engine.limits)
        if call.text is not None and not call.text:
            raise Invalid("text: is empty")
        return self.table.open(call, call.sampling.n, call.stream)

    @staticmethod
    def _admitted(admit: Admit, call: Call, peer: str) -> Call:
        try:
            return admit(call, peer)
        except PermissionError as error:
            raise Forbidden(str(error)) from error
        except ValueError as error:
            raise Invalid(str(error)) from error

    async def _submit(self, stream: Stream) -> bool:
        """Hand a live call to the engine; False when it was ended before the engine saw it."""
        engine, call = self._serving(), stream.call
        assert isinstance(call, Call)
        if call.text is not None:
            call.token_ids = await engine.tokenize(call.text)
        admission.truncate(call, engine.limits, self.contract.field)
        admission.check_prompt(call.token_ids, engine.limits)
        admission.check_length(call, engine.limits, self.contract.field)
        if stream.ended:
            return False
        await engine.submit(call, stream.keys)
        if stream.ended:
            # Aborted while its submissions were on their way: the abort may have overtaken some.
            self._spawn(self._quietly(engine.cancel(stream.keys)))
        return True

    def _release_handoff(self, request: Any) -> None:
        """The prefill side holds blocks for a decode call until somebody says that it will not come."""
        handoff = self.contract.handoff(request)
        if handoff is not None and self._engine is not None and not self.dead.is_set():
            self._spawn(self._quietly(self._engine.release_handoff(*handoff, self.table.new_key())))

    def _chunk(self, choice: Choice, sent: int, prompt_tokens: int) -> Any:
        parts, choice.logprobs_sent = choice.logprobs[choice.logprobs_sent :], len(choice.logprobs)
        return self.contract.chunk(
            choice.index,
            choice.token_ids[sent:],
            prompt_tokens,
            choice.sent,
            choice.cached_tokens,
            join_logprobs(parts),
            _take_prompt(choice),
        )

    def _complete(self, choice: Choice, finish: Finish, prompt_tokens: int) -> Any:
        if finish.reason is FinishReason.ERROR:
            message = finish.message or "the engine failed this request"
            raise (Unavailable if finish.retryable else Internal)(message)
        return self.contract.complete(
            choice.index,
            choice.token_ids,
            prompt_tokens,
            choice.cached_tokens,
            finish,
            join_logprobs(choice.logprobs),
            _take_prompt(choice),
            choice.kv_transfer,
            choice.draft_tokens,
            choice.accepted_tokens,
        )

    def _close(self, stream: Stream, status: str) -> None:
        keys = self.table.close(stream)
        if keys and self._engine is not None and not self.dead.is_set():
            self._spawn(self._quietly(self._engine.cancel(keys)))
        if self._finished is not None and isinstance(stream.call, Call):
            usage = Usage(
                prompt_tokens=len(stream.call.token_ids),
                completion_tokens=sum(len(choice.token_ids) for choice in stream.choices),
                cached_tokens=stream.choices[0].cached_tokens,
            )
            self._finished(stream.call, usage, status)

    @_rpc
    async def Embed(self, request: Any, context: Any) -> Any:
        """The embedding of a tokenized text."""
        call = self.contract.embed_call(request, context.invocation_metadata())
        engine = self._serving()
        admission.check_request_id(call.request_id)
        if not engine.limits.embeds:
            raise Unsupported("this model does not embed")
        admission.check_prompt(call.token_ids, engine.limits, "tokenized.input_ids")
        stream = self.table.open(call)
        try:
            await engine.submit_embedding(call, stream.choices[0].key)
            while stream.quiet:
                await stream.change()
            (choice,) = stream.take()
            finish = choice.finish
            if choice.embedding is None or finish is None:
                if finish is not None and finish.reason is FinishReason.ABORT:
                    raise Aborted(f"{call.request_id!r} was aborted")
                if finish is not None and finish.retryable:
                    raise Unavailable(finish.message)
                raise Internal(finish.message if finish and finish.message else "the engine returned no embedding")
            return self.contract.embedding(choice.embedding, len(call.token_ids))
        finally:
            keys = self.table.close(stream)
            if keys and not self.dead.is_set():
                self._spawn(self._quietly(engine.cancel(keys)))

    @_rpc
    async def Abort(self, request: Any, context: Any) -> Any:
        """End the named live calls with what they have so far; other ids are nobody's."""
        keys = self.table.abort(self.contract.abort_ids(request))
        if keys and self._engine is not None:
            self._spawn(self._quietly(self._engine.cancel(keys)))
        return self.contract.aborted()

    # Administration

    @_rpc
    async def HealthCheck(self, request: Any, context: Any) -> Any:
        """Whether the engine serves."""
        state = self.health.state
        if state is State.SERVING and self._engine is not None and not self._engine.healthy():
            state = State.DEAD
        return self.contract.health(state is State.SERVING, state.value)

    @_rpc
    async def FlushCache(self, request: Any, context: Any) -> Any:
        """Invalidate the prefix cache; with a timeout, wait for the engine to be idle first."""
        engine = self._serving()
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

    @_rpc
    async def StartProfile(self, request: Any, context: Any) -> Any:
        """Start the engine's profiler as its launch configured it."""
        engine = self._serving()
        options = self.contract.profile_options(request)
        if options:
            raise Invalid(f"{', '.join(options)}: the profiler is configured at the engine's launch, not by request")
        await _within(engine.start_profile(), _bounded(PROFILE_SECS, context))
        return self.contract.profiled(True, "the profiler runs")

    @_rpc
    async def StopProfile(self, request: Any, context: Any) -> Any:
        """Stop the engine's profiler and write its traces."""
        await _within(self._serving().stop_profile(), _bounded(PROFILE_SECS, context))
        return self.contract.profiled(True, "the profiler has stopped")

    @_rpc
    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        """Facts of the model."""
        return self.contract.model_info(self._known_engine().model_facts())

    @_rpc
    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        """Facts of the worker, and what it is doing."""
        engine = self._known_engine()
        activity = Activity(
            active_requests=len(self.table),
            paused=await _within(engine.paused(), _bounded(5.0, context)) if not self.dead.is_set() else False,
            last_received=self.load_tracker.last_received,
            uptime=time.time() - self._started,
        )
        return self.contract.server_info(engine.server_facts(), activity)

    @_rpc
    async def GetLoads(self, request: Any, context: Any) -> Any:
        """Load by data-parallel rank."""
        engine = self._known_engine()
        loads = self.load_tracker.loads(engine)
        rank = self.contract.load_rank(request)
        if rank is not None:
            loads = [load for load in loads if load.rank == rank]
            if not loads:
                raise Invalid(f"dp_rank: this worker manages no rank {rank}")
        return self.contract.loads(loads, engine.server_facts().version)

    @_rpc
    async def GetTokenizer(self, request: Any, context: Any) -> None:
        """The tokenizer's files as one archive, in pieces."""
        engine = self._known_engine()
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

    @_rpc
    async def SubscribeKvEvents(self, request: Any, context: Any) -> None:
        """KV cache events."""
        raise Unsupported("this worker publishes no KV events")


def _take_prompt(choice: Choice) -> Any:
    """The prompt's logprobs, once."""
    if not choice.prompt_logprobs:
        return None
    parts, choice.prompt_logprobs = choice.prompt_logprobs, []
    return choice.stream.call.token_ids, join_logprobs(parts)


def _bounded(seconds: float, context: Any) -> float:
    """`seconds`, or what the client's deadline leaves of them."""
    left = context.time_remaining()
    return seconds if left is None else min(seconds, max(left, 0.0))


async def _within(work: Awaitable[Any], seconds: float) -> Any:
    try:
        return await asyncio.wait_for(work, seconds)
    except (TimeoutError, asyncio.TimeoutError):
        raise TimedOut(f"the engine did not answer within {seconds:g} s") from None
