"""The life of a worker that is served from Rust: as a process, over stand-ins for the wheel and over the wheel."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from client import Client, request
from grpc_health.v1 import health_pb2
from workers import alive

PREFIX = "SMG_TEST"
DRAIN, CEILING = f"{PREFIX}_DRAIN_SECS", f"{PREFIX}_STARTUP_CEILING_SECS"
SECONDS = 30.0  # for anything that takes one on a busy machine
WHEELS = ("Wheel1120", "Wheel1130", "WheelNewer")


class Program:
    """tests/rust_program.py as a process group, and the lines it writes."""

    def __init__(self, folder: Path, environment: dict[str, str], case: dict[str, Any]) -> None:
        self.sockets = folder / "sockets"
        variables = {name: value for name, value in os.environ.items() if name != "RUST_LOG"}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "rust_program.py"), json.dumps(case)],
            env=variables | {"SMG_ZMQ_SOCKET_DIR": str(self.sockets)} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self.news = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.news:
                self.lines.append(line.rstrip())
                self.news.notify_all()
        with self.news:
            self.lines.append("@closed null")
            self.news.notify_all()

    def until(self, text: str, count: int = 1) -> str:
        """The line, at the `count`-th time, that has a text."""

        def found() -> list[str]:
            return [line for line in self.lines if text in line]

        with self.news:
            assert self.news.wait_for(lambda: len(found()) >= count, SECONDS), (text, self.lines)
            return found()[count - 1]

    def said(self, what: str) -> list[Any]:
        """What was said under a name."""
        return [json.loads(line.partition(" ")[2]) for line in self.lines if line.startswith(f"@{what} ")]

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def address(self) -> str:
        return self.until("serving on ").rpartition(" ")[2]

    def errors(self) -> list[str]:
        return [line for line in self.lines if re.search(r"\bERROR\b|Traceback", line)]

    def ends(self, code: int, seconds: float = SECONDS, errors: int = 0) -> list[str]:
        """Its ERROR lines, once it has ended in time and has left nothing behind."""
        assert self.process.wait(seconds) == code, self.lines
        self.until("@closed")
        assert not [pid for pids in self.said("engines") for pid in pids if alive(pid)]
        assert not self.sockets.exists() or not list(self.sockets.iterdir())
        assert len(self.errors()) == errors, self.lines
        return self.errors()


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Program]]:
    """`start(variables, **case)`: a program that ends with the test."""
    programs = []

    def start(environment: dict[str, str] | None = None, **case: Any) -> Program:
        folder = tmp_path / str(len(programs))
        folder.mkdir()
        programs.append(Program(folder, environment or {}, case))
        return programs[-1]

    yield start
    for program in programs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.process.pid, signal.SIGKILL)
        program.process.wait(SECONDS)


# A start


@pytest.mark.parametrize("server", WHEELS)
def test_an_idle_worker_serves_on_the_port_that_it_names_and_ends_at_a_signal(start, server):
    program = start(server=server)
    host, _, port = program.address().rpartition(":")
    socket.create_connection((host, int(port)), SECONDS).close()
    program.signal()
    program.ends(0)
    assert program.said("serving")[0] is False
    events = [line.split()[0] for line in program.lines if line.startswith("@")]
    assert events.index("@serving") < events.index("@stop") < events.index("@close")


ARGUMENTS = {
    "Wheel1120": {"engine_startup_timeout_secs": 70.0},
    "Wheel1130": {
        "engine_startup_timeout_secs": 60.0,
        "engine_startup_ceiling_secs": 70.0,
        "kv_events_endpoint": "tcp://127.0.0.1:1",
    },
}


@pytest.mark.parametrize("server", ARGUMENTS)
def test_a_wheel_is_given_what_its_signature_has_and_the_rest_is_dropped_silently(start, server):
    program = start({f"{PREFIX}_STARTUP_TIMEOUT_SECS": "60", CEILING: "70"}, server=server)
    program.until("serving on")
    assert program.said("server") == [{"engine_count": 1} | ARGUMENTS[server]]
    assert not [line for line in program.lines if "WARNING" in line]


def test_a_newer_wheel_is_given_the_operators_values(start):
    names = ("SILENCE_TIMEOUT_SECS", "PREFILL_TOKENS_PER_SEC", "METRICS_PORT", "METRICS_HOST")
    values = dict(zip((f"{PREFIX}_{name}" for name in names), ("7", "8", "9", "::1"), strict=True))
    program = start(values | {"SMG_GRPC_MAX_MESSAGE_BYTES": "10"}, server="WheelNewer")
    program.until("serving on")
    assert program.said("silence") == [[7.0, 8]]
    assert program.said("metrics") == [["[::1]:9", 10]]


def test_two_workers_that_start_at_once_share_nothing(start):
    programs = [start(engines=["waits", "waits"]) for _ in range(2)]
    assert len({program.address() for program in programs}) == 2
    for program in programs:
        program.signal()
    for program in programs:
        program.ends(0)


def test_serving_waits_for_the_relay_of_kv_events(start):
    program = start(server="WheelNewer")
    program.until("serving on")
    events = [line for line in program.lines if line.startswith(("@set_ready", "@subscribed", "@alive"))]
    assert events[0] == "@set_ready false"
    assert events[-4:] == ["@subscribed? null"] * 3 + ["@set_ready true"]


def test_a_signal_ends_the_wait_for_the_relay(start):
    program = start(server="WheelNewer", subscribed=False)
    program.until("@subscribed?")
    program.signal()
    program.ends(0, 10)
    assert program.said("set_ready") == [False]
    assert "serving on" not in "".join(line for line in program.lines if line.startswith("INFO serving"))


def test_a_server_is_told_that_the_engine_lives_until_it_is_ready(start):
    loading, serving = start(ready=False), start()
    serving.until("serving on")
    told = len(serving.said("alive"))
    loading.until("@alive", told + 5)
    assert len(serving.said("alive")) == told


# A start that fails

FAILURES = {
    "the configuration": ({}, {"plan": "no such model"}, "the engine did not start: ValueError: no such model"),
    "the launch": ({}, {"launch": "no memory"}, "the engine did not start: RuntimeError: no memory"),
    "the constructor": ({}, {"constructor": "bad"}, "the Rust server did not start: bad"),
    "the server": ({}, {"last_error": "handshake: in use"}, "the Rust server failed: handshake: in use"),
    "an engine": ({}, {"engines": ["ends"]}, "ended before it was ready with exit code 3"),
    "one of two engines": ({}, {"engines": ["waits", "ends"], "ready": False}, "before it was ready with exit code 3"),
    "the ceiling": ({CEILING: "0.5"}, {"ready": False}, f"was not ready within 0.5 s ({CEILING})"),
    "the wheel's own ceiling": ({CEILING: "0.5"}, {"server": "smg"}, "0.5|500ms"),
}


@pytest.mark.parametrize("what", FAILURES)
def test_what_fails_in_a_start_ends_it_with_one_error(start, what):
    environment, case, sentence = FAILURES[what]
    program = start(environment, **({"ready": False} | case))
    (line,) = program.ends(1, errors=1)
    assert any(part in line for part in sentence.split("|"))
    assert line.startswith("ERROR ")


def test_a_bind_that_fails_is_a_configuration_error(start):
    (line,) = start(bind="Address already in use").ends(2, errors=1)
    assert re.search(r"--host/--port: cannot listen on 127.0.0.1:\d+: .*Address already in use", line)


def test_all_that_a_start_needs_and_cannot_have_is_said_before_the_engine_is_looked_at(start, tmp_path):
    (tmp_path / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as port, socket.create_server(("127.0.0.1", 0)) as handshake:
        environment = {f"{PREFIX}_HANDSHAKE_PORT": str(handshake.getsockname()[1])}
        program = start(environment | {"SMG_ZMQ_SOCKET_DIR": str(tmp_path / "file")}, port=port.getsockname()[1])
        lines = program.ends(2, errors=3)
    for line, name in zip(lines, ("--host/--port", f"{PREFIX}_HANDSHAKE_PORT", "SMG_ZMQ_SOCKET_DIR"), strict=True):
        assert name in line
    assert not program.said("plan")


def test_the_operators_rust_log_wins_and_a_wrong_one_ends_the_start(start):
    good, bad = start({"RUST_LOG": "h2=debug"}, level="WARNING"), start({"RUST_LOG": "h2=bad"})
    (line,) = bad.ends(2, errors=1)
    assert "RUST_LOG: 'h2=bad'" in line
    good.until("@alive")
    assert good.said("tracing") == ["h2=debug"]


MOMENTS = {
    "while the configuration is read": ({"plan": "slow"}, "@plan"),
    "while the engine loads": ({"ready": False, "engines": ["stubborn"]}, "@stubborn"),
    "while the engine loads behind the wheel": ({"server": "smg"}, "@engines"),
}


@pytest.mark.parametrize("group", [False, True], ids=["worker", "group"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_during_the_start_ends_it_cleanly(start, moment, group):
    case, line = MOMENTS[moment]
    program = start(**case)
    program.until(line)
    if group:
        os.killpg(program.process.pid, signal.SIGTERM)
    else:
        program.signal()
    program.ends(0, 15)


# A drain


def test_a_drain_ends_with_the_last_call(start):
    program = start({DRAIN: "3600"}, active=[2, 1, 0])
    program.until("serving on")
    program.signal()
    program.ends(0)
    assert program.said("active") == [2, 1, 0]


def test_a_drain_has_an_end(start):
    program = start({DRAIN: "0.3"}, active=[1])
    program.until("serving on")
    program.signal()
    program.ends(0)
    assert program.said("stop")


def test_a_second_signal_ends_a_drain_and_an_engine_that_will_not(start):
    program = start({DRAIN: "3600"}, active=[1], engines=["stubborn"])
    program.until("@stubborn")
    program.until("serving on")
    program.signal()
    program.until("@active")
    program.signal()
    program.ends(0, 10)
    assert program.said("stop")


def test_a_server_that_does_not_stop_is_left_behind(start):
    program = start(hangs=True)
    program.until("serving on")
    program.signal()
    program.ends(0, 15)


@pytest.mark.parametrize("draining", [False, True], ids=["serving", "draining"])
def test_an_engine_that_is_killed_ends_the_worker_with_one_error(start, draining):
    program = start({DRAIN: "3600"}, active=[1])
    program.until("serving on")
    if draining:
        program.signal()
        program.until("@active")
    ((pid,),) = program.said("engines")
    os.kill(pid, signal.SIGKILL)
    (line,) = program.ends(1, 10, errors=1)
    assert "ended with exit code -9" in line


# Over the wheel


class Call:
    """A long stream in a thread; made once it has its first token."""

    def __init__(self, client: Client, tokens: int) -> None:
        self.first, self.count = threading.Event(), 0
        self.end = ""
        self.thread = threading.Thread(target=self._read, args=(client, tokens), daemon=True)
        self.thread.start()
        assert self.first.wait(SECONDS)

    def _read(self, client: Client, tokens: int) -> None:
        try:
            for message in client.stub.Generate(request(max_tokens=tokens, stream=True), timeout=2 * SECONDS):
                self.count += 1
                self.first.set()
                self.end = message.complete.finish_reason
        except grpc.RpcError as error:
            self.end = error.code().name
        self.first.set()

    def ended(self, seconds: float = 5.0) -> str:
        self.thread.join(seconds)
        assert not self.thread.is_alive()
        return self.end


@contextlib.contextmanager
def called(program: Program, tokens: int, count: int = 1) -> Iterator[tuple[list[Call], Any]]:
    """Streams at a worker that serves, and a Watch that has said so."""
    with Client(program.address()) as client:
        watch = client.health.Watch(health_pb2.HealthCheckRequest(), timeout=2 * SECONDS)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        yield [Call(client, tokens) for _ in range(count)], watch


def wheel(start: Callable[..., Program], drain: float) -> Program:
    return start({DRAIN: str(drain)}, server="smg", engines=["core"])


def test_the_wheels_drain_lets_a_stream_finish_and_ends_with_it(start):
    program = wheel(start, 3600)
    with called(program, 300) as ((call,), watch):
        program.signal()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert call.ended(SECONDS) == "length"
        program.ends(0, 10)


ENDS: dict[str, tuple[float, Callable[[Program], None], int]] = {
    "the drain's end": (0.3, lambda program: program.signal(), 0),
    "a second signal": (3600, lambda program: twice(program), 0),
    "the engine's death": (3600, lambda program: os.kill(program.said("engines")[0][0], signal.SIGKILL), 1),
}


def twice(program: Program) -> None:
    program.signal()
    program.until("draining")
    program.signal()


@pytest.mark.parametrize("end", ENDS)
def test_the_wheels_streams_end_as_unavailable(start, end):
    drain, do, code = ENDS[end]
    program = wheel(start, drain)
    with called(program, 4000, 16) as (calls, watch):
        do(program)
        assert {call.ended() for call in calls} == {"UNAVAILABLE"}, "\n".join(program.lines)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        program.ends(code, 10, errors=code)
    assert not [line for line in program.lines if "Broken pipe" in line or "stands in" in line]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_everybody_ends_an_idle_worker_cleanly(start, number):
    program = wheel(start, 3600)
    program.until("serving on")
    os.killpg(program.process.pid, number)
    program.ends(0, 10)
