"""vLLM's engine core client as an engine: calls in, step batches out, without AsyncLLM's own output task."""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ..serving import errors
from ..serving.engine import Capacity, Limits
from ..wire.calls import (
    Adapter,
    Call,
    EmbedCall,
    EngineLoad,
    InvalidCall,
    ModelFacts,
    ProfileOptions,
    ServerFacts,
    StepBatch,
)
from . import facts, sampling
from .outputs import Live, OutputReader

logger = logging.getLogger(__name__)


class VllmEngine:
    """The Engine over an AsyncLLM (vLLM 0.28 to 0.33). Create it on the event loop that serves."""

    def __init__(self, async_llm: Any) -> None:
        take_over_outputs(async_llm)
        self.llm = async_llm
        self.core = async_llm.engine_core
        self.config = async_llm.vllm_config
        self.limits: Limits = sampling.limits(self.config, async_llm.renderer.tokenizer)
        self._live: dict[str, Live] = {}
        self._reader = OutputReader(self._live, async_llm.output_processor.lora_states, async_llm.log_stats)
        self._tracing = async_llm.observability_config.otlp_traces_endpoint is not None
        self._closed = False

    # Calls

    async def tokenize(self, text: str, keep: int | None) -> Sequence[int]:
        if not self.limits.tokenizes:
            raise errors.Precondition("text: this worker runs without a tokenizer; send token ids")
        renderer = self.llm.renderer
        params = renderer.default_cmpl_tok_params
        if keep is not None:
            params = params.with_kwargs(truncate_prompt_tokens=keep, truncation_side="left")
        (prompt,) = await renderer.tokenize_prompts_async([{"prompt": text}], params)
        return list(prompt["prompt_token_ids"])

    async def submit(self, call: Call, keys: Sequence[str]) -> None:
        self._check_admission(len(keys))
        tasks = await self.llm.get_supported_tasks()
        try:
            params = sampling.sampling_params(call)
            request = self._request(call.request_id, call.token_ids, params, tasks, call.trace_headers)
        except Exception as error:
            # Everything else was checked at the door: what vLLM refuses of a constrained call is its constraint.
            if call.sampling.constraint is not None and isinstance(failure_of(error), errors.Invalid):
                raise InvalidCall(call.sampling.constraint.kind.value, str(error)) from error
            raise
        request.data_parallel_rank = call.data_parallel_rank
        if call.sampling.constrain_from_first_token:
            request.reasoning_ended = True
        params = request.sampling_params
        requests = [request]
        for index in range(1, len(keys)):
            child = copy.copy(request)
            child.sampling_params = sampling.choice_params(params, call.sampling, index)
            requests.append(child)
        for key, child in zip(keys, requests, strict=True):
            await self._add(key, child)

    async def submit_embedding(self, call: EmbedCall, key: str) -> None:
        from vllm.pooling_params import PoolingParams

        tasks = await self.llm.get_supported_tasks()
        if "embed" not in tasks:
            raise errors.Unsupported(f"this model does not embed; it does {', '.join(tasks)}")
        params = PoolingParams(task="embed")
        await self._add(key, self._request(call.request_id, call.token_ids, params, tasks, call.trace_headers))

    def _request(
        self, request_id: str, token_ids: Sequence[int], params: Any, tasks: Any, headers: Mapping[str, str] | None
    ) -> Any:
        now = time.time()
        prompt = self.llm.renderer.process_for_engine({"prompt_token_ids": token_ids}, now)
        request = self.llm.input_processor.process_inputs(
            request_id,
            prompt,
            params,
            supported_tasks=tasks,
            arrival_time=now,
            trace_headers=headers if self._tracing else None,
        )
        request.external_req_id = request_id
        return request

    async def _add(self, key: str, request: Any) -> None:
        request.request_id = key
        self._live[key] = Live(request, self.llm.renderer.tokenizer, self.llm.log_stats)
        if self.llm.log_requests:
            logger.info("request %r is %s in the engine", request.external_req_id, key)
        try:
            await self.core.add_request_async(request)
        except BaseException:
            self._live.pop(key, None)
            raise

    def _check_admission(self, count: int) -> None:
        """vLLM's own queue limits (0.29), which count requests that AsyncLLM does not see here."""
        scheduler = self.config.scheduler_config
        most = getattr(scheduler, "max_num_queued_reqs", None)
        if most is not None and len(self._live) + count > most:
            raise errors.Unavailable(f"the engine holds {len(self._live)} requests; --max-num-queued-reqs is {most}")
        most = getattr(scheduler, "max_num_queued_tokens", None)
        if most is not None:
            waiting = sum(live.prompt_tokens for live in self._live.values() if live.prefilling)
            if waiting >= most:
                raise errors.Unavailable(f"{waiting} prompt tokens wait; --max-num-queued-tokens is {most}")

    async def cancel(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._live.pop(key, None)
        await self.core.abort_requests_async(list(keys))

    async def release_handoff(self, kv_transfer: dict[str, Any], rank: int | None, key: str) -> None:
        if not kv_transfer.get("do_remote_prefill"):
            return
        if rank is not None and not 0 <= rank < self.limits.data_parallel_ranks:
            rank = None
        await self.llm.notify_kv_transfer_request_rejected(key, kv_transfer, data_parallel_rank=rank)

    # Steps

    async def steps(self) -> AsyncIterator[StepBatch]:
        core, reader, loggers = self.core, self._reader, self.llm.logger_manager
        renderer, lora_states = self.llm.renderer, self.llm.output_processor.lora_states
        while True:
            try:
                outputs = await core.get_output_async()
            except Exception as error:
                raise errors.EngineDead(f"the engine core died: {error}") from error
            batch, iteration = reader.read(outputs)
            yield batch
            if reader.stopped:
                stopped, reader.stopped = reader.stopped, []
                await core.abort_requests_async(stopped)
            if loggers is not None:
                lora_states.update_scheduler_stats(outputs.scheduler_stats)
                loggers.record(
                    engine_idx=outputs.engine_index,
                    scheduler_stats=outputs.scheduler_stats,
                    iteration_stats=iteration,
                    mm_cache_stats=renderer.stat_mm_cache(),
                )

    def rank_of(self, key: str) -> int:
        engine = getattr(self.core, "reqs_in_flight", {}).get(key)
        return int.from_bytes(engine, "little") if engine is not None else self.capacity().ranks[0]

    # Administration

    async def flush_cache(self) -> bool:
        identities = getattr(self.core, "core_engines", None)
        if not identities or len(identities) == 1:
            return bool(await self.llm.reset_prefix_cache())
        # A load-balanced client answers with its first engine's result alone.
        call = self.core._call_utility_async
        return all(
            await asyncio.gather(
                *(call("reset_prefix_cache", False, False, engine=identity) for identity in identities)
            )
        )

    async def profile(self, options: ProfileOptions) -> None:
        given = options.given()
        if given:
            raise errors.Invalid(f"{', '.join(given)}: the profiler is configured at the engine's launch")
        self._need_profiler()
        await self.llm.start_profile()

    async def stop_profile(self) -> None:
        self._need_profiler()
        await self.llm.stop_profile()

    def _need_profiler(self) -> None:
        if getattr(self.config.profiler_config, "profiler", None) is None:
            raise errors.Precondition("the profiler is off; start vLLM with --profiler-config")

    async def probe(self) -> str | None:
        return None

    async def load_adapter(self, adapter: Adapter) -> Sequence[Adapter]:
        raise errors.Unsupported("adapters are loaded at the engine's launch")

    async def unload_adapter(self, name: str, lora_id: str) -> Sequence[Adapter]:
        raise errors.Unsupported("adapters are loaded at the engine's launch")

    async def adapters(self) -> Sequence[Adapter]:
        raise errors.Unsupported("adapters are loaded at the engine's launch")

    async def paused(self) -> bool:
        return bool(await self.llm.is_paused())

    def model_facts(self) -> ModelFacts:
        return self._model_facts

    def server_facts(self) -> ServerFacts:
        return self._server_facts

    def loads(self) -> Mapping[int, EngineLoad]:
        return {}

    def capacity(self) -> Capacity:
        return self._capacity

    @cached_property
    def _model_facts(self) -> ModelFacts:
        return facts.model_facts(self.config)

    @cached_property
    def _server_facts(self) -> ServerFacts:
        return facts.server_facts(self.config)

    @cached_property
    def _capacity(self) -> Capacity:
        return facts.capacity(self.config, self.core)

    def tokenizer_directory(self) -> Path:
        return facts.tokenizer_directory(self.config.model_config)

    async def log_stats(self) -> None:
        """Let vLLM's loggers print their periodic line."""
        await self.llm.do_log_stats()

    def failure(self, error: BaseException) -> errors.Failure:
        return failure_of(error)

    def healthy(self) -> bool:
        return not self.llm.errored

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.llm.shutdown()


def take_over_outputs(async_llm: Any) -> None:
    """Stop AsyncLLM's own consumer of the output queue: it would take half of the outputs."""
    handler = async_llm.output_handler
    if handler is not None:
        handler.cancel()
        async_llm.output_handler = None  # a finished task there would make `errored` true


def failure_of(error: BaseException) -> errors.Failure:
    """What an exception of vLLM's means; its cause counts where it only wraps one."""
    from vllm import exceptions
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    if isinstance(error, EngineGenerateError) and error.__cause__ is not None:
        return failure_of(error.__cause__)
    if isinstance(error, EngineDeadError):
        return errors.EngineDead("the engine is dead")
    status = getattr(error, "http_status", None) or getattr(error, "status_code", None)
    if isinstance(status, int):
        return errors.from_http_status(int(status), str(error))
    if isinstance(error, exceptions.VLLMNotFoundError):
        return errors.NotFound(str(error))
    client_error = getattr(exceptions, "VLLMClientError", ValueError)
    if isinstance(error, (client_error, ValueError)):
        return errors.Invalid(str(error))
    return errors.Internal(f"the engine failed this request: {type(error).__name__}: {error}")
