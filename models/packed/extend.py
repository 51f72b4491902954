"""Add words to a packed file of a sign-code arm without training and without writing the file anew (Bathula, arXiv 2610.22428).

The table is fixed codes, so a new row needs no training:

* code: the sign of the mean of the +-1 codes of the tokens that the word was split into. Where they cancel, a fixed random bit of
  the word's id (``random_codes`` with seed 0) decides: any fixed sign would lean, and the first token's would repeat its code.
* prior: a percentile of the priors that the file has (the paper tried several; its earlier work took the 75th, its test of other
  languages the median).
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kernels.sign_code import pack_sign_codes, unpack_sign_codes
from models.errors import UserError
from models.packed.contents import pieces, rule_for
from models.packed.file import PackedFile
from models.packed.load import PackedModel
from models.packed.sections import PRIOR, bytes_tensors
from models.packed.words import with_words
from models.packed.writing import NewTensor, append_rows
from models.training.checkpoint import naming
from models.vocab.sign_codes import MOST_IDS, random_codes
from models.vocab.tokenizer import Tokenizer

MOST_WORD_BYTES = 1024
PROBED = 1000  # words whose splitting is compared with what it was


@dataclass(frozen=True)
class Extension:
    """What ``extend`` did."""

    added: int
    known: int  # words that are one token already
    vocab_size: int
    bytes: int  # by which the file grew


def read_words(path: Path, as_written: bool) -> list[str]:
    """The words of a file, one a line, each with a space in front unless ``as_written``; empty lines and repetitions are left out.

    Raises UserError for a file that is not UTF-8, and for a line that is too long for a word.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 (byte {error.start:,}); convert it first") from error
    words: dict[str, None] = {}
    for number, line in enumerate(lines, 1):
        line = line.rstrip("\r")
        if len(line.encode(errors="replace")) > MOST_WORD_BYTES:
            raise UserError(f"{path}: line {number} is no word: longer than {MOST_WORD_BYTES:,} bytes")
        if line.strip():
            words[line if as_written else f" {line.strip()}"] = None
    return list(words)


def extend(path: Path, words: list[str], percentile: float = 75.0) -> Extension:
    """Add ``words`` (literal texts) to the packed file ``path``; those that are one token already are left out.

    ``percentile``: of the file's priors, for the words' own. A kill at any moment leaves the old or the new file. Raises UserError
    when the arm has another interface or head than sign codes, when a word cannot be a token, and what PackedModel does.
    """
    model = PackedModel.open(path)
    with PackedFile(path, model.slot) as file:
        _require_codes(model)
        tokenizer = model.load_tokenizer()
        splits = {word: ids for word, ids in zip(words, tokenizer.encode_batch(words), strict=True) if len(ids) > 1}
        size, new = model.description.vocab_size, list(splits)
        if size + len(new) > MOST_IDS:
            raise UserError(f"{path}: {len(new):,} words more than its {size:,} ids are beyond the {MOST_IDS:,} that are supported")
        if not new:
            return Extension(0, len(words), size, 0)
        texts = [word.encode() for word in new]
        with naming(path):
            extended = with_words(tokenizer, texts)
            check_bytes(extended, texts)
            check_splitting(tokenizer, extended, new)
        state = model.state | {"tokenizer": extended.fingerprint}
        about = {
            "model": file.model | {"vocab_size": size + len(new)},
            "tokenizer": file.index["tokenizer"] | {"words": model.words + len(new)},
            "made_from": file.index["made_from"] | {"state": state},
        }
        append_rows(file, about, _rows(file, model, list(splits.values()), texts, percentile))
        return Extension(len(new), len(words) - len(new), size + len(new), path.stat().st_size - file.size)


def _require_codes(model: PackedModel) -> None:
    arm, size = model.description.arm, model.description.vocab_size
    if (arm.interface, arm.head) != ("sign", "code"):
        raise UserError(
            f"{model.path}: its arm is {arm.parts}; words can be added only where interface and head are sign codes "
            "(sign and code), whose rows need no training"
        )
    if model.ids + model.words != size:
        raise UserError(f"{model.path}: the model has {size:,} ids, its tokenizer {model.ids + model.words:,}: no place for words")


def check_bytes(extended: Tokenizer, texts: list[bytes]) -> None:
    """Raise UserError unless the last tokens stand for ``texts`` (some tokenizers take U+2581 for a space)."""
    for text, token in zip(texts, extended.tokens[-len(texts) :], strict=True):
        if token != text:
            raise UserError(f"the word {text.decode()!r:.60} cannot be added: to its tokenizer it is {token.decode()!r:.60}")


def check_splitting(before: Tokenizer, after: Tokenizer, words: list[str]) -> None:
    """Raise UserError when text around added words no longer keeps its bytes (some tokenizers put spaces into every part)."""
    text = "a" + "".join(f"{word} b" for word in words[:PROBED])
    spelled = _spelled(after, text)
    if spelled not in (text.encode(), _spelled(before, text)):  # of a letter without a token the old one has lost the bytes
        raise UserError("its tokenizer changes the text around added words, so they cannot be added")


def _spelled(tokenizer: Tokenizer, text: str) -> bytes:
    tokens = tokenizer.tokens
    return b"".join(tokens[i] for i in tokenizer.encode(text))


def _rows(file: PackedFile, model: PackedModel, splits: list[list[int]], texts: list[bytes], percentile: float) -> list[NewTensor]:
    """The new rows of every tensor that has one per id."""
    words = _numbers(file, "codes.words", model).view(np.int32)
    codes = word_codes(torch.from_numpy(words), model.description.code_bits, splits)
    rows = [NewTensor("codes.words", "uint32", tuple(codes.shape), [codes.numpy().astype("<i4").tobytes()])]
    if PRIOR in file.tensors:
        values = _numbers(file, PRIOR, model)
        known = values[np.isfinite(values)].astype(np.float64)  # minus infinity is a token that never comes
        if not len(known):
            raise UserError(f"{file.path}: its prior lets no token come, so there is none for a new word")
        new = np.full(len(splits), np.percentile(known, percentile), values.dtype)
        rows.append(NewTensor(PRIOR, file.tensors[PRIOR].dtype, new.shape, [new.tobytes()]))
    return [*rows, *bytes_tensors(texts, start=file.tensors["tokenizer.bytes"].shape[0])]


def _numbers(file: PackedFile, name: str, model: PackedModel) -> np.ndarray:
    return np.concatenate([rows for _, rows in pieces(file, name, rule_for(file, name, model.description))])


def word_codes(words: torch.Tensor, bits: int, splits: list[list[int]]) -> torch.Tensor:
    """Packed codes int32 [N, ceil(bits/32)] of words that were split into the ids ``splits``; ``words`` [V, ...]: the tokens'."""
    size = len(words)
    ties = unpack_sign_codes(random_codes(size + len(splits), bits, seed=0).words[size:], bits)
    sums = torch.stack([unpack_sign_codes(words[ids], bits).sum(0) for ids in splits])
    return pack_sign_codes(torch.where(sums == 0, ties, sums))
