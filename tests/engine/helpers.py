"""What the tests of real engines share: waiting with a deadline, and streams that run in threads."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from client import TIMEOUT, Client, request
from workers import Process, alive, descendants

SERVICE = "vllm.grpc.engine.VllmEngine"
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
