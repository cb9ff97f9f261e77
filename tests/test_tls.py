"""A worker's port with certificates: served with one, and with a CA the client's is required."""

from __future__ import annotations

import subprocess

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from smg_grpc_servicer.hooks.settings import ConfigurationError
from smg_grpc_servicer.serving.health import Health
from smg_grpc_servicer.serving.server import Tls, bind


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost "
        "-addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout key.pem -out cert.pem"
    )
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder / "cert.pem", folder / "key.pem"


async def check(tls: Tls, credentials) -> int:
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(Health([]), server)
    address = bind(server, "127.0.0.1", 0, tls)
    await server.start()
    try:
        async with grpc.aio.secure_channel(address, credentials) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
            return answer.status
    finally:
        await server.stop(0)


async def test_the_certificate_is_served(pair):
    certificate, key = pair
    credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
    assert await check(Tls(str(certificate), str(key)), credentials) == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_with_a_ca_a_client_without_a_certificate_is_rejected(pair):
    certificate, key = pair
    tls = Tls(str(certificate), str(key), str(certificate))
    with pytest.raises(grpc.RpcError) as error:
        await check(tls, grpc.ssl_channel_credentials(certificate.read_bytes()))
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    known = grpc.ssl_channel_credentials(certificate.read_bytes(), key.read_bytes(), certificate.read_bytes())
    assert await check(tls, known) == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_file_that_is_not_there_is_a_configuration_error():
    with pytest.raises(ConfigurationError) as error:
        bind(grpc.aio.server(), "127.0.0.1", 0, Tls("/absent/cert.pem", "/absent/key.pem"))
    assert "ssl" in error.value.lines[0]
