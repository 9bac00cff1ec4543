"""The rules' state for rollbacks is kept only once a rank offers rollback, since keeping it costs at every step."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from sentinel import wire
from sentinel.daemon import restoration
from sentinel.daemon.run import saved_state
from sentinel.rulebook.loader import stock_rules
from sentinel.runs import Rank, Run
from sentinel.store import Store
from tests.run_parts import watch_run

TERMS = wire.RollbackTerms(every=10, keep=2, margin=5, budget=3)


class Ranks:
    """A watched run of up to two ranks."""

    def __init__(self, path: Path) -> None:
        run = Run("train", "r1", 0.0)
        self.watch = watch_run(run, stock_rules(), Store(path, run="train", run_id="r1"))
        self.seq = 0

    def hello(self, number: int = 0, terms: wire.RollbackTerms | None = None, *, world: int = 1) -> Rank:
        return self.watch.ingest.hello(_hello(number, terms, world, self.seq), 0.0)

    def steps(self, count: int, *ranks: Rank) -> None:
        seqs = range(self.seq, self.seq + count)
        self.seq += count
        batch = wire.Batch(
            seqs=array("q", seqs).tobytes(),
            times=array("d", [1e9 + seq for seq in seqs]).tobytes(),
            columns={"loss": wire.Column(array("d", [3.0 - seq % 7 / 10 for seq in seqs]).tobytes())},
        )
        for rank in ranks:
            self.watch.ingest.message(rank, batch, 1.0)

    @property
    def kept(self) -> list[int]:
        """The steps to whose state the rules can return."""
        return [seq for seq, _ in self.watch.incidents.evaluator.save_state()[1]]


def _hello(number: int, terms: wire.RollbackTerms | None, world: int, seq: int) -> wire.Hello:
    identity = wire.Identity(run="train", run_id="r1", rank=number, world_size=world, session=f"s{number}")
    return wire.Hello(version="t", identity=identity, rollback=terms, next_seq=seq)


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path / "runs" / "r1.sqlite")


def test_no_state_is_kept_for_a_run_without_rollback(ranks: Ranks) -> None:
    ranks.steps(600, ranks.hello())
    assert not ranks.kept


def test_state_is_kept_from_the_first_step_of_a_run_with_rollback(ranks: Ranks) -> None:
    ranks.steps(600, ranks.hello(terms=TERMS))
    assert ranks.kept == [255, 511]


def test_state_is_kept_once_a_rank_offers_rollback_in_a_later_hello(ranks: Ranks) -> None:
    ranks.steps(300, ranks.hello())
    rank = ranks.hello(terms=TERMS)
    assert ranks.kept == [299]
    ranks.steps(300, rank)
    assert ranks.kept == [299, 555]
    ranks.hello()  # the rank that takes the offer back may only be the one of several that came last
    assert ranks.kept == [299, 555]


def test_state_is_kept_once_another_rank_offers_rollback(ranks: Ranks) -> None:
    first = ranks.hello(world=2)
    ranks.steps(300, first, second := ranks.hello(1, world=2))
    assert not ranks.kept
    ranks.hello(1, TERMS, world=2)
    assert ranks.kept == [299]
    ranks.steps(300, first, second)
    assert ranks.kept == [299, 555]


@pytest.mark.parametrize("terms", [None, TERMS])
def test_the_next_daemon_keeps_state_as_the_former_did(ranks: Ranks, terms: wire.RollbackTerms | None) -> None:
    ranks.steps(600, ranks.hello(terms=terms))
    ranks.watch.incidents.preserve()
    store = ranks.watch.store
    assert store is not None
    store.close()
    run = Run("train", "r1", 0.0)
    watch = watch_run(run, stock_rules())
    restoration.resume(watch, store.path, _hello(0, terms, 1, 600), 0.0)
    state, checkpoints = watch.incidents.evaluator.save_state()
    assert [seq for seq, _ in checkpoints] == ranks.kept
    assert [seq for seq, _ in checkpoints] == ([255, 511] if terms else [])
    assert state == ranks.watch.incidents.evaluator.save_state()[0]
    watch.ingest.hello(_hello(0, TERMS, 1, 600), 0.0)
    assert [seq for seq, _ in watch.incidents.evaluator.save_state()[1]] == ([255, 511] if terms else [599])


def test_a_state_of_another_layout_has_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest differs even if the version of the daemon and the rules are the same."""
    ours = saved_state.digest(())
    monkeypatch.setattr(saved_state, "LAYOUT", saved_state.LAYOUT + 1)
    assert saved_state.digest(()) != ours


@pytest.mark.parametrize("layout", [0, 1], ids=["of ours", "of an older one"])
def test_steps_are_judged_again_where_the_state_has_an_older_layout(
    ranks: Ranks, layout: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks.steps(600, ranks.hello(terms=TERMS))
    monkeypatch.setattr(saved_state, "LAYOUT", saved_state.LAYOUT - layout)
    ranks.watch.incidents.preserve()
    monkeypatch.undo()
    store = ranks.watch.store
    assert store is not None
    store.close()
    run = Run("train", "r1", 0.0)
    watch = watch_run(run, stock_rules())
    assert restoration.resume(watch, store.path, _hello(0, TERMS, 1, 600), 0.0) == []
    assert ("the last 600 steps are judged again" in caplog.text) == bool(layout)
    assert watch.incidents.judged_to == 599
    assert next(row for row in watch.incidents.evaluator.status() if row.rule == "NonFiniteLoss").judged == 600
