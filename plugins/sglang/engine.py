"""SGLang as this package's hooks see it; imports no SGLang."""

import argparse
from collections.abc import Awaitable, Callable

from ..hooks.seams import Seam
from ..hooks.settings import ConfigurationError
from ..hooks.specs import EngineDescription, hookimpl
from .settings import FLAGS, IMPLEMENTATION

NAME = "sglang"
ENTRY, ZMQ_ENTRY = "smg-servicer", "smg-zmq"
SERVICE = "sglang.grpc.scheduler.SglangScheduler"
_RELEASES = "0.5.20 - 0.5.23"
_UNUSED = "smg_grpc_servicer.sglang.command_line:add_flags"  # bound by SGLang's own registry

LAUNCHER = Seam(
    name="sglang.launcher",
    targets=("sglang.srt.entrypoints.engine:Engine._launch_scheduler_processes",),
    purpose="starts the schedulers",
    releases=_RELEASES,
    wrapper=_UNUSED,
)
PARSER = Seam(
    name="sglang.parser",
    targets=("sglang.srt.server_args:ServerArgs.add_cli_args",),
    purpose="adds our flags to SGLang's command line",
    releases=_RELEASES,
    wrapper=_UNUSED,
    required=False,
)
PREPROCESSING = Seam(
    name="sglang.preprocessing",
    targets=(
        "sglang.srt.multimodal.processors.base_processor:BaseMultimodalProcessor._resolve_auto_mm_processor_worker_num",
    ),
    purpose="sizes SGLang's own media preprocessing by the device it runs on (SGLang PR 35349)",
    releases=_RELEASES,
    wrapper=_UNUSED,
    required=False,
)
SEAMS = (LAUNCHER, PARSER, PREPROCESSING)


@hookimpl
def smg_engine() -> EngineDescription:
    from .zmq_seams import SEAMS as ZMQ_SEAMS

    return EngineDescription(
        name=NAME,
        distributions=("sglang",),
        service=SERVICE,
        entry_points=(("sglang.srt.plugins", ENTRY), ("sglang.srt.plugins", ZMQ_ENTRY)),
        filter_variable="SGLANG_PLUGINS",
        seams=(*SEAMS, *ZMQ_SEAMS),
        launchers=("sglang serve --model-path MODEL --smg-grpc-mode",),
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
        from .server import serve_python
        from .settings import worker_settings

        worker_settings(args)
        return serve_python
    if name == "rust":
        raise ConfigurationError([f"{IMPLEMENTATION.label()}: 'rust' is not in this release; expected python"])
    return None
