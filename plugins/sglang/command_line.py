"""SGLang's command line with our flags, and the implementation that it chooses."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NoReturn, cast

from ..hooks import plugins
from ..hooks.settings import ConfigurationError, resolve
from .engine import NAME
from .settings import IMPLEMENTATION

Serve = Callable[[argparse.Namespace], Awaitable[int]]

_parsed: argparse.Namespace | None = None  # SGLang's record of its arguments keeps its own alone


def add_flags(result: Any, parser: argparse.ArgumentParser) -> None:
    """Called after ServerArgs.add_cli_args(parser)."""
    try:
        plugins.plugin_manager().hook.smg_add_arguments(parser=parser, engine=NAME)
    except Exception as error:  # noqa: BLE001  said in one line, before anything is loaded
        end_start([f"a plugin could not add its flags: {error}"])


def check(cls: Any, args: argparse.Namespace) -> None:
    """Called before ServerArgs.from_cli_args(args): what cannot be served ends the start here."""
    global _parsed
    _parsed = args
    if not (getattr(args, "smg_grpc_mode", False) or getattr(args, "grpc_mode", False)):
        return
    try:
        choose(args)
    except ConfigurationError as error:
        end_start(error.lines)


def arguments(**beside: Any) -> argparse.Namespace:
    """The parsed command line, empty where SGLang was started from code, with what stands beside it."""
    return argparse.Namespace(**(vars(_parsed) if _parsed is not None else {}) | beside)


def choose(args: argparse.Namespace) -> Serve:
    """What serves a command line; ConfigurationError when the choice or its settings cannot be honoured."""
    name = resolve((IMPLEMENTATION,), args, os.environ)["implementation"]
    serve = plugins.plugin_manager().hook.smg_servicer_implementation(engine=NAME, name=name, args=args)
    if serve is None:
        problem = f"{IMPLEMENTATION.label()}: {name!r} is not accepted; expected {IMPLEMENTATION.accepted}"
        raise ConfigurationError([problem])
    return cast(Serve, serve)


def end_start(lines: Iterable[str]) -> NoReturn:
    """End the start for a configuration that cannot work: a line each, exit code 2."""
    for line in lines:
        print(f"smg-grpc-servicer: error: {line}", file=sys.stderr, flush=True)
    raise SystemExit(2)
