"""What the lives of a worker have in common, whoever serves: signals, races between events, blocking work."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Any, NoReturn

from .processes import leave_now

logger = logging.getLogger(__name__)


class Life:
    """A worker's life on one event loop: `stop` is set by the first signal, a second one ends the process."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self._signals: list[int] = []

    def watch_signals(self) -> None:
        """Take SIGTERM and SIGINT from now on."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
            self._signals.append(number)

    def forget_signals(self) -> None:
        """Give the signals back."""
        loop = asyncio.get_running_loop()
        for number in self._signals:
            loop.remove_signal_handler(number)
        self._signals.clear()

    def on_first_signal(self) -> None:
        """What a life notes down when it is told to end."""

    def leave(self, code: int) -> NoReturn:
        """End the process now, without waiting for anything."""
        leave_now(code)

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self.stop.is_set():
            logger.warning("%s again: ending now", name)
            self.leave(0)
        logger.info("%s: shutting down", name)
        self.on_first_signal()
        self.stop.set()


async def first(*work: Any) -> None:
    """Return when the first of `work` is done; the others are cancelled, but for futures."""
    tasks = [item if isinstance(item, asyncio.Future) else asyncio.ensure_future(item) for item in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            if isinstance(task, asyncio.Task):
                task.cancel()
