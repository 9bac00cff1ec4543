"""Asks the other nodes of a job on demand, with a deadline, and answers their questions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from sentinel.cluster.local_run import LocalRun
from sentinel.cluster.protocol.messages import decode, encode
from sentinel.cluster.protocol.questions import NodeAnswer, Question, pack_answer
from sentinel.errors import ProtocolError

if TYPE_CHECKING:
    from sentinel.cluster.session import Session

log = logging.getLogger(__name__)

ANSWER_SECONDS = 3.0
"""Seconds that nodes have to answer; ranks get two of them to say where they stand
(`sentinel/daemon/job/standstill.py`)."""
AT_ONCE = 4
"""Questions that are answered at a time. Further ones get no answer: who has the secret could ask without end."""


class HandOver(Protocol):
    """Calls a function in the daemon's loop, from any thread; returns False if the loop has ended."""

    def __call__(self, function: Callable[..., None], *arguments: object) -> bool: ...


class Inquiry:
    """Questions and answers of one run. Lives in the daemon's loop; the session calls `answer` in its threads."""

    def __init__(
        self, local: LocalRun, find_session: Callable[[], Session | None], hand_over: HandOver,
        refuse: Callable[[ProtocolError], None],
    ) -> None:  # fmt: skip
        """Prepare for questions in both directions. `refuse` counts a message that was refused."""
        self._local, self._find_session, self._hand_over, self._refuse = local, find_session, hand_over, refuse
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, question: Question, node: int | None = None) -> list[NodeAnswer]:
        """Return the answers, in parts, of one other node, or of all others: as many as came in time, and none without
        a session."""
        session = self._find_session()
        if session is None:
            return []
        found: list[NodeAnswer] = []
        complete = asyncio.Event()

        def take(sender: int, payload: bytes) -> None:
            try:
                answer = decode(payload, NodeAnswer)
                if answer.node != sender:
                    raise ProtocolError(f"node {sender} says that it is node {answer.node}")
            except ProtocolError as error:
                self._hand_over(self._refuse, error)
            else:
                found.append(answer)

        def finish() -> None:
            self._hand_over(complete.set)

        session.ask_view(node, encode(question), take, finish, ANSWER_SECONDS)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(complete.wait(), ANSWER_SECONDS + 0.5)
        return list(found)

    def answer(self, payload: bytes, reply: Callable[[list[bytes]], None]) -> None:
        """Answer another node's question. `reply` is called once, with nothing if the question is refused."""
        try:
            question = decode(payload, Question)
        except ProtocolError as error:
            self._hand_over(self._refuse, error)
            reply([])
            return
        if not self._hand_over(self._begin, question, reply):
            reply([])

    def _begin(self, question: Question, reply: Callable[[list[bytes]], None]) -> None:
        if len(self._tasks) >= AT_ONCE:
            reply([])
            return
        self._tasks.add(task := asyncio.create_task(self._reply(question, reply)))
        task.add_done_callback(self._tasks.discard)

    async def _reply(self, question: Question, reply: Callable[[list[bytes]], None]) -> None:
        parts: list[bytes] = []
        try:
            parts = pack_answer(await self._local.answer_question(question))
        except Exception:
            log.exception("a question of another node gets no answer")
        finally:
            reply(parts)
