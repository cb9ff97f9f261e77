"""The contract `vllm.grpc.engine.VllmEngine` (smg-grpc-proto 0.4.28)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from ..calls import (
    Activity,
    Call,
    Constraint,
    ConstraintKind,
    EmbedCall,
    Finish,
    InvalidCall,
    Output,
    Sampling,
    ServerFacts,
    UnsupportedCall,
)
from .base import BaseContract, finite, optional, text_constraint, trace_headers

SERVICE: str = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
FIELDS = {"constrain_from_first_token": "grammar_from_first_token", "include_stop": "include_stop_str_in_output"}

_TEXT_CONSTRAINTS = {
    "json_schema": ConstraintKind.JSON_SCHEMA,
    "regex": ConstraintKind.REGEX,
    "grammar": ConstraintKind.GRAMMAR,
    "structural_tag": ConstraintKind.STRUCTURAL_TAG,
}


class VllmContract(BaseContract):
    """Messages of the vLLM engine contract."""

    service = SERVICE
    messages = pb
    stub = pb_grpc.VllmEngineStub

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
            truncate_prompt_tokens=optional(params, "truncate_prompt_tokens"),
            data_parallel_rank=optional(request, "data_parallel_rank"),
            kv_transfer=_kv_transfer(request),
            trace_headers=trace_headers(metadata),
        )

    def handoff(self, request: pb.GenerateRequest) -> tuple[dict[str, Any], int | None] | None:
        """KV transfer parameters and pinned rank of a request that was refused; None without readable ones."""
        try:
            params = _kv_transfer(request)
        except InvalidCall:
            return None
        return None if params is None else (params, optional(request, "data_parallel_rank"))

    def embed_call(self, request: pb.EmbedRequest, metadata: Sequence[tuple[str, Any]] | None) -> EmbedCall:
        """Read an EmbedRequest."""
        if not request.HasField("tokenized"):
            raise InvalidCall("tokenized", "is missing")
        return EmbedCall(
            request_id=request.request_id,
            token_ids=list(request.tokenized.input_ids),
            trace_headers=trace_headers(metadata),
        )

    def abort_ids(self, request: pb.AbortRequest) -> list[str]:
        """The request ids of an AbortRequest."""
        return list(request.request_ids)

    # Responses

    def complete(self, output: Output, finish: Finish) -> pb.GenerateResponse:
        """The end of one choice with everything it produced, and the KV hand-off."""
        response = super().complete(output, finish)
        transfer = output.kv_transfer
        if transfer is not None:
            complete = response.complete
            complete.kv_transfer_params_json = json.dumps(finite(transfer), separators=(",", ":"))
            host, port = transfer.get("remote_host"), transfer.get("remote_port")
            if isinstance(host, str) and host and isinstance(port, int) and 0 < port < 65536:
                complete.kv_transfer_params.CopyFrom(pb.KvTransferParams(remote_host=host, remote_port=port))
        return response

    def aborted(self, ended: bool) -> pb.AbortResponse:
        """The answer of Abort."""
        return pb.AbortResponse()

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


def _refuse_media(request: pb.GenerateRequest) -> None:
    for field in ("mm_inputs", "media_refs"):
        if request.HasField(field):
            raise UnsupportedCall(f"{field}: this worker takes no media")
    if request.extra_mm_inputs:
        raise UnsupportedCall("extra_mm_inputs: this worker takes no media")


def _sampling(params: pb.SamplingParams) -> Sampling:
    # proto3 scalars without presence: 0 is "unset" for values whose domain excludes it.
    return Sampling(
        temperature=optional(params, "temperature"),
        top_p=params.top_p or None,
        top_k=params.top_k,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty or None,
        max_tokens=optional(params, "max_tokens"),
        min_tokens=params.min_tokens,
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        include_stop=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        ignore_eos=params.ignore_eos,
        n=params.n or 1,
        seed=optional(params, "seed"),
        logprobs=optional(params, "logprobs"),
        prompt_logprobs=optional(params, "prompt_logprobs"),
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
    return text_constraint(_TEXT_CONSTRAINTS[name], getattr(params, name), f"sampling_params.{name}")


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
