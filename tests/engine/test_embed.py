"""Embed on a real vLLM with a pooling model."""

from __future__ import annotations

import math
from collections.abc import Iterator

import grpc
import pytest
from client import TIMEOUT, Client, new_id, pb
from workers import VllmWorker

pytestmark = pytest.mark.engine

TEXT = (2, 100, 200, 300, 3)  # [CLS] ... [SEP]


@pytest.fixture(scope="module")
def client(vllm_python, tiny, tmp_path_factory) -> Iterator[Client]:
    log = tmp_path_factory.mktemp("embed") / "vllm.log"
    worker = VllmWorker(vllm_python, tiny("minilm"), log, "--runner", "pooling", "--max-model-len", "512")
    with worker.serving(), Client(worker.address) as client:
        yield client


def embed(client: Client, token_ids: tuple[int, ...] = TEXT, request_id: str | None = None) -> pb.EmbedResponse:
    message = pb.EmbedRequest(request_id=new_id() if request_id is None else request_id)
    message.tokenized.input_ids.extend(token_ids)
    return client.stub.Embed(message, timeout=TIMEOUT)


def refused(client: Client, *args: object, **options: object) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as error:
        embed(client, *args, **options)  # type: ignore[arg-type]
    return error.value.code().name, error.value.details()


def test_an_embedding_has_the_models_dimension_and_length_one(client):
    answer = embed(client)
    assert answer.embedding_dim == len(answer.embedding) == 64
    assert answer.prompt_tokens == len(TEXT)
    assert math.hypot(*answer.embedding) == pytest.approx(1, abs=1e-5)


def test_an_embedding_depends_on_its_input_alone(client):
    first, other = embed(client), embed(client, (2, 400, 500, 3))
    assert list(embed(client).embedding) == pytest.approx(list(first.embedding), abs=1e-6)
    assert math.dist(first.embedding, other.embedding) > 0.01


@pytest.mark.parametrize(
    ("token_ids", "words"),
    [((), "is empty"), ((2, 2048, 3), "2048"), ((2, 2**32 - 1, 3), "4294967295"), ((5,) * 513, "513")],
    ids=["empty", "first token outside", "largest number", "too long"],
)
def test_an_input_that_the_model_cannot_take_is_refused(client, token_ids, words):
    status, sentence = refused(client, token_ids)
    assert status == "INVALID_ARGUMENT"
    assert "tokenized.input_ids" in sentence
    assert words in sentence
    assert embed(client).embedding_dim == 64


def test_an_empty_request_id_is_refused(client):
    status, sentence = refused(client, request_id="")
    assert status == "INVALID_ARGUMENT"
    assert "request_id" in sentence


def test_a_full_context_embeds(client):
    assert embed(client, (5,) * 512).prompt_tokens == 512


def test_an_embedding_model_does_not_generate(client):
    status, sentence = client.refused()
    assert status == "UNIMPLEMENTED"
    assert "does not generate" in sentence


def test_model_info_says_that_it_does_not_generate(client):
    info = client.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=TIMEOUT)
    assert not info.is_generation
    assert (info.model_type, info.vocab_size, info.max_context_length) == ("bert", 2048, 512)


def test_nothing_is_left_live(client):
    for _ in range(3):
        embed(client)
    assert client.active() == 0
