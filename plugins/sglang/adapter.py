"""SGLang's schedulers as an engine: this process stands where SGLang's tokenizer manager and detokenizer do."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ..serving import errors
from ..serving.engine import Capacity, Limits
from ..wire.calls import (
    Adapter,
    Call,
    Details,
    EmbedCall,
    EngineLoad,
    FinishReason,
    ModelFacts,
    ProfileOptions,
    ServerFacts,
    Step,
    StepBatch,
)
from . import facts
from .admission import Admission, check_profile, read_rules
from .control import Control
from .loads import LoadReader
from .lora import Adapters
from .outputs import Live, OutputReader, finish_of
from .requests import Requests, limits
from .schedulers import Ports, Schedulers

logger = logging.getLogger(__name__)

_PROBE = "HEALTH_CHECK"
_QUEUE_ABORT = "aborted while it waited"


class SglangEngine:
    """The Engine over SGLang's schedulers (0.5.20 to 0.5.23). Create it on the event loop that serves.

    `model` is SGLang's ModelConfig of `server_args`, `tokenizer` is None with --skip-tokenizer-init.
    """

    def __init__(self, server_args: Any, ports: Ports, schedulers: Schedulers, model: Any, tokenizer: Any) -> None:
        from sglang.srt.managers import io_struct
        from sglang.srt.runtime_context import get_spec

        self._tokens, self._embeddings = io_struct.BatchTokenIDOutput, io_struct.BatchEmbeddingOutput
        self._abort = io_struct.AbortReq
        self._send = ports.send
        self._patience = float(os.environ.get("SGLANG_HEALTH_CHECK_TIMEOUT") or 20)  # as SGLang's HTTP server has it
        self.server_args, self.ports, self.schedulers, self.model = server_args, ports, schedulers, model
        self.info = schedulers.infos[0]
        max_input = int(self.info.get("max_req_input_len") or model.context_len)
        self.limits: Limits = limits(model, tokenizer, max_input)
        self.control = Control(self._send, self.limits.data_parallel_ranks)
        self._adapters = Adapters(self.control)
        self._requests = Requests(model, Admission(read_rules(model, max_input), tokenizer, self._adapters.ids))
        self._live: dict[str, Live] = {}
        drafts = (get_spec().speculative_num_draft_tokens or 1) - 1
        self._reader = OutputReader(self._live, self._forget, drafts)
        self._loads = LoadReader(ports.arguments)
        self._batches: asyncio.Queue[StepBatch | errors.EngineDead] = asyncio.Queue()
        self._numbers = itertools.count()
        self._heard = 0.0
        self._probes: dict[str, asyncio.Future[str | None]] = {}
        self._dead: errors.EngineDead | None = None
        loop = asyncio.get_running_loop()
        ports.listen(self._hear, lambda error: self._die(errors.EngineDead(f"the schedulers speak nonsense: {error}")))
        schedulers.died.add_done_callback(
            lambda died: loop.call_soon_threadsafe(self._die, errors.EngineDead(died.result()))
        )

    # Calls

    async def tokenize(self, text: str, keep: int | None) -> Sequence[int]:
        raise errors.Unsupported("text: this contract takes token ids")

    async def submit(self, call: Call, keys: Sequence[str]) -> None:
        requests = self._requests.generate(call, keys)
        if call.lora_id is not None and hasattr(requests[0], "lora_name"):  # 0.5.22
            for request in requests:
                request.lora_name = self._adapters.name_of(call.lora_id)
        for key, request in zip(keys, requests, strict=True):
            self._add(key, call, request)

    async def submit_embedding(self, call: EmbedCall, key: str) -> None:
        self._add(key, call, self._requests.embed(call, key))

    def _add(self, key: str, call: Call | EmbedCall, request: Any) -> None:
        live = self._live[key] = Live(call, time.monotonic())
        self._adapters.use(live.lora_id)
        try:
            self._send(request)
        except BaseException:
            self._forget(key)
            raise

    async def cancel(self, keys: Sequence[str]) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        for key in keys:
            if self._forget(key):
                self._send(AbortReq(rid=key))

    async def release_handoff(self, kv_transfer: dict[str, Any], rank: int | None, key: str) -> None:
        """The halves of a disaggregated call find each other by room: nothing is held for one that never comes."""

    def _forget(self, key: str) -> Live | None:
        """Strike a submission off; its adapter may go."""
        live = self._live.pop(key, None)
        if live is not None:
            self._adapters.release(live.lora_id)
        return live

    # What the schedulers say

    async def steps(self) -> AsyncIterator[StepBatch]:
        while True:
            batch = await self._batches.get()
            if isinstance(batch, errors.EngineDead):
                raise batch
            yield batch

    def _hear(self, message: Any) -> None:
        self._heard = time.monotonic()
        kind = type(message)
        batch: StepBatch | None
        if kind is self._tokens:
            batch = self._reader.read(message)
        elif kind is self._embeddings:
            batch = self._reader.read_embeddings(message)
        else:
            batch = self._queued_abort(message) if kind is self._abort else None
            self.control.answer(message)
        if batch is not None and batch.steps:
            self._batches.put_nowait(batch)
        if self._probes:
            self._answer_probes(message)

    def _queued_abort(self, message: Any) -> StepBatch | None:
        """The end of a request that a scheduler gave up before it ran."""
        live = self._forget(message.rid)
        if live is None:
            return None
        reason = message.finished_reason or {"type": "abort", "message": message.abort_message or _QUEUE_ABORT}
        return StepBatch(live.rank, [Step(message.rid, [], Details(finish=finish_of(reason, live.constrained)))])

    def _die(self, failure: errors.EngineDead) -> None:
        if self._dead is None:
            self._dead = failure
            self.control.fail(failure)
            for probe in self._probes.values():
                _settle(probe, str(failure))
            self._batches.put_nowait(failure)

    def rank_of(self, key: str) -> int:
        live = self._live.get(key)
        return live.rank if live is not None else 0

    # Health

    async def probe(self) -> str | None:
        """One token from a scheduler; any other word of theirs will do, as a busy one answers no probe."""
        if self._dead is not None:
            return str(self._dead)
        left = self._patience - self._silence()
        if left <= 0:
            return f"the schedulers have been silent for {self._silence():.0f} s"
        key = f"{_PROBE}_smg_{next(self._numbers)}"
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._probes[key] = answer
        try:
            self._send(self._requests.probe(key))
            return await asyncio.wait_for(answer, left)
        except (TimeoutError, asyncio.TimeoutError):
            return f"the schedulers did not answer within {left:.0f} s"
        finally:
            del self._probes[key]

    def _silence(self) -> float:
        """Seconds since the schedulers said something, while something was asked of them."""
        oldest = min((live.submitted for live in self._live.values()), default=None)
        return 0.0 if oldest is None else time.monotonic() - max(oldest, self._heard)

    def _answer_probes(self, message: Any) -> None:
        outputs = type(message) in (self._tokens, self._embeddings)
        reasons = dict(zip(message.rids, message.finished_reasons, strict=True)) if outputs else {}
        for key, answer in self._probes.items():
            finish = finish_of(reasons[key]) if reasons.get(key) else None
            _settle(answer, finish.message if finish is not None and finish.reason is FinishReason.ABORT else None)

    def healthy(self) -> bool:
        return self._dead is None

    # Administration

    async def flush_cache(self) -> bool:
        from sglang.srt.managers.io_struct import FlushCacheReqInput, FlushCacheReqOutput

        answers = await self.control.ask(FlushCacheReqInput(), FlushCacheReqOutput)
        return all(answer.success for answer in answers)

    async def profile(self, options: ProfileOptions) -> None:
        from sglang.srt.managers.io_struct import ProfileReq, ProfileReqType
        from sglang.srt.utils import get_bool_env_var

        given = {name: getattr(options, name) for name in ProfileOptions.__struct_fields__}
        check_profile(given)
        stack, shapes = (
            wanted is not False and get_bool_env_var(variable, "true")
            for wanted, variable in (
                (options.with_stack, "SGLANG_PROFILE_WITH_STACK"),
                (options.record_shapes, "SGLANG_PROFILE_RECORD_SHAPES"),
            )
        )
        given |= {"activities": list(options.activities) or None, "with_stack": stack, "record_shapes": shapes}
        await self._profile(ProfileReq(req_type=ProfileReqType.START_PROFILE, profile_id=str(time.time()), **given))

    async def stop_profile(self) -> None:
        from sglang.srt.managers.io_struct import ProfileReq, ProfileReqType

        await self._profile(ProfileReq(req_type=ProfileReqType.STOP_PROFILE))

    async def _profile(self, request: Any) -> None:
        from sglang.srt.managers.io_struct import ProfileReqOutput

        answers = await self.control.ask(request, ProfileReqOutput)
        failed = [answer.message for answer in answers if not answer.success]
        if failed:
            raise errors.Precondition(" | ".join(dict.fromkeys(failed)))

    async def send_communicator_req(self, req: Any, communicator_name: str, timeout: float) -> Sequence[Any]:
        """What SGLang's sidecar asks of its request manager: the answers of every scheduler."""
        from sglang.srt.managers.io_struct import ProfileReqOutput

        if communicator_name != "profile_communicator":
            raise ValueError(f"{communicator_name!r} is not served")
        return await asyncio.wait_for(self.control.ask(req, ProfileReqOutput), timeout)

    async def load_adapter(self, adapter: Adapter) -> Sequence[Adapter]:
        return await self._adapters.load(adapter)

    async def unload_adapter(self, name: str, lora_id: str) -> Sequence[Adapter]:
        return await self._adapters.unload(name, lora_id)

    async def adapters(self) -> Sequence[Adapter]:
        return self._adapters.loaded()

    async def paused(self) -> bool:
        return False

    def model_facts(self) -> ModelFacts:
        return self._model_facts

    def server_facts(self) -> ServerFacts:
        return self._server_facts

    @cached_property
    def _model_facts(self) -> ModelFacts:
        return facts.model_facts(self.model, self.info)

    @cached_property
    def _server_facts(self) -> ServerFacts:
        most = sum(load.max_running or 0 for load in self.loads().values())
        return facts.server_facts(self.server_args, self.model, self.info, most)

    def loads(self) -> Mapping[int, EngineLoad]:
        """What the schedulers published, which lags some steps behind what they have sent."""
        started = Counter(live.rank for live in self._live.values() if live.started)
        loads = self._loads.loads()
        for rank, load in loads.items():
            load.running = max(load.running, started[rank])
        return loads

    def capacity(self) -> Capacity:
        return self._capacity

    @cached_property
    def _capacity(self) -> Capacity:
        return Capacity(
            ranks=tuple(range(self.limits.data_parallel_ranks)),
            tokens_per_rank=int(self.info.get("max_total_num_tokens") or 0),
            max_running=self._server_facts.max_num_seqs,
        )

    def tokenizer_directory(self) -> Path:
        return facts.tokenizer_directory()

    def failure(self, error: BaseException) -> errors.Failure:
        return errors.Internal(f"the engine failed this request: {type(error).__name__}: {error}")

    def close(self) -> None:
        """End the schedulers; the sockets live as long as the event loop."""
        self.schedulers.close()
        self._loads.close()


def _settle(answer: asyncio.Future[str | None], reason: str | None) -> None:
    if not answer.done():
        answer.set_result(reason)
