"""Inside a scheduler rank: wrappers that put SMG's router where SGLang's tokenizer and detokenizer stand.

Each is called as (wrapped, instance, args, kwargs); only the rank that leads its group talks to the router.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from importlib import metadata
from typing import Any

from ..hooks.command_line import end_start
from ..wire import sglang_frames as frames
from .admission import Admission, read_rules
from .zmq_inbox import Inbox
from .zmq_outbox import Outbox
from .zmq_requests import Requests
from .zmq_seams import ENGINE_INDEX, HANDSHAKE
from .zmq_sockets import HandshakeFailed, Wire

logger = logging.getLogger("sglang.smg_grpc_servicer.zmq")

CONSTRAINT_FAILED = "ConstraintFailed"
"""The type of error of a request that its own grammar ended."""

_IDENTITIES = 2**16


class _Rank:
    """What the leading rank of this process has open."""

    wire: Wire | None = None


def create_channels(wrapped: Any, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps SchedulerIpcChannels.create."""
    if not kwargs.get("is_rank_zero"):
        return wrapped(*args, **kwargs)
    channels = wrapped(*args, **kwargs | {"is_rank_zero": False})  # keeps the metrics socket
    outbox = Outbox(Requests())
    return dataclasses.replace(channels, send_to_tokenizer=outbox, send_to_detokenizer=outbox)


def init_idle_sleeper(wrapped: Any, scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wraps Scheduler.init_idle_sleeper, which would poll the sockets that are not there."""
    if _outbox(scheduler) is None:
        wrapped(*args, **kwargs)
    else:
        scheduler.idle_sleeper = None


def connect(wrapped: Any, scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wraps Scheduler.maybe_init_rust_server: model, caches and tokenizer are there, receivers and queues are not."""
    wrapped(*args, **kwargs)
    outbox = _outbox(scheduler)
    if outbox is None:
        return
    rank, ranks = _data_parallel(scheduler)
    index = _base_index() + rank
    if not 0 <= index < _IDENTITIES:
        end_start([f"{ENGINE_INDEX}: engine {index} is not in [0, {_IDENTITIES - 1}]"])
    wire = Wire(os.environ[HANDSHAKE], index)
    try:
        wire.connect(_ready(scheduler, rank, ranks))
    except HandshakeFailed as error:
        raise SystemExit(f"smg-grpc-servicer: error: {error}") from None
    admission = Admission(read_rules(scheduler.model_config, scheduler.max_req_input_len), scheduler.tokenizer)
    admission.adapters = lambda: _adapters(scheduler)
    outbox.open(wire, lambda: scheduler.load_inquirer.get_loads(), generates=scheduler.is_generation)
    scheduler.recv_from_tokenizer = Inbox(wire, outbox.requests, outbox, admission)
    _sleep_on(scheduler, wire)
    _Rank.wire = wire
    logger.info("engine %d takes requests from the router at %s", index, wire.address)


def pull(wrapped: Any, receiver: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps SchedulerRequestReceiver._pull_raw_reqs."""
    source = receiver.recv_from_tokenizer
    if isinstance(source, Inbox):
        return source.drain(receiver.max_recv_per_poll)
    return wrapped(*args, **kwargs)


def run_event_loop(wrapped: Any, scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wraps Scheduler.run_event_loop."""
    try:
        wrapped(*args, **kwargs)
    finally:
        wire, _Rank.wire = _Rank.wire, None
        if wire is not None:
            wire.close()


def accept_tokens(wrapped: Any, processor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps SchedulerBatchResultProcessor._accept_grammar_tokens(req, tokens)."""
    return _attributed(wrapped, args[0] if args else kwargs["req"], args, kwargs)


def apply_prefill(wrapped: Any, processor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps SchedulerBatchResultProcessor._apply_prefill_grammar(*, req, ...)."""
    return _attributed(wrapped, kwargs["req"], args, kwargs)


def process_prebuilt(wrapped: Any, batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps ScheduleBatchDisaggregationDecodeMixin.process_prebuilt, where prefilled tokens enter their grammars."""
    before = [request.to_finish for request in batch.reqs]
    result = wrapped(*args, **kwargs)
    for request, finish in zip(batch.reqs, before, strict=False):
        _attribute(request, finish)
    return result


def _attributed(wrapped: Any, request: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    before = request.to_finish
    result = wrapped(*args, **kwargs)
    _attribute(request, before)
    return result


def _attribute(request: Any, before: Any) -> None:
    finish = request.to_finish
    if finish is before or request.grammar is None or not hasattr(finish, "err_type"):
        return
    finish.err_type = CONSTRAINT_FAILED
    if finish.status_code is None:  # 0.5.20 and 0.5.21 say no more than "Aborted"
        finish.status_code, finish.message = 500, "the output constraint refused a token that was sampled"


def _outbox(scheduler: Any) -> Outbox | None:
    sender = scheduler.ipc_channels.send_to_detokenizer
    return sender if isinstance(sender, Outbox) else None


def _base_index() -> int:
    text = os.environ.get(ENGINE_INDEX) or "0"
    try:
        return int(text)
    except ValueError:
        end_start([f"{ENGINE_INDEX}: {text!r} is not a number"])


def _data_parallel(scheduler: Any) -> tuple[int, int]:
    """(this rank, all ranks) among the schedulers that hold caches of their own."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if hasattr(parallel, "num_dp_ranks"):  # 0.5.23
        return (parallel.dp_rank or 0) * parallel.attn_dp_size + parallel.attn_dp_rank, parallel.num_dp_ranks
    ranks = getattr(scheduler, "ps", parallel)  # 0.5.20
    return ranks.dp_rank or 0, parallel.dp_size


def _ready(scheduler: Any, rank: int, ranks: int) -> frames.Ready:
    from sglang.srt.runtime_context import get_parallel

    parallel, model = get_parallel(), scheduler.model_config
    page, tokens = int(scheduler.page_size), int(scheduler.max_total_num_tokens)
    return frames.Ready(
        max_model_len=model.context_len,
        num_gpu_blocks=tokens // max(1, page),
        block_size=page,
        dtype=str(model.dtype).removeprefix("torch."),
        vllm_version=f"sglang-{metadata.version('sglang')}",
        world_size=parallel.tp_size * parallel.pp_size,
        data_parallel_size=ranks,
        data_parallel_rank=rank,
        tensor_parallel_size=parallel.tp_size,
        pipeline_parallel_size=parallel.pp_size,
        max_num_seqs=int(scheduler.max_running_requests),
        max_num_batched_tokens=max(0, int(scheduler.chunked_prefill_size or 0)),
        kv_cache_size_tokens=tokens,
    )


def _adapters(scheduler: Any) -> Any:
    manager = scheduler.tp_worker.model_runner.lora_manager
    return manager.lora_refs if manager is not None else ()


def _sleep_on(scheduler: Any, wire: Wire) -> None:
    """With --sleep-on-idle, a request wakes the scheduler."""
    import inspect

    from sglang.srt.managers.scheduler_components.idle_sleeper import IdleSleeper
    from sglang.srt.runtime_context import get_device

    if not get_device().sleep_on_idle:
        return
    options: dict[str, Any] = {"sockets": [wire.inputs]}
    if "can_empty_cache" in inspect.signature(IdleSleeper).parameters:  # 0.5.21
        options["can_empty_cache"] = lambda: not scheduler._engine_paused
    scheduler.idle_sleeper = IdleSleeper(**options)
