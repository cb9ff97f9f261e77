"""What vLLM loads in every process it has (entry point `vllm.general_plugins`).

Only a launcher gets seams: an engine core or a worker pays for this module and nothing else.
"""

import sys

LAUNCHERS = (
    "vllm.entrypoints.grpc_server",
    "vllm.entrypoints.launchers.grpc_server",
    "vllm.entrypoints.cli.main",
)


def register() -> None:
    """Bind the parser and the launcher in a process that reads vLLM's command line. Never raises."""
    try:
        if is_launcher():
            from ..hooks.seams import bind
            from .seams import SEAMS

            for seam in SEAMS:
                bind(seam)
    except Exception:
        import logging

        logging.getLogger("vllm.smg_grpc_servicer").exception("smg-grpc-servicer is not active in this process")


def is_launcher() -> bool:
    """Whether this process runs one of vLLM's command lines: by script, by `-m` or by path."""
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        return False
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name in LAUNCHERS:
        return True
    return LAUNCHERS[-1] in sys.modules or hasattr(main, "serve_grpc")
