"""The fault `leak`: a list of slices that keeps the tensors they were cut from.

The logits of each batch's last byte are kept for a plot after training: 4 kB a step, it seems. But a slice is a view,
and a view keeps the whole tensor: 260 kB a step. The healthy twin keeps only the number to be plotted.
"""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

import sentinel
from sentinel.demo.faulty import loop
from sentinel.demo.shard import SMALL_ROWS
from sentinel.examples.train_gpt import GPT, mean_loss, read
from sentinel.hooks.core.host_memory import resident_bytes


def main() -> None:
    args = loop.arguments("Train a small GPT, and keep some of its logits.")
    torch.manual_seed(args.seed)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(read(args.data), batch_size=SMALL_ROWS, drop_last=True)

    # A tenth of the time for statistics, instead of a hundredth: memory is then sampled at every 8th step.
    sentinel.attach(model, optimizer, loader=loader, overhead=0.1)

    log, kept = loop.Log(args.log), []
    for step, (rows,) in zip(range(args.steps), loader, strict=False):
        rows = rows.long()
        logits = model(rows[:, :-1])
        loss = mean_loss(logits, rows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last = logits.detach()[:, -1]
        kept.append(last if args.fault else last.amax(-1).mean().item())
        log.write(step, loss.item(), resident_bytes())


if __name__ == "__main__":
    main()
