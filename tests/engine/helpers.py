"""What the tests of real engines share: waiting with a deadline, streams in threads, workers lent on."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from client import TIMEOUT, Client, request
from workers import Process, VllmWorker, alive, descendants

SERVICE = "vllm.grpc.engine.VllmEngine"
DRAIN = "SMG_VLLM_SERVICER_DRAIN_SECS"
ORPHAN_SECS = 3  # for children that end because their parent did
LONG = 1900  # tokens: seconds for one stream of the tiny model, many for 32


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def ending(call: Any) -> str:
    """How a call ended: its finish reason, or its status where it failed. Reads it to the end."""
    reason = "nothing"
    try:
        for message in call:
            if message.WhichOneof("response") == "complete":
                reason = message.complete.finish_reason
    except grpc.RpcError as error:
        return error.code().name
    return reason


class Streams:
    """Long streamed calls that run in threads; made once each has its first token."""

    def __init__(self, client: Client, count: int) -> None:
        self.first = threading.Semaphore(0)
        self.client = client
        with contextlib.ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(count))
            self.calls = [pool.submit(self._read, number) for number in range(count)]
            self.stack = stack.pop_all()
        for _ in range(count):
            assert self.first.acquire(timeout=TIMEOUT)

    def _read(self, number: int) -> tuple[str, list[Any]]:
        messages: list[Any] = []
        asked = request(prompt=[number + 5, 7], max_tokens=LONG, stream=True)
        try:
            for message in self.client.stub.Generate(asked, timeout=2 * TIMEOUT):
                if not messages:
                    self.first.release()
                messages.append(message)
        except grpc.RpcError as error:
            return error.code().name, messages
        return "OK", messages

    def ends(self, timeout: float) -> list[tuple[str, list[Any]]]:
        """Status and messages of every call."""
        deadline = time.monotonic() + timeout
        results = [call.result(max(0.0, deadline - time.monotonic())) for call in self.calls]
        self.stack.close()
        return results


def title(pid: int) -> str:
    """A process's command line, which vLLM sets to say what the process is."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    return ""


def engine_cores(worker: Process) -> list[int]:
    return [pid for pid in descendants(worker.pid) if title(pid).startswith("VLLM::EngineCore")]


def group(pid: int) -> list[int]:
    """The living processes of a worker: those that it started are in its process group."""
    members = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(folder.name)) == pid and alive(int(folder.name)):
                members.append(int(folder.name))
    return members


def check_ended(worker: VllmWorker, code: int, seconds: float) -> None:
    """The process ends with `code` in time, and nothing that it started outlives it for long."""
    try:
        assert worker.wait(seconds) == code, worker.output()[-3000:]
    except subprocess.TimeoutExpired:
        worker.fail(f"still running after {seconds} s")
    deadline = time.monotonic() + ORPHAN_SECS
    while left := {pid: title(pid) for pid in group(worker.pid)}:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


class Pool:
    """One worker at a time; a test that leaves it serving lends it to the next."""

    def __init__(self, new: Callable[..., VllmWorker]) -> None:
        self.new = new
        self.worker: VllmWorker | None = None
        self.drain: str | None = None

    def starting(self, drain: str | None = None) -> VllmWorker:
        """A worker whose process has just been started."""
        self.end()
        self.worker, self.drain = self.new(environment={DRAIN: drain} if drain else {}), drain
        self.worker.start()
        return self.worker

    def serving(self, drain: str | None = None) -> VllmWorker:
        """A worker that serves, with this drain time."""
        worker = self.worker
        if worker is None or not worker.running() or drain != self.drain:
            worker = self.starting(drain)
            worker.wait_serving()
        return worker

    def end(self) -> None:
        if self.worker is not None:
            self.worker.stop()
        self.worker = None
