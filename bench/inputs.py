"""Synthetic inputs that behave like text where it matters for speed: which ids repeat, and which bytes they hold.

Ids: a Zipf-Mandelbrot draw, P(rank r) ~ 1 / (r + 2.7) for r = 1..V, and id = rank - 1 (byte-pair merges are numbered roughly by
frequency). 1,024 such ids out of 50,257 hold about 650 different ones; a uniform draw holds about 1,014.

Token bytes: the length of the token of rank r is 1 + Poisson(1 + 0.45 ln r), at most P, which gives 6.4 bytes on average over a
vocabulary of 50,257 and 4.4 over the drawn ids, as byte-pair vocabularies of English have it. Two of three tokens begin with a
space, the other bytes are lower-case letters by their English frequency: so one (byte, position) takes a large share of all
contributions, as in real text.
"""

import torch

LETTERS = b"etaoinshrdlcumwfgypbvkjxqz"
# Occurrences in 1,000 letters of English, in the order of LETTERS (rounded; any standard table).
LETTER_WEIGHTS = (127, 91, 82, 75, 70, 67, 63, 61, 60, 43, 40, 28, 28, 24, 24, 22, 20, 20, 19, 15, 10, 8, 2, 2, 1, 1)
SPACE_SHARE = 2 / 3


def token_ids(count: int, vocab_size: int, generator: torch.Generator, kind: str) -> torch.Tensor:
    """``count`` ids, int64 [count]; kind "text" (see above) or "uniform"."""
    if kind == "uniform":
        return torch.randint(vocab_size, (count,), generator=generator)
    # Inverse transform by the cumulative sum: torch.multinomial stops at 2**24 categories.
    cumulative = (1.0 / (torch.arange(1, vocab_size + 1, dtype=torch.float64) + 2.7)).cumsum(0)
    draws = torch.rand(count, generator=generator, dtype=torch.float64) * cumulative[-1]
    return torch.searchsorted(cumulative, draws).clamp_max(vocab_size - 1)


def token_bytes(vocab_size: int, positions: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes uint8 [V, P] (zero past the length) and lengths int32 [V] of a synthetic vocabulary."""
    mean = 1 + 0.45 * torch.arange(1, vocab_size + 1, dtype=torch.float32).log()
    lengths = (1 + torch.poisson(mean, generator=generator)).clamp_max(positions).to(torch.int32)
    letters = torch.tensor(list(LETTERS), dtype=torch.uint8)
    weights = torch.tensor(LETTER_WEIGHTS, dtype=torch.float32)
    picked = torch.multinomial(weights, vocab_size * positions, replacement=True, generator=generator)
    buffer = letters[picked].view(vocab_size, positions)
    spaced = torch.rand(vocab_size, generator=generator) < SPACE_SHARE
    buffer[spaced, 0] = ord(" ")
    return buffer.masked_fill_(torch.arange(positions) >= lengths[:, None], 0), lengths


def packed_codes(vocab_size: int, bits: int, generator: torch.Generator) -> torch.Tensor:
    """Random packed sign codes, int32 [V, ceil(bits / 32)]; unused high bits of the last word are zero."""
    words = -(-bits // 32)
    codes = torch.randint(-(2**31), 2**31, (vocab_size, words), generator=generator, dtype=torch.int64)
    if bits % 32:
        codes[:, -1] &= (1 << bits % 32) - 1
    return codes.to(torch.int32)
