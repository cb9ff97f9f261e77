"""A worker that is served from Rust, as a program: its life over the smg wheel or a stand-in, and a small engine."""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
import types
from typing import Any

import msgpack
import zmq

PREFIX = "SMG_TEST"
_ABORT = 2  # vLLM's FinishReason
_LENGTH = 1
_STEP_MILLISECONDS = 5


def say(what: str, value: Any = None) -> None:
    # In one write: the server's own lines go to the same pipe.
    print(f"@{what} {json.dumps(value)}\n", end="", flush=True)


# Engines: targets of a spawned process.


def waits(handshake: str) -> None:
    """Lives until it is ended."""
    signal.pause()


def ends(handshake: str) -> None:
    """Cannot start."""
    os._exit(3)


def stubborn(handshake: str) -> None:
    """Takes no notice of SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say("stubborn")
    while True:
        signal.pause()


class Core:
    """vLLM's engine core as the handshake, requests and outputs show it: a token a step for every request."""

    def __init__(self, handshake: str) -> None:
        self.context = zmq.Context()
        self.handshake = self._connect(zmq.DEALER, handshake)
        self.handshake.send(msgpack.packb({"status": "HELLO", "local": True, "headless": True}))
        addresses = msgpack.unpackb(self.handshake.recv())["addresses"]
        self.inputs = self._connect(zmq.DEALER, addresses["inputs"][0])
        self.outputs = self._connect(zmq.PUSH, addresses["outputs"][0])
        self.left: dict[str, int] = {}
        signal.signal(signal.SIGTERM, self.end)
        signal.signal(signal.SIGINT, self.end)

    def _connect(self, kind: int, address: str) -> zmq.Socket[bytes]:
        made = self.context.socket(kind)
        made.setsockopt(zmq.IDENTITY, b"\0\0")
        made.connect(address)
        return made

    def serve(self) -> None:
        numbers = dict.fromkeys("max_num_seqs max_num_batched_tokens world_size tensor_parallel_size".split(), 1)
        sizes = dict.fromkeys("data_parallel_size pipeline_parallel_size decode_context_parallel_size".split(), 1)
        facts = {"max_model_len": 4096, "num_gpu_blocks": 100, "block_size": 16, "dtype": "float32", "max_loras": 0}
        names = {"vllm_version": "0.32.0", "instance_id": "test", "dp_stats_address": None, "supports_lora": False}
        self.inputs.send(msgpack.packb(facts | numbers | sizes | names | {"data_parallel_rank": 0}))
        self.handshake.send(msgpack.packb({"status": "READY", "local": True, "headless": True}))
        while True:
            while self.inputs.poll(_STEP_MILLISECONDS if self.left else None):
                self.take(*self.inputs.recv_multipart()[:2])
            self.step()

    def take(self, kind: bytes, payload: bytes) -> None:
        message = msgpack.unpackb(payload, strict_map_key=False)
        if kind == b"\0":
            self.left[message[0]] = message[3]["max_tokens"]
        elif kind == b"\1":
            for request_id in message:
                self.left.pop(request_id, None)

    def step(self) -> None:
        outputs = []
        for request_id in list(self.left):
            self.left[request_id] -= 1
            last = not self.left[request_id]
            outputs.append([request_id, [7], None, None, None, _LENGTH] if last else [request_id, [7]])
            if last:
                del self.left[request_id]
        if outputs:
            self.send(outputs)

    def send(self, outputs: list[Any]) -> None:
        self.outputs.send(msgpack.packb([0, outputs, None, time.monotonic()]))

    def end(self, *_: object) -> None:
        """As vLLM's core does at a signal: what runs is aborted, then comes its last frame."""
        self.send([[request_id, [], None, None, None, _ABORT] for request_id in self.left])
        self.outputs.send(b"ENGINE_CORE_DEAD")
        self.outputs.close(linger=1000)
        os._exit(0)


def core(handshake: str) -> None:
    """Serves."""
    Core(handshake).serve()


# Servers: what the wheel's class is to the life, by the wheel's version.

CASE: dict[str, Any] = {}


class Server:
    """The members that every wheel has; says what it is told."""

    def __init__(
        self, bind_address: str, ipc_base_url: str, handshake_address: str, path: str, **keywords: Any
    ) -> None:
        if CASE.get("constructor"):
            raise TypeError(CASE["constructor"])
        host, _, port = bind_address.rpartition(":")
        self.listener, self.handshake = socket.socket(), socket.socket()
        for listener, address in (
            (self.listener, (host, int(port))),
            (self.handshake, ("127.0.0.1", int(handshake_address.rpartition(":")[2]))),
        ):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                if CASE.get("bind"):
                    raise OSError(CASE["bind"])
                listener.bind(address)
                listener.listen()
            except OSError as error:
                raise RuntimeError(f"servicer failed to start: {error}") from None
        for end in ("-in.sock", "-out.sock"):
            with open(ipc_base_url.removeprefix("ipc://") + end, "w"):
                pass
        self.address = "{}:{}".format(*self.listener.getsockname())
        self.running = True
        self.polls = 0
        say("server", {name: value for name, value in keywords.items() if value is not None})

    @property
    def last_error(self) -> str | None:
        return CASE.get("last_error")

    @property
    def engine_ready(self) -> bool:
        self.polls += 1
        return bool(CASE.get("ready", True)) and self.polls > 2

    def set_serving(self, serving: bool) -> None:
        say("serving", serving)

    def stop(self, timeout_secs: float) -> None:
        say("stop", timeout_secs)
        if CASE.get("hangs"):
            time.sleep(3600)
        self.running = False


class Wheel1120(Server):
    def __init__(self, *places: str, engine_count: int = 1, engine_startup_timeout_secs: Any = None) -> None:
        super().__init__(*places, engine_count=engine_count, engine_startup_timeout_secs=engine_startup_timeout_secs)


class Wheel1130(Server):
    def __init__(
        self,
        *places: str,
        engine_count: int = 1,
        engine_startup_timeout_secs: Any = None,
        engine_startup_ceiling_secs: Any = None,
        kv_events_endpoint: Any = None,
    ) -> None:
        super().__init__(
            *places,
            engine_count=engine_count,
            engine_startup_timeout_secs=engine_startup_timeout_secs,
            engine_startup_ceiling_secs=engine_startup_ceiling_secs,
            kv_events_endpoint=kv_events_endpoint,
        )
        self.notes = 0

    def note_engine_alive(self) -> None:
        self.notes += 1
        say("alive")

    @property
    def engine_ready(self) -> bool:
        return bool(CASE.get("ready", True)) and self.notes > 1


class WheelNewer(Wheel1130):
    def __init__(
        self,
        *places: str,
        engine_count: int = 1,
        engine_startup_timeout_secs: Any = None,
        engine_startup_ceiling_secs: Any = None,
        engine_silence_timeout_secs: Any = None,
        engine_prefill_tokens_per_sec: Any = None,
        metrics_bind_address: Any = None,
        max_message_bytes: Any = None,
        kv_events_endpoint: Any = None,
    ) -> None:
        super().__init__(*places)
        say("silence", [engine_silence_timeout_secs, engine_prefill_tokens_per_sec])
        say("metrics", [metrics_bind_address, max_message_bytes])
        self.asked = 0

    def set_ready(self, ready: bool) -> None:
        say("set_ready", ready)

    @property
    def kv_relay_subscribed(self) -> bool:
        self.asked += 1
        say("subscribed?")
        return bool(CASE.get("subscribed", True)) and self.asked > 2

    @property
    def active_requests(self) -> int:
        return next_count()


def next_count() -> int:
    """The live calls as the case has them, one a question; the last one stays."""
    counts = CASE["active"]
    count = counts.pop(0) if len(counts) > 1 else counts[0]
    say("active", count)
    return count


def tracing(level: str) -> None:
    say("tracing", level)
    if "=" in level and level.endswith("bad"):
        raise ValueError("invalid log level")


# The program


async def serve() -> int:
    from smg_grpc_servicer.hooks.settings import resolve
    from smg_grpc_servicer.serving import rust, settings, wheel

    declared = (settings.drain_secs(PREFIX), settings.MAX_MESSAGE_BYTES, *settings.rust(PREFIX))

    def launch(handshake: str) -> rust.Headless:
        if CASE.get("launch"):
            raise RuntimeError(CASE["launch"])
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=globals()[name], args=(handshake,)) for name in CASE["engines"]]
        for process in processes:
            process.start()
        say("engines", [process.pid for process in processes])

        def close() -> None:
            say("close")
            for process in processes:
                process.terminate()
                process.join()

        return rust.Headless(processes, close)

    def plan(handshake: str) -> rust.Plan:
        say("plan")
        if CASE.get("plan") == "slow":
            time.sleep(3600)
        if CASE.get("plan"):
            raise ValueError(CASE["plan"])
        facts = {"kv_events_endpoint": "tcp://127.0.0.1:1", "unheard_of": 1}
        return rust.Plan("model", len(CASE["engines"]), lambda: launch(handshake), facts)

    async def active(address: str) -> int | None:
        if CASE["server"] == "smg":
            from smg_grpc_servicer.vllm.rust import active_requests

            return await active_requests(address)
        return next_count()

    worker = rust.RustWorker(
        wheel=wheel.Wheel("VllmGrpcServer", "rust"),
        host=CASE.get("host", "127.0.0.1"),
        port=CASE.get("port", 0),
        settings=resolve(declared, None, os.environ),
        plan=plan,
        active=active,
        prefix=PREFIX,
    )
    return await rust.run(worker)


def main() -> int:
    CASE.update({"server": "Wheel1130", "engines": ["waits"], "active": [0]} | json.loads(sys.argv[1]))
    logging.basicConfig(level=CASE.get("level", "INFO"), format="%(levelname)s %(message)s", stream=sys.stdout)
    if CASE["server"] != "smg":
        module = types.ModuleType("smg.servicer")
        module.VllmGrpcServer = globals()[CASE["server"]]  # type: ignore[attr-defined]
        module.init_servicer_tracing = tracing  # type: ignore[attr-defined]
        sys.modules["smg.servicer"] = module
    return asyncio.run(serve())


if __name__ == "__main__":
    sys.exit(main())
