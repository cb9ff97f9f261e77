"""The table of live calls: step batches in by internal key, choices out to whoever waits.

Keys are ours: of one length, unique for the life of the process, never a client's id. So duplicates,
re-used ids, aborts by prefix and several choices are settled here for every engine.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..wire.calls import Details, Finish, FinishReason, Logprobs, StepBatch
from .errors import AlreadyLive, Failure

if TYPE_CHECKING:
    from ..wire.calls import Call, EmbedCall

_ABORTED = Finish(FinishReason.ABORT)


class Choice:
    """One output of a call: everything that arrived, and how much of it was sent.

    `detailed` says that its chunks carry more than tokens.
    """

    __slots__ = (
        "accepted_tokens",
        "cached_tokens",
        "completed",
        "detailed",
        "draft_tokens",
        "embedding",
        "finish",
        "fresh",
        "hidden_sent",
        "hidden_states",
        "index",
        "key",
        "kv_transfer",
        "logprobs",
        "logprobs_sent",
        "named_sent",
        "prompt_logprobs",
        "reasoning_tokens",
        "sent",
        "stream",
        "token_id_logprobs",
        "token_ids",
    )

    def __init__(self, stream: Stream, index: int, key: str) -> None:
        self.stream, self.index, self.key = stream, index, key
        self.token_ids: list[int] = []
        self.sent = 0
        self.fresh = False
        self.completed = False
        self.detailed = False
        self.finish: Finish | None = None
        self.cached_tokens = 0
        self.logprobs: list[Logprobs] = []
        self.logprobs_sent = 0
        self.prompt_logprobs: list[Logprobs] = []
        self.token_id_logprobs: list[Logprobs] = []
        self.named_sent = 0
        self.hidden_states: list[Sequence[float]] = []
        self.hidden_sent = 0
        self.reasoning_tokens = 0
        self.kv_transfer: dict[str, Any] | None = None
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.embedding: Sequence[float] | None = None

    def note(self, details: Details) -> None:
        """Take in what a step brought beside tokens."""
        if details.logprobs is not None:
            self.logprobs.append(details.logprobs)
            self.detailed = True
        if details.prompt_logprobs is not None:
            self.prompt_logprobs.append(details.prompt_logprobs)
            self.detailed = True
        if details.token_id_logprobs is not None:
            self.token_id_logprobs.append(details.token_id_logprobs)
            self.detailed = True
        if details.hidden_states is not None:
            self.hidden_states += details.hidden_states
            self.detailed = True
        if details.reasoning_tokens:
            self.reasoning_tokens = details.reasoning_tokens
            self.detailed = True
        if details.cached_tokens is not None:
            self.cached_tokens = details.cached_tokens
        if details.kv_transfer is not None:
            self.kv_transfer = details.kv_transfer
        if details.draft_tokens:
            self.draft_tokens, self.accepted_tokens = details.draft_tokens, details.accepted_tokens
        if details.embedding is not None:
            self.embedding = details.embedding
        if details.finish is not None:
            self.finish = details.finish


class Stream:
    """One live call with its choices, and the one consumer that waits for them."""

    __slots__ = (
        "_new_future",
        "call",
        "choices",
        "failure",
        "fresh",
        "streaming",
        "unfinished",
        "waiter",
    )

    def __init__(self, call: Call | EmbedCall, keys: Sequence[str], streaming: bool) -> None:
        self.call = call
        self.choices = [Choice(self, index, key) for index, key in enumerate(keys)]
        self.streaming = streaming
        self.unfinished = len(keys)
        self.fresh: list[Choice] = []
        self.waiter: asyncio.Future[None] | None = None
        self.failure: Failure | None = None
        self._new_future = asyncio.get_running_loop().create_future

    @property
    def keys(self) -> list[str]:
        return [choice.key for choice in self.choices]

    @property
    def ended(self) -> bool:
        """Whether nothing more is to come."""
        return self.failure is not None or not self.unfinished

    @property
    def quiet(self) -> bool:
        """Whether the consumer has to wait: a call that does not stream waits for its last choice."""
        return self.failure is None and (not self.fresh if self.streaming else self.unfinished > 0)

    def change(self) -> asyncio.Future[None]:
        """What to await while the stream is quiet."""
        self.waiter = self._new_future()
        return self.waiter

    def take(self) -> list[Choice]:
        """Choices with something new since the last call; raises what ended the stream.

        What arrives while the consumer is busy is in the next answer, so a slow one makes no queue.
        """
        if self.failure is not None:
            raise self.failure
        fresh, self.fresh = self.fresh, []
        for choice in fresh:
            choice.fresh = False
        return fresh if self.streaming else self.choices

    def wake(self) -> None:
        """Let the consumer look again."""
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class StreamTable:
    """All live calls by request id, and their choices by internal key."""

    def __init__(self) -> None:
        self._by_id: dict[str, Stream] = {}
        self._choices: dict[str, Choice] = {}
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._by_id)

    def new_key(self) -> str:
        """A key that no engine has seen from this process."""
        return f"smg-{self._prefix}-{next(self._numbers):012x}"

    def open(self, call: Call | EmbedCall, choices: int = 1, streaming: bool = False) -> Stream:
        """Register a call; raises AlreadyLive when its id is running."""
        if call.request_id in self._by_id:
            raise AlreadyLive(f"request_id: {call.request_id!r} is running")
        stream = Stream(call, [self.new_key() for _ in range(choices)], streaming)
        self._by_id[call.request_id] = stream
        for choice in stream.choices:
            self._choices[choice.key] = choice
        self._idle.clear()
        return stream

    def close(self, stream: Stream) -> list[str]:
        """Forget a call; returns the keys that the engine may still hold."""
        if self._by_id.get(stream.call.request_id) is stream:
            del self._by_id[stream.call.request_id]
        for choice in stream.choices:
            self._choices.pop(choice.key, None)
        if not self._by_id:
            self._idle.set()
        return [choice.key for choice in stream.choices if choice.finish is None]

    def feed(self, batch: StepBatch) -> None:
        """Hand a step batch to its choices. Steps of unknown keys belong to nobody any more."""
        choices = self._choices
        for step in batch.steps:
            choice = choices.get(step.key)
            if choice is None or choice.finish is not None:
                continue
            choice.token_ids += step.token_ids
            stream = choice.stream
            if step.details is not None:
                choice.note(step.details)
                if choice.finish is not None:
                    stream.unfinished -= 1
            if not choice.fresh:
                choice.fresh = True
                stream.fresh.append(choice)
            waiter = stream.waiter
            if waiter is not None and (stream.streaming or not stream.unfinished):
                stream.waiter = None
                if not waiter.done():
                    waiter.set_result(None)

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End live calls with what they have; returns the keys to end in the engine."""
        keys: list[str] = []
        for request_id in request_ids:
            stream = self._by_id.get(request_id)
            if stream is None:
                continue
            for choice in stream.choices:
                if choice.finish is None:
                    choice.finish = _ABORTED
                    keys.append(choice.key)
                    if not choice.fresh:
                        choice.fresh = True
                        stream.fresh.append(choice)
            stream.unfinished = 0
            stream.wake()
        return keys

    def fail(self, failure: Failure) -> list[str]:
        """End every live call with `failure`; returns the keys that the engine may still hold."""
        keys = []
        for stream in self._by_id.values():
            stream.failure = failure
            keys += [choice.key for choice in stream.choices if choice.finish is None]
            stream.wake()
        return keys

    def live(self) -> Iterable[Stream]:
        """Live calls, oldest first."""
        return self._by_id.values()

    def not_started(self) -> list[Stream]:
        """Calls that the engine has answered nothing for, oldest first."""
        return [s for s in self._by_id.values() if not any(choice.token_ids for choice in s.choices)]

    async def idle(self) -> None:
        """Return once no call is live."""
        await self._idle.wait()
