"""Engine core outputs as steps: stop strings, logprobs and the statistics that vLLM's loggers expect."""

from __future__ import annotations

import logging
from typing import Any

from ..wire.calls import Details, EngineLoad, Finish, FinishReason, Logprobs, Step, StepBatch

logger = logging.getLogger(__name__)

_REASONS = {reason.value: reason for reason in FinishReason}


class Live:
    """What outputs of one submission need to become steps."""

    __slots__ = (
        "cached",
        "detokenizer",
        "logprobs",
        "max_tokens",
        "plain",
        "prefilling",
        "prompt_logprobs",
        "prompt_tokens",
        "request_id",
        "stats",
    )

    def __init__(self, request: Any, tokenizer: Any, log_stats: bool) -> None:
        params = request.sampling_params
        self.request_id: str = request.external_req_id
        self.prompt_tokens = len(request.prompt_token_ids)
        self.prefilling = True
        self.detokenizer = None
        self.logprobs: int | None = None
        self.prompt_logprobs: int | None = None
        self.max_tokens: int | None = None
        self.cached: int | None = None
        if params is not None:
            self.logprobs, self.prompt_logprobs = params.logprobs, params.prompt_logprobs
            self.max_tokens = params.max_tokens
            self.cached = _remotely_cached(params.extra_args)
            if params.stop:
                from vllm.v1.engine.detokenizer import IncrementalDetokenizer

                self.detokenizer = IncrementalDetokenizer.from_new_request(tokenizer=tokenizer, request=request)
        self.plain = self.detokenizer is None and self.logprobs is None and self.prompt_logprobs is None
        self.stats: Any = None
        if log_stats:
            from vllm.v1.metrics.stats import RequestStateStats

            self.stats = RequestStateStats(arrival_time=request.arrival_time)


def _remotely_cached(extra_args: dict[str, Any] | None) -> int | None:
    """Tokens that a remote prefill found in its cache, as the hand-off says."""
    transfer = (extra_args or {}).get("kv_transfer_params")
    if not transfer or not transfer.get("do_remote_prefill"):
        return None
    cached = transfer.get("remote_prefill_cached_tokens")
    return cached if isinstance(cached, int) and cached >= 0 else None


class OutputReader:
    """Turns engine core output batches into step batches. `live` is the adapter's table by key."""

    def __init__(self, live: dict[str, Live], lora_states: Any, log_stats: bool) -> None:
        from vllm.v1.metrics.stats import IterationStats

        self._new_iteration = IterationStats
        self.live = live
        self._lora_states = lora_states
        self._log_stats = log_stats
        self.stopped: list[str] = []  # keys that a stop string ended: the engine does not know yet

    def read(self, outputs: Any) -> tuple[StepBatch, Any]:
        """The step batch of `outputs`, and vLLM's iteration statistics for its loggers."""
        iteration = self._new_iteration() if self._log_stats and outputs.outputs else None
        live, timestamp, lora = self.live, outputs.timestamp, self._lora_states
        steps: list[Step] = []
        for output in outputs.outputs:
            key = output.request_id
            request = live.get(key)
            if request is None:
                continue
            if request.plain and output.finish_reason is None and not request.prefilling and output.events is None:
                tokens = output.new_token_ids
                if iteration is not None:
                    # What update_from_output does for a plain decode, without its look into the environment.
                    stats = request.stats
                    iteration.num_generation_tokens += len(tokens)
                    iteration.inter_token_latencies_iter.append(timestamp - stats.last_token_ts)
                    stats.num_generation_tokens += len(tokens)
                    stats.last_token_ts = timestamp
                steps.append(Step(key, tokens))
                continue
            if iteration is not None:
                iteration.update_from_output(output, timestamp, request.prefilling, request.stats, lora, None)
            try:
                details = self._details(request, key, output)
            except Exception:
                # One request's detokenizer or arrays must not end everybody's step.
                logger.exception("reading an output of %r failed", request.request_id)
                details = Details(finish=Finish(FinishReason.ERROR, message="reading the engine's output failed"))
                self.stopped.append(key)
            steps.append(Step(key, output.new_token_ids, details))
            if details.finish is not None:
                del live[key]
                if iteration is not None:
                    self._finished(iteration, request, details, output)
        return StepBatch(outputs.engine_index, steps, _load(outputs.scheduler_stats)), iteration

    def _details(self, request: Live, key: str, output: Any) -> Details:
        details = Details()
        if request.prefilling:
            request.prefilling = False
            if request.cached is None:
                request.cached = output.prefill_stats.num_cached_tokens if output.prefill_stats is not None else 0
            details.cached_tokens, details.prompt_tokens = request.cached, request.prompt_tokens
        reason, matched = output.finish_reason, output.stop_reason
        if request.detokenizer is not None:
            stop = self._stop_string(request.detokenizer, output)
            if stop is not None:
                if reason is None:
                    self.stopped.append(key)
                details.finish = Finish(FinishReason.STOP, matched=stop)
        if reason is not None and details.finish is None:
            details.finish = _finish(reason, matched, output)
        if output.new_logprobs is not None and request.logprobs is not None:
            details.logprobs = _arrays(output.new_logprobs, request.logprobs, len(output.new_token_ids))
        if output.new_prompt_logprobs_tensors is not None and request.prompt_logprobs is not None:
            ids, values, *_ = output.new_prompt_logprobs_tensors
            details.prompt_logprobs = _arrays((ids.numpy(), values.numpy()), request.prompt_logprobs, len(ids))
        if output.kv_transfer_params is not None:
            details.kv_transfer = output.kv_transfer_params
        speculation = getattr(output, "spec_decode_metrics", None)  # 0.29
        if speculation is not None:
            details.draft_tokens = speculation.num_draft_tokens
            details.accepted_tokens = sum(count * number for count, number in enumerate(speculation.histogram))
        if output.pooling_output is not None:
            details.embedding = output.pooling_output.float().flatten().tolist()
        return details

    @staticmethod
    def _stop_string(detokenizer: Any, output: Any) -> str | None:
        """The stop string that the new tokens complete; tokens behind it are dropped from `output`."""
        from vllm.v1.engine import FinishReason as EngineReason

        before = detokenizer.num_output_tokens()
        stop = detokenizer.update(output.new_token_ids, output.finish_reason == EngineReason.STOP)
        if stop is not None:
            del output.new_token_ids[detokenizer.num_output_tokens() - before :]
        return stop

    def _finished(self, iteration: Any, request: Live, details: Details, output: Any) -> None:
        from vllm.v1.engine import FinishReason as EngineReason

        iteration.update_from_finished_request(
            finish_reason=output.finish_reason if output.finish_reason is not None else EngineReason.STOP,
            request_id=request.request_id,
            num_prompt_tokens=request.prompt_tokens,
            max_tokens_param=request.max_tokens,
            req_stats=request.stats,
            num_cached_tokens=request.cached or 0,
        )
        iteration.max_num_generation_tokens_iter.append(request.stats.num_generation_tokens)
        iteration.n_params_iter.append(1)
        self._lora_states.request_finished(output.request_id, None)


def _finish(reason: Any, matched: int | str | None, output: Any) -> Finish:
    name = str(reason)
    if name not in _REASONS:
        return Finish(FinishReason.STOP, matched)
    error = getattr(output, "error", None)  # 0.33
    return Finish(
        _REASONS[name],
        matched,
        message=getattr(error, "message", "") or "",
        retryable=bool(getattr(error, "retryable", False) or output.mm_cache_miss_hashes),
    )


def _arrays(parts: Any, candidates: int, positions: int) -> Logprobs:
    """The asked-for columns; a batch's arrays are as wide as its widest request."""
    ids, values = parts[0], parts[1]
    width = ids.shape[1] if candidates == -1 else candidates + 1
    return Logprobs(ids[:positions, :width], values[:positions, :width])


def _load(stats: Any) -> EngineLoad | None:
    if stats is None:
        return None
    waiting = stats.num_waiting_reqs + getattr(stats, "num_skipped_waiting_reqs", 0)
    return EngineLoad(running=stats.num_running_reqs, waiting=waiting, kv_usage=stats.kv_cache_usage)
