"""vLLM's own publisher on what we configure by default: events live and replayed, a port for each rank."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from workers import VLLM_ENVIRONMENT

pytestmark = pytest.mark.engine

RANKS = 2
END = (-1).to_bytes(8, "big", signed=True)
SECONDS = 60

# Publishes a batch of each rank for every line that it reads.
PUBLISHERS = """
import json, sys
from vllm.distributed.kv_events import BlockStored, EventPublisherFactory, KVEventBatch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from smg_grpc_servicer.hooks.settings import resolve
from smg_grpc_servicer.vllm.kv_events import KV_EVENTS, endpoints, publish_by_default

args = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(["--data-parallel-size", sys.argv[1]])
publish_by_default(args, resolve([KV_EVENTS], args, {}))
config = args.kv_events_config
publishers = [EventPublisherFactory.create(config, rank) for rank in range(int(sys.argv[1]))]
print("endpoints", json.dumps(endpoints(config)), flush=True)
for number, _ in enumerate(sys.stdin):
    for rank, publisher in enumerate(publishers):
        stored = BlockStored([number + 1], None, [rank, number], 2, None, "GPU", None)
        publisher.publish(KVEventBatch(ts=1.5, events=[stored]))
for publisher in publishers:
    publisher.shutdown()
"""


@dataclass
class Publishers:
    """The publishers of every rank, in a process of vLLM's environment."""

    process: subprocess.Popen[str]
    endpoint: str
    replay_endpoint: str
    topic: str

    def publish(self) -> None:
        """A batch of each rank."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@contextlib.contextmanager
def publishing(python: Path, folder: Path) -> Iterator[Publishers]:
    log = folder / "vllm.log"
    with open(log, "w") as stderr:
        process = subprocess.Popen(
            [str(python), "-c", PUBLISHERS, str(RANKS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=folder,
            env=os.environ | VLLM_ENVIRONMENT | {"VLLM_LOGGING_STREAM": "ext://sys.stderr"},
        )
    try:
        assert process.stdout is not None
        found = next((line for line in process.stdout if line.startswith("endpoints ")), None)
        assert found is not None, log.read_text()
        yield Publishers(process, *json.loads(found.removeprefix("endpoints ")))
        process.communicate(timeout=SECONDS)
        assert process.returncode == 0, log.read_text()
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def publishers(vllm_python, tmp_path_factory) -> Iterator[Publishers]:
    with publishing(vllm_python, tmp_path_factory.mktemp("kv_events")) as publishers:
        yield publishers


@pytest.fixture
def connect() -> Iterator[Any]:
    """`connect(type, endpoint, rank)`: a socket on a rank's port."""
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context())

        def new(kind: int, endpoint: str, rank: int) -> zmq.Socket:
            address, _, port = endpoint.rpartition(":")
            sock = stack.enter_context(context.socket(kind))
            sock.linger = 0
            sock.rcvtimeo = SECONDS * 1000
            sock.connect(f"{address}:{int(port) + rank}")
            return sock

        yield new


def live(publishers: Publishers, sock: zmq.Socket) -> tuple[bytes, int, bytes]:
    """Topic, sequence number and payload of the first batch that arrives; those before the subscription are lost."""
    sock.subscribe(publishers.topic)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        publishers.publish()
        if sock.poll(100):
            topic, sequence, payload = sock.recv_multipart()
            return topic, int.from_bytes(sequence, "big"), payload
    raise AssertionError("nothing was published")


def replayed(sock: zmq.Socket, start: int) -> dict[int, bytes]:
    """Payloads by sequence number from `start` on."""
    sock.send_multipart([b"", start.to_bytes(8, "big")])
    batches: dict[int, bytes] = {}
    while True:
        empty, _, sequence, payload = sock.recv_multipart()
        assert empty == b""
        if sequence == END:
            return batches
        batches[int.from_bytes(sequence, "big")] = payload


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_is_received_live_and_replayed_from_its_beginning(publishers: Publishers, connect, rank: int):
    topic, sequence, payload = live(publishers, connect(zmq.SUB, publishers.endpoint, rank))
    assert topic == publishers.topic.encode()
    timestamp, [event], published_rank = msgspec.msgpack.decode(payload)
    assert (timestamp, published_rank) == (1.5, rank)
    assert (event["type"], event["block_hashes"], event["token_ids"]) == (
        "BlockStored",
        [sequence + 1],
        [rank, sequence],
    )

    history = replayed(connect(zmq.DEALER, publishers.replay_endpoint, rank), 0)
    assert list(history) == list(range(len(history)))
    assert history[sequence] == payload
    assert {msgspec.msgpack.decode(batch)[2] for batch in history.values()} == {rank}


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_replay_starts_where_it_is_asked_to(publishers: Publishers, connect, rank: int):
    _, sequence, _ = live(publishers, connect(zmq.SUB, publishers.endpoint, rank))
    assert min(replayed(connect(zmq.DEALER, publishers.replay_endpoint, rank), sequence)) == sequence
