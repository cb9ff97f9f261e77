"""SGLang's scheduler processes: the configuration they start from, their sockets, and word of their death."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

from ..hooks.settings import ConfigurationError
from ..serving import errors
from ..serving.processes import BLOCKING

logger = logging.getLogger(__name__)

_JOIN_SECS = 5.0
_SIGQUIT = "a scheduler failed; its own log lines say why"


class Ports:
    """The sockets between this process and the schedulers, which connect to them.

    `requests` goes to the schedulers, `outputs` brings their batches, `replies` everything else they say; with
    --skip-tokenizer-init all comes by `replies`. Used on one event loop, created before the schedulers start.
    """

    def __init__(self, port_args: Any) -> None:
        import zmq
        from sglang.srt.managers.io_struct import sock_recv, sock_send
        from sglang.srt.utils.network import get_zmq_socket

        self.arguments = port_args
        self._again, self._now = zmq.Again, zmq.NOBLOCK
        self._sock_send, self._sock_recv = sock_send, sock_recv
        self._context = zmq.Context()
        bind = functools.partial(get_zmq_socket, self._context)
        self.requests = bind(zmq.PUSH, port_args.scheduler_input_ipc_name, True)
        self.outputs = bind(zmq.PULL, port_args.detokenizer_ipc_name, True)
        self.replies = bind(zmq.PULL, port_args.tokenizer_ipc_name, True)
        self._listening: list[int] = []

    def send(self, message: Any) -> None:
        """Queue a message for the schedulers; EngineDead when none is there."""
        try:
            self._sock_send(self.requests, message, self._now)
        except self._again:
            raise errors.EngineDead("no scheduler is connected") from None

    def listen(self, hear: Callable[[Any], None], failed: Callable[[Exception], None]) -> None:
        """Call `hear` with every message from now on, `failed` with one that cannot be read."""
        loop = asyncio.get_running_loop()
        for socket in (self.outputs, self.replies):
            drain = functools.partial(self._drain, socket, hear, failed)
            loop.add_reader(socket.FD, drain)
            self._listening.append(socket.FD)
            loop.call_soon(drain)

    def _drain(self, socket: Any, hear: Callable[[Any], None], failed: Callable[[Exception], None]) -> None:
        """Take what is there: the descriptor tells of the first message alone (zmq_getsockopt(3), ZMQ_FD)."""
        receive, now = self._sock_recv, self._now
        try:
            while not socket.closed:
                hear(receive(socket, now))
        except self._again:
            pass
        except Exception as error:
            logger.exception("a message of the schedulers' could not be read")
            failed(error)

    def close(self) -> None:
        """Close the sockets, and remove the files that SGLang names its sockets by."""
        loop = asyncio.get_running_loop()
        for descriptor in self._listening:
            loop.remove_reader(descriptor)
        for socket in (self.requests, self.outputs, self.replies):
            socket.close(linger=0)
        self._context.destroy(linger=0)
        for name, value in vars(self.arguments).items():
            if name.endswith("_ipc_name") and isinstance(value, str) and value.startswith("ipc://"):
                with contextlib.suppress(OSError):
                    os.unlink(value.removeprefix("ipc://"))


def prepare(server_args: Any) -> Any:
    """Bring a configuration to where schedulers start from it, and publish it; returns its PortArgs.

    Once a process. What the configuration check refuses is a ConfigurationError.
    """
    from sglang.srt.entrypoints import engine
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import PortArgs
    from sglang.srt.utils import common

    engine.configure_logger(server_args)
    server_args.resolve_once()
    # SGLang's sidecar has made the folder of its metrics; it would be deleted with the object that is replaced here.
    metrics = getattr(common, "prometheus_multiproc_dir", None)
    engine._set_envs_and_config(server_args)
    if metrics is not None:
        common.prometheus_multiproc_dir = metrics
    load_plugins()
    try:
        # Declares what it normalizes (LoRA paths), which a published configuration refuses.
        server_args.check_server_args()
    except (ValueError, AssertionError) as error:
        raise ConfigurationError([str(error) or type(error).__name__]) from error
    engine.resolve_auto_parsers(server_args)
    publish(server_args, role="tokenizer")
    return PortArgs.init_new(server_args)


class Schedulers:
    """The scheduler processes of this node; `died` gets a sentence once one of them is gone."""

    def __init__(self) -> None:
        self.died: concurrent.futures.Future[str] = concurrent.futures.Future()
        self.infos: list[dict[str, Any]] = []
        self._processes: list[Any] = []
        self._closing = threading.Event()

    def report(self, reason: str) -> None:
        """Note down why the schedulers cannot serve any more; the first reason counts."""
        if not self._closing.is_set():
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                self.died.set_result(reason)

    def take_over_sigquit(self) -> None:
        """A rank that raises says so with SIGQUIT; SGLang would end every process here, this one included."""
        signal.signal(signal.SIGQUIT, lambda *_: self.report(_SIGQUIT))

    def start(self, server_args: Any, port_args: Any) -> None:
        """Start the schedulers and return once they are ready; RuntimeError when one cannot be. Blocking."""
        launched: concurrent.futures.Future[Any] = concurrent.futures.Future()
        _in_background(functools.partial(self._run, server_args, port_args, launched))
        result = launched.result()
        ready = _in_background(result.wait_for_ready)
        concurrent.futures.wait((ready, self.died), return_when=concurrent.futures.FIRST_COMPLETED)
        if self.died.done():
            raise RuntimeError(self.died.result())
        ready.result()
        self.infos = result.scheduler_infos
        own = {process.pid for process in self._processes}
        self._watch_others([pid for pid in result.all_child_pids if pid not in own])

    def _run(self, server_args: Any, port_args: Any, launched: concurrent.futures.Future[Any]) -> None:
        """Start the processes and wait for the first one's end, in one thread: they die with whatever started them."""
        try:
            from sglang.srt.entrypoints.engine import Engine
            from sglang.srt.managers.scheduler import run_scheduler_process

            result, processes = Engine._launch_scheduler_processes(server_args, port_args, run_scheduler_process)
        except BaseException as error:  # noqa: BLE001  carried to the thread that waits
            launched.set_exception(error)
            return
        self._processes = list(processes or ())
        launched.set_result(result)
        by_sentinel = {process.sentinel: process for process in self._processes}
        for sentinel in connection.wait(list(by_sentinel)):
            process = by_sentinel[sentinel]
            process.join(_JOIN_SECS)
            self.report(f"scheduler process {process.pid} ended (exit code {process.exitcode})")

    def wait(self) -> str:
        """Block until a scheduler is gone; returns what became of it."""
        return self.died.result()

    def close(self) -> None:
        """End the schedulers."""
        self._closing.set()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(_JOIN_SECS)

    def _watch_others(self, pids: list[int]) -> None:
        """Ranks that the data-parallel controller started are no children of this process."""
        handles = {pid: _process_handle(pid) for pid in pids}
        watched: dict[Any, str] = {
            handle: f"scheduler process {pid}" for pid, handle in handles.items() if handle is not None
        }
        if watched:
            _in_background(lambda: self.report(f"{watched[connection.wait(list(watched))[0]]} ended"))


def _process_handle(pid: int) -> int | None:
    """What becomes readable when a process ends; None where that cannot be had (or the process is gone)."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError) as error:
        logger.warning("scheduler process %d is not watched: %s", pid, error)
        return None


def _in_background(work: Callable[[], Any]) -> concurrent.futures.Future[Any]:
    """Run `work` in a thread that does not keep the process alive."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  carried to whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=BLOCKING).start()
    return future
