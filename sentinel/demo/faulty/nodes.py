"""Trains a small GPT on several nodes, which resumes from its own checkpoints, and of which one rank fails once.

    torchrun --nnodes 4 nodes.py --data FILE --saved FOLDER --breaks-at 120 --how kill ...

Each node reads a file of its own. `--how kill`: the process is gone, as after the OOM killer; `hang`: it waits for a
lock that it holds. Without `--breaks-at` only the file can be bad. A job that was started again does not fail.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, Subset

import sentinel
from sentinel.demo.faulty import loop
from sentinel.demo.shard import BURST, SMALL_ROWS
from sentinel.examples.train_gpt import GPT, mean_loss, read

SAVE_EVERY = 40
STEP_SECONDS = 0.05
"""Least seconds of a step, so that the daemons have met before the fault."""


def load(folder: Path, parts: dict[str, object]) -> int:
    """Load the newest checkpoint that may be resumed from; return the step before which it was saved, 0 without one."""
    before = int(os.environ.get("SENTINEL_RESUME_BEFORE", 10**9))
    start = max((step for path in folder.glob("*.pt") if (step := int(path.stem)) <= before), default=0)
    if start:
        saved = torch.load(folder / f"{start}.pt")
        for name, part in parts.items():
            part.load_state_dict(saved[name])  # type: ignore[attr-defined]
    return start


def save(folder: Path, step: int, parts: dict[str, object]) -> None:
    """Write a checkpoint, whole or not at all."""
    draft = folder / "draft"
    torch.save({name: part.state_dict() for name, part in parts.items()}, draft)  # type: ignore[attr-defined]
    draft.replace(folder / f"{step}.pt")


def break_down(how: str) -> None:
    """Let this rank fail."""
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    lock = threading.Lock()
    with lock, lock:
        pass


def digest(net: nn.Module) -> str:
    """Return a digest of all weights, to the bit."""
    whole = b"".join(parameter.detach().numpy().tobytes() for parameter in net.parameters())
    return hashlib.sha256(whole).hexdigest()[:12]


def main() -> None:
    parser = loop.make_parser("Train a small GPT on several nodes.")
    parser.add_argument("--saved", type=Path, required=True, help="folder of the checkpoints, which all nodes see")
    parser.add_argument("--breaks-at", type=int, default=-1, help="step at which this rank breaks")
    parser.add_argument("--how", choices=["kill", "hang"], default="kill")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    net = GPT()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    warmup = LinearLR(optimizer, start_factor=0.01, total_iters=100)
    parts = {"net": net, "optimizer": optimizer, "warmup": warmup}
    start = load(args.saved, parts)
    model = nn.parallel.DistributedDataParallel(net)
    rows = read(args.data)
    unread = Subset(rows, range(start * SMALL_ROWS, len(rows)))
    loader = DataLoader(unread, batch_size=SMALL_ROWS, drop_last=True)

    # The alert comes 29 steps after the fault; on a busy machine the nodes agree on the way back 40 steps later.
    rollback = sentinel.Rollback(every=25, keep=4, margin=25, skip_batches=BURST)
    monitor = sentinel.attach(model, optimizer, scheduler=warmup, loader=loader, step=start, rollback=rollback)

    log = loop.Log(args.log)
    log.note(start=start)
    monitor.on_rollback(lambda to, at: log.note(rollback={"to": to, "at": at}))
    for step, (batch,) in zip(range(start, args.steps), loader, strict=False):
        began = time.monotonic()
        if step == args.breaks_at and "SENTINEL_ATTEMPT" not in os.environ:
            break_down(args.how)
        if step % SAVE_EVERY == 0 and step > start and dist.get_rank() == 0:
            save(args.saved, step, parts)
        batch = batch.long()
        loss = mean_loss(model(batch[:, :-1]), batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warmup.step()
        log.write(step, loss.item(), step)
        time.sleep(max(STEP_SECONDS - (time.monotonic() - began), 0.0))
    log.note(weights=digest(net))
    dist.barrier()
    monitor.detach()
    time.sleep(0.5)  # pytorch#190489: otherwise gloo's threads may abort the process at its end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
