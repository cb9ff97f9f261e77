"""The contract `sglang.grpc.scheduler.SglangScheduler` (smg-grpc-proto 0.4.28)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from google.protobuf import struct_pb2
from smg_grpc_proto import sglang_scheduler_pb2 as pb
from smg_grpc_proto import sglang_scheduler_pb2_grpc as pb_grpc

from ..calls import (
    Activity,
    Adapter,
    Bootstrap,
    Call,
    Constraint,
    ConstraintKind,
    EmbedCall,
    Finish,
    InvalidCall,
    Load,
    LoadQuery,
    LoadSections,
    MediaTensors,
    ModelFacts,
    Output,
    Sampling,
    ServerFacts,
    Tensor,
    UnsupportedCall,
)
from .base import BaseContract, finite, optional, text_constraint, trace_headers

SERVICE: str = pb.DESCRIPTOR.services_by_name["SglangScheduler"].full_name
RESERVED_IDS = "HEALTH_CHECK"
"""What the scheduler's own probes begin with: it drops such a request when it is busy, and every abort of one."""

_SAMPLING_FIELDS = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "include_stop": "no_stop_trim",
    "grammar": "ebnf_grammar",
}
_REQUEST_FIELDS = {
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    "prompt_logprobs_from": "logprob_start_len",
    "logprob_token_ids": "token_ids_logprob",
    "hidden_states": "return_hidden_states",
    "bootstrap": "disaggregated_params",
    "media": "mm_inputs",
    "image_urls": "mm_inputs.image_urls",
    "input_ids": "tokenized.input_ids",
    "token_ids": "tokenized.input_ids",
    **{
        name: name
        for name in ("request_id", "lora_id", "custom_logit_processor", "require_reasoning", "data_parallel_rank")
    },
}
_CONSTRAINTS = {
    "regex": ConstraintKind.REGEX,
    "json_schema": ConstraintKind.JSON_SCHEMA,
    "ebnf_grammar": ConstraintKind.GRAMMAR,
    "structural_tag": ConstraintKind.STRUCTURAL_TAG,
}
_UNSERVED_MEDIA = ("video_urls", "audio_urls", "image_data", "video_data", "audio_data")
_IMAGE_MODALITIES = ("image", "multi-images")
_SECTIONS = {
    "memory": "memory",
    "spec": "speculative",
    "lora": "lora",
    "disagg": "disaggregation",
    "queues": "queues",
}
_SECTION_MESSAGES = {
    "memory": pb.MemoryMetrics,
    "speculative": pb.SpeculativeMetrics,
    "lora": pb.LoRAMetrics,
    "disaggregation": pb.DisaggregationMetrics,
    "queues": pb.QueueMetrics,
}
_TOKEN_ID_DIGITS = 10


class SglangContract(BaseContract):
    """Messages of the SGLang scheduler contract."""

    service = SERVICE
    messages = pb
    stub = pb_grpc.SglangSchedulerStub

    def register(self, servicer: Any, server: Any) -> None:
        """Add `servicer`'s RPCs to a grpc server."""
        pb_grpc.add_SglangSchedulerServicer_to_server(servicer, server)

    def field(self, name: str) -> str:
        """The contract's name of a call's or sampling field."""
        return _REQUEST_FIELDS.get(name) or f"sampling_params.{_SAMPLING_FIELDS.get(name, name)}"

    # Requests

    def generate_call(self, request: pb.GenerateRequest, metadata: Sequence[tuple[str, Any]] | None) -> Call:
        """Read a GenerateRequest; InvalidCall names a bad field, UnsupportedCall a part not served."""
        _check_id(request.request_id)
        if not request.HasField("tokenized"):
            raise InvalidCall("tokenized", "is missing")
        if request.input_embeds:
            raise UnsupportedCall("input_embeds: this worker takes token ids alone")
        token_ids = list(request.tokenized.input_ids)
        media, image_urls = _media(request, len(token_ids))
        return Call(
            request_id=request.request_id,
            token_ids=token_ids,
            sampling=_sampling(request),
            stream=request.stream,
            data_parallel_rank=optional(request, "data_parallel_rank"),
            trace_headers=trace_headers(metadata),
            lora_id=request.lora_id or None,
            custom_logit_processor=request.custom_logit_processor or None,
            bootstrap=_bootstrap(request),
            require_reasoning=request.require_reasoning,
            hidden_states=request.return_hidden_states,
            media=media,
            image_urls=image_urls,
        )

    def handoff(self, request: pb.GenerateRequest) -> None:
        """The two halves of a call find each other by room: nothing is held for one that was refused."""
        return

    def embed_call(self, request: pb.EmbedRequest, metadata: Sequence[tuple[str, Any]] | None) -> EmbedCall:
        """Read an EmbedRequest; its sampling parameters mean nothing."""
        _check_id(request.request_id)
        if not request.HasField("tokenized"):
            raise InvalidCall("tokenized", "is missing")
        if request.mm_inputs.ListFields():
            raise UnsupportedCall("mm_inputs: an embedding takes no media")
        if request.is_cross_encoder or request.texts:
            raise UnsupportedCall("is_cross_encoder: this worker embeds one tokenized text")
        token_ids, type_ids = list(request.tokenized.input_ids), list(request.token_type_ids)
        if type_ids and len(type_ids) != len(token_ids):
            raise InvalidCall("token_type_ids", f"{len(type_ids)} for {len(token_ids)} tokens")
        if type_ids and min(type_ids) < 0:
            raise InvalidCall("token_type_ids", f"{min(type_ids)} is not at least 0")
        return EmbedCall(
            request_id=request.request_id,
            token_ids=token_ids,
            token_type_ids=type_ids or None,
            # Without presence a pin to rank 0 cannot be told from none.
            data_parallel_rank=request.data_parallel_rank or None,
            trace_headers=trace_headers(metadata),
        )

    def abort_ids(self, request: pb.AbortRequest) -> list[str]:
        """The request id of an AbortRequest."""
        if not request.request_id:
            raise InvalidCall("request_id", "is empty")
        _check_id(request.request_id)
        return [request.request_id]

    def load_query(self, request: pb.GetLoadsRequest) -> LoadQuery:
        """Read a GetLoadsRequest; InvalidCall names an unknown section."""
        sections: set[str] = set()
        for name in request.include:
            if name == "all":
                sections.update(_SECTIONS.values())
            elif name in _SECTIONS:
                sections.add(_SECTIONS[name])
            elif name != "core":
                accepted = ", ".join(("core", *_SECTIONS, "all"))
                raise InvalidCall("include", f"{name[:40]!r} is not one of {accepted}")
        return LoadQuery(optional(request, "dp_rank"), frozenset(sections))

    def adapter(self, request: pb.LoadLoRAAdapterRequest | pb.UnloadLoRAAdapterRequest) -> Adapter:
        """Read a request to load an adapter, or to unload one: that needs its name alone."""
        loads = isinstance(request, pb.LoadLoRAAdapterRequest)
        for name in ("lora_name", "lora_path", "lora_id") if loads else ("lora_name",):
            value = getattr(request, name)
            if not value.strip():
                raise InvalidCall(name, "is empty")
            if "\0" in value:
                raise InvalidCall(name, "holds a NUL character")
        return Adapter(
            lora_id=request.lora_id,
            name=request.lora_name,
            path=request.lora_path if loads else "",
            pinned=request.pinned if loads else False,
        )

    # Responses

    def chunk(self, output: Output) -> pb.GenerateResponse:
        """New tokens of one choice; hidden states one row after the other."""
        response = super().chunk(output)
        for row in output.hidden_states:
            response.chunk.hidden_states.extend(row)
        return response

    def complete(self, output: Output, finish: Finish) -> pb.GenerateResponse:
        """The end of one choice with everything it produced; a hidden state's position counts from the prompt's."""
        response = super().complete(output, finish)
        response.complete.all_hidden_states.extend(
            pb.HiddenStates(values=row, position=position) for position, row in enumerate(output.hidden_states)
        )
        return response

    def _response(self, request_id: str) -> pb.GenerateResponse:
        return pb.GenerateResponse(request_id=request_id)

    def _fill(self, message: Any, output: Output) -> None:
        super()._fill(message, output)
        message.reasoning_tokens = output.reasoning_tokens
        named = output.token_id_logprobs
        if named is not None:
            message.output_logprobs.token_ids_logprobs.extend(self._rows(named.token_ids, named.values))

    def aborted(self, ended: bool) -> pb.AbortResponse:
        """The answer of Abort."""
        return pb.AbortResponse(success=ended, message="ended" if ended else "no such request is running")

    def model_info(self, facts: ModelFacts) -> pb.GetModelInfoResponse:
        """The answer of GetModelInfo."""
        info = super().model_info(facts)
        info.preferred_sampling_params = facts.preferred_sampling_json
        info.weight_version = facts.weight_version
        info.id2label_json = facts.id2label_json
        info.num_labels = facts.num_labels
        return info

    def server_info(self, facts: ServerFacts, activity: Activity) -> pb.GetServerInfoResponse:
        """The answer of GetServerInfo; what the router reads beside the engine's arguments stands among them."""
        labels = {
            "pairing_protocol": facts.pairing_protocol,
            "mm_item_limits": facts.mm_item_limits,
            "engine_reasoning_parser": facts.reasoning_parser,
            "constrained_decoding_start": facts.constrained_decoding_start,
            "max_running_requests": facts.max_num_seqs,
        }
        response = pb.GetServerInfoResponse(
            active_requests=activity.active_requests,
            is_paused=activity.paused,
            last_receive_timestamp=activity.last_received,
            uptime_seconds=activity.uptime,
            sglang_version=facts.version,
            server_type=facts.server_type,
            max_total_num_tokens=facts.max_total_tokens,
        )
        response.start_time.FromNanoseconds(int(activity.started * 1e9))
        response.server_args.update(finite(facts.arguments | {name: value for name, value in labels.items() if value}))
        response.scheduler_info.update(finite(facts.scheduler))
        return response

    def loads(self, loads: Sequence[Load], version: str, sections: frozenset[str]) -> pb.GetLoadsResponse:
        """The answer of GetLoads with the sections that were asked for, and sums and means over the ranks."""
        response = super().loads(loads, version, sections)
        for load, message in zip(loads, response.loads, strict=True):
            for name in sections:
                section = getattr(load.sections or LoadSections(), name)
                if section is not None:
                    getattr(message, name).CopyFrom(_SECTION_MESSAGES[name](**msgspec.structs.asdict(section)))
        response.aggregate.CopyFrom(_aggregate(loads))
        return response

    def adapter_changed(self, request: Any, success: bool, message: str, loaded: Sequence[Adapter]) -> Any:
        """The answer of LoadLoRAAdapter or UnloadLoRAAdapter, whichever `request` is of."""
        loads = isinstance(request, pb.LoadLoRAAdapterRequest)
        answer = pb.LoadLoRAAdapterResponse if loads else pb.UnloadLoRAAdapterResponse
        return answer(success=success, message=message, loaded_lora_ids=[adapter.lora_id for adapter in loaded])

    def adapters(self, loaded: Sequence[Adapter]) -> pb.ListLoadedLoRAAdaptersResponse:
        """The answer of ListLoadedLoRAAdapters."""
        return pb.ListLoadedLoRAAdaptersResponse(
            loaded_adapters=[
                pb.LoadedLoRAAdapter(
                    lora_id=adapter.lora_id, lora_name=adapter.name, lora_path=adapter.path, pinned=adapter.pinned
                )
                for adapter in loaded
            ]
        )


def _check_id(request_id: str) -> None:
    if request_id.startswith(RESERVED_IDS):
        raise InvalidCall("request_id", f"{request_id[:40]!r} begins with {RESERVED_IDS}, which is the engine's own")


def _sampling(request: pb.GenerateRequest) -> Sampling:
    # proto3 scalars without presence: 0 is "unset" for values whose domain excludes it.
    params = request.sampling_params
    logprobs, prompt_from = _logprobs(request)
    return Sampling(
        temperature=params.temperature,
        top_p=params.top_p or None,
        top_k=0 if params.top_k == -1 else params.top_k,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty or None,
        max_tokens=optional(params, "max_new_tokens"),
        min_tokens=params.min_new_tokens,
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        include_stop=params.no_stop_trim,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        ignore_eos=params.ignore_eos,
        n=params.n or 1,
        logprobs=logprobs,
        prompt_logprobs=None if prompt_from is None else logprobs,
        prompt_logprobs_from=prompt_from or 0,
        logprob_token_ids=() if logprobs is None else tuple(request.token_ids_logprob),
        logit_bias=_logit_bias(params.logit_bias),
        constraint=_constraint(params),
        stream_interval=optional(params, "stream_interval"),
        custom_params=_struct(params.custom_params) if params.HasField("custom_params") else None,
    )


def _logprobs(request: pb.GenerateRequest) -> tuple[int | None, int | None]:
    """Ranked candidates, and the first prompt position that has logprobs; None for no logprobs."""
    if not request.return_logprob:
        return None, None
    if request.top_logprobs_num < 0:
        raise InvalidCall("top_logprobs_num", f"{request.top_logprobs_num} is not at least 0")
    start = request.logprob_start_len
    if start < -1:
        raise InvalidCall("logprob_start_len", f"{start} is not -1 (the output alone) or a prompt position")
    return request.top_logprobs_num, None if start == -1 else start


def _logit_bias(biases: Any) -> dict[int, float] | None:
    found: dict[int, float] = {}
    for key, bias in biases.items():
        plain = key.isascii() and key.isdecimal() and len(key) <= _TOKEN_ID_DIGITS
        if not plain or str(int(key)) != key:
            raise InvalidCall("sampling_params.logit_bias", f"{key[:40]!r} is not a token id")
        found[int(key)] = bias
    return found or None


def _constraint(params: pb.SamplingParams) -> Constraint | None:
    name = params.WhichOneof("constraint")
    if name is None:
        return None
    return text_constraint(_CONSTRAINTS[name], getattr(params, name), f"sampling_params.{name}")


def _struct(message: struct_pb2.Struct) -> dict[str, Any]:
    return {key: _value(value) for key, value in message.fields.items()}


def _value(message: struct_pb2.Value) -> Any:
    """A JSON value; protobuf's own parser bounds how deep it is."""
    kind = message.WhichOneof("kind")
    if kind == "struct_value":
        return _struct(message.struct_value)
    if kind == "list_value":
        return [_value(value) for value in message.list_value.values]
    if kind == "number_value" and not math.isfinite(message.number_value):
        raise InvalidCall("sampling_params.custom_params", f"{message.number_value} is not a number that JSON has")
    return None if kind in (None, "null_value") else getattr(message, kind)


def _bootstrap(request: pb.GenerateRequest) -> Bootstrap | None:
    if not request.HasField("disaggregated_params"):
        return None
    params = request.disaggregated_params
    if not 0 <= params.bootstrap_port < 65536:
        raise InvalidCall("disaggregated_params.bootstrap_port", f"{params.bootstrap_port} is not a port (1 to 65535)")
    if params.bootstrap_room < 0:
        raise InvalidCall("disaggregated_params.bootstrap_room", f"{params.bootstrap_room} is not at least 0")
    return Bootstrap(params.bootstrap_host or None, params.bootstrap_port or None, params.bootstrap_room)


def _media(request: pb.GenerateRequest, prompt_tokens: int) -> tuple[MediaTensors | None, tuple[str, ...]]:
    """Preprocessed images or the addresses of images; an empty message is no media."""
    inputs = request.mm_inputs
    for name in _UNSERVED_MEDIA:
        if getattr(inputs, name):
            raise UnsupportedCall(f"mm_inputs.{name}: this worker takes images as pixel_values or image_urls")
    for modality in inputs.modalities:
        if modality.lower() not in _IMAGE_MODALITIES:
            raise UnsupportedCall(f"mm_inputs.modalities: {modality[:40]!r} is not an image")
    if inputs.image_urls:
        if inputs.HasField("pixel_values"):
            raise InvalidCall("mm_inputs.image_urls", "come with pixel_values; expected one of them")
        if not all(inputs.image_urls):
            raise InvalidCall("mm_inputs.image_urls", "holds an empty address")
        return None, tuple(inputs.image_urls)
    if not inputs.HasField("pixel_values"):
        if inputs.ListFields():
            raise InvalidCall("mm_inputs.pixel_values", "is missing")
        return None, ()
    tensor = _tensor(inputs.pixel_values, "mm_inputs.pixel_values")
    if not tensor.data:
        raise InvalidCall("mm_inputs.pixel_values", "is empty")
    if not inputs.mm_placeholders:
        raise InvalidCall("mm_inputs.mm_placeholders", "is empty")
    named = {
        name: _tensor(value, f"mm_inputs.model_specific_tensors[{name[:40]!r}]")
        for name, value in inputs.model_specific_tensors.items()
    }
    places = _placeholders(inputs.mm_placeholders, prompt_tokens)
    token_id = optional(inputs, "im_token_id")
    return MediaTensors(pixel_values=tensor, tensors=named, token_id=token_id, placeholders=places), ()


def _tensor(message: pb.TensorData, field: str) -> Tensor:
    try:
        return Tensor(message.data, tuple(message.shape), message.dtype)
    except ValueError as error:
        raise InvalidCall(field, str(error)) from None


def _placeholders(ranges: Any, prompt_tokens: int) -> tuple[tuple[int, int], ...]:
    """Ranges of the prompt in order, none empty, none overlapping the one before."""
    end, found = 0, []
    for place in ranges:
        if place.offset < end or not 0 < place.length <= prompt_tokens - place.offset:
            raise InvalidCall(
                "mm_inputs.mm_placeholders",
                f"{place.length} tokens at {place.offset} are not a range of {prompt_tokens} prompt tokens after {end}",
            )
        end = place.offset + place.length
        found.append((place.offset, place.length))
    return tuple(found)


def _aggregate(loads: Sequence[Load]) -> pb.AggregateMetrics:
    running, waiting = sum(load.running for load in loads), sum(load.waiting for load in loads)

    def mean(of: Callable[[Load], float]) -> float:
        return sum(map(of, loads)) / len(loads) if loads else 0.0

    usage = mean(lambda load: load.kv_usage)
    return pb.AggregateMetrics(
        total_running_reqs=running,
        total_waiting_reqs=waiting,
        total_reqs=running + waiting,
        avg_token_usage=usage,
        avg_throughput=mean(lambda load: load.generated_per_second),
        avg_utilization=usage,
    )
