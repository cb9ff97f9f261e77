"""Frames between SMG's router and a headless SGLang scheduler: requests by field name, outputs by column.

The order of fields is that of the published smg releases, not of the SGLang that runs: SGLang moves its own slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import msgspec

ADD, ABORT, CONTROL = b"\0", b"\1", b"\2"
DEAD = b"ENGINE_CORE_DEAD"
"""What a rank says last, raw, when its scheduler ends."""


class Undecodable(Exception):
    """A frame that does not hold what its type says; `rid` is that of the request, where it can be read."""

    def __init__(self, problem: str, rid: str | None = None) -> None:
        super().__init__(problem)
        self.problem, self.rid = problem, rid


# Requests. smg 1.12 and 1.13 send these in full, or up to a slot; what stands after a layout's end is the engine's own.


class SamplingFields(msgspec.Struct, array_like=True, frozen=True):
    """SGLang's SamplingParams as far as a client can set them; None is unset."""

    max_new_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    min_new_tokens: int | None = None
    n: int | None = None
    beam_width: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    stream_interval: int | None = None
    logit_bias: dict[str | int, float] | None = None
    sampling_seed: int | None = None
    custom_params: dict[str, Any] | None = None

    zero_is_unset: ClassVar[frozenset[str]] = frozenset(
        ("top_p", "top_k", "repetition_penalty", "n", "stream_interval")
    )

    def given(self) -> dict[str, Any]:
        """What was set, by name: the wire has no other way to leave a number out than 0 where 0 means nothing."""
        values = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return {
            name: value
            for name, value in values
            if value is not None and not (value == 0 and name in self.zero_is_unset)
        }


class GenerateFields(msgspec.Struct, array_like=True, frozen=True, tag="TokenizedGenerateReqInput"):
    """One generation; fields that are Raw are named to be refused."""

    rid: str
    http_worker_ipc: msgspec.Raw
    input_text: msgspec.Raw
    input_ids: list[int]
    input_embeds: msgspec.Raw
    mm_inputs: msgspec.Raw
    token_type_ids: msgspec.Raw
    sampling_params: SamplingFields
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: list[int] | None
    stream: bool
    return_sampling_mask: bool = False
    return_flat_raw_top_logprobs: bool = False
    return_hidden_states: bool | str = False
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    return_indexer_topk: bool = False
    session_id: str | None = None
    session_params: msgspec.Raw = msgspec.Raw(b"\xc0")
    lora_id: str | None = None
    custom_logit_processor: str | None = None
    positional_embed_overrides: msgspec.Raw = msgspec.Raw(b"\xc0")
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None
    bootstrap_pair_key: str | None = None
    decode_tp_size: int | None = None
    routed_dp_rank: int | None = None
    disagg_prefill_dp_rank: int | None = None
    routing_key: str | None = None
    require_reasoning: bool = False

    unserved: ClassVar[tuple[str, ...]] = (
        "input_embeds",
        "mm_inputs",
        "token_type_ids",
        "session_params",
        "positional_embed_overrides",
    )


class EmbedFields(msgspec.Struct, array_like=True, frozen=True, tag="TokenizedEmbeddingReqInput"):
    """One embedding; fields that are Raw are named to be refused."""

    rid: str
    http_worker_ipc: msgspec.Raw
    input_text: msgspec.Raw
    input_ids: list[int]
    mm_inputs: msgspec.Raw
    token_type_ids: list[int] | None
    sampling_params: SamplingFields
    lora_id: str | None = None
    positional_embed_overrides: msgspec.Raw = msgspec.Raw(b"\xc0")
    routed_dp_rank: int | None = None
    priority: int | None = None
    dimensions: int | None = None

    unserved: ClassVar[tuple[str, ...]] = ("mm_inputs", "positional_embed_overrides")


class DispatchErrorFields(msgspec.Struct, array_like=True, frozen=True, tag="EncoderDispatchErrorReq"):
    """An encoder could not be reached for a request that waits for it."""

    rid: str
    http_worker_ipc: msgspec.Raw
    error_msg: str
    error_code: int


class Aborts(msgspec.Struct, frozen=True):
    """Requests to end, by id."""

    rids: list[str]


class Control(msgspec.Struct, array_like=True, frozen=True):
    """A call to the scheduler itself, answered by a ControlReply under its id."""

    call_id: int
    method: str
    args: list[Any] = []


Added: TypeAlias = GenerateFields | EmbedFields | DispatchErrorFields
Message: TypeAlias = Added | Aborts | Control

_added = msgspec.msgpack.Decoder(Added)
_aborts = msgspec.msgpack.Decoder(list[str])
_control = msgspec.msgpack.Decoder(Control)
_outer = msgspec.msgpack.Decoder(list[msgspec.Raw])
_meta = msgspec.msgpack.Decoder(dict[str, Any])
_NIL = b"\xc0"


def decode(frames: Sequence[bytes]) -> Message:
    """The message in the frames behind a peer's identity; Undecodable where there is none."""
    if len(frames) < 2:
        raise Undecodable(f"{len(frames)} frames, where a type and a payload are expected")
    kind, payload = frames[0], frames[1]
    try:
        if kind == ADD:
            return _named(_added.decode(payload))
        if kind == ABORT:
            return Aborts(_aborts.decode(payload))
        if kind == CONTROL:
            return _control.decode(payload)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError) as error:
        raise Undecodable(str(error), _rid(payload) if kind == ADD else None) from error
    raise Undecodable(f"type {kind[:8].hex() or 'of no byte'} is not known")


def trace_headers(frames: Sequence[bytes]) -> dict[str, str]:
    """The W3C trace headers that came with a request, empty for none."""
    if len(frames) < 3:
        return {}
    try:
        headers = _meta.decode(frames[2]).get("trace_headers")
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {}
    return {str(name): str(value) for name, value in headers.items()} if isinstance(headers, dict) else {}


def _named(fields: Added) -> Added:
    for name in getattr(fields, "unserved", ()):
        if bytes(getattr(fields, name)) != _NIL:
            raise Undecodable(f"{name}: is not served over this wire", fields.rid)
    return fields


def _rid(payload: bytes) -> str | None:
    """The id of a request that cannot be decoded as a whole."""
    try:
        fields = _outer.decode(payload)
        return msgspec.msgpack.decode(fields[1], type=str) if len(fields) > 1 else None
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


# Handshake


class Addresses(msgspec.Struct, frozen=True):
    inputs: list[str]
    outputs: list[str]


class Init(msgspec.Struct, frozen=True):
    """The router's answer to a HELLO: where to connect."""

    addresses: Addresses


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says about itself once it can take requests; the names are the wire's, counts in tokens."""

    max_model_len: int
    num_gpu_blocks: int
    block_size: int
    dtype: str
    vllm_version: str
    world_size: int
    data_parallel_size: int
    data_parallel_rank: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_size_tokens: int


HELLO = msgspec.msgpack.encode({"status": "HELLO", "local": True, "headless": True})
READY = msgspec.msgpack.encode({"status": "READY", "local": True, "headless": True})


def decode_init(payload: bytes) -> Init:
    """Undecodable where it names no sockets."""
    try:
        init = msgspec.msgpack.decode(payload, type=Init)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise Undecodable(str(error)) from error
    if not (init.addresses.inputs and init.addresses.outputs):
        raise Undecodable("it names no input or no output socket")
    return init


# Outputs, a column a field and a row a request.

Rows: TypeAlias = Sequence[Any]


class LoadTail(msgspec.Struct, frozen=True):
    """A rank's load: requests, and tokens of its KV cache."""

    running: int = 0
    waiting: int = 0
    used_tokens: int = 0
    total_tokens: int = 0


class TokenBatch(msgspec.Struct, array_like=True, tag="BatchTokenIDSlimOutput"):
    """New tokens of one step; counts are cumulative, everything else is what the step added."""

    rids: Rows
    output_ids: Rows
    finished_reasons: Rows
    finished_messages: Rows
    finished_matched: Rows
    prompt_tokens: Rows
    completion_tokens: Rows
    cached_tokens: Rows
    output_token_logprobs_val: Rows
    output_token_logprobs_idx: Rows
    engine_index: int
    num_running: int
    num_waiting: int
    kv_used_tokens: int
    kv_total_tokens: int
    finished_status: Rows
    output_top_logprobs_val: Rows | None = None
    output_top_logprobs_idx: Rows | None = None
    reasoning_tokens: Rows | None = None
    input_token_logprobs_val: Rows | None = None
    input_token_logprobs_idx: Rows | None = None
    input_top_logprobs_val: Rows | None = None
    input_top_logprobs_idx: Rows | None = None
    output_token_ids_logprobs_val: Rows | None = None
    output_token_ids_logprobs_idx: Rows | None = None
    finished_err_types: Rows | None = None
    output_hidden_states: Rows | None = None


class EmbeddingBatch(msgspec.Struct, array_like=True, tag="BatchEmbeddingSlimOutput"):
    """Embeddings of requests that have ended."""

    rids: Rows
    embeddings: Rows
    prompt_tokens: Rows
    cached_tokens: Rows
    finished_reasons: Rows
    finished_messages: Rows
    finished_status: Rows
    engine_index: int
    num_running: int
    num_waiting: int
    kv_used_tokens: int
    kv_total_tokens: int


class ControlReply(msgspec.Struct, array_like=True, tag="ControlReplySlim"):
    """What became of a Control."""

    call_id: int
    success: bool
    message: str | None
    engine_index: int


def aborted(
    rid: str, message: str, status: int | None, engine_index: int, load: LoadTail, *, generates: bool = True
) -> TokenBatch | EmbeddingBatch:
    """The end of one request that made nothing more; `status` is an HTTP status, None for a plain abort."""
    tail = (load.running, load.waiting, load.used_tokens, load.total_tokens)
    if not generates:
        return EmbeddingBatch([rid], [[]], [0], [0], ["abort"], [message], [status], engine_index, *tail)
    zero, none = [0], [()]
    return TokenBatch(
        [rid], none, ["abort"], [message], [None], zero, zero, zero, none, none, engine_index, *tail, [status]
    )


def _plain(value: Any) -> Any:
    """Arrays of any library as lists."""
    try:
        return value.tolist()
    except AttributeError:
        raise NotImplementedError(f"{type(value).__name__} cannot be sent") from None


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)


def encode(output: TokenBatch | EmbeddingBatch | ControlReply | Ready) -> bytes:
    """One frame; TypeError or another error of a value's own where it cannot be sent."""
    return _encoder.encode(output)
