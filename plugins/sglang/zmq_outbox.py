"""What the scheduler sends, as the router reads it; stands where the scheduler's output sockets do."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from ..wire import sglang_frames as frames
from .zmq_requests import Requests
from .zmq_sockets import Wire

logger = logging.getLogger("sglang.smg_grpc_servicer.zmq")

_LOAD_SECS = 0.05
_FINISHES = ("stop", "length", "abort")
_UNSENDABLE = "the scheduler's output cannot be sent: "


class Outbox:
    """Both of the scheduler's senders in one; nothing that goes wrong in here reaches the scheduler.

    `socket` is there because SGLang's own senders have one.
    """

    socket = None

    def __init__(self, requests: Requests) -> None:
        self.requests = requests
        self._wire: Wire | None = None
        self._read_load: Callable[[], Any] | None = None
        self._generates = True
        self._load, self._load_due, self._said_busy = frames.LoadTail(), 0.0, False
        self._calls: dict[str, int] = {}
        self._aborts: list[Any] = []

    def open(self, wire: Wire, read_load: Callable[[], Any], *, generates: bool) -> None:
        """Send over `wire` from now; `read_load` gives SGLang's LoadSnapshot."""
        self._wire, self._read_load, self._generates = wire, read_load, generates

    # What the scheduler calls

    def send_output(self, output: Any, recv_obj: Any = None) -> None:
        """Send a batch, the end of a queued request, or the reply to the control request `recv_obj`."""
        try:
            if self._wire is None:
                logger.warning("%s before the handshake is dropped", type(output).__name__)
                return
            handle = _HANDLERS.get(type(output).__name__)
            if handle is not None:
                handle(self, output)
            elif getattr(recv_obj, "rid", None) in self._calls and hasattr(output, "success"):
                self.reply(self._calls.pop(recv_obj.rid), bool(output.success), getattr(output, "message", None))
        except Exception:  # the scheduler does not catch what its senders raise
            logger.exception("%s could not be sent", type(output).__name__)

    # What the inbox calls

    def refuse(self, rid: str, message: str, status: int) -> None:
        """End a request that the scheduler never sees."""
        self._end(rid, message, status)

    def expect(self, rid: str, call_id: int) -> None:
        """The reply to the control request `rid` is that to the call."""
        self._calls[rid] = call_id

    def reply(self, call_id: int, success: bool, message: str | None) -> None:
        """Answer a control call."""
        self._send(frames.ControlReply(call_id, success, message or None, self._index))

    def take_aborts(self) -> list[Any]:
        """Aborts for requests whose outputs cannot be sent."""
        taken, self._aborts = self._aborts, []
        return taken

    def settle(self) -> None:
        """Once nothing runs any more, say so: the load of the last output was that of a busy scheduler."""
        if not self._said_busy or self.requests.rids or time.monotonic() < self._load_due:
            return
        load = self._current_load()
        if load.running or load.waiting:
            return
        self._send(frames.aborted("", "", None, self._index, load, generates=self._generates), rows=0)

    # Batches

    def _tokens(self, out: Any) -> None:
        keys = out.rids
        if not keys:
            return
        names = self.requests.rids
        try:
            rids = [names[key] for key in keys]
        except KeyError:  # outputs of an aborted request whose id is used again
            self._tokens(_rows(out, [row for row, key in enumerate(keys) if key in names]))
            return
        try:
            batch = self._batch(rids, out)
            self._send(batch)
        except Exception as error:  # noqa: BLE001  a value of one request must not cost the others their step
            self._one_by_one(out, error)
            return
        if any(out.finished_reasons):
            self.requests.end(key for key, reason in zip(keys, out.finished_reasons, strict=True) if reason)

    def _batch(self, rids: Sequence[str], out: Any) -> frames.TokenBatch:
        count, load = len(rids), self._current_load()
        none = [None] * count
        kinds: Sequence[Any] = [""] * count
        messages, matched, statuses, types = none, none, none, None
        if any(out.finished_reasons):
            kinds, messages, matched, statuses, types = _finishes(out.finished_reasons)
        batch = frames.TokenBatch(
            rids=rids,
            output_ids=[token_ids.tolist() for token_ids in out.output_ids],
            finished_reasons=kinds,
            finished_messages=messages,
            finished_matched=matched,
            prompt_tokens=out.prompt_tokens,
            completion_tokens=out.completion_tokens,
            cached_tokens=out.cached_tokens,
            output_token_logprobs_val=_present(out.output_token_logprobs_val) or [()] * count,
            output_token_logprobs_idx=_present(out.output_token_logprobs_idx) or [()] * count,
            engine_index=self._index,
            num_running=load.running,
            num_waiting=load.waiting,
            kv_used_tokens=load.used_tokens,
            kv_total_tokens=load.total_tokens,
            finished_status=statuses,
            reasoning_tokens=out.reasoning_tokens,
            finished_err_types=types,
        )
        if out.output_token_logprobs_val is not None:
            for name in _FLAT:
                setattr(batch, name, _present(getattr(out, name)))
            for name in _NESTED:
                setattr(batch, name, _ranked(getattr(out, name)))
        if out.output_hidden_states is not None:
            batch.output_hidden_states = self._hidden_states(out)
        return batch

    def _hidden_states(self, out: Any) -> Sequence[Any]:
        """The rows that each request's states gained; SGLang gives all of them anew, or the last one alone."""
        columns = zip(out.rids, out.output_hidden_states, out.finished_reasons, strict=True)
        return [_new_rows(self.requests, key, states, bool(reason)) for key, states, reason in columns]

    def _embeddings(self, out: Any) -> None:
        names = self.requests.rids
        for row, key in enumerate(out.rids):
            rid = names.get(key)
            if rid is None:
                continue
            try:
                self._embedding(rid, _rows(out, [row]))
            except Exception as error:  # noqa: BLE001  one embedding that cannot be sent is one request's end
                self._give_up(key, error)
            else:
                self.requests.end((key,))

    def _embedding(self, rid: str, out: Any) -> None:
        kinds, messages, _, statuses, _ = _finishes(out.finished_reasons)
        (value,) = out.embeddings
        if isinstance(value, dict):
            raise TypeError("sparse embeddings have no place on this wire")
        load = self._current_load()
        embedding = [value] if isinstance(value, (int, float)) else (() if value is None else value)
        tail = (self._index, load.running, load.waiting, load.used_tokens, load.total_tokens)
        columns = ([rid], [embedding], out.prompt_tokens, out.cached_tokens, kinds, messages, statuses)
        self._send(frames.EmbeddingBatch(*columns, *tail))

    def _aborted(self, request: Any) -> None:
        """The scheduler has ended a request outside of its batches: one that waited, as a rule."""
        rid = self.requests.rids.get(request.rid)
        if rid is None:
            return
        reason = request.finished_reason or {}
        status = reason.get("status_code")
        message = reason.get("message") or getattr(request, "abort_message", None) or "Aborted"
        self._end(rid, message, None if status is None else int(status))
        self.requests.end((request.rid,))

    # Sending

    @property
    def _index(self) -> int:
        return self._wire.index if self._wire is not None else 0

    def _current_load(self) -> frames.LoadTail:
        now = time.monotonic()
        if now >= self._load_due and self._read_load is not None:
            self._load_due = now + _LOAD_SECS
            try:
                load = self._read_load()
                counts = (load.num_running_reqs, load.num_waiting_reqs, load.num_used_tokens, load.max_total_num_tokens)
                self._load = frames.LoadTail(*map(int, counts))
            except Exception as error:  # noqa: BLE001  a load is not worth an output; the last one stands
                logger.debug("the load cannot be read: %s", error)
        return self._load

    def _end(self, rid: str, message: str, status: int | None) -> None:
        load = self._current_load()
        self._send(frames.aborted(rid, message, status, self._index, load, generates=self._generates))

    def _send(self, output: Any, rows: int | None = None) -> None:
        if rows == 0:
            for name in output.__struct_fields__:
                if isinstance(getattr(output, name), list):
                    setattr(output, name, [])
        busy = getattr(output, "num_running", 0) or getattr(output, "num_waiting", 0)
        self._said_busy = bool(busy) if hasattr(output, "num_running") else self._said_busy
        assert self._wire is not None
        self._wire.send(frames.encode(output))

    def _one_by_one(self, out: Any, error: Exception) -> None:
        """Send what can be sent of a batch that cannot be sent whole; the rest ends."""
        keys = list(out.rids)
        if len(keys) == 1:
            self._give_up(keys[0], error)
            return
        for row in range(len(keys)):
            self._tokens(_rows(out, [row]))

    def _give_up(self, key: str, error: Exception) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        rid = self.requests.rids[key]
        logger.error("request %r: %s%s: %s", rid, _UNSENDABLE, type(error).__name__, error)
        self._end(rid, f"{_UNSENDABLE}{type(error).__name__}: {error}", None)
        self.requests.end((key,))
        self._aborts.append(AbortReq(rid=key))


_HANDLERS: dict[str, Callable[[Outbox, Any], None]] = {
    "BatchTokenIDOutput": Outbox._tokens,
    "BatchEmbeddingOutput": Outbox._embeddings,
    "AbortReq": Outbox._aborted,
}
_FLAT = ("input_token_logprobs_val", "input_token_logprobs_idx")
_NESTED = (
    "output_top_logprobs_val",
    "output_top_logprobs_idx",
    "input_top_logprobs_val",
    "input_top_logprobs_idx",
    "output_token_ids_logprobs_val",
    "output_token_ids_logprobs_idx",
)


def _finishes(reasons: Sequence[dict[str, Any] | None]) -> tuple[list[Any], list[Any], list[Any], list[Any], list[Any]]:
    """Columns (reason, message, matched, HTTP status, type of error) of the ends among the rows."""
    rows: list[tuple[Any, ...]] = []
    for reason in reasons:
        if not reason:
            rows.append(("", None, None, None, None))
            continue
        kind, matched, status = reason.get("type"), reason.get("matched"), reason.get("status_code")
        rows.append(
            (
                kind if kind in _FINISHES else "abort",
                reason.get("message") if kind not in ("stop", "length") else None,
                matched if isinstance(matched, (int, str)) else None,
                None if status is None else int(status),
                reason.get("err_type"),
            )
        )
    kinds, messages, matches, statuses, types = map(list, zip(*rows, strict=True))
    return kinds, messages, matches, statuses, types


def _rows(out: Any, rows: Sequence[int]) -> Any:
    """A batch of some of the rows of another."""
    count = len(out.rids)
    columns = {name: getattr(out, name) for name in out.__struct_fields__}
    for name, column in columns.items():
        if isinstance(column, list) and len(column) == count:
            columns[name] = [column[row] for row in rows]
    return type(out)(**columns)


def _present(column: Sequence[Any] | None) -> Sequence[Any] | None:
    """A column in which rows without values are empty; None where all are."""
    if column is None or not any(column):
        return None
    return column if all(column) else [row or () for row in column]


def _ranked(column: Sequence[Any] | None) -> Sequence[Any] | None:
    """The same of a column whose positions may be without values, too."""
    column = _present(column)
    if column is None or all(chain.from_iterable(column)):
        return column
    if not any(chain.from_iterable(column)):
        return None
    return [[() if position is None else position for position in row] for row in column]


def _new_rows(requests: Requests, key: str, states: Any, ended: bool) -> list[Any] | None:
    if states is None:
        return None
    entries = states if isinstance(states, list) else states.tolist()
    if entries and not hasattr(entries[0], "__len__"):  # the last position's alone, anew in every output
        return [entries] if ended else []
    sent = requests.rows_since(key, len(entries))
    rows: list[Any] = []
    for entry in entries[sent:]:
        values = entry if isinstance(entry, list) else entry.tolist()
        rows += values if values and hasattr(values[0], "__len__") else [values]
    return rows
