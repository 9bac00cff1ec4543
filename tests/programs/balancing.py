"""Small reinforcement learning as users write it: sticks to balance, and five ways to learn it.

Each learner takes a `Loop`, which makes the optimizer's steps, and logs what such scripts log.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.distributions import Categorical

LONGEST = 60
GAMES = 8


class Sticks:
    """Several games at once. A stick falls to the side to which it leans; each step that it stands is rewarded by 1."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.state = self._begin()
        self.ages = torch.zeros(GAMES)

    def step(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Move the sticks; return which fell, and which games are over."""
        angle, speed = self.state.T
        speed = speed + 0.1 * (3 * angle + 2 * (2 * actions - 1))
        self.state = torch.stack((angle + 0.1 * speed, speed), 1)
        self.ages += 1
        fell = self.state[:, 0].abs() > 0.5
        return fell, fell | (self.ages >= LONGEST)

    def begin_again(self, over: torch.Tensor) -> None:
        """Restart the games that are over."""
        self.state = torch.where(over[:, None], self._begin(), self.state)
        self.ages[over] = 0

    def _begin(self) -> torch.Tensor:
        return (torch.rand(GAMES, 2, generator=self._generator) - 0.5) / 5


class Played(NamedTuple):
    """The steps of one game of each stick."""

    states: torch.Tensor
    actions: torch.Tensor
    logs: torch.Tensor
    returns: torch.Tensor
    length: float
    """Mean length of a game, which is also its mean reward."""


@torch.no_grad()
def play(model: nn.Module, games: Sticks) -> Played:
    """Play until every game is over; return only the steps before a game's end."""
    games.begin_again(torch.ones(GAMES, dtype=torch.bool))
    steps, alive = [], torch.ones(GAMES, dtype=torch.bool)
    while alive.any():
        choice = Categorical(logits=model(games.state)[:, :2])
        actions = choice.sample()
        steps.append((games.state, actions, choice.log_prob(actions), alive))
        alive = alive & ~games.step(actions)[1]
    states, actions, logs, mask = (torch.stack(part) for part in zip(*steps, strict=True))
    left = mask.flip(0).cumsum(0).flip(0)
    returns = (1 - 0.95**left) / 0.05
    return Played(states[mask], actions[mask], logs[mask], returns[mask], mask.sum().item() / GAMES)


class Loop:
    """Makes the optimizer's steps, and keeps their numbers. `broken_at`: the step at which the loss is NaN."""

    def __init__(self, log: Callable[..., None] = lambda **_: None, broken_at: int = -1) -> None:
        self.rows: list[dict[str, float]] = []
        self._log, self._broken_at = log, broken_at

    def optimize(self, optimizer: torch.optim.Optimizer, loss: torch.Tensor, **numbers: float) -> None:
        """Make one step, and log `numbers`."""
        if len(self.rows) == self._broken_at:
            loss = loss * math.nan
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients).item()
        self._log(**numbers)
        optimizer.step()
        self.rows.append({"loss": loss.item(), "grad_norm": norm, **numbers})


class Replay:
    """The last 10,000 steps of the games, from which random ones are drawn."""

    def __init__(self, seed: int, games: Sticks) -> None:
        self._games, self._draw = games, random.Random(seed)
        self._steps = deque[tuple[torch.Tensor, ...]](maxlen=10_000)
        self._lengths = deque([1.0], 20)

    def step(self, before: torch.Tensor, actions: torch.Tensor) -> list[torch.Tensor]:
        """Play on, and draw 64 steps: their states, actions, next states, and whether the stick fell."""
        fell, over = self._games.step(actions)
        self._steps.extend(zip(before, actions, self._games.state, fell, strict=True))
        self._lengths.extend(self._games.ages[over].tolist())
        self._games.begin_again(over)
        drawn = self._draw.sample(self._steps, min(64, len(self._steps)))
        return [torch.stack(part) for part in zip(*drawn, strict=True)]

    @property
    def reward(self) -> float:
        """Mean length of the last 20 games."""
        return sum(self._lengths) / len(self._lengths)


def network(seed: int, outputs: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, outputs))


Optimizers = torch.optim.Optimizer | list[torch.optim.Optimizer]
Setup = tuple[nn.Module, Optimizers, Callable[[Loop], None]]
"""(model to attach, its optimizers, function that trains)."""


def reinforce(seed: int, steps: int) -> Setup:
    """REINFORCE, whose loss is a sum over the episode, and so grows as episodes get longer."""
    policy, games = network(seed, 2), Sticks(seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)

    def train(loop: Loop) -> None:
        while len(loop.rows) < steps:
            seen = play(policy, games)
            logs = Categorical(logits=policy(seen.states)).log_prob(seen.actions)
            loop.optimize(
                optimizer, -(logs * seen.returns).sum() / GAMES, reward=seen.length, episode_length=seen.length
            )

    return policy, optimizer, train


def actor_critic(seed: int, steps: int) -> Setup:
    """Actor-critic, with value loss and policy loss summed over the episode."""
    model, games = network(seed, 3), Sticks(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train(loop: Loop) -> None:
        while len(loop.rows) < steps:
            seen = play(model, games)
            out = model(seen.states)
            choice, values = Categorical(logits=out[:, :2]), out[:, 2]
            value_loss = nn.functional.smooth_l1_loss(values, seen.returns, reduction="sum") / GAMES
            gains = seen.returns - values.detach()
            loss = value_loss - (choice.log_prob(seen.actions) * gains).sum() / GAMES
            entropy = choice.entropy().mean().item()
            loop.optimize(optimizer, loss, mean_return=seen.length, value_loss=value_loss.item(), entropy=entropy)

    return model, optimizer, train


def ppo(seed: int, steps: int) -> Setup:
    """PPO, with four epochs of minibatches of 64 over what was played."""
    model, games = network(seed, 3), Sticks(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def train(loop: Loop) -> None:
        while len(loop.rows) < steps:
            seen = play(model, games)
            for rows in [rows for _ in range(4) for rows in torch.randperm(len(seen.actions)).split(64)]:
                out, target = model(seen.states[rows]), seen.returns[rows]
                gains = target - out[:, 2].detach()
                gains = (gains - gains.mean()) / (gains.std(correction=0) + 1e-8)
                change = Categorical(logits=out[:, :2]).log_prob(seen.actions[rows]) - seen.logs[rows]
                policy_loss = -torch.min(change.exp() * gains, change.exp().clamp(0.8, 1.2) * gains).mean()
                value_loss = (out[:, 2] - target).square().mean()
                loop.optimize(
                    optimizer,
                    policy_loss + 0.5 * value_loss,
                    episode_reward=seen.length,
                    approx_kl=(change.exp() - 1 - change).mean().item(),
                    value_loss=value_loss.item(),
                )

    return model, optimizer, train


def dqn(seed: int, steps: int) -> Setup:
    """DQN, with a replay buffer, and a target network that is updated every 100 steps."""
    model, target, games = network(seed, 2), network(seed, 2), Sticks(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def train(loop: Loop) -> None:
        played = Replay(seed, games)
        while len(loop.rows) < steps:
            epsilon = max(0.05, 1 - len(loop.rows) / 500)
            before = games.state
            with torch.no_grad():
                best = model(before).argmax(1)
            actions = torch.where(torch.rand(GAMES) < epsilon, torch.randint(2, (GAMES,)), best)
            seen, taken, after, ends = played.step(before, actions)
            with torch.no_grad():
                value = 1 + 0.95 * target(after).amax(1) * ~ends
            guess = model(seen).gather(1, taken[:, None])[:, 0]
            reward = played.reward
            loop.optimize(optimizer, (guess - value).square().mean(), ep_reward=reward, epsilon=epsilon)
            if len(loop.rows) % 100 == 0:
                target.load_state_dict(model.state_dict())

    return model, optimizer, train


def sac(seed: int, steps: int) -> Setup:
    """Soft actor-critic for discrete actions (Christodoulou, 2019).

    Two critics with an optimizer of their own, and targets that follow slowly.
    """
    model, targets, games = network(seed, 2), nn.ModuleList(network(seed + n, 2) for n in (1, 2)), Sticks(seed)
    critics = nn.ModuleList(network(seed + n, 2) for n in (1, 2))
    judges = torch.optim.Adam(critics.parameters(), lr=2e-3)
    acts = torch.optim.Adam(model.parameters(), lr=2e-3)

    def train(loop: Loop) -> None:
        played = Replay(seed, games)
        while len(loop.rows) < steps:
            before = games.state
            with torch.no_grad():
                actions = Categorical(logits=model(before)).sample()
            seen, taken, after, ends = played.step(before, actions)
            with torch.no_grad():
                choice = Categorical(logits=model(after))
                least = torch.min(*(target(after) for target in targets))
                value = 1 + 0.95 * ((choice.probs * least).sum(1) + 0.1 * choice.entropy()) * ~ends
            guesses = [critic(seen).gather(1, taken[:, None])[:, 0] for critic in critics]
            reward = played.reward
            critic_loss = sum((guess - value).square().mean() for guess in guesses)
            loop.optimize(judges, critic_loss, ep_reward=reward, critic_loss=critic_loss.item())
            choice = Categorical(logits=model(seen))
            with torch.no_grad():
                least = torch.min(*(critic(seen) for critic in critics))
            entropy = choice.entropy().mean()
            actor_loss = -(choice.probs * least).sum(1).mean() - 0.1 * entropy
            loop.optimize(acts, actor_loss, ep_reward=reward, entropy=entropy.item())
            for target, critic in zip(targets.parameters(), critics.parameters(), strict=True):
                target.data.lerp_(critic.data, 0.01)

    return nn.ModuleDict({"actor": model, "critics": critics}), [judges, acts], train


LEARNERS: dict[str, Callable[[int, int], Setup]] = {
    "REINFORCE": reinforce,
    "actor-critic": actor_critic,
    "PPO": ppo,
    "DQN": dqn,
    "SAC": sac,
}
