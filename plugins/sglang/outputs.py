"""The schedulers' output batches as steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..wire.calls import Call, Details, Finish, FinishReason, Logprobs, Step, StepBatch

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

_REASONS = {reason.value: reason for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)}
_UNNAMED_ABORT = "Aborted"
_REFUSED_TOKEN = "Grammar accept_token failed"


class Live:
    """What outputs of one submission need to become steps. `plain` ones bring tokens and an end, nothing else."""

    __slots__ = (
        "call",
        "candidates",
        "constrained",
        "hidden",
        "hidden_rows",
        "logprobs",
        "lora_id",
        "plain",
        "prompt_logprobs",
        "prompt_tokens",
        "rank",
        "started",
        "submitted",
        "token_ids",
    )

    def __init__(self, call: Any, submitted: float) -> None:
        sampling = call.sampling if isinstance(call, Call) else None
        self.prompt_tokens = len(call.token_ids)
        self.submitted = submitted
        self.started = False
        self.rank: int = call.data_parallel_rank or 0
        self.lora_id: str | None = getattr(call, "lora_id", None)
        self.logprobs = sampling.logprobs if sampling is not None else None
        self.prompt_logprobs = sampling.prompt_logprobs if sampling is not None else None
        self.token_ids = bool(sampling.logprob_token_ids) if sampling is not None else False
        self.constrained = sampling is not None and sampling.constraint is not None
        self.hidden = sampling is not None and call.hidden_states
        self.hidden_rows = 0
        reasons = sampling is not None and call.require_reasoning
        self.plain = self.logprobs is None and not self.token_ids and not self.hidden and not reasons


class OutputReader:
    """Turns output batches into step batches.

    `live` is the adapter's table by key, `forget` strikes one off it that has ended; `drafts_a_step` counts tokens.
    """

    def __init__(self, live: dict[str, Live], forget: Callable[[str], object], drafts_a_step: int = 0) -> None:
        self._live, self._forget, self._drafts_a_step = live, forget, drafts_a_step

    def read(self, output: Any) -> StepBatch:
        """The steps of a BatchTokenIDOutput."""
        live, reasons, output_ids = self._live, output.finished_reasons, output.output_ids
        steps: list[Step] = []
        for index, key in enumerate(output.rids):
            request = live.get(key)
            if request is None:
                continue
            tokens = list(output_ids[index])
            if request.plain and request.started and reasons[index] is None:
                steps.append(Step(key, tokens))
                continue
            try:
                details = self._details(request, output, index, len(tokens))
            except Exception:
                # One request's columns must not end everybody's step.
                logger.exception("reading an output of %s failed", key)
                details = Details(finish=Finish(FinishReason.ERROR, message="reading the engine's output failed"))
            if details.finish is not None:
                self._forget(key)
            steps.append(Step(key, tokens, details))
        return StepBatch(self._rank(output), steps)

    def read_embeddings(self, output: Any) -> StepBatch:
        """The steps of a BatchEmbeddingOutput."""
        steps = []
        for index, key in enumerate(output.rids):
            request = self._live.get(key)
            if request is None:
                continue
            finish = finish_of(output.finished_reasons[index] or {"type": "stop"})
            details = Details(
                finish=finish, cached_tokens=output.cached_tokens[index], prompt_tokens=request.prompt_tokens
            )
            values = output.embeddings[index]
            if not finish.failed and finish.reason is not FinishReason.ABORT:
                if isinstance(values, list) and all(isinstance(value, (int, float)) for value in values):
                    details.embedding = values
                else:
                    details.finish = Finish(FinishReason.ERROR, message="the model's embedding is not a dense vector")
            self._forget(key)
            steps.append(Step(key, [], details))
        return StepBatch(self._rank(output), steps)

    def _rank(self, output: Any) -> int:
        ranks = getattr(output, "dp_ranks", None)
        return (ranks[0] or 0) if ranks else 0

    def _details(self, request: Live, output: Any, index: int, new: int) -> Details:
        details = Details()
        if not request.started:
            request.started = True
            request.rank = self._rank(output)
            details.cached_tokens, details.prompt_tokens = output.cached_tokens[index], request.prompt_tokens
        if output.finished_reasons[index] is not None:
            details.finish = finish_of(output.finished_reasons[index], request.constrained)
            if self._drafts_a_step and output.spec_verify_ct:
                details.draft_tokens = output.spec_verify_ct[index] * self._drafts_a_step
                details.accepted_tokens = output.spec_num_correct_drafts[index]
        if request.plain and request.prompt_logprobs is None:
            return details
        details.reasoning_tokens = output.reasoning_tokens[index] or None
        if output.output_token_logprobs_val is not None:
            self._logprobs(details, request, output, index, new)
        if request.hidden and output.output_hidden_states is not None:
            rows = _rows(output.output_hidden_states[index] or ())
            details.hidden_states, request.hidden_rows = rows[request.hidden_rows :], len(rows)
        return details

    def _logprobs(self, details: Details, request: Live, output: Any, index: int, new: int) -> None:
        if request.logprobs is not None:
            details.logprobs = _table(
                output.output_token_logprobs_val[index][:new],
                output.output_token_logprobs_idx[index][:new],
                output.output_top_logprobs_val[index],
                output.output_top_logprobs_idx[index],
                request.logprobs,
            )
        if request.token_ids:
            values = output.output_token_ids_logprobs_val[index]
            if values:
                ids = output.output_token_ids_logprobs_idx[index]
                details.token_id_logprobs = Logprobs(_array(ids, "int64"), _array(values, "float32"))
        # The first row is of a token that nothing precedes.
        if request.prompt_logprobs is not None and len(output.input_token_logprobs_val[index]) > 1:
            details.prompt_logprobs = _table(
                output.input_token_logprobs_val[index][1:],
                output.input_token_logprobs_idx[index][1:],
                (output.input_top_logprobs_val[index] or ())[1:],
                (output.input_top_logprobs_idx[index] or ())[1:],
                request.prompt_logprobs,
            )


def finish_of(reason: dict[str, Any], constrained: bool = False) -> Finish:
    """A finish reason as SGLang's schedulers write it. `constrained` tells whether the call had a constraint."""
    matched = reason.get("matched")
    message, status = reason.get("message") or "", reason.get("status_code")
    kind = _REASONS.get(reason.get("type") or "", FinishReason.ERROR)
    if kind is not FinishReason.ABORT:
        return Finish(kind, matched if isinstance(matched, (int, str)) else None, message)
    # 0.5.20 and 0.5.21 do not say that the grammar refused a token; nothing else aborts without a word.
    refused = constrained and (message.startswith(_REFUSED_TOKEN) or (status is None and message == _UNNAMED_ABORT))
    return Finish(
        FinishReason.ABORT,
        message=message,
        status=int(status) if status is not None and not refused else None,
        constraint_failed=refused,
    )


def _table(
    values: Sequence[float], ids: Sequence[int], top_values: Sequence[Any], top_ids: Sequence[Any], candidates: int
) -> Logprobs | None:
    """Rows of the token itself and its `candidates` best, which a batch may have more of."""
    import numpy as np

    if not values:
        return None
    own_ids, own_values = _array(ids, "int64"), _array(values, "float32")
    if not candidates or not top_values:
        return Logprobs(own_ids[:, None], own_values[:, None])
    rows = len(values)
    best_ids = _array([row[:candidates] for row in top_ids[:rows]], "int64")
    best_values = _array([row[:candidates] for row in top_values[:rows]], "float32")
    return Logprobs(
        np.concatenate((own_ids[:, None], best_ids), axis=1), np.concatenate((own_values[:, None], best_values), axis=1)
    )


def _array(values: Any, dtype: str) -> np.ndarray[Any, Any]:
    import numpy as np

    return np.array([v.tolist() if hasattr(v, "tolist") else v for v in values], dtype=dtype)


def _rows(chunks: Sequence[Any]) -> list[Sequence[float]]:
    """The rows of a request's hidden states: SGLang gives the prompt's as one block, then one row a step."""
    rows: list[Sequence[float]] = []
    for chunk in chunks:
        if not chunk:
            continue
        if isinstance(chunk[0], (list, tuple)):
            rows += chunk
        else:
            rows.append(chunk)
    return rows
