"""Runs torchrun with ranks that are forks of it, which saves each rank four seconds of imports.

python tests/torchrun.py TORCHRUN'S ARGUMENTS
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])

from torch.distributed import run  # noqa: E402
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler  # noqa: E402

from tests.zygote import RANKS, ForkedProcess, Zygote, open_channel, serve  # noqa: E402


def main() -> None:
    for name in RANKS:
        importlib.import_module(name)
    ours, theirs = open_channel()
    if os.fork() == 0:
        ours.close()
        serve(theirs)
    theirs.close()
    subprocess_handler.Popen = functools.partial(ForkedProcess, zygote=Zygote(ours))
    run.main()


if __name__ == "__main__":
    main()
