"""Reinforcement learning, whose losses measure no progress: a Q-network with a target network, and a policy gradient.

All runs learn; what a rule could take for a fault is normal for them. Losses and gradient norms of real loops go
through the rules: without the other numbers that they log, and as a log by which they are recognised.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections import Counter, deque
from pathlib import Path

import pytest
import torch
from torch import nn

from sentinel.engine import RUN, Observation, Rule
from sentinel.engine.backtest import backtest
from sentinel.rulebook import loader
from sentinel.toolkit.backtest import Result, Terms, backtest_logs
from sentinel.toolkit.logs import find_logs
from tests.programs.balancing import LEARNERS, Loop

ROOT = Path(__file__).parents[2]
SIDE, RENEWED, BATCH = 5, 100, 64
Step = tuple[int, int, float, int, bool]


def moved(place: int, action: int) -> Step:
    """Return a step in a square of fields, which costs 1, until the last field is reached."""
    row, column = divmod(place, SIDE)
    down, right = [(0, 1), (1, 0), (0, -1), (-1, 0)][action]
    after = min(max(row + down, 0), SIDE - 1) * SIDE + min(max(column + right, 0), SIDE - 1)
    return place, action, -1.0, after, after == SIDE * SIDE - 1


def learnt(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    optimizer.zero_grad()
    loss.backward()
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients).item()
    optimizer.step()
    return {"loss": loss.item(), "grad_norm": norm}


def q_learning(seed: int, steps: int = 1000) -> list[dict[str, float]]:
    """DQN (Mnih and others, 2015): replay buffer, target network renewed every 100 steps."""
    torch.manual_seed(seed)
    generator = random.Random(seed)
    online, target = (nn.Sequential(nn.Embedding(SIDE * SIDE, 32), nn.ReLU(), nn.Linear(32, 4)) for _ in range(2))
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=3e-3)
    buffer: deque[Step] = deque(maxlen=5000)
    for _ in range(2000):  # random steps from random fields: off-policy learning needs no more
        buffer.append(moved(generator.randrange(SIDE * SIDE - 1), generator.randrange(4)))
    found = []
    for seq in range(steps):
        before, actions, rewards, after, over = (
            torch.tensor(part) for part in zip(*generator.sample(buffer, BATCH), strict=True)
        )
        with torch.no_grad():
            value = rewards + 0.95 * target(after).amax(1) * ~over
        guess = online(before).gather(1, actions[:, None])[:, 0]
        found.append(learnt((guess - value).square().mean(), optimizer))
        if seq % RENEWED == RENEWED - 1:
            target.load_state_dict(online.state_dict())
    best = online(torch.arange(SIDE * SIDE - 1)).argmax(1).tolist()
    assert all(moved(place, action)[3] > place for place, action in enumerate(best)), (
        "it has learnt the way to the goal"
    )
    return found


def policy_gradient(seed: int, steps: int = 1100) -> list[dict[str, float]]:
    """REINFORCE (Williams, 1992) on a bandit of ten arms, against a running mean of the reward."""
    torch.manual_seed(seed)
    means, logits, baseline, found = torch.randn(10), torch.zeros(10, requires_grad=True), 0.0, []
    optimizer = torch.optim.SGD([logits], lr=0.1)
    for _ in range(steps):
        policy = torch.distributions.Categorical(logits=logits)
        actions = policy.sample((16,))
        rewards = means[actions] + torch.randn(16)
        found.append(learnt(-(policy.log_prob(actions) * (rewards - baseline)).mean(), optimizer))
        baseline += 0.1 * (rewards.mean().item() - baseline)
    assert means[logits.argmax()] > means.median(), "it has learnt which arm is good"
    return found


def count_alerts(rows: list[dict[str, float]], rules: tuple[Rule, ...]) -> dict[str, int]:
    """Return alert -> how many times it fires."""
    observations = [Observation(seq, float(seq), {RUN: values}) for seq, values in enumerate(rows)]
    return Counter(alert.alert for alert in backtest(rules, observations, run="t").alerts)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 3])
def test_a_target_network_that_is_renewed_is_no_fault(tmp_path: Path, seed: int) -> None:
    rows = q_learning(seed)
    found = count_alerts(rows, loader.load().rules)
    assert found.keys() <= {"GradientSpike"}
    assert max(found.values(), default=0) <= 2, f"it is renewed {len(rows) // RENEWED} times"

    written = re.search(r"```yaml\n(group: rl\n.*?)```", (ROOT / "docs" / "loops.md").read_text(), re.DOTALL)
    assert written
    (tmp_path / "rl.yaml").write_text(written[1])
    book = loader.load([tmp_path])
    assert book.notes == ()
    assert count_alerts(rows, book.rules) == {}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2])
def test_a_policy_gradient_is_noise_around_zero(seed: int) -> None:
    assert count_alerts(policy_gradient(seed), loader.load().rules).keys() <= {"GradientSpike"}


def replay(path: Path, rows: list[dict[str, float]]) -> Result:
    path.write_text("".join(json.dumps({"step": step, **row}) + "\n" for step, row in enumerate(rows)))
    ((result,),) = backtest_logs(find_logs([str(path)]), Terms(), 1)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNERS)
def test_a_log_that_says_what_it_is_has_no_critical_alarm(name: str, tmp_path: Path) -> None:
    loop = Loop(broken_at=139)
    with contextlib.suppress(ValueError):  # no action can be drawn from a policy of NaNs
        LEARNERS[name](0, 140)[2](loop)
    result = replay(tmp_path / "run.jsonl", loop.rows[:139])
    assert len(result.rl_columns) >= 2
    assert {alert.severity for alert in result.alerts} <= {"warning"}
    broken = replay(tmp_path / "broken.jsonl", loop.rows)
    assert "NonFiniteLoss" in {alert.alert for alert in broken.alerts}, "a fault is one here, too"


def test_values_that_grow_with_the_reward_are_a_warning_where_the_log_says_so(tmp_path: Path) -> None:
    """A Q-network's loss falls to nothing, and rises at renewals of the target as the reward goes from 1 to 5,000."""
    generator = random.Random(0)
    rows = []
    for step in range(1200):
        reward = 1.0 if step < 300 else 1.0 + 5000 * (step - 300) / 900
        loss = (reward / 50 + 1.0 / (1 + step % 300)) * (1 + 0.1 * generator.random())
        rows.append({"loss": loss, "grad_norm": 1 + loss / 20})
    assert "critical" in {alert.severity for alert in replay(tmp_path / "a.jsonl", rows).alerts}, "it is not known"
    told = [{**row, "episode_reward": 1.0, "epsilon": 0.1} for row in rows]
    assert {alert.severity for alert in replay(tmp_path / "b.jsonl", told).alerts} == {"warning"}
