"""bench/public_draw.py and bench/public_runs.py: the list follows the rule, and the tables match the results."""

from __future__ import annotations

import hashlib
import json
import math
import random
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from bench import public_draw, public_runs
from bench.public_draw import Drawn


def test_the_list_that_is_kept_obeys_the_rule() -> None:
    listed = public_draw.read_list()
    assert len({run.sha256 for run in listed}) == len(listed) <= public_draw.WANTED
    assert max(Counter(run.repo for run in listed).values()) <= public_draw.PER_REPOSITORY
    assert len({(run.repo, run.format) for run in listed}) == len({run.repo for run in listed})
    assert {run.licence for run in listed} <= public_draw.LICENCES.keys()


@pytest.mark.parametrize(
    ("kind", "content", "rows"),
    [
        ("CSV", b"epoch,train_loss\n1,2.0\n2,1.9\n", 2),
        ("CSV", b"model,test_loss\nsmall,2.0\nlarge,1.9\n", 0),
        ("trainer state", b'{"log_history": [{"loss": 2.0}, {"loss": nan}, {"eval_loss": 1}]}', 2),
        ("text", b"step 1 loss: 2.0\nlosses are fine\npacket loss\nstep 2 loss nan\n", 2),
        ("text", b':::MLLOG {"key": "train_loss", "value": 0.5}\n', 1),
    ],
)
def test_rows_with_a_loss_are_counted(kind: str, content: bytes, rows: int) -> None:
    assert public_draw.count_rows(kind, content) == rows


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (b"Permission is hereby granted, free of charge, to any person", "MIT"),
        (b"Apache License\n   Version 2.0, January 2004", "Apache-2.0"),
        (b"Creative Commons Attribution 4.0 International", "CC-BY-4.0"),
        (b"Creative Commons Attribution-NonCommercial 4.0; Attribution 4.0 International", None),
        (b"GNU GENERAL PUBLIC LICENSE", None),
    ],
)
def test_a_licence_is_known_by_its_text(text: bytes, name: str | None) -> None:
    assert public_draw.name_licence(text) == name


def commit(folder: Path, files: dict[str, str]) -> None:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)
    made_by = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for arguments in (("init", "-q"), ("add", "."), (*made_by, "commit", "-qm", "logs")):
        subprocess.run(["git", "-C", str(folder), *arguments], check=True)


def trainer_state(losses: list[float]) -> str:
    return json.dumps({"log_history": [{"step": i, "loss": loss} for i, loss in enumerate(losses)]})


@pytest.fixture
def losses() -> list[float]:
    generator = random.Random(1)
    return [3 + generator.gauss(0, 0.02) for _ in range(300)]


def test_of_a_repository_the_longest_state_of_a_run_is_a_candidate(tmp_path: Path, losses: list[float]) -> None:
    repository = tmp_path / "owner+name" / "repo"
    states = {f"checkpoint-{n}/trainer_state.json": trainer_state(losses[:n]) for n in (60, 200)}
    others = {"tests/trainer_state.json": trainer_state(losses[:90]), "short/trainer_state.json": trainer_state([1.0])}
    commit(repository, {"LICENSE": "Permission is hereby granted, free of charge,", **states, **others})
    (found,) = public_draw.list_candidates(repository)
    assert (found.repo, found.path, found.licence) == ("owner/name", "checkpoint-200/trainer_state.json", "MIT")


def test_a_repository_without_a_free_licence_has_no_candidate(tmp_path: Path, losses: list[float]) -> None:
    repository = tmp_path / "owner+name" / "repo"
    commit(repository, {"LICENSE": "All rights reserved", "trainer_state.json": trainer_state(losses)})
    assert not list(public_draw.list_candidates(repository))


def test_no_repository_has_more_than_its_share() -> None:
    kinds = ("text", "CSV")
    files = [Drawn("a/b", "c", f"{i}.{kind}", "MIT", kind, 9, f"{kind}{i}") for i in range(9) for kind in kinds]
    drawn = public_draw.draw(files)
    assert len(drawn) == public_draw.PER_REPOSITORY
    assert len({run.format for run in drawn}) == 1
    assert public_draw.draw(files[::-1]) == drawn


def test_a_later_draw_keeps_what_is_listed_and_fills_up_with_other_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [Drawn("a/b", "c", f"{i}.log", "MIT", "text", 9, f"a{i}") for i in range(2)]
    same_repository = Drawn("a/b", "d", "new.log", "MIT", "text", 9, "new")
    same_content = Drawn("copy/b", "c", "0.log", "MIT", "text", 9, "a0")
    others = [Drawn(f"{i}/b", "c", "x.log", "MIT", "text", 9, f"x{i}") for i in range(9)]
    monkeypatch.setattr(public_draw, "WANTED", 5)
    drawn = public_draw.draw([*listed, same_repository, same_content, *others], listed)
    assert len(drawn) == 5
    assert set(listed) < set(drawn) < {*listed, *others}


def test_a_run_with_a_critical_alarm_is_in_the_page(tmp_path: Path, losses: list[float]) -> None:
    contents = {"calm.json": trainer_state(losses), "nan.json": trainer_state([*losses, math.nan]), "x.json": "{}"}
    listed = []
    for name, text in contents.items():
        digest = hashlib.sha256(text.encode()).hexdigest()
        listed.append(Drawn("a/b", "c", name, "MIT", "trainer state", len(text), digest))
        (tmp_path / listed[-1].file_name).write_text(text)
    verdicts = {listed[1].sha256[:12]: public_runs.Verdict(listed[1].sha256[:12], "right", "NaN in the last row")}
    text = public_runs.write_tables(public_runs.replay(tmp_path, listed, jobs=1), verdicts)
    assert "| a/b: nan.json | NonFiniteLoss at 300 | right | NaN in the last row |" in text
    assert "calm.json" not in text
    assert "| a/b: x.json |" in text


def test_a_file_that_is_not_the_listed_one_is_an_error(tmp_path: Path) -> None:
    run = Drawn("a/b", "c", "log.txt", "MIT", "text", 1, "0" * 64)
    (tmp_path / run.file_name).write_text("another")
    with pytest.raises(ValueError, match="draw again"):
        public_runs.replay(tmp_path, [run], jobs=1)
