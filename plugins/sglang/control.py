"""Questions that every scheduler answers: one at a time of a kind, as their answers name no question."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from ..serving import errors


class Control:
    """Sends a control request to all `ranks` schedulers and gathers their answers by type."""

    def __init__(self, send: Callable[[Any], None], ranks: int) -> None:
        self._send, self._ranks = send, ranks
        self._locks: defaultdict[type, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._waiting: dict[type, tuple[list[Any], asyncio.Future[Sequence[Any]]]] = {}
        self._late: defaultdict[type, int] = defaultdict(int)
        self._failure: errors.Failure | None = None

    async def ask(self, request: Any, kind: type) -> Sequence[Any]:
        """The answers of every scheduler, all of `kind`; raises what `fail` was told."""
        async with self._locks[kind]:
            if self._failure is not None:
                raise self._failure
            answers: list[Any] = []
            done: asyncio.Future[Sequence[Any]] = asyncio.get_running_loop().create_future()
            self._waiting[kind] = answers, done
            try:
                self._send(request)
                return await done
            finally:
                del self._waiting[kind]
                # Given up: what comes now answers a question that nobody waits for.
                self._late[kind] += self._ranks - len(answers)

    def answer(self, reply: Any) -> bool:
        """Take one scheduler's answer; False when it is none that is waited for."""
        kind = type(reply)
        if self._late[kind]:
            self._late[kind] -= 1
            return True
        if kind not in self._waiting:
            return False
        answers, done = self._waiting[kind]
        answers.append(reply)
        if len(answers) == self._ranks and not done.done():
            done.set_result(answers)
        return True

    def fail(self, failure: errors.Failure) -> None:
        """End every question, now and later."""
        self._failure = failure
        for _, done in self._waiting.values():
            if not done.done():
                done.set_exception(failure)
