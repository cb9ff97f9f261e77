"""The engine-neutral vocabulary: what a client asks for and what an engine answers, step by step."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import numpy as np


class InvalidCall(ValueError):
    """A request that cannot be served as it stands; the message names the field and the value."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field, self.problem = field, problem


class UnsupportedCall(Exception):
    """A part of the contract that this worker does not serve; the message names it."""


class ConstraintKind(enum.Enum):
    """How the output is constrained."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"
    JSON_OBJECT = "json_object"
    CHOICE = "choice"


class Constraint(msgspec.Struct, frozen=True):
    """One output constraint; `value` is the text, or the alternatives of a choice."""

    kind: ConstraintKind
    value: str | tuple[str, ...] = ""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen. None means: as the engine does by default.

    `logprobs` and `prompt_logprobs` count ranked candidates beside the token itself: 0 is the token
    alone, -1 is the whole vocabulary. `top_k` 0 is off.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = False
    spaces_between_special_tokens: bool = False
    ignore_eos: bool = False
    n: int = 1
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    constraint: Constraint | None = None
    constrain_from_first_token: bool = False


class Call(msgspec.Struct, kw_only=True):
    """One generation request.

    Exactly one of `text` and `token_ids` comes from the client; `text` has become `token_ids` by the
    time an engine sees the call. `truncate_prompt_tokens` keeps the last that many tokens, -1 as many
    as the context holds beside the output.
    """

    request_id: str
    token_ids: Sequence[int]
    sampling: Sampling
    text: str | None = None
    stream: bool = False
    truncate_prompt_tokens: int | None = None
    data_parallel_rank: int | None = None
    kv_transfer: dict[str, Any] | None = None
    trace_headers: Mapping[str, str] | None = None


class EmbedCall(msgspec.Struct, kw_only=True):
    """One embedding request."""

    request_id: str
    token_ids: Sequence[int]
    trace_headers: Mapping[str, str] | None = None


class FinishReason(enum.Enum):
    """Why a choice ended; the value is what the wire says."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


class Finish(msgspec.Struct, frozen=True):
    """The end of one choice. `matched` is the stop token id or the stop string, if one ended it."""

    reason: FinishReason
    matched: int | str | None = None
    message: str = ""
    retryable: bool = False


class Logprobs(msgspec.Struct):
    """Logprobs of consecutive positions, as the engine's arrays.

    `token_ids` and `values` have shape [positions, 1 + k]: the token itself, then the k best ranked.
    """

    token_ids: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]


def join_logprobs(parts: Sequence[Logprobs]) -> Logprobs | None:
    """Consecutive parts as one; None for no part."""
    if len(parts) < 2:
        return parts[0] if parts else None
    import numpy as np

    return Logprobs(np.concatenate([p.token_ids for p in parts]), np.concatenate([p.values for p in parts]))


class Details(msgspec.Struct, kw_only=True):
    """What a step rarely brings beside tokens. `cached_tokens` comes with the choice's first output."""

    finish: Finish | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    cached_tokens: int | None = None
    prompt_tokens: int = 0
    kv_transfer: dict[str, Any] | None = None
    draft_tokens: int = 0
    accepted_tokens: int = 0
    embedding: Sequence[float] | None = None


class Step(msgspec.Struct, gc=False):
    """New tokens of one choice, under the internal key it was submitted with."""

    key: str
    token_ids: list[int]
    details: Details | None = None


class EngineLoad(msgspec.Struct, kw_only=True):
    """What a data-parallel rank's scheduler reports about itself."""

    running: int
    waiting: int
    kv_usage: float


class StepBatch(msgspec.Struct):
    """What one data-parallel rank produced in one step."""

    rank: int
    steps: list[Step]
    load: EngineLoad | None = None


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a finished call."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Load(msgspec.Struct, kw_only=True):
    """A data-parallel rank's load; rates per second, usage in [0, 1], the rest requests and tokens."""

    rank: int
    running: int
    waiting: int
    kv_usage: float
    used_tokens: int
    capacity_tokens: int
    generated_per_second: float
    cache_hit_rate: float
    max_running: int
    waiting_uncached_tokens: int


class ModelFacts(msgspec.Struct, kw_only=True, frozen=True):
    """What a worker says about its model."""

    model_path: str
    is_generation: bool
    max_context_length: int
    vocab_size: int
    supports_vision: bool
    served_model_name: str
    tokenizer_path: str
    model_type: str
    architectures: tuple[str, ...]
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    bos_token_id: int
    max_input_length: int
    default_sampling: dict[str, Any]


class ServerFacts(msgspec.Struct, kw_only=True, frozen=True):
    """What a worker says about how it runs. Empty text and 0 mean: unknown or not configured."""

    server_type: str
    version: str
    kv_connector: str = ""
    kv_role: str = ""
    kv_engine_id: str = ""
    data_parallel_size: int = 1
    shm_namespace_id: str = ""
    kv_cache_dtype: str = ""
    block_size: int = 0
    attention_backend: str = ""
    model_dtype: str = ""
    pairing_protocol: str = ""
    mm_device_do_normalize: bool = False
    max_num_seqs: int = 0
    mm_item_limits: str = ""
    mm_encoder_dtype: str = ""
    mm_encoder_budget: int = 0
    reasoning_parser: str = ""
    constrained_decoding_start: str = ""


class Activity(msgspec.Struct, kw_only=True, frozen=True):
    """What a worker is doing now; times in seconds, `last_received` since the epoch."""

    active_requests: int
    paused: bool
    last_received: float
    uptime: float
