"""Prose of the documents: sizes, width of lines, plain words, short sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents.test_texts import TEXTS
from tests.support.pages import PAGES, ROOT

CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
DOCUMENTS = [*TEXTS, ROOT / "CHANGELOG.md", *PAGES]
EVERY_DOCUMENT = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)
LARGEST = {"README.md": 8 * 1024, "DESIGN.md": 15 * 1024}
"""Bytes."""
WIDEST = 100
"""Columns."""
LONGEST = 25
"""Words of a sentence."""
PROPER_NAMES = ("Keep a Changelog", "control law")
"""Phrases that are allowed although one of their words is not."""
DIALECT = re.compile(
    r"""\b(?:
        who | whom | whoever | nobody | somebody | anybody | everybody | someone | anyone
      | anew | told | tells? | telling | foretold | foretells? | foretelling | foretell
      | keep | keeps | keeping | kept | laws?
      | lets?\ go | letting\ go | leaves?\ out | left\ out | leaving\ out
      | holds?\ up | held\ up | holds?\ (?:it|them)\ back | lasts?\ longer
      | comes?\ again | begins?\ again | comes?\ anew | lives?\ no\ more
      | (?<!there\ )(?:is|are|was|were)\ (?:no|(?-i:none))
      | by\ law | as\ it\ used\ to\ be | put\ up\ with
    )\b""",
    re.VERBOSE | re.IGNORECASE,
)
BEGINNING = re.compile(r"(?:^|[.:;!?]\s+)((?:And|Or|But)\b)", re.MULTILINE)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```\n?", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`]+`")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
MARKUP = re.compile(r"<[^>]+>")
BULLET = re.compile(r"\s*(?:[-*]|\d+\.)\s+")


def prose(text: str) -> str:
    """``text`` without code, addresses and proper names. Lines stay; tables and lists, too."""
    text = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    text = "\n".join("" if line.startswith("    ") else line for line in text.splitlines())
    text = MARKUP.sub("", LINK.sub(r"\1", CODE.sub("CODE", text)))
    for name in PROPER_NAMES:
        text = re.sub(name.replace(" ", r"\s+"), "NAME", text)
    return text


def comments(text: str) -> str:
    """Comments and docstrings of the programs and settings on a page."""
    programs = [body for language, body in FENCE.findall(text) if language in {"python", "toml"}]
    return "\n".join(
        found
        for program in programs
        for pair in re.findall(r'#\s([^\n]*)|"""(.*?)"""', program, re.DOTALL)
        for found in pair
    )


def sentences(text: str) -> Iterator[str]:
    """Sentences of paragraphs and lists; rows of tables and headings are none."""
    paragraph: list[str] = []
    for line in [*prose(text).splitlines(), ""]:
        ends = not line.strip() or line.startswith(("|", "#")) or BULLET.match(line) is not None
        if ends and paragraph:
            yield from re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph))
            paragraph = []
        if line.strip() and not line.startswith(("|", "#")):
            paragraph.append(BULLET.sub("", line, count=1) if ends else line.strip())


def dialect(text: str) -> list[str]:
    """Words that a plain text does not use."""
    return [found.lower() for found in (*DIALECT.findall(text), *BEGINNING.findall(text))]


def long_sentences(text: str) -> list[str]:
    """Sentences of more than `LONGEST` words."""
    return [
        sentence for sentence in sentences(text) if len(re.findall(r"\w\S*", sentence)) > LONGEST
    ]


def wide_lines(text: str) -> list[str]:
    """Lines of more than `WIDEST` columns. A row of a table, a picture and markup are one line."""
    return [
        line
        for line in text.splitlines()
        if len(line) > WIDEST and not line.lstrip().startswith(("|", "![", "<"))
    ]


@pytest.mark.parametrize("name", LARGEST)
def test_the_first_documents_are_short(name: str) -> None:
    assert len((ROOT / name).read_bytes()) <= LARGEST[name]


@EVERY_DOCUMENT
def test_lines_fit_the_width(document: Path) -> None:
    assert [] == wide_lines(document.read_text())


@EVERY_DOCUMENT
def test_documents_use_plain_words(document: Path) -> None:
    written = document.read_text()
    assert [] == dialect(prose(written)) + dialect(comments(written))


@EVERY_DOCUMENT
def test_sentences_are_short(document: Path) -> None:
    assert [] == long_sentences(document.read_text())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_comments_of_shipped_configs_use_plain_words(config: Path) -> None:
    written = config.read_text()
    assert [] == wide_lines(written)
    assert [] == dialect("\n".join(re.findall(r"# (.*)", written)))


# The checks
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Whoever asks is told.", ["whoever", "told"]),
        ("There is\nno other way, and it is none.", ["is none"]),
        ("It is no list.", ["is no"]),
        ("The law decides. And it lets go of a slot.", ["law", "lets go", "and"]),
        ("A control law, `law` and [a page](own-law.md) by Keep a Changelog.", []),
        ("```console\n$ python told.py\ntold\n```\n", []),
        ("    tianflow get demo   # told\n", []),
    ],
)
def test_dialect_is_noticed_in_prose_only(text: str, found: list[str]) -> None:
    assert found == dialect(prose(text))


def test_dialect_is_noticed_in_comments_of_programs() -> None:
    page = '```python\n"""Whoever."""\nx = "told"  # anew\n```\n```text\n# nobody\n```\n'
    assert {"whoever", "anew"} == set(dialect(comments(page)))


def test_a_long_sentence_is_noticed_across_lines_and_not_across_items() -> None:
    words = " ".join(["word"] * 13)
    assert [f"{words} {words}."] == long_sentences(f"{words}\n{words}.\n")
    assert [] == long_sentences(f"- {words}\n- {words}\n\n| {words} {words} |\n\n# {words} {words}")


def test_a_wide_line_is_noticed() -> None:
    wide = "x" * (WIDEST + 1)
    assert [wide] == wide_lines(f"{wide}\n| {wide} |\n![{wide}](a.png)\n{'x' * WIDEST}\n")
