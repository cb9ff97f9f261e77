"""The published `smg serve` on vLLM, in each of its connection modes: it comes up, serves, and leaves nothing."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from workers import START_SECS, STOP_SECS, SmgServe, alive, descendants

from .helpers import SERVICE, group, wait_until
from .test_router import CHAT, Gateway

pytestmark = pytest.mark.engine

_END_SECS = 10  # for what smg killed, and for helpers that end because their parent did
_REFUSAL_SECS = 60
_POLL_SECS = 0.5  # the router logs each question
_SERVED_BY = {"python": f"serving {SERVICE} on ", "rust": " will be served by VllmGrpcServer of smg"}


@dataclass(frozen=True)
class Mode:
    """How `smg serve` is asked for it, which of our servers answers, and how many sockets it has meanwhile."""

    arguments: tuple[str, ...]
    served_by: str | None
    sockets: int


GRPC = Mode(("--connection-mode", "grpc"), "python", 0)
RUST = Mode(("--connection-mode", "grpc", "--servicer-impl", "rust"), "rust", 2)
# An engine core does not say what it serves: the router has to be told.
ZMQ = Mode(("--connection-mode", "zmq", "--router-model-path", "{model}"), None, 0)


@pytest.fixture(params=[pytest.param(GRPC, id="grpc"), pytest.param(RUST, id="rust"), pytest.param(ZMQ, id="zmq")])
def mode(request) -> Mode:
    return request.param


@pytest.fixture
def folder(tmp_path_factory) -> Path:
    """Where sockets are made: a short path, as the address of a socket has to be."""
    return tmp_path_factory.mktemp("zmq")


@pytest.fixture
def serve(vllm_python, tiny, mode, folder, tmp_path) -> SmgServe:
    model = tiny("qwen3")
    arguments = [argument.format(model=model) for argument in mode.arguments]
    environment = {"SMG_ZMQ_SOCKET_DIR": str(folder)}
    return SmgServe(vllm_python, model, tmp_path / "serve.log", *arguments, environment=environment)


@contextlib.contextmanager
def serving(serve: SmgServe) -> Iterator[Gateway]:
    """The router once its worker serves."""
    serve.start()
    try:
        gateway = Gateway(serve)
        deadline = time.monotonic() + START_SECS
        while not (gateway.ready() == 1 and gateway.models()):
            if not serve.running():
                serve.fail("smg serve ended before it served")
            if time.monotonic() > deadline:
                serve.fail("smg serve does not serve")
            time.sleep(_POLL_SECS)
        (gateway.model,) = gateway.models()
        yield gateway
    finally:
        serve.stop()


def check_answers(gateway: Gateway) -> None:
    assert gateway.call("/health")[0] == 200
    whole = gateway.chat()
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == CHAT["max_tokens"]
    events = gateway.events("/v1/chat/completions", CHAT)
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert len(deltas) > 8
    assert "".join(delta.get("content") or "" for delta in deltas) == choice["message"]["content"] != ""


def sockets(folder: Path) -> list[Path]:
    """The sockets of our worker; those of the router, named after its engine, outlive smg 1.13.0."""
    return list(folder.glob("servicer-*"))


def test_smg_serve_comes_up_answers_and_leaves_nothing(serve, mode, folder):
    with serving(serve) as gateway:
        served = [name for name, line in _SERVED_BY.items() if line in serve.output()]
        assert served == ([mode.served_by] if mode.served_by else [])
        assert len(sockets(folder)) == mode.sockets
        check_answers(gateway)

        worker = serve.worker()
        processes = descendants(serve.pid)
        assert worker in processes
        serve.signal(signal.SIGTERM)
        assert serve.wait(STOP_SECS) == 128 + signal.SIGTERM
        wait_until(lambda: not any(map(alive, processes)) and not group(worker), _END_SECS, "left something behind")
        assert sockets(folder) == []


@pytest.mark.parametrize("mode", [RUST], indirect=True)
def test_smg_serve_refuses_rust_where_vllm_would_not_load_the_plugin(serve):
    serve.environment["VLLM_PLUGINS"] = "none"
    serve.start()
    try:
        assert serve.wait(_REFUSAL_SECS) == 2
        assert "VLLM_PLUGINS='none' hides the plugin 'smg-servicer'" in serve.output()
        assert serve.worker() == 0
    finally:
        serve.stop()
