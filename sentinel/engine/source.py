"""Read YAML text with its places: every value of a rule file knows the line and column that it came from.

YAML 1.2's core schema (yaml.org/spec/1.2.2, 10.3.2) and not PyYAML's 1.1: `1e-3` is a number, `on` and `no` are
words. No objects are constructed: the composed nodes are read as what a rule needs, and each error names its place.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import yaml

from sentinel.errors import RuleError
from sentinel.text import did_you_mean, find_nearest

SIZE_LIMIT = 1 << 20
"""Characters in a file, at most: 1,000 rules have half of that."""

DEPTH_LIMIT = 20
"""Nesting of a file, at most. A rule test needs 7. Beyond about 20,000 libyaml's composer overflows the C stack."""

_SHOWN = 40
"""Characters of a value that an error repeats, at most."""
LONGEST_INTEGER = 30
"""Characters of a whole number that are read: all bounds are lower than what has more."""
_TAG = "tag:yaml.org,2002:"
_CORE = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
}
_INTEGER = re.compile(_CORE["int"][0])
_NAMES = {"bool": "true or false", "int": "a number", "float": "a number", "null": "nothing", "str": "text",
          "seq": "a list", "map": "a mapping"}  # fmt: skip

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]
    yaml_implicit_resolvers: dict[str, Any] = {}


for _name, (_pattern, _first) in _CORE.items():
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), list(_first))


class Mistakes:
    """Collects the mistakes of a file. `with mistakes:` notes a RuleError, and goes on after the block."""

    def __init__(self) -> None:
        self.found: list[RuleError] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        if isinstance(error, RuleError):
            self.found += (error, *error.others)
        return isinstance(error, RuleError)

    def raise_first(self) -> None:
        """Raise the first mistake in the file's order; it carries the others."""
        if self.found:
            first, *others = sorted(self.found, key=lambda mistake: (mistake.line, mistake.column))
            first.others = tuple(others)
            raise first


class Text:
    """A string from a file, with the place in the file of each of its characters."""

    def __init__(self, value: str, file: str, places: Sequence[tuple[int, int]]) -> None:
        assert len(places) == len(value) + 1, "one place a character, and one for the end"
        self.value, self.file, self.places = value, file, places

    @classmethod
    def plain(cls, value: str) -> Text:
        """Return a string that is its own file, on one line."""
        return cls(value, "<expression>", [(1, column) for column in range(1, len(value) + 2)])

    def __getitem__(self, part: slice) -> Text:
        start, stop, _ = part.indices(len(self.value))
        return Text(self.value[start:stop], self.file, self.places[start : stop + 1])

    def replace_pattern(self, pattern: re.Pattern[str], before: str, after: str) -> Text:
        """Put each match of group 1 between `before` and `after`, which take the places of its ends."""
        value, places, last = "", list[tuple[int, int]](), 0
        for match in pattern.finditer(self.value):
            start, stop = match.span(1)
            if start < 0:
                continue
            value += self.value[last:start] + before + self.value[start:stop] + after
            places += self.places[last:start]
            places += [self.places[start]] * len(before)
            places += self.places[start:stop]
            places += [self.places[stop]] * len(after)
            last = stop
        return Text(value + self.value[last:], self.file, [*places, *self.places[last:]])

    def error(self, message: str, offset: int = 0) -> RuleError:
        """Return a RuleError at a character of this text."""
        line, column = self.places[min(max(offset, 0), len(self.value))]
        return RuleError(message, file=self.file, line=line, column=column)


class YamlNode:
    """A value in a rule file, read as what it must be; otherwise a RuleError at its place."""

    def __init__(self, node: Any, source: Source) -> None:
        self._node, self._source = node, source

    @property
    def kind(self) -> str:
        """`str`, `int`, `float`, `bool`, `null`, `seq` or `map`, or a tag of the file's own."""
        return str(self._node.tag).removeprefix(_TAG)

    @property
    def line(self) -> int:
        """Line of the value, from 1."""
        return int(self._node.start_mark.line) + 1

    @property
    def written(self) -> str:
        """The value's text as it stands in the file."""
        return self._source.text[self._node.start_mark.index : self._node.end_mark.index].rstrip()

    def error(self, message: str) -> RuleError:
        """Return a RuleError at this value."""
        column = int(self._node.start_mark.column) + 1
        return RuleError(message, file=self._source.file, line=self.line, column=column)

    def mismatch(self, expected: str) -> RuleError:
        """Return a RuleError that says what was found and what was expected. A value longer than a word may belong to
        another file altogether and may be private, so it is not repeated."""
        found, value = _NAMES.get(self.kind, self.kind), self._node.value
        shown = f" ({value})" if isinstance(value, str) and 0 < len(value) <= _SHOWN else ""
        return self.error(f"expected {expected}, found {found}{shown}")

    def items(self, what: str) -> Iterator[tuple[YamlNode, YamlNode]]:
        """Yield the keys and values of a mapping, in order; a key that comes twice is an error."""
        if not isinstance(self._node, yaml.MappingNode):
            raise self.mismatch(f"{what}: a mapping")
        seen: dict[str, YamlNode] = {}
        for key, value in ((YamlNode(k, self._source), YamlNode(v, self._source)) for k, v in self._node.value):
            name = key.word()
            if name in seen:
                raise key.error(f"key {name!r} is there twice; the first is in line {seen[name].line}")
            seen[name] = key
            yield key, value

    def fields(
        self,
        what: str,
        allowed: Iterable[str],
        required: Iterable[str] = (),
        mistakes: Mistakes | None = None,
        needed: Iterable[str] = (),
    ) -> dict[str, YamlNode]:
        """Return a mapping whose keys are known. Unknown keys are left out; they and missing ones are noted in
        `mistakes`, or raised where that is None or a required key is missing. `needed`: keys that are also needed, but
        without which the others can be read. A needed key that an unknown one resembles is not also reported as
        missing."""
        known, required, found = list(allowed), list(required), dict[str, YamlNode]()
        wrong, meant = Mistakes(), set[str]()
        for key, value in self.items(what):
            with wrong:
                if key.word() not in known:
                    meant.add(find_nearest(key.word(), known))
                    raise key.error(f"unknown key {key.word()!r} in {what}{did_you_mean(key.word(), known)}")
                found[key.word()] = value
        missing = [name for name in (*required, *needed) if name not in found and name not in meant]
        wrong.found += [self.error(f"{what} needs {name!r}") for name in missing]
        if mistakes is None or any(name not in found for name in required):
            wrong.raise_first()
        else:
            mistakes.found += wrong.found
        return found

    def sequence(self, what: str) -> list[YamlNode]:
        """Return the items of a list."""
        if not isinstance(self._node, yaml.SequenceNode):
            raise self.mismatch(f"{what}: a list")
        return [YamlNode(item, self._source) for item in self._node.value]

    def word(self) -> str:
        """Return a scalar as it is written, whatever its type."""
        if not isinstance(self._node, yaml.ScalarNode):
            raise self.mismatch("a word")
        return str(self._node.value)

    def string(self, what: str) -> str:
        """Return text; a bare number is not text."""
        if self.kind != "str" or not isinstance(self._node, yaml.ScalarNode):
            raise self.mismatch(f"{what}: text")
        return str(self._node.value)

    def truth(self, what: str) -> bool:
        """Return true or false."""
        if self.kind != "bool":
            raise self.mismatch(f"{what}: true or false")
        return self.word().lower() == "true"

    def integer(self, what: str, least: int, most: int) -> int:
        """Return a whole number within bounds."""
        if self.kind != "int":
            raise self.mismatch(f"{what}: a whole number")
        word = self.word()[:LONGEST_INTEGER]
        if not _INTEGER.fullmatch(word):  # it is only tagged as one
            raise self.mismatch(f"{what}: a whole number")
        value = int(word, 0 if word[:2] in ("0o", "0x") else 10)
        if not least <= value <= most:
            raise self.error(f"{what}: {value} is not between {least} and {most}")
        return value

    def text(self, what: str) -> Text:
        """Return text with the place of each of its characters, for expressions and templates."""
        if self.kind not in ("str", "int", "float", "bool") or not isinstance(self._node, yaml.ScalarNode):
            raise self.mismatch(f"{what}: text")
        return Text(str(self._node.value), self._source.file, self._source.places(self._node))


class Source:
    """A rule file's text, composed. Raises RuleError where it is not YAML."""

    def __init__(self, text: str, file: str) -> None:
        self.text, self.file = text.removeprefix("\ufeff"), file
        self._line_starts = [0, *(match.end() for match in re.finditer("\n", self.text))]
        if len(text) > SIZE_LIMIT:
            raise RuleError(f"over {SIZE_LIMIT} characters: not a rule file", file=file)
        try:
            self._check_depth()
            root = yaml.compose(self.text, Loader=_Loader)
        except yaml.MarkedYAMLError as error:
            raise self._syntax_error(error) from None
        except (yaml.YAMLError, ValueError) as error:
            line, column = self._place(getattr(error, "position", 0))
            reason = getattr(error, "reason", "not text")
            raise RuleError(f"not YAML: {reason}", file=file, line=line, column=column) from None
        if root is None:
            raise RuleError("the file is empty", file=file)
        self.root = YamlNode(root, self)

    def _check_depth(self) -> None:
        depth = 0
        for event in yaml.parse(self.text, Loader=_Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEPTH_LIMIT:
                mark: Any = event.start_mark
                raise RuleError(f"nested over {DEPTH_LIMIT} deep: not a rule file", file=self.file, line=mark.line + 1)

    def _syntax_error(self, error: yaml.MarkedYAMLError) -> RuleError:
        mark: Any = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        hint = "; put the text in quotes" if "mapping values" in str(error.problem) else ""
        return RuleError(f"not YAML: {error.problem}{hint}", file=self.file, line=line, column=column)

    def _place(self, index: int) -> tuple[int, int]:
        line = bisect_right(self._line_starts, index)
        return line, index - self._line_starts[line - 1] + 1

    def places(self, node: Any) -> list[tuple[int, int]]:
        """Return the place of each character of a scalar's value, and of its end.

        The characters that are not blank stand in the file in the same order as in the value, whatever the style:
        plain, quoted, literal or folded. Blanks, which YAML folds, take the place after their predecessor.
        """
        start, stop = node.start_mark.index, node.end_mark.index
        start += len(match[0]) if (match := _PROPERTIES.match(self.text, start, stop)) else 0
        units = list(_units(self.text, start, stop, node.style))
        solid = sum(not c.isspace() for c in node.value)
        if len(units) != solid:  # an escaped blank, for example: the value's start must do
            return [self._place(start)] * (len(node.value) + 1)
        places, following, rest = list[tuple[int, int]](), start + (node.style in ("'", '"')), iter(units)
        for character in node.value:
            index = following if character.isspace() else next(rest)
            places.append(self._place(index))
            following = index if character.isspace() else index + 1
        return [*places, self._place(following)]


_PROPERTIES = re.compile(r"(?:[&!]\S*\s+)+")
_ESCAPE = re.compile(r"\\(x..|u.{4}|U.{8}|\r?\n|.)", re.DOTALL)
_BLANK_ESCAPES = frozenset(" \t_NLPnrtv\n")


def _units(text: str, start: int, stop: int, style: str | None) -> Iterator[int]:
    """Yield the index in the file of each character that is not blank, for the scalar between two indices."""
    index, end = start, stop
    if style in ("|", ">"):
        index = text.find("\n", start, stop) + 1 or stop
    elif style in ("'", '"'):
        index, end = start + 1, stop - 1
    while index < end:
        width = 1
        if style == '"' and (match := _ESCAPE.match(text, index)):
            width = match.end() - index
            if match[1] not in _BLANK_ESCAPES:
                yield index
        elif style == "'" and text.startswith("''", index):
            width = 2
            yield index
        elif not text[index].isspace():
            yield index
        index += width
