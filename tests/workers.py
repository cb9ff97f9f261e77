"""Real processes for tests and benchmarks: vLLM workers and the router, and what they cost."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

if TYPE_CHECKING:
    from typing_extensions import Self

START_SECS = 240
STOP_SECS = 40
# float32: vLLM's AMX attention path for bf16 ends the worker with SIGILL on hosts that do not grant AMX.
VLLM_ARGUMENTS = ("--enforce-eager --max-model-len 2048 --dtype float32 --gpu-memory-utilization 0.3").split()
SGLANG_ARGUMENTS = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --disable-overlap-schedule "
    "--mem-fraction-static 0.1 --max-total-tokens 8192"
).split()
SGLANG_LAST_PORT = 55535  # SGLang adds 10000 for a server of its own, whether or not it starts one
SGLANG_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
VLLM_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def descendants(pid: int) -> list[int]:
    """Processes below `pid`."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, queue = [], [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time that processes have used in the threads they have now, to the nanosecond."""
    nanoseconds = 0
    for pid in pids:
        for schedstat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):
                nanoseconds += int(schedstat.read_text().split()[0])
    return nanoseconds / 1e9


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Process:
    """A program in a process group of its own, its output in a file."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.command, self.log = list(command), log
        self.environment = dict(os.environ) | dict(environment or {})
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self.environment,
                cwd=self.log.parent,
                # A group, not a session: Linux schedules sessions against each other (autogroup), and two
                # cores that an engine spins on then starve its clients for seconds.
                preexec_fn=os.setpgrp,
            )

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self, timeout: float) -> int:
        """The exit code; TimeoutExpired when it still runs."""
        assert self.process is not None
        return self.process.wait(timeout)

    def stop(self) -> None:
        """End it and everything in its group."""
        if self.process is None:
            return
        below = descendants(self.process.pid)
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECS)
        for pid in (*below, self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(5)

    def fail(self, what: str) -> None:
        raise AssertionError(f"{what}; the end of {self.log.name}:\n{self.output()[-6000:]}")


class Worker(Process):
    """An engine's own launcher, serving gRPC on a port of this machine."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        port: int | None = None,
        environment: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        self.port = port or free_port()
        self.address = f"127.0.0.1:{self.port}"
        super().__init__([*command, "--host", "127.0.0.1", "--port", str(self.port), *arguments], log, environment)

    def status(self, timeout: float = 2.0) -> int | None:
        """grpc.health.v1's status, None while nothing answers."""
        with grpc.insecure_channel(self.address) as channel, contextlib.suppress(grpc.RpcError):
            stub = health_pb2_grpc.HealthStub(channel)
            return int(stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout).status)
        return None

    def wait_serving(self, timeout: float = START_SECS) -> None:
        """Return once it serves."""
        deadline = time.monotonic() + timeout
        while self.status() != health_pb2.HealthCheckResponse.SERVING:
            if not self.running():
                self.fail("the worker ended before it served")
            if time.monotonic() > deadline:
                self.fail("the worker does not serve")
            time.sleep(0.2)

    @contextlib.contextmanager
    def serving(self) -> Iterator[Self]:
        """Start it, wait until it serves, and stop it in the end."""
        self.start()
        try:
            self.wait_serving()
            yield self
        finally:
            self.stop()


class VllmWorker(Worker):
    """`vllm serve MODEL --grpc` in an environment of tests/environments.py."""

    def __init__(
        self,
        python: Path,
        model: Path,
        log: Path,
        *arguments: str,
        port: int | None = None,
        environment: Mapping[str, str] | None = None,
        launcher: Sequence[str] | None = None,
    ) -> None:
        entry = launcher or ("-m", "vllm.entrypoints.cli.main", "serve", str(model), "--grpc")
        everything = dict(VLLM_ENVIRONMENT) | dict(environment or {})
        super().__init__([str(python), *entry], log, port, everything, [*VLLM_ARGUMENTS, *arguments])


class SglangWorker(Worker):
    """`python -m sglang.launch_server --smg-grpc-mode` in an environment of tests/environments.py."""

    def __init__(
        self,
        python: Path,
        model: Path,
        log: Path,
        *arguments: str,
        port: int | None = None,
        environment: Mapping[str, str] | None = None,
        launcher: Sequence[str] = ("-m", "sglang.launch_server"),
    ) -> None:
        command = [str(python), *launcher, "--model-path", str(model), "--smg-grpc-mode"]
        everything = dict(SGLANG_ENVIRONMENT) | dict(environment or {})
        port = port or next(found for found in iter(free_port, None) if found <= SGLANG_LAST_PORT)
        super().__init__(command, log, port, everything, [*SGLANG_ARGUMENTS, *arguments])


class Router(Process):
    """`smg launch` of the published router in front of workers."""

    def __init__(self, workers: Sequence[str], model: Path, log: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        smg = Path(sys.executable).parent / "smg"
        urls = [f"grpc://{address}" for address in workers]
        super().__init__(
            [
                str(smg),
                "launch",
                "--worker-urls",
                *urls,
                "--model-path",
                str(model),
                "--host",
                "127.0.0.1",
                "--port",
                str(self.port),
                "--policy",
                "round_robin",
                "--prometheus-port",
                str(free_port()),
            ],
            log,
        )


class SmgServe(Process):
    """`smg serve` of the published router beside vLLM: one worker, and the router in front of it."""

    def __init__(
        self, python: Path, model: Path, log: Path, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [str(python.parent / "smg"), "serve", "--backend", "vllm", "--model", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--worker-base-port", str(free_port())]
        command += ["--router-prometheus-port", str(free_port())]
        super().__init__([*command, *VLLM_ARGUMENTS, *arguments], log, dict(VLLM_ENVIRONMENT) | dict(environment or {}))

    def worker(self) -> int:
        """The process of the worker, which leads a process group of its own; 0 before it is launched."""
        found = re.search(r"Launched vllm worker on \S+ \(pid (\d+)", self.output())
        return int(found[1]) if found else 0

    def stop(self) -> None:
        super().stop()
        if self.worker():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.worker(), signal.SIGKILL)
