"""Receivers by Apprise (github.com/caronc/apprise): mail, Teams, Discord, Telegram, ntfy and some hundred more.

Its URLs hold secrets, and so do its log and its errors: nothing of either is passed on. It blocks, and cannot be
stopped: it works in a thread of its own, which may outlive a delivery that took too long. No delivery begins before
that thread has returned. A retry goes only to the services that have not taken the message: otherwise a single service
that refuses would repeat the same mail at all others for a day.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import threading

from sentinel.config import settings as config
from sentinel.errors import ConfigError
from sentinel.notify import DELIVERED, Delivery, Message, wording

TITLE, BODY = 200, 3000
"""Most characters of title and body. Apprise cuts further where a service takes less."""
SHOWN_CASES = 8
KEPT_GROUPS = 100
"""The most groups of which it is remembered which services took the message."""
_KINDS = {"critical": "failure", "warning": "warning", "info": "info"}


class Apprise:
    """Hands messages to Apprise."""

    def __init__(self, settings: config.ReceiverSettings) -> None:
        """Raises ImportError where Apprise is not installed. It is loaded in the thread, which takes half a second."""
        if importlib.util.find_spec("apprise") is None:
            raise ImportError(name="apprise")
        self._settings = settings
        self._busy = threading.Lock()
        self._taken: dict[str, tuple[str, set[str]]] = {}
        """Group -> the text that is being delivered, and the URLs of the services that took it."""
        for name in ("apprise", "requests", "urllib3"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)

    async def deliver(self, message: Message) -> Delivery:
        """Try to deliver once."""
        try:
            where, urls = self._settings.text("url")
        except ConfigError as error:
            return Delivery(fault="settings", detail=str(error), retry=True)
        if not self._busy.acquire(blocking=False):
            return Delivery(fault="timeout", detail="the delivery before is not over", retry=True)
        done = asyncio.get_running_loop().create_future()
        loop, body = asyncio.get_running_loop(), text(message)

        def work() -> None:
            try:
                found = self._try_delivery(where, urls, message, body)
            except Exception as error:  # not its text: it may hold the URL
                found = Delivery(fault="internal", detail=f"Apprise raised {type(error).__name__}", retry=True)
            finally:
                self._busy.release()
            try:
                loop.call_soon_threadsafe(_set, done, found)
            except RuntimeError:
                pass  # the daemon's loop is closed

        # A daemon thread, not the loop's executor: the process does not wait for it when it exits.
        threading.Thread(target=work, name="sentinel-apprise", daemon=True).start()
        delivery: Delivery = await done
        if delivery.fault is None:  # not in the thread: a delivery that took too long is tried again
            self._taken.pop(message.group, None)
        return delivery

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _try_delivery(self, where: str, urls: str, message: Message, body: str) -> Delivery:
        import apprise

        services = {url: apprise.Apprise() for url in urls.split()}
        if not all(service.add(url) for url, service in services.items()):
            return Delivery(fault="settings", detail=f"{where} holds what is no Apprise URL", retry=True)
        head = wording.cut(title(message), TITLE)
        kind = _KINDS.get(message.leading.severity, "info") if message.firing else "success"
        taken = self._list_taken(message.group, f"{head}\n{body}")
        for url, service in services.items():
            if url not in taken and service.notify(title=head, body=body, notify_type=kind, body_format="text"):
                taken.add(url)
        if services.keys() <= taken:
            return DELIVERED
        return Delivery(fault="rejected", detail="a service did not take it; Apprise does not say why", retry=True)

    def _list_taken(self, group: str, text: str) -> set[str]:
        """Return the URLs of the services that have taken this text about this group, to be added to."""
        former, taken = self._taken.pop(group, ("", set()))
        if former != text:
            taken = set()
        self._taken[group] = text, taken
        if len(self._taken) > KEPT_GROUPS:
            del self._taken[next(iter(self._taken))]
        return taken


def _set(done: asyncio.Future[Delivery], found: Delivery) -> None:
    if not done.done():
        done.set_result(found)


def title(message: Message) -> str:
    """Return the title, one line."""
    state = message.leading.severity if message.firing else "over"
    return f"[{state}] {message.leading.alert} in {message.run}"


def text(message: Message) -> str:
    """Return the message as plain text."""
    parts = []
    for case in message.cases[-SHOWN_CASES:]:
        if case.id in message.quiet and case is not message.leading:
            parts.append(f"with it: {wording.describe_member(case)}")
            continue
        over = [] if case.state == "firing" else [("over", wording.end(case, undone=case.state == "rolled_back"))]
        rows = [*over, *wording.rows(case), ("more", wording.more(case))]
        rows += [("runbook", link)] if (link := message.origin.link_section(case.runbook)) else []
        parts.append("\n".join([case.summary, *(f"{label}: {said}" for label, said in rows)]))
    foot = [*wording.notes(message), *wording.place(message), *wording.links(message)]
    parts += [f"{label}: {said}" for label, said in foot]
    return wording.cut("\n\n".join(parts), BODY)


KIND = config.ReceiverKind(
    make=Apprise,
    find_mistake=config.find_missing_address,
    secret_url=True,
    install="pip install 'training-sentinel[apprise]'",
)
