"""The receivers that a settings file names."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.metadata import entry_points

from sentinel import config
from sentinel.notify import Receiver, Route

log = logging.getLogger(__name__)


def routes(settings: config.Settings) -> tuple[list[Route], list[str]]:
    """One route a receiver, and a note for each that cannot be had: it must not cost the others. The training terminal
    is none of them."""
    found, notes = list[Route](), list[str]()
    for named in settings.receivers:
        if named.type == "terminal":
            continue
        try:
            receiver = _factory(named.type)(named)
        except Exception as error:  # another package's code
            log.exception("receiver %s", named.name)
            notes.append(f"receiver {named.name}: {named.type} cannot be made ({type(error).__name__}); see the log")
            continue
        found.append(Route(named.name, receiver, frozenset(named.severities), named.timeout))
    return found, notes


def shown(settings: config.Settings) -> frozenset[str]:
    """Severities that the training terminal shows: all, unless the settings say else."""
    terminal = next((named for named in settings.receivers if named.type == "terminal"), None)
    return frozenset(terminal.severities if terminal else config.SEVERITIES)


def _factory(kind: str) -> Callable[[config.Receiver], Receiver]:
    if kind == "webhook":
        # Late: a daemon without receivers needs no HTTP client.
        from sentinel.notify.webhook import Webhook

        return Webhook
    (entry,) = entry_points(group=config.RECEIVER_ENTRY_POINTS, name=kind)
    made: Callable[[config.Receiver], Receiver] = entry.load()
    return made
