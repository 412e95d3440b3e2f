"""The forward pass against transformers: each family, each rotary scaling, the default model, the golden cases."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from akv_kernels import reference, select
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from akv_server import files, loader, sampler, weights
from akv_server.errors import AkvError
from akv_server.model import Model
from tests.models import FAMILIES, tiny_model
from tests.streams import BareStream

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": YARN,
    "yarn-own-magnitude": YARN | {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-mscale": YARN | {"mscale": 0.8, "mscale_all_dim": 0.5, "truncate": False},
}


def load(path: Path, backend: ModuleType = reference, **options: Any) -> Model:
    return loader.load_model(files.resolve(str(path)), backend=backend, **options)


def some_tokens(count: int, vocab_size: int, seed: int = 0) -> list[int]:
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def transformers_logits(path: Path, tokens: list[int]) -> torch.Tensor:
    """float64 [len(tokens), vocab]"""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def assert_same_logits(got: torch.Tensor, want: torch.Tensor, tolerance: float = 2e-4) -> None:
    """Logits here have a standard deviation of about 1.5; float32 arithmetic is good for 1e-5 of that."""
    assert want.std() > 0.5, "a model whose logits are all alike would pass any comparison"
    torch.testing.assert_close(got.double(), want.double(), atol=tolerance, rtol=0)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_equals_transformers(tmp_path, family, backend):
    path = tiny_model(tmp_path, family, sharded=family == "llama")
    tokens = some_tokens(90, 320)
    model = load(path, reference if backend == "reference" else select("cpu"))
    stream = BareStream(model, 100)
    got = torch.cat([stream.feed(tokens[:53]), stream.feed(tokens[53:54]), stream.feed(tokens[54:])])
    assert_same_logits(got, transformers_logits(path, tokens))


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
@pytest.mark.parametrize("how", ["rope_parameters", "rope_scaling"])
def test_each_rope_scaling_equals_transformers(tmp_path, scaling, how):
    path = tiny_model(tmp_path, max_position_embeddings=256, rope_parameters=scaling | {"rope_theta": 5000.0})
    tokens = some_tokens(120, 320)
    want = transformers_logits(path, tokens)
    if how == "rope_scaling":  # the same as older files say it
        raw = json.loads((path / "config.json").read_text())
        given = raw.pop("rope_parameters")
        raw |= {"rope_theta": given.pop("rope_theta"), "rope_scaling": {"type": given.pop("rope_type"), **given}}
        (path / "config.json").write_text(json.dumps(raw))
    stream = BareStream(load(path), 120)
    assert_same_logits(stream.feed(tokens), want)


@pytest.mark.parametrize("scaling", [None, SCALINGS["yarn-own-magnitude"]], ids=["plain", "yarn"])
def test_moving_everything_by_the_same_distance_changes_nothing(tmp_path, scaling):
    """Scores depend on distances alone; a magnitude applied twice, or a delta of the wrong sign, would show."""
    rope = {} if scaling is None else {"rope_parameters": scaling | {"rope_theta": 10000.0}}
    model = load(tiny_model(tmp_path, **rope))
    tokens = some_tokens(70, 320)
    still, moved = BareStream(model, 80), BareStream(model, 80, seed=1)
    for stream in (still, moved):
        stream.feed(tokens[:45])
    moved.apply("repos", 0, None, 37)
    want = still.feed(tokens[45:])
    assert_same_logits(moved.feed(tokens[45:]), want)
    moved.apply("repos", 60, None, 5)
    assert (still.feed(tokens[:5]) - moved.feed(tokens[:5])).abs().max() > 1e-2


def test_only_the_wanted_rows_have_logits(tmp_path):
    model = load(tiny_model(tmp_path, "qwen2"))
    tokens = some_tokens(20, 320)
    want = BareStream(model, 20).feed(tokens)
    assert_same_logits(BareStream(model, 20).feed(tokens, [19, 3]), want[[19, 3]], 1e-5)
    assert BareStream(model, 20).feed(tokens, []).shape == (0, 320)


def test_a_token_that_is_resident_already_is_not_written_again(tmp_path):
    model = load(tiny_model(tmp_path))
    tokens = some_tokens(20, 320)
    stream = BareStream(model, 20)
    want = stream.feed(tokens)
    before = [pages.clone() for pages in stream.k_pages]
    again = BareStream(model, 20)
    again.k_pages, again.v_pages = stream.k_pages, stream.v_pages
    again.layout = again.layout.feed(19)
    real = model.forward

    def without_writing(step: Any, k_pages: Any, v_pages: Any) -> torch.Tensor:
        step.write_slots.fill_(-1)
        return real(step, k_pages, v_pages)

    again.model = type("Frozen", (), {"forward": staticmethod(without_writing), "rotary": model.rotary})()
    assert_same_logits(again.feed(tokens[19:]), want[19:], 1e-4)
    for pages, old in zip(stream.k_pages, before, strict=True):
        assert torch.equal(pages.nan_to_num(), old.nan_to_num())


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_half_precision_keeps_its_kv_in_that_type(tmp_path, kind):
    path = tiny_model(tmp_path, "qwen3")
    tokens = some_tokens(40, 320)
    model = load(path, weights_as=kind)
    stream = BareStream(model, 48)
    got = stream.feed(tokens)
    assert stream.k_pages[0].dtype == getattr(torch, kind)
    assert got.dtype == torch.float32
    want = transformers_logits(path, tokens)
    assert (got - want).abs().mean() < (0.1 if kind == "bfloat16" else 0.02)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_int8_is_close_and_no_token_depends_on_how_the_prompt_was_cut(tmp_path, family):
    path = tiny_model(tmp_path, family)
    tokens = some_tokens(90, 320)
    model = load(path, select("cpu"), weights_as="int8")
    whole = BareStream(model, 90).feed(tokens)
    stream = BareStream(model, 90, seed=1)
    assert torch.equal(torch.cat([stream.feed(tokens[a:b]) for a, b in ((0, 37), (37, 38), (38, 90))]), whole)
    want = transformers_logits(path, tokens).log_softmax(-1)
    assert (want.exp() * (want - whole.log_softmax(-1))).sum(-1).mean() < 0.01  # KL, in nats
    with pytest.raises(AkvError, match="bfloat16") as error:
        load(path, weights_as="int8", device="cuda")
    assert error.value.param == "weights"


def test_load_gives_the_model_with_its_tokenizer(tmp_path):
    loaded = loader.load(str(tiny_model(tmp_path, name="by-name")))
    assert loaded.config is loaded.model.config
    assert loaded.config.name == "by-name"
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("The agent reads 12 files.")) == "The agent reads 12 files."


# --- the default model -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def default_files() -> files.ModelFiles:
    return files.resolve("default")


@pytest.fixture(scope="module")
def default_model(default_files: files.ModelFiles) -> Model:
    return loader.load_model(default_files)


def test_the_default_model_equals_transformers_on_the_same_weights(default_files, default_model):
    text = "def add(a, b):\n    return a + b\n\n# The quick brown fox jumps over 13 lazy dogs.\n" * 2
    tokens = [byte + 300 for byte in text.encode()]  # any ids do; the tokenizer has its own tests
    with weights.open_weights(default_files) as (config, source):
        theirs = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=576,
                intermediate_size=1536,
                num_hidden_layers=30,
                num_attention_heads=9,
                num_key_value_heads=3,
                max_position_embeddings=8192,
                rope_theta=100000.0,
                rms_norm_eps=1e-5,
                tie_word_embeddings=True,
            )
        )
        with torch.no_grad():
            for name, parameter in theirs.named_parameters():
                parameter.copy_(source(name))
            want = theirs(torch.tensor([tokens])).logits[0]
    assert_same_logits(BareStream(default_model, len(tokens)).feed(tokens), want, 2e-3)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_there_is_one_copy_of_the_default_model(default_files, default_model):
    config = default_model.config
    per_layer = config.hidden_size * (
        2 + 2 * (config.num_q_heads + config.num_kv_heads) * config.head_dim + 3 * config.intermediate_size
    )
    want = config.num_layers * per_layer + config.hidden_size * (1 + config.vocab_size)
    storages = {}
    for tensor in tensors_in(default_model):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    assert sum(storages.values()) == 4 * want
    assert default_files.path.name not in Path("/proc/self/maps").read_text()


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor that a model holds, through lists and slots."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list):
        return [tensor for item in value for tensor in tensors_in(item)]
    if not type(value).__module__.startswith("akv_server.model"):
        return []
    names = getattr(type(value), "__slots__", None) or vars(value)
    return [tensor for name in names for tensor in tensors_in(getattr(value, name))]


def test_the_golden_cases(shared, default_model):
    """Top log-probabilities after each feed within 2e-3 and the same greedy ids, with drops and repos between."""
    compared = 0
    for case in json.loads((shared / "golden" / "cases.json").read_text()):
        stream = BareStream(default_model, len(case["tokens"]) + 32)
        begin, logits = 0, torch.empty(0)
        for step in case["steps"]:
            if step["op"] == "feed":
                wanted = [want["offset"] for want in step["expect"]]
                tokens = case["tokens"][begin : begin + step["n"]]
                logits = stream.feed(tokens, [*wanted, len(tokens) - 1])
                begin += step["n"]
                for row, want in zip(logits.log_softmax(-1), step["expect"], strict=False):
                    assert stream.layout.next_position == want["next_position"]
                    got = row[want["top_ids"]]
                    torch.testing.assert_close(got, torch.tensor(want["top_logprobs"]), atol=2e-3, rtol=0)
                    assert set(want["top_ids"][:5]) <= set(row.topk(8).indices.tolist())
                    compared += 1
            elif step["op"] == "generate":
                generated = []
                for _ in range(step["n"]):
                    generated += sampler.sample(logits[-1:], [sampler.SamplingParams(temperature=0)], [None]).tolist()
                    logits = stream.feed(generated[-1:])
                assert generated == step["expect"], case["name"]
            else:
                stream.apply(step["op"], step["start"], step["end"], step.get("delta", 0))
    assert compared > 20
