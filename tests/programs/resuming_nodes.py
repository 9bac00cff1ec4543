"""A rank that resumes from disk, and writes down from which step and with which weights.

    torchrun --nnodes N resuming_nodes.py FOLDER...

Node K uses the K-th folder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch.distributed as dist

from sentinel.errors import RollbackError
from sentinel.hooks.core import faults
from tests.rollback.test_disk import again
from tests.rollback.training import Training


def main() -> None:
    faults.RETRY_SECONDS = 0.3
    dist.init_process_group("gloo")
    training = Training()
    folder = Path(sys.argv[1 + int(os.environ["GROUP_RANK"])])
    try:
        step = again(training, folder)
        said = f"{step} {sum(float(p.sum()) for p in training.model.parameters())}"
    except RollbackError as error:
        said = str(error)
    (folder.parent / f"said.{dist.get_rank()}").write_text(said)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
