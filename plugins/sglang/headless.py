"""`python -m smg_grpc_servicer.sglang.headless`: SGLang's schedulers alone, served by SMG's router over ZMQ.

Takes the router's handshake address, the number of the first engine and SGLang's own arguments, as `smg serve --backend
sglang --connection-mode zmq` gives them. Ends with 0 when told to, 1 when a scheduler ends, 2 for a configuration that
cannot work.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from ..hooks.command_line import end_start
from ..hooks.seams import probe
from ..hooks.settings import ConfigurationError
from . import zmq_seams

logger = logging.getLogger("sglang.smg_grpc_servicer.headless")

PLUGIN = "smg-zmq"
_SOURCE = "smg_grpc_servicer"


def main(arguments: Sequence[str]) -> int:
    """Run until a signal or the end of a scheduler; returns the exit code."""
    own, rest = _parser().parse_known_args(arguments)
    problems = _problems(own)
    if problems:
        end_start(problems)
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()  # before the environment asks for seams: they belong into the ranks
    server_args = prepare_server_args(rest)
    try:
        return _run(server_args, own)
    except ConfigurationError as error:
        end_start(error.lines)


def declare_defaults(server_args: Any) -> None:
    """What headless ranks need beside the operator's arguments: each leader takes control calls for its own group."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    server_args.resolve_once()
    view = resolving_view(server_args)
    if getattr(view, "attn_dp_size", 1) > 1 or view.enable_dp_attention:
        if getattr(view, "enable_pd_role_switch", False):
            raise ConfigurationError(["--enable-pd-role-switch cannot go with attention data parallelism, headless"])
        declare_resolution(server_args, _SOURCE, enable_dp_attention_local_control_broadcast=True)


def _run(server_args: Any, own: argparse.Namespace) -> int:
    from ..serving.processes import end_children
    from .schedulers import Schedulers, prepare

    schedulers = Schedulers()
    told = _Signals(schedulers)
    declare_defaults(server_args)
    port_args = prepare(server_args)
    os.environ[zmq_seams.HANDSHAKE] = own.zmq_handshake_address
    os.environ[zmq_seams.ENGINE_INDEX] = str(own.zmq_engine_index)
    schedulers.take_over_sigquit()
    try:
        schedulers.start(server_args, port_args)
        logger.info("schedulers are served by the router at %s", own.zmq_handshake_address)
        reason = schedulers.wait()
    except RuntimeError as error:
        reason = str(error)
    code = told.code
    if code:
        logger.error("ending: %s", reason)
    schedulers.close()
    end_children()
    return code


class _Signals:
    """SIGTERM and SIGINT end the schedulers; `code` is what the process then ends with."""

    def __init__(self, schedulers: Any) -> None:
        self.code = 1
        self._schedulers = schedulers
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: Any) -> None:
        if not self._schedulers.died.done():
            self.code = 0
        logger.info("%s: shutting down", signal.Signals(number).name)
        self._schedulers.report("told to end")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m smg_grpc_servicer.sglang.headless",
        description="SGLang's schedulers behind SMG's router over ZMQ; every other argument is SGLang's own.",
        allow_abbrev=False,
    )
    parser.add_argument("--zmq-handshake-address", required=True, metavar="tcp://HOST:PORT", help="of the router")
    parser.add_argument("--zmq-engine-index", type=int, default=0, metavar="N", help="of the first data-parallel rank")
    return parser


def _problems(own: argparse.Namespace) -> list[str]:
    """What ends the start before anything is imported."""
    problems = []
    if not own.zmq_handshake_address.startswith(("tcp://", "ipc://")):
        problems.append(f"--zmq-handshake-address: {own.zmq_handshake_address!r} is not tcp://HOST:PORT")
    if not 0 <= own.zmq_engine_index < 2**16:
        problems.append(f"--zmq-engine-index: {own.zmq_engine_index} is not in [0, {2**16 - 1}]")
    chosen = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    if chosen and PLUGIN not in chosen:
        problems.append(f"SGLANG_PLUGINS={','.join(chosen)!r} hides the plugin {PLUGIN!r}; add it")
    absent = [seam for seam in zmq_seams.SEAMS if not probe(seam).usable]
    problems += [zmq_seams.missing(seam) for seam in absent[:1]]
    return problems


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
