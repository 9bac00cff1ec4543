"""The ranks' last word before a restore: they all say the same, whoever is late, stays away or sees something else."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from sentinel import wire
from sentinel.hooks import rollback_consent
from sentinel.hooks.rollback_consent import Consent

WORLD = 4
PROMISE = wire.Prepare(id=7, at=20, to=10)


class Ranks:
    """Ranks that are threads, with a store and real collectives between them."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.here = threading.local()

    def each(self, action: Callable[[int], str]) -> list[str]:
        """What each rank comes to."""
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
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    made = Ranks()
    monkeypatch.setattr(rollback_consent, "group_store", lambda: made.store)
    monkeypatch.setattr(rollback_consent, "place", lambda: (made.here.rank, WORLD))
    return made


def test_all_of_them(ranks: Ranks) -> None:
    assert ranks.each(lambda _: Consent(10.0).asked(PROMISE, True, 0.0)) == [""] * WORLD


def test_none_where_one_got_no_verdict(ranks: Ranks) -> None:
    """The daemon died between two commits. Nobody waits for a time-out of a minute."""

    def act(rank: int) -> str:
        if rank == 2:
            Consent(10.0).withhold(PROMISE)
            return "went on"
        return Consent(60.0).asked(PROMISE, True, 0.0)

    begun = time.monotonic()
    assert ranks.each(act) == ["rank 2 got no verdict"] * 2 + ["went on", "rank 2 got no verdict"]
    assert time.monotonic() - begun < 30


def test_none_where_one_does_not_come_and_that_one_neither(ranks: Ranks) -> None:
    others = threading.Barrier(WORLD)

    def act(rank: int) -> str:
        if rank != 1:
            word = Consent(0.2).asked(PROMISE, True, 0.0)
            others.wait()
            return word
        others.wait()
        return Consent(0.2).asked(PROMISE, True, 0.0)

    (word,) = set(ranks.each(act))
    assert re.fullmatch(r"only [123] of 4 ranks came to step 20 within 0.2 s", word), (
        "of the three some may be late, too"
    )


def test_none_where_one_snapshot_is_not_sound(ranks: Ranks) -> None:
    words = ranks.each(lambda rank: Consent(10.0).asked(PROMISE, rank != 3, 0.0))
    assert words == ["the snapshot of step 10 is not sound on every rank"] * WORLD


def test_none_where_they_mean_different_steps(ranks: Ranks) -> None:
    def act(rank: int) -> str:
        return Consent(10.0).asked(wire.Prepare(id=7, at=20, to=5 if rank else 10), True, 0.0)

    assert ranks.each(act) == ["the ranks mean different snapshots or steps: [5, 20] to [10, 20]"] * WORLD


def test_none_where_one_dies_in_the_collective(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollback_consent, "VERIFY_SECONDS", 0.5)
    verify = Consent._verify

    def dying(self: Consent, promise: wire.Prepare, sound: bool, rank: int, world: int) -> str:
        return "dead" if rank == 2 else verify(self, promise, sound, rank, world)

    monkeypatch.setattr(Consent, "_verify", dying)
    monkeypatch.setattr(Consent, "_decide", _silent_when_dead(Consent._decide))
    words = ranks.each(lambda _: Consent(10.0).asked(PROMISE, True, 0.0))
    (others,) = {word for word in words if word != "dead"}
    assert "could not verify the rollback" in others


def _silent_when_dead(decide: Callable[..., str]) -> Callable[..., str]:
    return lambda self, promise, word: word if word == "dead" else decide(self, promise, word)


def test_whoever_is_late_by_chance_says_what_the_others_say(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delays on both sides of every time-out, ranks that are without a verdict: never two answers. In some rounds there
    is time for all, however busy the machine is."""
    chance = random.Random(0)
    seen: set[bool] = set()
    for number in range(20):
        patience, verify_seconds = (30.0, 30.0) if number % 5 == 0 else (0.05, 0.1)
        monkeypatch.setattr(rollback_consent, "VERIFY_SECONDS", verify_seconds)
        promise = wire.Prepare(id=100 + number, at=20, to=10)
        delays = [chance.choice([0.0, 0.0, 0.01, 0.05]) for _ in range(WORLD)]
        missed = chance.randrange(WORLD) if chance.random() < 0.3 else None
        entering = [chance.choice([0.0, 0.0, 0.0, 0.1]) for _ in range(WORLD)]

        def act(rank: int) -> str:
            time.sleep(delays[rank])  # noqa: B023
            consent = Consent(patience)  # noqa: B023
            if rank == missed:  # noqa: B023
                consent.withhold(promise)  # noqa: B023
                return "went on"
            verify = consent._verify
            consent._verify = lambda *a: (time.sleep(entering[rank]), verify(*a))[1]  # type: ignore[method-assign, func-returns-value]  # noqa: B023
            return consent.asked(promise, True, 0.0)  # noqa: B023

        words = [word for word in ranks.each(act) if word != "went on"]
        assert len(set(words)) == 1, words
        seen.add(words[0] == "")
    assert seen == {True, False}


def test_a_store_that_is_gone(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def __getattr__(self, name: str) -> Callable[..., None]:
            def fail(*_: object) -> None:
                raise RuntimeError("Connection reset by peer\nmore")

            return fail

    monkeypatch.setattr(rollback_consent, "group_store", Gone)
    words = ranks.each(lambda _: Consent(1.0).asked(PROMISE, True, 0.0))
    assert set(words) == {"the process group's store is gone (Connection reset by peer)"}
    ranks.each(lambda _: Consent(1.0).withhold(PROMISE) or "")


def test_one_process_needs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollback_consent, "group_store", lambda: None)
    assert Consent(1.0).asked(PROMISE, True, 0.0) == ""
    assert Consent(1.0).impossible() == ""
    monkeypatch.setattr(rollback_consent, "place", lambda: (0, 2))
    assert "no process group" in Consent(1.0).impossible()
