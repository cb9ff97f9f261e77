"""An engine of the core's own rules: deterministic tokens, and the faults that a real one cannot be asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from smg_grpc_servicer.serving.engine import Capacity, Limits, Range
from smg_grpc_servicer.serving.errors import EngineDead, Failure, Internal, Invalid, Precondition, Rejected
from smg_grpc_servicer.wire.calls import (
    Adapter,
    Call,
    Details,
    EmbedCall,
    EngineLoad,
    Finish,
    FinishReason,
    Logprobs,
    ModelFacts,
    ProfileOptions,
    ServerFacts,
    Step,
    StepBatch,
)

VOCABULARY = 2048
CONTEXT = 512

RANGES = {
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, open_low=True),
    "min_p": Range(0, 1),
    "frequency_penalty": Range(-2, 2),
    "presence_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, 1e9, open_low=True),
    "top_k": Range(0, 2**31 - 1),
    "n": Range(1, 128),
}


def next_token(prompt: Sequence[int], index: int, position: int) -> int:
    """The token that the engine makes: a function of the prompt, the choice and the position alone."""
    return (sum(prompt) * 31 + index * 17 + position * 7 + len(prompt)) % VOCABULARY


class Held:
    """A submission that the engine works on."""

    def __init__(self, call: Call, index: int) -> None:
        self.call, self.index = call, index
        self.made = 0
        asked = call.sampling.max_tokens
        self.wanted = CONTEXT - len(call.token_ids) if asked is None else asked


class FakeEngine:
    """Makes one token for every submission in each step; `pace` seconds lie between steps.

    `limits` replaces some of Limits' fields. Every second token is a reasoning token where a call counts them.
    """

    def __init__(self, pace: float = 0.0, **limits: Any) -> None:
        standard = Limits(
            vocab_size=VOCABULARY,
            max_prompt_token_id=VOCABULARY - 1,
            max_context=CONTEXT,
            max_logprobs=-1,
            data_parallel_ranks=2,
            ranges=RANGES,
            greedy_allows_choices=True,
            embeds=True,
        )
        self.limits = msgspec.structs.replace(standard, **limits)
        self.pace = pace
        self.held: dict[str, Held] = {}
        self.embeds: list[tuple[str, EmbedCall]] = []
        self.embedded: list[tuple[str, EmbedCall]] = []
        self.submitted: list[tuple[Call, list[str]]] = []
        self.cancelled: list[str] = []
        self.released: list[tuple[dict[str, Any], int | None]] = []
        self.flushes: list[bool] = []
        self.profiling = False
        self.takes_profile_options = False
        self.profile_options: ProfileOptions | None = None
        self.loaded: dict[str, Adapter] = {}
        self.sickness: str | None = None
        self.reports: dict[int, EngineLoad] = {}
        self.closed = False
        self.submit_error: Exception | None = None
        self.fail_at: dict[str, Finish] = {}  # by request id: how it ends instead
        self.running = asyncio.Event()
        self.running.set()
        self.work = asyncio.Event()
        self.death: Exception | None = None
        self.tokenizer: Path | None = None
        self.change = asyncio.Condition()

    async def tokenize(self, text: str, keep: int | None) -> Sequence[int]:
        return [byte % VOCABULARY for byte in text.encode()]

    async def submit(self, call: Call, keys: Sequence[str]) -> None:
        if self.submit_error is not None:
            raise self.submit_error
        self.submitted.append((call, list(keys)))
        for index, key in enumerate(keys):
            assert key not in self.held
            self.held[key] = Held(call, index)
        self.work.set()
        await self._changed()

    async def submit_embedding(self, call: EmbedCall, key: str) -> None:
        self.embeds.append((key, call))
        self.embedded.append((key, call))
        self.work.set()

    async def cancel(self, keys: Sequence[str]) -> None:
        self.cancelled += keys
        for key in keys:
            self.held.pop(key, None)
        await self._changed()

    async def release_handoff(self, kv_transfer: dict[str, Any], rank: int | None, key: str) -> None:
        self.released.append((kv_transfer, rank))
        await self._changed()

    async def _changed(self) -> None:
        async with self.change:
            self.change.notify_all()

    async def until(self, condition: Any, timeout: float = 5.0) -> None:
        """Return once `condition()` is true, looking at every change of what the engine holds."""

        async def wait() -> None:
            async with self.change:
                await self.change.wait_for(condition)

        await asyncio.wait_for(wait(), timeout)

    def pause(self) -> None:
        """Make no more steps for now."""
        self.running.clear()

    def resume(self) -> None:
        self.running.set()

    def die(self, error: Exception | None = None) -> None:
        """End as a killed engine does."""
        self.death = error or EngineDead("the engine core died")
        self.running.set()
        self.work.set()

    async def steps(self) -> AsyncIterator[StepBatch]:
        while True:
            if not self.held and not self.embeds:
                self.work.clear()
                await self.work.wait()
            await self.running.wait()
            if self.death is not None:
                raise self.death
            yield self.step()
            await self._changed()
            await asyncio.sleep(self.pace)

    def step(self) -> StepBatch:
        steps = [self._token(key, held) for key, held in list(self.held.items())]
        steps += [self._embedding(key, call) for key, call in self.embeds]
        self.embeds.clear()
        return StepBatch(0, steps, EngineLoad(running=len(self.held), waiting=0, kv_usage=len(self.held) / 100))

    def _token(self, key: str, held: Held) -> Step:
        sampling, call = held.call.sampling, held.call
        details = Details()
        if held.made == 0:
            details.cached_tokens, details.prompt_tokens = len(call.token_ids) // 2, len(call.token_ids)
            if sampling.prompt_logprobs is not None and held.index == 0:
                behind = list(call.token_ids)[sampling.prompt_logprobs_from + 1 :]
                details.prompt_logprobs = self._logprobs(behind, sampling.prompt_logprobs)
        if call.hidden_states:
            rows = len(call.token_ids) if held.made == 0 else 1
            details.hidden_states = [[float(held.made), float(row)] for row in range(rows)]
        if sampling.logprob_token_ids:
            ids = np.array([sampling.logprob_token_ids], dtype=np.int64)
            details.token_id_logprobs = Logprobs(ids, (-ids - held.made).astype(np.float32))
        token = next_token(call.token_ids, held.index, held.made)
        tokens = [token] if held.wanted else []
        held.made += len(tokens)
        if call.require_reasoning:
            details.reasoning_tokens = held.made // 2
        if sampling.logprobs is not None and tokens:
            details.logprobs = self._logprobs(tokens, sampling.logprobs)
        if call.request_id in self.fail_at:
            details.finish = self.fail_at[call.request_id]
        elif tokens and token in sampling.stop_token_ids:
            details.finish = Finish(FinishReason.STOP, matched=token)
        elif held.made >= held.wanted:
            details.finish = Finish(FinishReason.LENGTH)
            details.kv_transfer = call.kv_transfer
        if details.finish is not None:
            del self.held[key]
        return Step(key, tokens, details)

    def _embedding(self, key: str, call: EmbedCall) -> Step:
        finish = self.fail_at.get(call.request_id, Finish(FinishReason.STOP))
        embedding = None if call.request_id in self.fail_at else [float(token) for token in call.token_ids]
        return Step(key, [], Details(finish=finish, embedding=embedding))

    @staticmethod
    def _logprobs(tokens: list[int], candidates: int) -> Logprobs:
        width = VOCABULARY if candidates == -1 else candidates
        ids = np.array([[token, *range(width)] for token in tokens], dtype=np.int64)
        values = np.array([[-1.0 - token / 4096, *(-i / 64 for i in range(width))] for token in tokens], np.float32)
        shape = (len(tokens), 1 + width)
        return Logprobs(ids.reshape(shape), values.reshape(shape))

    def rank_of(self, key: str) -> int:
        return 0

    async def flush_cache(self) -> bool:
        return self.flushes.pop(0) if self.flushes else not self.held

    async def profile(self, options: ProfileOptions) -> None:
        if options.given() and not self.takes_profile_options:
            raise Invalid(f"{', '.join(options.given())}: not taken")
        self.profiling, self.profile_options = True, options

    async def stop_profile(self) -> None:
        self.profiling = False

    async def probe(self) -> str | None:
        return self.sickness

    async def load_adapter(self, adapter: Adapter) -> Sequence[Adapter]:
        if adapter.lora_id in self.loaded:
            raise Rejected(f"{adapter.lora_id!r} is loaded")
        self.loaded[adapter.lora_id] = adapter
        return list(self.loaded.values())

    async def unload_adapter(self, name: str, lora_id: str) -> Sequence[Adapter]:
        found = [a.lora_id for a in self.loaded.values() if a.name == name and lora_id in ("", a.lora_id)]
        if not found:
            raise Rejected(f"{name!r} is not loaded")
        del self.loaded[found[0]]
        return list(self.loaded.values())

    async def adapters(self) -> Sequence[Adapter]:
        return list(self.loaded.values())

    async def paused(self) -> bool:
        return not self.running.is_set()

    def model_facts(self) -> ModelFacts:
        return ModelFacts(
            model_path="/models/fake",
            is_generation=True,
            max_context_length=CONTEXT,
            vocab_size=VOCABULARY,
            supports_vision=False,
            served_model_name="fake",
            tokenizer_path="/models/fake",
            model_type="fake",
            architectures=("FakeForCausalLM",),
            eos_token_ids=(1, 2),
            pad_token_id=0,
            bos_token_id=3,
            max_input_length=CONTEXT,
            default_sampling={"temperature": 0.6},
            weight_version="7",
            preferred_sampling_json='{"top_k": 5}',
            id2label_json='{"0": "no"}',
            num_labels=1,
        )

    def server_facts(self) -> ServerFacts:
        return ServerFacts(
            server_type="fake-grpc",
            version="1.2.3",
            data_parallel_size=2,
            max_num_seqs=8,
            max_total_tokens=2000,
            pairing_protocol="p1",
            arguments={"model_path": "/models/fake", "port": 1, "odd": float("inf"), "nested": {"list": [1, None]}},
            scheduler={"status": "ready"},
        )

    def loads(self) -> Mapping[int, EngineLoad]:
        return self.reports

    def capacity(self) -> Capacity:
        return Capacity(ranks=(0, 1), tokens_per_rank=1000, max_running=8)

    def tokenizer_directory(self) -> Path:
        if self.tokenizer is None:
            raise Precondition("no tokenizer")
        return self.tokenizer

    def failure(self, error: BaseException) -> Failure:
        return Internal(str(error))

    def healthy(self) -> bool:
        return self.death is None

    def close(self) -> None:
        self.closed = True
