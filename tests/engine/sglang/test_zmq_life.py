"""How headless SGLang starts and ends: exit codes, the scheduler's last word, what is refused before a model loads."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from workers import START_SECS, STOP_SECS, alive, descendants

from ..helpers import wait_until
from ..test_router import CHAT, Gateway
from .zmq_front_end import SglangHeadless, SglangServe, new_id, sampling

pytestmark = pytest.mark.engine

_END_SECS = 10


@contextlib.contextmanager
def connected(headless: SglangHeadless) -> Iterator[SglangHeadless]:
    with contextlib.closing(headless):
        headless.connect()
        yield headless


def check_ended(headless: SglangHeadless, code: int) -> None:
    """It ends by itself with that code and leaves no process."""
    processes = descendants(headless.pid)
    assert headless.wait(STOP_SECS) == code
    wait_until(lambda: not any(map(alive, processes)), _END_SECS, "left something behind")


def scheduler(headless: SglangHeadless) -> int:
    names = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in descendants(headless.pid)}
    (found,) = (pid for pid, name in names.items() if name.startswith("sglang::sched"))
    return found


def test_a_signal_ends_it_cleanly(sglang_python, tiny, tmp_path):
    with connected(SglangHeadless(sglang_python, tiny("qwen3"), tmp_path / "log")) as headless:
        headless.finish(headless.add(new_id()))
        processes = descendants(headless.pid)
        headless.signal(signal.SIGTERM)
        assert headless.wait(STOP_SECS) == 0
        assert not any(map(alive, processes))


def test_a_scheduler_that_fails_says_so_and_ends_it(sglang_python, tiny, tmp_path):
    environment = {"SGLANG_TEST_CRASH_AFTER_STREAM_OUTPUTS": "3"}
    with connected(SglangHeadless(sglang_python, tiny("qwen3"), tmp_path / "log", environment=environment)) as headless:
        headless.add(new_id(), stream=True)
        headless.read(lambda: headless.dead, "the scheduler does not say that it died")
        check_ended(headless, 1)


def test_embeddings_are_served_and_a_killed_scheduler_ends_it(sglang_python, tiny, tmp_path):
    with connected(SglangHeadless(sglang_python, tiny("qwen3"), tmp_path / "log", "--is-embedding")) as headless:
        served, again, long, generation, empty = (new_id() for _ in range(5))
        for rid, prompt in ((served, [5, 6, 7]), (again, [5, 6, 7]), (long, [5] * 4095), (empty, [])):
            headless.send(["TokenizedEmbeddingReqInput", rid, None, "text", prompt, None, None, sampling()])
        headless.add(generation)
        ends = headless.finish(served, again)
        assert [end.reason for end in ends] in (["stop", "stop"], ["length", "length"])
        first, second = (headless.rows[rid][0]["embedding"] for rid in (served, again))
        assert len(first) == 64
        assert first == second
        assert "input_ids: 4095 tokens" in headless.refused(long)
        assert "input_ids: is empty" in headless.refused(empty)
        assert "this model does not generate" in headless.refused(generation)
        os.kill(scheduler(headless), signal.SIGKILL)
        check_ended(headless, 1)


@pytest.mark.parametrize(
    ("arguments", "environment", "line"),
    [
        (("--zmq-handshake-address", "127.0.0.1:1"), {}, "--zmq-handshake-address: '127.0.0.1:1' is not tcp://"),
        (("--zmq-handshake-address", "tcp://127.0.0.1:1", "--zmq-engine-index", "-1"), {}, "--zmq-engine-index: -1"),
        (
            ("--zmq-handshake-address", "tcp://127.0.0.1:1"),
            {"SGLANG_PLUGINS": "smg-servicer"},
            "SGLANG_PLUGINS='smg-servicer' hides the plugin 'smg-zmq'",
        ),
        (("--zmq-handshake-address", "tcp://127.0.0.1:1", "--model-path", "x"), {}, "--no-such-flag"),
        ((), {}, "--zmq-handshake-address"),
    ],
)
def test_what_cannot_work_ends_the_start_with_2(sglang_python, tiny, arguments, environment, line):
    command = [str(sglang_python), "-m", "smg_grpc_servicer.sglang.headless", *arguments, "--no-such-flag"]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert line in done.stderr
    assert "Traceback" not in done.stderr


def test_the_router_serves_it_as_smg_serve_starts_it(sglang_python, tiny, tmp_path, tmp_path_factory):
    model = tiny("qwen3")
    environment = {"SMG_ZMQ_SOCKET_DIR": str(tmp_path_factory.mktemp("zmq"))}
    serve = SglangServe(sglang_python, model, tmp_path / "serve.log", environment=environment)
    serve.start()
    try:
        gateway = Gateway(serve)
        wait_until(lambda: serve.running() and gateway.ready() == 1 and gateway.models(), START_SECS, serve.output())
        (gateway.model,) = gateway.models()
        whole = gateway.chat()
        (choice,) = whole["choices"]
        assert choice["finish_reason"] == "length"
        assert whole["usage"]["completion_tokens"] == CHAT["max_tokens"]
        events = gateway.events("/v1/chat/completions", CHAT)
        deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == choice["message"]["content"] != ""
        processes = descendants(serve.pid)
        serve.signal(signal.SIGTERM)
        serve.wait(STOP_SECS)
        wait_until(lambda: not any(map(alive, processes)), _END_SECS, "left something behind")
    finally:
        serve.stop()
