"""What vLLM loads in every process it has (entry point `vllm.general_plugins`).

A launcher gets seams, and so does an engine core that a remote front end talks to; every other process pays for
this module and nothing else.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..hooks.seams import Seam

LAUNCHERS = (
    "vllm.entrypoints.grpc_server",
    "vllm.entrypoints.launchers.grpc_server",
    "vllm.entrypoints.cli.main",
)
ENGINE_GUARD = "SMG_VLLM_ENGINE_GUARD"
_CORE = "vllm.v1.engine.core"


def register() -> None:
    """Bind the launcher's seams where vLLM's command line is read, the guard's in an engine core. Never raises."""
    try:
        if is_launcher():
            from .seams import SEAMS

            bind_all(SEAMS)
        elif is_child() and _CORE in sys.modules and is_guarded():
            from .seams import CORE_SEAMS

            bind_all(CORE_SEAMS)
    except Exception:
        import logging

        logging.getLogger("vllm.smg_grpc_servicer").exception("smg-grpc-servicer is not active in this process")


def guard_engine_cores() -> None:
    """Have the engine cores that this process starts check their requests, unless the operator wants them not to.

    Raises ConfigurationError for a variable that says neither.
    """
    os.environ[ENGINE_GUARD] = os.environ.get(ENGINE_GUARD) or "1"
    try:
        guarded = is_guarded()
    except ValueError as error:
        from ..hooks.settings import ConfigurationError

        raise ConfigurationError([f"{ENGINE_GUARD}: {error}"]) from None
    if guarded:
        from .seams import CORE_SEAMS

        bind_all(CORE_SEAMS)  # for a core that is forked: vLLM loads no plugins again there


def is_guarded() -> bool:
    """Whether the environment has engine cores check their requests; ValueError for what says neither."""
    text = os.environ.get(ENGINE_GUARD)
    if not text:
        return False
    from ..hooks.settings import flag_value

    return flag_value(text)


def is_child() -> bool:
    """Whether multiprocessing started this process."""
    processes = sys.modules.get("multiprocessing.process")
    return processes is not None and processes.parent_process() is not None


def bind_all(seams: tuple[Seam, ...]) -> None:
    """Bind seams, which is what costs a process something."""
    from ..hooks.seams import bind

    for seam in seams:
        bind(seam)


def is_launcher() -> bool:
    """Whether this process runs one of vLLM's command lines: by script, by `-m` or by path."""
    if is_child():
        return False
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name in LAUNCHERS:
        return True
    return LAUNCHERS[-1] in sys.modules or hasattr(main, "serve_grpc")
