"""What SGLang loads in every process (entry point `sglang.srt.plugins`) to have schedulers served over ZMQ.

Without `SMG_SGLANG_ZMQ_HANDSHAKE` a process pays for this module and nothing else.
"""

from __future__ import annotations

import os


def register() -> None:
    """Have SGLang bind our seams; SystemExit where this SGLang lacks one, as a scheduler would wait in silence."""
    if not os.environ.get("SMG_SGLANG_ZMQ_HANDSHAKE"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from .zmq_seams import register_all

    register_all(HookRegistry, HookType.AROUND)
