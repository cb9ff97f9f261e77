"""A client of the SGLang scheduler contract that takes the fields by the names that client.py's takes them by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from client import PROMPT, TIMEOUT, Client, new_id
from smg_grpc_proto import sglang_scheduler_pb2 as pb
from smg_grpc_proto import sglang_scheduler_pb2_grpc as pb_grpc

_SAMPLING = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "grammar": "ebnf_grammar"}


def request(
    request_id: str | None = None,
    prompt: Sequence[int] = PROMPT,
    *,
    stream: bool = False,
    **fields: Any,
) -> pb.GenerateRequest:
    """A greedy request of 8 tokens; `fields` are SamplingParams' and the request's own.

    `logprobs` and `prompt_logprobs` are ranked candidates, as in client.py; a field that is None is left out.
    """
    fields = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | fields
    ranked = [fields.pop(name, None) for name in ("logprobs", "prompt_logprobs")]
    if ranked != [None, None]:
        fields |= {
            "return_logprob": True,
            "top_logprobs_num": max(count for count in ranked if count is not None),
            "logprob_start_len": -1 if ranked[1] is None else 0,
        } | {name: fields[name] for name in ("logprob_start_len",) if name in fields}
    fields = {name: value for name, value in fields.items() if value is not None}
    own = {name: fields.pop(name) for name in list(fields) if name in pb.GenerateRequest.DESCRIPTOR.fields_by_name}
    if "logit_bias" in fields:
        fields["logit_bias"] = {str(token): bias for token, bias in fields["logit_bias"].items()}
    sampling = pb.SamplingParams(**{_SAMPLING.get(name, name): value for name, value in fields.items()})
    return pb.GenerateRequest(
        request_id=new_id() if request_id is None else request_id,
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=sampling,
        stream=stream,
        **own,
    )


class SglangClient(Client):
    """A blocking client of the SGLang contract."""

    contract = "sglang"
    service = "sglang.grpc.scheduler.SglangScheduler"
    pb = pb
    stub_class = pb_grpc.SglangSchedulerStub
    request = staticmethod(request)

    def abort(self, *request_ids: str) -> None:
        for request_id in request_ids:
            self.stub.Abort(pb.AbortRequest(request_id=request_id), timeout=TIMEOUT)
