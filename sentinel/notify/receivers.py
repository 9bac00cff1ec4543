"""The receivers that a settings file names."""

from __future__ import annotations

import functools
import importlib
import logging
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

from sentinel import config
from sentinel.diagnose.case import Case
from sentinel.notify import Receiver, Route
from sentinel.notify.limiter import Limiter
from sentinel.recipients import told

_LIMITS = {"pagerduty": (100, 60.0), "slack": (1, 1.0)}
"""Messages in seconds. Slack asks for one a second and channel (docs.slack.dev/apis/web-api/rate-limits); PagerDuty
answers 429 from about 120 events a minute and key on."""
_OWN = {
    "apprise": "sentinel.notify.others:Others",
    "alertmanager": "sentinel.notify.alertmanager:Alertmanager",
    "pagerduty": "sentinel.notify.pagerduty:PagerDuty",
    "slack": "sentinel.notify.slack:Slack",
    "webhook": "sentinel.notify.webhook:Webhook",
}

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
        except ImportError as error:
            what = f"needs the package {error.name}" + (
                "; pip install 'training-sentinel[apprise]'" if named.type == "apprise" else ""
            )
            notes.append(f"receiver {named.name}: {named.type} {what}")
            continue
        except Exception as error:  # another package's code
            frames = "".join(traceback.format_tb(error.__traceback__))
            log.error("receiver %s: %s\n%s", named.name, type(error).__name__, frames)  # its text may hold the URL
            notes.append(f"receiver {named.name}: {named.type} cannot be made ({type(error).__name__}); see the log")
            continue
        wants = functools.partial(_wants, named, settings.routes)
        found.append(Route(named.name, receiver, wants, named.timeout, _grouping(named, settings), _limiter(named)))
    return found, notes


def _wants(named: config.Receiver, routes: Sequence[config.Route], case: Case) -> bool:
    if case.severity not in named.severities:
        return False
    return not routes or named.name in told(routes, case.alert, case.severity, case.run, case.run_id)


def _grouping(named: config.Receiver, settings: config.Settings) -> config.Grouping:
    if named.type == "alertmanager":
        from sentinel.notify.alertmanager import GROUPING

        return GROUPING
    return settings.grouping


def _limiter(named: config.Receiver) -> Limiter:
    limits = [_LIMITS[named.type]] if named.type in _LIMITS else []
    if named.rate_limit is not None:
        limits.append((named.rate_limit.most, named.rate_limit.seconds))
    return Limiter(limits)


def shown(settings: config.Settings) -> frozenset[str]:
    """Severities that the training terminal shows: all, unless the settings say else."""
    terminal = next((named for named in settings.receivers if named.type == "terminal"), None)
    return frozenset(terminal.severities if terminal else config.SEVERITIES)


def _factory(kind: str) -> Callable[[config.Receiver], Receiver]:
    if kind in _OWN:
        # Late: a daemon without receivers needs no HTTP client.
        module, _, name = _OWN[kind].partition(":")
        own: Callable[[config.Receiver], Receiver] = getattr(importlib.import_module(module), name)
        return own
    (entry,) = entry_points(group=config.RECEIVER_ENTRY_POINTS, name=kind)
    made: Callable[[config.Receiver], Receiver] = entry.load()
    return made
