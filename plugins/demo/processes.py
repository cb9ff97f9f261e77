"""Child processes of the demo: each in a process group of its own, logging to a file, and surely ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from pathlib import Path

HOST = "127.0.0.1"
TERMINATE_SECONDS = 15.0


class DemoError(Exception):
    """What went wrong, in a sentence that a person can act on."""


class Child:
    """A running command; leaving the ``with`` block ends it and everything that it started."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=os.setpgrp,  # not a session of its own: the scheduler would split the CPU between us
            )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def exit_code(self, within: float = 0.0) -> int | None:
        """The exit code, waiting up to ``within`` seconds for it; None while the process runs."""
        try:
            return self._process.wait(timeout=within)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """Ask the process to end, then end its whole group, also where a second Ctrl-C cuts the wait short."""
        try:
            if self._process.poll() is None:
                self._process.terminate()
                self.exit_code(TERMINATE_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def log_tail(self, lines: int = 30) -> str:
        """The last lines of the log."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])


def free_ports(wanted: list[int]) -> list[int]:
    """The wanted ports, each 0 replaced by a free one. OSError, naming the address, where one is taken."""
    with contextlib.ExitStack() as stack:
        ports = []
        for port in wanted:
            listener = stack.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((HOST, port))
            except OSError as error:
                raise OSError(f"{HOST}:{port} cannot be used: {error.strerror}") from error
            ports.append(listener.getsockname()[1])
        return ports
