"""All ranks come to the same decision before a restore, even if one is late, absent or sees something else."""

from __future__ import annotations

import errno
import os
import random
import re
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from bench.armed import RecordingSession
from sentinel import wire
from sentinel.hooks.rollback import agreement
from sentinel.hooks.rollback.agreement import DirectoryBallot, InDoubt, RankConsensus
from sentinel.hooks.rollback.options import Rollback
from sentinel.hooks.rollback.restorer import Restorer
from sentinel.node import locks

WORLD = 4
PROMISE = wire.Prepare(id=7, at=20, to=10)


class Ranks:
    """Ranks that are threads, with a directory between them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.here = threading.local()

    def consensus(self, patience: float) -> RankConsensus:
        """Return a consensus object for the rank of the calling thread."""
        made = RankConsensus(patience, lambda: self.folder)
        assert made.impossible() == ""
        return made

    def each(self, action: Callable[[int], str]) -> list[str]:
        """Run an action on all ranks at once, and return each one's result."""
        words = [""] * WORLD

        def run(rank: int) -> None:
            self.here.rank = rank
            words[rank] = action(rank)

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(WORLD)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank hangs"
        return words


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path / "run")
    monkeypatch.setattr(agreement, "place", lambda: (made.here.rank, WORLD))
    return made


def say_ready(folder: Path, rank: int) -> None:
    """Write that this rank's snapshot is sound and that it is ready, as it does before it waits for the others."""
    ballot = DirectoryBallot(folder)
    assert ballot.write(f"{PROMISE.id}-rank-{rank}", f"{PROMISE.to} {PROMISE.at} 1") == ""
    ballot.close()


def test_all_ranks_restore_where_all_are_ready(ranks: Ranks) -> None:
    assert ranks.each(lambda _: ranks.consensus(10.0).ask_ranks(PROMISE, True, 0.0)) == [""] * WORLD


def test_no_rank_restores_where_one_got_no_verdict(ranks: Ranks) -> None:
    """The daemon died between two commits. The other ranks do not wait for their time-out of a minute."""

    def act(rank: int) -> str:
        if rank == 2:
            ranks.consensus(10.0).withhold(PROMISE)
            return "went on"
        return ranks.consensus(60.0).ask_ranks(PROMISE, True, 0.0)

    begun = time.monotonic()
    assert ranks.each(act) == ["rank 2 got no verdict"] * 2 + ["went on", "rank 2 got no verdict"]
    assert time.monotonic() - begun < 30


def test_no_rank_restores_where_one_comes_too_late(ranks: Ranks) -> None:
    others = threading.Barrier(WORLD)

    def act(rank: int) -> str:
        if rank != 1:
            word = ranks.consensus(0.2).ask_ranks(PROMISE, True, 0.0)
            others.wait()
            return word
        others.wait()
        return ranks.consensus(0.2).ask_ranks(PROMISE, True, 0.0)

    (word,) = set(ranks.each(act))
    assert re.fullmatch(r"only [123] of 4 ranks came to step 20 within 0.2 s", word), (
        "of the three some may be late, too"
    )


def test_no_rank_restores_where_one_snapshot_is_not_sound(ranks: Ranks) -> None:
    words = ranks.each(lambda rank: ranks.consensus(10.0).ask_ranks(PROMISE, rank != 3, 0.0))
    assert words == ["the snapshot of step 10 is not sound on every rank"] * WORLD


def test_the_rank_whose_snapshot_is_not_sound_says_why(ranks: Ranks) -> None:
    def act(rank: int) -> str:
        if rank != 3:
            return ranks.consensus(60.0).ask_ranks(PROMISE, True, 0.0)
        model = nn.Linear(2, 1)
        nn.init.constant_(model.weight, float("nan"))
        session = RecordingSession(find_directory=lambda: ranks.folder)
        restorer = Restorer(
            Rollback(every=1, margin=0),
            models=[model],
            optimizers=[torch.optim.SGD(model.parameters())],
            session=session,
        )
        restorer.enter_step(10)
        restorer.exit_step(10, skipped=False)
        restorer.receive(PROMISE)
        restorer.receive(wire.Commit(id=PROMISE.id))
        restorer.enter_step(20)
        restorer.exit_step(20, skipped=False)
        restorer.close()
        (answer,) = (one for one in session.sent if isinstance(one, wire.RolledBack))
        return answer.reason

    words = ranks.each(act)
    assert words[:3] == ["the snapshot of step 10 is not sound on every rank"] * 3
    assert words[3] == "the snapshot of step 10 is not finite: weight"


def test_no_rank_restores_where_they_mean_different_steps(ranks: Ranks) -> None:
    def act(rank: int) -> str:
        return ranks.consensus(10.0).ask_ranks(wire.Prepare(id=7, at=20, to=5 if rank else 10), True, 0.0)

    assert ranks.each(act) == ["the ranks mean different snapshots or steps: [5, 20] to [10, 20]"] * WORLD


def test_the_others_restore_where_one_ends_after_all_were_ready(ranks: Ranks) -> None:
    """The rank that ends may host the store, or be about to write the decision: the others know its readiness."""

    def act(rank: int) -> str:
        if rank != 0:
            return ranks.consensus(10.0).ask_ranks(PROMISE, True, 0.0)
        say_ready(ranks.folder, 0)
        return "killed"

    assert ranks.each(act) == ["killed", "", "", ""]


def test_no_rank_restores_where_one_ends_before_it_was_ready(ranks: Ranks) -> None:
    words = ranks.each(lambda rank: "killed" if rank == 0 else ranks.consensus(0.3).ask_ranks(PROMISE, True, 0.0))
    (others,) = {word for word in words if word != "killed"}
    assert re.fullmatch(r"only [123] of 4 ranks came to step 20 within 0.3 s", others)


def test_a_rank_that_stood_still_finds_what_the_others_decided(ranks: Ranks) -> None:
    """The rank was stopped after it said that it is ready, for longer than the others wait."""
    consents: list[RankConsensus] = []

    def act(rank: int) -> str:
        consensus = ranks.consensus(10.0)
        if rank == 0:
            say_ready(ranks.folder, 0)
            consents.append(consensus)
            return "stopped"
        return consensus.ask_ranks(PROMISE, True, 0.0)

    assert ranks.each(act)[1:] == [""] * 3
    ranks.here.rank = 0
    assert consents[0].ask_ranks(PROMISE, True, 0.0) == ""


def test_slow_steps_are_not_waited_for_without_end(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "MOST_SECONDS", 0.2)
    ranks.here.rank = 0
    assert ranks.consensus(10.0).ask_ranks(PROMISE, True, 1000.0) == "only 1 of 4 ranks came to step 20 within 0.2 s"


def test_ranks_with_random_delays_come_to_one_decision(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """With delays on both sides of every time-out, and ranks without a verdict, there are never two decisions.

    In some rounds there is time for all, however busy the machine is.
    """
    chance = random.Random(0)
    seen: set[bool] = set()
    deciding, write = [0.0] * WORLD, DirectoryBallot.write

    def write_late(ballot: DirectoryBallot, name: str, text: str) -> str:
        if name.endswith("-decided"):
            time.sleep(deciding[ranks.here.rank])
        return write(ballot, name, text)

    monkeypatch.setattr(DirectoryBallot, "write", write_late)
    for number in range(20):
        patience = 30.0 if number % 5 == 0 else 0.05
        promise = wire.Prepare(id=100 + number, at=20, to=10)
        delays = [chance.choice([0.0, 0.0, 0.01, 0.05]) for _ in range(WORLD)]
        missed = chance.randrange(WORLD) if chance.random() < 0.3 else None
        deciding[:] = [chance.choice([0.0, 0.0, 0.0, 0.1]) for _ in range(WORLD)]

        def act(rank: int) -> str:
            time.sleep(delays[rank])  # noqa: B023
            consensus = ranks.consensus(patience)  # noqa: B023
            if rank == missed:  # noqa: B023
                consensus.withhold(promise)  # noqa: B023
                return "went on"
            return consensus.ask_ranks(promise, True, 0.0)  # noqa: B023

        words = [word for word in ranks.each(act) if word != "went on"]
        assert len(set(words)) == 1, words
        seen.add(words[0] == "")
    assert seen == {True, False}


def test_a_directory_that_is_gone(ranks: Ranks) -> None:
    """The directory was deleted by hand: no rank can say that it is ready."""

    def act(rank: int) -> str:
        consensus = ranks.consensus(10.0)
        shutil.rmtree(ranks.folder, ignore_errors=True)
        return consensus.ask_ranks(PROMISE, True, 0.0)

    ranks.here.rank = 0
    word = act(0)
    assert word == "rank 0 could not say that it is ready (No such file or directory)"


def test_a_rank_that_is_ready_and_cannot_take_it_back_is_in_doubt(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full once the rank has waited long enough, and has room again when the others come."""
    symlink = os.symlink

    def link_in_full_disk(text: str, path: Path) -> None:
        if path.name.endswith("-decided"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        symlink(text, path)

    ranks.here.rank = 0
    with monkeypatch.context() as full:
        full.setattr(os, "symlink", link_in_full_disk)
        with pytest.raises(InDoubt, match="neither written nor read"):
            ranks.consensus(0.1).ask_ranks(PROMISE, True, 0.0)
    assert ranks.each(lambda rank: ranks.consensus(10.0).ask_ranks(PROMISE, True, 0.0) if rank else "in doubt") == [
        "in doubt", "", "", "",
    ]  # fmt: skip


def test_no_descriptor_is_needed_once_the_rank_has_promised(ranks: Ranks) -> None:
    """A process that has run out of file descriptors takes part."""
    ranks.here.rank = 0
    consensus = ranks.consensus(10.0)
    for rank in range(1, WORLD):
        say_ready(ranks.folder, rank)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        assert consensus.ask_ranks(PROMISE, True, 0.0) == ""
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_run_has_a_directory_of_its_own_until_it_closes(ranks: Ranks) -> None:
    ranks.here.rank = 0
    consensus = ranks.consensus(0.0)
    consensus.ask_ranks(PROMISE, True, 0.0)
    assert not locks.clear(ranks.folder), "a rank lives there"
    consensus.close()
    assert locks.clear(ranks.folder)
    assert not ranks.folder.exists()


def test_a_run_of_one_process_needs_no_consensus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert RankConsensus(1.0, lambda: None).ask_ranks(PROMISE, True, 0.0) == ""
    assert RankConsensus(1.0, lambda: None).impossible() == ""
    monkeypatch.setattr(agreement, "place", lambda: (0, 2))
    assert "not known" in RankConsensus(1.0, lambda: None).impossible()
    (tmp_path / "file").touch()
    assert "cannot make the directory" in RankConsensus(1.0, lambda: tmp_path / "file" / "run").impossible()
