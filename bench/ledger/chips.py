"""The chips that the ledger models: rates, sizes and latencies of each, with where every figure comes from.

Rates are per SM (AMD: CU) and cycle. Figures marked (sheet) are the vendor's data sheet or architecture paper, quoted from memory;
(guide) the throughput table of the CUDA C++ programming guide or AMD's CDNA 3 instruction guide, from memory; (measured) on the
H200 of this project; (micro) public microbenchmarks, from memory and rounded; (assumed) our guess, stated as such.
"""

from collections.abc import Mapping
from dataclasses import dataclass

KB = 1024


@dataclass(frozen=True)
class Chip:
    """One chip.

    target        Triton's name of its architecture
    units         SMs or CUs
    clock         Hz while busy
    peak          dense matrix FLOP/s (int8: OP/s) of the data sheet by type; "fp32" is the vector units'
    matrix        FLOP per cycle and unit by (instruction family, type): "warp" (HMMA, IMMA, MFMA), "group" (HGMMA), "memory" (UTC*)
    matrix_share  share of the matrix rate that long products reach
    issue         warp instructions issued per cycle
    pipes         warp instructions per cycle of each pipe (sass.pipe, amdgcn.pipe)
    shared_rate   shared memory bytes per cycle
    shared_block  shared memory bytes that one program may use
    shared_unit   shared memory bytes of a unit
    shared_extra  shared memory bytes that the system takes per resident program
    registers     32-bit registers of a unit
    register_step registers are given to a warp in multiples of this many (per lane)
    warps         resident warps of a unit
    programs      resident programs of a unit
    lanes         threads of a warp
    tensor_memory columns of tensor memory of a unit
    l2, hbm       bytes per second
    hbm_share     share of hbm that a streaming kernel reaches
    l2_latency, hbm_latency  seconds of one dependent load
    """

    name: str
    target: str
    units: int
    clock: float
    peak: Mapping[str, float]
    matrix: Mapping[tuple[str, str], float]
    issue: float
    pipes: Mapping[str, float]
    shared_block: int
    shared_unit: int
    l2: float
    hbm: float
    l2_latency: float
    hbm_latency: float
    matrix_share: float = 0.83  # (measured) 788 of 4096 FLOP x 132 x 1.755 GHz = 949 TF/s bf16; assumed to hold on the others
    hbm_share: float = 0.9  # (measured) copy 4.3 of 4.8 TB/s; assumed to hold on the others
    shared_rate: float = 128  # (guide) 32 banks of 4 bytes
    shared_extra: int = 1 * KB  # (guide) from sm_80 on
    registers: int = 65536  # (sheet)
    register_step: int = 8  # (guide) 256 registers a warp
    warps: int = 64
    programs: int = 32
    lanes: int = 32
    tensor_memory: int = 0

    @property
    def achievable_hbm(self) -> float:
        return self.hbm * self.hbm_share


def _rates(family: str, bf16: int) -> dict[tuple[str, str], int]:
    """Matrix rates of a family: int8 runs at twice, tf32 at half the rate of bf16 and fp16 on all of them."""
    return {(family, "bf16"): bf16, (family, "int8"): 2 * bf16, (family, "tf32"): bf16 // 2}


RAMP = 1e-6
"""Seconds from one kernel's end to the next one's first useful cycle, and its drain (assumed; a few us without CUDA graphs)."""

CHIPS = (
    Chip(
        name="A100",
        target="sm_80",
        units=108,  # (sheet)
        clock=1.41e9,  # (sheet) boost
        peak={"bf16": 312e12, "int8": 624e12, "tf32": 156e12, "fp32": 19.5e12},  # (sheet)
        matrix=_rates("warp", 2048),  # (sheet) peak / units / clock
        issue=4,  # (sheet) four schedulers
        pipes={"fma": 2, "imad": 2, "alu": 2, "xu": 0.5, "lsu": 1},  # (guide) 64 / 64 / 64 / 16 / 32 lanes
        shared_block=163 * KB,  # (guide)
        shared_unit=164 * KB,
        l2=4.5e12,  # (micro) 5,120 bytes a clock on paper
        hbm=2.039e12,  # (sheet) 80 GB SXM
        l2_latency=145e-9,  # (micro) about 200 cycles
        hbm_latency=400e-9,  # (micro) about 570 cycles
    ),
    Chip(
        name="L40S",
        target="sm_89",
        units=142,  # (sheet)
        clock=2.49e9,  # (sheet) boost
        peak={"bf16": 362e12, "int8": 733e12, "tf32": 183e12, "fp32": 91.6e12},  # (sheet)
        matrix=_rates("warp", 1024),  # (sheet)
        issue=4,
        pipes={"fma": 4, "imad": 2, "alu": 2, "xu": 0.5, "lsu": 1},  # (guide) 128 / 64 / 64 / 16 / 32 lanes
        shared_block=99 * KB,  # (guide)
        shared_unit=100 * KB,
        l2=3.5e12,  # (micro) Ada's L2 at this clock, roughly
        hbm=0.864e12,  # (sheet) GDDR6
        l2_latency=110e-9,  # (micro)
        hbm_latency=260e-9,  # (micro)
        warps=48,  # (guide)
        programs=24,  # (guide)
    ),
    Chip(
        name="H200",
        target="sm_90",
        units=132,  # (sheet)
        clock=1.755e9,  # (measured) sustained under load; the sheet's 989 TF/s are at 1.83 GHz
        peak={"bf16": 989e12, "int8": 1979e12, "tf32": 494e12, "fp32": 66.9e12},  # (sheet)
        matrix={
            **_rates("group", 4096),  # (sheet)
            **_rates("warp", 2540),  # (micro) 62 % of the warp-group form
        },
        issue=4,
        pipes={"fma": 4, "imad": 2, "alu": 2, "xu": 0.5, "lsu": 1},  # (guide)
        shared_block=227 * KB,  # (guide)
        shared_unit=228 * KB,
        l2=5.5e12,  # (micro)
        hbm=4.8e12,  # (sheet); measured copy 4.3
        l2_latency=155e-9,  # (micro) about 270 cycles
        hbm_latency=470e-9,  # (micro) about 830 cycles
    ),
    Chip(
        name="B200",
        target="sm_100",
        units=148,  # (sheet)
        clock=1.85e9,  # (sheet) boost
        peak={"bf16": 2250e12, "int8": 4500e12, "tf32": 1125e12, "fp32": 75e12},  # (sheet)
        matrix={
            **_rates("memory", 8192),  # (sheet)
            **_rates("warp", 2048),  # (assumed) Ampere's rate
        },
        issue=4,
        pipes={"fma": 4, "imad": 2, "alu": 2, "xu": 0.5, "lsu": 1},  # (guide)
        shared_block=227 * KB,  # (guide)
        shared_unit=228 * KB,
        l2=9e12,  # (assumed) scaled from the H200 by units and clock, and a wider fabric
        hbm=8e12,  # (sheet)
        l2_latency=160e-9,  # (assumed)
        hbm_latency=450e-9,  # (assumed)
        tensor_memory=512,  # (sheet)
    ),
    Chip(
        name="MI300X",
        target="gfx942",
        units=304,  # (sheet)
        clock=2.1e9,  # (sheet)
        peak={"bf16": 1307e12, "int8": 2614e12, "tf32": 653e12, "fp32": 163e12},  # (sheet)
        matrix={**_rates("warp", 2048), ("warp", "fp32"): 256},  # (sheet)
        issue=5,  # (guide) up to five instructions of different kinds, from the waves of one of four SIMDs, a cycle
        # (guide) a vector instruction keeps its SIMD of 16 lanes for 4 cycles, four times that for transcendentals
        pipes={"valu": 1, "xu": 0.25, "salu": 1, "lds": 0.5, "lsu": 0.25},
        shared_block=64 * KB,  # (sheet) LDS
        shared_unit=64 * KB,
        shared_extra=0,
        registers=4 * 512 * 64,  # (guide) four SIMDs of 512 registers by 64 lanes
        warps=32,  # (guide) eight a SIMD
        programs=32,
        lanes=64,
        l2=17e12,  # (sheet) Infinity Cache, which our tables fit; each of the eight L2s (4 MB) is faster and smaller
        hbm=5.3e12,  # (sheet)
        l2_latency=220e-9,  # (micro) Infinity Cache
        hbm_latency=700e-9,  # (micro)
    ),
)
BY_TARGET = {chip.target: chip for chip in CHIPS}
