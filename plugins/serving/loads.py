"""Load of each data-parallel rank, from what the engine reports and from what passes by."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from typing import TypeVar

from ..wire.calls import EngineLoad, Load, StepBatch
from .engine import Engine
from .streams import StreamTable

_WINDOW = 2.0  # seconds of tokens behind the throughput
_PREFILLS = 64  # first outputs behind the hit rate

_Number = TypeVar("_Number", int, float)


class _Rank:
    __slots__ = ("hits", "reported", "tokens")

    def __init__(self) -> None:
        self.reported: EngineLoad | None = None
        self.tokens: deque[tuple[float, int]] = deque()
        self.hits: deque[tuple[int, int]] = deque(maxlen=_PREFILLS)

    def hit_rate(self) -> float:
        prompt = sum(tokens for tokens, _ in self.hits)
        return sum(cached for _, cached in self.hits) / prompt if prompt else 0.0

    def throughput(self) -> float:
        since = time.monotonic() - _WINDOW
        return sum(count for at, count in self.tokens if at >= since) / _WINDOW


def _known(reported: _Number | None, own: _Number) -> _Number:
    return own if reported is None else reported


class LoadTracker:
    """Rates and counts by rank; `note` runs once per step batch."""

    def __init__(self, table: StreamTable) -> None:
        self._table = table
        self._ranks: defaultdict[int, _Rank] = defaultdict(_Rank)
        self.last_received = 0.0

    def note(self, batch: StepBatch) -> None:
        """Count a step batch."""
        rank = self._ranks[batch.rank]
        now = time.monotonic()
        self.last_received = time.time()
        if batch.load is not None:
            rank.reported = batch.load
        count = 0
        for step in batch.steps:
            count += len(step.token_ids)
            details = step.details
            if details is not None and details.cached_tokens is not None:
                rank.hits.append((details.prompt_tokens, details.cached_tokens))
        if count:
            rank.tokens.append((now, count))
            while rank.tokens[0][0] < now - _WINDOW:
                rank.tokens.popleft()

    def loads(self, engine: Engine) -> list[Load]:
        """The load of every rank that this worker manages."""
        capacity, reports = engine.capacity(), engine.loads()
        waiting = defaultdict(list)
        for stream in self._table.not_started():
            waiting[engine.rank_of(stream.choices[0].key)].append(len(stream.call.token_ids))
        loads = []
        for number in capacity.ranks:
            rank = self._ranks[number]
            report = reports.get(number) or rank.reported or self._own_count(number, engine)
            hit_rate = _known(report.cache_hit_rate, rank.hit_rate())
            tokens = _known(report.capacity_tokens, capacity.tokens_per_rank)
            # The engine says how many wait; the youngest that have not started are those.
            queued = sum(waiting[number][-report.waiting :]) if report.waiting else 0
            loads.append(
                Load(
                    rank=number,
                    running=report.running,
                    waiting=report.waiting,
                    kv_usage=report.kv_usage,
                    used_tokens=_known(report.used_tokens, round(report.kv_usage * tokens)),
                    capacity_tokens=tokens,
                    generated_per_second=_known(report.generated_per_second, rank.throughput()),
                    cache_hit_rate=hit_rate,
                    max_running=_known(report.max_running, capacity.max_running),
                    waiting_uncached_tokens=_known(report.waiting_uncached_tokens, round(queued * (1 - hit_rate))),
                    sections=report.sections,
                )
            )
        return loads

    def _own_count(self, rank: int, engine: Engine) -> EngineLoad:
        """An engine that reports no statistics is counted from the table."""
        keys = [choice.key for stream in self._table.live() for choice in stream.choices if choice.finish is None]
        return EngineLoad(running=sum(engine.rank_of(key) == rank for key in keys), waiting=0, kv_usage=0.0)
