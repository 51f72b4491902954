"""Readable prose out of MediaWiki markup: no templates, tables, references, lists or headings.

What cannot be rendered as text (formulas, phonetic symbols) would leave a hole in its sentence, so the paragraph goes as a whole.
"""

import html
import re

HOLE = "\x00"
INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")  # soft hyphens, marks without width

# Elements whose contents are no prose.
_DROPPED = ("ref", "gallery", "timeline", "imagemap", "poem", "blockquote", "center", "div", "ol", "ul")
_HOLES = ("math", "source", "syntaxhighlight", "code", "pre", "tt", "chem", "score", "hiero")
_ELEMENT = r"<{0}\b[^<>]*?/>|<{0}\b[^<>]*>.*?</{0}\s*>"
_DROPPED_ELEMENTS = [re.compile(_ELEMENT.format(name), re.DOTALL | re.IGNORECASE) for name in _DROPPED]
_HOLE_ELEMENTS = [re.compile(_ELEMENT.format(name), re.DOTALL | re.IGNORECASE) for name in _HOLES]

_COMMENT = re.compile(r"<!--.*?(-->|\Z)", re.DOTALL)
_TEMPLATE = re.compile(r"\{\{([^{}]*)\}\}")
_TABLE = re.compile(r"^[ \t:*]*\{\|(?:(?!^[ \t:*]*\{\|).)*?(?:^[ \t:*]*\|\}|\Z)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[\[([^\[\]]*)\]\]")
_URL_LINK = re.compile(r"\[(?:https?|ftp|mailto|news|irc)?:?//[^\s\]]+\s*([^\[\]]*)\]", re.IGNORECASE)
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
_HEADING = re.compile(r"^={1,6}[^\n]*={1,6}[ \t]*$", re.MULTILINE)
_SUPERSCRIPT = re.compile(r"<sup>\s*([−–+-]?\d+)\s*</sup>", re.IGNORECASE)
_LINE_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)
_NAMESPACES = {"file", "image", "category", "media", "template", "portal", "special", "wikipedia", "help"}

# Templates that stand for words of the sentence: how to render them from their positional arguments.
_LAST = {"lang", "transl", "nowrap", "small", "smaller", "big", "vanchor", "visible anchor", "sic", "not a typo", "em", "strong"}
_FIRST = {"nihongo", "sc", "smallcaps", "abbr", "tooltip", "flag", "flagu", "flagcountry", "nts", "formatnum", "sortname"}
_LITERAL = {"'s": "'s", "'": "'", "·": "·", "nbsp": " ", "spaces": " ", "ndash": "–", "spaced ndash": " – ", "mdash": "—",
            "snd": " – ", "dash": " – ", "spnd": " – ", "en dash": "–", "\"'": "\"'", "'\"": "'\""}  # fmt: skip
_HOLE_TEMPLATES = {"math", "chem", "mvar", "frac", "sfrac", "angbr", "angle bracket", "ipa", "val", "eqm", "su", "sup", "sub",
                   "overline", "simplenuclide", "simplenuclide2", "nuclide", "physicsparticle", "subatomic particle", "e", "esp",
                   "unicode", "music", "code", "keypress", "pipe", "!", "age", "birth date", "death date", "dts", "inflation",
                   "formatprice", "railgauge", "circa", "c.", "script", "hebrew", "okina", "reign", "coord", "legend"}  # fmt: skip

# Sections that hold references and links instead of prose; each runs to the next heading of the same or a higher level.
_BACK_MATTER = re.compile(
    r"^(==+)\s*(?:references?|notes?|footnotes|citations|sources?|external links|see also|further reading|bibliography|"
    r"works cited|publications|filmography|discography|notes and references|references and notes|selected works|gallery)"
    r"\s*==+[ \t]*$",
    re.IGNORECASE | re.MULTILINE,
)


def strip_markup(wikitext: str) -> str:
    """Paragraphs of prose joined by blank lines; "" if the page has none."""
    text = _COMMENT.sub("", wikitext.replace(HOLE, ""))
    text = _without_back_matter(text)
    for pattern in _HOLE_ELEMENTS:
        text = pattern.sub(HOLE, text)
    text = _DROPPED_ELEMENTS[0].sub("", text)  # references first: they stand inside everything else
    text = _repeat(_TEMPLATE, _render_template, text)
    for pattern in _DROPPED_ELEMENTS:
        text = pattern.sub("\n\n", text)
    text = _repeat(_TABLE, lambda match: "\n", text)
    text = _repeat(_LINK, _render_link, text)
    text = _URL_LINK.sub(r"\1", text)
    text = _HEADING.sub("\n", text)
    text = _LINE_BREAK.sub(" ", _SUPERSCRIPT.sub(r"^\1", text))
    text = re.sub(r"'{2,5}", "", _TAG.sub("", text))
    lines = (_tidy(html.unescape(line)) for line in text.split("\n") if _may_be_prose(line))
    return "\n\n".join(line for line in lines if _is_prose(line))


def _without_back_matter(text: str) -> str:
    while match := _BACK_MATTER.search(text):
        level = len(match.group(1))
        end = re.compile(rf"^={{2,{level}}}[^=]", re.MULTILINE).search(text, match.end())
        text = text[: match.start()] + (text[end.start() :] if end else "")
    return text


def _repeat(pattern: re.Pattern[str], replacement: object, text: str) -> str:
    """Replace innermost matches until none is left."""
    count = 1
    while count:
        text, count = pattern.subn(replacement, text)
    return text


def _render_template(match: re.Match[str]) -> str:
    name, *arguments = match.group(1).split("|")
    name = name.strip().lower().replace("_", " ")
    positional = [argument.strip() for argument in arguments if "=" not in argument]
    if name in _LITERAL:
        return _LITERAL[name]
    if name in ("convert", "cvt") and len(positional) >= 2:
        return _render_measure(positional)
    if name == "as of" and positional:
        return f"As of {positional[0]}"
    if (name in _LAST or name.startswith("lang-")) and positional:
        return positional[-1]
    if name in _FIRST and positional:
        return positional[0]
    return HOLE if name in _HOLE_TEMPLATES or name.startswith("ipa") and name != "ipac-en" else ""


def _render_measure(arguments: list[str]) -> str:
    """{{convert|10|km|mi}} is 10 km; ranges such as {{convert|3|to|5|km}} too."""
    words = {"-": "–", "–": "–", "to": " to ", "and": " and ", "by": " by ", "x": " by ", "or": " or ", "to(-)": " to "}
    if len(arguments) >= 4 and arguments[1] in words:
        return f"{arguments[0]}{words[arguments[1]]}{arguments[2]} {arguments[3]}"
    return f"{arguments[0]} {arguments[1]}"


def _render_link(match: re.Match[str]) -> str:
    target, *labels = match.group(1).split("|")
    prefix = target.split(":")[0].strip().lower() if ":" in target else ""
    if prefix in _NAMESPACES or re.fullmatch(r"[a-z]{2,3}(-[a-z]+)?", prefix) and not labels:
        return ""
    return labels[-1] if labels else target.lstrip(":")


def _may_be_prose(line: str) -> bool:
    """Lists, indented lines, table rows and holes are not."""
    return bool(line.strip()) and line[0] not in "*#:;|!{} \t" and HOLE not in line


def _tidy(line: str) -> str:
    """Close the gaps that removed templates leave."""
    line = re.sub(r"\s+", " ", INVISIBLE.sub("", line))
    line = re.sub(r"\(\s*(?:(?:[,;:]|or|and|pronounced|listen)\s*)*\)", "", line)
    line = re.sub(r"([(\[])[\s,;:]+", r"\1", line)
    line = re.sub(r"[\s,;:]+([)\]])", r"\1", line)
    line = re.sub(r"\s+([,.;:!?])(?=\s|$)", r"\1", line)
    return re.sub(r" {2,}", " ", line).strip()


def _is_prose(line: str) -> bool:
    """At least a short sentence that begins and ends like one, without left-over markup."""
    begins = next((letter for letter in line if letter.isalpha()), "a")
    ends = re.search(r"[.!?][\"'”’)\]]*$", line)
    return len(line) >= 60 and not begins.islower() and bool(ends) and not re.search(r"[{}<>|]|\[\[|\]\]|https?:|==", line)
