"""The gRPC server that SGLang's `--smg-grpc-mode` starts."""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from ..hooks.command_line import choose, end_start
from ..hooks.settings import ConfigurationError
from ..serving import extensions
from ..serving.engine import Engine
from ..serving.life import Life, first
from ..serving.processes import end_children, in_thread
from ..serving.server import Tls, Worker, run
from ..wire.contracts.sglang import SglangContract
from .command_line import arguments
from .engine import NAME
from .schedulers import Ports, Schedulers, prepare
from .settings import IMPLEMENTATION, worker_settings

logger = logging.getLogger(__name__)

Ready = Callable[[Any, Any, Any], Awaitable[None]]


async def serve_grpc(server_args: Any, model_info: Any = None, on_request_manager_ready: Ready | None = None) -> None:
    """Serve SGLang's resolved ServerArgs until a signal or the engine's end; SystemExit carries a code that is not 0.

    `on_request_manager_ready` is called once the schedulers are ready, with an object that has
    `send_communicator_req`, the ServerArgs and the first scheduler's facts.
    """
    args = arguments(server_args=server_args, on_request_manager_ready=on_request_manager_ready)
    try:
        code = await choose(NAME, IMPLEMENTATION, args)(args)
    except ConfigurationError as error:
        end_start(error.lines)
    if code:
        raise SystemExit(code)


async def serve_python(args: argparse.Namespace) -> int:
    """Serve `args.server_args` over gRPC from Python; returns the exit code."""
    server_args = args.server_args
    settings = worker_settings(args)
    schedulers = Schedulers()
    port_args = prepare(server_args)
    schedulers.take_over_sigquit()
    from sglang.srt.runtime_context import get_parallel, get_serving

    serving = get_serving()
    if get_parallel().node_rank >= 1:
        return await follow(server_args, port_args, schedulers)
    tls = tls_of(serving)
    ports = Ports(port_args)
    bootstrap = start_bootstrap_server()

    def load() -> Any:
        return load_engine(server_args, ports, schedulers)

    async def connect(loaded: Any) -> Engine:
        from .adapter import SglangEngine

        engine = SglangEngine(server_args, ports, schedulers, *loaded)
        await asyncio.to_thread(engine.server_facts)
        if args.on_request_manager_ready is not None:
            await args.on_request_manager_ready(engine, server_args, engine.info)
        return engine

    worker = Worker(
        contract=SglangContract(),
        host=serving.host,
        port=serving.port,
        tls=tls,
        load=load,
        connect=connect,
        drain_secs=settings["drain_secs"],
        max_message_bytes=settings["max_message_bytes"],
        interceptors=extensions.interceptors(NAME, args),
        admit=extensions.admit(NAME),
        finished=extensions.finished(NAME),
    )
    try:
        return await run(worker)
    finally:
        ports.close()
        del bootstrap  # lives as long as the worker


def tls_of(serving: Any) -> Tls | None:
    """The TLS files of SGLang's own flags."""
    if serving.api_key or serving.admin_api_key:
        logger.warning("--api-key is not enforced on the gRPC port: keep the port private to the router")
    tls = Tls.of_flags(serving.ssl_certfile, serving.ssl_keyfile, serving.ssl_ca_certs)
    if tls is not None and serving.ssl_keyfile_password:
        raise ConfigurationError(["--ssl-keyfile-password: gRPC takes no encrypted key; decrypt --ssl-keyfile"])
    return tls


def start_bootstrap_server() -> Any:
    """What the other half of a disaggregated pair finds a prefill worker by; None where there is no such pair."""
    from sglang.srt.managers.disagg_service import start_disagg_service

    return start_disagg_service()


def load_engine(server_args: Any, ports: Ports, schedulers: Schedulers) -> tuple[Any, Any]:
    """Start the schedulers; returns their model's configuration and tokenizer. Blocking."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.tokenizer_manager import get_tokenizer
    from sglang.srt.runtime_context import get_model, get_serving

    schedulers.start(server_args, ports.arguments)
    serving = get_serving()
    tokenizer = None
    if not serving.skip_tokenizer_init:
        tokenizer = get_tokenizer(
            serving.tokenizer_path,
            tokenizer_mode=serving.tokenizer_mode,
            trust_remote_code=get_model().trust_remote_code,
            revision=get_model().revision,
            tokenizer_backend=serving.tokenizer_backend,
        )
    model = ModelConfig.from_server_args(server_args)
    return model, tokenizer


async def follow(server_args: Any, port_args: Any, schedulers: Schedulers) -> int:
    """Run the schedulers of a node that the first node's worker serves; returns the exit code."""
    from sglang.srt.runtime_context import get_observability, get_serving
    from sglang.srt.utils.common import launch_dummy_health_check_server

    life = Life()
    life.watch_signals()
    try:
        starting = in_thread(lambda: schedulers.start(server_args, port_args))
        await first(starting, life.stop.wait())
        if not life.stop.is_set():
            starting.result()
            serving = get_serving()
            launch_dummy_health_check_server(serving.host, serving.port, get_observability().enable_metrics)
            await first(asyncio.wrap_future(schedulers.died), life.stop.wait())
    except Exception as error:  # noqa: BLE001  whatever keeps a scheduler from starting ends this node
        schedulers.report(f"the schedulers did not start: {error}")
    finally:
        life.forget_signals()
    died = schedulers.died.done() and not life.stop.is_set()
    if died:
        logger.error("%s", schedulers.died.result())
    end_children()
    return 1 if died else 0
