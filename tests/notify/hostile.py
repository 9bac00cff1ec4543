"""Odd texts that may come from a run, a layer or a user, and that no receiver may fail on."""

from __future__ import annotations

import random

from sentinel.diagnose.case import Case, CaseMember
from sentinel.diagnose.evidence import Finding
from tests.notify.cases import case

PLANES = "".join(chr(plane * 0x10000 + offset) for plane in range(17) for offset in (0x21, 0x500, 0xFFFD, 0xFFFF))
"""Characters from every plane of Unicode."""
ODD = [
    "x" * 20_000,
    "\U0001f525" * 5_000,
    "&" * 5_000,
    "<&>" * 2_000,
    "a\n" * 3_000,
    "\n" * 3_000,
    "   ",
    "",
    "\x00\x1b[31m\x07",
    "\ud800 and \udfff",
    PLANES,
    "<!channel> <!here> <@U012AB3CD> <https://evil.example|click>",
    "*bold* _it_ ~no~ `code` ```block``` > quote",
    "@everyone #general :fire: :skull:",
    "\u202egnp.exe\u202c \u2066x\u2069",
    '"}{\\"\\\\ \'; DROP TABLE outbox;--',
    "%s %d {0} {run} ${HOME} $(id)",
    "e\u0301" * 2_000,
    "\u200b\u200d\ufeff" * 500,
    "\r\n\t\v\f\u2028\u2029",
]


def cases(count: int, *, wired: bool = False) -> list[Case]:
    """Return incidents whose texts are all odd, one per rule. `wired`: only texts that the wire can carry, in UTF-8."""
    chance = random.Random(7)
    texts = [text for text in ODD if not wired or text == text.encode(errors="ignore").decode()]

    def odd() -> str:
        one = chance.choice(texts)
        return one if chance.random() < 0.7 else one + chance.choice(texts)

    found = []
    for number in range(count):
        one = case(f"0.{number}", severity=chance.choice(["info", "warning", "critical", "odd"]), alert=odd() or "A")
        one.alert = f"R{number}{one.alert}"
        one.run, one.summary, one.runbook = odd(), odd(), odd()
        one.members = tuple(CaseMember("layer", odd(), 1, {}) for _ in range(chance.randrange(40)))
        one.done = tuple(odd() for _ in range(chance.choice([0, 1, 3, 60])))
        one.diagnosis = Finding(cause=odd(), confidence="low", evidence=(), remedy=odd(), missing=(odd(), odd()))
        found.append(one)
    return found
