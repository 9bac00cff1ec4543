"""Asks the other nodes of a job on demand, with a deadline, and answers their questions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from sentinel.cluster.connection import Connection
from sentinel.cluster.local_run import LocalRun
from sentinel.cluster.protocol.messages import decode, encode
from sentinel.cluster.protocol.questions import NodeAnswer, Question, pack_answer
from sentinel.errors import ProtocolError

if TYPE_CHECKING:
    from sentinel.cluster.session import NodeQuery

log = logging.getLogger(__name__)

ANSWER_SECONDS = 3.0
"""Seconds that nodes have to answer; ranks get two of them to say where they stand
(`sentinel/daemon/job/standstill.py`)."""
AT_ONCE = 4
"""Questions that are answered at a time. Further ones get no answer: who has the secret could ask without end."""


class Inquiry:
    """Questions and answers of one run. Lives in the daemon's loop; the session calls `answer` in its threads."""

    def __init__(self, connection: Connection, local: LocalRun) -> None:
        """Prepare for questions in both directions."""
        self._connection, self._local = connection, local
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, question: Question, node: int | None = None) -> list[NodeAnswer]:
        """Return the answers, in parts, of one other node, or of all others: as many as came in time, and none without
        a session."""
        connection, session = self._connection, self._connection.session
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
                connection.call_in_loop(connection.refuse, error)
            else:
                found.append(answer)

        def finish() -> None:
            connection.call_in_loop(complete.set)

        session.ask_view(node, encode(question), take, finish, ANSWER_SECONDS)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(complete.wait(), ANSWER_SECONDS + 0.5)
        return list(found)

    def answer(self, payload: bytes, query: NodeQuery) -> None:
        """Answer another node's question; without parts, if the question is refused."""
        try:
            question = decode(payload, Question)
        except ProtocolError as error:
            self._connection.call_in_loop(self._connection.refuse, error)
            query.reply()
            return
        if not self._connection.call_in_loop(self._begin, question, query):
            query.reply()

    def _begin(self, question: Question, query: NodeQuery) -> None:
        if len(self._tasks) >= AT_ONCE:
            query.reply()
            return
        self._tasks.add(task := asyncio.create_task(self._reply(question, query)))
        task.add_done_callback(self._tasks.discard)

    async def _reply(self, question: Question, query: NodeQuery) -> None:
        parts: list[bytes] = []
        try:
            parts = pack_answer(await self._local.answer_question(question))
        except Exception:
            log.exception("a question of another node gets no answer")
        finally:
            query.reply(*parts)
