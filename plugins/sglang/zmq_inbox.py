"""What the router sends, as SGLang's own requests; stands where the scheduler's input socket does."""

from __future__ import annotations

import logging
import os
import time
from array import array
from typing import Any

from ..wire import sglang_frames as frames
from ..wire.calls import InvalidCall
from .admission import Admission, check_profile
from .zmq_outbox import Outbox
from .zmq_requests import Requests
from .zmq_sockets import Wire

logger = logging.getLogger("sglang.smg_grpc_servicer.zmq")

_BAD_REQUEST = 400
_LONGEST = 300  # characters of a client's text in a line of the log


class Inbox:
    """The router's requests, translated and checked; whatever the frames hold, the scheduler goes on."""

    def __init__(self, wire: Wire, requests: Requests, outbox: Outbox, admission: Admission) -> None:
        self._wire, self._requests, self._outbox, self._admission = wire, requests, outbox, admission
        self._translate = Translation()

    def drain(self, limit: int) -> list[Any]:
        """SGLang's requests for what has arrived, at most `limit` frames of it (-1: all of it)."""
        taken = self._outbox.take_aborts()
        count = 0
        while count != limit:
            received = self._wire.receive()
            if received is None:
                break
            count += 1
            self._take(received, taken)
        self._outbox.settle()
        return taken

    def _take(self, received: list[bytes], taken: list[Any]) -> None:
        try:
            message = frames.decode(received)
        except frames.Undecodable as error:
            self._refuse(error.rid, str(error))
            return
        except Exception as error:  # noqa: BLE001  whatever the bytes are, the scheduler must go on
            self._refuse(None, f"{type(error).__name__}: {error}")
            return
        if isinstance(message, frames.Aborts):
            keys = (self._requests.abort(rid) for rid in message.rids)
            taken += [self._translate.abort(key) for key in keys if key is not None]
        elif isinstance(message, frames.Control):
            self._control(message, taken)
        elif isinstance(message, frames.DispatchErrorFields):
            logger.warning("request %s waits for no encoder", _short(repr(message.rid)))
        else:
            self._add(message, received, taken)

    def _add(self, fields: frames.GenerateFields | frames.EmbedFields, received: list[bytes], taken: list[Any]) -> None:
        key = None
        try:
            key = self._requests.add(fields.rid)
            if isinstance(fields, frames.GenerateFields):
                request = self._translate.generation(fields, key, frames.trace_headers(received))
                self._admission.check_generation(request)
            else:
                request = self._translate.embedding(fields, key)
                self._admission.check_embedding(request)
            request.wrap_pickle_fields()
            taken.append(request)
        except Exception as error:  # noqa: BLE001  SGLang's classes and checks raise whatever they like
            if key is not None:
                self._requests.end((key,))
            self._refuse(fields.rid, str(error) if isinstance(error, InvalidCall) else _named(error))

    def _control(self, call: frames.Control, taken: list[Any]) -> None:
        try:
            request = self._translate.control(call)
        except Exception as error:  # noqa: BLE001  the arguments are a client's
            self._outbox.reply(call.call_id, False, str(error) if isinstance(error, InvalidCall) else _named(error))
            return
        self._outbox.expect(request.rid, call.call_id)
        taken.append(request)

    def _refuse(self, rid: str | None, problem: str) -> None:
        if not rid:
            logger.error("a message of the router is dropped: %s", _short(problem))
            return
        logger.warning("request %s is refused: %s", _short(repr(rid)), _short(problem))
        self._outbox.refuse(rid, problem, _BAD_REQUEST)


class Translation:
    """From named fields to the classes of the SGLang that runs, by keyword."""

    def __init__(self) -> None:
        from sglang.srt.managers import io_struct
        from sglang.srt.runtime_context import get_disagg, get_observability, get_serving
        from sglang.srt.sampling.sampling_params import SamplingParams

        self._io, self._sampling = io_struct, SamplingParams
        self._preferred = dict(get_serving().preferred_sampling_params or {})
        self._disaggregated = get_disagg().disaggregation_mode != "null"
        self._traces = bool(get_observability().enable_trace)

    def generation(self, fields: frames.GenerateFields, key: str, headers: dict[str, str]) -> Any:
        """A TokenizedGenerateReqInput under `key`; InvalidCall where this SGLang cannot be told what was asked."""
        request = self._io.TokenizedGenerateReqInput(
            rid=key,
            input_text=None,
            input_ids=_token_array(fields.input_ids),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=self._sampling_params(fields.sampling_params),
            return_logprob=fields.return_logprob,
            logprob_start_len=fields.logprob_start_len,
            top_logprobs_num=fields.top_logprobs_num,
            token_ids_logprob=fields.token_ids_logprob or None,
            stream=fields.stream,
            **_optional(fields, _GENERATE_OPTIONAL, self._io.TokenizedGenerateReqInput),
        )
        if self._disaggregated or self._traces:
            request.time_stats = self._time_stats(key, fields.bootstrap_room, headers)
        return request

    def embedding(self, fields: frames.EmbedFields, key: str) -> Any:
        """A TokenizedEmbeddingReqInput under `key`."""
        return self._io.TokenizedEmbeddingReqInput(
            rid=key,
            input_text=None,
            input_ids=_token_array(fields.input_ids),
            mm_inputs=None,
            token_type_ids=fields.token_type_ids or None,
            sampling_params=self._sampling(max_new_tokens=0),
            **_optional(fields, _EMBED_OPTIONAL, self._io.TokenizedEmbeddingReqInput),
        )

    def abort(self, key: str) -> Any:
        """An AbortReq."""
        return self._io.AbortReq(rid=key)

    def control(self, call: frames.Control) -> Any:
        """The request for a control call; InvalidCall where SGLang has none, or none so."""
        rid = f"smg-control-{call.call_id}"
        if call.method == "flush_cache":
            seconds = call.args[0] if call.args else None
            if seconds is not None and not (isinstance(seconds, (int, float)) and 0 <= seconds < float("inf")):
                raise InvalidCall("timeout_s", f"{_short(repr(seconds))} is not a number of seconds")
            return self._io.FlushCacheReqInput(rid=rid, timeout_s=seconds)
        if call.method == "stop_profile":
            return self._io.ProfileReq(rid=rid, req_type=self._io.ProfileReqType.STOP_PROFILE)
        if call.method == "start_profile":
            options = call.args[0] if call.args and isinstance(call.args[0], dict) else {}
            return self._profile(rid, {name: value for name, value in options.items() if value is not None})
        raise InvalidCall("method", f"{_short(repr(call.method))} is not flush_cache, start_profile or stop_profile")

    def _profile(self, rid: str, options: dict[str, Any]) -> Any:
        import msgspec

        kind, known = self._io.ProfileReq, self._io.ProfileReq.__struct_fields__
        for name in options:
            if name not in known or name in ("rid", "http_worker_ipc", "req_type"):
                raise InvalidCall("start_profile", f"{_short(repr(name))} is not known")
        types = {field.name: field.type for field in msgspec.structs.fields(kind)}
        checked = {name: msgspec.convert(value, types[name]) for name, value in options.items()}
        check_profile(checked)
        for name in ("with_stack", "record_shapes"):
            if os.environ.get(f"SGLANG_PROFILE_{name.upper()}", "true").lower() not in ("true", "1"):
                checked[name] = False
        checked.setdefault("profile_id", str(time.time()))  # names the file, or the scheduler ends
        return kind(rid=rid, req_type=self._io.ProfileReqType.START_PROFILE, **checked)

    def _sampling_params(self, fields: frames.SamplingFields) -> Any:
        given = fields.given()
        for name in given:
            if name not in self._sampling.__struct_fields__:
                raise InvalidCall(name, "is not known to this SGLang")
        if fields.logit_bias is not None:
            given["logit_bias"] = {str(name): bias for name, bias in fields.logit_bias.items()} or None
        if fields.stop_token_ids is not None:
            given["stop_token_ids"] = set(fields.stop_token_ids) or None
        return self._sampling(**({"max_new_tokens": None} | self._preferred | given))

    def _time_stats(self, key: str, room: int | None, headers: dict[str, str]) -> Any:
        from sglang.srt.disaggregation.utils import DisaggregationMode
        from sglang.srt.observability.req_time_stats import APIServerReqTimeStats
        from sglang.srt.runtime_context import get_disagg

        stats = APIServerReqTimeStats(disagg_mode=DisaggregationMode(get_disagg().disaggregation_mode))
        if self._traces:
            stats.init_trace_ctx(key, room, headers or None)
        stats.set_created_time()
        return stats


def _defaults(kind: Any) -> dict[str, Any]:
    """Fields that need not be sent, with what they are then."""
    defaults = kind.__struct_defaults__
    named = zip(kind.__struct_fields__[-len(defaults) :], defaults, strict=True)
    return {name: default for name, default in named if name not in kind.unserved}


_GENERATE_OPTIONAL = _defaults(frames.GenerateFields)
_EMBED_OPTIONAL = _defaults(frames.EmbedFields)


def _optional(fields: Any, optional: dict[str, Any], kind: Any) -> dict[str, Any]:
    values = {name: getattr(fields, name) for name, default in optional.items() if getattr(fields, name) != default}
    for name in values:
        if name not in kind.__struct_fields__:
            raise InvalidCall(name, "is not known to this SGLang")
    return values


def _token_array(token_ids: list[int]) -> array[int]:
    try:
        return array("q", token_ids)
    except OverflowError:
        raise InvalidCall("input_ids", "holds an id outside of any vocabulary") from None


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _short(text: str) -> str:
    """Text of a client's on one line of a bearable length."""
    line = " ".join(text[: 2 * _LONGEST].split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
