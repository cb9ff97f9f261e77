"""What goes over headless SGLang's wire, for tests: requests as smg writes them, outputs as the scheduler does."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from smg_grpc_servicer.wire import sglang_frames as frames

# What follows a client's sampling fields in the layouts of SGLang 0.5.21 and 0.5.23, and nothing.
TAILS = {"0.5.21": [None, None, 0, 0, False, False], "0.5.23": [None, None, None, 0, 0, False, False], "none": []}
SAMPLING: dict[str, Any] = dict.fromkeys(frames.SamplingFields.__struct_fields__) | {
    "temperature": 0.5,
    "top_p": 0.0,
    "top_k": 0,
    "repetition_penalty": 0.0,
    "n": 1,
}

COLUMNS = (
    "rids output_ids finished_reasons finished_messages finished_matched prompt_tokens completion_tokens cached_tokens "
    "output_token_logprobs_val output_token_logprobs_idx engine_index num_running num_waiting kv_used_tokens "
    "kv_total_tokens finished_status output_top_logprobs_val output_top_logprobs_idx reasoning_tokens "
    "input_token_logprobs_val input_token_logprobs_idx input_top_logprobs_val input_top_logprobs_idx "
    "output_token_ids_logprobs_val output_token_ids_logprobs_idx finished_err_types output_hidden_states"
).split()

_LOGPROBS = tuple(
    f"{name}_logprobs_{kind}"
    for name in ("input_token", "output_token", "input_top", "output_top", "output_token_ids")
    for kind in ("val", "idx")
)


class BatchTokenIDOutput(msgspec.Struct, kw_only=True):
    """The columns of SGLang's own that an egress reads."""

    rids: list[str]
    finished_reasons: list[Any]
    output_ids: list[Any]
    prompt_tokens: list[int]
    completion_tokens: list[int]
    cached_tokens: list[int]
    reasoning_tokens: list[int]
    input_token_logprobs_val: Any = None
    input_token_logprobs_idx: Any = None
    output_token_logprobs_val: Any = None
    output_token_logprobs_idx: Any = None
    input_top_logprobs_val: Any = None
    input_top_logprobs_idx: Any = None
    output_top_logprobs_val: Any = None
    output_top_logprobs_idx: Any = None
    output_token_ids_logprobs_val: Any = None
    output_token_ids_logprobs_idx: Any = None
    output_hidden_states: Any = None


class BatchEmbeddingOutput(msgspec.Struct, kw_only=True):
    """The same of embeddings."""

    rids: list[str]
    finished_reasons: list[Any]
    embeddings: list[Any]
    prompt_tokens: list[int]
    cached_tokens: list[int]


class AbortReq(msgspec.Struct, kw_only=True):
    """The end of a request that was queued."""

    rid: str
    finished_reason: Any = None
    abort_message: str | None = None


class FlushCacheReqOutput(msgspec.Struct, kw_only=True):
    """A reply to a control request."""

    success: bool
    message: str = ""


def tokens(keys: Sequence[str], **columns: Any) -> BatchTokenIDOutput:
    """A step of one token for each key; `columns` replace what it holds. A logprob column brings the others, empty."""
    count = len(keys)
    values: dict[str, Any] = {
        "rids": list(keys),
        "finished_reasons": [None] * count,
        "output_ids": [array("q", [7]) for _ in keys],
        "prompt_tokens": [4] * count,
        "completion_tokens": [1] * count,
        "cached_tokens": [0] * count,
        "reasoning_tokens": [0] * count,
    }
    if any(name in columns for name in _LOGPROBS):
        values |= {name: [[] for _ in keys] for name in _LOGPROBS}
    return BatchTokenIDOutput(**values | columns)


def generate(tail: str = "0.5.21", more: tuple[Any, ...] = (), **fields: Any) -> list[Any]:
    """A generation as an array; `fields` replace slots by name."""
    names = ("rid http_worker_ipc input_text input_ids input_embeds mm_inputs token_type_ids sampling_params").split()
    names += "return_logprob logprob_start_len top_logprobs_num token_ids_logprob stream".split()
    values: dict[str, Any] = dict.fromkeys(names) | {
        "rid": "r",
        "input_ids": [1, 2, 3],
        "sampling_params": [*SAMPLING.values(), *TAILS[tail]],
        "return_logprob": False,
        "logprob_start_len": 0,
        "top_logprobs_num": 0,
        "stream": True,
    }
    return ["TokenizedGenerateReqInput", *(values | fields).values(), *more]
