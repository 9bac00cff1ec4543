"""Examines each script of a directory in a fork, so that torch is imported once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer of a process imports it, which takes two seconds, otherwise in each child

from sentinel.hooks.examine import __main__


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    for script in sorted(directory.glob("*.py")):
        child = os.fork()
        if child == 0:
            os.environ["SENTINEL_EXAMINATION"] = str(script.with_suffix(""))
            __main__.main([str(script)])
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
