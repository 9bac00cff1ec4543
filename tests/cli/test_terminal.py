"""Names with terminal control characters: no command prints them, and the daemon's log does not contain them."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sentinel.cli import client, main
from sentinel.cli.log_format import JsonLines, LineFormatter
from sentinel.node import paths
from sentinel.text import spell_controls, spell_line
from sentinel.web import http
from tests.allocator import synthetic
from tests.cli import wrong
from tests.report.runs import case, history

EVIL = "a\x1b]0;owned\x07\x1b[2J\x9b31m\r\x08b\u202ec\x85\x7f"
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
RANK: dict[str, Any] = {
    "rank": 0, "state": EVIL, "step": 1, "phase": EVIL, "spacing": {"1": 2}, "wanted": {}, "dropped": 1,
    "costs": {EVIL: 0.1}, "unseen": [EVIL], "kernel_missing": EVIL, "kind": EVIL, "quiet_seconds": 5.0, "at": EVIL,
    "stall": {"seconds": 1.0, "at": EVIL},
}  # fmt: skip
RULE = {"rule": EVIL, "state": "firing", "entity": ["layer", EVIL], "lacking": [], "values": {EVIL: 1.0}}
LACKING = {**RULE, "state": "no data", "lacking": [EVIL]}
GPU = {"gpu": 0, "ranks": [0], "values": {}, "faults": [{"kind": EVIL, "code": EVIL, "text": EVIL}]}
RUN = {
    "run": EVIL, "run_id": EVIL, "attempt": 1, "step": 3, "values": {"loss": 1.0}, "ranks": [RANK], "host": {},
    "gpus": {"trouble": EVIL, "devices": [GPU]}, "rollback": {"armed": True, "held": [1], "done": []},
    "open_incidents": 1, "incidents": 1, "trouble": EVIL, "notifications_trouble": EVIL, "rules": [RULE, LACKING],
    "silences": [{"alert": EVIL, "until": 0.0, "comment": EVIL, "id": EVIL}],
    "notifications": [{"receiver": EVIL, "sent": 1, "pending": 1, "held": 1, "given_up": 1, "trouble": EVIL}],
}  # fmt: skip
HANGING = {
    "run": EVIL, "run_id": EVIL, "ranks": [RANK], "cause": EVIL, "confidence": "high", "evidence": [EVIL],
    "remedy": EVIL, "missing": [EVIL], "answered": True,
}  # fmt: skip
GPT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
HEARTBEAT = {"sent": 1, "withheld": 0, "trouble": EVIL}
ANSWERS: dict[str, Any] = {
    "status": {
        "pid": 7, "version": EVIL, "http": EVIL, "heartbeat": HEARTBEAT, "trouble": [EVIL], "runs": [RUN],
    },
    "incidents": [],
    "hang": [HANGING],
}  # fmt: skip
KEPT = case(
    1, 60, alert=EVIL, summary=EVIL, run=EVIL, run_id=EVIL, severity=EVIL, state=EVIL, runbook=EVIL, done=[EVIL],
    members=[{"scope": "layer", "name": EVIL, "first_step": 60, "values": {}}],
    layers=[{"name": EVIL, "norm": 1.0, "usual": 1.0, "nonfinite": 0}], silenced=EVIL,
    stacks={EVIL: f'Thread 0x01 (most recent call first):\n  File "{EVIL}", line 3 in {EVIL}\n'},
    diagnosis={
        "cause": EVIL, "confidence": EVIL, "evidence": [EVIL], "remedy": EVIL, "missing": [EVIL], "confirm": EVIL,
    },
)  # fmt: skip
COMMANDS = [
    ["status", "--rules"], ["rules", "status"], ["hang"], ["incidents"], ["incidents", "show", "0.1"], ["history"],
    ["incidents", "--run", EVIL], ["incidents", "show", EVIL], ["rules", "status", "--run", EVIL],
    ["history", "export", "{history}", "--format", "csv"], ["history", "export", "{history}", "--layers"],
    ["history", "export", "{history}", "--format", "csv", "--layers"], ["history", "export", EVIL], ["report", EVIL],
    ["precision", EVIL], ["precision", "{history}"], ["memory", EVIL], ["explain", EVIL], [EVIL], ["status", EVIL],
    ["hang", "{log}"], ["hang", EVIL], ["hang", "{folder}"], ["rules", "check", "{rules}"],
    ["rules", "test", "{rules}"], ["rules", "list", "{rules}"], ["rules", "backtest", "{log}"],
    ["rules", "backtest", "{history}"], ["replay", EVIL], ["silence", EVIL], ["silence", "--end", EVIL],
    ["silence", "NonFiniteLoss", "--run", EVIL, "--comment", EVIL], ["silence", "--list"], ["run", EVIL],
    ["plan", EVIL], ["plan", "{model}"], ["doctor", "--", EVIL], ["grafana", EVIL], ["grafana", "write", "{folder}"],
    ["grafana", "push", "--url", "http://127.0.0.1:1", "--run", EVIL, "--dry-run"], ["top", "--once"], ["page"],
    ["page", EVIL], ["alerts", "test", EVIL], ["alerts", "test", "--config", "{settings}"], ["replay", "{log}"],
    ["daemon", "--config", "{settings}"], ["demo", "--out", "{log}"], ["init", "{folder}"], ["last"], ["last", EVIL],
    ["mcp", "--json"], ["mcp", EVIL], ["memory", "{snapshot}"], ["precision", "{checkpoint}"], ["reload"],
    ["rules", "export", "prometheus", "--rules", "{rules}"], ["rules", "schema", EVIL],
    ["history", "prune", "--dry-run", "--max-size", "1B"],
]  # fmt: skip
"""Commands that show names in runs, histories and files; `call_others` calls those that are not listed here."""
ON_A_TERMINAL = [["incidents"], ["incidents", "show", "0.1"], ["last"], ["last", EVIL], ["history"]]
"""Commands that format their output differently for a terminal."""


def call_others() -> list[list[str]]:
    """Return calls of the commands that are not listed, with an evil name as each argument."""
    called = [" ".join(command) for command in COMMANDS]
    return [
        [*name.split(), *wrong.BASES.get(name, wrong.fill_arguments(command, EVIL))]
        for name, command in wrong.leaves()
        if not any(each.startswith(name) for each in called)
    ]


ALL_COMMANDS = [*COMMANDS, *call_others()]


def answer(path: Path, what: str, *_: Any) -> Any:
    """Answer as a daemon does."""
    return ANSWERS[what]


@pytest.fixture
def files(private_places: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Path]:
    """Return inputs for the commands, in which all names are evil."""
    kept = history(paths.state_directory() / "runs" / "r1.sqlite", name=EVIL, cases=(KEPT,))
    folder = tmp_path / EVIL
    folder.mkdir()
    log = folder / "job.out"
    log.write_text(
        f'[rank1]: Traceback (most recent call last):\n[rank1]:   File "{EVIL}", line 3, in {EVIL}\n'
        f"[rank1]: ValueError: {EVIL}\n"
    )
    rules = folder / "rules.yaml"
    rules.write_text("rules:\n  - alert: 'A\\e[2J'\n    when: loss ==\n")
    settings, model, checkpoint = folder / "sentinel.toml", folder / "config.json", folder / "weights.pt"
    settings.write_text(f"[[receivers]]\nname = {json.dumps(EVIL)}\ntype = {json.dumps(EVIL)}\n")
    model.write_text(json.dumps({**GPT, "model_type": EVIL, "architectures": [EVIL]}))
    torch.save({EVIL: torch.tensor([float("nan")])}, checkpoint)
    stack = [{"filename": EVIL, "line": 1, "name": EVIL}]
    snapshot = synthetic.snapshot([synthetic.segment([(synthetic.MiB, "active_allocated", stack)])])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(client, "paths", SimpleNamespace(live_sockets=lambda: [folder / "sentinel.sock"]))
    monkeypatch.setattr(client, "ask_daemon", answer)
    monkeypatch.setattr(http.HttpServer, "serve", lambda *_: asyncio.sleep(0))  # the real page would run until Ctrl-C
    answered = {"daemon": 7, "ok": False, "answer": EVIL}
    monkeypatch.setattr(importlib.import_module("sentinel.cli.reload"), "reload_daemons", lambda: [answered])
    monkeypatch.setattr(sys, "argv", [])
    return {
        "history": kept, "log": log, "folder": folder, "rules": rules, "settings": settings, "model": model,
        "checkpoint": checkpoint, "snapshot": synthetic.written(folder / "memory.pickle", snapshot),
    }  # fmt: skip


def said(command: list[str], files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> str:
    sys.argv = ["sentinel", *(each.format(**files) for each in command)]
    with pytest.raises(SystemExit):
        main()
    captured = capsys.readouterr()
    return captured.out + captured.err


@pytest.mark.sampled(10)
@pytest.mark.parametrize("command", ALL_COMMANDS, ids=[spell_controls(" ".join(each)) for each in ALL_COMMANDS])
def test_nothing_that_a_terminal_obeys_gets_out(
    command: list[str], files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = said(command, files, capsys)
    assert words, "it has said nothing"
    assert not OBEYED.search(words), words


@pytest.mark.parametrize("command", ON_A_TERMINAL, ids=[spell_controls(" ".join(each)) for each in ON_A_TERMINAL])
def test_nothing_that_a_terminal_obeys_is_written_to_a_terminal(
    command: list[str], files: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    words = said(command, files, capsys)
    assert r"a\x1b" in words
    assert not OBEYED.search(words), words


def test_commands_that_once_let_control_characters_through_show_the_name(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The spelled-out control characters are still readable."""
    for command in (["status", "--rules"], ["rules", "status"], ["incidents", "show", "0.1"]):
        assert r"a\x1b]0;owned\x07" in said(command, files, capsys)


@pytest.mark.parametrize("formatter", [LineFormatter(), JsonLines()], ids=["people", "programs"])
def test_a_record_of_the_daemons_log_has_no_control_characters(formatter: logging.Formatter) -> None:
    try:
        raise ValueError(EVIL)
    except ValueError:
        record = logging.LogRecord(
            "sentinel", 20, __file__, 1, "hello of %s", (f"{EVIL}\n2026 made up",), sys.exc_info()
        )
    line = formatter.format(record)
    assert not OBEYED.search(line)
    assert not any(each.startswith("2026 made up") for each in line.splitlines())


def test_a_line_stays_one_line() -> None:
    assert spell_line("a\n\x1b\tb \u00e9\U0001f600") == "a\\n\\x1b\tb \u00e9\U0001f600"
