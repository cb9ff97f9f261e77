"""Load of each data-parallel rank, from what the engine reports and from what passes by."""

from __future__ import annotations

import time
from collections import defaultdict, deque

from ..wire.calls import EngineLoad, Load, StepBatch
from .engine import Engine
from .streams import StreamTable

_WINDOW = 2.0  # seconds of tokens behind the throughput
_PREFILLS = 64  # first outputs behind the hit rate


class _Rank:
    __slots__ = ("hits", "reported", "tokens")

    def __init__(self) -> None:
        self.reported: EngineLoad | None = None
        self.tokens: deque[tuple[float, int]] = deque()
        self.hits: deque[tuple[int, int]] = deque(maxlen=_PREFILLS)


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
        capacity = engine.capacity()
        waiting = defaultdict(list)
        for stream in self._table.not_started():
            waiting[engine.rank_of(stream.choices[0].key)].append(len(stream.call.token_ids))
        loads = []
        for number in capacity.ranks:
            rank = self._ranks[number]
            report = rank.reported or self._own_count(number, engine)
            prompt = sum(tokens for tokens, _ in rank.hits)
            hit_rate = sum(cached for _, cached in rank.hits) / prompt if prompt else 0.0
            # The engine says how many wait; the youngest that have not started are those.
            queued = sum(waiting[number][-report.waiting :]) if report.waiting else 0
            since = time.monotonic() - _WINDOW
            loads.append(
                Load(
                    rank=number,
                    running=report.running,
                    waiting=report.waiting,
                    kv_usage=report.kv_usage,
                    used_tokens=round(report.kv_usage * capacity.tokens_per_rank),
                    capacity_tokens=capacity.tokens_per_rank,
                    generated_per_second=sum(count for at, count in rank.tokens if at >= since) / _WINDOW,
                    cache_hit_rate=hit_rate,
                    max_running=capacity.max_running,
                    waiting_uncached_tokens=round(queued * (1 - hit_rate)),
                )
            )
        return loads

    def _own_count(self, rank: int, engine: Engine) -> EngineLoad:
        """An engine that reports no statistics is counted from the table."""
        keys = [choice.key for stream in self._table.live() for choice in stream.choices if choice.finish is None]
        return EngineLoad(running=sum(engine.rank_of(key) == rank for key in keys), waiting=0, kv_usage=0.0)
