"""Headless SGLang's ends of the wire without the engine: ids and keys, outputs, admission, the plugin that binds it."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from types import SimpleNamespace
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_wire import COLUMNS, AbortReq, BatchEmbeddingOutput, FlushCacheReqOutput, tokens

from smg_grpc_servicer.sglang import zmq_plugin, zmq_scheduler
from smg_grpc_servicer.sglang.admission import Admission, Rules, check_profile
from smg_grpc_servicer.sglang.zmq_outbox import Outbox
from smg_grpc_servicer.sglang.zmq_requests import Requests
from smg_grpc_servicer.sglang.zmq_seams import GRAMMAR_SEAMS, SEAMS, register_all
from smg_grpc_servicer.wire.calls import InvalidCall

# Ids and keys


def test_no_key_begins_with_another_whatever_the_ids_are():
    requests = Requests()
    keys = [requests.add(rid) for rid in ("x", "x-1", "x-10", "0", "00", "000000000000-x")]
    assert not [(a, b) for a in keys for b in keys if a != b and b.startswith(a)]
    assert [requests.rids[key] for key in keys] == ["x", "x-1", "x-10", "0", "00", "000000000000-x"]


def test_an_id_is_refused_while_it_is_in_use_and_free_once_it_is_aborted():
    requests = Requests()
    first = requests.add("x")
    with pytest.raises(InvalidCall, match="still running"):
        requests.add("x")
    assert requests.abort("x") == first
    second = requests.add("x")
    assert first not in requests.rids
    requests.end((first,))  # the late end of the first is not the second's
    assert requests.rids == {second: "x"}
    requests.end((second, second))
    assert len(requests) == 0
    assert requests.abort("x") is None


@given(st.lists(st.tuples(st.sampled_from(["add", "abort", "end"]), st.sampled_from(["a", "a1", "a1-", "b"]))))
def test_every_id_has_one_live_key_at_most(actions):
    requests = Requests()
    for action, rid in actions:
        if action == "add":
            try:
                requests.add(rid)
            except InvalidCall:
                assert rid in requests.rids.values()
        elif action == "abort":
            key = requests.abort(rid)
            assert (key in requests.rids) == (key is not None)
        else:
            requests.end([key for key, name in list(requests.rids.items()) if name == rid])
            assert rid not in requests.rids.values()
        assert len(set(requests.rids.values())) == len(requests.rids)


# Outputs


class Router:
    """A wire whose other end reads what is sent with another library."""

    index = 3

    def __init__(self) -> None:
        self.received: list[Any] = []
        self.broken = False

    def send(self, frame: bytes) -> None:
        if self.broken:
            raise OSError("the socket is gone")
        self.received.append(msgpack.unpackb(frame, strict_map_key=False))

    def rows(self) -> list[dict[str, Any]]:
        """Rows of all batches, by column."""
        found = []
        for tag, *columns in self.received:
            assert tag == "BatchTokenIDSlimOutput"
            named = dict(zip(COLUMNS, columns, strict=True))
            lists = {name: values for name, values in named.items() if isinstance(values, list)}
            found += [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
        return found


@pytest.fixture
def router() -> Router:
    return Router()


@pytest.fixture
def load() -> SimpleNamespace:
    return SimpleNamespace(num_running_reqs=2, num_waiting_reqs=1, num_used_tokens=30, max_total_num_tokens=90)


@pytest.fixture
def outbox(router, load) -> Outbox:
    made = Outbox(Requests())
    made.open(router, lambda: load, generates=True)
    return made


def test_a_step_is_sent_under_the_routers_ids_with_the_load(outbox, router):
    keys = [outbox.requests.add(rid) for rid in ("a", "b")]
    outbox.send_output(tokens(keys, output_ids=[array("q", [1, 2]), array("q", [3])], completion_tokens=[2, 1]))
    ((_, *columns),) = router.received
    named = dict(zip(COLUMNS, columns, strict=True))
    assert (named["rids"], named["output_ids"], named["completion_tokens"]) == (["a", "b"], [[1, 2], [3]], [2, 1])
    assert (named["finished_reasons"], named["finished_messages"]) == (["", ""], [None, None])
    assert named["output_token_logprobs_val"] == [[], []]
    assert named["output_top_logprobs_val"] is named["input_token_logprobs_val"] is None
    names = "engine_index num_running num_waiting kv_used_tokens kv_total_tokens".split()
    assert [named[name] for name in names] == [3, 2, 1, 30, 90]
    assert len(outbox.requests) == 2


@pytest.mark.parametrize(
    ("reason", "row"),
    [
        ({"type": "length", "length": 3}, ("length", None, None, None, None)),
        ({"type": "stop", "matched": 7}, ("stop", None, 7, None, None)),
        ({"type": "stop", "matched": "end"}, ("stop", None, "end", None, None)),
        ({"type": "stop", "matched": [1, 2]}, ("stop", None, None, None, None)),
        ({"type": "stop", "matched": None}, ("stop", None, None, None, None)),
        ({"type": "abort", "message": "no", "status_code": 400}, ("abort", "no", None, 400, None)),
        ({"type": "abort", "message": "no", "status_code": None, "err_type": "E"}, ("abort", "no", None, None, "E")),
        ({"type": "new"}, ("abort", None, None, None, None)),
    ],
)
def test_an_end_is_told_and_frees_its_id(outbox, router, reason, row):
    ended, running = outbox.requests.add("a"), outbox.requests.add("b")
    outbox.send_output(tokens([ended, running], finished_reasons=[reason, None]))
    first, second = router.rows()
    names = ("finished_reasons", "finished_messages", "finished_matched", "finished_status", "finished_err_types")
    assert tuple(first[name] for name in names) == row
    assert second["finished_reasons"] == ""
    assert list(outbox.requests.rids) == [running]


def test_positions_and_rows_without_logprobs_are_empty(outbox, router):
    keys = [outbox.requests.add(rid) for rid in ("a", "b")]
    step = tokens(
        keys,
        output_token_logprobs_val=[[-0.5], None],
        output_token_logprobs_idx=[[7], None],
        output_top_logprobs_val=[[[-0.5, -1.0]], []],
        input_token_logprobs_val=[[None, -2.0], []],
        input_top_logprobs_val=[[None, [-2.0]], None],
    )
    outbox.send_output(step)
    first, second = router.rows()
    assert first["output_token_logprobs_val"] == [-0.5]
    assert second["output_token_logprobs_val"] == second["output_token_logprobs_idx"] == []
    assert (first["output_top_logprobs_val"], second["output_top_logprobs_val"]) == ([[-0.5, -1.0]], [])
    assert first["input_token_logprobs_val"] == [None, -2.0]
    assert (first["input_top_logprobs_val"], second["input_top_logprobs_val"]) == ([[], [-2.0]], [])
    assert "output_token_ids_logprobs_val" not in first


def test_hidden_states_are_sent_as_the_rows_that_were_added(outbox, router):
    key = outbox.requests.add("a")
    prefill, step = [[0.0, 1.0], [2.0, 3.0]], [4.0, 5.0]
    outbox.send_output(tokens([key], output_hidden_states=[[prefill]]))
    outbox.send_output(tokens([key], output_hidden_states=[[prefill, step]]))
    outbox.send_output(tokens([key], output_hidden_states=[[prefill, step]]))
    assert [row["output_hidden_states"] for row in router.rows()] == [prefill, [step], []]


def test_the_last_hidden_state_comes_with_the_end(outbox, router):
    key = outbox.requests.add("a")
    outbox.send_output(tokens([key], output_hidden_states=[[1.0, 2.0]]))
    outbox.send_output(tokens([key], output_hidden_states=[[3.0, 4.0]], finished_reasons=[{"type": "length"}]))
    assert [row["output_hidden_states"] for row in router.rows()] == [[], [[3.0, 4.0]]]


def test_outputs_of_a_request_whose_id_is_used_again_are_dropped(outbox, router):
    old, other = outbox.requests.add("a"), outbox.requests.add("b")
    outbox.requests.abort("a")
    new = outbox.requests.add("a")
    outbox.send_output(tokens([old, other, new], finished_reasons=[{"type": "abort"}, None, None]))
    outbox.send_output(AbortReq(rid=old))
    assert [(row["rids"], row["finished_reasons"]) for row in router.rows()] == [("b", ""), ("a", "")]


def test_a_value_that_cannot_be_sent_ends_its_request_alone(outbox, router, monkeypatch):
    io_struct = SimpleNamespace(AbortReq=AbortReq)
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", io_struct)
    keys = [outbox.requests.add(rid) for rid in ("a", "b", "c")]
    outbox.send_output(tokens(keys, cached_tokens=[0, object(), 0]))
    rows = {row["rids"]: row["finished_reasons"] for row in router.rows()}
    assert rows == {"a": "", "b": "abort", "c": ""}
    assert [request.rid for request in outbox.take_aborts()] == [keys[1]]
    assert outbox.take_aborts() == []
    outbox.send_output(tokens(keys))
    assert [row["rids"] for row in router.rows()[-2:]] == ["a", "c"]


def test_the_end_of_a_queued_request_has_its_status(outbox, router):
    plain, full = outbox.requests.add("a"), outbox.requests.add("b")
    outbox.send_output(AbortReq(rid=plain))
    reason = {"type": "abort", "status_code": 503, "message": "The request queue is full."}
    outbox.send_output(AbortReq(rid=full, finished_reason=reason))
    outbox.send_output(AbortReq(rid=full))
    ends = [(row["rids"], row["finished_messages"], row["finished_status"]) for row in router.rows()]
    assert ends == [("a", "Aborted", None), ("b", "The request queue is full.", 503)]


def test_embeddings_are_sent_each_by_itself(outbox, router):
    keys = [outbox.requests.add(rid) for rid in ("a", "b", "c")]
    stop = {"type": "stop", "matched": None}
    out = BatchEmbeddingOutput(
        rids=keys,
        finished_reasons=[stop, stop, {"type": "abort", "message": "no", "status_code": 400}],
        embeddings=[[1.0, 2.0], 0.5, None],
        prompt_tokens=[3, 4, 5],
        cached_tokens=[0, 1, 2],
    )
    outbox.send_output(out)
    assert [row[1:9] for row in router.received] == [
        [["a"], [[1.0, 2.0]], [3], [0], ["stop"], [None], [None], 3],
        [["b"], [[0.5]], [4], [1], ["stop"], [None], [None], 3],
        [["c"], [[]], [5], [2], ["abort"], ["no"], [400], 3],
    ]
    assert len(outbox.requests) == 0


def test_a_reply_goes_to_the_call_that_it_answers(outbox, router):
    outbox.expect("smg-control-9", 9)
    outbox.send_output(FlushCacheReqOutput(success=False, message="busy"), SimpleNamespace(rid="smg-control-9"))
    outbox.send_output(FlushCacheReqOutput(success=True), SimpleNamespace(rid="smg-control-9"))
    outbox.send_output(FlushCacheReqOutput(success=True))
    assert router.received == [["ControlReplySlim", 9, False, "busy", 3]]


def test_an_idle_scheduler_says_so_once(outbox, router, load, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("smg_grpc_servicer.sglang.zmq_outbox.time.monotonic", lambda: now[0])
    key = outbox.requests.add("a")
    outbox.send_output(tokens([key], finished_reasons=[{"type": "length"}]))
    outbox.settle()
    assert len(router.received) == 1
    now[0] += 1
    outbox.settle()
    assert len(router.received) == 1  # it is still busy
    load.num_running_reqs = load.num_waiting_reqs = 0
    now[0] += 1
    outbox.settle()
    outbox.settle()
    assert len(router.received) == 2
    tag, rids, *_ = router.received[1]
    assert (tag, rids) == ("BatchTokenIDSlimOutput", [])
    assert dict(zip(COLUMNS, router.received[1][1:], strict=True))["num_running"] == 0


@pytest.mark.parametrize("output", [tokens(["nobody"]), AbortReq(rid="nobody"), object(), None])
def test_nothing_that_goes_wrong_reaches_the_scheduler(outbox, router, output):
    router.broken = True
    outbox.requests.add("a")
    outbox.send_output(output)
    outbox.send_output(tokens(list(outbox.requests.rids)))
    Outbox(Requests()).send_output(output)


# Admission


class Params(msgspec.Struct, kw_only=True):
    """SGLang's SamplingParams as far as admission looks at them."""

    n: int = 1
    beam_width: int | None = None
    logit_bias: Any = None
    stop_token_ids: Any = None
    stop: Any = None
    sampling_seed: int | None = None
    stream_interval: int | None = None
    max_new_tokens: int | None = None
    is_normalized: bool = False

    def normalize(self, tokenizer: Any) -> None:
        self.is_normalized = True

    def verify(self, vocabulary: int) -> None:
        if self.max_new_tokens == -1:
            raise ValueError("max_new_tokens must be at least 0")


def generation(**fields: Any) -> Any:
    values = {
        "rid": "r", "input_ids": [1, 2], "sampling_params": Params(), "bootstrap_room": None, "lora_id": None,
        "top_logprobs_num": 0, "logprob_start_len": -1, "token_ids_logprob": None, "custom_logit_processor": None,
        "return_hidden_states": False,
    }  # fmt: skip
    return SimpleNamespace(**values | fields)


RULES: dict[str, Any] = {"vocab_size": 100, "context": 20, "max_input": 15, "generates": True}


def admission(adapters: tuple[str, ...] = (), **rules: Any) -> Admission:
    return Admission(Rules(**RULES | rules), None, lambda: adapters)


def test_a_request_that_can_be_served_is_normalized():
    request = generation(sampling_params=Params(max_new_tokens=18))
    admission().check_generation(request)
    assert request.sampling_params.is_normalized


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"rid": ""}, "rid"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [100]}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": [1] * 15}, "input_ids"),
        ({"lora_id": "x"}, "lora_id"),
        ({"custom_logit_processor": "{}"}, "custom_logit_processor"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"return_hidden_states": "last"}, "return_hidden_states"),
        ({"top_logprobs_num": 101}, "top_logprobs_num"),
        ({"logprob_start_len": -2}, "logprob_start_len"),
        ({"token_ids_logprob": [100]}, "token_ids_logprob"),
        ({"sampling_params": Params(n=2)}, "n"),
        ({"sampling_params": Params(beam_width=2)}, "beam_width"),
        ({"sampling_params": Params(logit_bias={"1": float("inf")})}, "logit_bias"),
        ({"sampling_params": Params(stop_token_ids={100})}, "stop_token_ids"),
        ({"sampling_params": Params(stop=["a", ""])}, "stop"),
        ({"sampling_params": Params(stop="")}, "stop"),
        ({"sampling_params": Params(sampling_seed=2**63)}, "sampling_seed"),
        ({"sampling_params": Params(stream_interval=0)}, "stream_interval"),
        ({"sampling_params": Params(max_new_tokens=19)}, "max_new_tokens"),
        ({"sampling_params": Params(max_new_tokens=-1)}, "max_new_tokens"),
    ],
)
def test_what_would_end_the_scheduler_is_refused_by_name(fields, field):
    with pytest.raises(InvalidCall) as error:
        admission().check_generation(generation(**fields))
    assert error.value.field == field


def test_what_the_operator_allowed_is_served():
    allowed = admission(("L",), lora=True, hidden_states=1, truncates=True)
    request = generation(lora_id="L", return_hidden_states="last", sampling_params=Params(max_new_tokens=500))
    allowed.check_generation(request)
    assert request.sampling_params.max_new_tokens == 18
    with pytest.raises(InvalidCall, match="lora_id: 'M' is no adapter"):
        allowed.check_generation(generation(lora_id="M"))
    with pytest.raises(InvalidCall, match="return_hidden_states"):
        allowed.check_generation(generation(return_hidden_states=True))


def test_half_of_a_disaggregated_pair_needs_a_room():
    half = admission(needs_room=True)
    half.check_generation(generation(bootstrap_room=0))
    with pytest.raises(InvalidCall, match="bootstrap_room"):
        half.check_generation(generation())


def test_embeddings_are_checked_like_generations():
    def embedding(**fields: Any) -> Any:
        values = {"dimensions": None, "token_type_ids": None, "sampling_params": Params()}
        return generation(**values | fields)

    rules = admission(generates=False, dimensions=(), hidden_size=64, token_types=2)
    rules.check_embedding(embedding(dimensions=8, token_type_ids=[0, 1]))
    for fields, field in (
        ({"input_ids": [1] * 15}, "input_ids"),
        ({"dimensions": 65}, "dimensions"),
        ({"token_type_ids": [0]}, "token_type_ids"),
        ({"token_type_ids": [0, 2]}, "token_type_ids"),
    ):
        with pytest.raises(InvalidCall) as error:
            rules.check_embedding(embedding(**fields))
        assert error.value.field == field
    with pytest.raises(InvalidCall, match="cannot be cut"):
        admission(generates=False).check_embedding(embedding(dimensions=8))
    with pytest.raises(InvalidCall, match="--is-embedding"):
        admission().check_embedding(embedding())


def test_a_profile_goes_where_it_can_be_written(tmp_path):
    check_profile({"output_dir": str(tmp_path / "a" / "b"), "num_steps": 3, "activities": ["CPU"]})
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    for options, field in (
        ({"output_dir": str(tmp_path / "file")}, "output_dir"),
        ({"output_dir": "a\0b"}, "output_dir"),
        ({"activities": ["TPU"]}, "activities"),
        ({"num_steps": -1}, "num_steps"),
        ({"profile_by_stage": True}, "num_steps"),
    ):
        with pytest.raises(InvalidCall) as error:
            check_profile(options)
        assert error.value.field == field


# The plugin


def test_the_plugin_is_inert_without_a_handshake():
    code = "import sys; from smg_grpc_servicer.sglang.zmq_plugin import register; register(); print(*sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "SMG_SGLANG_ZMQ_HANDSHAKE"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"zmq", "msgspec", "sglang", "pluggy", "wrapt", "logging"}


def test_a_seam_that_is_missing_ends_the_process_with_a_line(capsys, monkeypatch):
    monkeypatch.setenv("SMG_SGLANG_ZMQ_HANDSHAKE", "tcp://127.0.0.1:1")
    monkeypatch.setattr("smg_grpc_servicer.sglang.zmq_seams._find", lambda seam: None if seam is SEAMS[3] else seam)
    with pytest.raises(SystemExit) as end:
        register_all(None, None)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "SchedulerRequestReceiver._pull_raw_reqs" in line
    assert "sglang.zmq.pull" in line


def test_every_seam_that_is_there_is_bound_around(monkeypatch):
    bound: dict[str, Any] = {}
    registry = SimpleNamespace(register=lambda target, hook, kind: bound.setdefault(target, (hook, kind)))
    monkeypatch.setattr("smg_grpc_servicer.sglang.zmq_seams._find", lambda seam: seam)
    register_all(registry, "around")
    assert len(bound) == len(SEAMS) + len(GRAMMAR_SEAMS)
    hook, kind = bound[
        "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver._pull_raw_reqs"
    ]
    assert kind == "around"
    receiver = SimpleNamespace(recv_from_tokenizer=None)
    assert hook(lambda owner: ("SGLang's own", owner), receiver) == ("SGLang's own", receiver)


def test_a_request_that_its_grammar_ended_is_attributed():
    finish = SimpleNamespace(err_type=None, status_code=None, message="Aborted")
    request = SimpleNamespace(to_finish=None, grammar=object())

    def refuse(asked: Any, tokens: Any) -> str:
        asked.to_finish = finish
        return "result"

    assert zmq_scheduler.accept_tokens(refuse, None, (request, [5]), {}) == "result"
    assert (finish.err_type, finish.status_code) == (zmq_scheduler.CONSTRAINT_FAILED, 500)
    before = SimpleNamespace(err_type="other", status_code=400)
    request.to_finish = before
    zmq_scheduler.accept_tokens(lambda asked, tokens: None, None, (request, [5]), {})
    assert before.err_type == "other"


def test_registering_twice_is_harmless(monkeypatch):
    monkeypatch.delenv("SMG_SGLANG_ZMQ_HANDSHAKE", raising=False)
    zmq_plugin.register()
    zmq_plugin.register()
