"""The rank consensus over several nodes uses the process group's store, which may end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn

from bench.armed import RecordingSession
from sentinel import wire
from sentinel.errors import RunStopped
from sentinel.hooks.core import store_client
from sentinel.hooks.rollback import agreement
from sentinel.hooks.rollback.agreement import InDoubt, RankConsensus
from sentinel.hooks.rollback.options import Rollback
from sentinel.hooks.rollback.restorer import Restorer

WORLD = 3
PROMISE = wire.Prepare(id=7, at=20, to=10)
dist: Any = torch.distributed


def open_store() -> Any:
    """Open a store as the first rank of a job, or torchrun, does."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))


class Ranks:
    """Ranks that are threads, each on a node of its own, and the store of their process group."""

    def __init__(self) -> None:
        self.here = threading.local()
        self.server = open_store()

    def find_store(self) -> Any:
        """Return the store with a prefix, as a process group has it."""
        return dist.PrefixStore("default_pg", self.server)

    def consensus(self, patience: float) -> RankConsensus:
        made = RankConsensus(patience, lambda: None)
        assert made.impossible() == ""
        return made

    def end_store(self) -> None:
        """End the store with all its connections, as when its host is gone."""
        self.server = None

    def each(self, action: Callable[[int], str]) -> list[str]:
        """Run an action on all ranks at once, and return each one's result."""
        words = [""] * WORLD

        def run(rank: int) -> None:
            self.here.rank = rank
            try:
                words[rank] = action(rank)
            except InDoubt:
                words[rank] = "in doubt"

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(WORLD)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank hangs"
        return words


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    made = Ranks()
    monkeypatch.setattr(agreement, "place", lambda: (made.here.rank, WORLD))
    monkeypatch.setattr(agreement, "spans_nodes", lambda: True)
    monkeypatch.setattr(store_client, "group_store", made.find_store)
    return made


def test_all_ranks_restore_where_all_are_ready(ranks: Ranks) -> None:
    assert ranks.each(lambda _: ranks.consensus(10.0).ask_ranks(PROMISE, True, 0.0)) == [""] * WORLD


def test_no_rank_restores_where_one_got_no_verdict_or_does_not_come(ranks: Ranks) -> None:
    def act(rank: int) -> str:
        if rank == 2:
            ranks.consensus(10.0).withhold(PROMISE)
            return "went on"
        return ranks.consensus(60.0).ask_ranks(PROMISE, True, 0.0)

    assert ranks.each(act) == ["rank 2 got no verdict"] * 2 + ["went on"]
    other = wire.Prepare(id=8, at=20, to=10)
    words = ranks.each(lambda rank: "away" if rank == 2 else ranks.consensus(0.3).ask_ranks(other, True, 0.0))
    (word,) = {word for word in words if word != "away"}
    assert word.startswith("only ")
    assert word.endswith(" of 3 ranks came to step 20 within 0.3 s")


def test_without_a_store_that_all_reach_nothing_is_promised(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.here.rank = 0
    monkeypatch.setattr(store_client, "group_store", dist.HashStore)
    assert "is a HashStore, and must be a TCPStore" in RankConsensus(1.0, lambda: None).impossible()


def test_a_rank_that_is_ready_and_loses_the_store_is_in_doubt(ranks: Ranks) -> None:
    """The third rank, which hosts the store, ends. The others cannot know that nothing was decided by then."""
    ready = threading.Barrier(WORLD)

    def act(rank: int) -> str:
        consensus = ranks.consensus(30.0)
        if rank == 2:
            ready.wait()
            ranks.end_store()
            return "ended"
        ready.wait()
        return consensus.ask_ranks(PROMISE, True, 0.0)

    assert ranks.each(act) == ["in doubt", "in doubt", "ended"]


def test_a_connection_that_died_since_the_last_rollback_is_made_again(ranks: Ranks) -> None:
    made = threading.Barrier(WORLD)
    consensuses = [RankConsensus(10.0, lambda: None) for _ in range(WORLD)]

    def act(rank: int) -> str:
        assert consensuses[rank].impossible() == ""
        made.wait()
        if rank == 0:
            ranks.end_store()
            ranks.server = open_store()
        made.wait()
        assert consensuses[rank].impossible() == ""
        return consensuses[rank].ask_ranks(PROMISE, True, 0.0)

    assert ranks.each(act) == [""] * WORLD


def test_ranks_that_leave_wait_for_each_other_and_no_longer_than_the_store_lives(ranks: Ranks) -> None:
    """The third rank, which hosts the store, ends after the vote; the others leave, too."""
    voted = threading.Barrier(WORLD)

    def act(rank: int) -> str:
        consensus = ranks.consensus(10.0)
        reason = consensus.ask_ranks(PROMISE, True, 0.0)
        voted.wait()
        if rank == 2:
            ranks.end_store()
        else:
            consensus.await_ranks(PROMISE, 60.0)
        return reason or "left"

    assert ranks.each(act) == ["left"] * WORLD


def test_a_rank_in_doubt_does_not_train_on(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.here.rank = 0
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sent: list[wire.FromRank] = []
    restorer = Restorer(
        Rollback(every=1, margin=0), models=[model], optimizers=[optimizer], session=RecordingSession(sent=sent)
    )
    for seq in range(3):
        restorer.enter_step(seq)
        restorer.exit_step(seq, skipped=False)
    restorer.enter_step(3)
    restorer.receive(wire.Prepare(id=7, at=3, to=restorer.held[0]))
    assert [answer.ok for answer in sent if isinstance(answer, wire.Prepared)] == [True]
    restorer.receive(wire.Commit(id=7))
    ranks.end_store()
    with pytest.raises(RunStopped):
        restorer.exit_step(3, skipped=False)
    assert "the other ranks may have restored step" in capsys.readouterr().err
    (answer,) = (one for one in sent if isinstance(one, wire.RolledBack))
    assert (answer.ok, answer.touched) == (False, True)
    restorer.close()
