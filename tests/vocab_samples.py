"""Small tokenizers of every kind and awkward texts, made on the fly: no vocabulary of others is in this repository."""

import random

import tokenizers
from tokenizers import AddedToken

from models.vocab.token_bytes import SPACE_MARK
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


def gemma_like(size: int = 800, texts: tuple[str, ...] = tuple(LINES)) -> Tokenizer:
    """A BPE in the manner of Gemma: spaces are marked, all ways to join two tokens into a third are merges, the longest left one
    first, ids are not in the order of ranks, bytes stand for characters without a token, one token joins a space to what is before
    it, and among the added tokens are runs of line ends."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.normalizer = tokenizers.normalizers.Replace(" ", SPACE_MARK)
    trained.pre_tokenizer = tokenizers.pre_tokenizers.Split(SPACE_MARK, "merged_with_next")
    trained.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(vocab_size=size, show_progress=False))
    known = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    letters = [*(piece for piece, _ in known if len(piece) == 1), *"<>/=\n"]
    ranked = ["\n\n", SPACE_MARK * 2, SPACE_MARK * 3, *(piece for piece, _ in known if len(piece) > 1), "</", f">{SPACE_MARK}</"]
    special, plain = ["<pad>", "<eos>", "<bos>", "<unk>"], ["\n\n", SPACE_MARK * 2, "<table>"]
    ids = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *ranked[::2], *ranked[1::2], "<table>", *dict.fromkeys(letters)]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(ids))}
    cuts = [(piece[:at], piece[at:]) for piece in ranked for at in range(len(piece) - 1, 0, -1)]
    merges = [cut for cut in cuts if cut[0] in vocab and cut[1] in vocab]
    merges.append((">", f"{SPACE_MARK}</"))
    vocab |= {f"{SPACE_MARK}</": len(vocab)}
    merges.insert(0, (SPACE_MARK, "</"))
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer, backend.pre_tokenizer = trained.normalizer, tokenizers.pre_tokenizers.Split(" ", "merged_with_previous")
    parts = [tokenizers.decoders.Replace(SPACE_MARK, " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    backend.decoder = tokenizers.decoders.Sequence(parts)
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    backend.add_tokens([AddedToken(text, normalized=False) for text in plain])
    return Tokenizer.from_json(backend.to_str())
