"""A worker's port with certificates: served with one, and with a CA the client's is required."""

from __future__ import annotations

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from smg_grpc_servicer.hooks.settings import ConfigurationError
from smg_grpc_servicer.serving.health import Health
from smg_grpc_servicer.serving.server import Tls, bind


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A certificate and its key, and the authority that signed it, as PEM files."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    return folder


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


def tls(folder, ca: bool = False) -> Tls:
    return Tls(str(folder / "cert.pem"), str(folder / "key.pem"), str(folder / "ca.pem") if ca else None)


async def test_the_certificate_is_served(pair):
    credentials = grpc.ssl_channel_credentials((pair / "ca.pem").read_bytes())
    assert await check(tls(pair), credentials) == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_with_a_ca_a_client_without_a_certificate_is_rejected(pair):
    authority = (pair / "ca.pem").read_bytes()
    with pytest.raises(grpc.RpcError) as error:
        await check(tls(pair, ca=True), grpc.ssl_channel_credentials(authority))
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    own = (pair / "key.pem").read_bytes(), (pair / "cert.pem").read_bytes()
    known = grpc.ssl_channel_credentials(authority, *own)
    assert await check(tls(pair, ca=True), known) == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_file_that_is_not_there_is_a_configuration_error():
    with pytest.raises(ConfigurationError) as error:
        bind(grpc.aio.server(), "127.0.0.1", 0, Tls("/absent/cert.pem", "/absent/key.pem"))
    assert "ssl" in error.value.lines[0]
