"""Every hook that a plugin of this package can implement, on one page.

A plugin is a module or object behind an entry point of the group `smg_grpc_servicer`. It marks its functions with
`smg_grpc_servicer.hooks.hookimpl` and names only the arguments that it wants. `engine` is always the engine's name,
such as "vllm". Calls, usage and peers are the engine-neutral ones of `smg_grpc_servicer.wire.calls`.

Two processes matter: the *launcher*, where the command line is read, and the *server*, which answers gRPC; with most
engines they are one. Workers and engine cores call no hook.
"""

import argparse
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pluggy

from .seams import Seam

PROJECT = "smg"
GROUP = "smg_grpc_servicer"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

Serve: TypeAlias = Callable[[argparse.Namespace], Awaitable[int]]
"""Serves until the process is to end, and returns its exit code."""

Fetch: TypeAlias = Callable[[str, int], Awaitable[bytes]]
"""Fetches a reference (`url`, `max_bytes`); raises ValueError for what it refuses, OSError for what it cannot reach."""


@dataclass(frozen=True)
class EngineDescription:
    """Describes an engine, so that commands and the doctor can speak about it without importing it."""

    name: str
    """What hooks and commands call it."""
    distributions: tuple[str, ...]
    """Distributions that provide the engine; the first one installed is the one spoken of."""
    service: str
    """Full name of its gRPC service."""
    entry_points: tuple[tuple[str, str], ...] = ()
    """(group, entry name) of our entry points that the engine must see."""
    filter_variable: str | None = None
    """Variable with which an operator chooses the plugins that the engine loads, such as VLLM_PLUGINS."""
    seams: tuple[Seam, ...] = ()
    rust_server: str | None = None
    """Class of `smg.servicer` that serves this engine's contract."""
    launchers: tuple[str, ...] = ()
    """Command lines that start it, for help texts."""


@hookspec
def smg_engine() -> EngineDescription | None:
    """Describe an engine.

    Called once in a process that needs to know the engines: a launcher, `smg-servicer`, the doctor. Must not import
    the engine. Raising costs one warning, and the engine is unknown in that process.
    """


@hookspec
def smg_add_arguments(parser: argparse.ArgumentParser, engine: str) -> None:
    """Add flags to a command line that serves gRPC.

    Called in the launcher, once a parser, before it reads the command line. Raising ends the start with exit code 2.
    """


@hookspec(firstresult=True)
def smg_servicer_implementation(engine: str, name: str, args: argparse.Namespace) -> Serve | None:
    """Return what serves when the operator chose `--servicer-impl <name>`, or None for a name that is not yours.

    Called in the launcher after the command line was read; the first answer wins. The returned `serve(args)` is
    awaited in the same process; its result is the exit code. Raising ends the start: a `ConfigurationError` with exit
    code 2, anything else with 1.
    """


@hookspec
def smg_interceptors(engine: str, args: argparse.Namespace) -> Sequence[Any] | None:
    """Return `grpc.aio.ServerInterceptor` objects, outermost first, or None.

    Called in the server, once, before it binds its address; only the Python implementation has interceptors. Raising
    ends the start with exit code 1.
    """


@hookspec
def smg_admit(engine: str, call: Any, peer: str) -> Any:
    """Inspect, alter or refuse a call before the engine sees it.

    Called in the server on its event loop, once a call, before our own checks, which see the call as the last plugin
    leaves it: return a `Call` to go on with, or None for no objection. Every plugin is asked, each with the call as
    the one before it left it (`plugins.admit`); hook wrappers are not. Must not block. Raising refuses the call:
    ValueError is INVALID_ARGUMENT, PermissionError is PERMISSION_DENIED, anything else INTERNAL, each with the
    exception's text.
    """


@hookspec
def smg_finished(engine: str, call: Any, usage: Any, status: str) -> None:
    """Take note of a call that ended, in whatever way.

    Called in the server on its event loop, once for each call that was admitted; `status` is the name of the gRPC
    status. Must not block. Raising is logged; the client does not see it.
    """


@hookspec(firstresult=True)
def smg_media_fetcher(scheme: str) -> Fetch | None:
    """Return what fetches media references of a URL scheme ("s3"), or None for a scheme that is not yours.

    Called in the server or the media sidecar at the first reference of each scheme; the first answer wins. Raising
    refuses that reference with INTERNAL.
    """
