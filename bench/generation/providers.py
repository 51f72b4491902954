"""What is measured: our engine, eager PyTorch, llama.cpp; each as the processes of a round, and how to read what they print."""

import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.engine.description import Description
from models.errors import UserError
from models.packed.file import PackedFile

ROOT = Path(__file__).resolve().parents[2]
WATCH = Path(__file__).with_name("watch.py")
PROMPT = "It was a bright cold day in April, and the clocks struck on."  # at most a token a byte, so 64 more stay within 128


@dataclass(frozen=True)
class Points:
    """What is measured of every provider: decoding ``tokens`` tokens from each of ``depths`` on, and reading ``prefill`` tokens."""

    depths: tuple[int, ...]
    tokens: int
    prefill: int


@dataclass(frozen=True)
class Sample:
    """One number of one round: ``measure`` is decode or prefill (tokens/s), memory or text (bytes), or floor (seconds)."""

    measure: str
    depth: int  # context before it
    tokens: int  # decoded or read
    value: float
    foreign: float | None  # share of the CPU time that others had
    code_bytes: float | None = None  # of codes, that a decoded token took from memory; of a floor: that it counts


class Provider(ABC):
    """One way to generate from one file."""

    name: str
    file: Path

    @abstractmethod
    def round(self, points: Points, threads: int) -> list[Sample]:
        """Take every point once. Raises UserError when a process fails."""

    @abstractmethod
    def memory(self, depth: int, tokens: int, threads: int) -> Sample:
        """The largest resident set of a fresh process that decodes ``tokens`` tokens from ``depth`` on, and does nothing else."""

    def text_memory(self, threads: int) -> Sample | None:
        """The same of the command that a user has, given a text, at a context below 128; None where there is none."""
        return None

    @abstractmethod
    def decode_command(self, tokens: int) -> list[str]:
        """A process that decodes ``tokens`` tokens from an empty context on one thread."""


@dataclass(frozen=True)
class Ours(Provider):
    """Our engine ("engine") or our model in PyTorch ("eager") on a .tfree file."""

    engine: str
    file: Path
    most_tokens: int | None = None  # at most so many tokens are decoded: eager is slow
    kv: str = "float16"  # numbers of the engine's cache

    @property
    def name(self) -> str:
        return f"{self.engine} {self.file.stem}" + ("" if self.kv == "float16" else f", {self.kv} cache")

    def round(self, points: Points, threads: int) -> list[Sample]:
        tokens = min(points.tokens, self.most_tokens or points.tokens)
        floors = [bytes_per_token(self.file, self.kv, d, tokens) for d in points.depths] if self.engine == "engine" else []
        answer, cost = run(self._command([(d, tokens) for d in points.depths], threads, points.prefill, floors))
        found = json.loads(answer)
        rates = zip(points.depths, found["decode"], found["code_bytes"], strict=True)
        samples = [Sample("decode", depth, tokens, rate, cost["foreign"], code_bytes) for depth, rate, code_bytes in rates]
        if points.prefill:
            samples.append(Sample("prefill", 0, points.prefill, found["prefill"], cost["foreign"]))
        reads = zip(points.depths, found["floor"], found["code_bytes"], strict=False)  # no floor of eager
        return samples + [Sample("floor", depth, tokens, seconds, cost["foreign"], codes) for depth, seconds, codes in reads]

    def memory(self, depth: int, tokens: int, threads: int) -> Sample:
        tokens = min(tokens, self.most_tokens or tokens)
        _, cost = run(self._command([(depth, tokens)], threads))
        return Sample("memory", depth, tokens, cost["rss"], cost["foreign"])

    def text_memory(self, threads: int) -> Sample | None:
        if self.engine != "engine":
            return None
        new = 64
        flags = ["--max-tokens", str(new), "--temperature", "0", "--ignore-eos", "--threads", str(threads), "--kv", self.kv]
        _, cost = run([sys.executable, "-m", "models.generation", str(self.file.resolve()), "--prompt", PROMPT, *flags])
        return Sample("text", 0, new, cost["rss"], cost["foreign"])

    def decode_command(self, tokens: int) -> list[str]:
        return self._command([(0, tokens)], threads=1)

    def _command(self, decode: Sequence[tuple[int, int]], threads: int, prefill: int = 0, floors: Sequence[int] = ()) -> list[str]:
        request: dict[str, Any] = {"engine": self.engine, "file": str(self.file.resolve()), "threads": threads, "kv": self.kv}
        request |= {"decode": decode, "prefill": prefill, "floor_bytes": floors}
        return [sys.executable, "-m", "bench.generation.child", json.dumps(request)]


@dataclass(frozen=True)
class LlamaCpp(Provider):
    """llama.cpp's own benchmark on a GGUF file, with its defaults (it warms up before each test)."""

    label: str
    file: Path
    program: Path

    @property
    def name(self) -> str:
        return f"llama.cpp {self.label}"

    def round(self, points: Points, threads: int) -> list[Sample]:
        depths = ",".join(map(str, points.depths))
        samples = self._tests("decode", ["-p", "0", "-n", str(points.tokens), "-d", depths], threads)
        if points.prefill:
            samples += self._tests("prefill", ["-p", str(points.prefill), "-n", "0"], threads)
        return samples

    def _tests(self, measure: str, flags: list[str], threads: int) -> list[Sample]:
        answer, cost = run([*self._command(threads), *flags, "-o", "json"])
        return [
            Sample(measure, test["n_depth"], test["n_gen"] or test["n_prompt"], test["avg_ts"], cost["foreign"])
            for test in json.loads(answer)
        ]

    def memory(self, depth: int, tokens: int, threads: int) -> Sample:
        _, cost = run([*self._command(threads), "-p", "0", "-n", str(tokens), "-d", str(depth), "-o", "json"])
        return Sample("memory", depth, tokens, cost["rss"], cost["foreign"])

    def decode_command(self, tokens: int) -> list[str]:
        return [*self._command(1), "--no-warmup", "-p", "0", "-n", str(tokens)]

    def _command(self, threads: int) -> list[str]:
        return [str(self.program), "-m", str(self.file), "-t", str(threads), "-r", "1"]


def run(command: list[str]) -> tuple[str, dict[str, Any]]:
    """What ``command`` printed, and what it cost (see watch.py). Raises UserError with its last words when it fails."""
    watched = [sys.executable, "-S", str(WATCH), *command]
    done = subprocess.run(watched, capture_output=True, text=True, cwd=ROOT, errors="replace")
    if done.returncode:
        raise UserError(f"{command[0]}: cannot be run ({last_words(done.stderr)})")
    output, _, cost = done.stdout.rstrip("\n").rpartition("\n")
    found = json.loads(cost)
    if found["code"]:
        raise UserError(f"{' '.join(command[:3])} ... failed with status {found['code']}: {last_words(done.stderr)}")
    return output.rstrip("\n"), found


def last_words(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def bytes_per_token(path: Path, kv: str, depth: int, tokens: int) -> int:
    """Bytes that each of ``tokens`` tokens behind ``depth`` others needs, besides codes (the engine says how many it read)."""
    with PackedFile(path) as file:
        return weight_bytes(file) + cache_bytes(Description(file.model), kv, depth, tokens)


def weight_bytes(file: PackedFile) -> int:
    """Bytes of a packed file that every token needs: body and head whole, a lift and a tied table too. Of what else only the input
    reads a token needs a row, which is left out."""
    arm = file.model["arm"]
    parts = ("body.", "head.", *(["interface."] if arm["head"] == "tied" or arm["interface"] == "sign" else []))
    return sum(t.nbytes for name, t in file.tensors.items() if name.startswith(parts) and name != "body.position")


def cache_bytes(description: Description, kv: str, depth: int, tokens: int) -> int:
    """Bytes of keys and values (with their scales) that ``tokens`` tokens behind ``depth`` others attend to, the mean of them."""
    config = description.config
    vector = config.head_dim * 2 if kv == "float16" else config.head_dim + 4
    windows = config.windows[: config.layers]  # a pointer; 0: none
    slots = sum(min(at + 1, window or at + 1) for window in windows for at in range(depth, depth + tokens))
    return 2 * config.kv_heads * vector * slots // tokens


def prior_kind(path: Path) -> str:
    """Of a file's prior: none, flat (the same for all tokens: no code can be passed over) or uneven."""
    with PackedFile(path) as file:
        if "head.prior.values" not in file.tensors:
            return "none"
        data, size = file.read("head.prior.values"), file.tensors["head.prior.values"].row_bytes
        return "flat" if data == data[:size] * (len(data) // size) else "uneven"


def require_context(path: Path, points: Points) -> None:
    """Raise UserError when the points go beyond the context of a packed file."""
    with PackedFile(path) as file:
        context, asked = file.model["body"]["context"], max(points.depths[-1] + points.tokens, points.prefill)
        if asked > context:
            raise file.fault(f"its context is {context:,} tokens, and {asked:,} are asked for; give smaller --depths or --prefill")


def find_program(path: Path) -> Path:
    """``path`` if it is a program. Raises UserError."""
    if not path.is_file() or not os.access(path, os.X_OK):
        raise UserError(f"--llama-bench {path}: not a program; build llama.cpp's target llama-bench and give its path")
    return path.resolve()
