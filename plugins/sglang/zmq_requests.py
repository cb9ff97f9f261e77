"""The requests that a headless scheduler works on: the router's ids, and the keys that the scheduler knows them by."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from ..wire.calls import InvalidCall


class Requests:
    """Live requests by key.

    The scheduler aborts by *prefix* of an id, and takes two requests of one id for the same. So it gets keys of which
    none begins with another, and an id can be used again as soon as its request is aborted or has ended.
    """

    def __init__(self) -> None:
        self.rids: dict[str, str] = {}
        """The router's id of each live key."""
        self._keys: dict[str, str] = {}
        self._aborted: set[str] = set()
        self._sent_rows: dict[str, int] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self.rids)

    def add(self, rid: str) -> str:
        """Take in a request and return its key; InvalidCall where its id is in use.

        The outputs of an aborted request of the same id, whose end has not come yet, are nobody's from now.
        """
        if not rid:
            raise InvalidCall("rid", "is empty")
        before = self._keys.get(rid)
        if before is not None:
            if before not in self._aborted:
                raise InvalidCall("rid", "a request of this id is still running")
            self._forget(before)
        key = f"{next(self._numbers):012x}-{rid}"
        self.rids[key], self._keys[rid] = rid, key
        return key

    def abort(self, rid: str) -> str | None:
        """The key of a live request that is to end, None where there is none."""
        key = self._keys.get(rid)
        if key is not None:
            self._aborted.add(key)
        return key

    def end(self, keys: Iterable[str]) -> None:
        """These have ended."""
        for key in keys:
            rid = self.rids.get(key)
            if rid is not None:
                self._forget(key)
                del self._keys[rid]

    def rows_since(self, key: str, rows: int) -> int:
        """How many of so many rows were sent before, for what the scheduler gives anew each time."""
        sent = self._sent_rows.get(key, 0)
        if key in self.rids:
            self._sent_rows[key] = max(sent, rows)
        return sent

    def _forget(self, key: str) -> None:
        del self.rids[key]
        self._aborted.discard(key)
        self._sent_rows.pop(key, None)
