"""The whole case of an incident, for people and programs: what, where, since when, why, what to do.

Steps in a case are the user's steps. Its shape is what `sentinel incidents --json` prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from sentinel.diagnose.catalogue import diagnose
from sentinel.diagnose.evidence import SURENESS, Evidence, Finding
from sentinel.diagnose.explainers.hang import training_ident
from sentinel.diagnose.signs import SHOWN_LAYERS, GrownLayer, Sign, first_signs, grown_layers
from sentinel.diagnose.standstill.stacks import arrange_dump
from sentinel.engine import Entity, Incident
from sentinel.runs import Attempt, Run
from sentinel.runs.steps import RunStep
from sentinel.signals import CLOCK, SIGNALS, Signal
from sentinel.text import rank_severity
from sentinel.wire.evidence import Census, Moments, OutOfMemory, Provenance

STACK_BYTES, STACK_RANKS = 32 * 1024, 64
"""Bytes of stacks per rank, and number of ranks with stacks, that a case keeps at most."""
COLLECTED_RANKS = 64
EARLIER = 16
"""Steps before the first sign that evidence may be from: ranks look at what they notice themselves, when they notice
it."""


class CaseMember(msgspec.Struct, frozen=True):
    """A rank, a layer, a GPU or a node that the incident holds for; for a run-wide rule, the run."""

    scope: str
    name: str
    first_step: int
    values: dict[str, float]
    node: str = ""
    """Number of its node, in an incident of a job over several nodes."""


BY_RANK = ("stacks", "census", "out_of_memory", "moments", "provenance")
"""Evidence of a case, by rank: in a job over several nodes, a node has only that of its own ranks."""


class Case(msgspec.Struct, kw_only=True):
    """An incident with its evidence."""

    id: str
    run: str
    run_id: str
    attempt: int
    alert: str
    severity: str
    problem: str = ""
    """The problem that it is a sign of, by its cause or its rule; empty: it is never one sign of several."""
    consequence_of: tuple[str, ...] = ()
    """Problems that cause it, by its rule."""
    problem_id: str = ""
    """Id of the incident that opened the problem, which never changes; empty where there is no problem, and in
    histories that are older than problems."""
    parent: str = ""
    """Id of the incident of which this one is a consequence; empty: it is none."""
    state: str
    first_step: int
    """First step of the first sign, or of the condition where no sign was found; earlier if the diagnosis says so."""
    first_seq: int
    step: int
    """Step at which the alert fired."""
    resolved_step: int | None = None
    time: float
    resolved_time: float | None = None
    members: tuple[CaseMember, ...]
    summary: str
    runbook: str = ""
    diagnosis: Finding
    signs: tuple[Sign, ...] = ()
    layers: tuple[GrownLayer, ...] = ()
    grown: int = 0
    """Number of layers that grew; `layers` holds the first few."""
    stacks: dict[str, str] = {}
    """Rank -> dump of the stacks of its threads, where the rule asks for them; the training thread comes first."""
    census: dict[str, Census] = {}
    """Rank -> what holds the growing objects."""
    out_of_memory: dict[str, OutOfMemory] = {}
    """Rank -> what it held when an allocation failed."""
    moments: dict[str, Moments] = {}
    """Rank -> second moments against gradients, and the exponents of the gradients."""
    provenance: dict[str, Provenance] = {}
    """Rank -> where the first value that is not finite came from."""
    done: tuple[str, ...] = ()
    """What Sentinel did about it."""
    leaves: str = ""
    """What still holds after the rule ended it, in the rule's words."""
    silenced: str = ""
    """Id of the silence that keeps receivers from being notified."""
    told: bool = False
    """Whether receivers were notified that it fired."""
    of_job: bool = False
    """Whether it was judged over the ranks of all nodes of a job."""

    @property
    def level(self) -> int:
        """Rank of its severity: the larger, the more severe."""
        return rank_severity(self.severity)

    def builtins(self) -> dict[str, Any]:
        """Return the case as plain dicts, lists and numbers."""
        body: dict[str, Any] = msgspec.to_builtins(self)
        return body


def open_case(
    run: Run, attempt: Attempt, incident: Incident, unasked: Mapping[int, str] = MappingProxyType({})
) -> Case:
    """Collect the evidence of an incident that fired, and diagnose it. `unasked`: as in `Evidence`."""
    if "census" in incident.evidence:
        attempt.before_alert = {incident.id: list(attempt.recent)}  # for the last incident only: these are 2,048 steps
    evidence = _evidence(attempt, incident, unasked)
    offset, diagnosis = attempt.step_offset, diagnose(evidence, incident.annotations.get("remedy", ""))
    first_step = evidence.onset + offset
    if diagnosis.since is not None:
        first_step = min(first_step, diagnosis.since)
    return Case(
        id=str(incident.id),
        run=run.name,
        run_id=run.run_id,
        attempt=attempt.number,
        alert=incident.rule,
        severity=incident.severity,
        problem=diagnosis.problem or incident.problem,
        consequence_of=tuple(incident.consequence_of),
        state=incident.state,
        first_step=first_step,
        first_seq=first_step - offset,
        step=incident.seq + offset,
        time=incident.time + attempt.clock_shift,
        members=_members(incident, offset),
        summary=incident.summary,
        runbook=incident.runbook,
        diagnosis=diagnosis,
        signs=tuple(msgspec.structs.replace(sign, seq=sign.seq + offset) for sign in evidence.signs),
        layers=tuple(evidence.layers[:SHOWN_LAYERS]),
        grown=len(evidence.layers),
        stacks=_stacks(attempt, incident),
        provenance=_by_name(evidence.provenance),
        census=_by_name(evidence.census),
        moments=_by_name(evidence.moments),
        out_of_memory=_by_name(evidence.out_of_memory),
    )


def add_evidence(
    case: Case, incident: Incident, attempt: Attempt, unasked: Mapping[int, str] = MappingProxyType({})
) -> None:
    """Diagnose again with the evidence that is known by now. About what happens between two steps less may be known
    than before, as ranks that go on, one after the other, forget what they did: then the earlier diagnosis stays."""
    evidence = _evidence(attempt, incident, unasked)
    if case.layers and not evidence.layers:  # their samples are no longer in memory
        evidence = msgspec.structs.replace(evidence, layers=case.layers)
    found = diagnose(evidence, incident.annotations.get("remedy", ""))
    if not (_by_the_clock(incident) and SURENESS[found.confidence] < SURENESS[case.diagnosis.confidence]):
        case.diagnosis = found
        case.problem = found.problem or incident.problem
    case.census = case.census | _by_name(evidence.census)
    case.moments = case.moments | _by_name(evidence.moments)
    case.provenance = case.provenance | _by_name(evidence.provenance)
    case.stacks = case.stacks | _stacks(attempt, incident)  # a rank that has gone on drops its own stacks


def _evidence(attempt: Attempt, incident: Incident, unasked: Mapping[int, str]) -> Evidence:
    steps = attempt.before_alert.get(incident.id) or list(attempt.recent)
    if incident.first_seq >= attempt.stage_seq > 0:  # earlier steps have nothing to do with it
        steps = [step for step in steps if step.seq >= attempt.stage_seq]
    signs = first_signs(steps, incident.first_seq, incident.seq) if _is_undoable(incident) else []
    onset = min([incident.first_seq, *(sign.seq for sign in signs)])
    before_any = RunStep(-1, incident.time, {}, {})
    return Evidence(
        alert=incident.rule,
        about_layers=incident.layers,
        since=incident.first_seq,
        until=incident.seq,
        numbers={entity.name: member.values for entity, member in incident.members.items()},
        signs=signs,
        layers=grown_layers(attempt.recent_layers, onset, incident.seq, steps) if incident.layers else [],
        last=_find_step(steps, incident.first_seq) or (steps[-1] if steps else before_any),
        steps=steps,
        ranks=tuple(int(entity.name) for entity in incident.members if entity.scope == "rank"),
        members=tuple(entity.name for entity in incident.members if entity.scope == "layer"),
        blocks=attempt.layer_samples,
        table=attempt.layers,
        facts=attempt.facts,
        step_offset=attempt.step_offset,
        live=attempt.ranks,
        unasked=unasked,
        differing=dict(attempt.recent_differing),
        gpus=[gpu for gpu in attempt.devices.gpus.values() if Entity("gpu", str(gpu.index)) in incident.members],
        withheld_by=attempt.withheld_by,
        devices=attempt.devices,
        census=_select_collected(attempt, incident, "census", onset - EARLIER),
        out_of_memory=_select_collected(attempt, incident, "out_of_memory", onset - EARLIER),
        moments=_select_collected(attempt, incident, "moments", onset - EARLIER),
        provenance=_select_collected(attempt, incident, "provenance", onset - EARLIER),
    )


def _select_collected(attempt: Attempt, incident: Incident, what: str, since: int) -> dict[int, Any]:
    """Return rank -> its evidence of one kind, where the rule wants it and it is from this incident."""
    if what not in incident.evidence:
        return {}
    held = [(number, rank.collected.get(what)) for number, rank in sorted(attempt.ranks.items())[:COLLECTED_RANKS]]
    return {number: found for number, found in held if found is not None and found.seq >= since}


def _by_name(found: Mapping[int, Any]) -> dict[str, Any]:
    return {str(number): value for number, value in found.items()}


def _by_the_clock(incident: Incident) -> bool:
    """Return whether the incident is about what happens between two steps."""
    return any(signal.tier == CLOCK for signal in _list_signals(incident))


def _is_undoable(incident: Incident) -> bool:
    """Return whether the incident is only about what a rollback undoes. What the loss and the gradients did is no sign
    of trouble with times, memory, or what happens between two steps, however close it was."""
    return all(signal.undoable for signal in _list_signals(incident))


def _list_signals(incident: Incident) -> list[Signal]:
    names = {name for member in incident.members.values() for name in member.values}
    return [SIGNALS[name] for name in names if name in SIGNALS]


def _stacks(attempt: Attempt, incident: Incident) -> dict[str, str]:
    if "stacks" not in incident.actions:
        return {}
    dumped = sorted((number, rank) for number, rank in attempt.ranks.items() if rank.dump)[:STACK_RANKS]
    return {str(number): arrange_dump(rank.dump, training_ident(rank))[:STACK_BYTES] for number, rank in dumped}


def update_case(case: Case, incident: Incident, attempt: Attempt) -> None:
    """Take over what changed since the case was opened: members, state, end."""
    case.state = incident.state
    case.members = _members(incident, attempt.step_offset)
    if incident.resolved_time is not None:
        case.resolved_time = incident.resolved_time + attempt.clock_shift
    if incident.resolved_seq is not None:
        case.resolved_step = incident.resolved_seq + attempt.step_offset
    case.leaves = incident.annotations.get("over", "")


def _members(incident: Incident, offset: int) -> tuple[CaseMember, ...]:
    return tuple(
        CaseMember(entity.scope, entity.name, member.first_seq + offset, dict(member.values))
        for entity, member in incident.members.items()
    )


def _find_step(steps: Sequence[RunStep], seq: int) -> RunStep | None:
    return next((step for step in reversed(steps) if step.seq == seq), None)
