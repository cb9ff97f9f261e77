"""The LoRA adapters that the schedulers hold, and who uses them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ..serving import errors
from ..wire.calls import Adapter
from .control import Control


class Adapters:
    """Loads and unloads adapters; calls may name those in `ids`, which the schedulers die of when it lies."""

    def __init__(self, control: Control) -> None:
        from sglang.srt.runtime_context import get_lora, get_parallel

        lora = get_lora()
        self.enabled = bool(lora.enable_lora)
        self.limit: int | None = lora.max_loaded_loras
        self._replicas: int = get_parallel().dp_size
        self._control = control
        self._lock = asyncio.Lock()
        self._users: Counter[str] = Counter()
        self._free: dict[str, asyncio.Event] = {}
        self._loaded = {
            ref.lora_id: Adapter(
                lora_id=ref.lora_id, name=ref.lora_name, path=ref.lora_path or "", pinned=bool(ref.pinned)
            )
            for ref in (lora.lora_paths or ())
        }

    def ids(self) -> Sequence[str]:
        """Ids that a new call may name."""
        return tuple(self._loaded)

    def loaded(self) -> Sequence[Adapter]:
        """All adapters that calls may name."""
        return tuple(self._loaded.values())

    def name_of(self, lora_id: str) -> str:
        """The name of a loaded adapter."""
        return self._loaded[lora_id].name

    def use(self, lora_id: str | None) -> None:
        """Count a submission that names an adapter."""
        if lora_id is not None:
            self._users[lora_id] += 1

    def release(self, lora_id: str | None) -> None:
        """Forget a submission that has ended."""
        if lora_id is None:
            return
        self._users[lora_id] -= 1
        if self._users[lora_id] <= 0:
            del self._users[lora_id]
            if lora_id in self._free:
                self._free[lora_id].set()

    async def load(self, adapter: Adapter) -> Sequence[Adapter]:
        """Load an adapter into every scheduler; returns all that are loaded then."""
        from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput

        self._check()
        async with self._lock:
            for known in self._loaded.values():
                if adapter.lora_id == known.lora_id or adapter.name == known.name:
                    raise errors.Rejected(f"adapter {known.lora_id!r} is loaded under the name {known.name!r}")
            if self.limit is not None and len(self._loaded) >= self.limit:
                raise errors.Rejected(f"--max-loaded-loras is {self.limit}: unload an adapter first")
            await self._change(
                LoadLoRAAdapterReqInput(
                    lora_name=adapter.name, lora_path=adapter.path, pinned=adapter.pinned, lora_id=adapter.lora_id
                ),
                undo=lambda: self._unload_request(adapter),
            )
            self._loaded[adapter.lora_id] = adapter
        return self.loaded()

    async def unload(self, name: str, lora_id: str) -> Sequence[Adapter]:
        """Unload an adapter once the calls that use it have ended; returns all that are still loaded."""
        self._check()
        async with self._lock:
            adapter = self._find(name, lora_id)
            del self._loaded[adapter.lora_id]
            try:
                if self._users[adapter.lora_id]:
                    self._free[adapter.lora_id] = asyncio.Event()
                    await self._free[adapter.lora_id].wait()
            except asyncio.CancelledError:
                self._loaded[adapter.lora_id] = adapter
                raise
            finally:
                self._free.pop(adapter.lora_id, None)
            await self._change(self._unload_request(adapter))
        return self.loaded()

    def _check(self) -> None:
        if not self.enabled:
            raise errors.Precondition("this worker runs without LoRA; start SGLang with --enable-lora")
        if self._replicas > 1:
            raise errors.Unsupported("SGLang loads no adapters at run time into data-parallel replicas")

    def _find(self, name: str, lora_id: str) -> Adapter:
        for adapter in self._loaded.values():
            if adapter.name == name and lora_id in ("", adapter.lora_id):
                return adapter
        raise errors.Rejected(f"no adapter {name!r} with id {lora_id!r} is loaded")

    @staticmethod
    def _unload_request(adapter: Adapter) -> Any:
        from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

        return UnloadLoRAAdapterReqInput(lora_name=adapter.name, lora_id=adapter.lora_id)

    async def _change(self, request: Any, undo: Callable[[], Any] | None = None) -> None:
        """Have every scheduler load or unload; where only some can, `undo` is what takes it back."""
        from sglang.srt.managers.io_struct import LoRAUpdateOutput

        answers = await self._control.ask(request, LoRAUpdateOutput)
        failed = [answer.error_message or "no reason given" for answer in answers if not answer.success]
        if not failed:
            return
        if undo is not None and len(failed) < len(answers):
            await self._control.ask(undo(), LoRAUpdateOutput)
        raise errors.Rejected(" | ".join(dict.fromkeys(failed)))
