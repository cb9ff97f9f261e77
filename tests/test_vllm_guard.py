"""The engine core's guard over a stand-in for the core; no vLLM."""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
import types
from argparse import ArgumentParser, Namespace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from smg_grpc_servicer.hooks import seams
from smg_grpc_servicer.hooks.settings import ConfigurationError
from smg_grpc_servicer.serving.engine import Limits, Range
from smg_grpc_servicer.vllm import command_line, guard, plugin, sampling
from smg_grpc_servicer.vllm.seams import CORE_SEAMS
from smg_grpc_servicer.wire.calls import InvalidCall

VOCABULARY, CONTEXT, ENCODER = 100, 32, 16
RANGED = "temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty n".split()
LIMITS = Limits(
    vocab_size=VOCABULARY,
    max_prompt_token_id=VOCABULARY + 10,
    max_context=CONTEXT,
    max_logprobs=5,
    data_parallel_ranks=1,
    ranges=dict.fromkeys(RANGED, Range(-2, 2)),
)


class Params(SimpleNamespace):
    """SamplingParams as the guard reads them."""

    def __init__(self, **changes: Any) -> None:
        values: dict[str, Any] = dict.fromkeys(
            "seed logprobs prompt_logprobs logit_bias allowed_token_ids bad_words_token_ids thinking_token_budget "
            "extra_args structured_outputs".split()
        )
        values |= {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "n": 1, "repetition_penalty": 1.0}
        values |= {"frequency_penalty": 0.0, "presence_penalty": 0.0, "max_tokens": 8, "min_tokens": 0}
        values |= {"stop_token_ids": [], "all_stop_token_ids": set(), "routed_experts_prompt_start": 0}
        super().__init__(**(values | changes))

    def verify(self, *configs: Any) -> None:
        """Accepts everything, as a release without checks would."""


class Refusing(Params):
    def verify(self, *configs: Any) -> None:
        raise RuntimeError("the grammar\nlibrary does not like it")


class Request(SimpleNamespace):
    """EngineCoreRequest as the guard reads it."""

    def __init__(self, params: Any = None, **changes: Any) -> None:
        names = "mm_features pooling_params lora_request prompt_embeds prompt_is_token_ids reasoning_parser_kwargs"
        values: dict[str, Any] = dict.fromkeys(names.split())
        values |= {"request_id": "r", "prompt_token_ids": [1, 2, 3], "client_index": 0}
        super().__init__(**(values | {"sampling_params": params or Params()} | changes))


class Core:
    """EngineCoreProc as the guard reads it; keeps the error outputs."""

    def __init__(self, **model: Any) -> None:
        facts = dict.fromkeys(("is_multimodal_model", "is_encoder_decoder", "enable_prompt_embeds"), False)
        ends = SimpleNamespace(eos_token_id=200)
        generation = {"try_get_generation_config": lambda: {"eos_token_id": [150, 151]}}
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(hf_config=ends, enable_trace_replay=False, **(facts | generation | model)),
            lora_config=None,
            reasoning_config=None,
            speculative_config=None,
            structured_outputs_config=None,
            use_v2_model_runner=False,
        )
        cache = SimpleNamespace(cache_size=ENCODER)
        self.scheduler = SimpleNamespace(
            max_num_encoder_input_tokens=2 * ENCODER, encoder_cache_manager=cache, requests={}
        )
        self.structured_output_manager = SimpleNamespace(tokenizer=None, _get_reasoner=lambda request: None)
        self.addresses = SimpleNamespace(outputs=["one", "two"])
        self.mm_receiver_cache = None
        self.errors: list[tuple[list[str], int]] = []

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("embed",)

    def _send_error_outputs_to_client(self, request_ids: list[str], client: int) -> None:
        self.errors.append((request_ids, client))


@pytest.fixture(autouse=True)
def _limits(monkeypatch):
    monkeypatch.setattr(sampling, "limits", lambda config, tokenizer: LIMITS)


def preprocess(core: Core, request: Any) -> Any:
    """Through the seam, to a core that takes everything."""
    return guard.preprocess_add_request(lambda asked: (asked, 0), core, (request,), {})


def refusal(request: Any, core: Core | None = None) -> str:
    with pytest.raises(InvalidCall) as caught:
        preprocess(core or Core(), request)
    return caught.value.field


REFUSED = {
    "empty id": (Request(request_id=""), "request_id"),
    "client": (Request(client_index=2), "client_index"),
    "lora": (Request(lora_request=object()), "lora_request"),
    "empty prompt": (Request(prompt_token_ids=[]), "prompt_token_ids"),
    "no prompt": (Request(prompt_token_ids=None), "prompt_token_ids"),
    "outside": (Request(prompt_token_ids=[VOCABULARY + 11]), "prompt_token_ids"),
    "negative": (Request(prompt_token_ids=[1, -1]), "prompt_token_ids"),
    "long": (Request(prompt_token_ids=[1] * (CONTEXT + 1)), "prompt_token_ids"),
    "full": (Request(prompt_token_ids=[1] * CONTEXT), "input_ids"),
    "embeds": (Request(prompt_embeds=object()), "prompt_embeds"),
    "mask alone": (Request(prompt_is_token_ids=[True]), "prompt_is_token_ids"),
    "media": (Request(mm_features=[object()]), "mm_features"),
    "nothing asked": (Request(sampling_params=None), "sampling_params"),
    "both asked": (Request(pooling_params=object()), "sampling_params"),
    "pooling": (Request(sampling_params=None, pooling_params=object()), "pooling_params"),
    "temperature": (Request(Params(temperature=3.0)), "temperature"),
    "no max_tokens": (Request(Params(max_tokens=None)), "max_tokens"),
    "max_tokens": (Request(Params(max_tokens=CONTEXT)), "max_tokens"),
    "min_tokens": (Request(Params(min_tokens=9)), "min_tokens"),
    "seed": (Request(Params(seed=2**63)), "seed"),
    "logprobs": (Request(Params(logprobs=6)), "logprobs"),
    "bias": (Request(Params(logit_bias={VOCABULARY: 1.0})), "logit_bias"),
    "end": (Request(Params(all_stop_token_ids={VOCABULARY})), "stop_token_ids"),
    "negative end": (Request(Params(all_stop_token_ids={-1})), "stop_token_ids"),
    "allowed": (Request(Params(allowed_token_ids=[VOCABULARY])), "allowed_token_ids"),
    "bad word": (Request(Params(bad_words_token_ids=[[1], [-1]])), "bad_words"),
    "empty word": (Request(Params(bad_words_token_ids=[[]])), "bad_words"),
    "budget": (Request(Params(thinking_token_budget=1)), "thinking_token_budget"),
    "replay": (Request(Params(trace_decode_token_ids=[1])), "trace_decode_token_ids"),
    "experts": (Request(Params(routed_experts_prompt_start=4)), "routed_experts_prompt_start"),
    "transfer": (Request(Params(extra_args={"kv_transfer_params": "x"})), "kv_transfer_params"),
    "transfer keys": (Request(Params(extra_args={"ec_transfer_params": {1: 2}})), "ec_transfer_params"),
    "vllm's own": (Request(Refusing()), "sampling_params"),
    "constraint": (Request(Refusing(structured_outputs=SimpleNamespace())), "structured_outputs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_end_the_core_is_refused(case):
    request, field = REFUSED[case]
    assert refusal(request) == field


def test_a_plain_request_passes():
    asked = Request(Params(stop_token_ids=[7], all_stop_token_ids={7}, logit_bias={5: 1.0}, top_k=-1, logprobs=5))
    assert preprocess(Core(), asked) == (asked, 0)


def test_the_models_own_ends_outside_the_vocabulary_are_taken_out():
    params = Params(stop_token_ids=[7, 150], all_stop_token_ids={7, 150, 200}, min_tokens=1)
    preprocess(Core(), Request(params))
    assert (params.stop_token_ids, params.all_stop_token_ids) == ([7], {7})


def test_the_front_ends_guess_of_a_grammar_backend_does_not_count():
    constraint = SimpleNamespace(_backend="outlines", _backend_was_auto=True)
    preprocess(Core(), Request(Params(structured_outputs=constraint)))
    assert (constraint._backend, constraint._backend_was_auto) == (None, False)


def test_the_newer_model_runners_tables_are_not_overrun(monkeypatch):
    names = ("allowed_token_ids", "logit_bias", "stop_token_ids", "bad_words", "bad_words tokens")
    monkeypatch.setattr(guard, "_table_widths", lambda: dict.fromkeys(names, 2))
    core = Core()
    core.vllm_config.use_v2_model_runner = True
    assert refusal(Request(Params(allowed_token_ids=[1, 2, 3])), core) == "allowed_token_ids"
    assert refusal(Request(Params(bad_words_token_ids=[[1, 2, 3]])), core) == "bad_words tokens"
    assert refusal(Request(Params(all_stop_token_ids={1, 2, 3}, min_tokens=1)), core) == "stop_token_ids"
    preprocess(core, Request(Params(all_stop_token_ids={1, 2, 3})))


def test_a_reasoning_parser_that_does_not_take_its_arguments_is_one_requests_matter():
    def build(request: Any) -> None:
        raise TypeError("unexpected keyword")

    core = Core()
    core.structured_output_manager._get_reasoner = build
    assert refusal(Request(reasoning_parser_kwargs={"x": 1}), core) == "reasoning_parser_kwargs"


def test_a_core_that_cannot_be_read_serves_as_it_would_without_the_guard(caplog):
    core = Core()
    del core.addresses
    assert preprocess(core, Request(prompt_token_ids=[]))
    assert preprocess(core, Request(prompt_token_ids=[]))
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1


# Prompts that are embeddings


class Tensor(SimpleNamespace):
    def __len__(self) -> int:
        return self.shape[0]

    def is_floating_point(self) -> bool:
        return self.dtype != "torch.int64"


def tensor(*shape: int, dtype: str = "torch.float32") -> Tensor:
    return Tensor(shape=shape, ndim=len(shape), dtype=dtype)


@pytest.fixture
def embedded() -> Core:
    return Core(enable_prompt_embeds=True, get_inputs_embeds_size=lambda: 4)


def test_embeddings_pass_without_token_ids_and_beside_sentinels(embedded):
    preprocess(embedded, Request(prompt_token_ids=None, prompt_embeds=tensor(3, 4)))
    mixed = Request(prompt_token_ids=[1, 9999], prompt_embeds=tensor(2, 4), prompt_is_token_ids=[True, False])
    preprocess(embedded, mixed)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt_embeds": tensor(3, 5)}, "prompt_embeds"),
        ({"prompt_embeds": tensor(3)}, "prompt_embeds"),
        ({"prompt_embeds": tensor(3, 4, dtype="torch.int64")}, "prompt_embeds"),
        ({"prompt_embeds": tensor(0, 4)}, "prompt_embeds"),
        ({"prompt_embeds": tensor(CONTEXT + 1, 4)}, "prompt_embeds"),
        ({"prompt_embeds": tensor(2, 4)}, "prompt_token_ids"),
        ({"prompt_embeds": tensor(3, 4), "prompt_is_token_ids": [True]}, "prompt_is_token_ids"),
        ({"prompt_embeds": tensor(3, 4), "prompt_token_ids": [1, 2, 9999]}, "prompt_token_ids"),
    ],
)
def test_embeddings_of_another_shape_are_refused(embedded, changes, field):
    assert refusal(Request(**changes), embedded) == field


# Media


class Mask(list):
    dtype = "torch.bool"

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)

    def tolist(self) -> list[bool]:
        return list(self)


def item(offset: int, length: int, mask: Mask | None = None, data: Any = "pixels") -> SimpleNamespace:
    embeds = length if mask is None else sum(mask)
    place = SimpleNamespace(offset=offset, length=length, is_embed=mask, get_num_embeds=lambda: embeds)
    return SimpleNamespace(mm_position=place, modality="image", data=data)


def with_media(*features: Any) -> Request:
    return Request(prompt_token_ids=[1] * 30, mm_features=list(features), params=Params(max_tokens=1))


ODD = Mask([True, False] * 2)
EVEN = Mask([False, True] * 2)


def test_items_in_order_pass_and_so_do_items_that_lie_between_each_other():
    preprocess(Core(is_multimodal_model=True), with_media(item(0, 4), item(4, 4, ODD), item(4, 4, EVEN), item(20, 10)))
    preprocess(
        Core(is_multimodal_model=True, is_encoder_decoder=True), with_media(item(0, 99, Mask([True] + [False] * 98)))
    )


@pytest.mark.parametrize(
    "features",
    [
        [item(0, 0)],
        [item(-1, 4)],
        [item(28, 4)],
        [item(0, ENCODER + 1)],
        [item(0, 4, Mask([True]))],
        [item(0, 4, data=None)],
        [item(8, 4), item(0, 4)],
        [item(0, 9), item(1, 4)],
        [item(0, 4), item(3, 4)],
        [item(0, 4, ODD), item(0, 4, EVEN), item(2, 4, ODD)],
    ],
)
def test_items_that_the_scheduler_or_the_encoder_cannot_take_are_refused(features):
    assert refusal(with_media(*features), Core(is_multimodal_model=True)) == "mm_features"


def test_an_item_without_data_passes_where_the_core_keeps_them():
    core = Core(is_multimodal_model=True)
    core.mm_receiver_cache = object()
    preprocess(core, with_media(item(0, 4, data=None)))


# What cannot be decoded


class EngineCoreRequest(msgspec.Struct, array_like=True):
    request_id: str
    prompt_token_ids: list[int] | None
    arrival_time: float
    client_index: int = 0


def decode(frame: bytes, expected: Any = EngineCoreRequest) -> Any:
    decoder = SimpleNamespace(decoder=msgspec.msgpack.Decoder(expected))
    return guard.decode(lambda frames: decoder.decoder.decode(frames[0]), decoder, ([frame],), {})


def packed(*fields: Any) -> bytes:
    return msgspec.msgpack.encode(fields)


def handled(core: Core, request: Any) -> list[Any]:
    """What vLLM's own handler is called with, after a preprocessing that raised."""
    passed: list[Any] = []
    try:
        preprocess(core, request)
    except Exception:  # noqa: BLE001  as vLLM's input thread does
        guard.handle_request_preproc_error(passed.append, core, (request,), {})
    return passed


@pytest.mark.parametrize(
    ("fields", "client"),
    [(("bad", "text", 1.0, 1), 1), (("bad",), 0), (("bad", "text", 1.0, 7), 0), (("bad", [1], 1.0, "x"), 0)],
)
def test_a_request_that_cannot_be_decoded_ends_with_an_error_output_and_one_line(caplog, fields, client):
    core = Core()
    assert handled(core, decode(packed(*fields))) == []
    assert core.errors == [(["bad"], client)]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    preprocess(core, Request())


@pytest.mark.parametrize("frame", [b"", b"\xc1", packed(), packed(7), b"\x80", packed("cut", [1])[:-1]])
def test_a_frame_without_an_id_is_one_error_line_and_no_output(caplog, frame):
    core = Core()
    assert handled(core, decode(frame)) == []
    assert core.errors == []
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_other_frames_are_decoded_as_they_were():
    assert decode(packed("x"), list) == ["x"]
    with pytest.raises(msgspec.DecodeError):
        decode(b"", list)


# How a refusal is said


def test_a_refusal_is_one_line_of_a_bearable_length(caplog):
    core = Core()
    assert handled(core, Request(request_id="a\nb" + "c" * 10_000, prompt_token_ids=[])) == []
    (record,) = caplog.records
    message = record.getMessage()
    assert "\n" not in message
    assert len(message) < 1000
    assert "prompt_token_ids: is empty" in message
    assert record.exc_info is None


def test_an_error_that_is_not_ours_is_vllms_matter():
    core, asked = Core(), Request(prompt_token_ids=[[]])
    assert handled(core, asked) == [asked]
    assert core.errors == []


def add(core: Core, request: Any) -> list[Any]:
    added: list[Any] = []
    guard.add_request(lambda request, wave: added.append(request), core, (request, 0), {})
    return added


def test_the_id_of_a_living_request_is_refused_and_the_next_part_of_a_session_is_not():
    core, asked = Core(), Request(client_index=1)
    assert add(core, asked) == [asked]
    core.scheduler.requests["r"] = SimpleNamespace(streaming_queue=None)
    assert add(core, asked) == []
    assert core.errors == [(["r"], 1)]
    core.scheduler.requests["r"] = SimpleNamespace(streaming_queue=[])
    assert add(core, asked) == [asked]


def test_a_task_that_the_model_does_not_have_is_refused():
    core, asked = Core(), Request(pooling_params=SimpleNamespace(task="classify"))
    assert add(core, asked) == []
    assert core.errors == [(["r"], 0)]
    asked.pooling_params.task = "embed"
    assert add(core, asked) == [asked]


# Where it is bound


def child(core: bool, results: Any) -> None:
    """An engine core, or a worker, as far as the plugin can see."""
    if core:
        sys.modules["vllm.v1.engine.core"] = types.ModuleType("vllm.v1.engine.core")
    plugin.register()
    results.put([seams.state(seam).value for seam in CORE_SEAMS])


def states_of_a_child(core: bool = True) -> set[str]:
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=child, args=(core, results))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    return set(results.get())


@pytest.mark.parametrize(
    ("variable", "core", "bound"),
    [
        ("1", True, True),
        ("0", True, False),
        ("off", True, False),
        (None, True, False),
        ("1", False, False),
    ],
)
def test_a_child_is_guarded_where_it_is_a_core_and_the_variable_says_so(monkeypatch, variable, core, bound):
    monkeypatch.delenv(plugin.ENGINE_GUARD, raising=False)
    if variable is not None:
        monkeypatch.setenv(plugin.ENGINE_GUARD, variable)
    assert (states_of_a_child(core) == {"unbound"}) is not bound


@pytest.fixture
def _unbound(monkeypatch):
    monkeypatch.delenv(plugin.ENGINE_GUARD, raising=False)
    yield
    for seam in CORE_SEAMS:
        seams.unbind(seam)
    os.environ.pop(plugin.ENGINE_GUARD, None)


@pytest.mark.usefixtures("_unbound")
@pytest.mark.parametrize(
    ("text", "left", "bound"), [(None, "1", True), ("", "1", True), ("on", "on", True), ("no", "no", False)]
)
def test_a_headless_launcher_guards_its_cores_unless_the_operator_does_not_want_it(monkeypatch, text, left, bound):
    if text is not None:
        monkeypatch.setenv(plugin.ENGINE_GUARD, text)
    plugin.guard_engine_cores()
    assert os.environ[plugin.ENGINE_GUARD] == left
    assert ({seams.state(seam) for seam in CORE_SEAMS} == {seams.State.UNBOUND}) is not bound


@pytest.mark.usefixtures("_unbound")
def test_a_variable_that_says_neither_is_a_configuration_error(monkeypatch):
    monkeypatch.setenv(plugin.ENGINE_GUARD, "maybe")
    with pytest.raises(ConfigurationError, match="SMG_VLLM_ENGINE_GUARD: 'maybe'"):
        plugin.guard_engine_cores()
    assert {seams.state(seam) for seam in CORE_SEAMS} == {seams.State.UNBOUND}


def parse(headless: bool) -> None:
    parser = ArgumentParser()
    parser.add_argument("--grpc", action="store_true")
    command_line.parse_known_args(lambda: (Namespace(grpc=False, headless=headless), []), parser, (), {})


@pytest.mark.usefixtures("_unbound")
@pytest.mark.parametrize(("headless", "set_to"), [(True, "1"), (False, None)])
def test_the_parse_of_a_headless_command_line_guards(headless, set_to):
    parse(headless)
    assert os.environ.get(plugin.ENGINE_GUARD) == set_to


@pytest.mark.usefixtures("_unbound")
def test_the_parse_says_a_variable_that_is_not_accepted_in_one_line(monkeypatch, capsys):
    monkeypatch.setenv(plugin.ENGINE_GUARD, "maybe")
    with pytest.raises(SystemExit) as ended:
        parse(headless=True)
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_rules_import_no_grpc():
    code = "import sys, smg_grpc_servicer.vllm.guard; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
