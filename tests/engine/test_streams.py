"""Many calls at once on one real vLLM: their tokens, their ends, and what is left behind."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from client import TIMEOUT, Client, chunks, completes, new_id, pb, request
from grpc_health.v1 import health_pb2

from .helpers import LONG, ending, wait_until

pytestmark = pytest.mark.engine


@pytest.fixture
def client(vllm_worker) -> Iterator[Client]:
    with Client(vllm_worker.address) as client:
        yield client
        client.check_empty()


def prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts of different lengths, below a block of the prefix cache."""
    numbers = random.Random(seed)
    return [[numbers.randrange(5, 2000) for _ in range(numbers.randrange(1, 60))] for _ in range(count)]


def tokens(messages: Sequence[pb.GenerateResponse]) -> list[int]:
    """The tokens of a streamed call with one choice, which its chunks and its complete agree on."""
    (complete,) = completes(messages)
    streamed = [token for chunk in chunks(messages) for token in chunk.token_ids]
    assert streamed == list(complete.output_ids)
    assert complete.completion_tokens == len(streamed)
    return streamed


def test_64_concurrent_streams_equal_the_same_prompts_one_by_one(client):
    asked = prompts(64, seed=1)
    alone = [list(client.complete(prompt=prompt, max_tokens=40).output_ids) for prompt in asked]
    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(lambda prompt: client.generate(prompt=prompt, max_tokens=40, stream=True), asked))
    differing = [number for number, messages in enumerate(together) if tokens(messages) != alone[number]]
    assert not differing


class Storm:
    """Long calls, each ended in its own way after a random number of chunks and a random pause."""

    def __init__(self, client: Client, calls: int) -> None:
        self.client = client
        self.calls = calls
        self.endings: Counter[tuple[str, str]] = Counter()
        self.lock = threading.Lock()

    def run(self) -> None:
        numbers = random.Random(2)
        plan = [
            (kind, numbers.choice((0, 0, 1, 2, 5, 20)), numbers.uniform(0, 0.1), [number % 1900 + 5, 7, 9])
            for number, kind in enumerate(("cancel", "abort", "deadline", "channel") * (self.calls // 4))
        ]
        with ThreadPoolExecutor(32) as pool:
            for done in [pool.submit(self.one, *item) for item in plan]:
                done.result(TIMEOUT)

    def one(self, kind: str, after_chunks: int, pause: float, prompt: list[int]) -> None:
        asked = request(prompt=prompt, max_tokens=LONG, stream=True)
        timeout = TIMEOUT if kind != "deadline" else 0.01 + pause * 5
        with contextlib.ExitStack() as stack:
            own = stack.enter_context(Client(self.client.address)) if kind == "channel" else self.client
            call = own.stub.Generate(asked, timeout=timeout)
            with contextlib.suppress(grpc.RpcError):
                for _ in range(after_chunks):
                    next(call)
            threading.Event().wait(pause)
            if kind == "cancel":
                call.cancel()
            elif kind == "abort":
                self.client.abort(asked.request_id)
            elif kind == "channel":
                own.channel.close()
            end = ending(call)
        with self.lock:
            self.endings[kind, end] += 1


def test_a_cancel_storm_leaves_nothing_in_the_worker_or_the_engine(client):
    before = list(client.complete(max_tokens=30).output_ids)
    storm = Storm(client, 200)
    storm.run()
    client.check_empty()
    assert list(client.complete(max_tokens=30).output_ids) == before
    # An abort that overtook its call named nobody: that call ran to its end.
    aborted = storm.endings.pop(("abort", "abort")) + storm.endings.pop(("abort", "length"), 0)
    assert aborted == 50
    assert storm.endings == {
        ("cancel", "CANCELLED"): 50,
        ("deadline", "DEADLINE_EXCEEDED"): 50,
        ("channel", "CANCELLED"): 50,
    }


def test_an_abort_ends_exactly_the_named_call_among_ids_that_are_prefixes_of_each_other(client):
    name = new_id()
    ids = [name, name + "-1", name + "1", name[:-1], "0_" + name, name + "-1-1"]
    want = 400
    calls = {i: client.stub.Generate(request(i, stream=True, max_tokens=want), timeout=TIMEOUT) for i in ids}
    for call in calls.values():
        next(call)
    client.abort(name)
    ends = {request_id: list(call)[-1].complete for request_id, call in calls.items()}
    assert ends.pop(name).finish_reason == "abort"
    assert {(end.finish_reason, end.completion_tokens) for end in ends.values()} == {("length", want)}


def test_an_abort_of_ids_that_nobody_has_ends_nothing(client):
    name = new_id()
    call = client.stub.Generate(request(name, stream=True, max_tokens=300), timeout=TIMEOUT)
    next(call)
    client.abort("", name[:-1], name + "0", f"cmpl-{name}", "*")
    assert list(call)[-1].complete.finish_reason == "length"


def test_an_id_is_usable_again_as_soon_as_its_complete_arrived(client):
    request_id = new_id()
    for _ in range(100):
        call = client.stub.Generate(request(request_id, max_tokens=1), timeout=TIMEOUT)
        assert next(call).complete.finish_reason == "length"


def test_an_id_is_usable_again_after_an_abort(client):
    request_id = new_id()
    for _ in range(20):
        call = client.stub.Generate(request(request_id, max_tokens=LONG, stream=True), timeout=TIMEOUT)
        next(call)
        client.abort(request_id)
        assert ending(call) == "abort"


def test_a_live_duplicate_is_refused_and_the_first_run_untouched(client):
    want = client.complete(max_tokens=500).output_ids
    request_id = new_id()
    first = client.stub.Generate(request(request_id, max_tokens=500, stream=True), timeout=TIMEOUT)
    messages = [next(first)]
    status, sentence = client.refused(request_id, prompt=[9, 9, 9], max_tokens=5)
    assert status == "ALREADY_EXISTS"
    assert request_id in sentence
    assert client.active() == 1
    messages += first
    assert tokens(messages) == list(want)


def test_a_slow_consumer_gets_every_token_in_fewer_chunks(client, vllm_worker):
    asked = 800
    want = client.complete(max_tokens=asked).output_ids
    # A stream window of a few chunks, so that the consumer's pace reaches the worker.
    options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    with grpc.insecure_channel(vllm_worker.address, options) as channel:
        stub = client.stub.__class__(channel)
        call = stub.Generate(request(max_tokens=asked, stream=True), timeout=TIMEOUT)
        messages = [next(call)]

        def engine_done() -> bool:
            client.generate(max_tokens=1)  # its step carries the scheduler's count
            return client.running() == 0

        wait_until(engine_done, 60, "the engine still runs the slow consumer's call")
        assert client.active() == 1
        messages += call
    assert tokens(messages) == list(want)
    assert len(chunks(messages)) < asked / 2
    counts = [chunk.completion_tokens for chunk in chunks(messages)]
    assert counts == sorted(set(counts))
    assert counts[-1] == asked


def test_pings_of_idle_clients_are_no_abuse(client, vllm_worker):
    options = [
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    lost = threading.Event()
    states: list[list[grpc.ChannelConnectivity]] = []

    def follow(channel: grpc.Channel) -> None:
        seen: list[grpc.ChannelConnectivity] = []
        states.append(seen)

        def note(state: grpc.ChannelConnectivity) -> None:
            seen.append(state)
            if state is not grpc.ChannelConnectivity.READY and grpc.ChannelConnectivity.READY in seen:
                lost.set()

        channel.subscribe(note, try_to_connect=True)

    with (
        grpc.insecure_channel(vllm_worker.address, options) as idle,
        grpc.insecure_channel(vllm_worker.address, options) as watching,
    ):
        for channel in (idle, watching):
            grpc.channel_ready_future(channel).result(10)
            follow(channel)
        watch = client.health.__class__(watching).Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        lost.wait(12)
        assert not lost.is_set(), states
        assert watch.is_active()
        watch.cancel()
