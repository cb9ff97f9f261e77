"""vLLM's command line with our flags, and its gRPC launcher with our implementations."""

from __future__ import annotations

import sys
from typing import Any

from ..hooks.command_line import add_plugin_flags, choose, end_start
from ..hooks.settings import ConfigurationError
from .engine import NAME
from .plugin import LAUNCHERS, guard_engine_cores
from .settings import IMPLEMENTATION


def parse_known_args(wrapped: Any, parser: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps FlexibleArgumentParser.parse_known_args: flags before the parse, settings checked after it."""
    if not serves_grpc(parser):
        return wrapped(*args, **kwargs)
    add_plugin_flags(parser, NAME)
    namespace, rest = wrapped(*args, **kwargs)
    try:
        if getattr(namespace, "headless", False):
            guard_engine_cores()
        if getattr(namespace, "grpc", True):
            choose(NAME, IMPLEMENTATION, namespace)
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


async def serve_grpc(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wraps the launcher's serve_grpc(args): serves with ours, and leaves with the exit code."""
    namespace = args[0] if args else kwargs["args"]
    try:
        code = await choose(NAME, IMPLEMENTATION, namespace)(namespace)
    except ConfigurationError as error:
        end_start(error.lines)
    if code:
        raise SystemExit(code)
