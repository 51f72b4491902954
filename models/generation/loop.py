"""The loop: prompts in, pieces of text out, a token of every row per step. Whatever reads and draws tokens is a ``Reader``."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from models.errors import UsageError, UserError
from models.generation.reader import Reader, TextCodec
from models.generation.settings import GenerationSettings
from models.generation.text import TextStream

REASONS = {
    "end": "the document ended",
    "stop": "a stop text came",
    "length": "max_tokens were drawn",
    "context": "the context is full",
    "interrupted": "it was interrupted",
}


@dataclass(frozen=True)
class Piece:
    """What one token added to one continuation. ``reason`` (a key of REASONS) is set in a continuation's last piece."""

    prompt: int  # index of the prompt
    sample: int  # which of its continuations
    token: int | None  # None only where an interruption ends the row
    text: str  # often empty: see TextStream
    reason: str | None


@dataclass
class Completion:
    """A whole continuation."""

    prompt: str
    sample: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)  # those of the end of a document and of a stop text too
    reason: str | None = None


@dataclass
class Timing:
    """Seconds in the model and its head, without those of whoever takes the pieces."""

    prompt_tokens: int = 0  # of each prompt of a batch once, however many samples it has there
    prompt_seconds: float = 0.0  # until the first token of every row is drawn
    new_tokens: int = 0  # after the first of every row
    new_seconds: float = 0.0


def generate(
    reader: Reader,
    tokenizer: TextCodec,
    prompts: Sequence[str],
    settings: GenerationSettings,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    timing: Timing | None = None,
) -> Iterator[Piece]:
    """Continue each prompt as ``settings`` say; yields pieces of all rows of a batch in turn.

    Every prompt begins a document: the token that stood before one in training is put before it. Rows that ``should_stop``, asked
    after each step and between parts of long prompts, breaks off end with the reason "interrupted".

    Raises UsageError, before anything is computed, for a prompt that is not text or exceeds the context; UserError when the
    tokenizer is not the model's.
    """
    if tokenizer.vocab_size != reader.vocab_size:
        sizes = f"{tokenizer.vocab_size:,} ids, the model {reader.vocab_size:,}"
        raise UserError(f"the tokenizer is not the model's: it has {sizes}")
    starts = [prompt_ids(tokenizer, prompt, reader.context, f"prompt {i + 1}") for i, prompt in enumerate(prompts)]
    rows = [
        _Row(i, sample, list(start), noise_position(start, sample), TextStream(tokenizer.tokens, settings.stop))
        for i, start in enumerate(starts)
        for sample in range(settings.samples)
    ]
    ends = _Ends(None if settings.ignore_eos else tokenizer.eos_id, settings.max_tokens, reader.context)
    batches = [rows[a : a + settings.batch_size] for a in range(0, len(rows), settings.batch_size)]
    return _run(reader, batches, ends, settings, should_stop, timing or Timing())


def complete(
    reader: Reader,
    tokenizer: TextCodec,
    prompts: Sequence[str],
    settings: GenerationSettings,
    *,
    timing: Timing | None = None,
) -> list[Completion]:
    """The whole continuations, ``settings.samples`` of each prompt in turn. Arguments and errors as in ``generate``."""
    done = {(i, sample): Completion(prompt, sample) for i, prompt in enumerate(prompts) for sample in range(settings.samples)}
    for piece in generate(reader, tokenizer, prompts, settings, timing=timing):
        add_piece(done[piece.prompt, piece.sample], piece)
    return list(done.values())


def add_piece(completion: Completion, piece: Piece) -> None:
    """Add a piece to its continuation."""
    completion.text += piece.text
    completion.tokens += [] if piece.token is None else [piece.token]
    completion.reason = piece.reason


def prompt_ids(tokenizer: TextCodec, prompt: str, context: int, name: str = "the prompt") -> list[int]:
    """The ids that stand for ``prompt``: the token before a document, if the tokenizer has one, and the text.

    Raises UsageError that begins with ``name`` for what is not text, is too long, or leaves nothing to begin with.
    """
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"{name}: not valid UTF-8 (at character {error.start + 1}); give it in a file that is") from None
    ids = [] if tokenizer.start_id is None else [tokenizer.start_id]
    ids += tokenizer.encode(prompt)
    if not ids:
        raise UsageError(f"{name}: is empty, and the tokenizer has no token to begin with; give some text")
    if len(ids) > context:
        raise UsageError(f"{name}: has {len(ids):,} tokens, and the model's context is {context:,}; shorten it")
    return ids


def noise_position(prompt: Sequence[int], sample: int) -> int:
    """Where the noise of a continuation begins (its next tokens take the positions after it).

    A hash of the prompt's ids and the number of the sample: it says nothing of the other rows of a batch, and different prompts do
    not share their noise, which would put the same words into all of them.
    """
    from _blake2 import blake2b  # hashlib's; importing that takes 4 MB of memory, for OpenSSL

    digest = blake2b(" ".join(map(str, (sample, *prompt))).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2  # leaves 64-bit integers room to count up


@dataclass
class _Row:
    """One continuation under way."""

    prompt: int
    sample: int
    ids: list[int]  # prompt and new tokens
    noise: int  # position of the next token's noise
    stream: TextStream
    new: int = 0

    def take(self, token: int, ends: "_Ends") -> Piece:
        """Add a drawn token."""
        self.ids.append(token)
        self.new += 1
        self.noise += 1
        text = "" if token == ends.eos else self.stream.push(token)
        reason = ends.reason(self, token)
        return Piece(self.prompt, self.sample, token, text + (self.stream.finish() if reason else ""), reason)

    def interrupt(self) -> Piece:
        return Piece(self.prompt, self.sample, None, self.stream.finish(), "interrupted")


@dataclass(frozen=True)
class _Ends:
    """What ends a row."""

    eos: int | None
    max_tokens: int
    context: int

    def reason(self, row: _Row, token: int) -> str | None:
        if token == self.eos:
            return "end"
        if row.stream.stopped:
            return "stop"
        if row.new >= self.max_tokens:
            return "length"
        return "context" if len(row.ids) > self.context else None  # the newest token has not been read yet: it must fit too


def _run(
    reader: Reader,
    batches: list[list[_Row]],
    ends: _Ends,
    settings: GenerationSettings,
    should_stop: Callable[[], bool],
    timing: Timing,
) -> Iterator[Piece]:
    for rows in batches:
        began = time.perf_counter()
        if not _read_prompts(reader, rows, settings, timing, should_stop):
            yield from _interrupted([], batches)
            return
        tokens = _draw(reader, rows, settings)
        timing.prompt_seconds += time.perf_counter() - began
        while True:
            pieces = [row.take(token, ends) for row, token in zip(rows, tokens, strict=True)]
            yield from pieces
            left = [i for i, piece in enumerate(pieces) if piece.reason is None]
            if should_stop():
                yield from _interrupted([rows[i] for i in left], batches)
                return
            if not left:
                break
            began = time.perf_counter()
            if len(left) < len(rows):
                rows = [rows[i] for i in left]
                reader.keep(left)
            reader.step([row.ids[-1] for row in rows])
            tokens = _draw(reader, rows, settings)
            timing.new_seconds += time.perf_counter() - began
            timing.new_tokens += len(rows)


def _interrupted(rows: list[_Row], batches: list[list[_Row]]) -> Iterator[Piece]:
    """The last pieces of the rows under way, and of those that were not begun."""
    not_begun = [row for batch in batches for row in batch if not row.new]
    yield from (row.interrupt() for row in rows + not_begun)


def _read_prompts(
    reader: Reader, rows: list[_Row], settings: GenerationSettings, timing: Timing, should_stop: Callable[[], bool]
) -> bool:
    """Read each prompt once, and go on with a row for each of its samples. False when ``should_stop`` broke it off."""
    prompts = {row.prompt: row.ids for row in rows}
    places = {prompt: place for place, prompt in enumerate(prompts)}
    if not reader.start(list(prompts.values()), settings.max_tokens, should_stop):
        return False
    timing.prompt_tokens += sum(map(len, prompts.values()))
    if len(rows) > len(prompts):
        reader.keep([places[row.prompt] for row in rows])
    return True


def _draw(reader: Reader, rows: list[_Row], settings: GenerationSettings) -> list[int]:
    return reader.draw([row.noise for row in rows], [row.ids for row in rows], settings)
