"""Workers that the suites share: the core over a fake engine, and real vLLM."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import environments
import models
from differences import difference
from fake_engine import RANGES, FakeEngine
from workers import VllmWorker

from smg_grpc_servicer.serving.contract import Contract
from smg_grpc_servicer.serving.engine import Range
from smg_grpc_servicer.wire.contracts.sglang import SglangContract
from smg_grpc_servicer.wire.contracts.vllm import VllmContract

# A run that gates a change takes the same examples each time.
hypothesis.settings.register_profile("ci", derandomize=True, print_blob=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "contract(name): about the named contract alone")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Expect what is listed as different on the Rust worker, and nothing else."""
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if parameters.get("client") == "rust" or "rust" in getattr(item, "fixturenames", ()):
            listed = difference(item.originalname, item.name)
            if listed is not None:
                item.add_marker(pytest.mark.xfail(reason=listed.topic, strict=True, run=listed.runs))


_made: dict[str, Path] = {}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """`tiny(name)`: the folder of a tiny model, made once."""

    def make(name: str) -> Path:
        if name not in _made:
            _made[name] = models.load().write(name, tmp_path_factory.mktemp("models") / name)
        return _made[name]

    return make


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The python of the vLLM environment with this checkout."""
    return environments.ensure("vllm")


# Under `auto` an engine keeps the grammar backend of its first constrained request: which one that is depends on the
# tests that run.
SHARED_ARGUMENTS = ("--max-logprobs", "-1", "--structured-outputs-config.backend", "xgrammar")


@pytest.fixture(scope="session")
def vllm_worker(vllm_python, tiny, tmp_path_factory) -> Iterator[VllmWorker]:
    """A real vLLM on the tiny Qwen3, for tests that leave it as they found it."""
    log = tmp_path_factory.mktemp("worker") / "vllm.log"
    worker = VllmWorker(vllm_python, tiny("qwen3"), log, *SHARED_ARGUMENTS)
    with worker.serving():
        yield worker


@pytest.fixture(scope="session")
def rust_worker(vllm_python, tiny, tmp_path_factory) -> Iterator[VllmWorker]:
    """The same, served from Rust."""
    log = tmp_path_factory.mktemp("worker") / "rust.log"
    with VllmWorker(vllm_python, tiny("qwen3"), log, *SHARED_ARGUMENTS, "--servicer-impl", "rust").serving() as worker:
        yield worker


class FakeWorker:
    """The servicer over a FakeEngine, served from a thread's event loop on a real socket."""

    def __init__(self, engine: FakeEngine, contract: Contract) -> None:
        from smg_grpc_servicer.serving.health import Health
        from smg_grpc_servicer.serving.server import server_options
        from smg_grpc_servicer.serving.servicer import Servicer

        self.engine = engine
        self.loop = asyncio.new_event_loop()
        started = threading.Event()

        async def main() -> None:
            from grpc_health.v1 import health_pb2_grpc

            health = Health([contract.service])
            self.servicer = Servicer(contract, health)
            self.server = grpc.aio.server(options=server_options(-1))
            contract.register(self.servicer, self.server)
            health_pb2_grpc.add_HealthServicer_to_server(health, self.server)
            self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
            await self.server.start()
            self.servicer.serve(engine)
            started.set()
            await self.server.wait_for_termination()

        self.task = asyncio.run_coroutine_threadsafe(main(), self.loop)
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        assert started.wait(10), self.task.exception()

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.stop(0), self.loop).result(10)
        asyncio.run_coroutine_threadsafe(self.servicer.close(), self.loop).result(10)
        self.task.result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)


def sglang_engine(**limits: Any) -> FakeEngine:
    """A fake engine that takes what SGLang takes."""
    ranges = RANGES | {"repetition_penalty": Range(0, 2, open_low=True), "logit_bias": Range(-1e9, 1e9)}
    return FakeEngine(**{"pace": 0.001, "ranges": ranges, "min_max_tokens": 0} | limits)


@pytest.fixture(scope="session")
def fake_worker() -> Iterator[FakeWorker]:
    worker = FakeWorker(FakeEngine(pace=0.001), VllmContract())
    yield worker
    worker.stop()


@pytest.fixture(scope="session")
def fake_sglang_worker() -> Iterator[FakeWorker]:
    """The same core behind the SGLang contract."""
    worker = FakeWorker(sglang_engine(), SglangContract())
    yield worker
    worker.stop()


@pytest.fixture
def sglang() -> Iterator[FakeWorker]:
    """A fake SGLang worker of the test's own, to be changed at will."""
    worker = FakeWorker(sglang_engine(), SglangContract())
    yield worker
    worker.stop()
