"""The glossary's terms are used, and the words that they replaced are not.

The glossary is in docs/README.md. Names of settings, JSON keys and metrics keep their words: in the docs they stand in
backticks, which are not checked.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import sentinel
from tests.docs.generate import ROOT

PACKAGE = Path(next(iter(sentinel.__path__)))
GLOSSARY = (ROOT / "docs" / "README.md").read_text().partition("\n## Glossary\n")[2]
TERMS = re.findall(r"^\| ([^|`-][^|]*?) \|", GLOSSARY, re.MULTILINE)[1:]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
RETIRED = {
    "ledger": "step accumulator",
    "tally": "step accumulator",
    "companions?": "monitor base, or what is meant",
    "suspicions?": "loss outlier",
    "pacing": "governor",
    "doors?": "integration",
    "diall?er": "daemon locator",
    "pulse": "heartbeat",
    "whereabouts": "loop locator",
    "inquests?": "evidence",
    "witness(es)?": "pass filter",
    "census": "object growth",
    "aftermath": "postmortem",
    "casebook": "incident log",
    "tenancy": "locks",
    "bell|ears?|deaf": "what is meant",
    "last words": "last output",
    "till": "until",
    "for ever": "never returns, without end",
    "anew": "again",
    "(is|are|was|were|be|been) told(?! apart)": "gets, sees, is notified",
    "(?-i:(?<=[.:] )One that)": "A daemon that, a rank that, ...",
}
"""Pattern of a retired word -> the words to use instead."""
IMAGES = (
    *("bell", "ears?", "deaf", "last words", "(take|takes|taking) leave", "keeps? house", "witness(es)?", "inquests?"),
    *("companions?", "casebook", "doors?", "tally", "till", "for ever", "anew", "nobody is told"),
)
"""Words that must not appear in the code either, comments and docstrings included."""
MESSAGES_OF = ("cli", "config", "demo", "diagnose", "launch", "report", "supervise", "toolkit")
"""Packages whose messages are checked."""


def find_retired_words(text: str) -> list[str]:
    """Return where a text uses a retired word, and what to say instead."""
    found = []
    for pattern, instead in RETIRED.items():
        for match in re.finditer(rf"\b(?:{pattern})\b", text, re.IGNORECASE):
            around = " ".join(text[max(0, match.start() - 40) : match.end() + 40].split())
            found.append(f"'{match[0]}' in '... {around} ...': say {instead}")
    return found


def list_messages(file: Path) -> Iterator[str]:
    """Yield the string constants of a Python file, without docstrings and names."""
    tree = ast.parse(file.read_text())
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and id(node) not in docstrings else None
        if isinstance(text, str) and not text.isidentifier():
            yield text


def list_sources() -> list[Path]:
    return [path for folder in (PACKAGE, PACKAGE / "hooks") for path in folder.rglob("*.py")]


def in_one_piece(text: str) -> str:
    """Return the text in lower case without separators: `two_phase`, `TwoPhase` and "two-phase" become the same."""
    return re.sub(r"[\s_'-]", "", text).lower()


@pytest.fixture(scope="module")
def code() -> str:
    return in_one_piece("\n".join(path.read_text() for path in list_sources()))


@pytest.fixture(scope="module")
def docs() -> str:
    pages = (path.read_text() for path in PAGES if path != ROOT / "docs" / "README.md")
    return in_one_piece("\n".join(pages))


def test_the_glossary_is_short() -> None:
    assert 20 < len(TERMS) <= 40
    assert len(set(TERMS)) == len(TERMS)


@pytest.mark.parametrize("term", TERMS)
def test_each_term_is_used_in_the_docs_and_in_the_code(term: str, docs: str, code: str) -> None:
    assert in_one_piece(term) in docs
    assert in_one_piece(term) in code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_use_no_retired_word(page: Path) -> None:
    assert find_retired_words(re.sub(r"`[^`\n]*`", "``", page.read_text())) == []


@pytest.mark.parametrize("package", MESSAGES_OF)
def test_messages_use_no_retired_word(package: str) -> None:
    texts = [text for path in sorted((PACKAGE / package).rglob("*.py")) for text in list_messages(path)]
    assert texts
    assert [found for text in texts for found in find_retired_words(text)] == []


def test_code_uses_no_figurative_word() -> None:
    pattern = re.compile(rf"\b(?:{'|'.join(IMAGES)})\b", re.IGNORECASE)
    found = [
        f"{path}:{number}: {line.strip()}"
        for path in list_sources()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line) and '"till the end"' not in line  # a state's former name, as histories have it
    ]
    assert found == []


@pytest.mark.parametrize("folder", ["rules", "diagnose"])
def test_rules_and_causes_use_no_retired_word(folder: str) -> None:
    for path in sorted((PACKAGE / folder).glob("*.yaml")):
        text = re.sub(r"evidence: \[[^\]]*\]", "", path.read_text())  # kinds of evidence are keys of files
        assert find_retired_words(text) == [], path.name


def test_a_retired_word_is_found() -> None:
    assert len(find_retired_words("it waits for ever, till somebody is told")) == 3
    assert find_retired_words("they are told apart; tell it; a tilled field") == []
