"""Counts alarms in a million healthy steps, of small loops that go on long after they have converged.

    python -m bench.healthy                         # all fourteen loops; half an hour on two idle cores
    python -m bench.healthy --only gan regression   # some of them
    python -m bench.healthy --steps 5000            # shorter
    python -m bench.healthy --only --write          # measure nothing, put what is kept into docs/detection.md

Every loop is a process of its own at default settings, with a daemon of its own. Bar: no critical alarm. The exit
status is 1 if there was one. Results are kept in build/healthy.json, loop by loop.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from bench.pages import BUILD, DOCS, make_table, write_section
from bench.places import ANY_PORT, list_incidents, make_places

KEPT = BUILD / "healthy.json"
MARKS = "<!-- healthy -->", "<!-- end of healthy -->"
HEAD = ("loop", "steps", "ms a step", "critical", "warnings", "remarks")
STEPS = 85_000

Pair = tuple[nn.Module, torch.optim.Optimizer]
Loop = tuple[list[Pair], Callable[[], None]]
"""The pairs to attach, each by its own `attach` call, and a function that makes one step."""


def mlp(*widths: int) -> nn.Sequential:
    layers = [part for pair in itertools.pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, find_loss: Callable[[], torch.Tensor]) -> Loop:
    """Return a loop whose step zeroes the gradients, finds the loss, goes backward and steps the optimizer."""

    def step() -> None:
        optimizer.zero_grad()
        find_loss().backward()
        optimizer.step()

    return [(model, optimizer)], step


def regression() -> Loop:
    """Least squares by SGD, with noise that nothing explains."""
    model, truth = nn.Linear(16, 1), torch.randn(16, 1)

    def find_loss() -> torch.Tensor:
        x = torch.randn(32, 16)
        return functional.mse_loss(model(x), x @ truth + 0.3 * torch.randn(32, 1))

    return train(model, torch.optim.SGD(model.parameters(), 0.05), find_loss)


def sine() -> Loop:
    """A curve by Adam, to a loss near 0."""
    model = mlp(1, 32, 32, 1)

    def find_loss() -> torch.Tensor:
        x = 6 * torch.rand(64, 1) - 3
        return functional.mse_loss(model(x), x.sin())

    return train(model, torch.optim.Adam(model.parameters(), 1e-3), find_loss)


def heavy_tails() -> Loop:
    """Targets with rare, large outliers: single batches of a high loss are part of the data."""
    model, truth = mlp(8, 32, 1), torch.randn(8, 1)
    noise = torch.distributions.StudentT(torch.tensor(3.0))

    def find_loss() -> torch.Tensor:
        x = torch.randn(32, 8)
        return functional.mse_loss(model(x), x @ truth + 0.3 * noise.sample((32, 1)))

    return train(model, torch.optim.Adam(model.parameters(), 1e-3), find_loss)


def classification() -> Loop:
    """Ten classes that overlap."""
    model, centers = mlp(20, 64, 10), 0.7 * torch.randn(10, 20)

    def find_loss() -> torch.Tensor:
        labels = torch.randint(10, (64,))
        return functional.cross_entropy(model(centers[labels] + torch.randn(64, 20)), labels)

    return train(model, torch.optim.AdamW(model.parameters(), 1e-3), find_loss)


def memorised() -> Loop:
    """256 samples learnt by heart, in small batches."""
    model, data, labels = mlp(20, 64, 64, 4), torch.randn(256, 20), torch.randint(4, (256,))

    def find_loss() -> torch.Tensor:
        batch = torch.randint(256, (16,))
        return functional.cross_entropy(model(data[batch]), labels[batch])

    return train(model, torch.optim.Adam(model.parameters(), 1e-3), find_loss)


def autoencoder() -> Loop:
    """Eight dimensions behind 32."""
    model, mixing = mlp(32, 16, 8, 16, 32), torch.randn(8, 32)

    def find_loss() -> torch.Tensor:
        x = torch.randn(32, 8) @ mixing
        return functional.mse_loss(model(x), x)

    return train(model, torch.optim.Adam(model.parameters(), 1e-3), find_loss)


def variational() -> Loop:
    """A variational autoencoder: reconstruction and divergence."""
    model, mixing = nn.ModuleDict({"encoder": mlp(16, 32, 8), "decoder": mlp(4, 32, 16)}), torch.randn(4, 16)

    def find_loss() -> torch.Tensor:
        x = torch.randn(32, 4) @ mixing
        mean, log_variance = model["encoder"](x).chunk(2, 1)
        sample = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean() / 2
        return functional.mse_loss(model["decoder"](sample), x) + 0.05 * divergence

    return train(model, torch.optim.Adam(model.parameters(), 1e-3), find_loss)


def contrastive() -> Loop:
    """Two noisy views of a sample against those of the others (InfoNCE)."""
    model = mlp(16, 32, 8)

    def find_loss() -> torch.Tensor:
        x = torch.randn(32, 16)
        one, other = (functional.normalize(model(x + 0.3 * torch.randn_like(x)), dim=1) for _ in range(2))
        return functional.cross_entropy(one @ other.T / 0.1, torch.arange(32))

    return train(model, torch.optim.Adam(model.parameters(), 1e-3), find_loss)


def gan() -> Loop:
    """Two networks against each other, attached one by one, to a mixture of four."""
    generator, critic = mlp(4, 32, 2), mlp(2, 32, 1)
    makes = torch.optim.Adam(generator.parameters(), 1e-3, betas=(0.5, 0.999))
    judges = torch.optim.Adam(critic.parameters(), 1e-3, betas=(0.5, 0.999))
    centers, yes, no = 2 * torch.randn(4, 2), torch.ones(64, 1), torch.zeros(64, 1)
    find_loss = functional.binary_cross_entropy_with_logits

    def step() -> None:
        true = centers[torch.randint(4, (64,))] + 0.2 * torch.randn(64, 2)
        made = generator(torch.randn(64, 4))
        judges.zero_grad()
        (find_loss(critic(true), yes) + find_loss(critic(made.detach()), no)).backward()
        judges.step()
        makes.zero_grad()
        find_loss(critic(made), yes).backward()
        makes.step()

    return [(generator, makes), (critic, judges)], step


def language() -> Loop:
    """The next letter of a Markov chain, by a GRU, clipped, with restarts of a cosine."""
    model = nn.ModuleDict(
        {"embed": nn.Embedding(12, 16), "gru": nn.GRU(16, 32, batch_first=True), "out": nn.Linear(32, 12)}
    )
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5000)
    chain = torch.distributions.Dirichlet(torch.full((12,), 0.3)).sample((12,))

    def step() -> None:
        letters = [torch.randint(12, (8,))]
        for _ in range(12):
            letters.append(torch.multinomial(chain[letters[-1]], 1)[:, 0])
        text = torch.stack(letters, 1)
        optimizer.zero_grad()
        logits = model["out"](model["gru"](model["embed"](text[:, :-1]))[0])
        functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()

    return [(model, optimizer)], step


def convolution() -> Loop:
    """Where a patch is in an image: batch norm, momentum, weight decay."""
    body = [
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(32, 4),
    ]
    model = nn.Sequential(*body)

    def find_loss() -> torch.Tensor:
        labels = torch.randint(4, (16,))
        image = torch.randn(16, 1, 8, 8)
        for number, label in enumerate(labels.tolist()):
            row, column = 4 * (label // 2), 4 * (label % 2)
            image[number, 0, row : row + 4, column : column + 4] += 0.6
        return functional.cross_entropy(model(image), labels)

    return train(model, torch.optim.SGD(model.parameters(), 0.02, momentum=0.9, weight_decay=1e-4), find_loss)


def accumulated() -> Loop:
    """Four passes a step, under bfloat16 autocast."""
    model, truth = mlp(16, 64, 64, 3), mlp(16, 8, 3)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(4):
            x = torch.randn(16, 16)
            labels = truth(x).argmax(1)
            with torch.autocast("cpu", torch.bfloat16):
                loss = functional.cross_entropy(model(x), labels) / 4
            loss.backward()
        optimizer.step()

    return [(model, optimizer)], step


def ratings() -> Loop:
    """Ratings of items by users, from two embeddings, with Adagrad."""
    model = nn.ModuleDict({"user": nn.Embedding(200, 8), "item": nn.Embedding(300, 8)})
    taste, kind = torch.randn(200, 4), torch.randn(300, 4)

    def find_loss() -> torch.Tensor:
        users, items = torch.randint(200, (64,)), torch.randint(300, (64,))
        wanted = (taste[users] * kind[items]).sum(1) + 0.5 * torch.randn(64)
        return functional.mse_loss((model["user"](users) * model["item"](items)).sum(1), wanted)

    return train(model, torch.optim.Adagrad(model.parameters(), 0.05), find_loss)


def attention() -> Loop:
    """Which token stands behind a marker, by one transformer layer."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
    model = nn.ModuleDict({"embed": nn.Embedding(16, 16), "place": nn.Embedding(8, 16), "layer": layer})
    model["out"] = nn.Linear(16, 16)
    places = torch.arange(8)

    def find_loss() -> torch.Tensor:
        tokens = torch.randint(1, 16, (32, 8))
        marked = torch.randint(7, (32,))
        tokens[torch.arange(32), marked] = 0
        hidden = model["layer"](model["embed"](tokens) + model["place"](places)).mean(1)
        return functional.cross_entropy(model["out"](hidden), tokens[torch.arange(32), marked + 1])

    return train(model, torch.optim.AdamW(model.parameters(), 1e-3), find_loss)


LOOPS: dict[str, Callable[[], Loop]] = {
    make.__name__.replace("_", "-"): make
    for make in (
        regression, sine, heavy_tails, classification, memorised, autoencoder,
        variational, contrastive, gan, language, convolution, accumulated, ratings, attention,
    )
}  # fmt: skip


def run_loop(name: str, steps: int) -> None:
    """Run one loop to its end, in this process."""
    import sentinel

    torch.manual_seed(0)
    torch.set_num_threads(1)
    pairs, step = LOOPS[name]()
    for model, optimizer in pairs:
        sentinel.attach(model, optimizer, run=name)
    for _ in range(steps):
        step()


def measure_loop(name: str, steps: int) -> dict[str, Any]:
    """Run a loop in a process of its own; return its steps, seconds and alarms, these from the history."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | make_places(Path(folder), ANY_PORT)
        begun = time.monotonic()
        command = [sys.executable, "-m", "bench.healthy", "--steps", str(steps), "--child", name]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        if ended.returncode:
            sys.exit(f"{name}: {ended.stderr[-2000:]}")
        seconds = time.monotonic() - begun
        incidents = list_incidents(environment)
    alarms = [{key: incident[key] for key in ("alert", "severity", "step")} for incident in incidents]
    return {"steps": steps, "seconds": round(seconds), "alarms": alarms}


def list_rows(measured: dict[str, dict[str, Any]]) -> Iterator[list[str]]:
    """Yield the rows of the page's table."""
    for name, found in measured.items():
        cells = []
        for severity in ("critical", "warning", "info"):
            counted = collections.Counter(one["alert"] for one in found["alarms"] if one["severity"] == severity)
            cells.append(", ".join(f"{count} {alert}" for alert, count in counted.items()) or "none")
        what = (LOOPS[name].__doc__ or "").split(".")[0]
        milliseconds = 1e3 * found["seconds"] / found["steps"]
        yield [f"{name}: {what}", f"{found['steps']:,}", f"{milliseconds:.1f}", *cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", nargs="*", choices=LOOPS, default=list(LOOPS))
    parser.add_argument("--write", action="store_true", help="put what is kept into docs/detection.md")
    parser.add_argument("--child", choices=LOOPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return run_loop(options.child, options.steps)
    measured = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for name in options.only:
        measured[name] = measure_loop(name, options.steps)
        KEPT.parent.mkdir(exist_ok=True)
        KEPT.write_text(json.dumps(measured))
        print(name, measured[name], flush=True)
    if options.write:
        rows = list_rows({name: measured[name] for name in LOOPS if name in measured})
        write_section(DOCS / "detection.md", MARKS, make_table(HEAD, rows))
    sys.exit(any(one["severity"] == "critical" for found in measured.values() for one in found["alarms"]))


if __name__ == "__main__":
    main()
