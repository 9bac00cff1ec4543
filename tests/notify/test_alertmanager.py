"""Our webhook beside a real Alertmanager's: the same alert, the same keys and types, the same fingerprint."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sentinel.notify import Message
from sentinel.notify.webhook import payload
from tests.notify.cases import case
from tests.notify.consumer import check, consumer, shape

pytestmark = pytest.mark.processes


@contextlib.contextmanager
def alertmanager(folder: Path, hook: str) -> Iterator[str]:
    """Address of one that sends all to a webhook at once."""
    program = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
    if program is None:
        pytest.skip("Alertmanager is not installed (Debian package: prometheus-alertmanager)")
    settings = folder / "alertmanager.yml"
    settings.write_text(
        "route: {receiver: ops, group_by: [alertname, run, run_id], group_wait: 0s, group_interval: 1s}\n"
        f"receivers: [{{name: ops, webhook_configs: [{{url: '{hook}', send_resolved: true}}]}}]\n"
    )
    command = [
        program, f"--config.file={settings}", f"--storage.path={folder}/data", "--cluster.listen-address=",
        "--web.listen-address=127.0.0.1:0",
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = next(filter(None, (re.search(r"address=(127\.0\.0\.1:\d+)", line) for line in process.stderr)))
            yield f"http://{found[1]}"
        finally:
            process.kill()


def post(address: str, alert: dict[str, Any]) -> None:
    body = {key: alert[key] for key in ("labels", "annotations", "startsAt", "generatorURL")}
    if alert["status"] == "resolved":
        body["endsAt"] = alert["endsAt"]
    request = urllib.request.Request(
        f"{address}/api/v2/alerts", json.dumps([body]).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200


def moment(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text)


def test_the_payload_has_the_shape_of_a_real_alertmanagers(tmp_path: Path) -> None:
    with consumer() as ops, alertmanager(tmp_path, ops.url) as address:
        for state in ("firing", "resolved"):
            ours = payload(Message(run="train", run_id="r1", alert="LossSpike", cases=(case(state=state),)), "ops")
            post(address, ours["alerts"][0])
            theirs = ops.next()
            check(theirs)
            assert shape(ours) == shape(theirs)
            assert ours["status"] == theirs["status"] == state
            for key in ("receiver", "version", "groupKey", "groupLabels", "commonLabels", "commonAnnotations"):
                assert ours[key] == theirs[key], key
            (our_alert,), (their_alert,) = ours["alerts"], theirs["alerts"]
            assert our_alert.keys() == their_alert.keys()
            for key in ("status", "labels", "annotations", "generatorURL", "fingerprint"):
                assert our_alert[key] == their_alert[key], key
            for key in ("startsAt", "endsAt"):
                assert moment(our_alert[key]) == moment(their_alert[key]), key
