"""Which of a framework's own checkpoints a script that is started again goes on from: their files, our decision.

Of those that are there: the newest that is whole, finite, and from before the first sign of what ended the job
(`SENTINEL_RESUME_BEFORE`, which `sentinel run` sets). The others are set aside under another name: they would be the
newest at the next start. All ranks read the same files and come to the same, with no collective.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from sentinel.errors import AttachError
from sentinel.hooks import faults

BEFORE = "SENTINEL_RESUME_BEFORE"
"""Names a step: only what was saved before it will do. For `sentinel run`, where a later one led to a fault."""
_asked = False


def asking() -> None:
    """The script asks where it goes on: started again, it does not begin anew."""
    global _asked
    _asked = True


def asked() -> bool:
    """Whether it did."""
    return _asked


def bound(given: int | None) -> int | None:
    """The step before which it must have been saved: the lower of the one given and the supervisor's. Raises
    AttachError where that is no number."""
    named = os.environ.get(BEFORE)
    if named and not named.isdecimal():
        raise AttachError(f"{BEFORE}={named}: must be the number of a step")
    return min((each for each in (given, int(named) if named else None) if each is not None), default=None)


def chosen(
    found: Mapping[Path, int], flaw: Callable[[Path, int], str], before: int | None, aside: Callable[[Path], Path]
) -> Path | None:
    """The one to go on from, of paths with the number of steps that each has behind it; None: begin anew.

    `flaw` says what is wrong with one, or nothing; `aside` names the place for one that is not to be used.
    """
    asking()
    limit, unfit = bound(before), dict[Path, str]()
    for path, steps in sorted(found.items(), key=lambda item: -item[1]):
        if limit is not None and steps > limit:
            unfit[path] = f"saved after step {limit}, the first sign of a fault"
        elif why := flaw(path, steps):
            unfit[path] = why
        else:
            _set_aside(unfit, aside)
            if _first():
                faults.say(f"going on after {steps} steps, from {path}")
            return path
    _set_aside(unfit, aside)
    return None


def not_finite(name: str, tensor: torch.Tensor) -> str:
    """What is wrong with a weight, or nothing."""
    odd = tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())
    return f"{name} has values that are not finite" if odd else ""


def _set_aside(unfit: Mapping[Path, str], aside: Callable[[Path], Path]) -> None:
    if not _first():
        return
    for path, why in unfit.items():
        try:
            path.rename(aside(path))
            faults.say(f"{path.name} is set aside as {aside(path).name}: {why}")
        except OSError as error:
            faults.say(f"{path.name} is passed over: {why}; it cannot be renamed ({error.strerror})")


def _first() -> bool:
    """Whether this is rank 0, as launchers say it: there may be no process group yet."""
    return os.environ.get("RANK", "0") == "0"
