"""A prompt's tokens attend in tiles (native/attention.c): every split of a text into calls, and any number of threads, gives the
bits of reading one token after another."""

import itertools

import pytest
import torch
from engine_support import VOCABULARY, random_arm, write_arm

from models.engine.engine import Engine

TEXT = [(i * 37 + i * i) % VOCABULARY for i in range(620)]  # more than 8 blocks of 64 slots, from where on a piece has several
# Around a step's 32 tokens and a block's 64 slots, from the start and in the midst of both.
CUTS = ([620], [1, 2, 3, 31, 32, 33, 458, 60], [33, 31, 65, 63, 15, 16, 17, 64, 316], [5, 600, 15])
HEADS = {  # query heads a key/value head: 4, 3, 1, and more than one call of the backend takes (64)
    "4 to 1": {"heads": 4, "kv_heads": 1}, "6 to 2": {"heads": 6, "kv_heads": 2}, "3 to 3": {"heads": 3, "kv_heads": 3},
    "130 to 2": {"heads": 130, "kv_heads": 2, "head_dim": 2},
}  # fmt: skip
KINDS = [(3, "float16", None), (40, "int8", None), (97, "float16", None), (3, "int8", "portable")]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(heads, window) -> a small gemma3 arm whose last layer sees everything, and its file."""
    made = {}

    def make(heads: str, window: int):
        if (heads, window) not in made:
            sizes = {"width": 24, "ffn": 16, "context": 640, "window": window}
            model = random_arm("gemma3", "table/tied/none/float", **sizes | HEADS[heads])
            made[heads, window] = model, write_arm(model, tmp_path_factory.mktemp("prompt") / "arm.tfree")
        return made[heads, window]

    return make


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("window", "kv", "backend"), KINDS)
def test_any_split_of_a_text_gives_the_same_bits(files, heads, window, kv, backend) -> None:
    model, path = files(heads, window)
    with Engine(path, threads=1, kv=kv, backend=backend) as engine, engine.session() as session:
        expected = [engine.hidden(session, [token])[0] for token in TEXT]
    with torch.inference_mode():
        exact = model(torch.tensor([TEXT]))[0]
    assert (torch.tensor(expected) - exact).norm() < (2e-3 if kv == "float16" else 0.05) * exact.norm()
    for threads, lengths in zip((1, 2, 3, 8), CUTS, strict=True):
        with Engine(path, threads=threads, kv=kv, backend=backend) as engine, engine.session() as session:
            ends = itertools.accumulate(lengths, initial=0)
            found = [row for a, b in itertools.pairwise(ends) for row in engine.hidden(session, TEXT[a:b])]
        assert [i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]] == [], threads


@pytest.mark.parametrize("heads", HEADS)
def test_sessions_of_any_lengths_read_together(files, heads) -> None:
    """A step of 32 tokens then has the end of one prompt and the start of others, some of which go on with what they have read."""
    rows = [TEXT[:70], TEXT[5:6], TEXT[90:121], TEXT[200:233], TEXT[7:9], TEXT[:600]]
    before = [TEXT[300 : 300 + n] for n in (0, 64, 1, 95, 0, 20)]
    with Engine(files(heads, 40)[1], threads=3) as engine:
        alone, together = [engine.session() for _ in rows], [engine.session() for _ in rows]
        for single, session, start, row in zip(alone, together, before, rows, strict=True):
            for token in start + row:
                engine.read([single], [[token]])
            if start:
                engine.read([session], [start])
        engine.read(together, rows)
        assert [session.scores() for session in together] == [session.scores() for session in alone]
