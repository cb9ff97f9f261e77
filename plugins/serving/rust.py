"""A worker's life when the `smg` wheel's Rust server answers gRPC and the engine runs headless behind it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from ..hooks.settings import ConfigurationError, Settings
from .life import Life, first
from .processes import adopt_orphans, end_children, in_thread, leave_now
from .sockets import Places, from_here, join, remove_sockets, reserve, stand_in
from .wheel import Wheel

logger = logging.getLogger(__name__)

_POLL_SECS = 0.1  # the server has no events to wait for
_STOP_SECS = 2.0  # of which a client has half to read how its call ended
_STOP_NOW_SECS = 1.0  # the server's own minimum: it then closes connections at once
_CLOSE_SECS = 10.0
_FLUSH_SECS = 1.0
_JOIN_SECS = 1.0  # between the end of a process's pipe and its own
_SIGNAL_SECS = 0.3
_RELAY_SECS = 30.0
_TOLD_TO_END = (0, -signal.SIGTERM, -signal.SIGINT)


@dataclass(frozen=True)
class Headless:
    """An engine that runs: its processes, one a data-parallel rank, and what ends them (blocking)."""

    processes: Sequence[BaseProcess]
    close: Callable[[], None]


@dataclass(frozen=True)
class Plan:
    """What an engine's configuration came to: facts for the server, and how to start the engine.

    `facts` are constructor keywords of the Rust server; a wheel that lacks one does without. `launch` blocks
    until the processes are started, not until they are ready.
    """

    model_path: str
    engines: int
    launch: Callable[[], Headless]
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RustWorker:
    """What to serve and how.

    `plan` blocks (it runs in a thread of its own) and takes the address that the engine is to dial. `active`
    counts the live calls of a server at an address, None when it cannot tell. `prefix` begins the names of the
    engine's variables.
    """

    wheel: Wheel
    host: str
    port: int
    settings: Settings
    plan: Callable[[str], Plan]
    active: Callable[[str], Awaitable[int | None]]
    prefix: str


async def run(worker: RustWorker) -> int:
    """Serve until a signal or an end; returns the exit code (0 clean, 1 failed, 2 configuration)."""
    life = _Life(worker)
    try:
        return await life.run()
    except ConfigurationError as error:
        for line in error.lines:
            logger.error("%s", line)
        return error.exit_code
    finally:
        life.forget_signals()
        life.clean()


class _Life(Life):
    def __init__(self, worker: RustWorker) -> None:
        super().__init__()
        self.worker = worker
        self.places: Places | None = None
        self.server: Any = None
        self.engine: Headless | None = None
        self.failed = asyncio.Event()
        self.ready = asyncio.Event()
        self._holds = False
        self.idle = asyncio.Event()
        self._live: int | None = None
        self._stopped = False
        self._watched: list[int] = []

    async def run(self) -> int:
        worker = self.worker
        wheel = worker.wheel
        self.places = places = reserve(worker.host, worker.port, f"{worker.prefix}_HANDSHAKE_PORT", worker.settings)
        wheel.start_tracing(logger.getEffectiveLevel())
        self.watch_signals()
        logger.info("%s will be served by %s of smg %s", places.port.address, wheel.name, wheel.version)
        plan = await self._plan(f"tcp://{places.handshake.address}")
        if plan is None:
            self.leave(0)
        address = self._start_server(plan, places)
        watch = asyncio.create_task(self._watch())
        try:
            await self._start_engine(plan)
            if not await self._until_serving():
                await self._never_served()
            logger.info("serving on %s", address)
            await first(self.stop.wait(), self.failed.wait())
            if not self.failed.is_set():
                await self._drain(address)
        finally:
            watch.cancel()
        return await self._end()

    async def _plan(self, handshake: str) -> Plan | None:
        """The engine's configuration, or None when a signal or a failure came first."""
        adopt_orphans()
        planning = in_thread(lambda: self.worker.plan(handshake))
        await first(planning, self.stop.wait())
        if not planning.done():
            return None
        try:
            return planning.result()
        except ConfigurationError:
            raise
        except Exception as error:  # noqa: BLE001  said in one line
            self._fail(f"the engine did not start: {type(error).__name__}: {error}", error)
            return None

    def _start_server(self, plan: Plan, places: Places) -> str:
        """Bind and listen; the server answers NOT_SERVING from here until the engine has dialled in."""
        arguments = self._arguments(plan)
        os.environ["SMG_SERVICER_WORKER_THREADS"] = str(self.worker.settings["worker_threads"])
        asked = places.port.address
        places.port.offer()
        places.handshake.offer()
        try:
            self.server = self.worker.wheel.server(
                asked, f"ipc://{places.base}", f"tcp://{places.handshake.address}", plan.model_path, **arguments
            )
        except RuntimeError as error:
            raise ConfigurationError([f"--host/--port: cannot listen on {asked}: {error}"]) from error
        except (TypeError, ValueError) as error:
            self._fail(f"the Rust server did not start: {error}", error)
            self.leave(1)
        places.port.release()
        self._holds = self.worker.wheel.offers("kv_relay_subscribed") and bool(arguments.get("kv_events_endpoint"))
        self._hold(True)
        logger.info("listening on %s, not serving until the engine is ready", self.server.address)
        return str(self.server.address)

    def _arguments(self, plan: Plan) -> dict[str, Any]:
        """The server's keywords: the plan's facts, and those settings that its wheel takes."""
        worker, settings, wheel = self.worker, self.worker.settings, self.worker.wheel
        timeout = settings["startup_timeout_secs"]
        if not wheel.offers("note_engine_alive"):
            # That wheel cannot be told that a silent engine lives: only the ceiling, which is ours, may end the wait.
            timeout = max(timeout, settings["startup_ceiling_secs"] or float(2**31))
        knobs = {"startup_timeout_secs": timeout}
        for name in ("startup_ceiling_secs", "silence_timeout_secs", "prefill_tokens_per_sec"):
            knobs[name] = settings[name]
        if settings.given("max_message_bytes"):
            knobs["max_message_bytes"] = settings["max_message_bytes"]
        if settings["metrics_port"] is not None:
            knobs["metrics_port"] = join(settings["metrics_host"] or worker.host, settings["metrics_port"])
        return wheel.arguments({"engine_count": plan.engines} | dict(plan.facts), knobs)

    def _hold(self, hold: bool) -> None:
        """Keep the server from saying SERVING while something but the engine is missing."""
        if not self._holds:
            return
        if self.worker.wheel.offers("set_ready"):
            self.server.set_ready(not hold)
        else:
            self.server.set_serving(not hold)

    async def _start_engine(self, plan: Plan) -> None:
        starting = in_thread(plan.launch)
        await first(starting, self.stop.wait(), self.failed.wait())
        if not starting.done():
            return
        try:
            self.engine = starting.result()
        except Exception as error:  # noqa: BLE001  said in one line
            self._fail(f"the engine did not start: {type(error).__name__}: {error}", error)
            return
        # What the start left behind lives as long as the process: its end need not look at it.
        gc.collect()
        gc.freeze()
        loop = asyncio.get_running_loop()
        for process in self.engine.processes:
            loop.add_reader(process.sentinel, self._on_exit, process)
            self._watched.append(process.sentinel)

    def _on_exit(self, process: BaseProcess) -> None:
        asyncio.get_running_loop().remove_reader(process.sentinel)
        process.join(_JOIN_SECS)
        # What told the engine to end may be on its way to this process too.
        wait = _SIGNAL_SECS if process.exitcode in _TOLD_TO_END else 0.0
        asyncio.get_running_loop().call_later(wait, self._judge, process)

    def _judge(self, process: BaseProcess) -> None:
        if self.stop.is_set() and not self._live and process.exitcode in _TOLD_TO_END:
            # A terminal's Ctrl-C ends the engine too; that is no failure where it ended no call.
            self.idle.set()
            return
        moment = "" if self.ready.is_set() else " before it was ready"
        self._fail(f"the engine process {process.name} ended{moment} with exit code {process.exitcode}")

    def _fail(self, reason: str, error: BaseException | None = None) -> None:
        if self.idle.is_set() or self.failed.is_set():
            return
        logger.error("%s", reason)
        logger.debug("where it failed", exc_info=error)
        self.failed.set()

    async def _watch(self) -> None:
        """Poll the server: its readiness, its errors; and tell it that the engine's processes live."""
        server, wheel, settings = self.server, self.worker.wheel, self.worker.settings
        note = wheel.offers("note_engine_alive")
        ceiling = settings["startup_ceiling_secs"] or float("inf")
        started = time.monotonic()
        while not self.failed.is_set():
            if server.last_error:
                self._fail(f"the Rust server failed: {server.last_error}")
            elif not server.running and not self.stop.is_set():
                self._fail("the Rust server ended")
            elif not self.ready.is_set():
                if server.engine_ready:
                    self.ready.set()
                elif time.monotonic() - started > ceiling:
                    self._fail(
                        f"the engine was not ready within {ceiling:g} s ({self.worker.prefix}_STARTUP_CEILING_SECS)"
                    )
                elif note and self.engine is not None:
                    server.note_engine_alive()
            await asyncio.sleep(_POLL_SECS)

    async def _until_serving(self) -> bool:
        """Whether the server says SERVING; False when a signal or a failure came first."""
        await first(self.ready.wait(), self.stop.wait(), self.failed.wait())
        if self._holds and self.ready.is_set():
            try:
                over = first(self._relayed(), self.stop.wait(), self.failed.wait())
                await asyncio.wait_for(over, _RELAY_SECS)
            except (asyncio.TimeoutError, TimeoutError):
                logger.warning("the relay of KV events did not subscribe within %g s: serving without it", _RELAY_SECS)
        if self.failed.is_set() or (self.stop.is_set() and (self._holds or not self.server.engine_ready)):
            return False  # a server that is not held says SERVING before this hears of it: it may have calls
        self._hold(False)
        return True

    async def _relayed(self) -> None:
        while not self.server.kv_relay_subscribed:
            await asyncio.sleep(_POLL_SECS)

    async def _never_served(self) -> NoReturn:
        self.idle.set()
        self.server.set_serving(False)
        await self._stop_server()
        self.leave(0)

    async def _drain(self, address: str) -> None:
        self.server.set_serving(False)
        seconds = self.worker.settings["drain_secs"]
        logger.info("draining: at most %g s", seconds)
        over = first(self._count(from_here(address)), self.idle.wait(), self.failed.wait())
        with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
            await asyncio.wait_for(over, seconds)

    async def _count(self, address: str) -> None:
        """Ask for the live calls until there is none."""
        counts = self.worker.wheel.offers("active_requests")
        while True:
            self._live = self.server.active_requests if counts else await self.worker.active(address)
            if self._live == 0:
                self.idle.set()
            await asyncio.sleep(_POLL_SECS)

    async def _end(self) -> int:
        """End calls and server, then the engine: one that is told to end would end its calls as aborted."""
        for sentinel in self._watched:
            asyncio.get_running_loop().remove_reader(sentinel)
        self.server.set_serving(False)
        await asyncio.sleep(_POLL_SECS)  # the server tells watchers, and sees that an engine has left
        leave_place = await self._stand_in()
        await self._stop_server()
        leave_place()
        if self.engine is not None:
            closing = in_thread(self.engine.close)
            done, _ = await asyncio.wait([closing], timeout=_FLUSH_SECS if self.failed.is_set() else _CLOSE_SECS)
            if not done:
                logger.warning("the engine did not close in time: ending its processes")
            elif closing.exception() is not None:
                logger.warning("closing the engine: %s", closing.exception())
        end_children()
        return 1 if self.failed.is_set() else 0

    async def _stand_in(self) -> Callable[[], None]:
        """Stand in for engine processes that died until the server has ended their calls."""
        assert self.places is not None
        processes = self.engine.processes if self.engine is not None else ()
        dead = [index for index, process in enumerate(processes) if process.exitcode is not None]
        if not dead:
            return lambda: None
        try:
            leave_place: Callable[[], None] = await in_thread(partial(stand_in, self.places.base, dead))
        except Exception as error:  # noqa: BLE001  the calls end all the same
            logger.warning("nothing stands in for the engine, calls may end as INTERNAL: %s", error)
            return lambda: None
        return leave_place

    async def _stop_server(self) -> None:
        """Stop the server; calls that are live end as UNAVAILABLE."""
        await asyncio.wait([in_thread(partial(self._stop, _STOP_SECS))], timeout=2 * _STOP_SECS)

    def _stop(self, seconds: float) -> None:
        if self.server is None or self._stopped:
            return
        self._stopped = True
        try:
            self.server.stop(seconds)
        except Exception as error:  # noqa: BLE001  the process ends all the same
            logger.warning("the Rust server did not stop: %s", error)

    def leave(self, code: int) -> NoReturn:
        """End the process now, with 1 in `code`'s place after a failure."""
        stopping = threading.Thread(target=self._stop, args=(_STOP_NOW_SECS,), daemon=True)
        stopping.start()
        stopping.join(2 * _STOP_NOW_SECS)
        self.clean()
        leave_now(1 if self.failed.is_set() else code)

    def clean(self) -> None:
        """Remove the socket files."""
        if self.places is not None:
            remove_sockets(self.places.base)
