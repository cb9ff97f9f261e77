"""What the engines' contracts have in common: messages that carry the same fields under a package of their own."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, ClassVar

from smg_grpc_proto.generated import common_pb2 as common

from ..calls import (
    Adapter,
    Constraint,
    ConstraintKind,
    Finish,
    InvalidCall,
    Load,
    LoadQuery,
    Logprobs,
    ModelFacts,
    Output,
    ProfileOptions,
    UnsupportedCall,
)

if TYPE_CHECKING:
    import numpy as np

_TRACE_HEADERS = ("traceparent", "tracestate")
_LEAST_STEPS = {"start_step": 0, "num_steps": 1}


class BaseContract:
    """A contract's messages from the module `messages`; subclasses add what their contract has beyond these."""

    messages: ClassVar[Any]
    stub: ClassVar[Any]

    # Requests

    def profile_options(self, request: common.StartProfileRequest) -> ProfileOptions:
        """Read a StartProfileRequest."""
        for name, least in _LEAST_STEPS.items():
            if request.HasField(name) and getattr(request, name) < least:
                raise InvalidCall(name, f"{getattr(request, name)} is not at least {least}")
        return ProfileOptions(
            output_dir=optional(request, "output_dir"),
            start_step=optional(request, "start_step"),
            num_steps=optional(request, "num_steps"),
            activities=tuple(request.activities),
            with_stack=optional(request, "with_stack"),
            record_shapes=optional(request, "record_shapes"),
            profile_by_stage=request.profile_by_stage,
        )

    def load_query(self, request: Any) -> LoadQuery:
        """Read a GetLoadsRequest; a contract without sections has core metrics alone."""
        return LoadQuery(optional(request, "dp_rank"))

    def adapter(self, request: Any) -> Adapter:
        """Read a request to load or unload a LoRA adapter."""
        raise UnsupportedCall("LoRA adapters are not part of this contract")

    # Responses

    def chunk(self, output: Output) -> Any:
        """New tokens of one choice."""
        response = self._response(output.request_id)
        chunk = response.chunk
        chunk.token_ids.extend(output.token_ids)
        chunk.index = output.index
        self._fill(chunk, output)
        return response

    def plain_chunks(self, request_id: str, index: int, prompt_tokens: int) -> Callable[[list[int], int, int], Any]:
        """A maker of one choice's chunks with nothing but tokens: (token ids, completion tokens, cached tokens).

        It returns the same message every time, to be serialized before the next call.
        """
        response = self._response(request_id)
        response.chunk.index, response.chunk.prompt_tokens = index, prompt_tokens
        chunk, ids = response.chunk, response.chunk.token_ids

        def fill(token_ids: list[int], completion_tokens: int, cached_tokens: int) -> Any:
            ids[:] = token_ids
            chunk.completion_tokens = completion_tokens
            if cached_tokens:
                chunk.cached_tokens = cached_tokens
            return response

        return fill

    def complete(self, output: Output, finish: Finish) -> Any:
        """The end of one choice with everything it produced."""
        response = self._response(output.request_id)
        complete = response.complete
        complete.output_ids.extend(output.token_ids)
        complete.index, complete.finish_reason = output.index, finish.reason.value
        complete.spec_draft_tokens, complete.spec_accepted_tokens = output.draft_tokens, output.accepted_tokens
        if isinstance(finish.matched, int):
            complete.matched_token_id = finish.matched
        elif finish.matched is not None:
            complete.matched_stop_str = finish.matched
        self._fill(complete, output)
        return response

    def _response(self, request_id: str) -> Any:
        return self.messages.GenerateResponse()

    def _fill(self, message: Any, output: Output) -> None:
        """What chunks and completes both have beside tokens."""
        message.prompt_tokens, message.completion_tokens = output.prompt_tokens, output.completion_tokens
        message.cached_tokens = output.cached_tokens
        if output.logprobs is not None:
            values, ids = output.logprobs.values, output.logprobs.token_ids
            message.output_logprobs.token_logprobs.extend(values[:, 0].tolist())
            message.output_logprobs.token_ids.extend(ids[:, 0].tolist())
            message.output_logprobs.top_logprobs.extend(self._rows(ids[:, 1:], values[:, 1:]))
        if output.prompt is not None:
            message.input_logprobs.CopyFrom(self._prompt_logprobs(*output.prompt))

    def _prompt_logprobs(self, prompt_ids: Sequence[int], logprobs: Logprobs) -> Any:
        # The first token has no logprob: an empty entry holds its place.
        pb = self.messages
        values = [pb.InputTokenLogProb()] if len(prompt_ids) else []
        values += [pb.InputTokenLogProb(value=value) for value in logprobs.values[:, 0].tolist()]
        ranked = self._rows(logprobs.token_ids[:, 1:], logprobs.values[:, 1:])
        return pb.InputLogProbs(
            token_logprobs=values,
            token_ids=prompt_ids,
            top_logprobs=[pb.TopLogProbs(), *ranked] if ranked else [],
        )

    def _rows(self, ids: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> list[Any]:
        """Candidates by position; none where no column is."""
        if not ids.shape[1]:
            return []
        pairs = zip(values.tolist(), ids.tolist(), strict=True)
        return [self.messages.TopLogProbs(values=row, token_ids=row_ids) for row, row_ids in pairs]

    def embedding(self, values: Sequence[float], prompt_tokens: int) -> Any:
        """A dense embedding."""
        return self.messages.EmbedResponse(embedding=values, prompt_tokens=prompt_tokens, embedding_dim=len(values))

    def health(self, healthy: bool, message: str) -> Any:
        """The answer of HealthCheck."""
        return self.messages.HealthCheckResponse(healthy=healthy, message=message)

    def flushed(self, success: bool, message: str) -> common.FlushCacheResponse:
        """The answer of FlushCache."""
        return common.FlushCacheResponse(success=success, message=message)

    def profiled(self, success: bool, message: str) -> common.ProfileResponse:
        """The answer of StartProfile and StopProfile."""
        return common.ProfileResponse(success=success, message=message)

    def tokenizer_chunk(self, data: bytes, sha256: str) -> common.GetTokenizerChunk:
        """A piece of the tokenizer archive; the last one carries the archive's SHA-256."""
        return common.GetTokenizerChunk(data=data, sha256=sha256)

    def model_info(self, facts: ModelFacts) -> Any:
        """The answer of GetModelInfo."""
        defaults = facts.default_sampling
        return self.messages.GetModelInfoResponse(
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
        info = await self.stub(channel).GetServerInfo(self.messages.GetServerInfoRequest(), timeout=seconds)
        return int(info.active_requests)

    def loads(self, loads: Sequence[Load], version: str, sections: frozenset[str]) -> Any:
        """The answer of GetLoads; `version` is the engine's, `sections` what was asked for."""
        return self.messages.GetLoadsResponse(
            timestamp=datetime.now(timezone.utc).isoformat(),
            version=version,
            dp_rank_count=len(loads),
            loads=[self._load(load) for load in loads],
        )

    def _load(self, load: Load) -> Any:
        return self.messages.SchedulerLoad(
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

    def adapter_changed(self, request: Any, success: bool, message: str, loaded: Sequence[Adapter]) -> Any:
        """The answer of LoadLoRAAdapter or UnloadLoRAAdapter, whichever `request` is of."""
        raise UnsupportedCall("LoRA adapters are not part of this contract")

    def adapters(self, loaded: Sequence[Adapter]) -> Any:
        """The answer of ListLoadedLoRAAdapters."""
        raise UnsupportedCall("LoRA adapters are not part of this contract")


def optional(message: Any, field: str) -> Any:
    """A field's value, None where it is not set."""
    return getattr(message, field) if message.HasField(field) else None


def trace_headers(metadata: Sequence[tuple[str, Any]] | None) -> Mapping[str, str] | None:
    """The W3C trace headers of a call's metadata."""
    if not metadata:
        return None
    return {key: str(value) for key, value in metadata if key in _TRACE_HEADERS} or None


def text_constraint(kind: ConstraintKind, text: str, field: str) -> Constraint:
    """A constraint that is a text: not blank, and free of what a grammar compiler takes for its end."""
    if not text.strip():
        raise InvalidCall(field, "is empty")
    if "\0" in text:
        raise InvalidCall(field, "holds a NUL character")
    return Constraint(kind, text)


def finite(value: Any) -> Any:
    """`value` with numbers that JSON cannot write as null: the router's parser takes no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, (str, int)) or value is None:
        return value
    return str(value)
