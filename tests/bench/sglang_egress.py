"""What a step of a headless SGLang scheduler costs on its way out: ``python tests/bench/sglang_egress.py [ROUNDS]``.

Prints microseconds of the scheduler's thread for a batch of 256 requests: as a whole, what msgspec alone takes to
encode the same columns, and the difference. The smallest of all rounds counts. No socket and no engine.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sglang_wire import BatchTokenIDOutput, tokens

from smg_grpc_servicer.sglang.zmq_outbox import Outbox
from smg_grpc_servicer.sglang.zmq_requests import Requests

REQUESTS = 256
MOST_MICROSECONDS = 60.0
_CALLS = 200


class NoWire:
    """A wire that keeps the last frame."""

    index = 0
    frame = b""

    def send(self, frame: bytes) -> None:
        self.frame = frame


def batch(requests: Requests, *, logprobs: int | None, finished: bool = False) -> BatchTokenIDOutput:
    """One token for each of 256 requests, with that many ranked logprobs."""
    keys = [requests.add(f"chatcmpl-{number:032x}") for number in range(REQUESTS)]
    columns: dict[str, Any] = {"output_ids": [array("q", [100 + row]) for row in range(REQUESTS)]}
    if logprobs is not None:
        columns["output_token_logprobs_val"] = [[-0.5]] * REQUESTS
        columns["output_token_logprobs_idx"] = [[7]] * REQUESTS
        columns["output_top_logprobs_val"] = [[[-0.5] * logprobs]] * REQUESTS
        columns["output_top_logprobs_idx"] = [[[7] * logprobs]] * REQUESTS
        for name in ("input_token", "input_top", "output_token_ids"):
            columns |= {f"{name}_logprobs_{kind}": [[] for _ in range(REQUESTS)] for kind in ("val", "idx")}
    if finished:
        columns["finished_reasons"] = [{"type": "length", "length": 16}] * REQUESTS
    return tokens(keys, **columns)


def outbox() -> tuple[Outbox, NoWire]:
    """An outbox behind which nothing is."""
    made, wire = Outbox(Requests()), NoWire()
    load = SimpleNamespace(num_running_reqs=256, num_waiting_reqs=3, num_used_tokens=9000, max_total_num_tokens=10000)
    made.open(wire, lambda: load, generates=True)  # type: ignore[arg-type]
    return made, wire


def smallest(work: Callable[[], Any], rounds: int) -> float:
    """Microseconds of one call, in the quickest round."""
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(_CALLS):
            work()
        best = min(best, (time.perf_counter() - began) / _CALLS)
    return best * 1e6


def measure(logprobs: int | None, rounds: int) -> tuple[float, float]:
    """(the whole step, msgspec's part of it) in microseconds."""
    made, wire = outbox()
    step = batch(made.requests, logprobs=logprobs)
    whole = smallest(lambda: made.send_output(step), rounds)
    encode = msgspec.msgpack.Encoder().encode
    columns = msgspec.msgpack.decode(wire.frame)
    return whole, smallest(lambda: encode(columns), rounds)


def main(rounds: int) -> int:
    """Print the figures; 1 where a plain step costs too much."""
    too_much = False
    for name, logprobs in (("tokens alone", None), ("with logprobs", 0), ("with 5 ranked logprobs", 5)):
        whole, encoding = measure(logprobs, rounds)
        print(f"{name:24} {whole:7.1f} us, msgspec {encoding:7.1f} us, beside it {whole - encoding:6.1f} us")
        too_much |= logprobs is None and whole - encoding > MOST_MICROSECONDS
    return int(too_much)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 30))
