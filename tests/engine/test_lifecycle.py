"""A real worker's life: its start, its health, its drain, its end, and what it leaves behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from client import TIMEOUT, Client, completes
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from workers import START_SECS, VLLM_ENVIRONMENT, VllmWorker

from .helpers import DRAIN, LONG, SERVICE, Pool, Streams, check_ended, engine_cores, wait_until

pytestmark = pytest.mark.engine

LISTEN_SECS = 120  # the imports before a worker listens, on a busy machine
CLOSE_SECS = 15  # our bound on the engine's own shutdown, and a margin

Status = health_pb2.HealthCheckResponse


@pytest.fixture(scope="module")
def new_worker(vllm_python, tiny, tmp_path_factory) -> Callable[..., VllmWorker]:
    folder = tmp_path_factory.mktemp("lifecycle")

    def new(*arguments: str, model: Path | None = None, **options: Any) -> VllmWorker:
        log = folder / f"{len(list(folder.iterdir()))}.log"
        return VllmWorker(vllm_python, model or tiny("qwen3"), log, *arguments, **options)

    return new


@pytest.fixture(scope="module")
def pool(new_worker) -> Iterator[Pool]:
    pool = Pool(new_worker)
    yield pool
    pool.end()


def refused(client: Client) -> tuple[str, str]:
    return client.refused(max_tokens=1)


def test_health_is_answered_before_the_engine_is_ready_and_told_when_it_is(pool):
    worker = pool.starting()
    with (
        grpc.insecure_channel(worker.address, [("grpc.max_reconnect_backoff_ms", 200)]) as channel,
        Client(worker.address) as client,
    ):
        grpc.channel_ready_future(channel).result(LISTEN_SECS)
        health = health_pb2_grpc.HealthStub(channel)
        watches = [health.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("", SERVICE)]
        unknown = health.Watch(health_pb2.HealthCheckRequest(service="nobody"))
        assert [next(watch).status for watch in watches] == [Status.NOT_SERVING] * 2
        assert next(unknown).status == Status.SERVICE_UNKNOWN
        for name in ("", SERVICE):
            assert health.Check(health_pb2.HealthCheckRequest(service=name)).status == Status.NOT_SERVING
        with pytest.raises(grpc.RpcError) as error:
            health.Check(health_pb2.HealthCheckRequest(service="nobody"))
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
        assert refused(client) == ("UNAVAILABLE", "the engine is starting")
        assert "serving vllm.grpc" not in worker.output()

        watchdog = threading.Timer(START_SECS, channel.close)
        watchdog.start()
        assert [next(watch).status for watch in watches] == [Status.SERVING] * 2
        watchdog.cancel()
        listed = health.List(health_pb2.HealthListRequest()).statuses
        assert {name: one.status for name, one in listed.items()} == {"": Status.SERVING, SERVICE: Status.SERVING}
        assert client.complete(max_tokens=3).completion_tokens == 3
        assert unknown.is_active()
        assert all(watch.is_active() for watch in watches)
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
        assert set(services) >= {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


def test_a_taken_port_ends_the_start_before_the_model_loads(pool, new_worker):
    first = pool.serving()
    second = new_worker(port=first.port)
    second.start()
    try:
        assert second.wait(LISTEN_SECS) == 2
    finally:
        second.stop()
    (line,) = [line for line in second.output().splitlines() if " ERROR " in line]
    assert "--port" in line
    assert first.address in line
    assert "Resolved architecture" not in second.output()
    assert first.status() == Status.SERVING


@pytest.mark.parametrize("how", ["a signal to the worker", "Ctrl-C at a terminal"])
def test_a_signal_ends_an_idle_worker_and_tells_its_watchers(pool, how):
    worker = pool.serving()
    with Client(worker.address) as client:
        watch = client.health.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=TIMEOUT)
        assert next(watch).status == Status.SERVING
        if how == "Ctrl-C at a terminal":
            os.killpg(worker.pid, signal.SIGINT)
        else:
            worker.signal(signal.SIGTERM)
        assert [told.status for told in watch] == [Status.NOT_SERVING]
        check_ended(worker, code=0, seconds=CLOSE_SECS)


def test_a_model_that_does_not_load_ends_the_worker_with_one_error(new_worker, tmp_path, tiny):
    (tmp_path / "config.json").write_text((tiny("qwen3") / "config.json").read_text()[:-20])
    worker = new_worker(model=tmp_path)
    worker.start()
    try:
        check_ended(worker, code=1, seconds=LISTEN_SECS)
    finally:
        worker.stop()
    (line,) = [line for line in worker.output().splitlines() if "the engine did not start" in line]
    assert " ERROR " in line
    assert "config.json" in line


LOADING = {
    "as soon as it listens": lambda worker: worker.status() == Status.NOT_SERVING,
    "while the engine core starts": engine_cores,
}


@pytest.mark.parametrize("moment", LOADING)
def test_a_signal_during_the_load_ends_the_worker_and_what_it_started(new_worker, moment):
    worker = new_worker()
    worker.start()
    try:
        wait_until(lambda: LOADING[moment](worker), START_SECS, f"{moment}: never came")
        worker.signal(signal.SIGTERM)
        check_ended(worker, code=0, seconds=6)
    finally:
        worker.stop()


def test_a_drain_lets_a_running_stream_finish_and_refuses_new_calls(pool):
    worker = pool.serving(drain="30")
    with Client(worker.address) as client:
        streams = Streams(client, 1)
        worker.signal(signal.SIGTERM)
        wait_until(lambda: worker.status() == Status.NOT_SERVING, 5, "still serving")
        assert refused(client) == ("UNAVAILABLE", "the worker is shutting down")
        assert not streams.calls[0].done()
        ((status, messages),) = streams.ends(TIMEOUT)
        check_ended(worker, code=0, seconds=CLOSE_SECS)
    assert status == "OK"
    (complete,) = completes(messages)
    assert (complete.finish_reason, complete.completion_tokens) == ("length", LONG)


def test_streams_that_outlast_the_drain_end_as_unavailable(pool):
    worker = pool.serving(drain="0.5")
    with Client(worker.address) as client:
        streams = Streams(client, 32)
        worker.signal(signal.SIGTERM)
        ends = streams.ends(10)
        check_ended(worker, code=0, seconds=CLOSE_SECS)
    assert [status for status, _ in ends] == ["UNAVAILABLE"] * 32
    assert not any(completes(messages) for _, messages in ends)


def test_a_second_signal_ends_a_drain_now(pool):
    worker = pool.serving(drain="30")
    with Client(worker.address) as client:
        streams = Streams(client, 32)
        worker.signal(signal.SIGTERM)
        wait_until(lambda: worker.status() == Status.NOT_SERVING, 5, "still serving")
        assert not any(call.done() for call in streams.calls)
        worker.signal(signal.SIGTERM)
        check_ended(worker, code=0, seconds=4)
        assert {status for status, _ in streams.ends(5)} == {"UNAVAILABLE"}


def test_the_engine_cores_death_ends_every_stream_and_the_worker(pool):
    worker = pool.serving()
    (core,) = engine_cores(worker)
    with Client(worker.address) as client:
        watch = client.health.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT)
        assert next(watch).status == Status.SERVING
        streams = Streams(client, 8)
        os.kill(core, signal.SIGKILL)
        assert {status for status, _ in streams.ends(5)} == {"UNAVAILABLE"}
        assert [told.status for told in watch] == [Status.NOT_SERVING]
        check_ended(worker, code=1, seconds=5)


# Command line

REFUSED = {
    "variables": (
        ("serve", "MODEL", "--grpc"),
        {DRAIN: "abc", "SMG_GRPC_MAX_MESSAGE_BYTES": "-5"},
        [f"{DRAIN}: 'abc' .*number of seconds", "SMG_GRPC_MAX_MESSAGE_BYTES: '-5' .*number of bytes"],
    ),
    "flag": (
        ("serve", "MODEL", "--grpc", "--servicer-impl", "foo"),
        {},
        [r"--servicer-impl \(SMG_VLLM_SERVICER_IMPL\): 'foo' .*python, rust"],
    ),
    "metrics without rust": (
        ("serve", "MODEL", "--grpc", "--metrics-port", "9100"),
        {},
        [r"--metrics-port \(SMG_VLLM_SERVICER_METRICS_PORT\): .*rust"],
    ),
}


def vllm(python: Path, arguments: tuple[str, ...], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run vLLM's command line to its end."""
    return subprocess.run(
        [str(python), "-m", *arguments],
        env=os.environ | VLLM_ENVIRONMENT | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LISTEN_SECS,
        check=False,
    )


HELP = {
    "serve": (("vllm.entrypoints.cli.main", "serve", "--help=all"), "--servicer-impl .*python, rust"),
    "launcher": (("vllm.entrypoints.grpc_server", "--help"), "--servicer-impl "),
}


@pytest.fixture(scope="module")
def command_lines(vllm_python, tiny) -> Iterator[Callable[[str], subprocess.CompletedProcess[str]]]:
    """What each command line above came to; they run two at a time."""
    with ThreadPoolExecutor(2) as pool:
        running = {name: pool.submit(vllm, vllm_python, arguments, {}) for name, (arguments, _) in HELP.items()}
        for case, (arguments, environment, _) in REFUSED.items():
            command = [str(tiny("qwen3")) if argument == "MODEL" else argument for argument in arguments]
            running[case] = pool.submit(vllm, vllm_python, ("vllm.entrypoints.cli.main", *command), environment)
        yield lambda name: running[name].result(2 * LISTEN_SECS)


@pytest.mark.parametrize("case", REFUSED)
def test_a_setting_that_is_not_accepted_ends_the_start_with_a_line_each(command_lines, case):
    done, patterns = command_lines(case), REFUSED[case][2]
    assert done.returncode == 2, done.stdout
    lines = [line for line in done.stdout.splitlines() if "SMG_" in line]
    assert len(lines) == len(patterns), done.stdout
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.search(pattern, line)
    assert "listening on" not in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize("command", HELP)
def test_the_help_names_our_flag(command_lines, command):
    done = command_lines(command)
    assert done.returncode == 0, done.stdout
    assert re.search(HELP[command][1], " ".join(done.stdout.split()))
