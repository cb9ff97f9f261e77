"""What serving costs, ours and the published package's side by side: `python tests/bench/servicer.py`.

Parts: `imports` (what the plugin adds to a process that only imports vLLM), `floor` (our servicer over a fixed
fake engine against bare grpc.aio), `vllm` and `rust` (both packages over real vLLM, each with its Python and its
Rust implementation, in turn, several rounds; CPU of the serving process per token), and `start` (time from start
to SERVING of our two implementations). Environments are built by tests/environments.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import environments
import models as tiny
from workers import VllmWorker, cpu_seconds, descendants, free_port

GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"
PROMPT = 64
TOKENS = 128
PARTS = ["imports", "floor", "vllm", "rust", "start"]


@dataclass
class Load:
    """What a burst of calls got."""

    messages: int
    tokens: int
    seconds: float


async def burst(address: str, calls: int, stream: bool, tokens: int) -> Load:
    """`calls` calls at once. Tokens are those of the chunks: a complete need not hold them all."""
    async with grpc.aio.insecure_channel(address) as channel:
        generate = channel.unary_stream(GENERATE, request_serializer=pb.GenerateRequest.SerializeToString)

        async def one(number: int) -> tuple[int, int]:
            request = pb.GenerateRequest(request_id=f"bench-{time.monotonic_ns()}-{number}", stream=stream)
            request.tokenized.input_ids.extend((number * 7 + i * 13) % 2000 for i in range(PROMPT))
            request.sampling_params.MergeFrom(pb.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
            messages = produced = 0
            async for raw in generate(request):
                messages += 1
                response = pb.GenerateResponse.FromString(raw)
                produced += len(response.chunk.token_ids if stream else response.complete.output_ids)
            return messages, produced

        start = time.monotonic()
        results = await asyncio.gather(*(one(number) for number in range(calls)))
    counts, produced = zip(*results, strict=True)
    if any(count != tokens for count in produced):
        raise SystemExit(f"a call answered {min(produced)} of {tokens} tokens")
    return Load(sum(counts), sum(produced), time.monotonic() - start)


def load_main(address: str, calls: int, stream: bool, tokens: int) -> None:
    """The load generator, a process of its own."""
    load = asyncio.run(burst(address, calls, stream, tokens))
    print(json.dumps(vars(load)))


def run_load(address: str, calls: int, stream: bool, tokens: int = TOKENS) -> Load:
    command = [sys.executable, __file__, "--load", address, str(calls), str(int(stream)), str(tokens)]
    return Load(**json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def measure(address: str, serving: int, calls: int, stream: bool, tokens: int = TOKENS) -> dict[str, float]:
    """One burst: CPU per token in microseconds, of the serving process and of the engine's processes."""
    engine = descendants(serving)
    before, engine_before = cpu_seconds([serving]), cpu_seconds(engine)
    load = run_load(address, calls, stream, tokens)
    cpu, engine_cpu = cpu_seconds([serving]) - before, cpu_seconds(engine) - engine_before
    return {
        "cpu_us": cpu / load.tokens * 1e6,
        "engine_us": engine_cpu / load.tokens * 1e6,
        "message_us": cpu / load.messages * 1e6,
        "messages_per_s": load.messages / load.seconds,
        "tokens_per_s": load.tokens / load.seconds,
    }


def report(title: str, ours: list[dict[str, float]], theirs: list[dict[str, float]], target: float) -> None:
    """Smallest, median, and the median of pairwise ratios of pairs whose engines cost alike."""
    pairs = [
        (a["cpu_us"] / b["cpu_us"])
        for a, b in zip(ours, theirs, strict=True)
        if 2 / 3 <= a["engine_us"] / b["engine_us"] <= 1.5
    ]
    print(f"\n{title}")
    for name, rows in (("ours", ours), ("published", theirs)):
        values = [row["cpu_us"] for row in rows]
        engine = statistics.median(row["engine_us"] for row in rows)
        rate = statistics.median(row["tokens_per_s"] for row in rows)
        messages = statistics.median(row["messages_per_s"] for row in rows)
        print(
            f"  {name:10} {min(values):6.1f} us/token min, {statistics.median(values):6.1f} median; "
            f"engine {engine:6.1f} us; {rate:7.0f} tokens/s, {messages:7.0f} messages/s"
        )
    best = min(row["cpu_us"] for row in ours) / min(row["cpu_us"] for row in theirs)
    median = statistics.median(pairs) if pairs else float("nan")
    print(f"  ratio      {best:.2f} of the smallest, {median:.2f} median of {len(pairs)} pairs (target {target})")


def bench_vllm(rounds: int, calls: int, rust: bool = False) -> None:
    """Both packages over real vLLM."""
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.load().write("qwen3", Path(folder) / "qwen3")
        # The published package does not start from Rust by itself.
        patched = (str(Path(__file__).with_name("patched.py")), "serve", str(model), "--grpc")
        workers = [
            VllmWorker(
                environments.ensure(spec),
                model,
                Path(folder) / f"{spec}.log",
                *(("--servicer-impl", "rust") if rust else ()),
                launcher=patched if rust and spec == "upstream-vllm" else None,
            )
            for spec in ("vllm", "upstream-vllm")
        ]
        implementation = "rust" if rust else "python"
        targets = (1.0, 1.0) if rust else (0.6, 0.9)
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.wait_serving()
                run_load(worker.address, calls, True)
            for title, stream, target in (("streaming", True, targets[0]), ("one reply per call", False, targets[1])):
                rows: tuple[list[dict[str, float]], ...] = ([], [])
                for _ in range(rounds):
                    for row, worker in zip(rows, workers, strict=True):
                        row.append(measure(worker.address, worker.pid, calls, stream))
                report(f"real vLLM, {implementation}, {calls} calls, {title}", *rows, target)
        finally:
            for worker in workers:
                worker.stop()


def bench_start(rounds: int) -> None:
    """Time from start to SERVING of our two implementations, in turn."""
    times: dict[str, list[float]] = {"python": [], "rust": []}
    python = environments.ensure("vllm")
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.load().write("qwen3", Path(folder) / "qwen3")
        for number in range(rounds):
            for implementation, seconds in times.items():
                log = Path(folder) / f"{implementation}-{number}.log"
                worker = VllmWorker(python, model, log, "--servicer-impl", implementation)
                start = time.monotonic()
                with worker.serving():
                    seconds.append(time.monotonic() - start)
    print("\ntime from start to SERVING")
    for implementation, seconds in times.items():
        print(f"  {implementation:10} {min(seconds):6.1f} s min, {statistics.median(seconds):6.1f} s median")
    pairs = [a / b for a, b in zip(times["rust"], times["python"], strict=True)]
    print(f"  rust/python {statistics.median(pairs):.2f} median of {len(pairs)} pairs (target 1.0)")


def bench_floor(rounds: int, calls: int) -> None:
    """Our servicer over a fixed fake engine against bare grpc.aio, each in a process of its own."""
    python = environments.ensure("vllm")
    script = Path(__file__).with_name("fake_servers.py")
    ports = {"ours": free_port(), "floor": free_port()}
    servers = {
        kind: subprocess.Popen([str(python), str(script), kind, str(port)], stdout=subprocess.PIPE, text=True)
        for kind, port in ports.items()
    }
    try:
        rows: dict[str, list[float]] = {kind: [] for kind in servers}
        rates: dict[str, list[float]] = {kind: [] for kind in servers}
        for kind, server in servers.items():
            assert server.stdout is not None
            server.stdout.readline()
            run_load(f"127.0.0.1:{ports[kind]}", calls, True)
        for _ in range(rounds):
            for kind, server in servers.items():
                row = measure(f"127.0.0.1:{ports[kind]}", server.pid, calls, True, 400)
                rows[kind].append(row["message_us"])
                rates[kind].append(row["messages_per_s"])
    finally:
        for server in servers.values():
            server.send_signal(signal.SIGKILL)
            server.wait()
    print(f"\nfixed fake engine, {calls} streams")
    for kind, values in rows.items():
        print(
            f"  {kind:10} {min(values):6.1f} us/message min, {statistics.median(values):6.1f} median; "
            f"{statistics.median(rates[kind]):7.0f} messages/s"
        )
    pairs = [a / b for a, b in zip(rows["ours"], rows["floor"], strict=True)]
    print(
        f"  ratio      {min(rows['ours']) / min(rows['floor']):.2f} of the smallest, "
        f"{statistics.median(pairs):.2f} median (target 1.3)"
    )


IMPORTS = """
import sys, time
import vllm
from importlib.metadata import entry_points
entry, = [e for e in entry_points(group="vllm.general_plugins") if e.name == "smg-servicer"]
before, start = set(sys.modules), time.perf_counter()
entry.load()()
print(time.perf_counter() - start, len(set(sys.modules) - before))
"""


def bench_imports(rounds: int) -> None:
    """What loading the plugin adds to a process that only imports vLLM."""
    print("\nplugin load in a process that only imports vLLM")
    for name, spec in (("ours", "vllm"), ("published", "upstream-vllm")):
        python = environments.ensure(spec)
        results = []
        for _ in range(rounds):
            environment = dict(os.environ, VLLM_LOGGING_LEVEL="ERROR")
            out = subprocess.run(
                [str(python), "-c", IMPORTS], check=True, capture_output=True, text=True, env=environment
            )
            seconds, modules = out.stdout.split()[-2:]
            results.append((float(seconds) * 1000, int(modules)))
        times = [milliseconds for milliseconds, _ in results]
        print(f"  {name:10} {min(times):6.1f} ms min, {statistics.median(times):6.1f} median, {results[0][1]} modules")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=64)
    parser.add_argument("--load", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        address, calls, stream, tokens = args.load
        load_main(address, int(calls), stream == "1", int(tokens))
        return
    parts = args.parts or PARTS
    if "imports" in parts:
        bench_imports(args.rounds)
    if "floor" in parts:
        bench_floor(args.rounds, args.calls)
    if "vllm" in parts:
        bench_vllm(args.rounds, args.calls)
    if "rust" in parts:
        bench_vllm(args.rounds, args.calls, rust=True)
    if "start" in parts:
        bench_start(args.rounds)


if __name__ == "__main__":
    main()
