"""What the supervisor prints on stderr: sentences for people, or JSON lines for a scheduler's script."""

from __future__ import annotations

import contextlib
import json
import signal
import sys

from sentinel.text import write_lines


class Telling:
    """Prints events. A JSON line begins with `{"sentinel": `, as the job's own output is in the same stream."""

    def __init__(self, *, as_json: bool = False) -> None:
        self._as_json = as_json

    def say(self, event: str, text: str, **facts: object) -> None:
        """Print an event. `event`: its short, stable name; `facts`: what its sentence is made from."""
        if self._as_json:
            write_lines(json.dumps({"sentinel": event, **facts, "text": text}), sys.stderr)
            return
        write_lines(
            f"sentinel: {text}", sys.stderr
        )  # left to the terminal to wrap, so that paths and commands can be copied

    def pass_on(self, text: str) -> None:
        """Print a daemon's text for the job's terminal that no rank can print any more."""
        write_lines(json.dumps({"sentinel": "notice", "text": text}) if self._as_json else text, sys.stderr)

    def end(self, status: int, starts: int) -> None:
        """Print how the command ended, after so many starts; as JSON only, because a shell shows it to people."""
        if self._as_json:
            name = ending(status)
            facts = {"status": status if status >= 0 else 128 - status, "signal": signal_name(status), "starts": starts}
            self.say("end", name, **facts)


def ending(status: int) -> str:
    """Return an exit status in words; negative: a signal."""
    if status >= 0:
        return f"exit status {status}"
    return f"killed by {signal_name(status) or f'signal {-status}'}"


def signal_name(status: int) -> str | None:
    """Return the name of the signal that a negative status stands for; None where there is none."""
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name if status < 0 else None
    return None
