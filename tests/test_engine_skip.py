"""Greedy and top-k choices that pass over codes: those of all codes, whatever the bound that decides; and less is read."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_support import random_arm, write_arm
from packed_support import little_checkpoint, write_anew

from kernels.code_loss import sample_scores
from models.engine.description import Description
from models.engine.engine import Engine
from models.engine.session import Sampling
from models.errors import UserError
from models.packed.export import export_file
from models.packed.extend import extend
from models.packed.file import PackedFile
from models.packed.sections import Rounding

GREEDY = Sampling(temperature=0)
DRAWS = [GREEDY, Sampling(top_k=7, seed=3), Sampling(top_k=100, top_p=0.9, seed=4)]
PENALTY = {"repetition_penalty": 1.4, "seen": range(0, 600, 7)}
BACKENDS = [None, "portable"]


def steep(size: int, seed: int = 0) -> np.ndarray:
    """A prior of Zipf's law, shuffled; the last id is the likeliest, twenty ids hardly ever come and twenty never."""
    prior = -1.3 * np.log(np.arange(1, size + 1))
    prior = np.random.default_rng(seed).permutation(prior).astype(np.float32)
    prior[-1], prior[100:120], prior[120:140] = 0.0, -60.0, -np.inf
    return prior


def level(size: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(size).astype(np.float32) * 0.01


def put(path: Path, prior: np.ndarray, signs: np.ndarray | None = None) -> None:
    """Write the file anew with this prior [V], and these codes, booleans [V, K]."""
    tensors = {"head.prior.values": ("float32", prior.shape, prior.astype("<f4").tobytes())}
    if signs is not None:
        wide = np.zeros((len(signs), -(-signs.shape[1] // 32) * 32), np.uint8)
        wide[:, : signs.shape[1]] = signs
        words = np.packbits(wide, axis=1, bitorder="little").view("<u4")
        tensors["codes.words"] = ("uint32", words.shape, words.tobytes())
    write_anew(path, tensors)


def skipping_arm(path: Path, size: int, bits: int, parts: str = "sign/code/fixed/float", norm: float = 1.0) -> Path:
    model = random_arm("llama", parts, vocabulary=size, bits=bits, layers=1)
    with torch.no_grad():
        model.head.weight.mul_(norm * torch.linspace(2, 0.2, bits)[:, None])
    return write_arm(model, path)


def choices(engine: Engine, when: str, draws: list[Sampling], steps: int = 6) -> tuple[list, list[int]]:
    """What a session draws after each of some tokens; the bytes of codes read each time."""
    engine.skip_codes(when)
    found, read = [], []
    with engine.session() as session:
        for step in range(steps):
            engine.read([session], [[(37 * step + 5) % engine.vocab_size]])
            for draw in draws:
                found += engine.draw([session], [draw])
                read.append(engine.code_bytes)
    return found, read


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("size", "bits", "parts"), [
    (1100, 96, "sign/code/fixed/float"), (5003, 512, "sign/code/trained/bitnet"), (2999, 333, "kron/code/fixed/float"),
    (700, 33, "gf2/code/fixed/float"), (40, 64, "sign/code/fixed/float"),
])  # fmt: skip
def test_choices_are_those_of_all_codes(tmp_path, size, bits, parts, backend) -> None:
    path = skipping_arm(tmp_path / "arm.tfree", size, bits, parts)
    priors = [steep(size), level(size), steep(size) * 2000 + 1e4, np.where(np.arange(size) % 3 == 0, -np.inf, level(size))]
    draws = [*DRAWS, Sampling(temperature=0, **PENALTY | {"seen": [*range(0, size, 7)]}), Sampling(0.8, seed=5)]
    for prior in priors:
        put(path, prior)
        expected = None
        for threads in (1, 2, 3):
            with Engine(path, threads=threads, backend=backend) as engine:
                found, whole = choices(engine, "never", draws)
                expected = expected or found
                assert found == expected and set(whole) == {-(-size // 32) * 32 * -(-bits // 8)}
                for when in ("always", "auto"):
                    assert choices(engine, when, draws)[0] == expected


def test_sessions_together_choose_as_they_do_alone(tmp_path) -> None:
    """Ten at once, each with its own filter and penalty; one that draws from all scores among them or not."""
    size = 4000
    put(path := skipping_arm(tmp_path / "arm.tfree", size, 256), steep(size))
    draws = [*DRAWS, Sampling(top_k=5, seed=9, **PENALTY), Sampling(temperature=0, **PENALTY)] * 2
    rows = [[1 + 3 * i, 5 + i] for i in range(10)]
    with Engine(path, threads=2) as engine:
        engine.skip_codes("always")
        sessions, copies = [engine.session() for _ in rows], [engine.session() for _ in rows]
        alone = [engine.read([s], [row], [draw])[0] for s, row, draw in zip(copies, rows, draws, strict=True)]
        assert engine.read(sessions, rows, draws) == alone
        draws[4] = Sampling(0.9, seed=2)
        alone[4] = engine.draw([copies[4]], [draws[4]])[0]
        assert engine.draw(sessions, draws) == alone


def test_most_codes_are_passed_over(tmp_path) -> None:
    size, bits = 20_000, 512
    path = skipping_arm(tmp_path / "steep.tfree", size, bits, norm=0.3)
    put(path, steep(size))
    with Engine(path, threads=1) as engine:
        assert max(choices(engine, "auto", [GREEDY])[1]) < 0.3 * size * bits / 8
        assert max(choices(engine, "auto", DRAWS[1:2])[1]) < 0.5 * size * bits / 8
        assert set(choices(engine, "auto", [Sampling(0.8)])[1]) == {size * bits // 8}


def test_with_a_flat_prior_codes_stay_as_they_are(tmp_path) -> None:
    """And where hardly any can be passed over, each is read once at most."""
    size, bits = 6400, 512
    path = skipping_arm(tmp_path / "flat.tfree", size, bits, norm=2.0)
    for prior, least in ((np.full(size, -8.0, np.float32), 1.0), (level(size), 0.5)):
        put(path, prior)
        with Engine(path, threads=1) as engine:
            read = choices(engine, "auto", DRAWS[:1])[1]
            assert least * size * bits / 8 <= min(read) <= max(read) <= size * bits / 8


def test_ties_go_to_the_lowest_id_wherever_it_lies(tmp_path) -> None:
    """Twins have the same code and prior and stand far apart; the winner's twin is often met first."""
    size, bits = 6000, 256
    path, half = skipping_arm(tmp_path / "twins.tfree", size, bits, norm=0.5), size // 2
    signs, prior = np.random.default_rng(0).random((size, bits)) < 0.5, steep(size)
    signs[half:], prior[half:] = signs[:half][::-1], prior[:half][::-1]
    put(path, prior, signs)
    for threads in (1, 2):
        with Engine(path, threads=threads) as engine:
            expected, _ = choices(engine, "never", DRAWS)
            assert choices(engine, "always", DRAWS)[0] == expected
            assert all(token < half for token in expected[:: len(DRAWS)])


def test_top_p_cuts_among_equal_scores_by_id(tmp_path) -> None:
    """Three values of the prior and one code: the cut lies among hundreds of equal scores, whose places are not in order of ids."""
    size, bits = 1500, 64
    path = skipping_arm(tmp_path / "equal.tfree", size, bits)
    put(path, np.float32([-2, -1, -3])[np.random.default_rng(0).integers(0, 3, size)], np.ones((size, bits), bool))
    with Engine(path, threads=2) as engine, engine.session() as session:
        engine.read([session], [[5]])
        scores = torch.tensor(session.scores())
        assert len(scores.unique()) == 3
        for seed, top_p in itertools.product(range(4), (0.001, 0.3, 0.62, 0.8, 0.97)):
            wanted = sample_scores(scores[None], top_p=top_p, seed=seed, positions=torch.tensor([0])).item()
            assert engine.draw([session], [Sampling(top_p=top_p, seed=seed)]) == [wanted]


# Each bound alone

BITS, SIZE, FRONT = 512, 1100, 512  # FRONT: places of the first group
STARTS = (0, 64, 128, 256, 384, 504)  # of streams; the last within the last one


@pytest.fixture(scope="module")
def binary(tmp_path_factory):
    """An arm whose hidden state does not come from codes, so that a head can be made for it: the file, the state after token 1."""
    path = write_arm(random_arm("llama", "binary/code/fixed/float", vocabulary=SIZE, bits=BITS, layers=1),
                     tmp_path_factory.mktemp("binary") / "arm.tfree")  # fmt: skip
    with Engine(path, threads=1) as engine, engine.session() as session:
        return path.read_bytes(), np.array(engine.hidden(session, [1])[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("start", STARTS)
def test_a_bound_that_is_just_reached(tmp_path, binary, start, backend) -> None:
    """The winner-to-be has the signs of z from bit ``start`` on and the opposite ones before: its score is as far above its first
    streams as any can be. It leads the second group, behind ids with the opposite signs throughout, and all that follow it are
    hopeless, so that nothing else keeps its block from being passed over. Its prior makes its score equal to the best of the
    others, or some units in the last place more or less. Start 0: only the prior and the sum of all |z| decide; 64 to 384: one,
    two, three, four streams and the rest; 504: all streams, whose look-up tables are off by their error.
    """
    original, hidden = binary
    rng, path = np.random.default_rng(start), tmp_path / "arm.tfree"
    for _ in range(4):
        path.write_bytes(original)
        z = rng.standard_normal(BITS) * np.geomspace(0.6, 0.1, BITS)
        z[504:] = rng.choice([-1, 1], 8) * 0.3  # so that a start of 504 is far from the others' scores
        weight = np.outer(z, hidden / (hidden @ hidden)).astype("<f4")
        write_anew(path, {"head.weight": ("float32", weight.shape, weight.tobytes())})
        signs = np.repeat((z < 0)[None], SIZE, 0)
        first, late = rng.permuted(np.arange(SIZE))[:2]
        signs[late, start:] = z[start:] > 0
        put(path, np.zeros(SIZE, np.float32), signs)
        scores = scores_of(path, backend)
        gap, others = scores[late] - scores[first], np.setdiff1d(np.arange(SIZE), [first, late])
        prior = np.full(SIZE, -1000, np.float32)
        prior[rng.permuted(others)[: FRONT - 1]] = -0.25 * gap
        for ulps, swapped in itertools.product((-2, -1, 0, 1, 2), (False, True)):
            one, other = (late, first) if swapped else (first, late)
            codes = signs.copy()
            codes[[one, other]] = signs[[first, late]]
            prior[one] = 0
            prior[other] = np.float32(-gap)
            prior[other] += ulps * np.spacing(prior[other])
            put(path, prior, codes)
            scores = scores_of(path, backend)
            assert abs(scores[one] - scores[other]) < 1e-5 * gap
            with Engine(path, threads=1, backend=backend) as engine, engine.session() as session:
                engine.skip_codes("always")
                assert engine.read([session], [[1]], [GREEDY]) == [int(np.flatnonzero(scores == scores.max())[0])]
                assert engine.code_bytes < SIZE * BITS / 8


def scores_of(path: Path, backend: str | None) -> np.ndarray:
    with Engine(path, threads=1, backend=backend) as engine, engine.session() as session:
        engine.read([session], [[1]])
        return np.array(session.scores(), np.float32)


# Other ways in


@pytest.mark.parametrize("values", [(3e38, 3e38), (3e38, -3e38)])
def test_hidden_states_that_are_not_finite(tmp_path, binary, values) -> None:
    """Sums with a row of the map overflow: all scores are taken exactly, and are no numbers."""
    path = tmp_path / "arm.tfree"
    path.write_bytes(binary[0])
    weight = np.ones((BITS, len(binary[1])), "<f4")
    weight[3, ::2], weight[3, 1::2] = values
    write_anew(path, {"head.weight": ("float32", weight.shape, weight.tobytes())})
    put(path, steep(SIZE))
    found = []
    for when in ("never", "always"):
        with Engine(path, threads=2) as engine, engine.session() as session:
            engine.skip_codes(when)
            found.append([engine.read([session], [[token]], [draw])[0] for token in (1, 5, 9) for draw in DRAWS])
    assert found[0] == found[1] and all(0 <= token < SIZE for token in found[0])


def test_added_words_are_chosen(tmp_path) -> None:
    """New words get places among the old ones, by their prior."""
    path = tmp_path / "a.tfree"

    def spread(model) -> None:
        model.head.prior.values.copy_(torch.from_numpy(steep(290)).clamp(min=-60))

    export_file(little_checkpoint(tmp_path / "arm", "sign/code/trained/bitnet", change=spread), path, Rounding("int8", "float16"))
    extend(path, [" kingmaker", " riverbank", " zzz"], percentile=100)
    with Engine(path, threads=2) as engine:
        assert engine.vocab_size == 293
        expected, _ = choices(engine, "never", DRAWS)
        assert choices(engine, "always", DRAWS)[0] == expected
        with engine.session() as session:
            engine.read([session], [[292, 5]], [GREEDY])
            assert engine.draw([session], [Sampling(temperature=0)]) == [int(np.argmax(session.scores()))]


def test_codes_before_their_prior_are_refused(tmp_path, monkeypatch) -> None:
    path, parts = skipping_arm(tmp_path / "arm.tfree", 100, 64), Description.parts
    monkeypatch.setattr(Description, "parts", lambda self: sorted(parts(self), key=lambda part: part.name != "codes.words"))
    with pytest.raises(UserError, match="the prior must come before the codes"):
        Engine(path, threads=1)
    with PackedFile(path) as file:
        assert "codes.words" in file.tensors
