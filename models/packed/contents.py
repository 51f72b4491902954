"""What the numbers of a packed file must be, beside what their checksums say: a file may come from anywhere.

Every piece is checked as it is read. What passes here cannot lead the engine or the ops outside their memory, or into NaN from the
weights alone.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from models.packed.encoder import NO_TOKEN
from models.packed.file import PackedFile
from models.packed.lookup import token_list
from models.packed.sections import PRIOR

if TYPE_CHECKING:
    from models.arm import ModelDescription

Rule = Callable[[np.ndarray], str]  # rows of a tensor -> what is wrong with them, "" when nothing is
PIECE_BYTES = 1 << 20
MOST_CODE_POINT = 0x10FFFF


def pieces(file: PackedFile, name: str, rule: Rule) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, rows) of a tensor, whole rows, each piece checked. Raises UserError that names the tensor."""
    tensor = file.tensors[name]
    kind = np.dtype(tensor.dtype).newbyteorder("<")
    for first, raw in file.rows(name, PIECE_BYTES):
        rows = np.frombuffer(raw, kind).reshape(-1, *tensor.shape[1:])
        if fault := rule(rows):
            raise file.fault(f"{name} {fault}: the file is damaged or was made by another program")
        yield first, rows


def rule_for(file: PackedFile, name: str, description: "ModelDescription") -> Rule:
    """What the rows of a tensor of a model of this description must be."""
    tensor = file.tensors[name]
    if name == PRIOR:
        return prior
    if tensor.dtype in ("float16", "float32"):
        return scales if name.removesuffix(".scale") in file.tensors and name.endswith(".scale") else finite
    if name.endswith(".packed"):
        return ternary
    if tensor.dtype == "int8":
        return symmetric
    if name == "codes.words":
        return lambda rows: spare_bits(rows, description.code_bits)
    if name == "interface.lengths":
        return lambda rows: at_most(rows, description.arm.positions)
    if name == "interface.matrix":
        return lambda rows: at_most(rows, (1 << tensor.shape[0]) - 1)
    return anything


def tokenizer_rule(file: PackedFile, name: str, tokens: list[bytes]) -> Rule:
    """What the rows of a tensor of the tokenizer must be; ``tokens``: what ``token_list`` made of its bytes and ends."""
    if name == "tokenizer.alphabet":
        return Alphabet(tokens)
    if name == "tokenizer.merges":
        return Merges(file, tokens)
    if name == "tokenizer.ranks":
        return Permutation(file.tensors[name].shape[0])
    if name == "tokenizer.characters":
        return Characters(file, tokens)
    return anything


def check_contents(file: PackedFile, description: "ModelDescription") -> None:
    """Read every tensor, with its checksums, and check its numbers. Raises UserError that names the first wrong one."""
    tokens = token_list(file)
    for name in file.tensors:
        of_tokenizer = name.startswith("tokenizer.")
        rule = tokenizer_rule(file, name, tokens) if of_tokenizer else rule_for(file, name, description)
        for _ in pieces(file, name, rule):
            pass


def anything(_: np.ndarray) -> str:
    return ""


def finite(rows: np.ndarray) -> str:
    return "" if np.isfinite(rows).all() else "is not finite"


def prior(rows: np.ndarray) -> str:
    """Minus infinity is a token that never comes."""
    return finite(rows[rows != -np.inf])


def scales(rows: np.ndarray) -> str:
    """Scales of int8 rows: the largest value, 127 of them, must be finite too."""
    with np.errstate(over="ignore", invalid="ignore"):
        return finite(rows * rows.dtype.type(127))


def ternary(rows: np.ndarray) -> str:
    return "holds the 2-bit code 3, which no ternary weight has" if (rows & (rows >> 1) & 0x55).any() else ""


def symmetric(rows: np.ndarray) -> str:
    return "holds -128, which no rounded weight is" if (rows == -128).any() else ""


def spare_bits(rows: np.ndarray, bits: int) -> str:
    return "has bits beyond the last of a code" if bits % 32 and (rows[:, -1] >> (bits % 32)).any() else ""


def at_most(rows: np.ndarray, most: int) -> str:
    return "" if ((rows >= 0) & (rows <= most)).all() else f"holds values outside 0 to {most:,}"


class Alphabet:
    """Ids of single bytes, in order; NO_TOKEN for a byte without one."""

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens, self.byte = tokens, 0

    def __call__(self, rows: np.ndarray) -> str:
        for index in rows.tolist():
            if index != NO_TOKEN and (index >= len(self.tokens) or self.tokens[index] != bytes([self.byte])):
                return f"has id {index:,} for the byte {self.byte}, which it does not stand for"
            self.byte += 1
        return ""


class Merges:
    """Pairs of ids, ascending; each becomes the id of tokenizer.merged that has the bytes of both."""

    def __init__(self, file: PackedFile, tokens: list[bytes]) -> None:
        self.tokens, self.last, self.row = tokens, -1, 0
        self.merged = np.concatenate([rows for _, rows in pieces(file, "tokenizer.merged", anything)]).tolist()

    def __call__(self, rows: np.ndarray) -> str:
        tokens, merged = self.tokens, self.merged[self.row : self.row + len(rows)]
        if (np.diff(rows, prepend=self.last) <= 0).any():
            return "does not grow from pair to pair"
        self.last, self.row = int(rows[-1]), self.row + len(rows)
        for left, right, index in zip((rows >> 32).tolist(), (rows & NO_TOKEN).tolist(), merged, strict=True):
            if max(left, right, index) >= len(tokens) or tokens[left] + tokens[right] != tokens[index]:
                return f"joins {left:,} and {right:,} to {index:,}, which does not have their bytes"
        return ""


class Characters:
    """Code points, ascending; the id of each has its character as bytes."""

    def __init__(self, file: PackedFile, tokens: list[bytes]) -> None:
        self.tokens, self.last, self.row = tokens, -1, 0
        self.ids = np.concatenate([rows for _, rows in pieces(file, "tokenizer.character_ids", anything)]).tolist()

    def __call__(self, rows: np.ndarray) -> str:
        if (np.diff(rows.astype(np.int64), prepend=self.last) <= 0).any() or rows[-1] > MOST_CODE_POINT:
            return "does not grow from character to character"
        for code, index in zip(rows.tolist(), self.ids[self.row :], strict=False):
            if index >= len(self.tokens) or self.tokens[index] != chr(code).encode(errors="replace"):
                return f"has the id {index:,} for U+{code:04X}, which it does not stand for"
        self.last, self.row = int(rows[-1]), self.row + len(rows)
        return ""


class Permutation:
    """Each number below ``size`` once."""

    def __init__(self, size: int) -> None:
        self.seen = np.zeros(size, bool)

    def __call__(self, rows: np.ndarray) -> str:
        if (rows >= len(self.seen)).any() or self.seen[rows].any() or len(np.unique(rows)) < len(rows):
            return "does not have each rank once"
        self.seen[rows] = True
        return ""
