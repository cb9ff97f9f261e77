"""The places in an SGLang scheduler that we wrap so that it takes requests from SMG's router over ZMQ."""

from __future__ import annotations

import functools
import logging
import os
import pkgutil
from typing import Any

from ..hooks.command_line import end_start
from ..hooks.seams import Seam

logger = logging.getLogger("sglang.smg_grpc_servicer.zmq")

HANDSHAKE = "SMG_SGLANG_ZMQ_HANDSHAKE"
ENGINE_INDEX = "SMG_SGLANG_ZMQ_ENGINE_INDEX"
ATTRIBUTE_GRAMMAR = "SMG_SGLANG_ATTRIBUTE_GRAMMAR_ABORTS"
_RELEASES = "0.5.20 - 0.5.23"
_HERE = "smg_grpc_servicer.sglang.zmq_scheduler"
_SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
_COMPONENTS = "sglang.srt.managers.scheduler_components"

CHANNELS = Seam(
    name="sglang.zmq.channels",
    targets=(f"{_COMPONENTS}.ipc_channels:SchedulerIpcChannels.create",),
    purpose="puts our outputs in the place of the scheduler's senders",
    releases=_RELEASES,
    wrapper=f"{_HERE}:create_channels",
)
SLEEPER = Seam(
    name="sglang.zmq.sleeper",
    targets=(f"{_SCHEDULER}.init_idle_sleeper",),
    purpose="leaves the idle scheduler's sleep to a socket that is not there yet",
    releases=_RELEASES,
    wrapper=f"{_HERE}:init_idle_sleeper",
)
CONNECT = Seam(
    name="sglang.zmq.connect",
    targets=(f"{_SCHEDULER}.maybe_init_rust_server",),
    purpose="greets the router once the model is loaded, and puts our requests in the place of the input socket",
    releases=_RELEASES,
    wrapper=f"{_HERE}:connect",
)
PULL = Seam(
    name="sglang.zmq.pull",
    targets=(f"{_COMPONENTS}.request_receiver:SchedulerRequestReceiver._pull_raw_reqs",),
    purpose="takes requests from the router",
    releases=_RELEASES,
    wrapper=f"{_HERE}:pull",
)
LOOP = Seam(
    name="sglang.zmq.loop",
    targets=(f"{_SCHEDULER}.run_event_loop",),
    purpose="tells the router of the scheduler's end",
    releases=_RELEASES,
    wrapper=f"{_HERE}:run_event_loop",
)
SEAMS = (CHANNELS, SLEEPER, CONNECT, PULL, LOOP)
"""A scheduler that misses one of these cannot be served."""

_RESULTS = f"{_COMPONENTS}.batch_result_processor:SchedulerBatchResultProcessor"
_PREBUILT = "sglang.srt.disaggregation.decode_schedule_batch_mixin:ScheduleBatchDisaggregationDecodeMixin"
GRAMMAR_SEAMS = tuple(
    Seam(
        name=f"sglang.zmq.grammar.{name}",
        targets=(target,),
        purpose="names the constraint as what ended a request",
        releases=_RELEASES,
        wrapper=f"{_HERE}:{name}",
        required=False,
    )
    for name, target in (
        ("accept_tokens", f"{_RESULTS}._accept_grammar_tokens"),
        ("apply_prefill", f"{_RESULTS}._apply_prefill_grammar"),
        ("process_prebuilt", f"{_PREBUILT}.process_prebuilt"),
    )
)


def register_all(registry: Any, around: Any) -> None:
    """Hand the seams to SGLang's registry, which binds them; one that is missing ends the process with a line."""
    for seam in SEAMS:
        if _find(seam) is None:
            end_start([missing(seam)])
    optional = [seam for seam in GRAMMAR_SEAMS if _find(seam) is not None and os.environ.get(ATTRIBUTE_GRAMMAR) != "0"]
    for seam in (*SEAMS, *optional):
        registry.register(seam.targets[0].replace(":", "."), _hook(seam), around)


def missing(seam: Seam) -> str:
    """The line that says that this SGLang cannot be served headless."""
    from importlib import metadata

    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        version = "without a version"
    return (
        f"SGLang {version} has no {seam.targets[0]}, which {seam.purpose} ({seam.name}); "
        f"it can be served headless in {seam.releases}, or unset {HANDSHAKE}"
    )


def _find(seam: Seam) -> Any:
    try:
        return pkgutil.resolve_name(seam.targets[0])
    except (ImportError, AttributeError):
        return None


def _hook(seam: Seam) -> Any:
    """A seam's wrapper in the shape of SGLang's AROUND hooks."""

    def around(original: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(functools.partial(original, owner), owner, args, kwargs)

    assert isinstance(seam.wrapper, str)
    wrapper = pkgutil.resolve_name(seam.wrapper)
    return around
