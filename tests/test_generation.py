"""Generation: the tokens that scores, seed and settings say, with or without batch and cache; text; ends."""

import io
import random

import pytest
import torch
from test_arms import make

from kernels.code_loss import sample_scores
from models.bodies.layers import PackedBitLinear
from models.data.shards import TokenData
from models.errors import UsageError, UserError
from models.generation.loop import Piece, Timing, complete, generate, noise_position, prompt_ids
from models.generation.output import TextOutput
from models.generation.settings import GenerationSettings
from models.generation.text import TextStream
from models.generation.torch_reader import TorchReader
from models.packed.export import pack_model

PROMPTS = ["The river", "", "In winter the captain remembers a letter near the old mill. The horse", "São", "The river"]
ARMS = [
    ("gpt2-tiny", "table", "table", "trained", "float"),
    ("llama-tiny", "sign", "code", "fixed", "float"),
    ("gemma3-tiny", "kron", "code", "none", "bitnet"),
    ("gemma3-tiny", "table", "tied", "none", "float"),
]
FILTERS = [
    {"temperature": 0},
    {"temperature": 1.3, "top_k": 50, "top_p": 0.9, "min_p": 0.001, "seed": 5},
    {"temperature": 1.0, "top_p": 0.7},
]


@pytest.fixture(scope="module")
def tokenizer(data_dir):
    return TokenData.open(data_dir, verify="quick").tokenizer


def lively(data_dir, *arm, dtype=torch.float64):
    """An arm whose scores differ clearly from token to token. In fp64 rounding cannot decide a draw (or a ternary value)."""
    torch.manual_seed(1)
    model = make(data_dir, *arm)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.to(dtype).eval()


def one_by_one(model, tokenizer, prompt, settings, sample=0):
    """The definition: whole rows read again, scores stored, one token drawn."""
    ids = start = prompt_ids(tokenizer, prompt, 128)
    for step in range(settings.max_tokens):
        with torch.no_grad():
            scores = model.logits(torch.tensor([ids]))[:, -1]
        positions = torch.tensor([noise_position(start, sample) + step])
        ids = [*ids, sample_scores(scores, positions=positions, **settings.sampling(scores.shape[-1])).item()]
    return ids[len(start) :]


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("arm", ARMS, ids="/".join)
def test_tokens_are_those_of_the_definition(data_dir, tokenizer, arm, options):
    """Cache against none, packed codes against stored scores, a batch of ragged prompts against each alone: all at once."""
    model = lively(data_dir, *arm)
    settings = GenerationSettings(**options, max_tokens=10, ignore_eos=True)
    found = complete(TorchReader(model), tokenizer, PROMPTS, settings)
    assert [c.prompt for c in found] == PROMPTS and {c.reason for c in found} == {"length"}
    assert found[0].tokens == found[4].tokens and len({tuple(c.tokens) for c in found}) == 4
    assert len(prompt_ids(tokenizer, PROMPTS[2], 128)) in range(25, 33), "gemma3's window of 32 turns over while tokens are drawn"
    for place in (1, 2):
        assert found[place].tokens == one_by_one(model, tokenizer, PROMPTS[place], settings)


@pytest.mark.parametrize("arm", [ARMS[1], ARMS[3]], ids="/".join)
def test_fp32_rows_do_not_depend_on_their_neighbours_or_the_cache(data_dir, tokenizer, arm):
    model = lively(data_dir, *arm, dtype=torch.float32)
    for options in FILTERS[:2]:
        settings = {**options, "max_tokens": 10, "samples": 2}
        whole = complete(TorchReader(model), tokenizer, PROMPTS[:4], GenerationSettings(**settings))
        reader, chosen = TorchReader(model), GenerationSettings(**settings)
        alone = [c for prompt in PROMPTS[:4] for c in complete(reader, tokenizer, [prompt], chosen)]
        parts = complete(TorchReader(model, cached=False), tokenizer, PROMPTS[:4], GenerationSettings(**settings, batch_size=3))
        assert whole == alone == parts


def test_seeds_and_samples(data_dir, tokenizer):
    model = lively(data_dir, *ARMS[1], dtype=torch.float32)

    def drawn(**options):
        settings = GenerationSettings(max_tokens=8, ignore_eos=True, **options)
        return [c.tokens for c in complete(TorchReader(model), tokenizer, PROMPTS[:2], settings)]

    several = drawn(samples=3)
    assert len({tuple(tokens) for tokens in several}) == 6, "samples differ"
    assert drawn() == several[::3] and drawn() != drawn(seed=1), "the first sample is what one sample gives"
    assert drawn(temperature=0, samples=2)[0] == drawn(temperature=0, samples=2)[1]
    assert drawn(temperature=0) == drawn(top_k=1) == drawn(top_p=1e-9) == drawn(min_p=1.0) == drawn(temperature=0, seed=3)
    assert drawn(top_k=10**6) == drawn(), "more than the vocabulary is all of it"


def test_a_repetition_penalty_is_for_the_tokens_of_the_row(data_dir, tokenizer):
    model = lively(data_dir, *ARMS[1])
    settings = GenerationSettings(temperature=0, repetition_penalty=1.5, max_tokens=10, ignore_eos=True)
    ids = prompt_ids(tokenizer, PROMPTS[0], 128)
    for _ in range(10):
        with torch.no_grad():
            scores = model.logits(torch.tensor([ids]))[0, -1]
        penalised = [s / 1.5 if s > 0 else s * 1.5 for s in scores.tolist()]
        ids.append(max(range(len(scores)), key=lambda v: penalised[v] if v in ids else scores[v].item()))
    found = complete(TorchReader(model), tokenizer, PROMPTS[:2], settings)[0].tokens
    assert found == ids[-10:]
    assert found != complete(TorchReader(model), tokenizer, PROMPTS[:1], GenerationSettings(temperature=0, max_tokens=10))[0].tokens


def test_packed_linears_give_the_same_tokens(data_dir, tokenizer):
    model = lively(data_dir, *ARMS[2], dtype=torch.float32)
    settings = GenerationSettings(max_tokens=8)
    before = complete(TorchReader(model), tokenizer, PROMPTS[:2], settings)
    model = pack_model(model)
    assert sum(isinstance(m, PackedBitLinear) for m in model.modules()) == 6 * 7
    assert complete(TorchReader(model), tokenizer, PROMPTS[:2], settings) == before


def test_the_end_of_a_document_and_the_context(data_dir, tokenizer):
    model = lively(data_dir, *ARMS[0], dtype=torch.float32)
    with torch.no_grad():
        model.head.prior.values[tokenizer.eos_id] = 1000.0
    ended = complete(TorchReader(model), tokenizer, PROMPTS[:1], GenerationSettings())[0]
    assert (ended.tokens, ended.text, ended.reason) == ([tokenizer.eos_id], "", "end")
    timing = Timing()
    endless = GenerationSettings(max_tokens=1000, ignore_eos=True)
    full = complete(TorchReader(model), tokenizer, PROMPTS[:1], endless, timing=timing)[0]
    prompt = prompt_ids(tokenizer, PROMPTS[0], 128)
    assert len(full.tokens) == 128 - len(prompt) + 1, "the last token is drawn, and never read"
    assert (full.reason, full.text) == ("context", "")
    assert (timing.prompt_tokens, timing.new_tokens) == (len(prompt), len(full.tokens) - 1)
    assert timing.prompt_seconds > 0 and timing.new_seconds > 0
    exact = tokenizer.decode([300] * 127)  # with the end-of-document token before it, a prompt that is the whole context
    while len(prompt_ids(tokenizer, exact, 10**6)) > 128:
        exact = exact[1:]
    assert len(complete(TorchReader(model), tokenizer, [exact], GenerationSettings(ignore_eos=True))[0].tokens) >= 1


def test_a_stop_text_ends_a_row_wherever_its_tokens_end(data_dir, tokenizer):
    model = lively(data_dir, *ARMS[0], dtype=torch.float32)
    settings = {"max_tokens": 30, "ignore_eos": True, "samples": 3}
    free = complete(TorchReader(model), tokenizer, ["The river"], GenerationSettings(**settings))
    text = free[1].text
    inside = next(i for i in range(8, len(text)) if text.find(text[i : i + 5]) == i)  # five characters: more than one token
    stop = text[inside : inside + 5]
    ended = complete(TorchReader(model), tokenizer, ["The river"], GenerationSettings(**settings, stop=("never in there", stop)))
    assert (ended[1].text, ended[1].reason) == (text[:inside], "stop")
    assert len(ended[1].tokens) < 30 and free[1].tokens[: len(ended[1].tokens)] == ended[1].tokens
    for before, after in zip(free, ended, strict=True):
        assert after.text == before.text.split(stop)[0], "the other rows go on"


def test_interrupted_rows_keep_what_they_have(data_dir, tokenizer):
    model = lively(data_dir, *ARMS[0], dtype=torch.float32)
    settings = {"max_tokens": 20, "ignore_eos": True}
    free = complete(TorchReader(model), tokenizer, PROMPTS[:3], GenerationSettings(**settings))
    asked = iter([False, False, True])
    rows = {i: [] for i in range(3)}
    in_twos = GenerationSettings(**settings, batch_size=2)
    for piece in generate(TorchReader(model), tokenizer, PROMPTS[:3], in_twos, should_stop=lambda: next(asked)):
        rows[piece.prompt].append(piece)
    assert [[p.token for p in rows[i]] for i in range(3)] == [free[0].tokens[:3] + [None], free[1].tokens[:3] + [None], [None]]
    assert [pieces[-1].reason for pieces in rows.values()] == ["interrupted"] * 3


def test_rows_of_a_prompt_that_was_broken_off_say_so(data_dir, tokenizer):
    class Stopped(TorchReader):
        def start(self, prompts, new, should_stop):
            return super().start(prompts, new, should_stop) and not should_stop()

    reader, timing = Stopped(lively(data_dir, *ARMS[0], dtype=torch.float32)), Timing()
    settings = GenerationSettings(samples=2, batch_size=2)
    pieces = list(generate(reader, tokenizer, PROMPTS[:2], settings, should_stop=lambda: True, timing=timing))
    assert [(piece.prompt, piece.sample, piece.token, piece.text) for piece in pieces] == [
        (prompt, sample, None, "") for prompt in range(2) for sample in range(2)
    ]
    assert {piece.reason for piece in pieces} == {"interrupted"} and timing.prompt_tokens == 0


def test_wrong_prompts_and_settings(data_dir, tokenizer):
    model = lively(data_dir, *ARMS[0], dtype=torch.float32)
    too_long, not_text = r"prompt 2: has [\d,]+ tokens, and the model's context is 128", "prompt 2: not valid UTF-8"
    for prompt, message in (("word " * 500, too_long), ("\udcff", not_text)):
        with pytest.raises(UsageError, match=message):
            generate(TorchReader(model), tokenizer, ["fine", prompt], GenerationSettings())
    model.description = model.description.__class__(**vars(model.description) | {"vocab_size": 7})
    with pytest.raises(UserError, match="tokenizer is not the model's: it has 320 ids, the model 7"):
        generate(TorchReader(model), tokenizer, ["fine"], GenerationSettings())
    wrong = {"temperature": -1.0, "top_k": 0, "top_p": 0.0, "min_p": 1.5, "repetition_penalty": 0.0, "seed": 1 << 63, "samples": 0,
             "max_tokens": True, "batch_size": 2.5, "stop": ("",)}  # fmt: skip
    with pytest.raises(UsageError) as caught:
        GenerationSettings(**wrong)
    assert all(name in str(caught.value) for name in wrong) and "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="temperature"):
        GenerationSettings(temperature=float("nan"))


# --- text ---------------------------------------------------------------------------------------------------------------------

BYTES = [bytes([b]) for b in range(256)]


def test_no_half_of_a_character_is_returned():
    text = "naïve São 日本 🙂👩‍🔬."
    stream = TextStream(BYTES)
    pieces = [stream.push(b) for b in text.encode()]
    assert "".join(pieces) == text and "\ufffd" not in text
    assert [p for p in pieces if p] == list(text), "each character comes whole, with its last byte"
    assert stream.finish() == ""
    cut = TextStream(BYTES)
    assert [cut.push(b) for b in "🙂".encode()[:3]] == ["", "", ""] and cut.finish() == "\ufffd"


def test_any_bytes_give_what_decoding_them_at_once_gives():
    draw = random.Random(3)
    for _ in range(300):
        content = bytes(draw.choice(b"ab\xc3\xa9\xf0\x9f\x99\x82\xff") for _ in range(draw.randrange(12)))
        stops = ["".join(draw.choice("abé") for _ in range(draw.randrange(1, 4))) for _ in range(draw.randrange(3))]
        stream = TextStream(BYTES, stops)
        text = "".join(stream.push(b) for b in content) + stream.finish()
        whole = content.decode("utf-8", "replace")
        ends = [place for stop in stops if (place := whole.find(stop)) >= 0]
        assert stream.stopped == bool(ends)
        # The first stop text to be complete ends it; of those complete with the same character, the one that began first.
        done = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole]
        assert text == (whole[: min(done)[1]] if ends else whole)


def test_text_waits_only_as_long_as_it_may_begin_a_stop_text():
    stream = TextStream([b"\n", b"\n\n", b"User", b":", b"x"], ["\n\nUser:", "\n\n\n"])
    assert [stream.push(i) for i in (4, 0, 4)] == ["x", "", "\nx"]
    assert [stream.push(i) for i in (1, 2, 4)] == ["", "", "\n\nUserx"]
    assert [stream.push(i) for i in (1, 2, 3)] == ["", "", ""] and stream.stopped
    assert stream.push(4) == "" and stream.finish() == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_several_continuations_are_labelled_and_come_in_order(capsys):
    out = io.StringIO()
    text = TextOutput(["A", "B"], 2, True, out)
    for prompt, sample, piece, reason in (
        (0, 0, " one", None), (1, 0, " three", None), (0, 1, " two", "context"), (0, 0, " more", None),
    ):  # fmt: skip
        text.add(Piece(prompt, sample, 1, piece, reason))
    assert out.getvalue() == "--- prompt 1, sample 1 ---\nA one more", "the first streams, the rest wait"
    for piece in (Piece(0, 0, 1, "", "length"), Piece(1, 1, 1, " four", "stop"), Piece(1, 0, 1, "", "interrupted")):
        text.add(piece)
    assert out.getvalue() == (
        "--- prompt 1, sample 1 ---\nA one more\n\n--- prompt 1, sample 2 ---\nA two\n\n"
        "--- prompt 2, sample 1 ---\nB three\n\n--- prompt 2, sample 2 ---\nB four\n"
    )
    assert capsys.readouterr().err == (
        "prompt 1, sample 2: stopped because the context is full\nprompt 2, sample 1: stopped because it was interrupted\n"
    )


def test_a_terminal_is_not_given_control_characters(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    out, plain = Terminal(), io.StringIO()
    for target in (out, plain):
        TextOutput(["A"], 1, True, target).add(Piece(0, 0, 1, "\x1b[2J\r\x07\x9b\n\tb", "length"))
    assert out.getvalue() == "\x1b[1mA\x1b[0m\u241b[2J\u240d\u2407\ufffd\n\tb\n"
    assert plain.getvalue() == "A\x1b[2J\r\x07\x9b\n\tb\n"
