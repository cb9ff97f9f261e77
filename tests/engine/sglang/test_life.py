"""A real SGLang worker's life: its start, its health, its drain, its end, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from client import TIMEOUT, completes
from client_sglang import SglangClient, pb
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from workers import SGLANG_ENVIRONMENT, START_SECS, Router, SglangWorker, descendants

from ..helpers import check_ended, title, wait_until
from ..test_router import start as start_gateway

pytestmark = pytest.mark.engine

DRAIN = "SMG_SGLANG_SERVICER_DRAIN_SECS"
LISTEN_SECS = 120  # the imports before a worker listens, on a busy machine
CLOSE_SECS = 20
LONG = 1500  # tokens: seconds for one stream of the tiny model

Status = health_pb2.HealthCheckResponse


def schedulers(worker: SglangWorker) -> list[int]:
    return [pid for pid in descendants(worker.pid) if title(pid).startswith("sglang::scheduler")]


@contextlib.contextmanager
def started(worker: SglangWorker) -> Iterator[SglangWorker]:
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()


def streams(client: SglangClient, count: int, tokens: int = LONG) -> list[Any]:
    """Streamed calls that have their first token."""
    calls = [client.start(prompt=[number + 5, 7], stream=True, max_tokens=tokens) for number in range(count)]
    for call in calls:
        next(call)
    return calls


def end_of(call: Any) -> tuple[str, list[Any]]:
    """The status and the messages of a call."""
    messages: list[Any] = []
    try:
        messages.extend(call)
    except grpc.RpcError as error:
        return error.code().name, messages
    return "OK", messages


def test_it_is_not_serving_until_it_is_and_drains_when_it_is_told_to_end(new_worker, tiny, tmp_path):
    worker = new_worker(environment={DRAIN: "60"})
    with started(worker), SglangClient(worker.address) as client:
        with grpc.insecure_channel(worker.address, [("grpc.max_reconnect_backoff_ms", 200)]) as channel:
            grpc.channel_ready_future(channel).result(LISTEN_SECS)
            health = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest(service=client.service))
            assert next(watch).status == Status.NOT_SERVING
            assert client.refused() == ("UNAVAILABLE", "the engine is starting")
            watchdog = threading.Timer(START_SECS, channel.close)
            watchdog.start()
            assert next(watch).status == Status.SERVING
            watchdog.cancel()
            names = set(ProtoReflectionDescriptorDatabase(channel).get_services())
            assert names >= {client.service, "grpc.health.v1.Health"}

            second = new_worker(port=worker.port)
            with started(second):
                assert second.wait(LISTEN_SECS) == 2
            assert worker.address in second.output()
            assert not schedulers(second)

            router = Router([worker.address], tiny("qwen3"), tmp_path / "router.log")
            try:
                answer = start_gateway(router, 1).chat(max_tokens=12)
                assert answer["usage"]["completion_tokens"] == 12
            finally:
                router.stop()

            (call,) = streams(client, 1, tokens=300)
            worker.signal(signal.SIGTERM)
            assert next(watch).status == Status.NOT_SERVING
            assert client.refused() == ("UNAVAILABLE", "the worker is shutting down")
            status, messages = end_of(call)
            assert completes(messages), status
            assert (status, completes(messages)[0].completion_tokens) == ("OK", 300)
        check_ended(worker, code=0, seconds=CLOSE_SECS)
    assert "Traceback" not in worker.output()


def test_silent_schedulers_are_unhealthy_and_dead_ones_end_the_worker(new_worker):
    worker = new_worker(environment={"SGLANG_HEALTH_CHECK_TIMEOUT": "2"})
    with worker.serving(), SglangClient(worker.address) as client:

        def healthy() -> Any:
            return client.stub.HealthCheck(pb.HealthCheckRequest(), timeout=TIMEOUT)

        (scheduler,) = schedulers(worker)
        assert healthy().healthy
        calls = streams(client, 4)
        assert healthy().healthy  # a busy scheduler answers no probe, but it speaks
        os.kill(scheduler, signal.SIGSTOP)
        answer = healthy()
        assert (answer.healthy, "schedulers" in answer.message) == (False, True)
        os.kill(scheduler, signal.SIGCONT)
        wait_until(lambda: healthy().healthy, TIMEOUT, "it does not recover")

        os.kill(scheduler, signal.SIGKILL)
        assert {end_of(call)[0] for call in calls} == {"UNAVAILABLE"}
        check_ended(worker, code=1, seconds=CLOSE_SECS)
    assert f"scheduler process {scheduler} ended" in worker.output()


def test_a_signal_during_the_load_ends_the_worker_and_what_it_started(new_worker):
    worker = new_worker()
    with started(worker):
        wait_until(lambda: len(descendants(worker.pid)) > 1, START_SECS, "no scheduler was started")
        worker.signal(signal.SIGTERM)
        check_ended(worker, code=0, seconds=CLOSE_SECS)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    return folder


def test_sglang_serve_with_certificates_embeds(new_worker, sglang_python, certificates):
    names = {"--ssl-certfile": "cert.pem", "--ssl-keyfile": "key.pem", "--ssl-ca-certs": "ca.pem"}
    flags = [part for flag, name in names.items() for part in (flag, str(certificates / name))]
    worker = new_worker(
        *("--is-embedding", *flags),
        launcher=(str(sglang_python.parent / "sglang"), "serve"),
    )
    files = [(certificates / name).read_bytes() for name in ("ca.pem", "key.pem", "cert.pem")]
    with started(worker), SglangClient(worker.address) as client:
        channel = grpc.secure_channel(worker.address, grpc.ssl_channel_credentials(*files))
        stub = client.stub_class(channel)
        health = health_pb2_grpc.HealthStub(channel)

        def serves() -> bool:
            assert worker.running(), worker.output()[-3000:]
            with contextlib.suppress(grpc.RpcError):
                return bool(health.Check(health_pb2.HealthCheckRequest(), timeout=2).status == Status.SERVING)
            return False

        wait_until(serves, START_SECS, "the worker does not serve")

        def embed(*token_ids: int, **fields: Any) -> Any:
            request = pb.EmbedRequest(request_id="e", tokenized=pb.TokenizedInput(input_ids=token_ids), **fields)
            return stub.Embed(request, timeout=TIMEOUT)

        answer = embed(2, 100, 200, 300, 3)
        assert answer.embedding_dim == len(answer.embedding) == 64
        assert answer.prompt_tokens == 5
        for refused in ((), (5, 2048), (5,) * 4096):
            with pytest.raises(grpc.RpcError) as error:
                embed(*refused)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert stub.HealthCheck(pb.HealthCheckRequest(), timeout=TIMEOUT).healthy
        assert list(embed(2, 100, 200, 300, 3).embedding) == pytest.approx(list(answer.embedding), abs=1e-5)
        with pytest.raises(grpc.RpcError) as error:  # no certificate
            client.complete()
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        channel.close()


REFUSED = {
    "variable": ({DRAIN: "abc"}, (), DRAIN),
    "flag": ({}, ("--servicer-impl", "foo"), "SMG_SGLANG_SERVICER_IMPL"),
    "rust": ({}, ("--servicer-impl", "rust"), "not in this release"),
    "one of two files": ({}, ("--ssl-keyfile-password", "x", "--ssl-certfile", "/dev/null"), "--ssl-"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_setting_that_is_not_accepted_ends_the_start(sglang_python, tiny, tmp_path, case):
    environment, arguments, word = REFUSED[case]
    command = [str(sglang_python), "-m", "sglang.launch_server", "--model-path", str(tiny("qwen3")), "--device", "cpu"]
    done = subprocess.run(
        [*command, "--smg-grpc-mode", *arguments],
        env=os.environ | SGLANG_ENVIRONMENT | environment,
        cwd=tmp_path,  # the checkout's own metadata would hide the environment's
        capture_output=True,
        text=True,
        timeout=LISTEN_SECS,
        check=False,
    )
    assert done.returncode == (2 if case != "one of two files" else 1), done.stderr
    assert word in done.stderr
