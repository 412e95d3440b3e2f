"""`akv estimate`: every formula against a count by hand or by loops, and the command as a user meets it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from akv_server import cli, estimate
from akv_server.errors import AkvError
from akv_server.estimate import GPUS, SHAPES, Hardware, Scenario, Shape, cost, time_of

LLAMA_70B = SHAPES["llama-3.1-70b"]
TOY = Shape(
    "toy",
    num_layers=3,
    hidden_size=10,
    intermediate_size=7,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=5,
    vocab_size=11,
)

PRODUCTS = ((10, 20), (10, 10), (10, 10), (20, 10), (10, 7), (10, 7), (7, 10))  # its q, k, v, o, gate, up, down


@pytest.mark.parametrize(
    ("name", "billions"),  # as the models' own pages count them
    [
        ("smollm2-135m", 0.1345),
        ("llama-3.2-1b", 1.236),
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.55),
        ("llama-3.1-405b", 405.85),
        ("qwen2.5-0.5b", 0.494),
        ("qwen2.5-7b", 7.616),
        ("qwen2.5-72b", 72.7),
        ("qwen3-0.6b", 0.596),
        ("qwen3-8b", 8.19),
        ("qwen3-32b", 32.76),
    ],
)
def test_the_shapes_have_the_published_number_of_weights(name: str, billions: float) -> None:
    assert SHAPES[name].num_weights / 1e9 == pytest.approx(billions, rel=1e-3)


def test_llama_70b_by_hand() -> None:
    # q and o: 2 * 8192 * 8192; k and v: 2 * 8192 * 1024; gate, up, down: 3 * 8192 * 28672; 80 layers
    assert LLAMA_70B.num_layer_weights == 80 * (134_217_728 + 16_777_216 + 704_643_072) == 68_451_041_280
    assert LLAMA_70B.num_kv_numbers * 2 == 327_680  # bytes a token: 2 * 8 heads * 128 * 2 B * 80 layers
    work = cost(LLAMA_70B, num_new=32_000, num_cached=0)
    assert work.attention_flops == 4 * 80 * 8192 * (32_000 * 32_001 // 2) == 1_342_219_223_040_000
    assert work.product_flops == 2 * 32_000 * 68_451_041_280 + 2 * 128_256 * 8192
    time = time_of(work, GPUS["h100-sxm"], 8)
    assert time.total_s == time.compute_s == pytest.approx(0.7233, abs=1e-4)  # 5.723e15 / (8 * 989e12)
    # two sums a layer of 32,000 * 8192 numbers of 2 B, 7/4 of that sent by each at 450 GB/s
    assert time.links_s == pytest.approx(2 * 80 * 32_000 * 8192 * 2 * 1.75 / 450e9)


@pytest.mark.parametrize("num_new", [1, 5, 20, 23])
def test_the_formulas_are_what_loops_over_tokens_and_steps_count(num_new: int) -> None:
    num_cached, step_tokens = 9, 5
    work = cost(
        TOY, num_new=num_new, num_cached=num_cached, num_moved_segments=2, weight_bytes=1, step_tokens=step_tokens
    )
    products = attention = rotation = kv_read = kv_written = steps = activations = reduced = 0
    for _ in range(TOY.num_layers):
        for row in range(num_new):
            for rows, columns in PRODUCTS:
                products += 2 * rows * columns
            attention += (num_cached + row + 1) * 4 * (2 * 5 + 2 * 5)  # q·k and p·v, 4 heads of 5
            rotation += 2 * 4 * 5 // 2 * 6  # two segments, 6 FLOPs a pair
            kv_written += 2 * 2 * 5 * 2
            # in and out of: q, k and v; attention; o; gate and up; down
            activations += 2 * ((10 + 20 + 10 + 10) + (20 + 20) + (20 + 10) + (10 + 7 + 7) + (7 + 10))
            reduced += 2 * 2 * 10
    for start in range(0, num_new, step_tokens):
        steps += 1
        kv_read += TOY.num_layers * 2 * 2 * 5 * 2 * (num_cached + min(start + step_tokens, num_new))
    assert work.product_flops == products + 2 * 11 * 10
    assert work.attention_flops == attention
    assert work.rotation_flops == rotation
    assert work.kv_write_bytes == kv_written
    assert work.kv_read_bytes == kv_read
    assert work.reduced_bytes == reduced
    assert work.weight_bytes == steps * (TOY.num_layer_weights + 11 * 10)
    assert work.activation_bytes == activations
    assert work.num_bytes == sum((work.weight_bytes, kv_read, kv_written, activations))


def test_the_intensities_that_the_kernels_were_counted_to_have() -> None:
    # a pass of its own over K: 3 * 8 heads * 128 = 3072 FLOPs for 2 * 2048 B a token
    assert estimate.rotation_copy_intensity() == 3072 / 4096 == 0.75
    # one decoded row: 4 * 64 * 128 FLOPs for 2 * 8 * 128 * 2 B a token
    assert estimate.decode_attention_intensity(LLAMA_70B) == 32_768 / 4096 == 8
    assert estimate.decode_attention_intensity(LLAMA_70B, rotates_keys=True) == (32_768 + 3072) / 4096 == 8.75
    assert estimate.decode_attention_intensity(SHAPES["qwen2.5-7b"]) == 7
    assert estimate.decode_attention_intensity(LLAMA_70B, kv_bytes=1) == 16
    assert estimate.decode_attention_intensity(LLAMA_70B, num_rows=4) == 32


def test_a_cached_prefix_saves_what_its_prefill_costs() -> None:
    for n in (1, 7, 12_288):
        logits = 2 * 128_256 * 8192
        weights, attention = 2 * n * LLAMA_70B.num_layer_weights, 2 * 80 * 8192 * n * (n + 1)
        assert cost(LLAMA_70B, num_new=n, num_cached=0).num_flops - logits == weights + attention
    attending = cost(LLAMA_70B, num_new=1, num_cached=12_287).attention_flops
    assert attending == 4 * 80 * 12_288 * 8192  # the write-up's formula is this, not what is saved


def test_the_time_is_that_of_the_busiest_resource() -> None:
    hardware = Hardware("toy", tflops=2e-6, tflops_float8=4e-6, memory_gbps=1e-3, link_gbps=1e-3, memory_gb=1)
    assert hardware.ridge == 2
    work = cost(TOY, num_new=4, num_cached=0)
    one, two = (time_of(work, hardware, num_gpus) for num_gpus in (1, 2))
    assert one.links_s == 0
    assert one.compute_s == pytest.approx(work.num_flops / 2e6)
    assert one.memory_s == pytest.approx(work.num_bytes / 1e6)
    assert (two.compute_s, two.memory_s) == pytest.approx((one.compute_s / 2, one.memory_s / 2))
    assert two.links_s == pytest.approx(work.reduced_bytes / 1e6)
    assert two.total_s == max(two.compute_s, two.memory_s, two.links_s)
    narrow = time_of(work, hardware, weight_bytes=1)
    assert narrow.compute_s == pytest.approx(work.product_flops / 4e6 + work.attention_flops / 2e6)


def test_an_edit_computes_what_is_behind_it_and_a_drop_only_the_turn() -> None:
    works = Scenario(context=1000, edit_at=200, drop=300, turn=50).works(
        TOY, weight_bytes=2, kv_bytes=2, step_tokens=100
    )
    assert {name: (work.num_new, work.num_cached) for name, work in works.items()} == {
        "prefill of the whole context": (1000, 0),
        "next turn, nothing taken out": (50, 1000),
        "next turn after editing the text": (550, 200),
        "next turn after AKV's drop": (50, 700),
        "one decoded token, nothing out": (1, 1000),
        "one decoded token after the drop": (1, 700),
    }
    assert [name for name, work in works.items() if work.rotation_flops] == [
        "next turn after AKV's drop",
        "one decoded token after the drop",
    ]


@pytest.mark.parametrize(("edit_at", "drop", "turn"), [(-1, 10, 1), (0, 0, 1), (0, 10, 0), (50, 50, 1), (99, 2, 1)])
def test_a_scenario_that_cannot_be_is_refused(edit_at: int, drop: int, turn: int) -> None:
    with pytest.raises(AkvError, match="within context"):
        Scenario(context=100, edit_at=edit_at, drop=drop, turn=turn)


def test_nothing_to_compute_is_refused() -> None:
    with pytest.raises(AkvError, match="at least one token"):
        cost(TOY, num_new=0, num_cached=5)


def config(folder: Path, **changes: object) -> Path:
    fields = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    path = folder / "config.json"
    path.write_text(json.dumps({key: value for key, value in {**fields, **changes}.items() if value is not None}))
    return path


def test_a_shape_comes_from_a_config_file_or_its_folder(tmp_path: Path) -> None:
    path = config(tmp_path)
    known = SHAPES["llama-3.1-8b"]
    for place in (path, tmp_path):
        shape = estimate.shape_of(str(place))
        assert shape.name == tmp_path.name
        assert (shape.num_weights, shape.num_kv_numbers) == (known.num_weights, known.num_kv_numbers)
    config(tmp_path, num_key_value_heads=None, head_dim=64, tie_word_embeddings=True)
    shape = estimate.shape_of(str(tmp_path))
    assert (shape.num_kv_heads, shape.head_dim, shape.tie_embeddings) == (32, 64, True)


def test_a_config_of_another_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AkvError, match="mixture of experts"):
        estimate.shape_of(str(config(tmp_path, num_local_experts=8)))
    for name, value in (("hidden_size", None), ("vocab_size", "many"), ("head_dim", 0), ("num_hidden_layers", 10**13)):
        with pytest.raises(AkvError, match=rf"config\.json: {name}: {value!r} is no number from 1 to"):
            estimate.shape_of(str(config(tmp_path, **{name: value})))
    (tmp_path / "config.json").write_text('{"hidden_size": 1, "num_attention_heads": 1e999}')
    with pytest.raises(AkvError, match="num_attention_heads: inf is no number"):
        estimate.shape_of(str(tmp_path))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(AkvError, match=r"neither a config\.json nor"):
        estimate.shape_of(str(tmp_path))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(["estimate", *arguments])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_the_command_prints_figures_and_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "llama-3.1-70b", "--gpu", "h100", "--num-gpus", "8", "--context", "64000"]
    status, out, _ = run(capsys, *options, "--drop", "24000", "--edit-at", "8000", "--turn", "500")
    assert status == 0
    assert re.search(r"next turn after editing the text +32,500 +8,000 ", out)
    assert re.search(r"next turn after AKV's drop +500 +40,000 ", out)
    assert "ridge 295 FLOPs a byte" in out
    assert "141.1 GB of weights, 20.97 GB of KV for 64,000 tokens; fits in 640 GB" in out
    assert re.search(r"8\.00 FLOPs a byte .* keys rotated in registers 8\.75\n.* own: 0\.75 FLOPs a byte\n", out)
    assert "W            = L h (2 (Hq + Hkv) d + 3 I)" in out
    (edit,) = re.findall(r"after editing the text .* ([\d,.]+) ms\n", out)
    (drop,) = re.findall(r"after AKV's drop +500 .* ([\d,.]+) ms\n", out)
    (ratio,) = re.findall(r"and ([\d.]+) times less time", out)
    assert float(ratio) == pytest.approx(float(edit.replace(",", "")) / float(drop), rel=0.02)
    assert max(map(len, out.splitlines())) <= 132


def test_a_context_that_nobody_has_takes_no_longer(capsys: pytest.CaptureFixture[str]) -> None:
    """A trillion tokens in steps of one: no loop over steps ends before the tests do."""
    options = ["--model", "smollm2-135m", "--context", "1000000000000", "--step-tokens", "1"]
    status, out, _ = run(capsys, *options, "--turn", "1000000000000")
    assert status == 0
    (prefill,) = re.findall(r"prefill of the whole context  (.*)", out)
    # each step reads 2 * 30 * 3 * 64 numbers of 2 B for every token before it: half of 1e24 tokens in all
    assert prefill.split()[:4] == ["1,000,000,000,000", "0", "3.46e+28", "1.15e+28"]
    assert max(map(len, out.splitlines())) <= 160


def test_columns_stay_apart_however_wide_their_figures(capsys: pytest.CaptureFixture[str]) -> None:
    for context in ("1000", "64000", "1000000000000"):
        _, out, _ = run(capsys, "--model", "llama-3.1-70b", "--context", context)
        table = [line for line in out.splitlines() if re.match("(  +new|prefill of|next turn|one decoded)", line)]
        assert len(table) == 7
        assert [len(re.split("  +", line.strip())) for line in table] == [9, *[10] * 6]
        assert len({len(line) for line in table}) == 1


def test_nobody_reading_on_ends_it_quietly() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "akv_server.cli", "estimate", "--model", "qwen3-8b"]
    try:
        ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


def test_other_hardware_by_its_rates(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--model", "smollm2-135m", "--gpu", "mine", "--tflops", "0.2", "--gbps", "20")
    assert status == 0
    assert "1 x mine: 0.2 TFLOP/s" in out
    assert "ridge 10 FLOPs a byte" in out
    assert "fit" not in out.partition("formulas")[0]
    _, out, _ = run(capsys, "--model", "llama-3.1-70b", "--gpu", "h100", "--gbps", "1000")
    assert "989 TFLOP/s, 1979 in 8 bits, 1000 GB/s" in out
    assert "does NOT fit in 80 GB" in out


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--model", "gpt-9"], "llama-3.1-70b"),
        (["--model", "qwen3-8b", "--gpu", "abacus"], "h100-sxm"),
        (["--model", "qwen3-8b", "--gpu", "abacus", "--tflops", "1"], "--gbps"),
        (["--model", "qwen3-8b", "--context", "100", "--drop", "100"], "within context"),
    ],
)
def test_what_cannot_be_estimated(capsys: pytest.CaptureFixture[str], options: list[str], what: str) -> None:
    status, out, error = run(capsys, *options)
    assert (status, out) == (2, "")
    assert what in error


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--context", "-1"], "--context: '-1' is no count"),
        (["--context", "1000000000001"], "--context: at most 1,000,000,000,000"),
        (["--turn", "9" * 10_000], "--turn: at most 1,000,000,000,000"),
        (["--num-gpus", "0"], "--num-gpus: '0' is no positive number"),
        (["--num-gpus", "1_000_000_000_001"], "--num-gpus: at most"),
        (["--step-tokens", "1e12"], "--step-tokens: '1e12' is no count"),
        (["--tflops", "0"], "--tflops: '0' is no rate"),
        (["--gbps", "1e-300"], "--gbps: '1e-300' is no rate"),
        (["--weights", "int3"], "--weights: invalid choice"),
    ],
)
def test_options_that_make_no_sense(capsys: pytest.CaptureFixture[str], options: list[str], what: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["estimate", "--model", "qwen3-8b", *options])
    assert ended.value.code == 2
    assert what in capsys.readouterr().err
