"""Small tokenizers of every kind and awkward texts, made on the fly: no vocabulary of others is in this repository."""

import random

import tokenizers

from models.vocab.tokenizer import Tokenizer, train_bpe

WORDS = "the cat sat on a mat and then the dogs ran over the hill while running water runs down, 1999 times! über naïve 日本"
LINES = [f"{word} {other}{n % 10} {word}ing" for n, word in enumerate(WORDS.split()) for other in WORDS.split()]


def random_texts(count: int, seed: int = 0) -> list[str]:
    """Texts of all planes of Unicode (no surrogates), mixed with words, spaces and the spelling of special tokens."""
    draw = random.Random(seed)
    ranges = ((0, 128), (0x80, 0x800), (0x800, 0xD800), (0xE000, 0x10000), (0x1F300, 0x1FAFF), (0x10000, 0x110000))
    pieces = ("the ", " running", "  ", "\n", "<|endoftext|>", "<s>", "<0x41>", "\u2581", "##ing", "1999")

    def piece() -> str:
        return draw.choice(pieces) if draw.random() < 0.4 else chr(draw.randrange(*draw.choice(ranges)))

    return ["".join(piece() for _ in range(draw.randrange(30))) for _ in range(count)]


def byte_level(size: int = 320) -> Tokenizer:
    """A byte-level BPE."""
    return train_bpe(LINES, size)


def wordpiece() -> Tokenizer:
    """A BERT-like WordPiece whose file asks for truncation and padding."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = tokenizers.normalizers.BertNormalizer()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.decoder = tokenizers.decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    backend.train_from_iterator(LINES, trainer)
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    return Tokenizer.from_json(backend.to_str())
