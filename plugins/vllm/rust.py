"""vLLM served from Rust: engine cores headless behind a ZMQ handshake, the smg wheel's server in front."""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ..hooks import plugins
from ..hooks.command_line import end_start
from ..hooks.seams import State, bind, probe, state
from ..hooks.settings import ConfigurationError, Settings, resolve
from ..serving.errors import Precondition
from ..serving.rust import Headless, Plan, RustWorker, run
from ..serving.wheel import Wheel
from . import facts
from .engine import ENTRY, RUST_SERVER
from .kv_events import endpoints, publish_by_default
from .launcher import spawn_engine_processes, use_engine_logging
from .plugin import guard_engine_cores
from .seams import CORE_SEAMS, LAUNCHER
from .settings import ENGINE_GUARD, IMPLEMENTATION, PREFIX, RUST_SETTINGS

_INFO_SECS = 1.0
# Of a start that spreads over machines, this path serves what one machine holds.
_ONE_MACHINE = {
    "node_rank": "start the other nodes with `vllm serve --headless`",
    "data_parallel_rank": "leave it unset: all ranks are served by this worker",
    "data_parallel_start_rank": "leave it unset: all ranks are served by this worker",
    "data_parallel_hybrid_lb": "leave it off: all ranks are served by this worker",
    "data_parallel_external_lb": "leave it off: all ranks are served by this worker",
}


def resolve_servicer_impl(args: argparse.Namespace) -> str:
    """The implementation that a parsed vLLM command line asks for: "python", "rust" or a plugin's name.

    Ends the process with exit code 2 where a setting is not accepted.
    """
    try:
        return str(resolve((IMPLEMENTATION,), args, os.environ)["implementation"])
    except ConfigurationError as error:
        end_start(error.lines)


def upstream_hook_installed() -> bool:
    """Whether the installed vLLM's gRPC launcher would serve with the implementation that is chosen."""
    return hook_problem() is None


def require_upstream_hook() -> None:
    """Raise RuntimeError, with a sentence to act on, where `upstream_hook_installed` is false."""
    problem = hook_problem()
    if problem is not None:
        raise RuntimeError(problem)


def hook_problem() -> str | None:
    """Why the launcher of the installed vLLM cannot serve from Rust, None when it can."""
    shown = os.environ.get("VLLM_PLUGINS")
    if shown is not None and ENTRY not in shown.split(","):
        return f"VLLM_PLUGINS={shown!r} hides the plugin {ENTRY!r}, which serves from Rust; add it there, or unset it"
    if not probe(LAUNCHER).usable:
        targets = " or ".join(LAUNCHER.targets)
        return f"this vLLM has no {targets} (known in {LAUNCHER.releases}): its launcher cannot serve from Rust"
    return None


def check(args: argparse.Namespace) -> tuple[Settings, Wheel]:
    """All that must hold before a start from Rust; ConfigurationError has a line for each thing that does not."""
    label = IMPLEMENTATION.label()
    lines: list[str] = []
    settings: Settings | None = None
    try:
        settings = resolve(RUST_SETTINGS, args, os.environ, (partial(_ports, args), _metrics_host))
    except ConfigurationError as error:
        lines += error.lines
    try:
        wheel = Wheel(RUST_SERVER, label)
    except ConfigurationError as error:
        raise ConfigurationError([*lines, *error.lines]) from error
    if settings is not None:
        lines += wheel.problems(settings, RUST_SETTINGS)
        if settings["engine_guard"]:
            lines += _unguarded()
    hook = hook_problem() or _unbound_launcher()
    lines += [f"{label}: 'rust' cannot be served: {problem}" for problem in (hook, *_unserved(args)) if problem]
    if lines or settings is None:
        raise ConfigurationError(lines)
    return settings, wheel


def _ports(args: argparse.Namespace, settings: Settings) -> str | None:
    for name in ("metrics_port", "handshake_port"):
        if settings[name] and settings[name] == args.port:
            return f"{name} and --port are both {args.port}; expected two ports"
    return None


def _metrics_host(settings: Settings) -> str | None:
    if settings["metrics_host"] is not None and settings["metrics_port"] is None:
        return "--metrics-host (SMG_VLLM_SERVICER_METRICS_HOST) needs --metrics-port"
    return None


def _unbound_launcher() -> str | None:
    """A launcher that runs as `__main__` and neither is one of vLLM's own nor serves from Rust by itself."""
    main = sys.modules.get("__main__")
    if not hasattr(main, "serve_grpc") or bind(LAUNCHER) is State.BOUND or state(LAUNCHER) is State.BOUND:
        return None
    file = getattr(main, "__file__", None)
    with contextlib.suppress(OSError):
        if file and "serve_rust" in Path(file).read_text(errors="replace"):
            return None
    return f"the launcher {file} is not one of vLLM's own and does not call serve_rust"


def _unguarded() -> Iterator[str]:
    missing = ", ".join(seam.targets[0] for seam in CORE_SEAMS if not probe(seam).usable)
    if missing:
        label = ENGINE_GUARD.label()
        yield f"{label}: this vLLM has no {missing}: its engine cores cannot be guarded; {label}=0 serves all the same"


def _unserved(args: argparse.Namespace) -> Iterator[str]:
    for name, way_out in _ONE_MACHINE.items():
        value = getattr(args, name, None)
        if value is not None and value is not False and not (name == "node_rank" and value == 0):
            yield f"--{name.replace('_', '-')} {value}; {way_out}"
    if getattr(args, "data_parallel_backend", "mp") != "mp":
        yield f"--data-parallel-backend {args.data_parallel_backend}; expected mp"
    if any(getattr(args, name, None) for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")):
        yield "the Rust server has no TLS; leave --ssl-* unset, or use python"
    for hook in ("smg_admit", "smg_interceptors"):
        if plugins.has_hook(hook):
            yield f"a plugin's {hook} would not be asked; remove the plugin, or use python"


async def serve_rust(args: argparse.Namespace) -> int:
    """Serve a parsed vLLM command line from Rust; returns the exit code (0 clean, 1 failed, 2 configuration)."""
    use_engine_logging()
    try:
        settings, wheel = check(args)
        worker = RustWorker(
            wheel=wheel,
            host=args.host or "0.0.0.0",
            port=args.port,
            settings=settings,
            plan=partial(plan, args, settings),
            active=active_requests,
            prefix=PREFIX,
        )
        guard_engine_cores()
    except ConfigurationError as error:
        end_start(error.lines)
    spawn_engine_processes()
    return await run(worker)


def plan(args: argparse.Namespace, settings: Settings, handshake: str) -> Plan:
    """The engine's configuration: facts for the server, and how to start the cores. Blocking."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    publish_by_default(args, settings)
    host, _, port = handshake.removeprefix("tcp://").rpartition(":")
    own = copy.copy(args)
    ranks = own.data_parallel_size
    own.data_parallel_size_local = ranks
    own.data_parallel_address, own.data_parallel_rpc_port = host, int(port)
    engine_args = AsyncEngineArgs.from_cli_args(own)
    config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER, headless=True)
    use_engine_logging()  # a launcher that is not vLLM's leaves logging to its engine arguments
    return Plan(
        model_path=config.model_config.model,
        engines=ranks,
        launch=partial(launch, config, handshake, not args.disable_log_stats),
        facts=server_arguments(config) | {"log_stats": not args.disable_log_stats, "data_parallel_size": ranks},
    )


def launch(config: Any, handshake: str, log_stats: bool) -> Headless:
    """vLLM's own engine cores, which dial the handshake; they are spawned, never forked."""
    from vllm.v1.engine.utils import CoreEngineProcManager
    from vllm.v1.executor import Executor

    manager = CoreEngineProcManager(
        local_engine_count=config.parallel_config.data_parallel_size_local,
        start_index=0,
        local_start_index=0,
        vllm_config=config,
        local_client=False,
        handshake_address=handshake,
        executor_class=Executor.get_class(config),
        log_stats=log_stats,
    )
    return Headless(processes=manager.processes, close=manager.shutdown)


def server_arguments(config: Any) -> dict[str, Any]:
    """What `VllmGrpcServer` is to say about the model and the worker, as the Python implementation says it."""
    model, server = facts.model_facts(config), facts.server_facts(config)
    endpoint, replay, topic = endpoints(config.kv_events_config)
    pooler = getattr(config.model_config, "pooler_config", None)
    try:
        tokenizer: str | None = str(facts.tokenizer_directory(config.model_config))
    except Precondition:
        tokenizer = None
    return {
        "tokenizer_dir": tokenizer,
        "served_model_name": model.served_model_name,
        "tokenizer_path": model.tokenizer_path,
        "is_generation": model.is_generation,
        "max_context_length": model.max_context_length,
        "vocab_size": model.vocab_size,
        "supports_vision": model.supports_vision,
        "model_type": model.model_type,
        "architectures": list(model.architectures),
        "eos_token_ids": list(model.eos_token_ids),
        "pad_token_id": model.pad_token_id,
        "bos_token_id": model.bos_token_id,
        "default_sampling_params_json": (
            json.dumps(model.default_sampling, separators=(",", ":")) if model.default_sampling else ""
        ),
        "pairing_protocol": server.pairing_protocol,
        "kv_connector": server.kv_connector,
        "kv_role": server.kv_role,
        "kv_engine_id": server.kv_engine_id,
        "kv_cache_dtype": server.kv_cache_dtype,
        "attention_backend": server.attention_backend,
        "model_dtype": server.model_dtype,
        "block_size": server.block_size,
        "structured_outputs_backend": getattr(config.structured_outputs_config, "backend", "auto"),
        "kv_events_endpoint": endpoint,
        "kv_events_replay_endpoint": replay,
        "kv_events_topic": topic,
        "shm_namespace_id": server.shm_namespace_id,
        "pooler_use_activation": getattr(pooler, "use_activation", None),
        "pooler_dimensions": getattr(pooler, "dimensions", None),
        "mm_device_do_normalize": server.mm_device_do_normalize,
        "mm_item_limits": server.mm_item_limits,
        "mm_encoder_budget": server.mm_encoder_budget,
        "max_num_seqs": server.max_num_seqs,
        "engine_reasoning_parser": server.reasoning_parser,
        "constrained_decoding_start": server.constrained_decoding_start,
    }


async def active_requests(address: str) -> int | None:
    """The live calls of the server at `address`, None when it does not say."""
    import grpc

    from ..wire.contracts.vllm import VllmContract

    try:
        async with grpc.aio.insecure_channel(address) as channel:
            return await VllmContract().active_requests(channel, _INFO_SECS)
    except grpc.RpcError:
        return None
