"""SGLang's load snapshots as the loads of data-parallel ranks."""

from __future__ import annotations

from typing import Any

import msgspec

from ..wire.calls import (
    DisaggregationLoad,
    EngineLoad,
    LoadSections,
    LoraLoad,
    MemoryLoad,
    QueueLoad,
    SpeculativeLoad,
)


class LoadReader:
    """Reads what every scheduler published last, with its running batch's steps or once a second."""

    def __init__(self, port_args: Any) -> None:
        from sglang.srt.managers.load_snapshot import create_load_snapshot_reader

        self._reader = create_load_snapshot_reader(port_args, caller="TokenizerManager")

    def loads(self) -> dict[int, EngineLoad]:
        """The load of each rank that has published one."""
        return {snapshot.dp_rank: load_of(snapshot) for snapshot in self._reader.read_all()}

    def close(self) -> None:
        """Let go of the snapshots' memory."""
        self._reader.close()


def load_of(snapshot: Any) -> EngineLoad:
    """One LoadSnapshot. Its throughput is left out: SGLang works it out once in many steps, the servicer always."""
    return EngineLoad(
        running=snapshot.num_running_reqs,
        waiting=snapshot.num_waiting_reqs,
        kv_usage=snapshot.token_usage,
        used_tokens=snapshot.num_used_tokens,
        capacity_tokens=snapshot.max_total_num_tokens,
        cache_hit_rate=snapshot.cache_hit_rate,
        max_running=snapshot.max_running_requests,
        waiting_uncached_tokens=snapshot.num_waiting_uncached_tokens,
        sections=LoadSections(
            memory=_section(MemoryLoad, snapshot.memory),
            speculative=_section(SpeculativeLoad, snapshot.speculative),
            lora=_section(LoraLoad, snapshot.lora),
            disaggregation=_disaggregation(snapshot.disaggregation),
            queues=_section(QueueLoad, snapshot.queues),
        ),
    )


def _section(kind: Any, values: Any) -> Any:
    """The fields that `kind` shares with SGLang's struct of the same part."""
    if values is None:
        return None
    given = msgspec.structs.asdict(values)
    return kind(**{name: given[name] for name in kind.__struct_fields__ if name in given})


def _disaggregation(values: Any) -> DisaggregationLoad | None:
    section: DisaggregationLoad | None = _section(DisaggregationLoad, values)
    if section is not None:
        section.prefill_prealloc_queue_reqs = values.prefill_bootstrap_queue_reqs
    return section
