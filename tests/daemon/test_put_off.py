"""Work that rules over many layers put off to the next step is still done, and reported, if no next step comes."""

from __future__ import annotations

import math
from array import array
from pathlib import Path

import pytest

from sentinel import wire
from sentinel.daemon import restoration
from sentinel.engine import Rule
from sentinel.engine.rules.loading import load_rules
from sentinel.runs import Run
from sentinel.store import History, Store
from tests.run_parts import watch_run
from tests.stock import RULES

LAYERS = 300
TABLE = wire.LayerTable(
    digest="d", layers=tuple(wire.Layer(name=f"layer {number}", shape=(2,), dtype="f") for number in range(LAYERS))
)
LOUD = "Loud0", "Loud1", "Loud2"


def rules() -> list[Rule]:
    expression = "median(layer_grad_norm, 1) > 5"
    lines = [f"  - {{alert: {name}, scope: layer, expr: '{expression}', severity: warning}}" for name in LOUD]
    loud = load_rules("\n".join(["group: t", "rules:", *lines]), "t.yaml").rules
    return [RULES["NonFiniteLoss"], *loud]


class LoudRun:
    """A run of one rank, whose last step is loud."""

    def __init__(self, folder: Path, loss: float = 1.0) -> None:
        self.path = folder / "runs" / "r1.sqlite"
        run = Run("train", "r1", 0.0)
        self.watch = watch_run(run, rules(), Store(self.path, run="train", run_id="r1"))
        identity = wire.Identity(run="train", run_id="r1", rank=0, world_size=1, session="s")
        self.hello = wire.Hello(version="t", identity=identity)
        self.rank = self.watch.ingest.hello(self.hello, 0.0)
        self.watch.ingest.message(self.rank, TABLE, 0.0)
        for seq in range(4):
            self.step(seq, 1.0, 1.0)
        self.step(4, 9.0, loss)

    def step(self, seq: int, norm: float, loss: float) -> None:
        block = wire.LayerBlock(seq=seq, table="d", stats={"layer_grad_norm": array("f", [norm] * LAYERS).tobytes()})
        batch = wire.Batch(
            seqs=array("q", [seq]).tobytes(),
            times=array("d", [1e9 + seq]).tobytes(),
            columns={"loss": wire.Column(array("d", [loss]).tobytes())},
            layers=(block,),
        )
        self.watch.ingest.message(self.rank, batch, float(seq))

    @property
    def alerts(self) -> set[str]:
        return {case.alert for case in self.watch.incidents.log.cases.values()}


def test_put_off_work_is_done_before_the_rank_leaves(tmp_path: Path) -> None:
    run = LoudRun(tmp_path)
    assert not run.alerts, "it was put off, or this shows nothing"
    run.watch.ingest.message(run.rank, wire.Goodbye(next_seq=5), 5.0)
    assert run.alerts == {*LOUD}


def test_put_off_work_is_done_when_a_run_ends_without_a_goodbye(tmp_path: Path) -> None:
    run = LoudRun(tmp_path)
    run.watch.ingest.drop_rank(run.rank, 5.0)
    assert run.alerts == {*LOUD}


@pytest.mark.parametrize("alert", [True, False])
def test_put_off_work_is_done_before_the_state_is_kept(tmp_path: Path, alert: bool) -> None:
    """A daemon that starts after a kill from a state that has the work as done would never report its alerts."""
    run = LoudRun(tmp_path, math.nan if alert else 1.0)
    if not alert:
        run.watch.incidents.preserve()
    store = run.watch.store
    assert store is not None
    store.close()
    again = Run("train", "r1", 0.0)
    watch = watch_run(again, rules())
    untold = restoration.resume(watch, run.path, run.hello, 0.0)
    opened = {incident.rule for incident in watch.incidents.evaluator.incidents}
    assert opened >= {*LOUD}
    known = {case.alert for case in watch.incidents.log.cases.values()}
    assert opened - {transition.incident.rule for transition in untold} == known
    with History(run.path) as history:
        assert {case["alert"] for case in history.incidents()} == opened
