"""The fault `scaler`: fp16 with an epsilon that is 0 in fp16.

The embeddings are divided by their length, with an epsilon for those that are 0: padding, which is masked out. In fp32
1e-8 works. In fp16 it rounds to 0, and 0 / 0 is NaN: `where` discards it in the forward pass, and the loss does not
change, but in the backward pass 0 times infinity stays NaN. So as soon as there is padding, every step overflows. The
healthy twin computes the length in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import sentinel
from sentinel.demo.faulty import loop
from sentinel.demo.shard import SMALL_ROWS
from sentinel.examples.train_gpt import GPT, PADDING, WIDTH, mean_loss, read

EPS = 1e-8
"""An epsilon below fp16's smallest number, 6e-8."""


class UnitGPT(GPT):
    """A GPT whose embeddings have unit length."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        nn.init.normal_(self.token.weight)
        self.token.weight.data[PADDING] = 0.0
        self.token.padding_idx = PADDING
        self.lift = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.lift(self.token(tokens)).to(self.dtype)
        unit = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS)
        x = torch.where((tokens == PADDING).unsqueeze(-1), 0.0, unit)
        return self.head(self.blocks(x + self.position.weight))


def main() -> None:
    args = loop.arguments("Train a small GPT in fp16.")
    torch.manual_seed(args.seed)
    model = UnitGPT(torch.float16 if args.fault else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    loader = DataLoader(read(args.data), batch_size=SMALL_ROWS, drop_last=True)

    sentinel.attach(model, optimizer, scaler=scaler, loader=loader)

    log = loop.Log(args.log)
    for step, (rows,) in zip(range(args.steps), loader, strict=False):
        rows = rows.long()
        with torch.autocast("cpu", torch.float16):
            loss = mean_loss(model(rows[:, :-1]), rows[:, 1:])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        log.write(step, loss.item(), scaler.get_scale())


if __name__ == "__main__":
    main()
