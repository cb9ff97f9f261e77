"""The settings of an SGLang worker."""

import argparse
import os
from typing import Any

from ..hooks.settings import Setting, Settings, resolve
from ..serving.settings import MAX_MESSAGE_BYTES, drain_secs

PREFIX = "SMG_SGLANG_SERVICER"

IMPLEMENTATION = Setting(
    name="implementation",
    flag="--servicer-impl",
    variable="SMG_SGLANG_SERVICER_IMPL",
    default="python",
    parse=str.casefold,
    accepted="python, rust, or the name of a plugin's implementation",
)
FLAGS: tuple[Setting[Any], ...] = (IMPLEMENTATION,)
SETTINGS: tuple[Setting[Any], ...] = (IMPLEMENTATION, drain_secs(PREFIX), MAX_MESSAGE_BYTES)


def worker_settings(args: argparse.Namespace) -> Settings:
    """The settings of a parsed command line; ConfigurationError has a line for each that is not accepted."""
    return resolve(SETTINGS, args, os.environ)
