"""The settings of a vLLM worker."""

import argparse
import os
from typing import Any

from ..hooks.settings import Setting, Settings, flag_value, resolve
from ..serving.settings import MAX_MESSAGE_BYTES, drain_secs, metrics, rust
from .kv_events import KV_EVENTS
from .plugin import ENGINE_GUARD as ENGINE_GUARD_VARIABLE

PREFIX = "SMG_VLLM_SERVICER"

IMPLEMENTATION = Setting(
    name="implementation",
    flag="--servicer-impl",
    variable="SMG_VLLM_SERVICER_IMPL",
    default="python",
    parse=str.casefold,
    accepted="python, rust, or the name of a plugin's implementation",
)
ENGINE_GUARD = Setting(
    name="engine_guard",
    variable=ENGINE_GUARD_VARIABLE,
    default=True,
    parse=flag_value,
    accepted="1/true/yes/on or 0/false/no/off",
)
FLAGS: tuple[Setting[Any], ...] = (IMPLEMENTATION, *metrics(PREFIX))
SETTINGS: tuple[Setting[Any], ...] = (
    IMPLEMENTATION,
    drain_secs(PREFIX),
    MAX_MESSAGE_BYTES,
    KV_EVENTS,
    *metrics(PREFIX),
)
RUST_SETTINGS: tuple[Setting[Any], ...] = (
    IMPLEMENTATION,
    drain_secs(PREFIX),
    MAX_MESSAGE_BYTES,
    KV_EVENTS,
    ENGINE_GUARD,
    *rust(PREFIX),
)


def worker_settings(args: argparse.Namespace) -> Settings:
    """The settings of a parsed command line; ConfigurationError has a line for each that is not accepted."""
    return resolve(SETTINGS, args, os.environ, (_metrics_need_rust,))


def _metrics_need_rust(settings: Settings) -> str | None:
    if settings["implementation"] != "python" or settings["metrics_port"] is None:
        return None
    return f"--metrics-port ({PREFIX}_METRICS_PORT): the python implementation has no metrics port; expected rust"
