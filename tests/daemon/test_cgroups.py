"""How a paused container is recognised."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sentinel.daemon.ranks import cgroups
from sentinel.daemon.ranks.heartbeats import RankHeartbeat
from sentinel.wire import heartbeat_page

FILES = [
    ("", "cgroup.events", "populated 1\nfrozen {}\n", "01"),
    ("freezer", "freezer.state", "{}\n", ("THAWED", "FROZEN")),
]


@pytest.mark.parametrize(("controller", "name", "text", "states"), FILES)
def test_a_paused_container_does_not_hang(
    controller: str, name: str, text: str, states: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paused process's watchdog stands still, too, as if the GIL were held. Slurm pauses jobs in favour of others."""
    process = tmp_path / str(os.getpid())
    process.mkdir()
    (process / "cgroup").write_text(f"7:pids:/\n0:{controller}:/job_1\n")
    file = tmp_path / controller / "job_1" / name
    file.parent.mkdir(parents=True)
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    monkeypatch.setattr(cgroups, "PROCESSES", tmp_path)
    now = 1000.0
    beat = heartbeat_page.Heartbeat(
        beat=now, progress=9, progressed=now, steps=9, work=0, place=heartbeat_page.Place.LOOP, paused=0, longest=0.1,
        cpu=0.0, thread=0, ident=0, moved=0.0, signal=0,
    )  # fmt: skip
    page = os.memfd_create(heartbeat_page.PAGE)
    os.pwrite(page, heartbeat_page.pack_heartbeat(beat), 0)
    pulse = RankHeartbeat([page], os.getpid())
    seconds = {}
    for later in range(2, 90, 4):
        file.write_text(text.format(states[later > 10]))
        if (stall := pulse.look(now + later)) is not None:
            seconds[later] = stall.seconds
    pulse.close()
    assert seconds[10] > 5.0
    assert set(map(seconds.get, range(14, 90, 4))) == {0.0}
