"""Annotations: text with fields. `"{now:.3f} is {now / base:.1f}x"`.

A field is an expression of the rule language, or one of the words below, with Python's format spec for floats.
`{{` and `}}` stand for braces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sentinel.engine.expressions.builder import Term
from sentinel.engine.expressions.plan import Slots, UnreadyError
from sentinel.engine.source import Text

WORDS = {
    "step": "the step at which the rule fired, as the user counts",
    "first_step": "the first step at which its condition held",
    "entity": "what it fired for: the run, rank 3, GPU 0, a layer's name",
    "members": "all members that it holds for, comma-separated, after the third a number",
    "run": "the run's name",
}
"""Words that a field may be instead of an expression -> their meaning."""

_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|([{}])")
_LAYOUT = re.compile(r"(?P<body>[^:'\"]*(?:(?:'[^']*'|\"[^\"]*\")[^:'\"]*)*)(?P<spec>:.*)?", re.DOTALL)


_SPEC = re.compile(r"(?:[^{}]?[<>=^])?[-+ ]?[0-9]{0,2},?(?:\.[0-9]{1,2})?[eEfFgG%]?")
_ALLOWED = "fill and alignment, sign, width of up to 2 digits, comma, precision of up to 2 digits, one of e E f F g G %"
"""All that a format spec may have. What else Python allows is for other types, or makes text of any length, in the
daemon, at each alert."""
LONGEST = 4096
"""Characters of a rendered annotation, at most. It is sent to pagers, pages and a terminal."""
_CUT = " [...]"


@dataclass(frozen=True, slots=True)
class Field:
    """One `{...}` of an annotation."""

    term: Term | None
    word: str
    spec: str

    def render(self, slots: Slots, words: Mapping[str, str]) -> str:
        """Return the value as text; `n/a` where it has none yet."""
        if self.term is None:
            return words[self.word]
        try:
            value = self.term.read(slots)
        except UnreadyError:
            return "n/a"
        if self.term.type == "condition":
            return str(value).lower()
        return format(float(value), self.spec) if self.spec else str(value)  # `age` is an int, which takes no `.3`


@dataclass(frozen=True, slots=True)
class Template:
    """A compiled annotation."""

    parts: tuple[str | Field, ...]

    def render(self, slots: Slots, words: Mapping[str, str]) -> str:
        """Put numbers and words into the text."""
        text = "".join(part if isinstance(part, str) else part.render(slots, words) for part in self.parts)
        return text if len(text) <= LONGEST else text[: LONGEST - len(_CUT)] + _CUT


def template(text: Text, compiled: Callable[[Text], Term]) -> Template:
    """Compile an annotation; `compiled` compiles its fields. Raises RuleError at the field that is wrong."""
    parts: list[str | Field] = []
    last = 0
    for match in _PIECE.finditer(text.value):
        parts.append(text.value[last : match.start()])
        last = match.end()
        if match[2]:
            raise text.error(f"a lone {match[2]!r}; write {match[2] * 2!r} for the sign itself", match.start())
        if match[1] is None:
            parts.append(match[0][0])
        else:
            parts.append(_field(text[match.start(1) : match.end(1)], compiled))
    parts.append(text.value[last:])
    return Template(tuple(part for part in parts if part))


def _field(text: Text, compiled: Callable[[Text], Term]) -> Field:
    layout = _LAYOUT.fullmatch(text.value)
    body, spec = (layout["body"], layout["spec"] or "") if layout else (text.value, "")
    if body.strip() in WORDS:
        if spec:
            raise text.error(f"{{{body.strip()}}} is a word, and takes no format spec", len(body))
        return Field(None, body.strip(), "")
    term = compiled(text[: len(body)])
    if not _SPEC.fullmatch(spec[1:]):
        shown = repr(spec[1:41])
        raise text.error(f"{shown} is no format for a number; write .3f, .2e or .0%: {_ALLOWED}", len(body) + 1)
    if term.type == "condition" and spec:
        raise text.error("a condition takes no format spec", len(body))
    return Field(term, "", spec[1:])
