"""Threads and processes of a worker: blocking work beside the loop, and an end that leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import psutil

logger = logging.getLogger(__name__)

_PR_SET_CHILD_SUBREAPER = 36
_ENDING_ROUNDS = 20
_TERMINATE_SECS = 1.0
_KILL_SECS = 0.2
_JOIN_SECS = 0.1
BLOCKING = "smg-blocking"
"""Name of the threads that `end_children` ends with what they started."""


def calm_poller() -> None:
    """Keep grpc.aio's completion thread from preempting the event loop it works for.

    It wakes for every message that was sent. Under SCHED_BATCH it takes what came together once the
    loop has nothing to do, which saves a context switch a message where cores are busy.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for thread in threading.enumerate():
        if "_poll_wrapper" in thread.name and thread.native_id is not None:
            try:
                os.sched_setscheduler(thread.native_id, os.SCHED_BATCH, os.sched_param(0))
            except OSError as error:
                logger.debug("the completion thread keeps its scheduling policy: %s", error)


def in_thread(function: Callable[[], Any]) -> asyncio.Future[Any]:
    """Run a blocking function in a thread that does not keep the process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(setter: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            setter(value)

    def work() -> None:
        try:
            result, setter = function(), future.set_result
        except BaseException as error:  # noqa: BLE001  carried to whoever awaits; SystemExit from an engine too
            if isinstance(error, (SystemExit, KeyboardInterrupt, StopIteration)):
                error = RuntimeError(f"{type(error).__name__}: {error}")
            result, setter = error, future.set_exception
        with contextlib.suppress(RuntimeError):  # the loop may be gone
            loop.call_soon_threadsafe(functools.partial(settle, setter, result))

    threading.Thread(target=work, daemon=True, name=BLOCKING).start()
    return future


def end_children() -> None:
    """End every process below this one: SIGTERM at first, SIGKILL for what is left or comes after it.

    A thread that loads an engine would start more: it is told to end. The resource tracker ends by
    itself with the last process that holds its pipe, and cleans up shared memory as it does.
    """
    here = psutil.Process()
    adopt_orphans()
    loading = [thread for thread in threading.enumerate() if thread.name == BLOCKING]
    patience = _TERMINATE_SECS
    for _ in range(_ENDING_ROUNDS):
        for thread in loading:
            _interrupt(thread)
        below = [process for process in here.children(recursive=True) if not _is_tracker(process)]
        if not below and not any(thread.is_alive() for thread in loading):
            return
        for process in below:
            with contextlib.suppress(psutil.Error):
                process.terminate() if patience else process.kill()
        _, left = psutil.wait_procs(below, timeout=patience or _KILL_SECS)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        for thread in loading:
            thread.join(_JOIN_SECS)
        patience = 0.0


def _interrupt(thread: threading.Thread) -> None:
    """Raise SystemExit in a thread, as soon as it runs Python code."""
    if thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))


def adopt_orphans() -> None:
    """Become the parent of processes whose parent ends before them (Linux), so that none gets out of sight."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE or "resource_tracker" in " ".join(process.cmdline())
    except psutil.Error:
        return True


def leave_now(code: int) -> NoReturn:
    """End the process and its children without waiting for anything else."""
    end_children()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
