"""What every engine's command line does with ours: plugins' flags, the implementation that is chosen, refusals."""

import argparse
import os
import sys
from collections.abc import Iterable
from typing import NoReturn, cast

from . import plugins
from .settings import ConfigurationError, Setting, resolve
from .specs import Serve


def add_plugin_flags(parser: argparse.ArgumentParser, engine: str) -> None:
    """Add every plugin's flags to an engine's parser; one that fails ends the start."""
    try:
        plugins.plugin_manager().hook.smg_add_arguments(parser=parser, engine=engine)
    except Exception as error:  # noqa: BLE001  said in one line, before anything is loaded
        end_start([f"a plugin could not add its flags: {error}"])


def choose(engine: str, implementation: Setting[str], args: argparse.Namespace) -> Serve:
    """What serves a command line; ConfigurationError when the choice or its settings cannot be honoured."""
    name = resolve((implementation,), args, os.environ)["implementation"]
    serve = plugins.plugin_manager().hook.smg_servicer_implementation(engine=engine, name=name, args=args)
    if serve is None:
        problem = f"{implementation.label()}: {name!r} is not accepted; expected {implementation.accepted}"
        raise ConfigurationError([problem])
    return cast(Serve, serve)


def end_start(lines: Iterable[str]) -> NoReturn:
    """End the start for a configuration that cannot work: a line each, exit code 2."""
    for line in lines:
        print(f"smg-grpc-servicer: error: {line}", file=sys.stderr, flush=True)
    raise SystemExit(2)
