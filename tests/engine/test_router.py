"""The published SMG router in front of real vLLM workers, asked as an OpenAI client would."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from client import TIMEOUT, Client, pb
from workers import Router, SmgServe, VllmWorker

from .helpers import wait_until

pytestmark = pytest.mark.engine

CHAT = {"messages": [{"role": "user", "content": "hello there"}], "temperature": 0, "max_tokens": 24}


class Gateway:
    """The router's HTTP side."""

    def __init__(self, router: Router | SmgServe) -> None:
        self.router = router
        self.model = ""

    def call(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
        data = json.dumps({"model": self.model} | body).encode() if body is not None else None
        asked = urllib.request.Request(self.router.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=TIMEOUT) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        status, text = self.call(path, body)
        assert status == 200, text
        return json.loads(text)

    def chat(self, **fields: Any) -> dict[str, Any]:
        return self.ask("/v1/chat/completions", CHAT | fields)

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream, which must end as the protocol says."""
        status, text = self.call(path, body | {"stream": True, "stream_options": {"include_usage": True}})
        assert status == 200, text
        *events, last = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
        assert last == "[DONE]"
        return [json.loads(event) for event in events]

    def models(self) -> list[str]:
        status, text = self.call("/v1/models")
        return [model["id"] for model in json.loads(text)["data"]] if status == 200 else []

    def ready(self) -> int:
        """How many workers the router has that serve."""
        status, text = self.call("/workers")
        return sum(worker["is_healthy"] for worker in json.loads(text)["workers"]) if status == 200 else 0


def start(router: Router, workers: int) -> Gateway:
    router.start()
    gateway = Gateway(router)
    wait_until(lambda: gateway.ready() == workers and gateway.models(), 60, f"the router is not ready: {router.log}")
    (gateway.model,) = gateway.models()
    return gateway


@pytest.fixture(scope="module")
def new_gateway(tiny, tmp_path_factory) -> Iterator[Callable[[VllmWorker], Gateway]]:
    """`new_gateway(worker)`: a router in front of a worker."""
    folder = tmp_path_factory.mktemp("router")
    with contextlib.ExitStack() as stack:

        def new(worker: VllmWorker) -> Gateway:
            log = folder / f"{len(list(folder.iterdir()))}.log"
            router = Router([worker.address], tiny("qwen3"), log)
            stack.callback(router.stop)
            return start(router, 1)

        yield new


@pytest.fixture(scope="module", params=["vllm", "rust"])
def worker(request) -> VllmWorker:
    """A worker served from Python, and one served from Rust."""
    return request.getfixturevalue(f"{request.param}_worker")


served_from_python = pytest.mark.parametrize("worker", ["vllm"], indirect=True)


@pytest.fixture(scope="module")
def gateway(new_gateway, worker) -> Gateway:
    return new_gateway(worker)


@pytest.fixture
def client(worker) -> Iterator[Client]:
    with Client(worker.address) as client:
        yield client
        client.check_empty()


def test_the_router_is_healthy_and_names_the_workers_model(gateway, client):
    assert gateway.call("/health")[0] == 200
    info = client.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=TIMEOUT)
    assert gateway.models() == [info.served_model_name]


def test_a_chat_completion_says_the_same_streamed_and_not(gateway, client):
    whole = gateway.chat()
    (choice,) = whole["choices"]
    usage = whole["usage"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"]
    assert usage["completion_tokens"] == CHAT["max_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]

    events = gateway.events("/v1/chat/completions", CHAT)
    deltas = [event["choices"][0] for event in events if event["choices"]]
    assert "".join(delta["delta"].get("content") or "" for delta in deltas) == choice["message"]["content"]
    assert [delta["finish_reason"] for delta in deltas if delta["finish_reason"]] == ["length"]
    assert len(deltas) > 8
    (counted,) = [event["usage"] for event in events if event.get("usage")]
    assert counted["completion_tokens"] == usage["completion_tokens"]
    assert counted["prompt_tokens"] == usage["prompt_tokens"]


def test_a_completion_says_the_same_streamed_and_not(gateway, client):
    body = {"prompt": "def main(", "max_tokens": 16, "temperature": 0}
    whole = gateway.ask("/v1/completions", body)
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 16
    streamed = [choice for event in gateway.events("/v1/completions", body) for choice in event["choices"]]
    assert "".join(part["text"] for part in streamed) == choice["text"]


def test_two_choices_differ_and_are_counted(gateway, client):
    whole = gateway.chat(n=2, temperature=1, ignore_eos=True)
    texts = {choice["index"]: choice["message"]["content"] for choice in whole["choices"]}
    assert texts.keys() == {0, 1}
    assert texts[0] != texts[1]
    assert whole["usage"]["completion_tokens"] == 2 * CHAT["max_tokens"]
    events = gateway.events("/v1/chat/completions", CHAT | {"n": 2, "temperature": 1})
    ends = [choice["index"] for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert sorted(ends) == [0, 1]


def test_a_stop_string_ends_the_text_before_it(gateway, client):
    text = gateway.chat()["choices"][0]["message"]["content"]
    words = text.split()
    stop = next(word for word in words[2:] if text.find(word) > 0 and word.isascii())
    (choice,) = gateway.chat(stop=[stop])["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == text[: text.find(stop)]
    deltas = [event["choices"][0] for event in gateway.events("/v1/chat/completions", CHAT | {"stop": [stop]})[:-1]]
    assert "".join(delta["delta"].get("content") or "" for delta in deltas) == text[: text.find(stop)]


def test_a_request_that_does_not_fit_is_an_error_and_the_next_is_answered(gateway, client):
    status, text = gateway.call("/v1/chat/completions", CHAT | {"max_tokens": 100_000})
    assert 400 <= status < 600
    assert json.loads(text)["error"]["message"]
    assert gateway.chat()["choices"]


@served_from_python
def test_the_error_of_a_request_that_does_not_fit_has_our_sentence(gateway, client):
    _, text = gateway.call("/v1/chat/completions", CHAT | {"max_tokens": 100_000})
    assert "exceed the context of 2048" in json.loads(text)["error"]["message"]


def test_a_client_that_leaves_in_the_middle_of_a_stream_leaves_nothing_behind(gateway, client):
    connection = http.client.HTTPConnection("127.0.0.1", gateway.router.port, timeout=TIMEOUT)
    body = CHAT | {"model": gateway.model, "max_tokens": 1900, "stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200
    answer.read(600)
    assert client.active() == 1
    answer.close()
    connection.close()
    wait_until(lambda: client.active() == 0, 2.5, "the call goes on without its client")
    client.check_empty()


def test_a_worker_served_from_rust_says_what_one_served_from_python_says(new_gateway, vllm_worker, rust_worker):
    answers = [
        new_gateway(worker).chat(logprobs=True, top_logprobs=2)["choices"] for worker in (vllm_worker, rust_worker)
    ]
    assert answers[0][0]["message"]["content"]
    assert answers[0] == answers[1]


@pytest.fixture
def second(vllm_python, tiny, tmp_path) -> Iterator[VllmWorker]:
    worker = VllmWorker(vllm_python, tiny("qwen3"), tmp_path / "second.log")
    with worker.serving():
        yield worker


def received(client: Client) -> float:
    return client.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=TIMEOUT).last_receive_timestamp


class Load:
    """Chat requests one after the other in four threads, until told to stop."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.statuses: list[int] = []  # as the requests ended
        self.done = threading.Event()
        self.pool = ThreadPoolExecutor(4)
        self.threads = [self.pool.submit(self._ask) for _ in range(4)]

    def _ask(self) -> None:
        while not self.done.is_set():
            self.statuses.append(self.gateway.call("/v1/chat/completions", CHAT)[0])

    def stop(self) -> None:
        self.done.set()
        self.pool.shutdown()
        for thread in self.threads:
            thread.result()


@served_from_python
def test_two_workers_share_the_load_and_one_carries_on_when_the_other_is_killed(client, second, gateway):
    added = gateway.call("/workers", {"url": f"grpc://{second.address}"})
    assert added[0] in (200, 201, 202), added
    wait_until(lambda: gateway.ready() == 2, 30, "the router did not take the second worker")
    with Client(second.address) as other:
        before = received(client), received(other)
        for _ in range(6):
            gateway.chat()
        assert received(client) > before[0]
        assert received(other) > before[1]

    load = Load(gateway)
    try:
        wait_until(lambda: len(load.statuses) >= 12, 30, "no requests end")
        assert set(load.statuses) == {200}
        os.killpg(second.pid, signal.SIGKILL)
        killed = len(load.statuses)
        # The router notices, and from then on every request succeeds.
        wait_until(lambda: len(load.statuses) > killed + 40 and set(load.statuses[-40:]) == {200}, 60, "still failing")
    finally:
        load.stop()
    failed = [status for status in load.statuses if status != 200]
    assert len(failed) <= 20, failed
    for _ in range(5):
        started = time.monotonic()
        assert gateway.chat()["usage"]["completion_tokens"] == CHAT["max_tokens"]
        assert time.monotonic() - started < 10
