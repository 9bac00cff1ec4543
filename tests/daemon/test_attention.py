"""For how long every step is sampled while an alert stays open."""

from __future__ import annotations

import pytest

from sentinel import wire
from sentinel.daemon.run.attention import ATTEND_STEPS, MESSAGES, Attention
from sentinel.runs import Run


class Asked:
    """A run of one rank, and a record of the steps that it is asked to sample."""

    def __init__(self) -> None:
        run = Run("train", "r1", 0.0)
        identity = wire.Identity(run="train", run_id="r1", session="s")
        run.hello(wire.Hello(version="t", identity=identity), 0.0)
        self.attention = Attention(run.attempt, self)
        self.sampled: set[int] = set()
        self.rare: list[bool] = []
        """For each message, whether it asks for tier 3."""
        self.seq = -1

    def send(self, rank: int, message: wire.Message) -> None:
        assert isinstance(message, wire.Attend)
        self.rare.append(message.rare)
        self.sampled |= set(range(self.seq + 1, self.seq + 1 + message.steps))

    def judge(self, steps: int, *suspicions: str, rare: tuple[str, ...] = ()) -> set[int]:
        """Let `steps` steps pass in batches of five, and return those that are sampled."""
        first = self.seq + 1
        for _ in range(steps // 5):
            self.seq += 5
            self.attention.advance(self.seq, suspicions, (), rare)
        return self.sampled & set(range(first, self.seq + 1))


LIMIT = ATTEND_STEPS * MESSAGES


@pytest.fixture
def asked() -> Asked:
    return Asked()


def test_an_alert_that_stays_open_is_sampled_for_a_while(asked: Asked) -> None:
    assert asked.judge(100) == set()
    assert len(asked.judge(100, "AlwaysClipping")) == 95  # every step after the first batch
    asked.judge(10_000, "AlwaysClipping")
    assert LIMIT <= len(asked.sampled) <= LIMIT + ATTEND_STEPS


def test_another_alert_is_sampled_beside_it(asked: Asked) -> None:
    asked.judge(5_000, "AlwaysClipping")
    assert len(asked.judge(100, "AlwaysClipping", "LossSpike")) == 95


def test_an_alert_that_comes_and_goes_is_sampled_less(asked: Asked) -> None:
    found = [asked.judge(10, *["AlwaysClipping"] * (turn % 10 == 0)) for turn in range(2_000)]
    assert sum(map(len, found[:100])) >= 450
    assert sum(map(len, found[1_000:])) < 0.15 * 10_000
    asked.judge(10 * LIMIT)
    assert len(asked.judge(100, "AlwaysClipping")) == 95


def test_tier_3_is_asked_for_by_rules_that_it_decides_and_no_longer_than_the_rest(asked: Asked) -> None:
    asked.judge(100, "LossSpike")
    assert not any(asked.rare)
    asked.judge(200)
    asked.judge(2 * LIMIT, "LostUpdates", rare=("LostUpdates",))
    assert asked.rare.count(True) <= 2 * MESSAGES
    asked.rare.clear()
    asked.judge(100, "LostUpdates", "GradientSpike", rare=("LostUpdates",))
    assert asked.rare
    assert not any(asked.rare)
