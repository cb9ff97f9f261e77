"""The Rust servers of the installed `smg` wheel: what their constructors take, and what they offer."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

from ..hooks.settings import ConfigurationError, Setting, Settings

logger = logging.getLogger(__name__)

# The constructor's keyword of a setting's value.
KNOBS = {
    "startup_timeout_secs": "engine_startup_timeout_secs",
    "startup_ceiling_secs": "engine_startup_ceiling_secs",
    "silence_timeout_secs": "engine_silence_timeout_secs",
    "prefill_tokens_per_sec": "engine_prefill_tokens_per_sec",
    "metrics_port": "metrics_bind_address",
    "max_message_bytes": "max_message_bytes",
}
# What this package does itself where the wheel does not.
_OURS = ("startup_timeout_secs", "startup_ceiling_secs")
# The crates whose lines are about serving; others are heard from warnings on.
_CRATES = ("engine_servicer", "engine_zmq_client", "engine_zmq_adapter")
# Says that an engine is connected or why it is not, which the worker's own lines do.
_SAID_HERE = ("engine_servicer::vllm::engine", "engine_servicer::sglang::engine", "engine_servicer::tokenspeed::engine")


class Wheel:
    """One server class of the installed wheel."""

    def __init__(self, class_name: str, label: str) -> None:
        """Import the class; ConfigurationError says, under `label`, what is missing and what to install."""
        self.name = class_name
        self.version = _version()
        try:
            module = importlib.import_module("smg.servicer")
            self.server: Any = getattr(module, class_name)
        except (ImportError, AttributeError) as error:
            found = f"smg {self.version} has none ({error})" if self.version else "smg is not installed"
            problem = (
                f"{label}: 'rust' needs smg.servicer.{class_name}, and {found}; install 'smg>=1.12' beside the engine"
            )
            raise ConfigurationError([problem]) from error
        self._tracing = getattr(module, "init_servicer_tracing", None)
        parameters = inspect.signature(self.server).parameters.values()
        self._open = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        self._keywords = {parameter.name for parameter in parameters}

    def takes(self, keyword: str) -> bool:
        """Whether the constructor knows a keyword."""
        return self._open or keyword in self._keywords

    def offers(self, member: str) -> bool:
        """Whether a server has a member."""
        return hasattr(self.server, member)

    def problems(self, settings: Settings, declared: Iterable[Setting[Any]]) -> list[str]:
        """A line for each setting that the operator made and this wheel cannot honour."""
        lines = []
        for setting in declared:
            keyword = KNOBS.get(setting.name)
            if keyword is None or setting.name in _OURS or self.takes(keyword):
                continue
            if setting.name in settings and settings.given(setting.name):
                lines.append(
                    f"{setting.label()}: {settings[setting.name]!r} cannot be honoured: {self.name} of smg "
                    f"{self.version} does not take {keyword}; install a newer smg wheel, or leave it unset"
                )
        return lines

    def arguments(self, facts: Mapping[str, Any], knobs: Mapping[str, Any]) -> dict[str, Any]:
        """Keywords for the constructor: facts and setting values that it knows and that are not None."""
        wanted = dict(facts) | {KNOBS[name]: value for name, value in knobs.items()}
        wanted = {keyword: value for keyword, value in wanted.items() if value is not None}
        unknown = sorted(keyword for keyword in wanted if not self.takes(keyword))
        if unknown:
            logger.debug("%s of smg %s does not take %s", self.name, self.version, ", ".join(unknown))
        return {keyword: value for keyword, value in wanted.items() if self.takes(keyword)}

    def start_tracing(self, level: int) -> None:
        """Have the server's own lines written from a logging level on; the operator's RUST_LOG wins.

        ConfigurationError when RUST_LOG is not accepted.
        """
        if self._tracing is None:
            return
        if not sys.stdout.isatty():
            os.environ.setdefault("NO_COLOR", "1")
        given = os.environ.get("RUST_LOG")
        try:
            self._tracing(given or log_filter(level))
        except ValueError as error:
            raise ConfigurationError([f"RUST_LOG: {given!r} is not accepted: {error}"]) from error


def log_filter(level: int) -> str:
    """What a Rust server is to write, in RUST_LOG's notation, from a logging level on."""
    names = ((logging.DEBUG, "debug"), (logging.INFO, "info"), (logging.WARNING, "warn"))
    name = next((name for highest, name in names if level <= highest), "error")
    others = name if name == "error" else "warn"
    crates = [f"{crate}={name}" for crate in _CRATES]
    return ",".join((others, *crates, *(f"{target}=off" for target in _SAID_HERE)))


def _version() -> str | None:
    try:
        return metadata.version("smg")
    except metadata.PackageNotFoundError:
        return None
