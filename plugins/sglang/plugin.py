"""What SGLang loads in every process it has (entry point `sglang.srt.plugins`).

The process that reads the command line gets hooks; every other one pays for this module and nothing else.
"""

from __future__ import annotations

import sys


def register() -> None:
    """Have our flags on SGLang's command line, and settings checked as it is read. Never raises."""
    if is_child():
        return
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        from . import command_line

        arguments = "sglang.srt.server_args.ServerArgs"
        HookRegistry.register(f"{arguments}.add_cli_args", command_line.add_flags, HookType.AFTER)
        HookRegistry.register(f"{arguments}.from_cli_args", command_line.check, HookType.BEFORE)
    except Exception:
        import logging

        logging.getLogger("sglang.smg_grpc_servicer").exception("smg-grpc-servicer is not active in this process")


def is_child() -> bool:
    """Whether multiprocessing started this process."""
    processes = sys.modules.get("multiprocessing.process")
    return processes is not None and processes.parent_process() is not None
