"""What a worker knows about the machine it runs on."""

from __future__ import annotations

import functools
import os
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SHM = Path("/dev/shm")


@functools.cache
def shm_namespace_id() -> str:
    """`boot id:device` of /dev/shm: equal for processes that share it, empty when it cannot be told."""
    try:
        return f"{_BOOT_ID.read_text().strip()}:{os.stat(_SHM).st_dev}"
    except OSError:
        return ""
