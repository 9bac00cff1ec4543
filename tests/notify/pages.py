"""Counts how often fake Slack, PagerDuty and Alertmanager are paged about a run by one daemon."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.notify.vendors import BOT_TOKEN, ROUTING_KEY, Alertmanager, PagerDuty, Slack, serving

SETTINGS = """
[daemon]
http = "off"
[grouping]
wait = "0s"
interval = "1s"
[[receivers]]
name = "slack"
type = "slack"
url = "{slack}/api"
token_file = "slack.token"
channel = "#training"
[[receivers]]
name = "pagerduty"
type = "pagerduty"
url = "{pagerduty}"
token_file = "pagerduty.token"
[[receivers]]
name = "alertmanager"
type = "alertmanager"
url = "{alertmanager}"
"""


class Paged:
    """All that the three receivers got.

    A page is what opens something new: a message in the channel that answers no other, a key that PagerDuty did not
    have, a problem without an alert in Alertmanager.
    """

    def __init__(self) -> None:
        self.slack, self.pagerduty, self.alertmanager = Slack(), PagerDuty(), Alertmanager()
        self._messages: list[str] = []
        self._keys: set[tuple[str, str]] = set()
        self._problems: set[tuple[str, str]] = set()

    def count(self, run: str) -> dict[str, int]:
        """Return the pages about a run, by receiver. Raises AssertionError if one of them refused anything."""
        for vendor in (self.slack, self.pagerduty, self.alertmanager):
            assert not vendor.refused, vendor.refused
        for message in self.slack.all():
            if message["method"] == "chat.postMessage" and "thread_ts" not in message:
                self._messages.append(message["blocks"][0]["text"]["text"].removesuffix(": over"))
        for event in self.pagerduty.all():
            if event.get("event_action") == "trigger":
                self._keys.add((event["payload"]["source"], event["dedup_key"]))
        for alert in self.alertmanager.all():
            labels = alert["labels"]
            if "consequence" not in labels:
                self._problems.add((labels["run"], labels.get("problem") or labels["alertname"]))
        return {
            "Slack": sum(title.endswith(f"  {run}") for title in self._messages),
            "PagerDuty": sum(source == run for source, _ in self._keys),
            "Alertmanager": sum(name == run for name, _ in self._problems),
        }


@contextlib.contextmanager
def paged(folder: Path) -> Iterator[Paged]:
    """Run the three receivers on loopback, and write a sentinel.toml that names them into `folder`."""
    people = Paged()
    with serving(people.slack), serving(people.pagerduty), serving(people.alertmanager):
        folder.mkdir(parents=True, exist_ok=True)
        for name, token in (("slack", BOT_TOKEN), ("pagerduty", ROUTING_KEY)):
            (folder / f"{name}.token").write_text(token)
            (folder / f"{name}.token").chmod(0o600)
        urls = {name: vendor.url for name, vendor in vars(people).items() if not name.startswith("_")}
        (folder / "sentinel.toml").write_text(SETTINGS.format(**urls))
        yield people
