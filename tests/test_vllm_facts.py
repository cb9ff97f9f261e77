"""What GetServerInfo says of a configuration, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from smg_grpc_servicer.serving.errors import Precondition
from smg_grpc_servicer.vllm import facts


def transfer(connector: str, *children: str, **own) -> SimpleNamespace:
    extra = {"connectors": [{"kv_connector": name, "engine_id": f"id-{name}"} for name in children]}
    return SimpleNamespace(
        kv_connector=connector, engine_id="own", kv_role="kv_both", kv_connector_extra_config=extra, **own
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, ("", "", "")),
        (transfer("NixlConnector"), ("NixlConnector", "own", "kv_both")),
        (
            transfer("MultiConnector", "NixlConnector", "SharedStorageConnector"),
            ("NixlConnector", "id-NixlConnector", "kv_both"),
        ),
        (
            transfer("MultiConnector", "MoRIIOConnector", "FlexKVConnectorV1"),
            ("FlexKVConnectorV1", "id-FlexKVConnectorV1", "kv_both"),
        ),
        (transfer("MultiConnector", "MoRIIOConnector"), ("MoRIIOConnector", "id-MoRIIOConnector", "kv_both")),
        (transfer("MultiConnector", "NixlConnector", "MooncakeConnector"), ("MultiConnector", "own", "kv_both")),
        (transfer("MultiConnector", "HF3FSConnector"), ("HF3FSConnector", "id-HF3FSConnector", "kv_both")),
    ],
)
def test_pairing_names_the_one_child_that_it_is_about(config, expected):
    assert facts._kv_transfer(config) == expected


@pytest.mark.parametrize(
    ("parser", "in_reasoning", "expected"),
    [("qwen3", False, "after_reasoning"), ("qwen3", True, "first_token"), ("", False, "first_token")],
)
def test_where_a_grammar_starts_follows_the_reasoning_parser(parser: str, in_reasoning: bool, expected: str):
    structured = SimpleNamespace(reasoning_parser=parser, enable_in_reasoning=in_reasoning)
    assert facts._constrained_decoding_start(SimpleNamespace(structured_outputs_config=structured)) == expected


def hub_model(name: str) -> SimpleNamespace:
    return SimpleNamespace(tokenizer=name, tokenizer_revision=None)


def test_a_hub_id_resolves_to_its_local_snapshot(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--org--tiny"
    snapshot = repo / "snapshots" / "0123abc"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0123abc")
    (repo / "blobs").mkdir()
    (repo / "blobs" / "beef").write_text("{}")
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").symlink_to("../../blobs/beef")
    assert facts.tokenizer_directory(hub_model("org/tiny")).samefile(snapshot)
    with pytest.raises(Precondition, match="org/absent"):
        facts.tokenizer_directory(hub_model("org/absent"))


def test_a_directory_is_itself_and_nothing_is_a_precondition(tmp_path):
    assert facts.tokenizer_directory(hub_model(str(tmp_path))) == tmp_path
    with pytest.raises(Precondition):
        facts.tokenizer_directory(hub_model(""))


def test_capacity_is_that_of_one_rank():
    cache = SimpleNamespace(kv_cache_size_tokens=None, num_gpu_blocks=100, block_size=16)
    scheduler = SimpleNamespace(max_num_seqs=7)
    config = SimpleNamespace(cache_config=cache, scheduler_config=scheduler)
    core = SimpleNamespace(engine_ranks_managed=[0, 1])
    assert facts.capacity(config, core).tokens_per_rank == 800
    cache.kv_cache_size_tokens = 900
    assert facts.capacity(config, core).tokens_per_rank == 900
    assert list(facts.capacity(config, core).ranks) == [0, 1]
