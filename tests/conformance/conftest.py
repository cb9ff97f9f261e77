"""The workers that the conformance suite runs against."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from client import Client
from client_sglang import SglangClient

# By fixture, without `_worker`: the client that speaks the worker's contract.
CLIENTS = {"fake": Client, "vllm": Client, "rust": Client, "fake-sglang": SglangClient}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes `client` on every worker; one marked `contract` on those of that contract."""
    if "client" not in metafunc.fixturenames:
        return
    only = [mark.args[0] for mark in metafunc.definition.iter_markers("contract")]
    kinds = [kind for kind, client in CLIENTS.items() if not only or client.contract in only]
    marks = {kind: () if kind.startswith("fake") else pytest.mark.engine for kind in kinds}
    metafunc.parametrize("client", [pytest.param(kind, marks=marks[kind]) for kind in kinds], indirect=True)


@pytest.fixture
def client(request) -> Iterator[Client]:
    """A client of one of the conformance suite's workers."""
    worker = request.getfixturevalue(f"{request.param.replace('-', '_')}_worker")
    with CLIENTS[request.param](worker.address, request.param, worker) as client:
        yield client
        client.check_empty()
