"""What only a real SGLang shows: adapters, logit processors, hidden states, its sidecar, its own refusals."""

from __future__ import annotations

import collections
import json
import random
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from client import TIMEOUT, chunks, completes, new_id
from client_sglang import SglangClient, pb
from smg_grpc_proto.generated import common_pb2 as common
from workers import SglangWorker, free_port

pytestmark = pytest.mark.engine

ALWAYS_SEVEN = """
import sys
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
class AlwaysSeven(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        logits[:] = -float("inf")
        logits[:, 7] = 0.0
        return logits
sys.stdout.write(AlwaysSeven.to_str())
"""


@pytest.fixture(scope="module")
def worker(new_worker, adapters, unpinned) -> Iterator[SglangWorker]:
    """A worker with everything on."""
    worker = new_worker(
        *("--enable-lora", "--lora-paths", f"first={adapters[0]}", "--lora-backend", "torch_native"),
        *(
            "--max-lora-rank",
            "8",
            "--lora-target-modules",
            "o_proj",
            "--max-loras-per-batch",
            "2",
            "--max-loaded-loras",
            "2",
        ),
        *("--enable-custom-logit-processor", "--return-hidden-states-mode", "full", "--enable-metrics"),
        *("--smg-http-sidecar-port", str(free_port()), "--api-key", "hush-hush", "--max-queued-requests", "100"),
        environment={"SMG_PAIRING_PROTOCOL": " v7 ", "PYTHONPATH": str(unpinned)},
    )
    with worker.serving():
        yield worker


@pytest.fixture
def client(worker) -> Iterator[SglangClient]:
    with SglangClient(worker.address) as client:
        yield client
        client.check_empty()


def refusal(method: Any, request: Any) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as error:
        method(request, timeout=TIMEOUT)
    return error.value.code().name, error.value.details()


# LoRA


def loaded(client: SglangClient) -> dict[str, str]:
    answer = client.stub.ListLoadedLoRAAdapters(pb.ListLoadedLoRAAdaptersRequest(), timeout=TIMEOUT)
    return {adapter.lora_id: adapter.lora_name for adapter in answer.loaded_adapters}


def test_an_adapter_of_the_launch_is_listed_and_used(client):
    ((lora_id, name),) = loaded(client).items()
    assert name == "first"
    assert client.complete(lora_id=lora_id).output_ids != client.complete().output_ids


def test_an_adapter_is_loaded_used_and_unloaded_while_it_serves(client, adapters):
    load = pb.LoadLoRAAdapterRequest(lora_name="second", lora_path=str(adapters[1]), lora_id="mine")
    answer = client.stub.LoadLoRAAdapter(load, timeout=TIMEOUT)
    assert (answer.success, answer.message) == (True, "")
    assert "mine" in answer.loaded_lora_ids
    assert client.complete(lora_id="mine").output_ids != client.complete().output_ids

    again = client.stub.LoadLoRAAdapter(load, timeout=TIMEOUT)
    assert not again.success
    assert "mine" in again.message

    running = client.start(stream=True, max_tokens=200, lora_id="mine")
    next(running)
    unload = pb.UnloadLoRAAdapterRequest(lora_name="second", lora_id="mine")
    unloading = client.stub.UnloadLoRAAdapter.future(unload, timeout=TIMEOUT)
    assert completes(list(running))[0].completion_tokens == 200  # it waits for who uses the adapter
    answer = unloading.result()
    assert answer.success
    assert list(answer.loaded_lora_ids) == list(loaded(client))
    assert client.refused(lora_id="mine")[0] == "INVALID_ARGUMENT"


def test_a_third_adapter_is_one_too_many_and_a_folder_must_hold_one(client, adapters, tmp_path):
    def load(name: str, path: Any) -> pb.LoadLoRAAdapterResponse:
        request = pb.LoadLoRAAdapterRequest(lora_name=name, lora_path=str(path), lora_id=name)
        return client.stub.LoadLoRAAdapter(request, timeout=TIMEOUT)

    assert not load("empty", tmp_path).success
    assert load("second", adapters[1]).success
    answer = load("third", adapters[1])
    assert not answer.success
    assert "--max-loaded-loras" in answer.message
    unload = pb.UnloadLoRAAdapterRequest(lora_name="second")
    assert client.stub.UnloadLoRAAdapter(unload, timeout=TIMEOUT).success
    assert not client.stub.UnloadLoRAAdapter(unload, timeout=TIMEOUT).success


# Requests


def test_a_custom_logit_processor_is_run_and_a_broken_one_refused(client, sglang_python):
    made = subprocess.run([str(sglang_python), "-c", ALWAYS_SEVEN], capture_output=True, text=True, check=True)
    assert list(client.complete(custom_logit_processor=made.stdout).output_ids) == [7] * 8
    for broken in ("nonsense", '{"callable": "00"}', "{}"):
        status, sentence = client.refused(custom_logit_processor=broken)
        assert (status, sentence.split(":")[0]) == ("INVALID_ARGUMENT", "custom_logit_processor")


@pytest.mark.parametrize("stream", [False, True])
def test_hidden_states_come_once_for_every_position(client, stream):
    prompt = [900 + stream, *range(901, 908)]  # of a cached prefix there would be none
    messages = client.generate(prompt=prompt, max_tokens=4, stream=stream, return_hidden_states=True)
    (complete,) = completes(messages)
    rows = complete.all_hidden_states
    assert [row.position for row in rows] == list(range(len(prompt) + 3))
    assert {len(row.values) for row in rows} == {64}
    sent = [value for chunk in chunks(messages) for value in chunk.hidden_states]
    assert sent == ([value for row in rows for value in row.values] if stream else [])


def test_a_call_without_output_scores_tokens(client):
    (complete,) = completes(
        client.generate(max_tokens=0, return_logprob=True, logprob_start_len=-1, token_ids_logprob=[9, 3])
    )
    (row,) = complete.output_logprobs.token_ids_logprobs
    assert list(row.token_ids) == [9, 3]
    assert complete.completion_tokens == 0


def test_named_tokens_have_a_row_at_every_position(client):
    messages = client.generate(
        stream=True, max_tokens=5, return_logprob=True, logprob_start_len=-1, token_ids_logprob=[9, 3]
    )
    rows = completes(messages)[0].output_logprobs.token_ids_logprobs
    assert [list(row.token_ids) for row in rows] == [[9, 3]] * 5
    assert [row for chunk in chunks(messages) for row in chunk.output_logprobs.token_ids_logprobs] == list(rows)


CONSTRAINTS = {
    "regex": ("(ab){2}", "("),
    "json_schema": (json.dumps({"const": True}), "{"),
    "grammar": ('root ::= "left" | "right"', "nonsense"),
}


@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_a_constraint_constrains_and_one_that_does_not_compile_is_refused(client, kind):
    good, bad = CONSTRAINTS[kind]
    bound = client.complete(**{kind: good}, ignore_eos=False, max_tokens=40)
    assert bound.finish_reason == "stop"
    assert bound.output_ids != client.complete(max_tokens=40).output_ids[: bound.completion_tokens]
    assert client.refused(**{kind: bad})[0] == "INVALID_ARGUMENT"


WOULD_END_A_SCHEDULER = {
    "token outside the vocabulary": {"prompt": [5, 2048]},
    "unknown adapter": {"lora_id": "nobody"},
    "ids outside in a bias": {"logit_bias": {5000: 1.0}},
    "named tokens outside": {"return_logprob": True, "token_ids_logprob": [99999]},
    "stop token outside": {"stop_token_ids": [4000]},
    "too many candidates": {"logprobs": 2049},
    "reasoning end outside": {"custom_params": {"__sglang_reasoning_end_token_ids": [99999.0]}},
    "no tokens": {"prompt": []},
    "top_p": {"top_p": 1.5},
    "repetition": {"repetition_penalty": 2.5},
    "too many stop strings": {"stop": ["a"] * 33},
    "reserved id": {"request_id": "HEALTH_CHECK_1"},
    "rank": {"data_parallel_rank": 1},
}


@pytest.mark.parametrize("case", WOULD_END_A_SCHEDULER)
def test_what_a_scheduler_would_choke_on_is_refused_at_the_door(client, case):
    assert client.refused(**WOULD_END_A_SCHEDULER[case])[0] == "INVALID_ARGUMENT"
    assert client.complete(max_tokens=2).completion_tokens == 2


def test_a_storm_of_ids_that_are_prefixes_of_one_another_ends_each_call_once(client):
    rng = random.Random(7)
    plans = [(f"s{'1' * (n % 40)}", rng.random(), rng.choice((1, 1, 3)), rng.choice((1, 9, 60))) for n in range(400)]

    def run(plan: tuple[str, float, int, int]) -> str:
        request_id, luck, choices, tokens = plan
        call = client.start(request_id, stream=luck < 0.7, n=choices, max_tokens=tokens, temperature=1.0)
        ended: list[int] = []
        try:
            for message in call:
                if message.WhichOneof("response") == "complete":
                    ended.append(message.complete.index)
                if luck < 0.1:
                    client.abort(request_id)
                elif luck < 0.15:
                    call.cancel()
        except grpc.RpcError as error:
            return error.code().name
        assert sorted(ended) == list(range(choices))
        return "OK"

    with ThreadPoolExecutor(16) as pool:
        ends = collections.Counter(pool.map(run, plans))
    assert ends["OK"] > 20
    assert set(ends) <= {"OK", "ALREADY_EXISTS", "CANCELLED"}


# The worker


def test_the_probe_answers_for_the_schedulers(client):
    assert client.stub.HealthCheck(pb.HealthCheckRequest(), timeout=TIMEOUT).healthy


def test_server_info_has_the_resolved_arguments_and_no_secret(client):
    info = client.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=TIMEOUT)
    arguments = dict(info.server_args.items())
    assert "hush-hush" not in str(info)
    assert arguments["attention_backend"] == "torch_native"
    assert (arguments["pairing_protocol"], arguments["grammar_backend"]) == ("v7", "xgrammar")
    assert arguments["max_running_requests"] > 0
    assert info.max_total_num_tokens == 8192


def test_a_profile_is_written_where_it_is_asked_for(client, tmp_path):
    start = common.StartProfileRequest(output_dir=str(tmp_path / "profile"), activities=["CPU"])
    assert client.stub.StartProfile(start, timeout=TIMEOUT).success
    client.complete()
    assert client.stub.StopProfile(common.StopProfileRequest(), timeout=TIMEOUT).success
    assert list((tmp_path / "profile").iterdir())
    assert refusal(client.stub.StartProfile, common.StartProfileRequest(activities=["ABACUS"]))[0] == "INVALID_ARGUMENT"


def test_sglangs_own_sidecar_serves_metrics(client, worker):
    client.complete()
    port = worker.command[worker.command.index("--smg-http-sidecar-port") + 1]
    deadline = time.monotonic() + TIMEOUT
    while b"sglang:" not in (body := urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read()):
        assert time.monotonic() < deadline, body
    request = urllib.request.Request(f"http://127.0.0.1:{port}/stop_profile", method="POST")
    with pytest.raises(urllib.error.HTTPError) as error:  # nothing runs, and the schedulers say so
        urllib.request.urlopen(request, timeout=TIMEOUT)
    assert b"Stop profile failed" in error.value.read()


def test_an_aborted_call_ends_in_the_schedulers_too(client):
    request_id = new_id()
    call = client.start(request_id, stream=True, max_tokens=client.long)
    next(call)
    client.abort(request_id)
    assert completes(list(call))[0].finish_reason == "abort"
    answer = client.stub.Abort(pb.AbortRequest(request_id=request_id), timeout=TIMEOUT)
    assert not answer.success
    assert client.complete(request_id).completion_tokens == 8
