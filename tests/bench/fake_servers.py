"""Servers of the floor benchmark: `fake_servers.py ours|floor PORT`. Prints a line when it listens.

`floor` writes one constant message a token with nothing behind it; `ours` is the whole servicer over an
engine whose step batches come as fast as they are taken.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import uvloop
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from smg_grpc_servicer.serving.health import Health
from smg_grpc_servicer.serving.processes import calm_poller
from smg_grpc_servicer.serving.server import server_options
from smg_grpc_servicer.serving.servicer import Servicer
from smg_grpc_servicer.wire.calls import Call, Details, Finish, FinishReason, Step, StepBatch
from smg_grpc_servicer.wire.contracts.vllm import VllmContract

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fake_engine import FakeEngine

STEP_SECS = 0.0015


class Floor(pb_grpc.VllmEngineServicer):
    """A constant message a token, a complete at the end."""

    async def Generate(self, request, context):
        tokens = request.sampling_params.max_tokens
        chunk = pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=[7], prompt_tokens=64, completion_tokens=1))
        for _ in range(tokens):
            await context.write(chunk)
        await context.write(
            pb.GenerateResponse(complete=pb.GenerateComplete(output_ids=[7] * tokens, finish_reason="length"))
        )


class FastEngine(FakeEngine):
    """A token for every live key in every step, a step about as fast as the streams take one.

    The steps are made once and used until a call joins or ends: what is measured is the servicer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left: dict[str, int] = {}
        self.work = asyncio.Event()

    async def submit(self, call: Call, keys: Sequence[str]) -> None:
        for key in keys:
            self.left[key] = call.sampling.max_tokens or 1
        self.work.set()

    async def cancel(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.left.pop(key, None)

    async def steps(self) -> AsyncIterator[StepBatch]:
        done = Details(finish=Finish(FinishReason.LENGTH))
        while True:
            if not self.left:
                self.work.clear()
                await self.work.wait()
            batch = StepBatch(0, [Step(key, [7]) for key in self.left])
            made = 0
            while len(batch.steps) == len(self.left) and made < min(self.left.values()) - 1:
                made += 1
                yield batch
                await asyncio.sleep(STEP_SECS)
            ended = []
            for key in [step.key for step in batch.steps if step.key in self.left]:
                self.left[key] -= made
                if self.left[key] == 1:
                    ended.append(Step(key, [7], done))
                    del self.left[key]
            yield StepBatch(0, ended)


async def main(kind: str, port: int) -> None:
    server = grpc.aio.server(options=server_options(-1))
    if kind == "floor":
        pb_grpc.add_VllmEngineServicer_to_server(Floor(), server)
    else:
        contract = VllmContract()
        servicer = Servicer(contract, Health([contract.service]))
        contract.register(servicer, server)
        gc.collect()
        gc.freeze()  # as a worker does
        servicer.serve(FastEngine())
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    if kind == "ours":
        calm_poller()
    print("listening", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2])))
