"""Create the receivers of a settings file: which alerts each gets, how they are grouped and limited."""

from __future__ import annotations

import functools
import logging
import pwd
import socket
import traceback
from collections.abc import Sequence
from importlib.metadata import entry_points

from sentinel.config import settings as config
from sentinel.config.links import fill_link
from sentinel.config.receivers import select_receivers
from sentinel.diagnose.case import Case
from sentinel.notify import Origin, Receiver, Route
from sentinel.notify.limiter import Limiter

log = logging.getLogger(__name__)


def make_routes(settings: config.Settings) -> tuple[list[Route], list[str]]:
    """Return a route per receiver, and a note for each receiver that cannot be created, which must not affect the
    others. The training terminal is not among them."""
    found, notes = list[Route](), list[str]()
    for named in settings.receivers:
        kind = config.find_kind(named.type) or _OTHER
        if kind.make is None:
            continue
        try:
            receiver = kind.make(named)
        except ImportError as error:
            fix = f"; {kind.install}" if kind.install else ""
            notes.append(f"receiver {named.name}: {named.type} needs the package {error.name}{fix}")
            continue
        except Exception as error:  # another package's code
            frames = "".join(traceback.format_tb(error.__traceback__))
            log.error("receiver %s: %s\n%s", named.name, type(error).__name__, frames)  # its text may hold the URL
            notes.append(f"receiver {named.name}: {named.type} cannot be made ({type(error).__name__}); see the log")
            continue
        wants = functools.partial(_wants, named, settings.routes)
        grouping = kind.grouping or settings.grouping
        limiter = _limiter(named, kind)
        edits = kind.edits(named)
        found.append(Route(named.name, receiver, wants, named.timeout, grouping, limiter, edits, kind.tracks))
    return found, notes


def make_origin(settings: config.Settings, run: str, run_id: str, uid: int) -> Origin:
    """Return the host, user and addresses that messages about a run name. `uid`: of its user."""
    host, user = socket.gethostname(), _name_user(uid)
    fill = functools.partial(fill_link, names={"run": run, "run_id": run_id, "host": host, "user": user})
    links = settings.links
    return Origin(
        host=host,
        user=user,
        dashboard=fill(settings.daemon.external_url),
        page=fill(links.page),
        report=fill(links.report),
        runbook=links.make_section_link(),
    )


def _name_user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # a container's uid without a name
        return str(uid)


def _wants(named: config.ReceiverSettings, routes: Sequence[config.RouteSettings], case: Case) -> bool:
    if case.severity not in named.severities:
        return False
    return not routes or named.name in select_receivers(routes, case.alert, case.severity, case.run, case.run_id)


def _limiter(named: config.ReceiverSettings, kind: config.ReceiverKind) -> Limiter:
    limits = [kind.limit] if kind.limit is not None else []
    if named.rate_limit is not None:
        limits.append((named.rate_limit.most, named.rate_limit.seconds))
    return Limiter(limits)


def _make_other(settings: config.ReceiverSettings) -> Receiver:
    """Return a receiver of a type that another package brings."""
    (entry,) = entry_points(group=config.RECEIVER_ENTRY_POINTS, name=settings.type)
    receiver: Receiver = entry.load()(settings)
    return receiver


_OTHER = config.ReceiverKind(make=_make_other)
