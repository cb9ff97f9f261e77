"""The places in vLLM that we wrap: SEAMS in its launcher, CORE_SEAMS in an engine core."""

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

_RELEASES = "0.28 - 0.33"

DECODE = Seam(
    name="vllm.core.decode",
    targets=("vllm.v1.serial_utils:MsgpackDecoder.decode",),
    purpose="answers a request that cannot be decoded, where vLLM's input thread would end",
    releases=_RELEASES,
    wrapper="smg_grpc_servicer.vllm.guard:decode",
    required=False,
)
PREPROCESS = Seam(
    name="vllm.core.preprocess",
    targets=("vllm.v1.engine.core:EngineCore.preprocess_add_request",),
    purpose="checks a request before the engine core takes it",
    releases=_RELEASES,
    wrapper="smg_grpc_servicer.vllm.guard:preprocess_add_request",
    required=False,
)
REFUSE = Seam(
    name="vllm.core.refuse",
    targets=("vllm.v1.engine.core:EngineCoreProc._handle_request_preproc_error",),
    purpose="says a refusal in one line",
    releases=_RELEASES,
    wrapper="smg_grpc_servicer.vllm.guard:handle_request_preproc_error",
    required=False,
)
ADD = Seam(
    name="vllm.core.add",
    targets=("vllm.v1.engine.core:EngineCore.add_request",),
    purpose="refuses a request under the id of a living one, or for a task that the model does not have",
    releases=_RELEASES,
    wrapper="smg_grpc_servicer.vllm.guard:add_request",
    required=False,
)
ENCODE = Seam(
    name="vllm.core.encode",
    targets=("vllm.v1.serial_utils:MsgpackEncoder.encode_into",),
    purpose="sends prompt logprobs as released front ends read them",
    releases=_RELEASES,
    wrapper="smg_grpc_servicer.vllm.core_outputs:encode_into",
    required=False,
)
CORE_SEAMS = (DECODE, PREPROCESS, REFUSE, ADD, ENCODE)
"""Bound in an engine core that a remote front end talks to."""
