"""The other ways to start vLLM's gRPC server, ours taking over and vLLM's own with our servicer in it."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from client import TIMEOUT, Client, chunks, completes, new_id, pb, request
from grpc_health.v1 import health_pb2
from workers import VllmWorker

from .helpers import LONG, SERVICE, Streams, ending, engine_cores, group, wait_until

pytestmark = pytest.mark.engine

SHIM, MODULE = "vllm.entrypoints.grpc_server", "vllm.entrypoints.launchers.grpc_server"
Status = health_pb2.HealthCheckResponse


@pytest.fixture(scope="module")
def new_worker(vllm_python, tiny, tmp_path_factory) -> Callable[..., VllmWorker]:
    folder = tmp_path_factory.mktemp("launchers")

    def new(*launcher: str, **environment: str) -> VllmWorker:
        log = folder / f"{len(list(folder.iterdir()))}.log"
        command = (*launcher, "--model", str(tiny("qwen3")))
        return VllmWorker(vllm_python, tiny("qwen3"), log, launcher=command, environment=environment)

    return new


def launcher_file(python: Path) -> str:
    code = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"
    folder = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    return f"{folder}/entrypoints/launchers/grpc_server.py"


def serves_until_told(worker: VllmWorker) -> None:
    """It serves with ours, as many calls as it is asked, and ends clean."""
    worker.start()
    try:
        worker.wait_serving()
        assert f"serving {SERVICE} on {worker.address}" in worker.output()
        with Client(worker.address) as client:
            assert client.complete(max_tokens=5).completion_tokens == 5
        worker.signal(signal.SIGTERM)
        assert worker.wait(15) == 0
        wait_until(lambda: not group(worker.pid), 3, "left something behind")
    finally:
        worker.stop()


def test_python_m_of_the_old_name_serves_with_ours(new_worker):
    serves_until_told(new_worker("-m", SHIM))


def test_the_launchers_file_serves_with_ours(new_worker, vllm_python):
    serves_until_told(new_worker(launcher_file(vllm_python)))


def test_python_m_of_the_launcher_is_taken_over_by_ours(new_worker):
    worker = new_worker("-m", MODULE)
    worker.start()
    try:
        wait_until(lambda: worker.status() is not None, 120, "nothing listens")
        # vLLM's own launcher listens once its engine is ready.
        assert worker.status() == Status.NOT_SERVING
        assert f"listening on {worker.address}" in worker.output()
    finally:
        worker.stop()


# From Rust

OWN_LAUNCHER = """
import uvloop
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from smg_grpc_servicer.vllm import resolve_servicer_impl, serve_rust


async def serve(args):
    assert resolve_servicer_impl(args) == "rust"
    raise SystemExit(await serve_rust(args))


if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    uvloop.run(serve(AsyncEngineArgs.add_cli_args(parser).parse_args()))
"""


@pytest.mark.parametrize("how", ["vLLM's launcher", "a launcher of one's own"])
def test_the_variable_has_any_launcher_serve_from_rust(new_worker, tmp_path, how):
    own = tmp_path / "launch.py"
    own.write_text(OWN_LAUNCHER)
    launcher = ("-m", SHIM) if how == "vLLM's launcher" else (str(own),)
    worker = new_worker(*launcher, SMG_VLLM_SERVICER_IMPL="Rust")
    with worker.serving(), Client(worker.address) as client:
        assert client.complete(max_tokens=5).completion_tokens == 5
        # The server says SERVING by itself; the worker hears of it a moment later.
        wait_until(lambda: f"serving on {worker.address}" in worker.output(), 5, "not served from Rust")
        worker.signal(signal.SIGTERM)
        assert worker.wait(15) == 0
        wait_until(lambda: not group(worker.pid), 3, "left something behind")


def test_rust_where_the_plugin_is_hidden_ends_the_start_before_the_model_loads(new_worker):
    worker = new_worker("-m", MODULE, SMG_VLLM_SERVICER_IMPL="rust", VLLM_PLUGINS="none")
    worker.start()
    try:
        assert worker.wait(60) == 2
    finally:
        worker.stop()
    (line,) = [line for line in worker.output().splitlines() if "error:" in line]
    assert "VLLM_PLUGINS='none'" in line
    assert "smg-servicer" in line


# vLLM's own launcher, where VLLM_PLUGINS keeps our plugin out


@pytest.fixture(scope="module")
def stock(new_worker) -> Iterator[VllmWorker]:
    worker = new_worker("-m", MODULE, VLLM_PLUGINS="none")
    with worker.serving():
        yield worker


@pytest.fixture
def client(stock) -> Iterator[Client]:
    with Client(stock.address) as client:
        yield client


def test_the_stock_launcher_serves_our_servicer(stock, client):
    assert f"serving {SERVICE} on" not in stock.output()
    whole = client.complete(max_tokens=20)
    assert (whole.finish_reason, whole.completion_tokens) == ("length", 20)
    messages = client.generate(max_tokens=20, stream=True)
    assert [token for chunk in chunks(messages) for token in chunk.token_ids] == list(whole.output_ids)
    assert [list(one.output_ids) for one in completes(messages)] == [list(whole.output_ids)]
    assert client.refused("")[0] == "INVALID_ARGUMENT"
    info = client.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=TIMEOUT)
    assert (info.server_type, info.active_requests) == ("vllm-grpc", 0)
    assert info.uptime_seconds > 0


def test_the_stock_launchers_health_is_right(client):
    for name in ("", SERVICE):
        check = client.health.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT)
        assert check.status == Status.SERVING
    with pytest.raises(grpc.RpcError) as error:
        client.health.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=TIMEOUT)
    assert error.value.code() is grpc.StatusCode.NOT_FOUND
    assert client.stub.HealthCheck(pb.HealthCheckRequest(), timeout=TIMEOUT).healthy


def test_an_abort_ends_its_call_under_the_stock_launcher(client):
    name = new_id()
    call = client.stub.Generate(request(name, max_tokens=LONG, stream=True), timeout=TIMEOUT)
    next(call)
    client.abort(name)
    assert ending(call) == "abort"
    client.check_empty()


def test_the_engines_death_is_told_under_the_stock_launcher(stock, client):
    """The last of the stock launcher's tests: it leaves a dead engine."""
    watch = client.health.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=TIMEOUT)
    assert next(watch).status == Status.SERVING
    streams = Streams(client, 4)
    (core,) = engine_cores(stock)
    os.kill(core, signal.SIGKILL)
    assert {status for status, _ in streams.ends(5)} == {"UNAVAILABLE"}
    assert next(watch).status == Status.NOT_SERVING
    assert client.refused()[0] == "UNAVAILABLE"
    assert not client.stub.HealthCheck(pb.HealthCheckRequest(), timeout=TIMEOUT).healthy


def test_vllm_finds_our_servicers_under_the_names_and_signatures_it_uses():
    from smg_grpc_servicer.vllm.health_servicer import VllmHealthServicer
    from smg_grpc_servicer.vllm.servicer import VllmEngineServicer

    assert list(inspect.signature(VllmEngineServicer).parameters) == ["async_llm", "start_time"]
    assert list(inspect.signature(VllmHealthServicer).parameters) == ["async_llm"]
