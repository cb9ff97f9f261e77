"""vLLM's command line with our flags, and its gRPC launcher with our implementations."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NoReturn, cast

from ..hooks import plugins
from ..hooks.settings import ConfigurationError, resolve
from .engine import NAME
from .plugin import LAUNCHERS, guard_engine_cores
from .settings import IMPLEMENTATION

logger = logging.getLogger(__name__)

Serve = Callable[[argparse.Namespace], Awaitable[int]]


def parse_known_args(wrapped: Any, parser: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps FlexibleArgumentParser.parse_known_args: flags before the parse, settings checked after it."""
    if not serves_grpc(parser):
        return wrapped(*args, **kwargs)
    try:
        plugins.plugin_manager().hook.smg_add_arguments(parser=parser, engine=NAME)
    except Exception as error:  # noqa: BLE001  said in one line, before anything is loaded
        end_start([f"a plugin could not add its flags: {error}"])
    namespace, rest = wrapped(*args, **kwargs)
    try:
        if getattr(namespace, "headless", False):
            guard_engine_cores()
        if getattr(namespace, "grpc", True):
            choose(namespace)
    except ConfigurationError as error:
        end_start(error.lines)
    return namespace, rest


def serves_grpc(parser: Any) -> bool:
    """Whether a parser's command can serve gRPC: `vllm serve`, or the gRPC launcher itself."""
    options = parser._option_string_actions
    if "--grpc" in options:
        return True
    main = sys.modules.get("__main__")
    name = getattr(getattr(main, "__spec__", None), "name", None)
    return "--port" in options and (name in LAUNCHERS[:2] or hasattr(main, "serve_grpc"))


def choose(args: argparse.Namespace) -> Serve:
    """What serves a command line; ConfigurationError when the choice or its settings cannot be honoured."""
    name = resolve((IMPLEMENTATION,), args, os.environ)["implementation"]
    serve = plugins.plugin_manager().hook.smg_servicer_implementation(engine=NAME, name=name, args=args)
    if serve is None:
        problem = f"{IMPLEMENTATION.label()}: {name!r} is not accepted; expected {IMPLEMENTATION.accepted}"
        raise ConfigurationError([problem])
    return cast(Serve, serve)


async def serve_grpc(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wraps the launcher's serve_grpc(args): serves with ours, and leaves with the exit code."""
    namespace = args[0] if args else kwargs["args"]
    try:
        code = await choose(namespace)(namespace)
    except ConfigurationError as error:
        end_start(error.lines)
    if code:
        raise SystemExit(code)


def end_start(lines: Iterable[str]) -> NoReturn:
    """End the start for a configuration that cannot work: a line each, exit code 2."""
    for line in lines:
        print(f"smg-grpc-servicer: error: {line}", file=sys.stderr, flush=True)
    raise SystemExit(2)
