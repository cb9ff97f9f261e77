"""``smg-servicer demo``: a tiny model, a real engine with our worker, the real router and one chat request."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from .engine import TORCH_COMPANIONS, find_engine, offline, worker_command, worker_environment
from .models import write
from .processes import HOST, Child, DemoError, free_ports

PROMPT = "Hello! What does a router in front of an inference engine do?"
MAX_TOKENS = 64
WORKER_SECONDS = 300.0
ROUTER_SECONDS = 60.0
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Answer:
    """One streamed chat completion; times in seconds since the request was sent."""

    text: str
    tokens: int
    first_token: float
    last_token: float
    finish_reason: str | None


def run(argv: list[str]) -> int:
    """Run the demo; the exit code is 0, or 1 where something failed, or 2 for arguments that cannot be used."""
    options = _parser().parse_args(argv)
    if options.model is not None and not (options.model / "config.json").is_file():
        return _refuse(2, f"--model {options.model}: not a model folder (it has no config.json)")
    try:
        ports = free_ports([options.port, options.router_port, 0])
    except OSError as error:
        return _refuse(2, str(error))
    with _interrupt_on_sigterm(), contextlib.ExitStack() as stack:
        children: list[Child] = []
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="smg-demo-", ignore_cleanup_errors=True))
            _demo(options, ports, Path(folder), stack, children)
        except (DemoError, ImportError) as error:
            for child in children:
                print(f"--- end of the {child.name}'s log\n{child.log_tail()}\n---", file=sys.stderr)
                _hint(child)
            return _refuse(1, str(error))
        except KeyboardInterrupt:
            return _refuse(1, "interrupted")
    _say("everything is stopped and cleaned up")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="smg-servicer demo",
        description="Start an engine with our worker and the SMG router on it, and send one chat request through.",
    )
    parser.add_argument("--engine", choices=["auto", "vllm"], default="auto", help="default: what is installed")
    parser.add_argument("--servicer-impl", default="python", metavar="NAME", help="python (default) or rust")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a model folder (default: a tiny Qwen3 made here)")
    parser.add_argument("--prompt", default=PROMPT, metavar="TEXT", help="what to ask (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="the worker's port (default: a free one)")
    parser.add_argument("--router-port", type=int, default=0, help="the router's port (default: a free one)")
    parser.add_argument("--keep", action="store_true", help="keep worker and router running until Ctrl-C")
    return parser


def _demo(
    options: argparse.Namespace, ports: list[int], folder: Path, stack: contextlib.ExitStack, children: list[Child]
) -> None:
    """The demo itself: what it starts goes onto ``stack`` to be ended, and into ``children`` to be reported on."""
    worker_port, router_port, prometheus_port = ports
    engine = find_engine()
    smg = _router_executable()
    model = options.model.resolve() if options.model else write("qwen3", folder / "tiny-qwen3")
    _say(f"model: {model}" + ("" if options.model else " (a tiny Qwen3 with random weights, made here)"))

    _say(
        f"worker: {engine.distribution} {engine.version} on grpc://{HOST}:{worker_port}, starting (about half a minute)"
    )
    started = time.monotonic()
    environment, mended = worker_environment(engine, folder / "worker")
    for sentence in mended:
        _say(f"worker: {sentence}")
    worker = Child(
        "worker", worker_command(engine, model, worker_port, options.servicer_impl), environment, folder / "worker.log"
    )
    children.append(stack.enter_context(worker))
    wait_until_serving(worker, worker_port, started + WORKER_SECONDS)
    _say(f"worker: SERVING after {time.monotonic() - started:.1f} s")

    started = time.monotonic()
    command = router_command(smg, model, worker_port, router_port, prometheus_port)
    router = Child("router", command, offline(), folder / "router.log")
    children.append(stack.enter_context(router))
    name = wait_for_model(children, router_port, started + ROUTER_SECONDS)
    _say(f"router: http://{HOST}:{router_port} serves {name!r} after {time.monotonic() - started:.1f} s")

    _say(f"prompt: {options.prompt}")
    _report(chat(router_port, name, options.prompt), made_here=options.model is None)
    if options.keep:
        _keep(children, router_port, worker_port, name)


def _router_executable() -> Path:
    smg = Path(sys.executable).with_name("smg")
    if not smg.is_file():
        raise DemoError(f"the router is missing ({smg}): pip install 'smg-grpc-servicer[demo]'")
    return smg


def router_command(smg: Path, model: Path, worker_port: int, port: int, prometheus_port: int) -> list[str]:
    command = [str(smg), "launch", "--worker-urls", f"grpc://{HOST}:{worker_port}", "--model-path", str(model)]
    command += ["--host", HOST, "--port", str(port), "--policy", "round_robin"]
    return [*command, "--prometheus-port", str(prometheus_port)]


def wait_until_serving(worker: Child, port: int, deadline: float) -> None:
    """Wait for grpc.health.v1 to say SERVING; DemoError where the worker ends or ``deadline`` (monotonic) passes."""
    channel_options = [("grpc.max_reconnect_backoff_ms", 500), ("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(f"{HOST}:{port}", options=channel_options) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        while time.monotonic() < deadline:
            with contextlib.suppress(grpc.RpcError):
                reply = check(health_pb2.HealthCheckRequest(), timeout=1.0, wait_for_ready=True)
                if reply.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            _must_run([worker])
    raise DemoError(f"the worker was not SERVING within {WORKER_SECONDS:.0f} s")


def wait_for_model(children: list[Child], port: int, deadline: float) -> str:
    """Wait until the router is healthy and lists a model, whose name is returned."""
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            if _get(port, "/health")[0] == 200:
                status, body = _get(port, "/v1/models")
                models = json.loads(body)["data"] if status == 200 else []
                if models:
                    return str(models[0]["id"])
        _must_run(children)
    raise DemoError(f"the router listed no model within {ROUTER_SECONDS:.0f} s")


def chat(port: int, model: str, prompt: str) -> Answer:
    """Stream one chat completion through the router."""
    request = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    parts: list[str] = []
    tokens, finish_reason = 0, None
    started = time.perf_counter()
    first = last = started
    for event in _events(port, "/v1/chat/completions", request):
        if "error" in event:
            raise DemoError(f"the router answered with an error: {event['error']}")
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        for choice in event.get("choices", []):
            finish_reason = choice.get("finish_reason") or finish_reason
            if text := choice["delta"].get("content"):
                last = time.perf_counter()
                first = last if not parts else first
                parts.append(text)
    if not parts:
        raise DemoError("the answer was empty")
    return Answer("".join(parts), tokens or len(parts), first - started, last - started, finish_reason)


def _events(port: int, path: str, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The server-sent events of a POST."""
    with contextlib.closing(http.client.HTTPConnection(HOST, port, timeout=60)) as connection:
        try:
            connection.request("POST", path, json.dumps(request), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise DemoError(f"the router answered {response.status}: {response.read().decode(errors='replace')}")
            for line in response:
                data = line.decode().strip().removeprefix("data:").strip()
                if line.startswith(b"data:") and data != "[DONE]":
                    yield json.loads(data)
        except (OSError, http.client.HTTPException) as error:
            raise DemoError(f"the router broke off: {error!r}") from error


def _get(port: int, path: str) -> tuple[int, bytes]:
    with contextlib.closing(http.client.HTTPConnection(HOST, port, timeout=5)) as connection:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()


def _report(answer: Answer, *, made_here: bool) -> None:
    text = "".join(character if character.isprintable() else " " for character in answer.text)
    _say(f"answer: {text}")
    if made_here:
        _say("        (random weights: the words mean nothing, the way they took is the real one)")
    _say(f"time to first token: {answer.first_token * 1000:.1f} ms")
    rate = f"{answer.tokens / answer.last_token:.0f} tokens/s"
    _say(f"speed: {rate} ({answer.tokens} tokens in {answer.last_token:.3f} s, finish reason {answer.finish_reason})")


def _keep(children: list[Child], router_port: int, worker_port: int, name: str) -> None:
    _say(
        f"running until Ctrl-C: router http://{HOST}:{router_port}, worker grpc://{HOST}:{worker_port}, model {name!r}"
    )
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            _must_run(children)


def _must_run(children: list[Child]) -> None:
    """Wait a moment; DemoError where one of the children ends in it."""
    for child in children:
        code = child.exit_code(POLL_SECONDS / len(children))
        if code is not None:
            raise DemoError(f"the {child.name} ended by itself with exit code {code}")


def _hint(child: Child) -> None:
    log = child.log.read_text(encoding="utf-8", errors="replace")
    if any(name in log for name in TORCH_COMPANIONS):
        names = "/".join(TORCH_COMPANIONS)
        print(f"hint: {names} missing or of another build than torch: only text models run without", file=sys.stderr)


@contextlib.contextmanager
def _interrupt_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the demo as Ctrl-C does, so that nothing is left running."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _say(line: str) -> None:
    print(line, flush=True)


def _refuse(code: int, message: str) -> int:
    print(f"smg-servicer demo: {message}", file=sys.stderr)
    return code
