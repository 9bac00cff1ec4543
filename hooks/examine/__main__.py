"""Runs a training script for a few optimizer steps under examination: python -m sentinel.hooks.examine train.py ...

SENTINEL_EXAMINATION names the file for the facts, SENTINEL_EXAMINATION_STEPS the number of steps. Each rank writes its
own file. The script runs as `python train.py` would run it, until the last step, where the process ends.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from pathlib import Path

from sentinel.hooks.examine import recorder


def main(arguments: list[str]) -> None:
    """Run the script under examination, given as `train.py ...` or `-m module ...`, and end the process."""
    rank = os.environ.get("RANK", "0")
    path = Path(f"{os.environ['SENTINEL_EXAMINATION']}.{rank}.json")
    done = functools.partial(recorder.write_and_exit, path)
    under = recorder.Examination(int(os.environ.get("SENTINEL_EXAMINATION_STEPS", "3")), done)
    under.begin()
    try:
        _run(arguments)
    except SystemExit as end:
        done(under.facts("" if not end.code else f"the script ended with {end.code}", ended=True))
    except BaseException as error:
        import traceback

        traceback.print_exc()
        done(under.facts(f"{type(error).__name__}: {str(error)[:300]}"))
    done(under.facts(ended=True))


def _run(arguments: list[str]) -> None:
    if arguments[0].startswith("--local"):  # of torch.distributed.launch and deepspeed, which put it before the script
        local, *arguments = arguments
        arguments.insert(2 if arguments[0] == "-m" else 1, local)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
