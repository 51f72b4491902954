"""The ledger reads machine code right: kernels whose instructions can be counted by hand, and hand-written control flow."""

from collections import Counter

import pytest

from bench.ledger import amdgcn, sass
from bench.ledger.case import Work
from bench.ledger.chips import BY_TARGET
from bench.ledger.flow import main_body
from bench.ledger.model import body_of, isa, matrix_agrees, resident

TARGETS = ("sm_80", "sm_90", "gfx942")
MATRIX = {"sm_80": "HMMA", "sm_89": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "gfx942": "v_mfma_f32_32x32x8_bf16"}


def opcodes(instructions) -> Counter:
    return Counter(i.opcode for i in instructions)


@pytest.mark.parametrize("target", TARGETS)
def test_a_copy_moves_its_block_in_16_byte_accesses(samples, target):
    compiled, threads = samples["compiled"]["copy"][target], 4 * BY_TARGET[target].lanes
    body = body_of(compiled)
    read, written = ("LDG", "STG") if target != "gfx942" else ("buffer_load_dwordx4", "buffer_store_dwordx4")
    accesses = 2048 * 2 // 16 // threads
    found = opcodes(body.instructions)
    assert not body.looped and (found[read], found[written]) == (accesses, accesses)
    if target != "gfx942":
        assert {sass.width(i.text) for i in body.instructions if i.opcode in (read, written)} == {16}


@pytest.mark.parametrize("target", TARGETS)
def test_unrolling_is_seen_and_a_trip_of_the_source_loads_one_row(samples, target):
    body = body_of(samples["compiled"]["add_rows"][target])
    threads = 4 * BY_TARGET[target].lanes
    loads = sum(isa(target).is_global(i) for i in body.instructions)
    assert body.looped and loads == body.unrolled * 1024 * 4 // 16 // threads
    assert target == "gfx942" or body.unrolled == 4  # what ptxas does to short loops


@pytest.mark.parametrize("target", MATRIX)
def test_the_main_loop_of_a_product_holds_one_tile_of_matrix_instructions(samples, target):
    body, machine = body_of(samples["compiled"]["product"][target]), isa(target)
    matrix = [i for i in body.instructions if machine.is_matrix(i)]
    assert {i.opcode for i in matrix} == {MATRIX[target]}
    if target == "sm_100":  # the shape is in a descriptor: one instruction per 16 of the depth
        assert len(matrix) == 64 // 16 and machine.matrix_flops(matrix[0]) is None
    else:
        assert sum(map(machine.matrix_flops, matrix)) * 8 == 2 * 128 * 128 * 64


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_bf16_products_by_count(samples, target):
    found = opcodes(body_of(samples["compiled"]["product"][target]).instructions)
    # 8 warps: HMMA is 16 x 8 x 16 for each; HGMMA is 64 x 128 x 16 for each of two groups of four.
    assert found[MATRIX[target]] == (128 * 128 * 64 // (16 * 8 * 16) // 8 if target == "sm_80" else 64 // 16)


@pytest.mark.parametrize("target", TARGETS)
def test_int8_products(samples, target):
    body, machine = body_of(samples["compiled"]["int8 product"][target]), isa(target)
    matrix = [i for i in body.instructions if machine.is_matrix(i)]
    assert {i.opcode for i in matrix} == {{"sm_80": "IMMA", "sm_90": "IGMMA", "gfx942": "v_mfma_i32_32x32x16_i8"}[target]}
    assert {machine.matrix_dtype(i) for i in matrix} == {"int8"}
    assert sum(map(machine.matrix_flops, matrix)) * 8 == 2 * 128 * 128 * 128


@pytest.mark.parametrize("target", [t for t in MATRIX if t != "sm_100"])
def test_declared_flops_agree_whatever_the_pipeline_took_out_of_the_loop(samples, target):
    body = body_of(samples["compiled"]["product"][target])
    right = Work(flops=2 * 4096**3, dtype="bf16", iterations=64)
    assert matrix_agrees(body, right, 1024, 8, isa(target)) == pytest.approx(1)
    wrong = Work(flops=2 * 4096**3, dtype="bf16", iterations=32)
    assert matrix_agrees(body, wrong, 1024, 8, isa(target)) == pytest.approx(0.5)


def test_shared_memory_by_hand(samples):
    stage = (128 * 64 + 64 * 128) * 2
    shared = {target: compiled.shared for target, compiled in samples["compiled"]["product"].items()}
    assert shared["sm_90"] == 3 * stage  # three stages, one read by the running matrix instructions
    assert shared["sm_80"] == shared["sm_89"] == 2 * stage  # one stage is in registers


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_a_kernel_that_spills_shows_local_memory_in_its_loop(samples, target):
    compiled = samples["compiled"]["spilling"][target]
    body = body_of(compiled)
    assert compiled.registers == 255 and compiled.spilled > 0
    assert body.looped and sum(map(sass.is_local, body.instructions)) > 0
    assert not any(map(sass.is_local, body_of(samples["compiled"]["product"][target]).instructions))


def test_occupancy_of_compiled_kernels(samples):
    copied, product = samples["compiled"]["copy"]["sm_90"], samples["compiled"]["product"]["sm_90"]
    assert resident(BY_TARGET["sm_90"], copied, 4) == 16  # 64 warps
    assert resident(BY_TARGET["sm_90"], product, 8) == 2  # 228 KB / (96 + 1) KB
    on_b200 = samples["compiled"]["product"]["sm_100"]
    assert on_b200.tensor_memory == 128  # columns: one of the 128 x 128 tile each


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_launches_are_specialised_as_tritons_launcher_does(samples, target):
    made = samples["signatures"][target]
    assert made["signature"] == {
        "a": "*bf16",
        "b": "*bf16",
        "c": "constexpr",
        "M": "constexpr",
        "N": "i32",
        "K": "i64",
        **dict.fromkeys(("BM", "BN", "BK"), "constexpr"),
    }
    assert made["constants"] == {"c": None, "M": 1, "BM": 128, "BN": 128, "BK": 64}
    assert made["aligned"] == ["b", "K"]  # a begins at an odd element, 17 is no multiple of 16


def code(text: str):
    """Instructions one per line, labels ending in a colon, as nvdisasm prints them."""
    lines = [line.strip() for line in text.strip().splitlines()]
    return sass.parse("\n".join(line if line.endswith(":") else f"  /*{16 * n:04x}*/   {line} ;" for n, line in enumerate(lines)))


def body(text: str):
    return main_body(code(text), sass.is_matrix, sass.is_wait, sass.is_work)


def test_a_slow_path_behind_the_code_is_no_loop():
    found = body("""
        S2R R0, SR_TID.X
        .L_x_1:
        SYNCS.PHASECHK.TRANS64.TRYWAIT P4, [UR17], R18
        @!P4 BRA `(.L_x_3)
        .L_x_2:
        FFMA R1, R2, R3, R1
        @P0 BRA `(.L_x_1)
        STG.E.128 desc[UR4][R2.64], R4
        EXIT
        .L_x_3:
        SYNCS.PHASECHK.TRANS64.TRYWAIT P4, [UR17], R18
        @!P4 BRA `(.L_x_3)
        BRA `(.L_x_2)
        .L_x_4:
        BRA `(.L_x_4)
    """)
    assert opcodes(found.instructions) == {"SYNCS": 1, "FFMA": 1, "BRA": 3}  # the poll itself is left out, the jump back is not
    assert opcodes(found.rest) == {"S2R": 1, "STG": 1, "EXIT": 1} and not found.enclosing


def test_of_two_loops_with_the_same_products_the_first_is_the_main_loop():
    """code_loss ends with a loop over the few tiles that hold a target: the same products, and a comparison more."""
    found = body("""
        .L_x_0:
        HMMA.16816.F32.BF16 R4, R8, R12, R4
        @P0 BRA `(.L_x_0)
        .L_x_1:
        HMMA.16816.F32.BF16 R4, R8, R12, R4
        ISETP.NE.AND P1, PT, R1, R2, PT
        @P0 BRA `(.L_x_1)
        EXIT
    """)
    assert opcodes(found.instructions) == {"HMMA": 1, "BRA": 1} and opcodes(found.rest)["ISETP"] == 1
    assert opcodes(found.beside) == {"HMMA": 1, "ISETP": 1, "BRA": 1}


def test_the_inner_loop_is_the_main_loop_and_the_outer_encloses_it():
    found = body("""
        .L_x_0:
        LDG.E R1, desc[UR4][R2.64]
        .L_x_1:
        HMMA.16816.F32.BF16 R4, R8, R12, R4
        @P0 BRA `(.L_x_1)
        STG.E desc[UR4][R2.64], R1
        @!P1 BRA `(.L_x_0)
        .L_x_2:
        IADD3 R1, R1, R1, RZ
        IADD3 R1, R1, R1, RZ
        IADD3 R1, R1, R1, RZ
        LDS R1, [R2]
        @P0 BRA `(.L_x_2)
        EXIT
    """)
    assert opcodes(found.instructions) == {"HMMA": 1, "BRA": 1}
    assert opcodes(found.enclosing) == {"LDG": 1, "STG": 1, "BRA": 1}
    assert opcodes(found.rest) == {"IADD3": 3, "LDS": 1, "BRA": 1, "EXIT": 1}


def test_calls_and_returns():
    found = body("""
        CALL.REL.NOINC `($function)
        EXIT
        $function:
        IADD3 R1, R1, R1, RZ
        RET.REL.NODEC R2 `(kernel)
    """)
    assert not found.looped and opcodes(found.instructions) == {"CALL": 1, "EXIT": 1, "IADD3": 1, "RET": 1}


def test_code_that_cannot_be_reached_does_not_count():
    assert len(body("EXIT\nFADD R1, R1, R1\nNOP").instructions) == 1


def test_no_machine_code_is_an_error():
    for machine in (sass, amdgcn):
        with pytest.raises(ValueError, match="no machine code"):
            machine.parse("\t.section .text\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("LDS R1, [R2]", 32 * 4),
        ("LDS.U.16 R1, [R2]", 32 * 2),
        ("@!P0 STS.128 [R2], R4", 32 * 16),
        ("LDSM.16.MT88.4 R4, [R2]", 512),
        ("LDSM.16.M88.2 R4, [R2]", 256),
        ("LDGSTS.E.BYPASS.128 [R2], desc[UR4][R4.64]", 32 * 16),
        ("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24", (64 + 128) * 16 * 2 / 4),
        ("HGMMA.64x128x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0", 128 * 16 * 2 / 4),
        ("LDG.E.128 R4, desc[UR4][R2.64]", 0),
    ],
)
def test_shared_memory_bytes_of_a_warp(text, expected):
    assert sass.shared_bytes(code(text).instructions[0]) == expected


@pytest.mark.parametrize(
    ("text", "flops", "dtype"),
    [
        ("HMMA.16816.F32.BF16 R4, R8, R12, R4", 2 * 16 * 8 * 16, "bf16"),
        ("HMMA.1688.F32.TF32 R4, R8, R12, R4", 2 * 16 * 8 * 8, "tf32"),
        ("IMMA.16832.S8.S8 R4, R8.ROW, R12.COL, R4", 2 * 16 * 8 * 32, "int8"),
        ("HGMMA.64x256x16.F32 R24, gdesc[UR8], R24", 2 * 64 * 256 * 16 / 4, "bf16"),
        ("UTCIMMA gdesc[UR6], gdesc[UR4], tmem[UR8], tmem[UR32], idesc[UR33], !UPT", None, "int8"),
    ],
)
def test_matrix_work_of_a_warp(text, flops, dtype):
    instruction = code(text).instructions[0]
    assert sass.is_matrix(instruction) and (sass.matrix_flops(instruction), sass.matrix_dtype(instruction)) == (flops, dtype)


def test_half_precision_multiply_adds_are_no_matrix_instructions():
    assert not sass.is_matrix(code("HFMA2.MMA R2, -RZ, RZ, 0, 0").instructions[0])


def amd(text: str):
    return amdgcn.parse(f"kernel:\n\t{text}\n").instructions[0]


def test_amd_instructions():
    assert amdgcn.matrix_flops(amd("v_mfma_f32_4x4x4_16b_f16 v[0:3], v[4:5], v[6:7], v[0:3]")) == 2 * 4 * 4 * 4 * 16
    assert [amdgcn.width(amd(t)) for t in ("buffer_load_ushort v0, v1, s[0:3], 0 offen", "ds_read2st64_b64 v[0:3], v4")] == [2, 16]
    assert amdgcn.is_local(amd("scratch_load_dword v0, off, s32"))
    assert amdgcn.is_local(amd("buffer_load_dword v0, off, s[0:3], s32"))
    assert not amdgcn.is_local(amd("buffer_load_dword v0, v1, s[0:3], 0 offen"))
    pipes = [amdgcn.pipe(amd(t)) for t in ("v_exp_f32_e32 v0, v1", "v_add_f32_e32 v0, v1, v2", "s_add_i32 s0, s1, s2", "s_barrier")]
    assert pipes == ["xu", "valu", "salu", None]
