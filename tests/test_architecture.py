"""docs/architecture.md walks through the code: all that it names exists, and the walks are short."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.source import SOURCE

ROOT = SOURCE
PAGE = (ROOT / "docs" / "architecture.md").read_text()
WALKS = {
    "A gradient, from optimizer.step to the socket": 15,
    "From the socket to a receiver": 20,
    "A rollback, from its order back to the weights": 15,
}
"""Heading of a walk -> the most files that it may have."""


class Stop(NamedTuple):
    path: str
    functions: tuple[str, ...]


def section(heading: str) -> str:
    """Return the text below a heading, up to the next one."""
    _, found, below = PAGE.partition(f"# {heading}\n")
    assert found, heading
    return re.split(r"^#", below, maxsplit=1, flags=re.MULTILINE)[0]


def tables(text: str) -> Iterator[list[list[str]]]:
    """Yield the cells of each table, row by row, without its head."""
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        lines = block.splitlines()[2:]
        yield [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def walk(heading: str) -> list[list[Stop]]:
    """Return the stretches of a walk: each is entered from outside, and goes on by itself."""
    return [
        [Stop(path.strip("`"), tuple(re.findall(r"`([^`]+)`", names))) for path, names, _ in table]
        for table in tables(section(heading))
    ]


def stops(heading: str) -> list[Stop]:
    return [stop for stretch in walk(heading) for stop in stretch]


@functools.cache
def source(path: str) -> str:
    return (ROOT / path).read_text()


@functools.cache
def defined(path: str) -> set[str]:
    """Return the functions of a file, and the methods with their class."""
    found = set()
    for node in ast.parse(source(path)).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            inner = (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{one.name}" for one in inner}
    return found


def called_name(function: str) -> str:
    """Return what is written where a function is called: for `__init__` and `__call__` the name of the class."""
    names = function.split(".")
    return names[-2] if names[-1].startswith("__") else names[-1]


def is_used(name: str, path: str) -> bool:
    """Return whether a file mentions a name besides defining it."""
    return re.search(rf"(?<!def )(?<!class )\b{name}\b", source(path)) is not None


@pytest.mark.parametrize("heading", WALKS)
def test_every_file_and_function_of_a_walk_exists(heading: str) -> None:
    missing = [(path, name) for path, names in stops(heading) for name in names if name not in defined(path)]
    assert not missing


@pytest.mark.parametrize("heading", WALKS)
def test_each_function_of_a_walk_is_called_from_the_walk(heading: str) -> None:
    paths = {path for path, _ in stops(heading)}
    called = [name for stretch in walk(heading) for name in [n for _, names in stretch for n in names][1:]]
    assert [name for name in called if not any(is_used(called_name(name), path) for path in paths)] == []


@pytest.mark.parametrize(("heading", "most"), WALKS.items())
def test_a_walk_is_short(heading: str, most: int) -> None:
    assert 5 < len({path for path, _ in stops(heading)}) <= most


def test_the_packages_are_listed_with_the_first_lines_of_their_docstrings() -> None:
    found = {path.strip("`/"): text for table in tables(section("The packages")) for path, text in table}
    packages = [*(ROOT / "hooks").glob("*/__init__.py"), *(ROOT / "sentinel").glob("*/__init__.py")]
    words = {str(path.parent.relative_to(ROOT)): ast.get_docstring(ast.parse(path.read_text())) for path in packages}
    assert found == {name: (text or "").partition("\n")[0] for name, text in words.items()}
