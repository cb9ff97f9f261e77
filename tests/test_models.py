"""Tiny models: the same bytes every time, files that engines can read, and a tokenizer that loses nothing."""

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from smg_grpc_servicer.demo import models, weights

NAMES = sorted(models.MODELS)
SCRIPT = Path(__file__).with_name("models.py")
CHAT_MODELS = ["qwen2vl", "qwen3"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: models.write(name, root / name) for name in NAMES}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def load_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def read_header(path: Path) -> tuple[dict[str, Any], bytes]:
    """The tensors that a safetensors file names, and its data."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__")
    return header, content[8 + length :]


@pytest.mark.parametrize("name", NAMES)
def test_another_process_writes_the_same_bytes(name: str, written: dict[str, Path], tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(SCRIPT), name, str(tmp_path)], check=True, capture_output=True)
    assert files(tmp_path) == files(written[name])


def test_the_command_line_needs_no_installed_package(tmp_path: Path) -> None:
    hide = f"import runpy, sys; sys.modules['smg_grpc_servicer'] = None; sys.argv = ['m', 'minilm', {str(tmp_path)!r}]"
    code = f"{hide}; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert (tmp_path / "model.safetensors").is_file()


def test_an_unknown_name_is_refused_with_what_is_accepted(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "gpt5", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "'gpt5'" in done.stderr
    assert all(name in done.stderr for name in NAMES)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("module", ["numpy", "tokenizers"])
def test_a_missing_module_is_named_with_its_command(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"{module}.*pip install 'smg-grpc-servicer\[demo\]'"):
        models.write("qwen3", tmp_path / "model")


@pytest.mark.parametrize("name", NAMES)
def test_the_safetensors_header_covers_the_data_without_a_gap(name: str, written: dict[str, Path]) -> None:
    header, data = read_header(written[name] / "model.safetensors")
    size = {"BF16": 2, "F32": 4}
    end = 0
    for tensor in sorted(header.values(), key=lambda tensor: tensor["data_offsets"]):
        start, stop = tensor["data_offsets"]
        assert start == end
        assert stop - start == size[tensor["dtype"]] * int(np.prod(tensor["shape"]))
        end = stop
    assert end == len(data)
    assert {tensor["dtype"] for tensor in header.values()} == {"F32" if name == "minilm" else "BF16"}


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_of_the_architecture_is_there(name: str, written: dict[str, Path]) -> None:
    header, _ = read_header(written[name] / "model.safetensors")
    shapes = {key: tuple(tensor["shape"]) for key, tensor in header.items()}
    expected = {
        "qwen3": (
            2 + 2 * 11,
            {"model.embed_tokens.weight": (2048, 64), "model.layers.1.self_attn.q_norm.weight": (32,)},
        ),
        "qwen2vl": (
            2 + 2 * 12 + 1 + 2 * 12 + 6,
            {"visual.patch_embed.proj.weight": (64, 3, 2, 14, 14), "model.layers.0.self_attn.k_proj.bias": (64,)},
        ),
        "minilm": (5 + 2 * 16 + 2, {"embeddings.word_embeddings.weight": (2048, 64), "pooler.dense.bias": (64,)}),
    }
    count, some = expected[name]
    assert len(shapes) == count
    assert shapes.items() >= some.items()


def test_bf16_is_the_nearest_value(tmp_path: Path) -> None:
    # 1 + 2**-8 lies between two bf16 values: to even is down; a bit more is up; 3.0 is one itself.
    values = np.array([1.0, -2.5, 3.0, 1 + 2**-8, 1 + 2**-8 + 2**-20, -(1 + 3 * 2**-8)], dtype="float32")
    weights.write_safetensors(tmp_path / "file", {"tensor": values}, bfloat16=True)
    _, data = read_header(tmp_path / "file")
    back = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    assert back.tolist() == [1.0, -2.5, 3.0, 1.0, 1 + 2**-7, -(1 + 2**-6)]


@pytest.mark.parametrize("name", CHAT_MODELS)
@pytest.mark.parametrize(
    "text", ["def f(x):\n    return 1\n", "Grüße, 世界 🙂\t\x00", "  two  spaces ", "<|im_end|>\n"]
)
def test_text_survives_the_tokenizer(name: str, text: str, written: dict[str, Path]) -> None:
    tokenizer = Tokenizer.from_file(str(written[name] / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 2048
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_the_embedding_tokenizer_knows_words(written: dict[str, Path]) -> None:
    tokenizer = Tokenizer.from_file(str(written["minilm"] / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 2048
    encoded = tokenizer.encode("Return the string!")
    assert encoded.tokens == ["[CLS]", "return", "the", "string", "!", "[SEP]"]
    vocabulary = (written["minilm"] / "vocab.txt").read_text().splitlines()
    assert [vocabulary[number] for number in encoded.ids] == encoded.tokens


@pytest.mark.parametrize("name", CHAT_MODELS)
def test_special_tokens_have_the_ids_that_the_configs_name(name: str, written: dict[str, Path]) -> None:
    tokenizer = Tokenizer.from_file(str(written[name] / "tokenizer.json"))
    config = load_json(written[name] / "config.json")
    turn_end, end_of_text = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    assert config["eos_token_id"] == turn_end
    assert load_json(written[name] / "generation_config.json")["eos_token_id"] == [turn_end, end_of_text]
    if name == "qwen2vl":
        keys = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
        keys |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
        assert {key: config[key] for key in keys} == {key: tokenizer.token_to_id(token) for key, token in keys.items()}


def test_the_text_model_has_the_shape_that_every_engine_loads(written: dict[str, Path]) -> None:
    config = load_json(written["qwen3"] / "config.json")
    expected = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    expected |= {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096, "vocab_size": 2048}
    expected |= {"rope_theta": 10000.0, "tie_word_embeddings": True}
    assert config.items() >= expected.items()
    assert config["architectures"] == ["Qwen3ForCausalLM"]


def test_the_image_model_rotates_by_time_height_and_width(written: dict[str, Path]) -> None:
    config = load_json(written["qwen2vl"] / "config.json")
    sections = config["rope_scaling"]["mrope_section"]
    assert sections == [4, 6, 6]
    assert 2 * sum(sections) == config["hidden_size"] // config["num_attention_heads"]
    processor = load_json(written["qwen2vl"] / "preprocessor_config.json")
    assert (processor["min_pixels"], processor["max_pixels"]) == (3136, 200704)


def test_the_embedding_model_pools_by_mean_and_normalizes(written: dict[str, Path]) -> None:
    folder = written["minilm"]
    kinds = [module["type"].rpartition(".")[2] for module in load_json(folder / "modules.json")]
    assert kinds == ["Transformer", "Pooling", "Normalize"]
    pooling = load_json(folder / "1_Pooling" / "config.json")
    assert pooling["pooling_mode_mean_tokens"]
    assert pooling["word_embedding_dimension"] == load_json(folder / "config.json")["hidden_size"]


def test_the_text_model_steps_from_token_to_token(written: dict[str, Path]) -> None:
    """Each embedding is closest to its own step's target, by a margin that no rounding closes."""
    random = weights.Random()
    embeddings, step = weights._walk(random)
    logits = embeddings @ (step @ embeddings.T)
    best = np.sort(logits, axis=0)[-2:]
    targets = logits.argmax(axis=0)
    assert len(set(targets.tolist())) >= 2047
    assert np.median(best[1] / best[0]) > 1.5
