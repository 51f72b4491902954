"""AMD machine code (amdgcn assembly text as Triton emits it): parsing, and what each instruction costs."""

import re
from collections.abc import Sequence

from bench.ledger.flow import BRANCHES, ENDS, FALLS, JUMPS, Code, Instruction

_LABEL = re.compile(r"^(\.?L?BB\w+|\w+):")
_LINE = re.compile(r"^\s+([vs]_\w+|ds_\w+|buffer_\w+|global_\w+|flat_\w+|scratch_\w+)\b(.*)$")
_MFMA = re.compile(r"v_(?:s?mfmac?)_\w+?_(\d+)x(\d+)x(\d+)(?:_(\d+)b)?")
_SIZES = {
    **dict.fromkeys(("ubyte", "sbyte", "byte", "u8", "i8", "b8"), 1),
    **dict.fromkeys(("ushort", "sshort", "short", "u16", "i16", "b16"), 2),
}
_LEAVES = {"s_branch": JUMPS, "s_endpgm": ENDS, "s_setpc_b64": ENDS}
_TRANSCENDENTAL = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_")


def parse(text: str) -> Code:
    """Code of the one kernel in Triton's amdgcn text. Raises ValueError when it holds no instruction."""
    instructions, labels = [], {}
    for line in text.splitlines():
        line = line.split(";", 1)[0].rstrip()
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _LINE.match(line):
            opcode, operands = found[1], found[2].strip()
            flow = BRANCHES if opcode.startswith("s_cbranch") else _LEAVES.get(opcode, FALLS)
            target = operands.split(",")[-1].strip() if flow in (BRANCHES, JUMPS) else None
            instructions.append(Instruction(opcode, f"{opcode} {operands}", flow, target))
    if not instructions:
        raise ValueError("no machine code in Triton's amdgcn text")
    return Code(instructions, labels)


def field_of(text: str, name: str) -> int:
    """An integer of the kernel's metadata, such as ``vgpr_count``. Raises ValueError when it is missing."""
    found = re.search(rf"^\s+\.{name}:\s+(\d+)", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"Triton's amdgcn text has no .{name}")
    return int(found[1])


def is_matrix(instruction: Instruction) -> bool:
    return instruction.opcode.startswith(("v_mfma", "v_smfmac"))


def is_wait(own: Sequence[Instruction]) -> bool:
    """Whether a loop only waits: a sleep, or nothing but its branch."""
    return len(own) == 1 or any(i.opcode == "s_sleep" for i in own)


def is_work(instruction: Instruction) -> bool:
    """Instructions that an unrolled loop must repeat exactly."""
    return is_matrix(instruction) or is_global(instruction) or is_shared(instruction)


def is_global(instruction: Instruction) -> bool:
    return instruction.opcode.startswith(("buffer_", "global_", "flat_")) and not is_local(instruction)


def is_shared(instruction: Instruction) -> bool:
    return instruction.opcode.startswith("ds_")


def is_local(instruction: Instruction) -> bool:
    """Scratch memory: spilled registers (a buffer access relative to the stack pointer s32 counts as well)."""
    return instruction.opcode.startswith("scratch_") or re.search(r"^buffer_\w+ .*\bs32\b", instruction.text) is not None


def pipe(instruction: Instruction) -> str | None:
    """The unit an instruction occupies: valu, xu (transcendental), salu, lsu, lds; None for matrix and control."""
    opcode = instruction.opcode
    if is_matrix(instruction) or opcode.startswith(("s_waitcnt", "s_barrier", "s_cbranch", "s_branch", "s_nop", "s_endpgm")):
        return None
    if is_shared(instruction):
        return "lds"
    if is_global(instruction) or is_local(instruction):
        return "lsu"
    return "salu" if opcode.startswith("s_") else "xu" if _TRANSCENDENTAL.match(opcode) else "valu"


def matrix_flops(instruction: Instruction) -> float:
    """FLOP (int8: OP) per wave: 2 M N K times the number of blocks in the name."""
    m, n, k, blocks = _MFMA.match(instruction.opcode).groups()
    return 2.0 * int(m) * int(n) * int(k) * int(blocks or 1)


def matrix_dtype(instruction: Instruction) -> str:
    """ "bf16" (fp16 too), "tf32" (xf32), "fp32" or "int8"."""
    name = instruction.opcode
    if name.startswith("v_mfma_i32"):
        return "int8"
    return "tf32" if name.endswith("xf32") else "fp32" if name.endswith("_f32") else "bf16"


def shared_bytes(instruction: Instruction, lanes: int = 64) -> float:
    """Bytes a wave moves through LDS."""
    return lanes * width(instruction) if is_shared(instruction) and instruction.opcode.startswith(("ds_read", "ds_write")) else 0


def width(instruction: Instruction) -> int:
    """Bytes per lane of a memory instruction."""
    name = instruction.opcode
    if found := re.search(r"(?:dwordx|_b)(\d+)", name):
        size = int(found[1])
        base = size * 4 if "dwordx" in name else size // 8
        return base * 2 if re.search(r"(read|write)2", name) else base
    return next((size for part, size in _SIZES.items() if part in name.split("_")), 4)
