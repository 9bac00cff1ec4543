"""The spans of one run, made from the events in its history. Needs the extra `otlp`.

    sentinel.attempt            a start of the script, to the end of its last rank
      sentinel.phase            an evaluation, or another phase that `monitor.phase` names
      sentinel.snapshot         a snapshot of a rank
      sentinel.checkpoint       a snapshot written to disk
      sentinel.stall            a time without progress
      sentinel.rollback

A span is made at its end. The history stores up to where spans were sent: the next daemon continues there.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from sentinel.otlp.protocol import RANK, SCOPE, Value, make_attributes, make_resource, nanoseconds, span_id, trace_id
from sentinel.store import History, StoredEvent
from sentinel.text import drop_controls

LIMIT = 512
"""Events that are read at a time: the spans of one request."""
LINGER_SECONDS = 10.0
"""Seconds without a rank after which an attempt counts as over: connections break, and are made again."""

_TIMED = {
    "snapshot": "sentinel.snapshot",
    "snapshot on disk": "sentinel.checkpoint",
    "standstill over": "sentinel.stall",
    "rollback": "sentinel.rollback",
}
"""Names of spans by the kind of the event at their end, which says how long they took."""


class OpenPhase(NamedTuple):
    """A phase of a rank that has not ended."""

    attempt: int
    rank: int
    name: str
    began: float


class Progress(msgspec.Struct, frozen=True):
    """Which events spans were made from so far."""

    row: int = 0
    """Row of the last event."""
    attempts: int = 0
    """Spans of the attempts below this number were made."""
    phases: tuple[OpenPhase, ...] = ()
    failures: dict[int, str] = {}
    """How the first process with an exit status other than 0 ended, in words, by attempt."""


def read_progress(history: History) -> Progress:
    """Return how far this daemon, or the one before it, has come."""
    kept = history.span_mark()
    return msgspec.json.decode(kept, type=Progress) if kept else Progress()


def make_spans(history: History, progress: Progress, now: float, *, over: bool) -> tuple[list[Span], Progress]:
    """Return the next spans, and the new progress: the same one if there are no more. `over`: the run has ended."""
    made = _Maker(history, progress)
    events = history.events_after(progress.row, LIMIT)
    for row, event in events:
        made.add_event(row, event)
    if not events:
        made.end_attempts(now, over=over)
    return made.spans, Progress(made.row, made.attempts, tuple(made.phases), made.failures)


def encode_spans(spans: Iterable[Span]) -> ExportTraceServiceRequest:
    """Return a request to /v1/traces."""
    request = ExportTraceServiceRequest()
    request.resource_spans.add(resource=make_resource()).scope_spans.add(scope=SCOPE, spans=spans)
    return request


class _Maker:
    """Makes spans from the events after a progress."""

    def __init__(self, history: History, progress: Progress) -> None:
        self.spans: list[Span] = []
        self.row, self.attempts = progress.row, progress.attempts
        self.phases, self.failures = list(progress.phases), dict(progress.failures)
        self._history, self._run_id, self._host = history, history.run_id, platform.node()
        self._known: dict[str, Value] = {"sentinel.run": drop_controls(history.run), "sentinel.run_id": self._run_id}

    def add_event(self, row: int, event: StoredEvent) -> None:
        self.row = row
        rank = event.detail.get("rank", -1)
        if event.kind == "phase":
            self._end_phases(event.time, event.attempt, rank)
            if name := event.detail.get("name"):
                self.phases.append(OpenPhase(event.attempt, rank, name, event.time))
        elif event.kind in _TIMED:
            self._add_timed(event)
        elif event.kind == "process ended" and (status := event.detail.get("status")):
            self.failures.setdefault(event.attempt, f"rank {rank} ended with exit status {status}")

    def end_attempts(self, now: float, *, over: bool) -> None:
        """End the spans of attempts that are over: another has begun, or no rank came back."""
        known = self._history.attempts()
        for index, (number, began, ended) in enumerate(known):
            later = known[index + 1][1] if index + 1 < len(known) else None
            if ended is None or not (later or over or now - ended > LINGER_SECONDS):
                ended = later  # its end was not seen
            if ended is None or number < self.attempts:
                continue
            self._end_phases(ended, number)
            attributes: dict[str, Value] = {"sentinel.attempt": number}
            self._add("sentinel.attempt", number, began, ended, attributes, self.failures.pop(number, ""))
            self.attempts = number + 1

    def _end_phases(self, ended: float, attempt: int, rank: int | None = None) -> None:
        """End the open phases of one rank, or of all."""
        for phase in [one for one in self.phases if one.attempt == attempt and rank in (None, one.rank)]:
            self.phases.remove(phase)
            attributes: dict[str, Value] = {RANK: phase.rank, "sentinel.phase": drop_controls(phase.name)}
            self._add("sentinel.phase", attempt, phase.began, ended, attributes)

    def _add_timed(self, event: StoredEvent) -> None:
        detail = dict(event.detail)
        began = event.time - detail.pop("seconds", 0.0)
        failed = detail.pop("ok", True) is False
        attributes: dict[str, Value] = {"sentinel.seq": event.seq}
        if "rank" in detail:
            attributes[RANK] = detail.pop("rank")
        for name, value in detail.items():
            attributes[f"sentinel.{name}"] = drop_controls(value) if isinstance(value, str) else value
        error = str(attributes.get("sentinel.reason") or "failed") if failed else ""
        self._add(_TIMED[event.kind], event.attempt, began, event.time, attributes, error)

    def _add(
        self, name: str, attempt: int, began: float, ended: float, attributes: dict[str, Value], error: str = ""
    ) -> None:
        whole = name == "sentinel.attempt"
        parent = span_id(self._run_id, self._host, attempt)
        part = span_id(self._run_id, self._host, attempt, name, attributes.get(RANK), began)
        self.spans.append(
            Span(
                name=name,
                trace_id=trace_id(self._run_id),
                span_id=parent if whole else part,
                parent_span_id=b"" if whole else parent,
                kind=Span.SPAN_KIND_INTERNAL,
                start_time_unix_nano=nanoseconds(min(began, ended)),  # a clock may be set back
                end_time_unix_nano=nanoseconds(ended),
                attributes=make_attributes({**self._known, "sentinel.attempt": attempt, **attributes}),
                status=Status(code=Status.STATUS_CODE_ERROR, message=error) if error else None,
            )
        )
