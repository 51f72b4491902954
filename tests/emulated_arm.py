"""The engine's ARM backends without an ARM processor: cross-compiled by ziglang, run by the emulator unicorn on our own memory."""

import ctypes
import importlib.util
import struct
import subprocess
import sys
from functools import cache
from pathlib import Path

from bench.native import Backend, Functions
from models.engine.build import ARM, EXTENSIONS, FLAGS, NATIVE

MEGABYTE = 1 << 20
STACK, END = 0x10000000, 0x20000000  # the stack's lowest address; where functions return to
ENTRY = '#include "kernels.h"\nconst tf_backend *entry(int dot) { return dot ? tf_neon_dotprod_backend() : tf_neon_backend(); }\n'


def missing() -> str | None:
    """Why ARM code cannot be emulated here; None when it can."""
    packages = [name for name in ("ziglang", "unicorn") if not importlib.util.find_spec(name)]
    return f"ARM code is emulated with ziglang and unicorn: pip install {' '.join(packages)}" if packages else None


def cross_compile(folder: Path) -> Path:
    """A static program of the ARM backends, whose entry returns one of them."""
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-musl", *FLAGS, "-Wall", "-Wextra", "-Werror"]
    (folder / "entry.c").write_text(ENTRY)
    objects = []
    for source in (folder / "entry.c", NATIVE / "kernels_neon.c", NATIVE / "kernels_neon_dotprod.c"):
        objects.append(folder / f"{source.stem}.o")
        flags = EXTENSIONS.get((source.name, ARM), [])
        subprocess.run([*compiler, *flags, f"-I{NATIVE}", "-c", source, "-o", objects[-1]], check=True)
    program = folder / "backends"
    subprocess.run([*compiler, "-static", "-nostartfiles", "-Wl,-e,entry", *objects, "-o", program], check=True)
    return program


class Processor:
    """Runs functions of a static ELF program. What it does not own is this process's memory, at the same addresses."""

    def __init__(self, program: Path) -> None:
        import unicorn
        from unicorn import arm64_const

        self.registers = arm64_const
        self.machine = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        self.machine.ctl_set_cpu_model(arm64_const.UC_CPU_ARM64_MAX)
        self.machine.hook_add(unicorn.UC_HOOK_MEM_UNMAPPED, self._map_ours)
        for address, size in ((STACK, 4 * MEGABYTE), (END, 4096)):
            self.machine.mem_map(address, size)
        self.entry = self._load(program.read_bytes())
        self.machine.reg_write(arm64_const.UC_ARM64_REG_CPACR_EL1, 3 << 20)  # floating point is allowed

    def _load(self, image: bytes) -> int:
        """Copy the segments to their addresses; the entry's address."""
        entry, headers = struct.unpack_from("<QQ", image, 24)
        size, count = struct.unpack_from("<HH", image, 54)
        segments = [struct.unpack_from("<IIQQQQQQ", image, headers + i * size) for i in range(count)]
        loaded = [segment for segment in segments if segment[0] == 1]
        first = min(segment[3] for segment in loaded) & -4096
        last = max(segment[3] + segment[6] for segment in loaded)
        self.machine.mem_map(first, (last - first + 4095) & -4096)
        for _, _, offset, address, _, in_file, _, _ in loaded:
            self.machine.mem_write(address, image[offset : offset + in_file])
        return entry

    def _map_ours(self, machine, access, address, size, value, data) -> bool:
        start = address & -MEGABYTE
        machine.mem_map_ptr(start, MEGABYTE, 7, start)
        return True

    def call(self, function: int, result, kinds, values) -> int | float | None:
        """By the procedure call standard (AAPCS64): whole numbers in x0-x7, floats in s0-s7, the rest on the stack."""
        whole, floats = [], []
        for kind, value in zip(kinds, values, strict=True):
            if kind is ctypes.c_float:
                floats.append(struct.unpack("<I", struct.pack("<f", value))[0])
            else:
                whole.append((ctypes.addressof(value) if isinstance(value, ctypes.Structure) else value or 0) & (1 << 64) - 1)
        r, write, stack = self.registers, self.machine.reg_write, STACK + 3 * MEGABYTE
        for i, value in enumerate(whole[:8]):
            write(r.UC_ARM64_REG_X0 + i, value)
        for i, value in enumerate(floats):
            write(r.UC_ARM64_REG_S0 + i, value)
        self.machine.mem_write(stack, struct.pack(f"<{len(whole[8:])}Q", *whole[8:]))
        write(r.UC_ARM64_REG_SP, stack)
        write(r.UC_ARM64_REG_X30, END)
        self.machine.emu_start(function, END)
        if result is ctypes.c_float:
            return struct.unpack("<f", struct.pack("<I", self.machine.reg_read(r.UC_ARM64_REG_S0)))[0]
        return self.machine.reg_read(r.UC_ARM64_REG_X0) if result else None


class EmulatedFunctions:
    """What ``bench.native.Functions`` is, but its functions run in the emulator."""

    def __init__(self, processor: Processor, dotprod: bool) -> None:
        where = processor.call(processor.entry, ctypes.c_size_t, [ctypes.c_int], [int(dotprod)])
        table = bytes(processor.machine.mem_read(where, ctypes.sizeof(Functions)))
        for name, kind in Functions._fields_:
            offset = getattr(Functions, name).offset
            if kind is ctypes.c_int:
                setattr(self, name, struct.unpack_from("<i", table, offset)[0])
            elif name == "name":
                text = processor.machine.mem_read(struct.unpack_from("<Q", table, offset)[0], 32)
                self.name = bytes(text).split(b"\0")[0]
            else:
                setattr(self, name, self._function(processor, struct.unpack_from("<Q", table, offset)[0], kind))

    def _function(self, processor: Processor, at: int, kind):
        return lambda *values: processor.call(at, kind._restype_, kind._argtypes_, values)


class EmulatedBackend(Backend):
    """``neon`` or ``neon-dotprod``."""

    def __init__(self, processor: Processor, name: str) -> None:
        self.functions, self.name = EmulatedFunctions(processor, name == "neon-dotprod"), name
        assert self.functions.name.decode() == name


@cache
def emulated(folder: Path) -> Processor:
    return Processor(cross_compile(folder))
