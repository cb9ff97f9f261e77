"""The engine-neutral vocabulary: what a client asks for and what an engine answers, step by step."""

from __future__ import annotations

import enum
import math
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
    alone, -1 is the whole vocabulary. `prompt_logprobs_from` is the first prompt position that gets
    logprobs; `logprob_token_ids` get theirs at every output position. `top_k` 0 is off.
    `stream_interval` is the number of tokens between chunks.
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
    prompt_logprobs_from: int = 0
    logprob_token_ids: tuple[int, ...] = ()
    logit_bias: dict[int, float] | None = None
    constraint: Constraint | None = None
    constrain_from_first_token: bool = False
    stream_interval: int | None = None
    custom_params: dict[str, Any] | None = None


_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "int64": 8, "uint32": 4}
_DIMENSIONS = 8


class Tensor(msgspec.Struct, frozen=True):
    """Raw little-endian values; ValueError for a dtype, shape or length that do not make a tensor."""

    data: bytes
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        width = _WIDTHS.get(self.dtype)
        if width is None:
            raise ValueError(f"dtype {self.dtype[:40]!r} is not one of {', '.join(_WIDTHS)}")
        if len(self.shape) > _DIMENSIONS:
            raise ValueError(f"{len(self.shape)} dimensions are more than {_DIMENSIONS}")
        size = math.prod(self.shape) * width
        if size != len(self.data):
            raise ValueError(f"{len(self.data)} bytes, where {self.dtype} {list(self.shape)} takes {size}")


class MediaTensors(msgspec.Struct, kw_only=True, frozen=True):
    """Preprocessed images: pixels, the model's own tensors, and where the prompt holds them.

    `token_id` is the image token; `placeholders` are (offset, length) in prompt positions.
    """

    pixel_values: Tensor
    tensors: dict[str, Tensor]
    token_id: int | None
    placeholders: tuple[tuple[int, int], ...]


class Bootstrap(msgspec.Struct, frozen=True):
    """Where the two halves of a disaggregated call meet; None means the engine's own."""

    host: str | None
    port: int | None
    room: int


class Call(msgspec.Struct, kw_only=True):
    """One generation request.

    Exactly one of `text` and `token_ids` comes from the client; `text` has become `token_ids` by the
    time an engine sees the call. `truncate_prompt_tokens` keeps the last that many tokens, -1 as many
    as the context holds beside the output. `lora_id` is an adapter's id, `custom_logit_processor` the
    engine's own serialized one; `require_reasoning` counts reasoning tokens; `image_urls` are for a worker
    whose encoder runs elsewhere.
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
    lora_id: str | None = None
    custom_logit_processor: str | None = None
    bootstrap: Bootstrap | None = None
    require_reasoning: bool = False
    hidden_states: bool = False
    media: MediaTensors | None = None
    image_urls: tuple[str, ...] = ()


class EmbedCall(msgspec.Struct, kw_only=True):
    """One embedding request. `token_type_ids` has one id a token, or is None."""

    request_id: str
    token_ids: Sequence[int]
    token_type_ids: Sequence[int] | None = None
    data_parallel_rank: int | None = None
    trace_headers: Mapping[str, str] | None = None


class FinishReason(enum.Enum):
    """Why a choice ended; the value is what the wire says."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


class Finish(msgspec.Struct, frozen=True):
    """The end of one choice. `matched` is the stop token id or the stop string, if one ended it.

    With an HTTP `status` the call fails with what that stands for, whatever the reason. `constraint_failed`
    says that the output constraint refused a token that the engine had sampled.
    """

    reason: FinishReason
    matched: int | str | None = None
    message: str = ""
    retryable: bool = False
    status: int | None = None
    constraint_failed: bool = False

    @property
    def failed(self) -> bool:
        """Whether the call is answered with an error, not with this end."""
        return self.reason is FinishReason.ERROR or self.status is not None or self.constraint_failed


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
    """What a step rarely brings beside tokens. `cached_tokens` comes with the choice's first output.

    `reasoning_tokens` is the count so far; `hidden_states` the rows that this step adds. `token_id_logprobs`
    has shape [positions, ids]: the call's `logprob_token_ids`, without a column of the token itself.
    """

    finish: Finish | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    cached_tokens: int | None = None
    prompt_tokens: int = 0
    kv_transfer: dict[str, Any] | None = None
    draft_tokens: int = 0
    accepted_tokens: int = 0
    embedding: Sequence[float] | None = None
    reasoning_tokens: int | None = None
    hidden_states: Sequence[Sequence[float]] | None = None
    token_id_logprobs: Logprobs | None = None


class Step(msgspec.Struct, gc=False):
    """New tokens of one choice, under the internal key it was submitted with."""

    key: str
    token_ids: list[int]
    details: Details | None = None


class Output(msgspec.Struct, kw_only=True):
    """What one message about a choice carries: a chunk what is new, a complete everything.

    `completion_tokens` counts all so far. `prompt` is the prompt from the first position that has
    logprobs on, and the logprobs of what follows that position.
    """

    request_id: str
    index: int
    token_ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0
    logprobs: Logprobs | None = None
    token_id_logprobs: Logprobs | None = None
    prompt: tuple[Sequence[int], Logprobs] | None = None
    hidden_states: Sequence[Sequence[float]] = ()
    kv_transfer: dict[str, Any] | None = None
    draft_tokens: int = 0
    accepted_tokens: int = 0


class MemoryLoad(msgspec.Struct, kw_only=True):
    """What fills the device, in GiB, and the tokens that its KV cache holds."""

    weight_gb: float = 0.0
    kv_cache_gb: float = 0.0
    graph_gb: float = 0.0
    token_capacity: int = 0


class SpeculativeLoad(msgspec.Struct, kw_only=True):
    """How well drafts are accepted: tokens a step, and the share of drafted tokens."""

    accept_length: float = 0.0
    accept_rate: float = 0.0


class LoraLoad(msgspec.Struct, kw_only=True):
    """Adapter slots; utilization in [0, 1]."""

    slots_used: int = 0
    slots_total: int = 0
    utilization: float = 0.0


class DisaggregationLoad(msgspec.Struct, kw_only=True):
    """Requests in the queues of a prefill or decode worker; `mode` is "prefill", "decode" or "null"."""

    mode: str = "null"
    prefill_prealloc_queue_reqs: int = 0
    prefill_inflight_queue_reqs: int = 0
    decode_prealloc_queue_reqs: int = 0
    decode_transfer_queue_reqs: int = 0
    decode_retracted_queue_reqs: int = 0
    kv_transfer_speed_gb_s: float = 0.0
    kv_transfer_latency_ms: float = 0.0


class QueueLoad(msgspec.Struct, kw_only=True):
    """Requests that do not run, by what they wait for."""

    waiting: int = 0
    grammar: int = 0
    paused: int = 0
    retracted: int = 0


class LoadSections(msgspec.Struct, kw_only=True):
    """Parts of a load that are sent when asked for; the fields are the contract's names of the parts."""

    memory: MemoryLoad | None = None
    speculative: SpeculativeLoad | None = None
    lora: LoraLoad | None = None
    disaggregation: DisaggregationLoad | None = None
    queues: QueueLoad | None = None


class EngineLoad(msgspec.Struct, kw_only=True):
    """What a data-parallel rank's scheduler reports about itself; None is for the servicer to work out."""

    running: int
    waiting: int
    kv_usage: float
    used_tokens: int | None = None
    capacity_tokens: int | None = None
    generated_per_second: float | None = None
    cache_hit_rate: float | None = None
    max_running: int | None = None
    waiting_uncached_tokens: int | None = None
    sections: LoadSections | None = None


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
    sections: LoadSections | None = None


class LoadQuery(msgspec.Struct, frozen=True):
    """What GetLoads is asked for: one rank or all, and fields of LoadSections."""

    rank: int | None = None
    sections: frozenset[str] = frozenset()


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter; calls name it by `lora_id`."""

    lora_id: str
    name: str
    path: str = ""
    pinned: bool = False


class ProfileOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the profiler runs; None and empty mean: as the engine does by default. Steps are forward passes."""

    output_dir: str | None = None
    start_step: int | None = None
    num_steps: int | None = None
    activities: tuple[str, ...] = ()
    with_stack: bool | None = None
    record_shapes: bool | None = None
    profile_by_stage: bool = False

    def given(self) -> list[str]:
        """The names of the options that are set."""
        return list(msgspec.to_builtins(self))


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
    preferred_sampling_json: str = ""
    weight_version: str = ""
    id2label_json: str = ""
    num_labels: int = 0


class ServerFacts(msgspec.Struct, kw_only=True, frozen=True):
    """What a worker says about how it runs. Empty text and 0 mean: unknown or not configured.

    `arguments` are the engine's resolved launch arguments without its secrets, `scheduler` what its
    schedulers said when they were ready: both as JSON has them.
    """

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
    max_total_tokens: int = 0
    arguments: dict[str, Any] = {}
    scheduler: dict[str, Any] = {}


class Activity(msgspec.Struct, kw_only=True, frozen=True):
    """What a worker is doing now; times in seconds, `last_received` and `started` since the epoch."""

    active_requests: int
    paused: bool
    last_received: float
    uptime: float
    started: float = 0.0
