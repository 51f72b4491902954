"""One program of a compiled kernel, run from its PTX on a CPU: what Triton makes for sm_90, warp-group products included.

Nothing here knows a kernel. A warp group (128 threads) runs in lockstep, an instruction at a time on numpy arrays, up to the next
barrier of the program; then the next group, in the order asked for. Branches must be taken by a whole group. Loads and stores
beyond the buffers they were given raise.

What PTX leaves open is decided against the kernel. With ``late`` a product or an asynchronous copy does not happen when it is
issued but when a wait asks for it: operands overwritten in between, and sums read or copied too early, give wrong numbers. Without
it everything happens at once. A kernel is right if both agree. Not checked: fences between stores and the products that read what
they stored, and how warps of one group run against each other.

Opcodes: those that our kernels use; any other raises NotImplementedError with its name.
"""

import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from ptx_memory import Memory, from_bfloat16, gather, scatter, to_bfloat16

GROUP = 128
_BITS = {"8": np.uint8, "16": np.uint16, "32": np.uint32, "64": np.uint64}
_COMPARE = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal}
_PLAIN = {
    "add": np.add, "sub": np.subtract, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "min": np.minimum,
    "max": np.maximum,
}  # fmt: skip


class Program:
    """A parsed kernel: ``run`` executes one of its programs."""

    def __init__(self, ptx: str) -> None:
        entry = re.search(r"\.entry (\w+)\((.*?)\)", ptx, re.DOTALL)
        self.parameters = re.findall(r"\.param .*?(\w+_param_\d+)", entry[2])
        self.threads = int(re.search(r"\.reqntid (\d+)", ptx)[1])
        body = ptx[ptx.index("{", entry.end()) + 1 :]
        body = re.sub(r"//.*", "", body[: body.index("\n}")])
        self.statements, self.labels = [], {}
        for line in re.sub(r"^\s*\.(loc|reg|pragma)\b.*$", "", body, flags=re.MULTILINE).splitlines():
            if label := re.match(r"(\$\w+):", line):
                self.labels[label[1]] = len(self.statements)
                continue
            line = re.sub(r"\{\s*\.reg \.b32[^;]*;(.*)\}\s*$", r"\1", line.strip())  # a block of inline assembly
            self.statements += [_parse(text.strip()) for text in line.split(";") if text.strip()]

    def run(
        self, arguments: Sequence[int], memory: Memory, block: tuple[int, int, int] = (0, 0, 0), late: bool = False,
        order: Callable[[list], list] = lambda groups: groups, shared_bytes: int = 227 * 1024,
    ) -> None:  # fmt: skip
        """``arguments`` (addresses and ints) belong to the parameters in order; ``order`` arranges the groups between barriers."""
        shared = np.zeros(shared_bytes, np.uint8)
        values = dict(zip(self.parameters, [*arguments, 0, 0], strict=True))  # two that Triton adds for scratch memory
        groups = [_Group(self, i, values, memory, shared, block, late).steps() for i in range(self.threads // GROUP)]
        while groups:
            groups = [group for group in order(groups) if next(group, None) is not None]


def _parse(text: str) -> tuple:
    """(guard, opcode parts, operands): operands nest lists for braces and brackets."""
    guard, opcode, rest = re.match(r"(@!?%\w+)?\s*([\w.:]+)\s*(.*)$", text, re.DOTALL).groups()
    return guard, tuple(opcode.replace("::", ".").split(".")), _operands(rest)


def _operands(text: str) -> list:
    found = re.findall(r"\{([^}]*)\}|\[([^\]]*)\]|([^,\s{}\[\]]+)", text)
    return [[x.strip() for x in many.split(",")] if many else ("at", at.strip()) if at else plain for many, at, plain in found]


class _Group:
    """A warp group: its registers, and the products and copies that it has not waited for."""

    def __init__(self, program: Program, index: int, values: dict, memory: Memory, shared: np.ndarray, block: tuple, late: bool):
        self.program, self.values, self.memory, self.shared, self.late = program, values, memory, shared, late
        self.registers: dict[str, np.ndarray] = {}
        thread = np.arange(GROUP * index, GROUP * (index + 1), dtype=np.uint32)
        self.special = {"%tid.x": thread, "%laneid": thread % 32}
        self.special |= {f"%ctaid.{axis}": np.full(GROUP, at, np.uint32) for axis, at in zip("xyz", block, strict=True)}
        self.everyone, self.lane = np.ones(GROUP, bool), np.arange(GROUP) % 32
        self.products: list[list] = []  # committed groups of products, oldest first
        self.copies: list[list] = []
        self.open_products, self.open_copies = [], []

    def steps(self) -> Iterator[bool]:
        """Run to the end; yields at each barrier."""
        at = 0
        while True:
            guard, opcode, operands = self.program.statements[at]
            at += 1
            active = self.everyone if guard is None else self.guard(guard)
            if opcode[0] == "bar":
                yield True
            elif opcode[0] == "ret":
                return
            elif opcode[0] == "bra":
                if active.any() != active.all():
                    raise RuntimeError("a branch that only part of a warp group takes")
                if active.all():
                    at = self.program.labels[operands[0]]
            else:
                name = f"do_{opcode[0]}"
                if not hasattr(self, name):
                    raise NotImplementedError(".".join(opcode))
                getattr(self, name)(opcode, operands, active)

    def guard(self, text: str) -> np.ndarray:
        return ~self.registers[text[2:]] if text[1] == "!" else self.registers[text[1:]]

    def read(self, name: str, kind: str) -> np.ndarray:
        """An operand's value for each thread, as the instruction's type: f32, s32, u64, b16, pred, ..."""
        dtype = {"f": {"32": np.float32}, "s": {"16": np.int16, "32": np.int32, "64": np.int64}}.get(kind[0], {}).get(kind[1:])
        if kind == "pred":
            return self.registers[name] if name[0] == "%" else np.full(GROUP, int(name) != 0 and name != "0")
        unsigned = _BITS[kind[1:]]
        if name in self.special:
            raw = self.special[name].astype(unsigned)
        elif name[0] == "%" or name in ("t", "u"):  # our inline assembly's own
            raw = self.registers[name]
        elif name == "global_smem":
            raw = np.zeros(GROUP, unsigned)
        elif name.startswith("0f"):
            raw = np.full(GROUP, int(name[2:], 16), np.uint32)
        else:
            raw = np.full(GROUP, int(name, 0) & ((1 << int(kind[1:])) - 1), unsigned)
        if raw.dtype.itemsize * 8 != int(kind[1:]):
            raise TypeError(f"{name} has {raw.dtype.itemsize * 8} bits, the instruction wants {kind}")
        return raw.view(dtype) if dtype else raw

    def write(self, name: str, value: np.ndarray, active: np.ndarray) -> None:
        if value.dtype != bool:
            value = np.ascontiguousarray(value).view(_BITS[str(value.dtype.itemsize * 8)])
        before = self.registers.get(name)
        self.registers[name] = value if active.all() or before is None else np.where(active, value, before)

    # Arithmetic: all threads compute, the active ones keep it.
    def do_plain(self, opcode, operands, active) -> None:
        kind = opcode[-1]
        with np.errstate(over="ignore", invalid="ignore"):
            self.write(operands[0], _PLAIN[opcode[0]](self.read(operands[1], kind), self.read(operands[2], kind)), active)

    do_add = do_sub = do_and = do_or = do_xor = do_min = do_max = do_plain

    def do_mov(self, opcode, operands, active) -> None:
        to, source = operands
        if isinstance(source, list):  # two halves
            low, high = (self.read(name, "b16").astype(np.uint32) for name in source)
            value = low | high << 16
        elif isinstance(to, list):
            whole = self.read(source, "b32")
            for name, half in zip(to, (whole & 0xFFFF, whole >> 16), strict=True):
                self.write(name, half.astype(np.uint16), active)
            return
        else:
            value = self.read(source, opcode[-1])
        self.write(to, value, active)

    def do_mul(self, opcode, operands, active) -> None:
        self.write(operands[0], self._product(opcode, operands), active)

    def do_mad(self, opcode, operands, active) -> None:
        product = self._product(opcode, operands)
        kind = opcode[-1][0] + str(product.dtype.itemsize * 8)
        with np.errstate(over="ignore"):
            self.write(operands[0], product + self.read(operands[3], kind).astype(product.dtype), active)

    def _product(self, opcode, operands) -> np.ndarray:
        a, b = (self.read(name, opcode[-1]) for name in operands[1:3])
        if opcode[1] == "wide":
            wide = np.int64 if opcode[-1][0] == "s" else np.uint64
            a, b = a.astype(wide), b.astype(wide)
        with np.errstate(over="ignore", invalid="ignore"):
            return a * b

    def do_fma(self, opcode, operands, active) -> None:
        a, b, c = (self.read(name, "f32").astype(np.float64) for name in operands[1:])
        with np.errstate(over="ignore", invalid="ignore"):
            self.write(operands[0], (a * b + c).astype(np.float32), active)

    def do_neg(self, opcode, operands, active) -> None:
        self.write(operands[0], -self.read(operands[1], opcode[-1]), active)

    def do_not(self, opcode, operands, active) -> None:
        self.write(operands[0], ~self.read(operands[1], opcode[-1]), active)

    def do_ex2(self, opcode, operands, active) -> None:
        with np.errstate(over="ignore", under="ignore"):
            value = np.exp2(self.read(operands[1], "f32"))
        self.write(operands[0], np.where(value < 2.0**-126, np.float32(0), value), active)

    def do_shl(self, opcode, operands, active) -> None:
        a, by = self.read(operands[1], opcode[-1]), self.read(operands[2], "b32")
        self.write(operands[0], np.where(by < a.itemsize * 8, a << by.astype(a.dtype), 0).astype(a.dtype), active)

    def do_shr(self, opcode, operands, active) -> None:
        a, by = self.read(operands[1], opcode[-1]), self.read(operands[2], "b32")
        self.write(operands[0], a >> np.minimum(by, a.itemsize * 8 - 1).astype(a.dtype), active)

    def do_bfe(self, opcode, operands, active) -> None:
        a, start, width = (self.read(name, "u32") for name in operands[1:])
        value = (a >> start) & ((np.uint32(1) << width) - np.uint32(1))
        if opcode[-1] == "s32":  # the field's highest bit is its sign
            value |= np.where(value >> (width - 1) & 1, ~np.uint32(0) << width, np.uint32(0))
        self.write(operands[0], value, active)

    def do_lop3(self, opcode, operands, active) -> None:
        a, b, c = (self.read(name, "b32") for name in operands[1:4])
        table, value = int(operands[4], 0), np.zeros(GROUP, np.uint32)
        for row in range(8):
            if table >> row & 1:
                value |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        self.write(operands[0], value, active)

    def do_setp(self, opcode, operands, active) -> None:
        a, b = (self.read(name, opcode[-1]) for name in operands[1:])
        self.write(operands[0], _COMPARE[opcode[1]](a, b), active)

    def do_selp(self, opcode, operands, active) -> None:
        a, b = (self.read(name, opcode[-1]) for name in operands[1:3])
        self.write(operands[0], np.where(self.read(operands[3], "pred"), a, b), active)

    def do_cvt(self, opcode, operands, active) -> None:
        to, source = opcode[-2:]
        if to == "bf16":
            value = to_bfloat16(self.read(operands[1], "f32"))
        elif to == "bf16x2":
            high, low = (to_bfloat16(self.read(name, "f32")).astype(np.uint32) for name in operands[1:])
            value = low | high << 16
        elif to[0] in "su" and source[0] in "su":
            value = self.read(operands[1], source).astype({"s": np.int64, "u": np.uint64}[source[0]]).astype(_BITS[to[1:]])
        else:
            raise NotImplementedError(".".join(opcode))
        self.write(operands[0], value, active)

    def do_shfl(self, opcode, operands, active) -> None:
        if opcode[2] != "bfly":
            raise NotImplementedError(".".join(opcode))
        by = int(operands[2], 0)
        self.write(operands[0], self.read(operands[1], "b32")[np.arange(GROUP) ^ by], active)

    def do_redux(self, opcode, operands, active) -> None:
        lanes = self.read(operands[1], opcode[-1]).reshape(-1, 32).astype(np.int64)
        whole = {"add": lanes.sum, "max": lanes.max}[opcode[2]](1)
        self.write(operands[0], np.repeat(whole, 32).astype(np.int32), active)

    def do_div(self, opcode, operands, active) -> None:
        a, b = (self.read(name, opcode[-1]).astype(np.int64) for name in operands[1:])
        quotient = np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))  # towards zero
        self.write(operands[0], (quotient if opcode[0] == "div" else a - quotient * b).astype(np.int32), active)

    do_rem = do_div

    # Memory.
    def address(self, operand: tuple, kind: str) -> np.ndarray:
        base, offset = re.match(r"([%\w]+)\s*(?:\+\s*(-?\w+))?$", operand[1]).groups()
        return self.read(base, kind).astype(np.int64) + int(offset or "0", 0)

    def space(self, opcode) -> tuple:
        return (self.shared, None, "b32") if "shared" in opcode else (self.memory.bytes, self.memory.inside, "b64")

    def do_ld(self, opcode, operands, active) -> None:
        names = operands[0] if isinstance(operands[0], list) else [operands[0]]
        dtype = _BITS[opcode[-1][1:]]
        if opcode[1] == "param":
            self.write(names[0], np.full(GROUP, self.values[operands[1][1]] & ((1 << 8 * dtype().itemsize) - 1), dtype), active)
            return
        bytes_, inside, kind = self.space(opcode)
        loaded = gather(bytes_, inside, self.address(operands[1], kind), len(names) * dtype().itemsize, active)
        for name, column in zip(names, loaded.reshape(GROUP, len(names), -1).transpose(1, 0, 2), strict=True):
            self.write(name, np.ascontiguousarray(column).view(dtype)[:, 0], active)

    def do_st(self, opcode, operands, active) -> None:
        names = operands[1] if isinstance(operands[1], list) else [operands[1]]
        values = np.stack([self.read(name, opcode[-1]) for name in names], 1)
        bytes_, inside, kind = self.space(opcode)
        scatter(bytes_, inside, self.address(operands[0], kind), np.ascontiguousarray(values).view(np.uint8), active)

    def _matrix_rows(self, operand: tuple) -> np.ndarray:
        """Addresses [warps, matrices, rows] that the lanes give."""
        return self.address(operand, "b32").reshape(-1, 4, 8)

    def do_ldmatrix(self, opcode, operands, active) -> None:
        rows = self._matrix_rows(operands[1]).reshape(-1)
        loaded = gather(self.shared, None, rows, 16, self.everyone).view(np.uint16).reshape(-1, 4, 8, 8)
        if "trans" in opcode:
            loaded = loaded.swapaxes(2, 3)
        pairs = np.ascontiguousarray(loaded).view(np.uint32)  # [warps, matrices, rows, pairs of columns]: a warp's lanes in order
        for i, name in enumerate(operands[0]):
            self.write(name, pairs[:, i].reshape(-1), active)

    def do_stmatrix(self, opcode, operands, active) -> None:
        values = np.stack([self.read(name, "b32").reshape(-1, 8, 4) for name in operands[1]], 1)
        matrices = np.ascontiguousarray(values).view(np.uint16)
        if "trans" in opcode:
            matrices = matrices.swapaxes(2, 3)
        rows = np.ascontiguousarray(matrices).reshape(-1, 8).view(np.uint8)
        places = self._matrix_rows(operands[0])[:, : len(operands[1])].reshape(-1)
        scatter(self.shared, None, places, rows, np.ones(len(places), bool))

    # What is asynchronous.
    def do_cp(self, opcode, operands, active) -> None:
        if opcode[2] == "commit_group":
            self.copies.append(self.open_copies)
            self.open_copies = []
        elif opcode[2] == "wait_group":
            self._finish(self.copies, int(operands[0]))
        else:
            to, source, size = self.address(operands[0], "b32"), self.address(operands[1], "b64"), int(operands[2], 0)
            read = active & (self.read(operands[3], "b32") == size)  # the others copy zeros

            def copy() -> None:
                scatter(self.shared, None, to, gather(self.memory.bytes, self.memory.inside, source, size, read), active)

            self._issue(copy, self.open_copies)

    def do_fence(self, opcode, operands, active) -> None:
        pass

    def _issue(self, action: Callable, group: list) -> None:
        if self.late:
            group.append(action)
        else:
            action()

    @staticmethod
    def _finish(groups: list[list], left: int) -> None:
        while len(groups) > left:
            for action in groups.pop(0):
                action()

    def do_wgmma(self, opcode, operands, active) -> None:
        if opcode[1] == "commit_group":
            self.products.append(self.open_products)
            self.open_products = []
        elif opcode[1] == "wait_group":
            self._finish(self.products, int(operands[0]))
        elif opcode[1] == "mma_async":
            sums, left, descriptor, keep = operands[:4]
            columns, dtype = int(re.match(r"m64n(\d+)k\d+", opcode[4])[1]), opcode[6]
            if opcode[5:] not in (("f32", "bf16", "bf16"), ("s32", "s8", "s8")):
                raise NotImplementedError(".".join(opcode))
            right = self.read(descriptor, "b64")
            if (right.reshape(4, 32)[:, :1] != right.reshape(4, 32)).any() or not isinstance(left, list):
                raise NotImplementedError("a product with its left operand in shared memory or with differing descriptors")
            kept = self.read(keep, "pred").all()
            transposed = dtype == "bf16" and operands[6] == "1"
            self._issue(lambda: self._multiply(sums, left, int(right[0]), columns, kept, transposed, dtype), self.open_products)

    def _multiply(self, sums: list, left: list, descriptor: int, columns: int, kept: bool, transposed: bool, dtype: str) -> None:
        """sums [64, columns] (+)= left [64, depth] . right [depth, columns]; fragments as PTX's pictures of wgmma have them."""
        raw = np.stack([self.read(name, "b32") for name in left], 1)
        # [warp, row, quad, half of the depth, row / 8, elements of a register] of the four registers: row / 8 changes first
        raw = raw.view(np.uint16 if dtype == "bf16" else np.int8).reshape(4, 8, 4, 2, 2, -1)
        raw = raw.transpose(0, 4, 1, 3, 2, 5).reshape(64, -1)
        right = self._right(descriptor, columns, transposed, raw.itemsize)
        if dtype == "bf16":
            product = from_bfloat16(raw) @ from_bfloat16(right)
        else:  # exact: below 2^53
            product = (raw.astype(np.float64) @ right.view(np.int8).astype(np.float64)).astype(np.int32)
        fragments = product.reshape(4, 2, 8, columns // 8, 4, 2).transpose(0, 2, 4, 3, 1, 5).reshape(GROUP, columns // 2)
        for i, name in enumerate(sums):
            before = self.registers[name].view(product.dtype) if kept else product.dtype.type(0)
            self.write(name, fragments[:, i] + before, self.everyone)

    def _right(self, descriptor: int, columns: int, transposed: bool, size: int) -> np.ndarray:
        """Elements of ``size`` bytes [32 / size, columns] of a shared-memory matrix descriptor (PTX ISA, asynchronous warp-group
        instructions)."""
        start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        row = {1: 128, 2: 64, 3: 32}[descriptor >> 62]  # bytes of a swizzled row
        k, n = np.arange(32 // size)[:, None], np.arange(columns)[None, :]
        if transposed:  # columns lie side by side
            across = row // size
            at = start + size * (n % across) + (n // across) * leading + (k % 8) * row + (k // 8) * stride
        else:
            at = start + size * k + (n % 8) * row + (n // 8) * stride
        at = at ^ (((at >> 7) & (row // 16 - 1)) << 4)
        bytes_ = np.stack([self.shared[at + i] for i in range(size)], -1)
        return bytes_.view(_BITS[str(8 * size)])[..., 0]
