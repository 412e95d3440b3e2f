"""Compiles a Triton kernel for a GPU that is not there and reads what came out. For tests; not under the interpreter.

Owns the reading of resource usage, machine instructions and of which kernel argument each store goes to. Knows none of
the kernels.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * 1024),
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * 1024),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * 1024),
}


@dataclass(frozen=True)
class Compiled:
    """What one kernel came to on one target."""

    registers: int  # of a thread; vector and accumulation registers on AMD
    spills: int  # bytes of stack and local memory on NVIDIA, spilled vector registers on AMD
    shared_bytes: int
    matrix_instructions: int
    loop: Counter[str]  # instructions of the innermost loop with the most matrix instructions, by opcode
    num_instructions: int
    writes: frozenset[str]  # kernel arguments that a store or an atomic goes to; "?" if one could not be followed


def compile_kernel(
    kernel: Any,
    target: str,
    types: dict[str, str],  # argument -> "*bf16", "i32", "fp32", …
    constants: dict[str, Any],  # argument -> value; None for a pointer that is not given
    num_warps: int = 4,
    num_stages: int = 3,
) -> Compiled:
    """Compile as the just-in-time compiler would: pointers are known to be multiples of 16 bytes, integers are not."""
    names = kernel.arg_names
    assert set(names) == set(types) | set(constants), set(names) ^ (set(types) | set(constants))
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    source = ASTSource(kernel, signature, {(names.index(n),): value for n, value in constants.items()}, aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    gpu, _ = TARGETS[target]
    built = triton.compile(source, target=gpu, options=options)
    read = _read_amd if gpu.backend == "hip" else _read_nvidia
    return Compiled(shared_bytes=built.metadata.shared, writes=written(built.asm["ttir"]), **read(built))


def _innermost_loop(code: list[tuple[int, str, int | None]], matrix: str) -> Counter[str]:
    """Opcodes of the loop with the most matrix instructions among those that hold no smaller loop with any.

    code: (address, opcode, branch target or None) in order of address.
    """
    loops = []
    for address, _, goal in code:
        if goal is not None and goal < address:
            body = [op for at, op, _ in code if goal <= at <= address]
            if count := sum(op.startswith(matrix) for op in body):
                loops.append((count, goal, address, body))
    innermost = [
        (count, body)
        for count, begin, end, body in loops
        if not any(begin <= b and e <= end and (b, e) != (begin, end) for _, b, e, _ in loops)
    ]
    return Counter(max(innermost, key=lambda loop: loop[0])[1]) if innermost else Counter()


def _read_nvidia(built: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        command = [knobs.nvidia.nvdisasm.path, "-c", "-hex", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    code, labels, address = [], {}, 0
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x?_?\w+):", line):
            labels[label[1]] = address + 16
        if op := re.match(r"\s*/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)", line):
            address = int(op[1], 16)
            branch = re.search(r"`\((\.L_x?_?\w+)\)", op[3]) if op[2].startswith("BRA") else None
            code.append((address, op[2], branch[1] if branch else None))
    resolved = [(at, op, labels.get(goal) if goal else None) for at, op, goal in code]
    ops = Counter(op.split(".")[0] for _, op, _ in code)
    local = sum(ops[op] for op in ("STL", "LDL"))
    matrix = "HGMMA" if ops["HGMMA"] else "HMMA"
    return {
        "registers": numbers["REG"],
        "spills": numbers["STACK"] + numbers["LOCAL"] + local,
        "matrix_instructions": ops[matrix],
        "loop": _innermost_loop(resolved, matrix),
        "num_instructions": len(code),
    }


def _read_amd(built: Any) -> dict[str, Any]:
    text = built.asm["amdgcn"]

    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", text)
        assert found is not None, key
        return int(found[1])

    code, labels = [], {}
    for at, line in enumerate(text.splitlines()):
        if label := re.match(r"(\.LBB\w+):", line):
            labels[label[1]] = at
        if op := re.match(r"\t([sv]_\w+|ds_\w+|buffer_\w+|global_\w+|scratch_\w+)(.*)", line):
            branch = re.search(r"(\.LBB\w+)", op[2]) if "branch" in op[1] else None
            code.append((at, op[1], branch[1] if branch else None))
    resolved = [(at, op, labels.get(goal) if goal else None) for at, op, goal in code]
    return {
        "registers": number("vgpr_count") + number("agpr_count"),
        "spills": number("vgpr_spill_count"),
        "matrix_instructions": sum(op.startswith("v_mfma") for _, op, _ in code),
        "loop": _innermost_loop(resolved, "v_mfma"),
        "num_instructions": len(code),
    }


def written(ttir: str) -> frozenset[str]:
    """The kernel arguments that the stores and atomics of Triton's IR end in; "?" for one that cannot be followed."""
    arguments = set(re.findall(r"(%\w+): !tt\.ptr<", ttir))
    made: dict[str, str] = {}  # value -> what makes it; later regions reuse names, so the nearest one above counts
    writes = set()

    def root(value: str) -> str:
        while value in made:
            step = re.match(r"tt\.(?:addptr|splat|broadcast|expand_dims|reshape|bitcast|trans) (%[\w#]+)", made[value])
            if step is None:
                return "?"
            value = step[1]
        return value.lstrip("%") if value in arguments else "?"

    for line in ttir.splitlines():
        if write := re.search(r"tt\.(?:store|atomic_\w+|descriptor_(?:store|scatter|reduce))\b[^%]*(%[\w#]+)", line):
            writes.add(root(write[1]))
        if making := re.match(r"\s*(%\w+)(?::\d+)? = (.*)", line):
            made[making[1]] = making[2]
    return frozenset(writes)
