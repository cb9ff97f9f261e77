"""Parts of the SGLang worker that need no SGLang: masked secrets, answers to questions, finish reasons."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from smg_grpc_servicer.serving.errors import EngineDead
from smg_grpc_servicer.sglang.control import Control
from smg_grpc_servicer.sglang.facts import masked
from smg_grpc_servicer.sglang.outputs import Live, OutputReader, finish_of
from smg_grpc_servicer.wire.calls import Call, FinishReason, Sampling


def test_a_secret_is_masked_at_any_depth_and_nothing_else_is():
    extra = {"access_key": "hush", "endpoint": "http://me:hush@store:80/x", "list": [{"secretKey": "hush"}]}
    arguments = {
        "api_key": "hush",
        "watermark_key": 20240229,
        "ssl_keyfile": "/etc/key.pem",
        "skip_tokenizer_init": False,
        "max_total_tokens": 8192,
        "admin_api_key": None,
        "hicache_storage_backend_extra_config": json.dumps(extra),
        "nested": {"hf_token": "hush", "depth": ({"passwords": ["hush"]},)},
        "schedule_conservativeness": float("inf"),
    }
    clean = masked(arguments)
    assert "hush" not in json.dumps(clean)
    assert "20240229" not in json.dumps(clean)
    kept = ("ssl_keyfile", "skip_tokenizer_init", "max_total_tokens", "admin_api_key")
    assert {name: clean[name] for name in kept} == {name: arguments[name] for name in kept}
    assert json.loads(clean["hicache_storage_backend_extra_config"])["endpoint"] == "http://***@store:80/x"


async def test_an_answer_that_comes_too_late_is_not_taken_for_the_next_questions():
    asked: list[str] = []
    control = Control(asked.append, ranks=2)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(control.ask("first", str), 0.01)
    second = asyncio.create_task(control.ask("second", str))
    await asyncio.sleep(0)
    for answer in ("late", "late", "a", "b"):
        assert control.answer(answer)
    assert await second == ["a", "b"]
    assert not control.answer("nobody asked")
    assert asked == ["first", "second"]


async def test_a_dead_engine_answers_every_question():
    control = Control(lambda request: None, ranks=1)
    waiting = asyncio.create_task(control.ask("now", str))
    await asyncio.sleep(0)
    control.fail(EngineDead("gone"))
    for question in (waiting, control.ask("later", str)):
        with pytest.raises(EngineDead):
            await question


@pytest.mark.parametrize(
    ("reason", "constrained", "status", "refused"),
    [
        ({"type": "abort", "message": "full", "status_code": 503}, False, 503, False),
        ({"type": "abort", "message": "Aborted", "status_code": None}, False, None, False),
        ({"type": "abort", "message": "Aborted", "status_code": None}, True, None, True),
        ({"type": "abort", "message": "Grammar accept_token failed: x", "status_code": 500}, True, None, True),
        ({"type": "stop", "matched": [1, 2]}, False, None, False),
    ],
)
def test_a_finish_says_whose_fault_it_was(reason: dict[str, Any], constrained: bool, status: int | None, refused: bool):
    finish = finish_of(reason, constrained)
    assert (finish.status, finish.constraint_failed, finish.matched) == (status, refused, None)
    assert finish.reason.value == reason["type"]


def test_one_requests_broken_columns_end_that_request_alone():
    live = {key: Live(Call(request_id=key, token_ids=[1], sampling=Sampling(logprobs=0)), 0.0) for key in "ab"}
    output = SimpleNamespace(
        rids=["a", "b", "stranger"],
        output_ids=[[7], [8], [9]],
        finished_reasons=[None, None, None],
        cached_tokens=[0, 0, 0],
        reasoning_tokens=[0, 0, 0],
        output_token_logprobs_val=[[-1.0], "nonsense", []],
        output_token_logprobs_idx=[[7], [8], []],
        output_top_logprobs_val=[[], [], []],
        output_top_logprobs_idx=[[], [], []],
        input_token_logprobs_val=[[], [], []],
    )
    good, bad = OutputReader(live, live.pop).read(output).steps
    assert good.details.logprobs.values.tolist() == [[-1.0]]
    assert bad.details.finish.reason is FinishReason.ERROR
    assert list(live) == ["a"]
