"""What an engine is to the servicer: a sink of calls and a source of step batches."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ..wire.calls import Adapter, Call, EmbedCall, EngineLoad, ModelFacts, ProfileOptions, ServerFacts, StepBatch

if TYPE_CHECKING:
    from .errors import Failure


class Range(msgspec.Struct, frozen=True):
    """The values that a sampling field accepts; text in interval notation by `str`."""

    low: float
    high: float
    open_low: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        return above and value <= self.high

    def __str__(self) -> str:
        return f"{'(' if self.open_low else '['}{self.low:g}, {self.high:g}]"


class Limits(msgspec.Struct, kw_only=True, frozen=True):
    """What the engine accepts, so that nothing it would choke on reaches it.

    `max_prompt_token_id` may lie above `vocab_size`: placeholder ids of some media models do.
    `max_prompt` bounds a prompt where the KV cache holds less than a context. `max_logprobs` bounds
    ranked candidates, -1 is no bound. `min_max_tokens` is 0 where a call may ask for its prefill alone.
    `ranges` may bound `logit_bias`, which is in [-100, 100] otherwise.
    """

    vocab_size: int
    max_prompt_token_id: int
    max_context: int
    max_prompt: int | None = None
    max_logprobs: int
    data_parallel_ranks: int
    ranges: Mapping[str, Range]
    greedy_allows_choices: bool = True
    generates: bool = True
    embeds: bool = False
    tokenizes: bool = True
    min_max_tokens: int = 1


class Engine(Protocol):
    """An engine's adapter. Methods raise `Failure` subclasses, or anything that `failure` explains.

    Everything runs on the servicer's event loop. A method whose engine cannot do what it says raises
    `Unsupported`.
    """

    limits: Limits

    async def tokenize(self, text: str, keep: int | None) -> Sequence[int]:
        """Token ids of a text prompt; of a longer one at least the last `keep` (-1: the context)."""

    async def submit(self, call: Call, keys: Sequence[str]) -> None:
        """Hand one call to the engine, one submission per choice under `keys[index]`.

        What raises has submitted nothing that outlives it; InvalidCall names a field of the call or its
        sampling.
        """

    async def submit_embedding(self, call: EmbedCall, key: str) -> None:
        """Hand an embedding call to the engine; its step brings `Details.embedding`."""

    async def cancel(self, keys: Sequence[str]) -> None:
        """End submissions in the engine; keys it does not hold are ignored."""

    async def release_handoff(self, kv_transfer: dict[str, Any], rank: int | None, key: str) -> None:
        """Tell the KV connector that a call with these parameters will never be submitted.

        `rank` is what the client pinned, unchecked.
        """

    def steps(self) -> AsyncIterator[StepBatch]:
        """Step batches as the engine makes them; raises `EngineDead` when it dies."""

    def rank_of(self, key: str) -> int:
        """The data-parallel rank that serves a submission (0 when unknown)."""

    async def flush_cache(self) -> bool:
        """Invalidate the prefix cache; False when requests in flight prevent it."""

    async def profile(self, options: ProfileOptions) -> None:
        """Start the engine's profiler; `Invalid` names options that it does not take."""

    async def stop_profile(self) -> None:
        """Stop the engine's profiler."""

    async def probe(self) -> str | None:
        """None when the engine answers, else why not, in bounded time and without taking from live calls."""

    async def load_adapter(self, adapter: Adapter) -> Sequence[Adapter]:
        """Load a LoRA adapter; returns all that are loaded then. `Rejected` says why the engine would not."""

    async def unload_adapter(self, name: str, lora_id: str) -> Sequence[Adapter]:
        """Unload a LoRA adapter; returns those that are left. `lora_id` may be empty. Raises as `load_adapter`."""

    async def adapters(self) -> Sequence[Adapter]:
        """The LoRA adapters that are loaded, whoever loaded them."""

    async def paused(self) -> bool:
        """Whether scheduling is paused."""

    def model_facts(self) -> ModelFacts:
        """What the worker says about its model."""

    def server_facts(self) -> ServerFacts:
        """What the worker says about how it runs."""

    def loads(self) -> Mapping[int, EngineLoad]:
        """What the ranks' schedulers say of themselves now; a rank that is left out is known by its step batches."""

    def capacity(self) -> Capacity:
        """What one data-parallel rank can hold, and which ranks there are."""

    def tokenizer_directory(self) -> Path:
        """The local directory that holds the tokenizer; `Precondition` when there is none."""

    def failure(self, error: BaseException) -> Failure:
        """What an exception of the engine's means."""

    def healthy(self) -> bool:
        """Whether the engine still runs."""

    def close(self) -> None:
        """End the engine and everything it started. Blocking; safe to call twice."""


class Capacity(msgspec.Struct, kw_only=True, frozen=True):
    """What each data-parallel rank of this worker holds."""

    ranks: Sequence[int]
    tokens_per_rank: int
    max_running: int
