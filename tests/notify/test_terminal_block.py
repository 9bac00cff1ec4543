"""The block of an alert on the training terminal: short, and what is to be copied stays whole."""

from __future__ import annotations

import msgspec

from sentinel.notify.receivers.terminal import LINES, WIDTH, block
from tests.notify.cases import case


def test_paths_hyphens_and_commands_stay_whole() -> None:
    path = "/data/long-named-folder/with-many-hyphens/checkpoint-epoch-12/rank-0-of-8/part-1.safetensors"
    command = "`python -m torch.distributed.run --standalone --nproc-per-node 2 train.py`"
    words = "the number of the file that is looked at, in words that go on,"
    made = msgspec.structs.replace(case(), summary=f"{words} {path} and {words} {command} once more")
    made.run_id = "b0635ae8-5eaa-461e-b1fe-b4a2afd1bf7e-a-long-name-of-a-run"
    lines = block(made).splitlines()
    assert sum(path in line for line in lines) == 1
    assert sum(command in line for line in lines) == 1
    assert sum(f"sentinel incidents show {made.id} --run {made.run_id}" in line for line in lines) == 1


def test_it_has_at_most_twelve_lines() -> None:
    made = msgspec.structs.replace(case(), summary="many words of a summary " * 40)
    made.done = ("one thing was done " * 20, "another thing was done " * 20, *(f"thing {n}" for n in range(12)))
    lines = block(made).splitlines()
    assert len(lines) == LINES == 12
    assert max(map(len, lines)) <= WIDTH
    assert lines[1].startswith("\u2503 what    many words")
    assert lines[-2].startswith("\u2503 more    sentinel incidents show ")
    assert any(line.endswith(" ...") for line in lines)


def test_a_short_one_is_not_cut() -> None:
    assert " ..." not in block(case())
