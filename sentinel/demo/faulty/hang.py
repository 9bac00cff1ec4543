"""The fault `hang`: a thread that reads ahead, and ends silently at a bad batch.

A blank batch makes the check raise. The thread that reads ahead catches the exception and ends silently: the loop waits
for a batch that never comes. (7 of 8 ranks of an MLPerf run did so, because of a swallowed error in the loader thread
of the eighth.) The healthy twin skips the blank batch.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import sentinel
from sentinel.demo.faulty import loop
from sentinel.demo.shard import SMALL_ROWS
from sentinel.examples.train_gpt import GPT, PADDING, mean_loss, read


class Ahead(threading.Thread):
    """Reads some batches ahead."""

    def __init__(self, loader: DataLoader[tuple[Tensor, ...]], fault: bool) -> None:
        super().__init__(daemon=True)
        self._loader, self._fault = loader, fault
        self._batches: queue.Queue[Tensor] = queue.Queue(maxsize=2)

    def run(self) -> None:
        for (rows,) in self._loader:
            try:
                self._batches.put(check_rows(rows))
            except ValueError:
                if self._fault:
                    return
                continue

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield self._batches.get()


def check_rows(rows: Tensor) -> Tensor:
    """Return bytes as indices. Raises ValueError if they are all padding."""
    if (rows == PADDING).all():
        raise ValueError("a blank batch")
    return rows.long()


def main() -> None:
    args = loop.arguments("Train a small GPT, with a thread that reads ahead.")
    torch.manual_seed(args.seed)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(read(args.data), batch_size=SMALL_ROWS, drop_last=True)
    ahead = Ahead(loader, args.fault)
    ahead.start()

    sentinel.attach(model, optimizer, loader=loader)

    log = loop.Log(args.log)
    for step, rows in zip(range(args.steps), ahead, strict=False):
        loss = mean_loss(model(rows[:, :-1]), rows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.write(step, loss.item(), step)


if __name__ == "__main__":
    main()
