"""A real worker's life when it is served from Rust: how it starts, drains and ends, and what it leaves behind."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from client import TIMEOUT, Client, completes
from grpc_health.v1 import health_pb2
from workers import START_SECS, VllmWorker

from .helpers import LONG, Pool, Streams, check_ended, engine_cores, wait_until

pytestmark = pytest.mark.engine

LISTEN_SECS = 180  # the imports before a worker looks at its configuration, on a busy machine
CLOSE_SECS = 20  # our bounds on the ends of calls, server and engine, and a margin
PREFIX = "SMG_VLLM_SERVICER"

Status = health_pb2.HealthCheckResponse


@pytest.fixture(scope="module")
def new_worker(vllm_python, tiny, tmp_path_factory) -> Callable[..., VllmWorker]:
    folder = tmp_path_factory.mktemp("rust-lifecycle")

    def new(*arguments: str, model: Path | None = None, environment: Any = None, **options: Any) -> VllmWorker:
        number = len(list(folder.glob("*.log")))
        sockets = {"SMG_ZMQ_SOCKET_DIR": str(folder / f"{number}.sockets")}
        worker = VllmWorker(
            vllm_python,
            model or tiny("qwen3"),
            folder / f"{number}.log",
            *("--servicer-impl", "rust", *arguments),
            environment=sockets | (environment or {}),
            **options,
        )
        worker.log.touch()
        return worker

    return new


@pytest.fixture(scope="module")
def pool(new_worker) -> Iterator[Pool]:
    pool = Pool(new_worker)
    yield pool
    pool.end()


def errors(worker: VllmWorker) -> list[str]:
    """Its own ERROR lines and the Rust server's, not those of the engine's processes."""
    lines = [line for line in worker.output().splitlines() if re.search(r"\bERROR\b|servicer: error:", line)]
    return [line for line in lines if not line.startswith(("(EngineCore", "(Worker"))]


def ended(worker: VllmWorker, code: int, seconds: float = CLOSE_SECS) -> list[str]:
    """The ERROR lines of a worker that ends with `code` in time and leaves neither a process nor a socket."""
    check_ended(worker, code, seconds)
    sockets = Path(worker.environment["SMG_ZMQ_SOCKET_DIR"])
    assert not sockets.is_dir() or not list(sockets.iterdir())
    return errors(worker)


def failed(worker: VllmWorker, code: int, seconds: float = LISTEN_SECS) -> list[str]:
    """The ERROR lines of a worker whose start fails."""
    worker.start()
    try:
        return ended(worker, code, seconds)
    finally:
        worker.stop()


# A start that fails


def test_all_that_a_start_needs_and_cannot_have_is_said_before_the_model_loads(new_worker, tmp_path):
    taken = tmp_path / "file"
    taken.touch()
    with socket.create_server(("127.0.0.1", 0)) as port, socket.create_server(("127.0.0.1", 0)) as handshake:
        variables = {f"{PREFIX}_HANDSHAKE_PORT": str(handshake.getsockname()[1]), "SMG_ZMQ_SOCKET_DIR": str(taken)}
        worker = new_worker(port=port.getsockname()[1], environment=variables)
        lines = failed(worker, 2)
    for line, name in zip(lines, ("--port", "HANDSHAKE_PORT", "SMG_ZMQ_SOCKET_DIR"), strict=True):
        assert name in line
    assert "Resolved architecture" not in worker.output()


def test_what_the_wheel_and_this_path_cannot_do_is_refused_a_line_each(new_worker):
    refused = {f"{PREFIX}_SILENCE_TIMEOUT_SECS": "7", f"{PREFIX}_PREFILL_TOKENS_PER_SEC": "8"}
    accepted = {f"{PREFIX}_STARTUP_TIMEOUT_SECS": "9"}
    worker = new_worker("--metrics-port", "6", "--ssl-keyfile", "key", environment=refused | accepted)
    lines = failed(worker, 2)
    for setting, value in ((f"{PREFIX}_SILENCE_TIMEOUT_SECS", "7.0"), (f"{PREFIX}_PREFILL_TOKENS_PER_SEC", "8")):
        (line,) = [line for line in lines if setting in line]
        assert re.search(rf": {value} cannot be honoured: VllmGrpcServer of smg 1\.13\.0 .*; install a newer", line)
    (line,) = [line for line in lines if "--metrics-port" in line]
    assert f"({PREFIX}_METRICS_PORT): 6 cannot" in line
    (line,) = [line for line in lines if "--ssl" in line]
    assert "no TLS" in line
    assert len(lines) == 4


def test_settings_that_are_not_accepted_are_refused_a_line_each(new_worker):
    variables = {"SMG_SERVICER_WORKER_THREADS": "many", f"{PREFIX}_STARTUP_CEILING_SECS": "-1"}
    lines = failed(new_worker(environment=variables), 2)
    assert len(lines) == 2
    for (name, value), line in zip(reversed(variables.items()), lines, strict=True):
        assert f"{name}: '{value}' is not accepted; expected a number of" in line


def test_a_wheel_without_the_server_is_refused(new_worker, tmp_path):
    (tmp_path / "smg").mkdir()
    (tmp_path / "smg" / "__init__.py").touch()
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    (line,) = failed(new_worker(environment={"PYTHONPATH": os.pathsep.join(paths)}), 2)
    assert re.search(r"--servicer-impl .*'rust' needs smg.servicer.VllmGrpcServer.*install 'smg>=1.12'", line)


def test_a_model_that_does_not_load_ends_the_worker_with_one_error(new_worker, tmp_path, tiny):
    (tmp_path / "config.json").write_text((tiny("qwen3") / "config.json").read_text()[:-20])
    (line,) = failed(new_worker(model=tmp_path), 1)
    assert "the engine did not start" in line
    assert "config.json" in line


@pytest.mark.parametrize("code", [0, 1], ids=["a signal", "the engine core's death"])
def test_an_end_during_the_load_leaves_nothing(new_worker, code):
    worker = new_worker()
    worker.start()
    try:
        wait_until(lambda: engine_cores(worker), START_SECS, "no engine core")
        assert worker.status() == Status.NOT_SERVING
        if code == 0:
            worker.signal(signal.SIGTERM)
        else:
            os.kill(engine_cores(worker)[0], signal.SIGKILL)
        lines = ended(worker, code)
    finally:
        worker.stop()
    assert len(lines) == code
    assert all("EngineCore ended before it was ready with exit code -9" in line for line in lines)


# A worker that serves


def test_two_workers_that_choose_their_ports_at_once_both_serve(new_worker):
    pair = [new_worker() for _ in range(2)]
    for worker in pair:
        worker.command[worker.command.index("--port") + 1] = "0"
        worker.start()
    try:
        for worker in pair:
            served = re.compile(r"\bserving on (127\.0\.0\.1:(\d+))")
            wait_until(lambda worker=worker, served=served: served.search(worker.output()), START_SECS, "not serving")
            worker.address = served.search(worker.output())[1]
        assert pair[0].address != pair[1].address
        for worker in pair:
            with Client(worker.address) as client:
                assert client.complete(max_tokens=3).completion_tokens == 3
            worker.signal(signal.SIGTERM)
        assert [ended(worker, 0) for worker in pair] == [[], []]
    finally:
        for worker in pair:
            worker.stop()


def watched(client: Client) -> Any:
    """A Watch that has said SERVING."""
    watch = client.health.Watch(health_pb2.HealthCheckRequest(), timeout=2 * TIMEOUT)
    assert next(watch).status == Status.SERVING
    return watch


def test_a_terminals_interrupt_ends_an_idle_worker(pool):
    worker = pool.serving()
    with Client(worker.address) as client:
        watch = watched(client)
        os.killpg(worker.pid, signal.SIGINT)
        assert next(watch).status == Status.NOT_SERVING
        assert not ended(worker, 0)


def test_a_drain_lets_a_running_stream_finish_and_ends_with_it(pool):
    worker = pool.serving(drain="3600")
    with Client(worker.address) as client:
        watch = watched(client)
        streams = Streams(client, 1)
        worker.signal(signal.SIGTERM)
        assert next(watch).status == Status.NOT_SERVING
        # This wheel goes on taking calls: whoever asks for health no longer sends them.
        assert client.complete(max_tokens=1).completion_tokens == 1
        ((status, messages),) = streams.ends(TIMEOUT)
        assert not ended(worker, 0)
    assert status == "OK"
    (complete,) = completes(messages)
    assert (complete.finish_reason, complete.completion_tokens) == ("length", LONG)


ENDS = {
    "the drain's end": (0.5, 0),
    "a second signal": (3600, 0),
    "the engine core's death": (5, 1),
    "the engine core's death in a drain": (3600, 1),
}


@pytest.mark.parametrize("end", ENDS)
def test_running_streams_end_as_unavailable(pool, end):
    drain, code = ENDS[end]
    worker = pool.serving(drain=str(drain))
    (core,) = engine_cores(worker)
    with Client(worker.address) as client:
        watch = watched(client)
        streams = Streams(client, 16)
        if end != "the engine core's death":
            worker.signal(signal.SIGTERM)
        if end.endswith("signal"):
            assert next(watch).status == Status.NOT_SERVING
            worker.signal(signal.SIGTERM)
        elif code:
            os.kill(core, signal.SIGKILL)
        ends = streams.ends(10)
        if not end.endswith("signal"):
            assert next(watch).status == Status.NOT_SERVING
        with pytest.raises(grpc.RpcError):
            next(watch)
        lines = ended(worker, code)
    assert {status for status, _ in ends} == {"UNAVAILABLE"}, worker.output()[-3000:]
    assert not any(completes(messages) for _, messages in ends)
    assert len(lines) == code
    assert all("EngineCore ended with exit code -9" in line for line in lines)
