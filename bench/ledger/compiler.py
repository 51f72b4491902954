"""Compiling recorded launches for chips that are not there, with the signature that Triton's own launcher would derive."""

import functools
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.launch import Launch
from models.errors import UserError

_compiled: dict[tuple, "Compiled"] = {}


class CannotCompile(RuntimeError):
    """This Triton cannot compile the kernel for the target; the message is its first line."""


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a launch.

    assembly   nvdisasm's SASS text with the control bits written out (sass.with_controls), or Triton's amdgcn text
    portable   PTX, or "" on AMD
    registers  32-bit registers per thread
    spilled    bytes of local memory (AMD: scratch) per thread
    shared     bytes of shared memory per program
    tensor_memory  columns of tensor memory per program (sm_100)
    """

    target: str
    assembly: str
    portable: str
    registers: int
    spilled: int
    shared: int
    tensor_memory: int = 0


def require_compiler() -> None:
    """Raise UserError with one line that says what to do when kernels cannot be compiled in this process."""
    try:
        import triton
    except ImportError as error:
        raise UserError("the ledger needs Triton: pip install triton (no GPU is needed)") from error
    if triton.knobs.runtime.interpret:
        raise UserError("TRITON_INTERPRET=1 leaves nothing to compile: unset TRITON_INTERPRET and run the ledger again")


def gpu_target(target: str) -> Any:
    """Triton's GPUTarget of "sm_90", "gfx942", ..."""
    from triton.backends.compiler import GPUTarget

    if target.startswith("sm_"):
        return GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    return GPUTarget("hip", target, 64)


def source(launch: Launch, target: str) -> tuple[Any, dict[str, Any]]:
    """(ASTSource, options) for the launch: parameter types, specialised constants and alignments as Triton's launcher derives them.

    The launcher's own functions are used, so that a launch is specialised here as it would be on a GPU: pointers by dtype and
    alignment, ints by size, divisibility by 16 and the value 1, None and constexpr parameters as constants.
    """
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.jit import create_function_from_signature

    kernel, backend = launch.kernel, make_backend(gpu_target(target))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "debug": False, "instrumentation_mode": ""}
    bound, specialization, options = bind(**launch.arguments, **options)
    parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, options)
    made_from = GluonASTSource if kernel.is_gluon() else ASTSource
    return made_from(kernel, signature, constants, attributes), parsed.__dict__


def compile_launch(launch: Launch, target: str) -> Compiled:
    """Compile and disassemble a launch. Raises CannotCompile when this Triton refuses the kernel on the target."""
    ast, options = source(launch, target)
    key = ast.hash(), str(sorted(options.items(), key=str)), target
    if key not in _compiled:  # the launches of a case repeat a kernel with other sizes
        _compiled[key] = _compile(launch, ast, options, target)
    return _compiled[key]


def _compile(launch: Launch, ast: Any, options: dict[str, Any], target: str) -> Compiled:
    import triton

    try:
        kernel = triton.compile(ast, target=gpu_target(target), options=options)
    except Exception as error:  # the compiler's passes raise many kinds, up to a bare RuntimeError("PassManager::run failed")
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        where = f"{launch.name} on {target} with triton {triton.__version__}"
        raise CannotCompile(f"{where}: {type(error).__name__}: {first}") from error
    shared = kernel.metadata.shared
    if "amdgcn" in kernel.asm:
        from bench.ledger import amdgcn

        text = kernel.asm["amdgcn"]
        registers = amdgcn.field_of(text, "vgpr_count")  # accumulation registers included on gfx90a and later
        return Compiled(target, text, "", registers, amdgcn.field_of(text, "private_segment_fixed_size"), shared)
    columns = getattr(kernel.metadata, "tmem_size", 0) or 0
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(kernel.asm["cubin"])
        encoded, usage = run_tool("nvdisasm", "-c", "-hex", str(binary)), run_tool("cuobjdump", "-res-usage", str(binary))
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise ValueError(f"cuobjdump -res-usage does not say the registers of {launch.name} on {target}: {usage.strip()!r}")
    from bench.ledger import sass

    return Compiled(target, sass.with_controls(encoded), kernel.asm["ptx"], int(found[1]), int(found[2]), shared, columns)


@functools.cache
def tool(name: str) -> str:
    """Path of a binary tool that comes with Triton."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.exists():
        raise UserError(f"{name} is not where Triton {triton.__version__} keeps it ({path}); install Triton's wheel from PyPI")
    return str(path)


def run_tool(name: str, *arguments: str) -> str:
    done = subprocess.run([tool(name), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} failed: {done.stderr.strip()}")
    return done.stdout
