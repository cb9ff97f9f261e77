"""A multimodal model whose worker takes no media yet: text is served, the facts are there, media is refused."""

from __future__ import annotations

import pytest
from client import Client
from smg_grpc_proto import vllm_engine_pb2 as pb
from workers import VllmWorker

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def client(vllm_python, tiny, tmp_path_factory):
    log = tmp_path_factory.mktemp("multimodal") / "vllm.log"
    worker = VllmWorker(vllm_python, tiny("qwen2vl"), log, "--limit-mm-per-prompt", '{"image": 3, "video": 1}')
    with worker.serving(), Client(worker.address) as client:
        yield client


def test_text_is_served(client: Client):
    assert client.complete(max_tokens=6).completion_tokens == 6
    assert client.complete(prompt="hello there", max_tokens=3).completion_tokens == 3


def test_facts_name_what_the_encoder_takes(client: Client):
    assert client.stub.GetModelInfo(pb.GetModelInfoRequest()).supports_vision
    info = client.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert info.mm_item_limits == "image=3,video=1"
    assert info.multimodal_encoder_dtype == "float32"
    assert info.mm_encoder_budget > 0
    assert not info.mm_processor


def test_media_is_refused_not_dropped(client: Client):
    refs = pb.MediaRefs(items=[pb.MediaRef(url="data:image/png;base64,AA==")])
    assert client.refused(media_refs=refs)[0] == "UNIMPLEMENTED"
