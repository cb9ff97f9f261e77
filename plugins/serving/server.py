"""A worker's life: bind, load, serve, drain, end. The same for every engine and contract."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ..hooks.settings import ConfigurationError
from .contract import Contract
from .core import Admit, Finished
from .engine import Engine
from .errors import Unavailable
from .health import Health, State
from .life import Life, first
from .processes import adopt_orphans, calm_poller, end_children, in_thread, leave_now
from .servicer import Servicer

logger = logging.getLogger(__name__)

_CLOSE_SECS = 10.0
_FLUSH_SECS = 1.0  # for statuses on their way to clients
_HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


@dataclass(frozen=True)
class Tls:
    """PEM files of a server; with a CA the client's certificate is required and checked."""

    certificate: str
    key: str
    client_ca: str | None = None

    @classmethod
    def of_flags(cls, certificate: str | None, key: str | None, client_ca: str | None) -> Tls | None:
        """What an engine's --ssl-* flags name, None where they name nothing; ConfigurationError for half a pair."""
        if not certificate and not key:
            return None
        if not certificate or not key:
            raise ConfigurationError(["--ssl-certfile and --ssl-keyfile: one is missing; TLS needs both"])
        return cls(certificate, key, client_ca)

    def credentials(self) -> Any:
        """Server credentials; ConfigurationError names a file that cannot be read."""
        try:
            key, certificate = Path(self.key).read_bytes(), Path(self.certificate).read_bytes()
            ca = Path(self.client_ca).read_bytes() if self.client_ca else None
        except OSError as error:
            raise ConfigurationError([f"--ssl-certfile/--ssl-keyfile/--ssl-ca-certs: {error}"]) from error
        return grpc.ssl_server_credentials(
            [(key, certificate)], root_certificates=ca, require_client_auth=ca is not None
        )


@dataclass(frozen=True)
class Worker:
    """What to serve and how.

    `load` blocks (it runs in a thread of its own) and returns what `connect` turns into the engine's
    adapter on the event loop.
    """

    contract: Contract
    host: str
    port: int
    load: Callable[[], Any]
    connect: Callable[[Any], Awaitable[Engine]]
    tls: Tls | None = None
    drain_secs: float = 5.0
    max_message_bytes: int = -1
    interceptors: Sequence[Any] = ()
    admit: Admit | None = None
    finished: Finished | None = None
    periodic: Sequence[Callable[[Engine], Coroutine[Any, Any, None]]] = ()


def server_options(max_message_bytes: int) -> list[tuple[str, Any]]:
    """Channel options of every worker's server; -1 is no message ceiling."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        # A call says nothing while a long prompt is read: a client's keepalive pings are no abuse then.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        # A second worker on a taken port must fail, not share its traffic.
        ("grpc.so_reuseport", 0),
    ]


def bind(server: Any, host: str, port: int, tls: Tls | None = None) -> str:
    """Bind and return the address; ConfigurationError names one that is taken or not ours."""
    address = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
    credentials = tls.credentials() if tls is not None else None
    try:
        bound = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError as error:
        problem = f"--host/--port: cannot listen on {address}: in use, or not this machine's"
        raise ConfigurationError([problem]) from error
    return address if port else f"{address.rsplit(':', 1)[0]}:{bound}"


async def run(worker: Worker) -> int:
    """Serve until a signal or the engine's end; returns the exit code (0 clean, 1 failed, 2 configuration)."""
    life = _Life(worker)
    try:
        return await life.run()
    except ConfigurationError as error:
        for line in error.lines:
            logger.error("%s", line)
        return error.exit_code
    finally:
        life.forget_signals()


class _Life(Life):
    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self.worker = worker
        self.health = Health([worker.contract.service])
        self.servicer = Servicer(worker.contract, self.health, admit=worker.admit, finished=worker.finished)
        self.server = grpc.aio.server(
            options=server_options(worker.max_message_bytes), interceptors=list(worker.interceptors)
        )
        self._stopped_idle = False

    async def run(self) -> int:
        address = await self._listen()
        self.watch_signals()
        engine = await self._load()
        if engine is None:
            return await self._never_served()
        # What loading left behind lives as long as the process: collections need not look at it.
        gc.collect()
        gc.freeze()
        self.servicer.serve(engine)
        logger.info("serving %s on %s", self.worker.contract.service, address)
        tasks = [asyncio.create_task(job(engine)) for job in self.worker.periodic]
        await first(self.stop.wait(), self.servicer.dead.wait())
        died = self.servicer.dead.is_set()
        if not died:
            await self._drain()
            died = self.servicer.dead.is_set()
        for task in tasks:
            task.cancel()
        await self._end(engine, _CLOSE_SECS if not died else _FLUSH_SECS)
        # A terminal's Ctrl-C ends the engine too; that is no failure where it ended no call.
        return 1 if died and not self._stopped_idle else 0

    async def _listen(self) -> str:
        worker = self.worker
        worker.contract.register(self.servicer, self.server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        reflection.enable_server_reflection(
            (worker.contract.service, _HEALTH_SERVICE, reflection.SERVICE_NAME), self.server
        )
        address = bind(self.server, worker.host, worker.port, worker.tls)
        await self.server.start()
        calm_poller()
        logger.info("listening on %s, not serving until the engine is ready", address)
        return address

    async def _load(self) -> Engine | None:
        """The engine, or None when a signal or a failure came first."""
        adopt_orphans()  # a killed engine's own children are then still in sight
        loading = in_thread(self.worker.load)
        await first(loading, self.stop.wait())
        if not loading.done():
            return None
        try:
            return await self.worker.connect(loading.result())
        except ConfigurationError:
            raise
        except Exception as error:
            logger.error("the engine did not start: %s: %s", type(error).__name__, error)
            logger.debug("where it failed", exc_info=error)
            return None

    async def _never_served(self) -> int:
        self.health.set(State.DRAINING if self.stop.is_set() else State.DEAD)
        self.health.close()
        await self.server.stop(0)
        # The thread that loads the engine cannot be interrupted: what it started is ended for it.
        leave_now(0 if self.stop.is_set() else 1)

    async def _drain(self) -> None:
        logger.info("draining: %d live calls, at most %g s", len(self.servicer.table), self.worker.drain_secs)
        self.servicer.drain()
        with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
            await asyncio.wait_for(first(self.servicer.table.idle(), self.servicer.dead.wait()), self.worker.drain_secs)
        self.servicer.end_calls(Unavailable(State.DRAINING.value))

    async def _end(self, engine: Engine, seconds: float) -> None:
        await self.servicer.settle()
        self.health.close()
        await self.server.stop(_FLUSH_SECS)
        await self.servicer.close()
        closing = in_thread(engine.close)
        done, _ = await asyncio.wait([closing], timeout=seconds)
        if not done:
            logger.warning("the engine did not close within %g s: ending its processes", seconds)
        elif closing.exception() is not None:
            logger.warning("closing the engine: %s", closing.exception())
        end_children()

    def on_first_signal(self) -> None:
        self._stopped_idle = not len(self.servicer.table)
