"""NVIDIA machine code (SASS): parsing nvdisasm's text, and what each instruction costs."""

import re
from collections.abc import Sequence

from bench.ledger.flow import BRANCHES, CALLS, ENDS, FALLS, JUMPS, Code, Control, Instruction

_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][A-Z0-9_]*)(\S*)(.*?)\s*;")
_ENCODED = re.compile(r"^(\s*/\*[0-9a-f]{4,}\*/.*?;)\s+/\* 0x[0-9a-f]{16} \*/\n\s+/\* 0x([0-9a-f]{16}) \*/", re.MULTILINE)
_CONTROL = re.compile(r"/\* B([-0-5]{6}) R([-0-5]) W([-0-5]) S(\d\d) \*/")
_LABEL = re.compile(r"^([.$\w]+):\s*$")
_TARGET = re.compile(r"`\((.+?)\)")
_WIDTH = re.compile(r"\.(?:U|S)?(8|16|32|64|128)\b")

MATRIX = {"HMMA", "IMMA", "BMMA", "DMMA", "HGMMA", "IGMMA", "QGMMA", "BGMMA", "UTCHMMA", "UTCIMMA", "UTCQMMA", "UTCOMMA"}
GROUP = {"HGMMA", "IGMMA", "QGMMA", "BGMMA"}
SHAPES = {
    "16816": (16, 8, 16),
    "1688": (16, 8, 8),
    "1684": (16, 8, 4),
    "884": (8, 8, 4),
    "16832": (16, 8, 32),
    "8816": (8, 8, 16),
}
LOCAL = {"LDL", "STL"}
GLOBAL = {"LDG", "STG", "LDGSTS", "UTMALDG", "UTMASTG", "RED", "REDG", "ATOM", "ATOMG", "UBLKCP"}
SHARED = {"LDS", "STS", "LDSM", "STSM", "ATOMS"}
DOUBLE = {"DADD", "DMUL", "DFMA", "DSETP", "DMMA", "DMNMX"}
PIPES = {
    "fma": {"FADD", "FMUL", "FFMA", "FADD2", "FMUL2", "FFMA2", "HADD2", "HMUL2", "HFMA2", "FSWZADD"},
    "imad": {"IMAD", "IDP", "IDP4A"},
    "xu": {"MUFU", "POPC", "FLO", "BREV", "I2F", "F2I", "F2F", "I2I", "FRND", "FCHK"},
    "lsu": GLOBAL | SHARED | LOCAL | {"SHFL", "LD", "ST", "REDUX"},
    "alu": {
        *("IADD3", "IADD", "IADD32I", "VIADD", "IABS", "LEA", "ISCADD", "LOP3", "LOP", "LOP32I", "PLOP3", "SHF", "SHL", "SHR"),
        *("ISETP", "FSETP", "HSETP2", "SEL", "FSEL", "PRMT", "MOV", "MOV32I", "CS2R", "P2R", "R2P", "SGXT", "BMSK"),
        *("IMNMX", "VIMNMX", "VIMNMX3", "VIADDMNMX", "FMNMX", "FMNMX3", "HMNMX2", "VABSDIFF", "VABSDIFF4"),
        *("F2FP", "I2FP", "F2IP", "I2IP"),
    },
}
PIPE_OF = {opcode: pipe for pipe, opcodes in PIPES.items() for opcode in opcodes}


def with_controls(text: str) -> str:
    """The output of ``nvdisasm -c -hex`` with, in place of each instruction's 128 bits, what they tell the scheduler.

    ``/* B01---- R2 W- S04 */``: scoreboards waited for, set until operands are read, set until the result is there; stall cycles.
    From bit 105 up (Volta to Blackwell, as published for CuAssembler and seen here): 4 bits stall, 1 yield, 3 write scoreboard,
    3 read scoreboard (7: none), 6 mask of waits.
    """

    def shown(found: re.Match) -> str:
        bits = int(found[2], 16) >> 41
        wait = "".join(str(i) if bits >> (11 + i) & 1 else "-" for i in range(6))
        write, read = ("-" if (bits >> at & 7) > 5 else bits >> at & 7 for at in (5, 8))
        return f"{found[1]}  /* B{wait} R{read} W{write} S{bits & 15:02d} */"

    return _ENCODED.sub(shown, text)


def parse(text: str) -> Code:
    """Code of the one kernel in the output of ``nvdisasm -c``, with the controls of ``with_controls`` where it has them.

    Raises ValueError when it holds no instruction.
    """
    instructions, labels = [], {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _LINE.match(line):
            predicate, opcode, modifiers, operands = found.groups()
            instructions.append(_instruction(predicate, opcode, modifiers, operands, _control(line)))
    if not instructions:
        raise ValueError("no machine code in nvdisasm's output")
    return Code(instructions, labels)


def _control(line: str) -> Control:
    found = _CONTROL.search(line)
    if found is None:
        return Control()
    read, write = (None if scoreboard == "-" else int(scoreboard) for scoreboard in found.group(2, 3))
    return Control(int(found[4]), tuple(int(i) for i in found[1] if i != "-"), write, read)


def _instruction(predicate: str | None, opcode: str, modifiers: str, operands: str, control: Control) -> Instruction:
    written = f"{predicate + ' ' if predicate else ''}{opcode}{modifiers}{operands}"
    target = _TARGET.search(operands)
    flow = FALLS
    if opcode in ("BRA", "JMP"):
        conditional = predicate or ".U" in modifiers or ".DIV" in modifiers or re.match(r"\s*!?U?P\d", operands)
        flow = BRANCHES if conditional else JUMPS
    elif opcode in ("CALL", "EXIT", "RET", "BRX", "BRXU", "JMX", "KILL"):
        flow = CALLS if opcode == "CALL" else BRANCHES if predicate else ENDS
    return Instruction(opcode, written, flow, target[1] if target and flow in (BRANCHES, JUMPS, CALLS) else None, control)


def is_matrix(instruction: Instruction) -> bool:
    return instruction.opcode in MATRIX


def is_local(instruction: Instruction) -> bool:
    """Local memory: spilled registers."""
    return instruction.opcode in LOCAL


def is_global(instruction: Instruction) -> bool:
    return instruction.opcode in GLOBAL


def pipe(instruction: Instruction) -> str | None:
    """The unit an instruction occupies: fma, imad, alu, xu, lsu; None for matrix, uniform and control instructions."""
    return PIPE_OF.get(instruction.opcode)


def is_wait(own: Sequence[Instruction]) -> bool:
    """Whether a loop only waits: it polls a barrier and computes nothing, or is nothing but its branch."""
    busy = any(is_matrix(i) or pipe(i) in ("fma", "imad", "xu", "lsu") for i in own)
    return not busy and (len(own) == 1 or any(i.opcode in ("SYNCS", "NANOSLEEP", "YIELD") for i in own))


def is_work(instruction: Instruction) -> bool:
    """Instructions that an unrolled loop must repeat exactly."""
    return instruction.opcode in MATRIX | GLOBAL | SHARED


def matrix_flops(instruction: Instruction) -> float | None:
    """FLOP (int8: OP) per warp of a matrix instruction; None when its shape is in a descriptor (UTC*MMA).

    A warp-group instruction (HGMMA 64 x N x K) is issued by four warps, so a warp's share is a quarter.
    """
    group = re.search(r"\.(\d+)x(\d+)x(\d+)", instruction.text)
    if group:
        m, n, k = map(int, group.groups())
        return 2 * m * n * k / 4
    warp = re.search(r"MMA\.(\d+)", instruction.text)
    if warp and warp[1] in SHAPES:
        m, n, k = SHAPES[warp[1]]
        return 2.0 * m * n * k
    return None


def matrix_dtype(instruction: Instruction) -> str:
    """ "bf16" (fp16 too), "tf32" or "int8" (fp8, of the same rate, too)."""
    if instruction.opcode in ("IMMA", "IGMMA", "UTCIMMA", "QGMMA", "UTCQMMA"):
        return "int8"
    return "tf32" if "TF32" in instruction.text else "bf16"


def shared_bytes(instruction: Instruction, lanes: int = 32) -> float:
    """Bytes a warp moves through shared memory, operands that a warp-group product reads there included (per warp, a quarter)."""
    opcode, text = instruction.opcode, instruction.text
    if opcode in ("LDSM", "STSM"):
        matrices = re.search(r"\.M\w+\.(\d)\b", text)
        return 128 * int(matrices[1] if matrices else 1)
    if opcode in ("LDS", "STS", "LDGSTS", "ATOMS"):
        return lanes * width(text)
    if opcode in ("HGMMA", "IGMMA", "QGMMA"):
        m, n, k = map(int, re.search(r"\.(\d+)x(\d+)x(\d+)", text).groups())
        element = {"tf32": 4, "bf16": 2, "int8": 1}[matrix_dtype(instruction)]
        left_in_registers = re.search(r"R\d+,\s*R\d+,\s*gdesc", text) is not None
        return element * k * (n + (0 if left_in_registers else m)) / 4
    return 0


def global_bytes(instruction: Instruction, lanes: int = 32) -> int:
    """Bytes that a warp moves to or from L2."""
    return lanes * width(instruction.text) if is_global(instruction) and not instruction.text.startswith("@!PT ") else 0


def width(text: str) -> int:
    """Bytes per lane of a memory instruction: 4 unless a modifier says 8 to 128 bits."""
    modifiers = text.split()[1 if text.startswith("@") else 0]
    found = _WIDTH.search(modifiers)
    return int(found[1]) // 8 if found else 4
