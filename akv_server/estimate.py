"""`akv estimate`: FLOPs, bytes, intensity and time of prefill, of re-prefill after an edit, and of AKV's next turn.

Owns the formulas, a table of public model shapes and one of data-sheet rates. Pure arithmetic: knows no torch, no
weights and no server. What comes out is the roofline, a floor: a real engine reaches perhaps half of it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from akv_server.errors import AkvError

Dtype = Literal["bfloat16", "float8"]
NUM_BYTES: dict[str, int] = {"bfloat16": 2, "float8": 1}
ACTIVATION_BYTES = 2
MAX_COUNT = 10**12  # of anything that is asked for: beyond it floats run out before sense does


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model decides its cost. Dense models of the Llama family: gated MLP, grouped-query attention."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_embeddings: bool = False

    @property
    def num_layer_weights(self) -> int:
        """Weights that each token is multiplied with in the layers: `L h (2 (Hq + Hkv) d + 3 I)`."""
        heads = 2 * (self.num_q_heads + self.num_kv_heads) * self.head_dim
        return self.num_layers * self.hidden_size * (heads + 3 * self.intermediate_size)

    @property
    def num_head_weights(self) -> int:
        """Weights that a row whose logits are wanted is multiplied with: `V h`."""
        return self.vocab_size * self.hidden_size

    @property
    def num_weights(self) -> int:
        """All of them but norms and biases: layers, output head, and the input embedding unless it is the head."""
        return self.num_layer_weights + self.num_head_weights * (1 if self.tie_embeddings else 2)

    @property
    def num_kv_numbers(self) -> int:
        """Numbers that the cache holds for a token: `2 L Hkv d`."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def num_activations(self) -> int:
        """Numbers that a token moves through memory in the layers: the input and output of each matrix product and of
        attention, everything between them fused: `L (4 h + (4 Hq + 2 Hkv) d + 3 I)`."""
        heads = (4 * self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim
        return self.num_layers * (4 * self.hidden_size + heads + 3 * self.intermediate_size)


@dataclass(frozen=True, slots=True)
class Hardware:
    """Data-sheet rates of one device: dense tensor-core TFLOP/s with 16-bit and with 8-bit operands, GB/s of memory,
    GB/s that it can send to the others, GB of memory (0: not known)."""

    name: str
    tflops: float
    tflops_float8: float
    memory_gbps: float
    link_gbps: float
    memory_gb: float

    @property
    def ridge(self) -> float:
        """FLOPs a byte at which computing takes as long as moving, with 16-bit operands."""
        return 1000 * self.tflops / self.memory_gbps


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("smollm2-135m", 30, 576, 1536, 9, 3, 64, 49152, tie_embeddings=True),
        Shape("llama-3.2-1b", 16, 2048, 8192, 32, 8, 64, 128256, tie_embeddings=True),
        Shape("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256),
        Shape("llama-3.1-70b", 80, 8192, 28672, 64, 8, 128, 128256),
        Shape("llama-3.1-405b", 126, 16384, 53248, 128, 8, 128, 128256),
        Shape("qwen2.5-0.5b", 24, 896, 4864, 14, 2, 64, 151936, tie_embeddings=True),
        Shape("qwen2.5-7b", 28, 3584, 18944, 28, 4, 128, 152064),
        Shape("qwen2.5-72b", 80, 8192, 29568, 64, 8, 128, 152064),
        Shape("qwen3-0.6b", 28, 1024, 3072, 16, 8, 128, 151936, tie_embeddings=True),
        Shape("qwen3-8b", 36, 4096, 12288, 32, 8, 128, 151936),
        Shape("qwen3-32b", 64, 5120, 25600, 64, 8, 128, 151936),
    )
}
GPUS = {
    gpu.name: gpu
    for gpu in (
        # The A100 has no 8-bit floats: such weights are widened first and multiply at the 16-bit rate.
        Hardware("a100-sxm", 312, 312, 2039, 300, 80),
        Hardware("h100-sxm", 989, 1979, 3350, 450, 80),
        Hardware("h200", 989, 1979, 4800, 450, 141),
        Hardware("l40s", 362, 733, 864, 32, 48),  # linked by PCIe 4.0 x16
        Hardware("mi300x", 1307, 2615, 5300, 448, 192),
    )
}
ALIASES = {"a100": "a100-sxm", "h100": "h100-sxm"}


@dataclass(frozen=True, slots=True)
class Cost:
    """What a piece of work takes, on all devices together. FLOPs count a multiply-add as two."""

    num_new: int
    num_cached: int
    product_flops: int
    attention_flops: int
    rotation_flops: int
    weight_bytes: int
    kv_read_bytes: int
    kv_write_bytes: int
    activation_bytes: int
    reduced_bytes: int

    @property
    def num_flops(self) -> int:
        return self.product_flops + self.attention_flops + self.rotation_flops

    @property
    def num_bytes(self) -> int:
        """Through the memory of the devices; what goes over links is apart."""
        return self.weight_bytes + self.kv_read_bytes + self.kv_write_bytes + self.activation_bytes

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.num_flops / self.num_bytes


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds that each resource is busy at its data-sheet rate. All at once, the slowest is what it takes."""

    compute_s: float
    memory_s: float
    links_s: float

    @property
    def total_s(self) -> float:
        return max(self.compute_s, self.memory_s, self.links_s)


def cost(
    shape: Shape,
    *,
    num_new: int,
    num_cached: int,
    num_moved_segments: int = 0,
    weight_bytes: int = 2,
    kv_bytes: int = 2,
    step_tokens: int = 8192,
) -> Cost:
    """The forward passes that compute `num_new` tokens behind `num_cached` visible ones, and the logits of the last.

    With L layers, hidden size h, MLP size I, Hq query and Hkv KV heads of d, vocabulary V, n new and c cached tokens:

        products     2 n W + 2 V h                 W = L h (2 (Hq + Hkv) d + 3 I), the layers' weights
        attention    4 L Hq d pairs                pairs = n c + n (n + 1) / 2; 2 d for q·k and 2 d for p·v
        rotation     3 L Hq d n segments           the query, once per moved segment: 6 FLOPs a pair of dimensions
        weights      steps (W + V h) bytes         steps = ceil(n / step_tokens); each reads all weights once
        KV read      2 L Hkv d bytes, for each step all tokens up to its end
        KV written   2 L Hkv d n bytes
        activations  2 n L (4 h + (4 Hq + 2 Hkv) d + 3 I)
        reduced      4 n L h                       tensor parallel sums two 16-bit activations a layer

    Raises AkvError("invalid_request") where there is nothing to compute.
    """
    if num_new < 1 or num_cached < 0 or step_tokens < 1:
        raise AkvError("invalid_request", "there must be at least one token to compute, and none fewer than cached")
    num_steps = -(-num_new // step_tokens)
    sum_of_ends = num_steps * num_cached + step_tokens * (num_steps * (num_steps - 1) // 2) + num_new
    pairs = num_new * num_cached + num_new * (num_new + 1) // 2
    width = shape.num_layers * shape.num_q_heads * shape.head_dim
    return Cost(
        num_new=num_new,
        num_cached=num_cached,
        product_flops=2 * num_new * shape.num_layer_weights + 2 * shape.num_head_weights,
        attention_flops=4 * width * pairs,
        rotation_flops=3 * width * num_new * num_moved_segments,
        weight_bytes=num_steps * (shape.num_layer_weights + shape.num_head_weights) * weight_bytes,
        kv_read_bytes=shape.num_kv_numbers * kv_bytes * sum_of_ends,
        kv_write_bytes=shape.num_kv_numbers * kv_bytes * num_new,
        activation_bytes=shape.num_activations * ACTIVATION_BYTES * num_new,
        reduced_bytes=2 * ACTIVATION_BYTES * shape.num_layers * shape.hidden_size * num_new,
    )


def time_of(work: Cost, hardware: Hardware, num_gpus: int = 1, *, weight_bytes: int = 2) -> Time:
    """The roofline of `num_gpus` devices that share the work evenly (tensor parallel).

    compute = products / rate of the weights' width + (attention + rotation) / 16-bit rate; memory = bytes / bandwidth;
    links = a ring all-reduce, in which each device sends 2 (N - 1) / N of what is summed. Summing inside the switch
    halves that.
    """
    product_rate = 1e12 * (hardware.tflops_float8 if weight_bytes == 1 else hardware.tflops)
    compute_s = work.product_flops / product_rate + (work.attention_flops + work.rotation_flops) / (
        1e12 * hardware.tflops
    )
    sent_bytes = work.reduced_bytes * 2 * (num_gpus - 1) / num_gpus
    return Time(
        compute_s=compute_s / num_gpus,
        memory_s=work.num_bytes / (1e9 * hardware.memory_gbps) / num_gpus,
        links_s=sent_bytes / (1e9 * hardware.link_gbps) if sent_bytes else 0.0,
    )


def decode_attention_intensity(
    shape: Shape, *, kv_bytes: int = 2, num_rows: int = 1, rotates_keys: bool = False
) -> float:
    """FLOPs a byte of attention alone over a long cache, each key and value read once for all `num_rows` rows.

    A token costs 4 Hq d FLOPs a row and 2 Hkv d numbers read, so with 16-bit KV it is G = Hq / Hkv a row; rotating its
    key on the way adds 3 Hkv d FLOPs once, which is 0.75 more and never more than that.
    """
    width = shape.num_kv_heads * shape.head_dim
    flops = 4 * num_rows * shape.num_q_heads * shape.head_dim + (3 * width if rotates_keys else 0)
    return flops / (2 * width * kv_bytes)


def rotation_copy_intensity(*, kv_bytes: int = 2) -> float:
    """FLOPs a byte of rotating keys as a pass of its own: 3 Hkv d FLOPs a token, each key read and written."""
    return 3 / (2 * kv_bytes)


def shape_of(model: str) -> Shape:
    """A shape by its name in `SHAPES`, or from a transformers `config.json` (the file or its folder).

    Raises AkvError("model_not_found") for what is neither, AkvError("invalid_request") for a config of another family.
    """
    if (known := SHAPES.get(model.lower())) is not None:
        return known
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    try:
        raw = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        known_names = ", ".join(SHAPES)
        raise AkvError("model_not_found", f"{model!r} is neither a config.json nor one of {known_names}") from error
    experts = [name for name in ("num_experts", "num_local_experts", "n_routed_experts") if raw.get(name)]
    if experts:
        raise AkvError("invalid_request", f"{model}: a mixture of experts ({experts[0]}); only dense models are known")

    def size(name: str, default: int | None = None) -> int:
        value = default if raw.get(name) is None else raw[name]
        if type(value) is not int or not 0 < value <= MAX_COUNT:
            raise AkvError("invalid_request", f"{path}: {name}: {value!r} is no number from 1 to {MAX_COUNT:,}")
        return value

    hidden_size, num_q_heads = size("hidden_size"), size("num_attention_heads")
    return Shape(
        name=str(raw.get("_name_or_path") or path.resolve().parent.name),
        num_layers=size("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=size("intermediate_size"),
        num_q_heads=num_q_heads,
        num_kv_heads=size("num_key_value_heads", num_q_heads),
        head_dim=size("head_dim", hidden_size // num_q_heads),
        vocab_size=size("vocab_size"),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
    )


# --- the command ------------------------------------------------------------------------------------------------------


FORMULAS = """\
formulas     L layers, h hidden, I MLP, Hq and Hkv heads of d, V vocabulary, n new behind c cached, N devices
  W            = L h (2 (Hq + Hkv) d + 3 I)        weights of the layers
  FLOPs        = 2 n W + 2 V h                     matrix products, logits of one row
               + 4 L Hq d (n c + n (n + 1) / 2)    attention
               + 3 L Hq d n segments               AKV: the query rotated once per moved segment
  bytes        = steps (W + V h) w                 weights of w bytes, read once a step, steps = ceil(n / step tokens)
               + 2 L Hkv d b (sum of each step's end + n)   KV of b bytes, read and written
               + 2 n L (4 h + (4 Hq + 2 Hkv) d + 3 I)       activations, 16 bit, pointwise work fused
  compute      = FLOPs / (N rate), products at the rate of the weights' width, attention at the 16-bit rate
  memory       = bytes / (N bandwidth)
  links        = 4 n L h * 2 (N - 1) / N / link    ring all-reduce of two activations a layer
  time         = the largest of the three: a floor at data-sheet rates, all three overlapping, nothing else in the way
  saved        = 2 N W + 2 L Hq d N (N + 1)        FLOPs that a cached prefix of N tokens saves"""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A stream of `context` tokens of which `[edit_at, edit_at + drop)` goes, and then a turn of `turn` new ones.

    index    0          edit_at       edit_at + drop         context      context + turn
             |  cached  |   dropped   |  moved up by drop    |  the turn  |
    """

    context: int
    edit_at: int
    drop: int
    turn: int

    def __post_init__(self) -> None:
        if min(self.edit_at, self.drop - 1, self.turn - 1) < 0 or self.edit_at + self.drop >= self.context:
            raise AkvError("invalid_request", "edit_at + drop must lie within context, with something behind them")

    def works(self, shape: Shape, *, weight_bytes: int, kv_bytes: int, step_tokens: int) -> dict[str, Cost]:
        """The work of each way on, by what it is called."""

        def of(num_new: int, num_cached: int, num_moved_segments: int = 0) -> Cost:
            return cost(
                shape,
                num_new=num_new,
                num_cached=num_cached,
                num_moved_segments=num_moved_segments,
                weight_bytes=weight_bytes,
                kv_bytes=kv_bytes,
                step_tokens=step_tokens,
            )

        visible = self.context - self.drop
        return {
            "prefill of the whole context": of(self.context, 0),
            "next turn, nothing taken out": of(self.turn, self.context),
            "next turn after editing the text": of(visible - self.edit_at + self.turn, self.edit_at),
            "next turn after AKV's drop": of(self.turn, visible, 1),
            "one decoded token, nothing out": of(1, self.context),
            "one decoded token after the drop": of(1, visible, 1),
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the estimate. Returns the exit status: 0 done, 2 asked for what cannot be, 141 where nobody reads on."""
    options = _parser().parse_args(argv)
    try:
        print(report(options), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would be flushed at the exit
        return 128 + signal.SIGPIPE
    except AkvError as error:
        print(f"akv: {error.message}", file=sys.stderr)
        return 2
    return 0


def report(options: argparse.Namespace) -> str:
    """The whole output. Raises AkvError for options that do not go together."""
    shape, hardware = shape_of(options.model), _hardware(options)
    weight_bytes, kv_bytes, num_gpus = NUM_BYTES[options.weights], NUM_BYTES[options.kv], options.num_gpus
    drop = options.context // 4 if options.drop is None else options.drop
    edit_at = options.context // 4 if options.edit_at is None else options.edit_at
    scenario = Scenario(options.context, edit_at, drop, options.turn)
    works = scenario.works(shape, weight_bytes=weight_bytes, kv_bytes=kv_bytes, step_tokens=options.step_tokens)
    weights_gb = shape.num_weights * weight_bytes / 1e9
    kv_gb = shape.num_kv_numbers * kv_bytes * options.context / 1e9
    memory = f"{weights_gb:.1f} GB of weights, {kv_gb:.2f} GB of KV for {options.context:,} tokens"
    if hardware.memory_gb:
        fits = "fits" if weights_gb + kv_gb < num_gpus * hardware.memory_gb else "does NOT fit"
        memory += f"; {fits} in {num_gpus * hardware.memory_gb:g} GB"
    after_edit, after_drop = works["next turn after editing the text"], works["next turn after AKV's drop"]
    times = {name: time_of(work, hardware, num_gpus, weight_bytes=weight_bytes) for name, work in works.items()}
    ratio = times["next turn after editing the text"].total_s / times["next turn after AKV's drop"].total_s
    in_place = decode_attention_intensity(shape, kv_bytes=kv_bytes)
    rotated = decode_attention_intensity(shape, kv_bytes=kv_bytes, rotates_keys=True)
    copy = rotation_copy_intensity(kv_bytes=kv_bytes)
    return "\n".join(
        [
            f"model        {shape.name}: L {shape.num_layers}, h {shape.hidden_size}, I {shape.intermediate_size}, "
            f"Hq {shape.num_q_heads}, Hkv {shape.num_kv_heads}, d {shape.head_dim}, V {shape.vocab_size}",
            f"weights      {shape.num_weights / 1e9:.2f}e9 in {options.weights}, KV in {options.kv}",
            f"hardware     {num_gpus} x {hardware.name}: {hardware.tflops:g} TFLOP/s, "
            f"{hardware.tflops_float8:g} in 8 bits, {hardware.memory_gbps:g} GB/s, "
            f"link {hardware.link_gbps:g} GB/s; ridge {hardware.ridge:.0f} FLOPs a byte",
            f"memory       {memory}",
            f"stream       {options.context:,} tokens; [{edit_at:,}, {edit_at + drop:,}) goes; then a turn of "
            f"{options.turn:,} tokens; steps of {options.step_tokens:,}",
            "",
            *_lined_up([HEADS, *(_row(name, work, times[name]) for name, work in works.items())]),
            "",
            f"after AKV's drop the turn takes {after_edit.num_flops / after_drop.num_flops:.1f} times fewer FLOPs "
            f"than after an edit of the text, and {ratio:.1f} times less time",
            f"attention of one decoded token alone: {in_place:.2f} FLOPs a byte (with 16-bit KV G = Hq / Hkv); "
            f"with keys rotated in registers {rotated:.2f}",
            f"rotating keys in a pass of its own: {copy:.2f} FLOPs a byte",
            "",
            FORMULAS,
        ]
    )


HEADS = ["", "new", "cached", "FLOPs", "bytes", "FLOPs/B", "compute", "memory", "links", "time"]


def _row(name: str, work: Cost, time: Time) -> list[str]:
    counts = [f"{work.num_new:,}", f"{work.num_cached:,}", f"{work.num_flops:.3g}", f"{work.num_bytes:.3g}"]
    times = [time.compute_s, time.memory_s, time.links_s, time.total_s]
    return [name, *counts, f"{work.intensity:.1f}", *map(_ms, times)]


def _lined_up(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in lines: names to the left, numbers to the right, two spaces between columns however wide they are."""
    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([name.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))])
        for name, *cells in rows
    ]


def _ms(seconds: float) -> str:
    ms = 1000 * seconds
    if ms >= 1e9:
        return f"{ms:.3g} ms"
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.2g} ms" if ms < 1 else f"{ms:.1f} ms"


def _hardware(options: argparse.Namespace) -> Hardware:
    name = options.gpu.lower()
    found = GPUS.get(ALIASES.get(name, name))
    if found is None and (options.tflops is None or options.gbps is None):
        raise AkvError("invalid_request", f"--gpu: one of {', '.join(GPUS)}; of another, give --tflops and --gbps")
    base = found or Hardware(options.gpu, options.tflops, options.tflops, options.gbps, options.gbps, 0)
    tflops = base.tflops if options.tflops is None else options.tflops
    tflops_float8 = base.tflops_float8 if options.tflops is None else options.tflops
    gbps = base.memory_gbps if options.gbps is None else options.gbps
    return Hardware(base.name, tflops, tflops_float8, gbps, base.link_gbps, base.memory_gb)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="akv estimate",
        description="FLOPs, bytes and time on paper: prefill, re-prefill after an edit, AKV's turn.",
    )
    add = parser.add_argument
    add("--model", required=True, help=f"{', '.join(SHAPES)}, or the path of a config.json")
    add("--gpu", default="h100-sxm", help=f"{', '.join(GPUS)}, or any name with --tflops and --gbps")
    add("--num-gpus", type=_positive, default=1, metavar="N", help="tensor parallel (default: %(default)s)")
    add(
        "--context",
        type=_positive,
        default=64_000,
        metavar="TOKENS",
        help="length of the stream (default: %(default)s)",
    )
    add("--drop", type=_positive, metavar="TOKENS", help="how many of them go (default: a quarter)")
    add("--edit-at", type=_count, metavar="INDEX", help="where those begin (default: behind the first quarter)")
    add("--turn", type=_positive, default=500, metavar="TOKENS", help="new tokens of the turn (default: %(default)s)")
    add("--weights", choices=tuple(NUM_BYTES), default="bfloat16", help="default: %(default)s")
    add("--kv", choices=tuple(NUM_BYTES), default="bfloat16", help="default: %(default)s")
    add("--step-tokens", type=_positive, default=8192, metavar="N", help="tokens a step takes (default: %(default)s)")
    add("--tflops", type=_rate, metavar="N", help="dense TFLOP/s of one device, in place of its data sheet's")
    add("--gbps", type=_rate, metavar="N", help="GB/s of its memory, in place of its data sheet's")
    return parser


def _positive(text: str) -> int:
    if (number := _count(text)) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return number


def _count(text: str) -> int:
    digits = text.replace(",", "").replace("_", "")
    if not (digits.isascii() and digits.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is no count")
    if len(digits) > 4000 or int(digits) > MAX_COUNT:
        raise argparse.ArgumentTypeError(f"at most {MAX_COUNT:,}")
    return int(digits)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0
    if not 1e-6 <= rate < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate")
    return rate
