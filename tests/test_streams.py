"""The table of live calls under any order of events."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smg_grpc_servicer.serving.errors import AlreadyLive, EngineDead
from smg_grpc_servicer.serving.streams import StreamTable
from smg_grpc_servicer.wire.calls import Call, Details, Finish, FinishReason, Sampling, Step, StepBatch

STOP = Details(finish=Finish(FinishReason.STOP))


def call(request_id: str, n: int = 1) -> Call:
    return Call(request_id=request_id, token_ids=[1], sampling=Sampling(n=n), stream=True)


def step(*steps: Step) -> StepBatch:
    return StepBatch(0, list(steps))


async def test_a_live_id_is_refused_and_a_closed_one_free():
    table = StreamTable()
    stream = table.open(call("a"), 1, True)
    with pytest.raises(AlreadyLive, match="'a'"):
        table.open(call("a"), 1, True)
    assert table.close(stream) == stream.keys
    table.open(call("a"), 1, True)


async def test_closing_an_old_stream_leaves_a_new_one_of_its_id():
    table = StreamTable()
    old = table.open(call("a"), 1, True)
    table.close(old)
    new = table.open(call("a"), 1, True)
    table.close(old)
    assert list(table.live()) == [new]


async def test_steps_of_a_closed_call_go_nowhere():
    table = StreamTable()
    old = table.open(call("a"), 1, True)
    table.close(old)
    new = table.open(call("a"), 1, True)
    table.feed(step(Step(old.keys[0], [1])))
    assert new.choices[0].token_ids == []


async def test_nothing_follows_a_finish():
    table = StreamTable()
    stream = table.open(call("a"), 1, True)
    table.feed(step(Step(stream.keys[0], [1], STOP), Step(stream.keys[0], [2])))
    assert stream.choices[0].token_ids == [1]
    assert table.abort(["a"]) == []


async def test_failing_reaches_a_waiting_consumer():
    table = StreamTable()
    stream = table.open(call("a"), 1, True)
    asyncio.get_running_loop().call_soon(table.fail, EngineDead("gone"))
    while stream.quiet:
        await stream.change()
    with pytest.raises(EngineDead):
        stream.take()


events = st.lists(
    st.tuples(
        st.sampled_from(["open", "feed", "finish", "abort", "close", "take"]), st.integers(0, 3), st.integers(0, 2)
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(events)
def test_any_order_of_events_keeps_every_token_once_and_every_key_accounted(sequence):
    asyncio.run(play(sequence))


async def play(sequence) -> None:
    """Run events against a plain model of what the engine holds and what was read."""
    table, live, engine, read, made = StreamTable(), {}, set(), {}, {}
    for what, number, index in sequence:
        name = f"call-{number}"
        if what == "open":
            if name in live:
                with pytest.raises(AlreadyLive):
                    table.open(call(name), 3, True)
                continue
            live[name] = table.open(call(name, 3), 3, True)
            engine |= set(live[name].keys)
            read.update({key: [] for key in live[name].keys})
            made.update({key: [] for key in live[name].keys})
            continue
        stream = live.get(name)
        if stream is None:
            continue
        choice = stream.choices[index]
        if what in ("feed", "finish") and choice.key in engine:
            token = len(made[choice.key])
            made[choice.key].append(token)
            table.feed(step(Step(choice.key, [token], STOP if what == "finish" else None)))
            if what == "finish":
                engine.discard(choice.key)
        elif what == "abort":
            ended = table.abort([name, name + "x", name[:-1]])
            assert set(ended) == engine & set(stream.keys)
            engine -= set(ended)
        elif what == "close":
            left = table.close(live.pop(name))
            assert set(left) == engine & set(stream.keys)
            engine -= set(left)
        elif what == "take" and not stream.quiet:
            for fresh in stream.take():
                read[fresh.key] += fresh.token_ids[fresh.sent :]
                fresh.sent = len(fresh.token_ids)
        assert choice.token_ids == made[choice.key]
    assert len(table) == len(live)
    for stream in live.values():
        if not stream.quiet:
            for fresh in stream.take():
                read[fresh.key] += fresh.token_ids[fresh.sent :]
        for choice in stream.choices:
            assert read[choice.key] == made[choice.key]
    for stream in list(live.values()):
        table.close(stream)
    await asyncio.wait_for(table.idle(), 1)
