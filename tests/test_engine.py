"""The engine against the same model in PyTorch: hidden states, greedy choices, log-probabilities, draws; and against itself."""

import itertools
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from engine_support import VOCABULARY, random_arm, write_arm
from packed_support import write_anew

from kernels.code_loss import sample_scores
from models.engine.engine import Engine
from models.engine.library import ContextFull
from models.engine.reader import EngineReader
from models.engine.session import Sampling
from models.errors import UserError
from models.generation.loop import complete
from models.generation.settings import GenerationSettings
from models.generation.torch_reader import TorchReader
from models.packed.codec import PackedCodec
from models.packed.file import PackedFile
from models.packed.sections import Rounding, model_tensors, quantise_rows, row_scales
from models.packed.writing import write_file

PARTS = (
    "table/tied/none/float", "table/table/fixed/bitnet", "binary/table/none/float", "gf2/code/fixed/bitnet",
    "sign/code/trained/bitnet", "sign/code/none/float", "kron/table/none/bitnet", "kron/code/fixed/float",
)  # fmt: skip
IDS = torch.randint(0, VOCABULARY, (90,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def arms(tmp_path_factory):
    """Makes an arm once: (kind, parts, dtype) -> its model in PyTorch, its file."""
    made = {}

    def make(kind: str, parts: str, dtype: str = "float32", **options):
        key = kind, parts, dtype, repr(options)
        if key not in made:
            model = random_arm(kind, parts, **options)
            made[key] = model, write_arm(model, tmp_path_factory.mktemp("arms") / "arm.tfree", dtype)
        return made[key]

    return make


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma3"])
def test_agrees_with_pytorch(arms, kind, parts) -> None:
    """Keys and values in float16 make the difference; a ternary layer rounds to int8 after it, one step further at most."""
    model, path = arms(kind, parts)
    close, ids = (0.02, IDS) if parts.endswith("bitnet") else (2e-3, IDS)
    with torch.inference_mode():
        expected, scores = model(torch.tensor([ids]))[0], model.logits(torch.tensor([ids]))[0]
        logprobs, greedy = model.head.score_targets(expected[:-1], torch.tensor(ids[1:]))
    with Engine(path, threads=2) as engine, engine.session() as session, engine.session() as other:
        hidden = torch.tensor(engine.hidden(session, ids))
        assert relative(hidden, expected) < close
        error = (torch.tensor(session.scores()) - scores[-1]).abs().max().item()
        assert error < 5 * close * scores[-1].std()
        found, best = other.score(ids[:-1], ids[1:])
        assert (torch.tensor(found) - logprobs).abs().max() < 10 * close * scores.std()
        chosen, certain = [], []
        for place, row in enumerate(scores):
            if place == 0:
                session.rewind(0)
            chosen += engine.read([session], [[ids[place]]], [Sampling(temperature=0)])
            top = row.topk(2).values
            certain.append((top[0] - top[1]).item() > 5 * close * row.std().item())
        wanted = scores.argmax(1).tolist()
    assert sum(certain) >= 20
    assert all(c == w for c, w, sure in zip(chosen, wanted, certain, strict=True) if sure)
    assert all(b == g for b, g, sure in zip(best, greedy.tolist(), certain, strict=False) if sure)


@pytest.mark.parametrize("dtype", ["float16", "int8"])
@pytest.mark.parametrize("parts", ["table/table/none", "table/tied/fixed", "kron/code/none", "sign/code/none"])
@pytest.mark.parametrize("backend", [None, "portable"])
def test_rounded_matrices_are_those_of_the_file(arms, dtype, parts, backend) -> None:
    parts = f"{parts}/float"
    model, path = arms("gpt2", parts, dtype)
    state = model.state_dict()
    for name, tensor in state.items():
        matrix = tensor.dim() == 2 and tensor.is_floating_point()
        lift_or_map = (name, parts.split("/")[0]) == ("interface.weight", "sign") or (name == "head.weight" and "code" in parts)
        if matrix and dtype == "int8" and not lift_or_map:
            state[name] = quantise_rows(tensor, row_scales(tensor)).float() * row_scales(tensor)[:, None]
        elif matrix and dtype == "float16":
            state[name] = tensor.half().float()
    rounded = random_arm("gpt2", parts)
    rounded.load_state_dict(state)
    with torch.inference_mode(), Engine(path, threads=1, backend=backend) as engine, engine.session() as session:
        assert relative(torch.tensor(engine.hidden(session, IDS)), rounded(torch.tensor([IDS]))[0]) < 2e-3
        assert relative(torch.tensor(session.scores()), rounded.logits(torch.tensor([IDS]))[0, -1]) < 5e-3


LONG = [(i * 37 + i * i) % VOCABULARY for i in range(300)]


@pytest.mark.parametrize("backend", [None, "portable"])
@pytest.mark.parametrize("parts", ["sign/code/trained/bitnet", "kron/table/none/float"])
def test_a_prompt_at_once_gives_the_same_bits_as_token_by_token(arms, parts, backend) -> None:
    """Past the window (40) the ring of 128 slots comes round twice, and global layers hold 300."""
    _, path = arms("gemma3", parts)
    with Engine(path, threads=2, backend=backend) as engine:
        at_once, single, pieces = (engine.session() for _ in range(3))
        whole = engine.hidden(at_once, LONG)
        assert [engine.hidden(single, [token])[0] for token in LONG] == whole
        cuts = [0, 1, 33, 97, 98, 161, 300]
        assert [row for a, b in itertools.pairwise(cuts) for row in engine.hidden(pieces, LONG[a:b])] == whole


def test_a_window_sees_what_the_model_sees(arms) -> None:
    model, path = arms("gemma3", "binary/table/none/float")
    with torch.inference_mode(), Engine(path, threads=2) as engine, engine.session() as session:
        expected = model(torch.tensor([LONG]))[0]
        assert relative(torch.tensor(engine.hidden(session, LONG))[200:], expected[200:]) < 2e-3


@pytest.mark.parametrize("kv", ["float16", "int8"])
def test_threads_change_no_bit(arms, kv) -> None:
    _, path = arms("llama", "sign/code/fixed/bitnet")
    draws = [Sampling(0), Sampling(0.9, seed=3), Sampling(0.9, top_k=7, position=9), Sampling(1.3, top_p=0.8), Sampling(min_p=0.1)]
    results = []
    for threads in (1, 2, 3, 8):
        with Engine(path, threads=threads, kv=kv) as engine, engine.session() as session, engine.session() as other:
            hidden = engine.hidden(session, IDS)
            drawn = [engine.draw([session], [draw]) for draw in draws]
            results.append((hidden, drawn, other.score(IDS[:40], IDS[1:41]), session.nbytes))
    assert all(result == results[0] for result in results[1:])


def test_int8_keys_and_values_are_close(arms) -> None:
    model, path = arms("llama", "table/table/none/float")
    with torch.inference_mode(), Engine(path, threads=1, kv="int8") as engine, engine.session() as session:
        error = relative(torch.tensor(engine.hidden(session, IDS)), model(torch.tensor([IDS]))[0])
    assert 1e-4 < error < 0.05


def test_sessions_read_together_as_they_do_alone(arms) -> None:
    _, path = arms("gemma3", "sign/code/trained/bitnet")
    rows = [IDS[:50], IDS[50:51], IDS[20:90], IDS[3:9]]
    with Engine(path, threads=2) as engine:
        together, alone = [engine.session() for _ in rows], [engine.session() for _ in rows]
        greedy = [Sampling(temperature=0)] * len(rows)
        tokens = [engine.read([session], [row], [greedy[0]])[0] for session, row in zip(alone, rows, strict=True)]
        assert engine.read(together, rows, greedy) == tokens
        for _ in range(20):
            after = engine.read(together, [[token] for token in tokens], greedy)
            assert after == [engine.read([s], [[t]], [greedy[0]])[0] for s, t in zip(alone, tokens, strict=True)]
            tokens = after


@pytest.mark.parametrize("parts", ["sign/code/fixed/bitnet", "table/table/fixed/float"])
def test_draws_are_those_of_the_kernels(arms, parts) -> None:
    """From the engine's own exact scores PyTorch draws the same tokens, for every filter."""
    _, path = arms("gpt2", parts)
    options = [
        {"temperature": t, "top_k": k, "top_p": p, "min_p": m}
        for t, k, p, m in itertools.product((0.6, 1.7), (None, 1, 40, VOCABULARY), (1.0, 0.55), (0.0, 0.2))
    ]
    with Engine(path, threads=2) as engine, engine.session() as session:
        engine.read([session], [IDS])
        scores = torch.tensor(session.scores())
        assert engine.draw([session], [Sampling(temperature=0)]) == [scores.argmax().item()]
        different = set()
        for number, option in enumerate(options):
            seeds = [number - 7, (1 << 62) + number, -(1 << 63)]
            positions = [0, 12_345, (1 << 63) - 1]
            wanted = [
                sample_scores(scores[None], **option, seed=seed, positions=torch.tensor([position])).item()
                for seed, position in zip(seeds, positions, strict=True)
            ]
            draws = [
                Sampling(**option | {"top_k": option["top_k"] or 0}, seed=seed, position=position)
                for seed, position in zip(seeds, positions, strict=True)
            ]
            assert [engine.draw([session], [draw])[0] for draw in draws] == wanted, option
            different |= set(wanted)
        assert len(different) > 10


@pytest.mark.parametrize("penalty", [1.8, 0.6])
@pytest.mark.parametrize("parts", ["sign/code/fixed/float", "binary/table/none/float"])
def test_repetition_penalty(arms, parts, penalty) -> None:
    _, path = arms("llama", parts)
    with Engine(path, threads=2) as engine, engine.session() as session:
        engine.read([session], [IDS])
        scores = torch.tensor(session.scores())
        seen = sorted({*IDS, *scores.topk(20).indices.tolist()})
        found = scores[seen]
        scores[seen] = torch.where(found > 0, found / penalty, found * penalty)
        for option in ({"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 0.9, "top_k": 30}, {"top_p": 0.5}):
            for seed in range(8):
                wanted = sample_scores(scores[None], **option, seed=seed, positions=torch.tensor([4])).item()
                draw = Sampling(**option, seed=seed, position=4, repetition_penalty=penalty, seen=seen)
                assert engine.draw([session], [draw]) == [wanted], (option, seed)


def test_greedy_is_exact_where_the_codes_tables_are_not(tmp_path) -> None:
    """Many codes that differ in few bits: their scores lie closer than the tables' error."""
    close = random_arm("llama", "sign/code/none/float")
    words, flips = close.codes.words, torch.arange(VOCABULARY)
    words[:] = words[0].clone()
    words[:, 1] ^= (1 << (flips % 31)).int() ^ (1 << (flips // 31 % 31)).int()
    path = write_arm(close, tmp_path / "close.tfree")
    with Engine(path, threads=2) as engine, engine.session() as session:
        for token in IDS:
            drawn = engine.read([session], [[token]], [Sampling(temperature=0)])
            scores = torch.tensor(session.scores())
            assert drawn == [scores.argmax().item()]
            assert engine.draw([session], [Sampling(top_k=5, seed=1)]) == [sample_scores(scores[None], seed=1, top_k=5).item()]


def test_logprobs_are_those_of_all_scores(arms) -> None:
    for parts in ("sign/code/trained/bitnet", "table/tied/none/float"):
        _, path = arms("llama" if "tied" in parts else "gemma3", parts)
        with Engine(path, threads=2) as engine, engine.session() as session, engine.session() as other:
            targets = [None if i % 3 == 0 else (i * 91) % VOCABULARY for i in range(len(IDS))]
            targets[7] = engine.read([other], [IDS[:8]], [Sampling(temperature=0)])[0]
            found, greedy = session.score(IDS, targets)
            for place in (7, 8, 20, 89):
                other.rewind(0)
                engine.read([other], [IDS[: place + 1]])
                logprobs = torch.tensor(other.scores(), dtype=torch.float64).log_softmax(0)
                assert abs(found[place] - logprobs[targets[place]].item()) < 3e-6
            assert found[0] == 0 and greedy[0] and greedy[7] and sum(greedy) < 45


def test_the_same_loop_gives_the_same_text(arms) -> None:
    model, path = arms("gpt2", "kron/code/none/float")
    settings = GenerationSettings(temperature=0.7, top_k=50, samples=3, max_tokens=12, repetition_penalty=1.3, seed=11)
    codec = PackedCodec(PackedFile(path))
    codec.encode = lambda text: [int(word) for word in text.split()]
    prompts = ["5 17 900", "33"]
    with Engine(path, threads=2) as engine:
        assert complete(EngineReader(engine), codec, prompts, settings) == complete(TorchReader(model), codec, prompts, settings)


def test_copies_and_rewinding(arms) -> None:
    _, path = arms("gemma3", "sign/code/trained/bitnet")
    with Engine(path, threads=1) as engine, engine.session() as session:
        engine.read([session], [IDS[:70]])
        with session.copy() as copy:
            expected = engine.hidden(copy, IDS[70:80])
        assert engine.hidden(session, IDS[70:80]) == expected
        session.rewind(70)
        assert len(session) == 70 and engine.hidden(session, IDS[70:80]) == expected
        engine.read([session], [LONG[:200]])
        with pytest.raises(UserError, match="no longer holds"):
            session.rewind(100)
        session.rewind(0)
        assert engine.hidden(session, IDS[:1]) == engine.hidden(engine.session(), IDS[:1])


def test_two_engines_in_two_threads(arms) -> None:
    _, path = arms("llama", "sign/code/fixed/bitnet")
    with Engine(path, threads=2) as first, Engine(path, threads=3) as second:
        alone = list(first.generate_ids(IDS[:5], 60, Sampling(temperature=0.8, seed=2)))
        results = {}

        def work(name: str, engine: Engine) -> None:
            results[name] = [list(engine.generate_ids(IDS[:5], 60, Sampling(temperature=0.8, seed=2))) for _ in range(3)]

        threads = [threading.Thread(target=work, args=pair) for pair in (("a", first), ("b", second), ("c", first))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == dict.fromkeys("abc", [alone] * 3)


@pytest.mark.parametrize("parts", ["sign/code/fixed/float", "table/table/none/float"])
def test_scores_that_are_not_finite_give_an_id_in_range(tmp_path, parts) -> None:
    model = random_arm("llama", parts)
    with torch.no_grad():
        model.body.blocks[0].mlp.down.weight[0, 0] = 3e38
        model.body.blocks[0].mlp.up.weight[0] = 1e30
    path = write_arm(model, tmp_path / "huge.tfree")
    with Engine(path, threads=2) as engine, engine.session() as session:
        for draw in (Sampling(0), Sampling(1.0), Sampling(top_k=5), Sampling(top_p=0.5)):
            session.rewind(0)
            assert engine.read([session], [IDS[:40]], [draw]) == [0]
        session.rewind(0)
        logprobs, _ = session.score([3], [5])
        assert logprobs[0] != logprobs[0]


def test_what_cannot_be_read_is_refused(arms) -> None:
    _, path = arms("gpt2", "table/tied/none/float")
    with Engine(path, threads=2) as engine, engine.session() as session:
        for tokens in ([VOCABULARY], [-1], [1 << 31], [0] * 193, []):
            with pytest.raises((UserError, ValueError)):
                engine.read([session], [tokens])
        with pytest.raises(ContextFull, match="192"):
            engine.read([session], [[0] * 193])
        with pytest.raises(UserError, match="twice"):
            engine.read([session, session], [[1], [1]])
        with pytest.raises(UserError):
            engine.draw([session], [Sampling()])  # nothing was read
        engine.read([session], [[1]])
        for draw in (Sampling(float("nan")), Sampling(-1.0), Sampling(top_p=0.0), Sampling(min_p=2.0), Sampling(top_k=-1)):
            with pytest.raises(UserError):
                engine.draw([session], [draw])
        with pytest.raises(ValueError):
            session.score([1], [VOCABULARY - 1, 2])
        with pytest.raises(UserError):
            session.score([1], [VOCABULARY])
        assert len(session) == 1
        closed = engine.session()
    for use in (lambda: closed.copy(), lambda: engine.session(), lambda: engine.read([closed], [[1]])):
        with pytest.raises(ValueError, match="closed"):
            use()


WRONG = {
    "heads": 3, "width": 1 << 24, "layers": 100_000, "ffn": 1 << 31, "context": -1, "head_dim": 7, "kv_heads": 0, "eps": "1e-5",
}  # fmt: skip


@pytest.mark.parametrize("field", WRONG)
def test_a_description_that_does_not_fit_its_tensors_is_refused(tmp_path, field) -> None:
    model = random_arm("llama", "sign/code/none/bitnet")
    described = model.description.to_json()
    described["body"][field] = WRONG[field]
    path = tmp_path / "wrong.tfree"
    write_file(path, {"model": described}, model_tensors(model.state_dict(), model.description.arm, Rounding("float32")))
    with pytest.raises(UserError):
        Engine(path, threads=1)


def test_neither_torch_nor_numpy_is_loaded(arms) -> None:
    _, path = arms("gemma3", "sign/code/trained/bitnet")
    code = f"""
import sys
from models.engine.engine import Engine
from models.engine.session import Sampling
with Engine({str(path)!r}, threads=2) as engine:
    print(*engine.generate_ids([5, 6], 4, Sampling(temperature=0)))
assert not {{"torch", "numpy", "tokenizers"}} & set(sys.modules), set(sys.modules)
"""
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 4


@pytest.mark.parametrize(("change", "said"), [
    ({"body": {"heads": 10**6, "kv_heads": 10**6}}, "no room for"), ({"body": {"eps": 10**400}}, "eps must be a finite number"),
    ({"input_scale": 10**400}, "input_scale must be a finite number"),
])  # fmt: skip
def test_numbers_of_a_description_that_python_cannot_compute_with_are_refused(tmp_path, change, said) -> None:
    path = write_arm(random_arm("llama", "table/table/none/float"), tmp_path / "a.tfree")
    with PackedFile(path) as file:
        model = file.model | change | {"body": file.model["body"] | change.get("body", {})}
    write_anew(path, model=model)
    with pytest.raises(UserError, match=f"{path}: .*{said}"):
        Engine(path, 1)


def test_tensors_of_a_shape_or_name_that_no_model_has_are_refused(tmp_path) -> None:
    path = write_arm(random_arm("llama", "table/table/none/bitnet"), tmp_path / "a.tfree")
    for name in ("tokenizer.bytes", "tokenizer.ends", "tokenizer.json"):
        (less := tmp_path / "less.tfree").write_bytes(path.read_bytes())
        write_anew(less, {name: None})
        with Engine(less, 1) as engine, pytest.raises(UserError, match=f"no {name}"):
            engine.tokenizer.encode("a")
    write_anew(path, {"body.blocks.0.attention.q.packed": ("uint8", (), b"\0")})
    with pytest.raises(UserError, match="expected rows of 64 weights"):
        Engine(path, 1)


def test_a_forked_child_is_told_that_it_has_no_threads(arms) -> None:
    """In a process of its own, which a hang must not outlive."""
    _, path = arms("gemma3", "sign/code/trained/bitnet")
    program = (
        "import os, signal; from models.engine.engine import Engine; "
        f"engine = Engine({str(path)!r}, 2); session = engine.session(); engine.read([session], [[1]]); "
        "child = os.fork(); signal.alarm(20)\n"
        "if not child:\n"
        "    try: engine.read([session], [[1]])\n"
        "    except ValueError as error: os._exit(7 if 'before a fork' in str(error) and not engine.close() else 1)\n"
        "    os._exit(2)\n"
        "engine.read([session], [[1]]); raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7, done.stderr
