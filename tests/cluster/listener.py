"""A listener of a session that keeps what it hears, and answers nothing."""

from __future__ import annotations

from typing import Any

from sentinel.errors import ProtocolError


class Listener:
    """A `SessionListener`."""

    def __init__(self) -> None:
        self.pulses: list[int] = []
        """Nodes from which a pulse came."""
        self.refused: list[str] = []
        self.links: list[str] = []

    def receive(self, kind: str, node: int, payload: bytes) -> None:
        if kind == "pulse":
            self.pulses.append(node)

    def answer_events(self, after: int, query: Any) -> None:
        pass

    def answer_question(self, question: bytes, query: Any) -> None:
        query.reply()

    def refuse(self, error: ProtocolError) -> None:
        self.refused.append(str(error))

    def note_link(self, locator: str) -> None:
        self.links.append(locator)
