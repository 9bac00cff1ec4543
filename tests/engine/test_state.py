"""The rules' state is saved as bytes and restored: results afterwards are as if nothing had happened."""

from __future__ import annotations

import os
import pickle
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.engine import Evaluator, Incident, RuleStateError
from sentinel.engine.judging.state import dumps, loads
from tests.engine.test_rewind import LOADED, fed, run_of, small_history, told

__all__ = ["small_history"]

FORMER = b"csentinel.engine.watching\nWatch\n."
"""A pickled class that older states were made of."""


def resumed(evaluator: Evaluator, past: list) -> Evaluator:  # type: ignore[type-arg]
    state, checkpoints = evaluator.save_state()
    other = Evaluator(LOADED, run="t")
    other.restore(state, checkpoints, past)
    return other


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), before=st.integers(1, 90), after=st.integers(1, 40), back=st.integers(0, 40))
def test_another_evaluator_goes_on_from_it(seed: int, before: int, after: int, back: int) -> None:
    observations = run_of(seed, before + after)
    first = fed(observations[:before])
    second = resumed(first, observations[:before])
    assert repr(second.status()) == repr(first.status())
    for observation in observations[before:]:
        mine, other = first.observe(observation), second.observe(observation)
        assert told(iter(other)) == told(iter(mine))
        assert [transition.incident.id for transition in other] == [transition.incident.id for transition in mine]
    # The state includes incidents, and what a rollback needs.
    to = max(before + after - 1 - back, -1)
    assert told(iter(second.rewind(to, before + after))) == told(iter(first.rewind(to, before + after)))
    assert repr(second.status()) == repr(first.status())


def test_an_evaluator_that_kept_nothing_goes_on_and_can_be_rewound_from_there() -> None:
    observations = run_of(5, 60)
    first = fed(observations[:40], rewindable=False)
    state, checkpoints = first.save_state()
    second = Evaluator(LOADED, run="t", rewindable=False)
    second.restore(state, checkpoints, iter(observations[:40]))
    second.be_rewindable()
    for observation in observations[40:]:
        second.observe(observation)
    second.rewind(39, 59)
    clean = fed(observations[:40])
    clean.rewind(39, 39)  # so that nothing is firing in either
    assert repr(second.status()) == repr(clean.status())


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("echo broken into",)


@pytest.mark.parametrize("thing", [Evil(), subprocess.Popen, loads, pickle.loads, len])
def test_nothing_but_the_engines_own_data_is_read(thing: object) -> None:
    with pytest.raises(RuleStateError):
        loads(dumps([thing]))


@pytest.mark.parametrize("damage", [b"", b"\x80\x05", b"nonsense", dumps(LOADED[0].name)[:-1], FORMER])
def test_damaged_bytes_are_an_error_of_ours(damage: bytes) -> None:
    with pytest.raises(RuleStateError):
        loads(damage)


def test_an_incident_that_was_kept_without_its_evidence_is_read() -> None:
    incident = Incident(
        id=1, run="r", rule="A", severity="info", state="firing", first_seq=0, seq=0, time=0.0, members={}, summary="s",
        annotations={}, actions=(), runbook="",
    )  # fmt: skip
    made, values = incident.__reduce__()
    assert isinstance(values, tuple)
    former = values[: Incident.__struct_fields__.index("evidence")]

    class Former:
        def __reduce__(self) -> tuple[object, ...]:
            return made, former

    assert loads(dumps(Former())) == incident


def test_a_state_of_other_rules_changes_nothing() -> None:
    evaluator = fed(run_of(1, 20))
    before = repr(evaluator.status())
    state, checkpoints = Evaluator(LOADED[:2], run="t").save_state()
    with pytest.raises(RuleStateError):
        evaluator.restore(state, checkpoints, [])
    assert repr(evaluator.status()) == before
