"""Each command, used wrongly in more than twenty ways, ends with a sentence and an exit code, never a traceback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli import wrong
from tests.cli.wrong import Case

pytestmark = [pytest.mark.processes, pytest.mark.slow]

LEAVES = dict(wrong.leaves())
ANSWERS = {
    "a daemon that closes the connection": b"",
    "a daemon that speaks HTTP": b"HTTP/1.1 200 OK\r\n\r\n" * 10,
    "a daemon that promises gigabytes": b"\xff\xff\xff\xff",
    "a daemon that answers another question": b"\0\0\0\5\x81\xa1a\x01\x00",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("w")


@pytest.fixture(scope="module")
def sockets(folder: Path) -> Iterator[dict[str, str]]:
    """Return the socket of each kind of daemon."""
    listening = []
    for number, answer in enumerate(ANSWERS.values()):
        one = socket.socket(socket.AF_UNIX)
        one.bind(str(folder / f"{number}.sock"))
        one.listen()
        threading.Thread(target=_answers, args=(one, answer), daemon=True).start()
        listening.append(one)
    yield {
        "no daemon": str(folder / "nobody.sock"),
        **{kind: str(folder / f"{number}.sock") for number, kind in enumerate(ANSWERS)},
    }
    for one in listening:
        one.shutdown(socket.SHUT_RDWR)
        one.close()


def _answers(listening: socket.socket, answer: bytes) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        with connection:
            try:
                connection.recv(4096)
                connection.sendall(answer)
            except OSError:
                continue


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """A process that calls commands, each in a fork of its own."""
    home = tmp_path_factory.mktemp("h")
    (home / "config").mkdir()
    places = {"SENTINEL_STATE": "state", "SENTINEL_RUNTIME": "run", "XDG_CONFIG_HOME": "config", "HOME": "."}
    environment = {**os.environ, **{name: str(home / value) for name, value in places.items()}}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cli.forks"],
        cwd=Path(__file__).parents[2], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def complaint(case: Case, found: dict[str, Any]) -> str:
    """Return what is wrong with the way a command ended; an empty string if nothing is."""
    said = found["stderr"]
    if "Traceback" in said:
        return said.strip().splitlines()[-1]
    if found["code"] not in case.codes:
        return f"exit code {found['code']}: {said[-300:]}"
    if found["code"] == 2 and not said.strip():
        return "it says nothing"
    if "\x1b" in said + found["stdout"]:
        return "orders to the terminal come through"
    return f"{len(said)} characters of error" if len(said) > 4000 else ""


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", list(LEAVES))
def test_it_ends_with_a_sentence(
    name: str, forks: subprocess.Popen[str], folder: Path, sockets: dict[str, str]
) -> None:
    assert forks.stdin is not None
    assert forks.stdout is not None
    cases = wrong.cases(name, LEAVES[name], folder, wrong.files(folder), sockets)
    complaints = []
    for case in cases:
        forks.stdin.write(json.dumps(case._asdict()) + "\n")
        forks.stdin.flush()
        if said := complaint(case, json.loads(forks.stdout.readline())):
            complaints.append(f"sentinel {' '.join(case.argv)[:80]} ({case.kind}): {said}")
    assert complaints == []
    assert len({case.kind for case in cases}) >= 20
    assert not (folder / "executed").exists()
