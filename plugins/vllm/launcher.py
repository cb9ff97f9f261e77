"""`vllm serve --grpc` served from Python: vLLM's own engine, our worker around it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from functools import partial
from typing import Any

from ..hooks.settings import ConfigurationError
from ..serving import extensions
from ..serving.engine import Engine
from ..serving.server import Tls, Worker, run
from ..wire.contracts.vllm import VllmContract
from .adapter import VllmEngine
from .engine import NAME
from .kv_events import publish_by_default
from .settings import worker_settings

logger = logging.getLogger(__name__)


async def serve_python(args: argparse.Namespace) -> int:
    """Serve a parsed vLLM command line over gRPC; returns the exit code."""
    use_engine_logging()
    try:
        settings = worker_settings(args)
        tls = tls_of(args)
        publish_by_default(args, settings)
    except ConfigurationError as error:
        for line in error.lines:
            logger.error("%s", line)
        return error.exit_code
    spawn_engine_processes()
    worker = Worker(
        contract=VllmContract(),
        host=args.host or "0.0.0.0",
        port=args.port,
        tls=tls,
        load=partial(load, args),
        connect=connect,
        drain_secs=settings["drain_secs"],
        max_message_bytes=settings["max_message_bytes"],
        interceptors=extensions.interceptors(NAME, args),
        admit=extensions.admit(NAME),
        finished=extensions.finished(NAME),
        periodic=() if args.disable_log_stats else (log_stats,),
    )
    return await run(worker)


def tls_of(args: argparse.Namespace) -> Tls | None:
    """The TLS files of `vllm serve`'s own flags; the gRPC launcher's parser has none."""
    if getattr(args, "api_key", None):
        logger.warning("--api-key is not enforced on the gRPC port: keep the port private to the router")
    certificate, key, client_ca = (getattr(args, f"ssl_{name}", None) for name in ("certfile", "keyfile", "ca_certs"))
    return Tls.of_flags(certificate, key, client_ca)


def load(args: argparse.Namespace) -> Any:
    """vLLM's engine, from its own code. Blocking: it loads the model."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    engine_args = AsyncEngineArgs.from_cli_args(args)
    context = UsageContext.OPENAI_API_SERVER
    config = engine_args.create_engine_config(usage_context=context)
    return AsyncLLM.from_vllm_config(
        vllm_config=config,
        usage_context=context,
        enable_log_requests=args.enable_log_requests,
        disable_log_stats=args.disable_log_stats,
    )


async def connect(async_llm: Any) -> Engine:
    """The adapter of a loaded engine."""
    from vllm import envs

    # vLLM looks variables up with every request and every step; its engine cores cache them once loaded.
    envs.enable_envs_cache()
    engine = VllmEngine(async_llm)
    await async_llm.get_supported_tasks()
    # Facts that take a while are computed before the first router asks.
    await asyncio.to_thread(engine.server_facts)
    return engine


async def log_stats(engine: Engine) -> None:
    """vLLM's statistics line, as often as its own servers print it."""
    from vllm import envs

    assert isinstance(engine, VllmEngine)
    while True:
        await asyncio.sleep(envs.VLLM_LOG_STATS_INTERVAL)
        await engine.log_stats()


def spawn_engine_processes() -> None:
    """The gRPC server runs while the engine loads, and a process with its threads must not fork."""
    name = "VLLM_WORKER_MULTIPROC_METHOD"
    if os.environ.get(name, "spawn") != "spawn":
        logger.warning("%s=%s is not safe beside a gRPC server: using spawn", name, os.environ[name])
    os.environ[name] = "spawn"


def use_engine_logging() -> None:
    """Our lines go where vLLM's go, at its level, unless the operator configured ours."""
    ours, engine = logging.getLogger("smg_grpc_servicer"), logging.getLogger("vllm")
    if not ours.handlers and not ours.level:
        ours.handlers = list(engine.handlers)
        ours.setLevel(engine.level)
        ours.propagate = engine.propagate
