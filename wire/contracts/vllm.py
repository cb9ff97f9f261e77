"""The contract `vllm.grpc.engine.VllmEngine` (smg-grpc-proto 0.4.28)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc
from smg_grpc_proto.generated import common_pb2 as common

from ..calls import (
    Activity,
    Call,
    Constraint,
    ConstraintKind,
    EmbedCall,
    Finish,
    InvalidCall,
    Load,
    Logprobs,
    ModelFacts,
    Sampling,
    ServerFacts,
    UnsupportedCall,
)

if TYPE_CHECKING:
    import numpy as np

SERVICE: str = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
FIELDS = {"constrain_from_first_token": "grammar_from_first_token", "include_stop": "include_stop_str_in_output"}

_TRACE_HEADERS = ("traceparent", "tracestate")
_TEXT_CONSTRAINTS = {
    "json_schema": ConstraintKind.JSON_SCHEMA,
    "regex": ConstraintKind.REGEX,
    "grammar": ConstraintKind.GRAMMAR,
    "structural_tag": ConstraintKind.STRUCTURAL_TAG,
}


class VllmContract:
    """Messages of the vLLM engine contract."""

    service = SERVICE

    def register(self, servicer: Any, server: Any) -> None:
        """Add `servicer`'s RPCs to a grpc server."""
        pb_grpc.add_VllmEngineServicer_to_server(servicer, server)

    def field(self, name: str) -> str:
        """The contract's name of a sampling field."""
        return f"sampling_params.{FIELDS.get(name, name)}"

    # Requests

    def generate_call(self, request: pb.GenerateRequest, metadata: Sequence[tuple[str, Any]] | None) -> Call:
        """Read a GenerateRequest; InvalidCall names a bad field, UnsupportedCall a part not served."""
        _refuse_media(request)
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidCall("input", "is missing; expected tokenized or text")
        params = request.sampling_params
        return Call(
            request_id=request.request_id,
            token_ids=list(request.tokenized.input_ids) if kind == "tokenized" else [],
            text=request.text if kind == "text" else None,
            sampling=_sampling(params),
            stream=request.stream,
            truncate_prompt_tokens=_optional(params, "truncate_prompt_tokens"),
            data_parallel_rank=_optional(request, "data_parallel_rank"),
            kv_transfer=_kv_transfer(request),
            trace_headers=_trace_headers(metadata),
        )

    def handoff(self, request: pb.GenerateRequest) -> tuple[dict[str, Any], int | None] | None:
        """KV transfer parameters and pinned rank of a request that was refused; None without readable ones."""
        try:
            params = _kv_transfer(request)
        except InvalidCall:
            return None
        return None if params is None else (params, _optional(request, "data_parallel_rank"))

    def embed_call(self, request: pb.EmbedRequest, metadata: Sequence[tuple[str, Any]] | None) -> EmbedCall:
        """Read an EmbedRequest."""
        if not request.HasField("tokenized"):
            raise InvalidCall("tokenized", "is missing")
        return EmbedCall(
            request_id=request.request_id,
            token_ids=list(request.tokenized.input_ids),
            trace_headers=_trace_headers(metadata),
        )

    def abort_ids(self, request: pb.AbortRequest) -> list[str]:
        """The request ids of an AbortRequest."""
        return list(request.request_ids)

    # Responses

    def chunk(
        self,
        index: int,
        token_ids: list[int],
        prompt_tokens: int,
        completion_tokens: int,
        cached_tokens: int,
        logprobs: Logprobs | None = None,
        prompt: tuple[Sequence[int], Logprobs] | None = None,
    ) -> pb.GenerateResponse:
        """New tokens of one choice; `completion_tokens` counts all so far, `prompt` comes once."""
        chunk = pb.GenerateStreamChunk(
            token_ids=token_ids,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cached_tokens=cached_tokens,
            index=index,
        )
        if logprobs is not None:
            chunk.output_logprobs.CopyFrom(_output_logprobs(logprobs))
        if prompt is not None:
            chunk.input_logprobs.CopyFrom(_input_logprobs(*prompt))
        return pb.GenerateResponse(chunk=chunk)

    def plain_chunks(self, index: int, prompt_tokens: int) -> Callable[[list[int], int, int], pb.GenerateResponse]:
        """A maker of one choice's chunks without logprobs: (token ids, completion tokens, cached tokens).

        It returns the same message every time, to be serialized before the next call.
        """
        response = pb.GenerateResponse(chunk=pb.GenerateStreamChunk(index=index, prompt_tokens=prompt_tokens))
        chunk, ids = response.chunk, response.chunk.token_ids

        def fill(token_ids: list[int], completion_tokens: int, cached_tokens: int) -> pb.GenerateResponse:
            ids[:] = token_ids
            chunk.completion_tokens = completion_tokens
            if cached_tokens:
                chunk.cached_tokens = cached_tokens
            return response

        return fill

    def complete(
        self,
        index: int,
        token_ids: list[int],
        prompt_tokens: int,
        cached_tokens: int,
        finish: Finish,
        logprobs: Logprobs | None = None,
        prompt: tuple[Sequence[int], Logprobs] | None = None,
        kv_transfer: dict[str, Any] | None = None,
        draft_tokens: int = 0,
        accepted_tokens: int = 0,
    ) -> pb.GenerateResponse:
        """The end of one choice with everything it produced."""
        complete = pb.GenerateComplete(
            output_ids=token_ids,
            finish_reason=finish.reason.value,
            prompt_tokens=prompt_tokens,
            completion_tokens=len(token_ids),
            cached_tokens=cached_tokens,
            index=index,
            spec_draft_tokens=draft_tokens,
            spec_accepted_tokens=accepted_tokens,
        )
        if isinstance(finish.matched, int):
            complete.matched_token_id = finish.matched
        elif finish.matched is not None:
            complete.matched_stop_str = finish.matched
        if logprobs is not None:
            complete.output_logprobs.CopyFrom(_output_logprobs(logprobs))
        if prompt is not None:
            complete.input_logprobs.CopyFrom(_input_logprobs(*prompt))
        if kv_transfer is not None:
            complete.kv_transfer_params_json = json.dumps(_finite(kv_transfer), separators=(",", ":"))
            host, port = kv_transfer.get("remote_host"), kv_transfer.get("remote_port")
            if isinstance(host, str) and host and isinstance(port, int) and 0 < port < 65536:
                complete.kv_transfer_params.CopyFrom(pb.KvTransferParams(remote_host=host, remote_port=port))
        return pb.GenerateResponse(complete=complete)

    def embedding(self, values: Sequence[float], prompt_tokens: int) -> pb.EmbedResponse:
        """A dense embedding."""
        return pb.EmbedResponse(embedding=values, prompt_tokens=prompt_tokens, embedding_dim=len(values))

    def aborted(self) -> pb.AbortResponse:
        """The answer of Abort."""
        return pb.AbortResponse()

    def health(self, healthy: bool, message: str) -> pb.HealthCheckResponse:
        """The answer of HealthCheck."""
        return pb.HealthCheckResponse(healthy=healthy, message=message)

    def flushed(self, success: bool, message: str) -> common.FlushCacheResponse:
        """The answer of FlushCache."""
        return common.FlushCacheResponse(success=success, message=message)

    def profiled(self, success: bool, message: str) -> common.ProfileResponse:
        """The answer of StartProfile and StopProfile."""
        return common.ProfileResponse(success=success, message=message)

    def tokenizer_chunk(self, data: bytes, sha256: str) -> common.GetTokenizerChunk:
        """A piece of the tokenizer archive; the last one carries the archive's SHA-256."""
        return common.GetTokenizerChunk(data=data, sha256=sha256)

    def model_info(self, facts: ModelFacts) -> pb.GetModelInfoResponse:
        """The answer of GetModelInfo."""
        defaults = facts.default_sampling
        return pb.GetModelInfoResponse(
            model_path=facts.model_path,
            is_generation=facts.is_generation,
            max_context_length=facts.max_context_length,
            vocab_size=facts.vocab_size,
            supports_vision=facts.supports_vision,
            served_model_name=facts.served_model_name,
            tokenizer_path=facts.tokenizer_path,
            model_type=facts.model_type,
            architectures=facts.architectures,
            eos_token_ids=facts.eos_token_ids,
            pad_token_id=facts.pad_token_id,
            bos_token_id=facts.bos_token_id,
            max_req_input_len=facts.max_input_length,
            default_sampling_params_json=json.dumps(defaults, separators=(",", ":")) if defaults else "",
        )

    async def active_requests(self, channel: Any, seconds: float) -> int:
        """What the server behind a grpc.aio channel says it has live; raises its RpcError."""
        info = await pb_grpc.VllmEngineStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=seconds)
        return int(info.active_requests)

    def server_info(self, facts: ServerFacts, activity: Activity) -> pb.GetServerInfoResponse:
        """The answer of GetServerInfo."""
        return pb.GetServerInfoResponse(
            active_requests=activity.active_requests,
            is_paused=activity.paused,
            last_receive_timestamp=activity.last_received,
            uptime_seconds=activity.uptime,
            server_type=facts.server_type,
            kv_connector=facts.kv_connector,
            kv_role=facts.kv_role,
            kv_engine_id=facts.kv_engine_id,
            data_parallel_size=facts.data_parallel_size,
            shm_namespace_id=facts.shm_namespace_id,
            kv_cache_dtype=facts.kv_cache_dtype,
            block_size=facts.block_size,
            attention_backend=facts.attention_backend,
            model_dtype=facts.model_dtype,
            pairing_protocol=facts.pairing_protocol,
            mm_device_do_normalize=facts.mm_device_do_normalize,
            max_num_seqs=facts.max_num_seqs,
            mm_item_limits=facts.mm_item_limits,
            multimodal_encoder_dtype=facts.mm_encoder_dtype,
            mm_encoder_budget=facts.mm_encoder_budget,
            engine_reasoning_parser=facts.reasoning_parser,
            constrained_decoding_start=facts.constrained_decoding_start,
        )

    def loads(self, loads: Sequence[Load], version: str) -> pb.GetLoadsResponse:
        """The answer of GetLoads; `version` is the engine's."""
        return pb.GetLoadsResponse(
            timestamp=datetime.now(timezone.utc).isoformat(),
            version=version,
            dp_rank_count=len(loads),
            loads=[
                pb.SchedulerLoad(
                    dp_rank=load.rank,
                    num_running_reqs=load.running,
                    num_waiting_reqs=load.waiting,
                    num_total_reqs=load.running + load.waiting,
                    num_used_tokens=load.used_tokens,
                    max_total_num_tokens=load.capacity_tokens,
                    token_usage=load.kv_usage,
                    utilization=load.kv_usage,
                    gen_throughput=load.generated_per_second,
                    cache_hit_rate=load.cache_hit_rate,
                    max_running_requests=load.max_running,
                    num_waiting_uncached_tokens=load.waiting_uncached_tokens,
                )
                for load in loads
            ],
        )

    def load_rank(self, request: pb.GetLoadsRequest) -> int | None:
        """The data-parallel rank that a GetLoadsRequest asks for, None for all."""
        return request.dp_rank if request.HasField("dp_rank") else None

    def profile_options(self, request: common.StartProfileRequest) -> list[str]:
        """The options that a StartProfileRequest sets."""
        return [field.name for field, _ in request.ListFields()]


def _optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def _refuse_media(request: pb.GenerateRequest) -> None:
    for field in ("mm_inputs", "media_refs"):
        if request.HasField(field):
            raise UnsupportedCall(f"{field}: this worker takes no media")
    if request.extra_mm_inputs:
        raise UnsupportedCall("extra_mm_inputs: this worker takes no media")


def _sampling(params: pb.SamplingParams) -> Sampling:
    # proto3 scalars without presence: 0 is "unset" for values whose domain excludes it.
    return Sampling(
        temperature=_optional(params, "temperature"),
        top_p=params.top_p or None,
        top_k=params.top_k,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty or None,
        max_tokens=_optional(params, "max_tokens"),
        min_tokens=params.min_tokens,
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        include_stop=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        ignore_eos=params.ignore_eos,
        n=params.n or 1,
        seed=_optional(params, "seed"),
        logprobs=_optional(params, "logprobs"),
        prompt_logprobs=_optional(params, "prompt_logprobs"),
        logit_bias=dict(params.logit_bias) or None,
        constraint=_constraint(params),
        constrain_from_first_token=params.grammar_from_first_token,
    )


def _constraint(params: pb.SamplingParams) -> Constraint | None:
    name = params.WhichOneof("constraint")
    if name is None:
        return None
    if name == "json_object":
        if not params.json_object:
            raise InvalidCall("sampling_params.json_object", "false is not accepted; leave it out for no constraint")
        return Constraint(ConstraintKind.JSON_OBJECT)
    if name == "choice":
        choices = tuple(params.choice.choices)
        if not choices or not all(choices):
            raise InvalidCall("sampling_params.choice", "needs one or more alternatives, none of them empty")
        return Constraint(ConstraintKind.CHOICE, choices)
    text = getattr(params, name)
    if not text.strip():
        raise InvalidCall(f"sampling_params.{name}", "is empty")
    if "\0" in text:
        raise InvalidCall(f"sampling_params.{name}", "holds a NUL character")
    return Constraint(_TEXT_CONSTRAINTS[name], text)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _kv_transfer(request: pb.GenerateRequest) -> dict[str, Any] | None:
    if request.HasField("kv_transfer_params_json"):
        text = request.kv_transfer_params_json
        try:
            params = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise InvalidCall("kv_transfer_params_json", f"is not a JSON object: {error}") from None
        if not isinstance(params, dict):
            raise InvalidCall("kv_transfer_params_json", f"is a JSON {type(params).__name__}, expected an object")
        return params
    if request.HasField("kv_transfer_params"):
        legacy = request.kv_transfer_params
        if not legacy.remote_host:
            raise InvalidCall("kv_transfer_params.remote_host", "is empty")
        if not 0 < legacy.remote_port < 65536:
            raise InvalidCall("kv_transfer_params.remote_port", f"{legacy.remote_port} is not a port (1 to 65535)")
        return {"remote_host": legacy.remote_host, "remote_port": legacy.remote_port}
    return None


def _finite(value: Any) -> Any:
    """`value` with numbers that JSON cannot write as null: the router's parser takes no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, (str, int)) or value is None:
        return value
    return str(value)


def _trace_headers(metadata: Sequence[tuple[str, Any]] | None) -> Mapping[str, str] | None:
    if not metadata:
        return None
    return {key: str(value) for key, value in metadata if key in _TRACE_HEADERS} or None


def _ranked(ids: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> list[pb.TopLogProbs]:
    if ids.shape[1] < 2:
        return []
    return [
        pb.TopLogProbs(values=row, token_ids=row_ids)
        for row, row_ids in zip(values[:, 1:].tolist(), ids[:, 1:].tolist(), strict=True)
    ]


def _output_logprobs(logprobs: Logprobs) -> pb.OutputLogProbs:
    return pb.OutputLogProbs(
        token_logprobs=logprobs.values[:, 0].tolist(),
        token_ids=logprobs.token_ids[:, 0].tolist(),
        top_logprobs=_ranked(logprobs.token_ids, logprobs.values),
    )


def _input_logprobs(prompt_ids: Sequence[int], logprobs: Logprobs) -> pb.InputLogProbs:
    # The first prompt token has no logprob: an empty entry holds its place.
    values = [pb.InputTokenLogProb()]
    values += [pb.InputTokenLogProb(value=value) for value in logprobs.values[:, 0].tolist()]
    ranked = _ranked(logprobs.token_ids, logprobs.values)
    return pb.InputLogProbs(
        token_logprobs=values,
        token_ids=prompt_ids,
        top_logprobs=[pb.TopLogProbs(), *ranked] if ranked else [],
    )
