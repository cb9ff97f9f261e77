"""The places in vLLM that we wrap, in its launcher process alone."""

from ..hooks.seams import Seam

PARSER = Seam(
    name="vllm.parser",
    targets=("vllm.utils.argparse_utils:FlexibleArgumentParser.parse_known_args",),
    purpose="adds our flags to the parsers that serve gRPC, and reads them",
    releases="0.28 - 0.33",
    wrapper="smg_grpc_servicer.vllm.command_line:parse_known_args",
    required=False,
)
LAUNCHER = Seam(
    name="vllm.launcher",
    targets=(
        "vllm.entrypoints.launchers.grpc_server:serve_grpc",  # 0.30
        "vllm.entrypoints.grpc_server:serve_grpc",
    ),
    purpose="serves gRPC with the implementation that was asked for",
    releases="0.28 - 0.33",
    wrapper="smg_grpc_servicer.vllm.command_line:serve_grpc",
    required=False,
)
SEAMS = (PARSER, LAUNCHER)
