"""SGLang's command line with our flags, and the implementation that it chooses."""

from __future__ import annotations

import argparse
from typing import Any

from ..hooks.command_line import add_plugin_flags, choose, end_start
from ..hooks.settings import ConfigurationError
from .engine import NAME
from .settings import IMPLEMENTATION

_parsed: argparse.Namespace | None = None  # SGLang's record of its arguments keeps its own alone


def add_flags(result: Any, parser: argparse.ArgumentParser) -> None:
    """Called after ServerArgs.add_cli_args(parser)."""
    add_plugin_flags(parser, NAME)


def check(cls: Any, args: argparse.Namespace) -> None:
    """Called before ServerArgs.from_cli_args(args): what cannot be served ends the start here."""
    global _parsed
    _parsed = args
    if not (getattr(args, "smg_grpc_mode", False) or getattr(args, "grpc_mode", False)):
        return
    try:
        choose(NAME, IMPLEMENTATION, args)
    except ConfigurationError as error:
        end_start(error.lines)


def arguments(**beside: Any) -> argparse.Namespace:
    """The parsed command line, empty where SGLang was started from code, with what stands beside it."""
    return argparse.Namespace(**(vars(_parsed) if _parsed is not None else {}) | beside)
