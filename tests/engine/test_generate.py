"""What only a real vLLM with a reasoning parser, speculation and a third party's plugin can show."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import tokenizers
from client import Client, chunks, completes, new_id
from smg_grpc_proto import vllm_engine_pb2 as pb
from workers import VllmWorker

pytestmark = pytest.mark.engine

CHOICE = pb.ChoiceConstraint(choices=["yes", "no"])
REPEATED = [5, 6, 7, 8] * 20

PLUGIN = """
import json, os
from smg_grpc_servicer.hooks import hookimpl

@hookimpl
def smg_admit(engine, call, peer):
    if call.request_id.startswith("stranger"):
        raise PermissionError(f"{peer.split(':')[0]} may not use {engine}")

@hookimpl
def smg_finished(engine, call, usage, status):
    with open(os.environ["ENDED"], "a") as file:
        file.write(json.dumps([call.request_id, usage.completion_tokens, status]) + chr(10))
"""


@pytest.fixture(scope="module")
def thinking_model(tiny, tmp_path_factory) -> Path:
    """The tiny Qwen3 whose special tokens open and close a thought."""
    folder = tmp_path_factory.mktemp("thinking")
    for file in tiny("qwen3").iterdir():
        data = file.read_bytes()
        if file.name.startswith("tokenizer"):
            data = data.replace(b"<|im_start|>", b"<think>").replace(b"<|endoftext|>", b"</think>")
        (folder / file.name).write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def third_party(tmp_path_factory) -> Path:
    """A folder with an installed plugin of somebody else."""
    folder = tmp_path_factory.mktemp("third-party")
    (folder / "gatekeeper.py").write_text(PLUGIN)
    info = folder / "gatekeeper-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gatekeeper\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[smg_grpc_servicer]\ngatekeeper = gatekeeper\n")
    return folder


@pytest.fixture(scope="module")
def worker(vllm_python, thinking_model, third_party, tmp_path_factory):
    folder = tmp_path_factory.mktemp("thinking-worker")
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    worker = VllmWorker(
        vllm_python,
        thinking_model,
        folder / "vllm.log",
        *("--reasoning-parser", "deepseek_r1", "--speculative-config", json.dumps(speculation)),
        *("--per-request-spec-decode-metrics", "summary"),
        environment={
            "PYTHONPATH": str(third_party),
            "ENDED": str(folder / "ended"),
            "SMG_PAIRING_PROTOCOL": " v7 ",
            "VLLM_LOGGING_LEVEL": "WARNING",
        },
    )
    with worker.serving():
        yield worker


@pytest.fixture
def client(worker):
    with Client(worker.address) as client:
        yield client
        client.check_empty()


@pytest.fixture(scope="module")
def decode(thinking_model):
    tokenizer = tokenizers.Tokenizer.from_file(str(thinking_model / "tokenizer.json"))
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)


def test_a_grammar_waits_for_the_thoughts_end_unless_told_to_start_at_once(client: Client, decode):
    free = client.complete(choice=CHOICE, ignore_eos=False, max_tokens=20)
    assert decode(free.output_ids) not in ("yes", "no")
    bound = client.complete(choice=CHOICE, ignore_eos=False, max_tokens=20, grammar_from_first_token=True)
    assert decode(bound.output_ids) in ("yes", "no")
    assert bound.finish_reason == "stop"


def test_server_info_says_where_a_grammar_starts_and_how_to_pair(client: Client):
    info = client.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert info.engine_reasoning_parser == "deepseek_r1"
    assert info.constrained_decoding_start == "after_reasoning"
    assert info.pairing_protocol == "v7"
    assert info.block_size > 0
    assert info.model_dtype == "torch.float32"
    assert ":" in info.shm_namespace_id


def test_loads_do_not_depend_on_the_log_level(client: Client):
    call = client.stub.Generate(request := make(client.long), timeout=60)
    for _ in range(3):
        next(call)
    (load,) = client.stub.GetLoads(pb.GetLoadsRequest()).loads
    assert load.num_running_reqs == 1
    assert 0 < load.token_usage < 1
    assert load.num_used_tokens > 0
    client.abort(request.request_id)
    list(call)


def make(tokens: int) -> pb.GenerateRequest:
    from client import request

    return request(stream=True, max_tokens=tokens)


def test_speculation_is_counted_and_keeps_logprobs_beside_their_tokens(client: Client):
    messages = client.generate(prompt=REPEATED, max_tokens=200, stream=True, logprobs=1)
    (complete,) = completes(messages)
    assert complete.spec_draft_tokens > 0
    assert complete.spec_accepted_tokens <= complete.spec_draft_tokens
    assert list(complete.output_logprobs.token_ids) == list(complete.output_ids)
    assert [t for part in chunks(messages) for t in part.token_ids] == list(complete.output_ids)


def test_a_stop_string_ends_the_choice_where_it_is_complete(client: Client, decode):
    whole = decode(client.complete(max_tokens=60).output_ids)
    stop = whole[20:23]
    for stream in (False, True):
        complete = completes(client.generate(max_tokens=60, stop=[stop], stream=stream))[0]
        text = decode(complete.output_ids)
        assert complete.matched_stop_str == stop
        assert complete.finish_reason == "stop"
        assert stop in text
        assert stop not in decode(list(complete.output_ids)[:-1])


@pytest.mark.parametrize(
    "constraint",
    [
        {"json_schema": json.dumps({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]})},
        {"regex": "(ab){2}"},
        {"grammar": 'root ::= "left" | "right"'},
        {"choice": CHOICE},
        {"json_object": True},
        {
            "structural_tag": json.dumps(
                {"type": "structural_tag", "format": {"type": "const_string", "value": "fixed"}}
            )
        },
    ],
    ids=lambda constraint: next(iter(constraint)),
)
def test_every_kind_of_constraint_constrains(client: Client, decode, constraint):
    complete = client.complete(**constraint, ignore_eos=False, max_tokens=120, grammar_from_first_token=True)
    text = decode(complete.output_ids)
    if "json_schema" in constraint and complete.finish_reason == "stop":
        assert isinstance(json.loads(text)["a"], bool)
    elif "json_object" in constraint:
        assert text.lstrip().startswith("{")
    elif "json_schema" not in constraint:
        assert text in {"abab", "left", "right", "yes", "no", "fixed"}


@pytest.mark.parametrize(
    ("field", "value"), [("json_schema", "{"), ("regex", "("), ("grammar", "nonsense"), ("structural_tag", "{}")]
)
def test_a_constraint_that_does_not_compile_is_refused_by_name(client: Client, field: str, value: str):
    code, sentence = client.refused(**{field: value})
    assert code == "INVALID_ARGUMENT"
    assert sentence.startswith(f"sampling_params.{field}: ")


def test_a_third_partys_plugin_refuses_and_hears_of_every_end(client: Client, worker: VllmWorker):
    request_id = new_id()
    client.complete(request_id)
    assert client.refused("stranger-1") == ("PERMISSION_DENIED", "ipv4 may not use vllm")
    ended = [json.loads(line) for line in Path(worker.environment["ENDED"]).read_text().splitlines()]
    assert [request_id, 8, "OK"] in ended


def test_the_plugin_adds_next_to_nothing_to_a_process_that_only_imports_vllm(vllm_python):
    code = (
        "import sys, vllm\n"
        "from importlib.metadata import entry_points\n"
        "entry, = [e for e in entry_points(group='vllm.general_plugins') if e.name == 'smg-servicer']\n"
        "before = set(sys.modules)\n"
        "entry.load()()\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    out = subprocess.run([str(vllm_python), "-c", code], capture_output=True, text=True, check=True).stdout
    added = out.splitlines()[-1].split()
    assert all(name.startswith("smg_grpc_servicer") for name in added)
    assert len(added) <= 5
