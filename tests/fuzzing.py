"""Damaged files by the thousand: a seeded mutator, and a guard that turns a crash, a hang or a memory bomb into a failure."""

import contextlib
import copy
import json
import random
import resource
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from models.errors import UserError

SECONDS, ROOM = 30, 2 << 30  # what one load may take at most, far above what any needs: processor time, bytes of address space
# JSON that Python's own encoder does not write, by the placeholder it stands for.
RAW = {
    "@deep": "[" * 100_000 + "]" * 100_000,
    "@nested": '{"a":' * 200 + "1" + "}" * 200,
    "@digits": "9" * 5000,
    "@exponent": "1e999999",
    "@infinity": "-Infinity",
    "@surrogate": '"\\ud800"',
    "@nul": '"a\\u0000b"',
}
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3.5, -0.5, 1e308, 2**31 - 1, 2**31, 2**32, 2**40, 2**63, 2**64 - 1, 10**30),
    *("", "x", "fused", "../../etc/passwd", "__import__('os').abort()", "x" * 100_000, [], {}, [[]], [1, "a", None], {"": {}}),
    *RAW,
]


class Twice:
    """The values of a key that stands twice in its object."""

    def __init__(self, *values: Any) -> None:
        self.values = values


def mutations(original: bytes, seed: int) -> Iterator[bytes]:
    """Endless damaged versions of a file: of its bytes, and, where it holds JSON, of the values in it. The same for one seed."""
    draw = random.Random(seed)
    try:
        value = json.loads(original)
    except ValueError:
        value = None
    while True:
        yield damaged_bytes(original, draw) if value is None or draw.random() < 0.3 else _json(original, draw)


def safetensors_mutations(original: bytes, seed: int) -> Iterator[bytes]:
    """Damaged safetensors files: the header, its length, and the whole file."""
    draw = random.Random(seed)
    size = int.from_bytes(original[:8], "little")
    header, body = original[8 : 8 + size], original[8 + size :]
    headers = mutations(header, seed)
    while True:
        kind = draw.random()
        if kind < 0.7:
            changed = next(headers)
            yield len(changed).to_bytes(8, "little") + changed + body
        elif kind < 0.8:
            length = draw.choice([0, 1, size - 1, size + 1, 2**31, 2**40, 2**63, 2**64 - 1, draw.getrandbits(64)])
            yield length.to_bytes(8, "little") + header + body
        else:
            yield damaged_bytes(original, draw)


def damaged_bytes(original: bytes, draw: random.Random) -> bytes:
    """Some bytes flipped, cut off, put in, written over or doubled."""
    data = bytearray(original)
    kind = draw.randrange(5)
    for _ in range(draw.choice([1, 1, 2, 10])):
        at = draw.randrange(len(data)) if data else 0
        length = draw.choice([1, 2, 8, 100])
        if kind == 0 and data:
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            data[at:at] = draw.randbytes(length)
        elif kind == 3:
            data[at : at + length] = draw.choice([b"\0", b"\xff", b"[", b"9"]) * length
        else:
            data[at:at] = data[at : at + length]
    return bytes(data)


def _json(original: bytes, draw: random.Random) -> bytes:
    value = json.loads(original)
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        places = list(_places(value))
        if not places:
            break
        holder, key = draw.choice(places)
        kind = draw.randrange(8)
        if kind == 0:
            del holder[key]
        elif kind == 1:
            other, its_key = draw.choice(places)
            holder[key] = copy.deepcopy(other[its_key])
        elif kind == 2 and isinstance(holder, dict):
            holder[draw.choice(["", "x", "type", "__class__", key.upper()])] = holder.pop(key)
        elif kind == 3 and isinstance(holder, dict):
            holder[key] = Twice(holder[key], _value(draw))
        elif kind == 4 and isinstance(holder[key], int):
            holder[key] += draw.choice([-1, 1, 2**20, -(2**20)])
        else:
            holder[key] = _value(draw)
    return _write(value).encode("utf-8", "surrogatepass")


def _value(draw: random.Random) -> Any:
    return copy.deepcopy(draw.choice(VALUES))  # later mutations change it


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) below ``value``; of long containers the first ones only."""
    keys = list(value)[:40] if isinstance(value, dict) else range(min(len(value), 40)) if isinstance(value, list) else []
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _write(value: Any) -> str:
    """``value`` as JSON, placeholders and duplicate keys written out."""
    if isinstance(value, str) and value in RAW:
        return RAW[value]
    if isinstance(value, list):
        return "[" + ",".join(map(_write, value)) + "]"
    if isinstance(value, dict):
        pairs = [(name, e) for name, entry in value.items() for e in (entry.values if isinstance(entry, Twice) else (entry,))]
        return "{" + ",".join(f"{json.dumps(name)}:{_write(entry)}" for name, entry in pairs) + "}"
    return _write(value.values[0]) if isinstance(value, Twice) else json.dumps(value)


class TookTooLong(BaseException):
    """One load ran into the time limit."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Within the block this process may take ROOM more address space than it has, and SECONDS of processor time.

    Not of wall time, which a busy machine stretches.
    """

    def stop(*_: object) -> None:
        raise TookTooLong

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    old = signal.signal(signal.SIGPROF, stop)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, hard))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))
        signal.signal(signal.SIGPROF, old)


def fuzz(path: Path, damaged: Iterator[bytes], count: int, load: Callable[[], object], beside: Path | None = None) -> Counter:
    """Write ``count`` damaged versions to ``path`` and ``load`` each: it succeeds, or raises a UserError that names a file.

    That is the file itself, its folder, or the one ``beside`` it. Returns how often which. The file gets its old contents back.
    """
    original, found = path.read_bytes(), Counter()
    try:
        for number in range(count):
            path.write_bytes(next(damaged))
            try:
                with limited():
                    load()
                found["loaded"] += 1
            except UserError as error:
                names = (path, path.parent, beside or path)
                assert any(str(name) in str(error) for name in names), f"mutation {number}: unnamed: {error}"
                found["refused"] += 1
            except BaseException as error:
                where = "".join(traceback.format_tb(error.__traceback__)[-2:])
                kind = f"{type(error).__name__}: {str(error)[:300]}"
                raise AssertionError(f"mutation {number} of {path.name}: {kind}\n{where}") from None
    finally:
        path.write_bytes(original)
    return found
