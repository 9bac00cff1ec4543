"""An alert's block on the training terminal: short, with texts to copy in one piece."""

from __future__ import annotations

import itertools
import re

import msgspec
import pytest

from sentinel import wire
from sentinel.config.settings import SEVERITIES
from sentinel.diagnose.causes import causes
from sentinel.diagnose.evidence import Finding
from sentinel.notify.receivers.terminal import LINES, WIDTH, Terminal, block
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


def test_a_block_has_at_most_sixteen_lines() -> None:
    made = msgspec.structs.replace(case(), summary="many words of a summary " * 40)
    made.done = ("one thing was done " * 20, "another thing was done " * 20, *(f"thing {n}" for n in range(12)))
    lines = block(made).splitlines()
    assert len(lines) == LINES == 16
    assert max(map(len, lines)) <= WIDTH
    assert lines[1].startswith("\u2503 what    many words")
    assert lines[-2].startswith("\u2503 more    sentinel incidents show ")
    assert any(line.endswith(" ...") for line in lines)


def test_a_short_block_is_not_cut() -> None:
    assert " ..." not in block(case())


LEAK = Finding(
    cause="something keeps what each step makes: the resident set grows by 9.39 MB a step, and the 20.1 GB that are "
    "left (the machine) are gone in 2,100 steps, 8 minutes",
    confidence="medium",
    remedy="find what is kept from step to step: losses.append(loss) keeps the graph of each loss, and total = total + "
    "loss all of them in a chain (write loss.item()); lists of outputs, caches without a limit",
)


def test_a_leak_and_its_advice_are_not_cut() -> None:
    summary = "resident set 3021 MB on rank 0 at step 383: memory rises and does not fall back"
    lines = block(msgspec.structs.replace(case(), diagnosis=LEAK, summary=summary)).splitlines()
    assert " ".join(lines_of("why", lines)) == f"{LEAK.cause} (confidence: medium)"
    assert " ".join(lines_of("do", lines)) == LEAK.remedy


def lines_of(row: str, lines: list[str]) -> list[str]:
    """Return the lines of a block's row, without the frame."""
    bare = [line.removeprefix("\u2503 ") for line in lines]
    first = next(at for at, line in enumerate(bare) if line.startswith(f"{row} "))
    rest = itertools.takewhile(lambda line: line.startswith(" "), bare[first + 1 :])
    return [line[8:] for line in [bare[first], *rest]]


def test_place_and_advice_are_whole_however_long_the_rest_is() -> None:
    names = [f"model.decoder.layers.{at}.self_attention.query_key_value.lora_A.default.weight" for at in range(64)]
    made = msgspec.structs.replace(
        case(), diagnosis=msgspec.structs.replace(LEAK, cause="words of a cause " * 90, layers=tuple(names)),
        summary="words of a summary " * 90, run_id="accelerate_leak-0f3a-with-a-long-name",
    )  # fmt: skip
    lines = block(made).splitlines()
    assert len(lines) == LINES
    assert " ".join(lines_of("where", lines)) == f"parameters {', '.join(names[:3])} and 61 more"
    assert " ".join(lines_of("do", lines)) == LEAK.remedy
    for row in ("what", "why"):
        assert lines_of(row, lines)[-1].endswith(("summary ...", "cause ...", "a ...", "of ...", "words ..."))


@pytest.mark.parametrize("alert", causes())
def test_no_call_is_broken_that_fits_into_a_line(alert: str) -> None:
    for cause in causes()[alert].values():
        made = msgspec.structs.replace(case(), diagnosis=Finding(cause.cause, cause.confidence, cause.remedy))
        advice = lines_of("do", block(made).splitlines())
        for call in re.findall(r"[\w.]+\((?:[^()]|\([^()]*\))*\)", cause.remedy):
            assert len(call) > 69 or any(call in line for line in advice), call


def test_how_to_get_what_is_missing_is_a_row_of_its_own() -> None:
    command = "sentinel history export RUN --rank RANK"
    missing = ("many words of what is missing",) * 40
    unknown = Finding(cause="not known", confidence="none", missing=missing, command=command)
    lines = block(msgspec.structs.replace(case(), diagnosis=unknown)).splitlines()
    assert lines_of("to know", lines) == [command]
    assert lines_of("why", lines)[-1].endswith(" ...")


def test_what_keeps_the_memory_is_a_line_once_it_is_known() -> None:
    notices: list[wire.Notice] = []
    terminal = Terminal(notices.append, frozenset(SEVERITIES))
    made = msgspec.structs.replace(case(), alert="MemoryCreep", diagnosis=LEAK, told=True)
    terminal.notify("fired", made)
    terminal.notify("updated", made)
    keeper = "feature_maps, a variable of module __main__ (train.py:31)"
    made.diagnosis = msgspec.structs.replace(LEAK, keeper=keeper, remedy="keep the last few")
    terminal.notify("updated", made)
    made.done = ("rank 1 joined",)
    terminal.notify("updated", made)
    texts = {notice.id: notice.text for notice in notices if notice.text}
    assert len(texts) == 2, "what has been shown under an id is not shown again"
    assert [*texts.values()][1] == (
        f"[sentinel] MemoryCreep (since step {made.first_step}): {keeper} keeps what each step makes; keep the last few"
    )


def test_how_an_action_ended_is_another_update_than_that_it_began() -> None:
    """The end of an action replaces its beginning in `done`; a rank drops a notice with an id that it has had."""
    notices: list[wire.Notice] = []
    terminal, made = Terminal(notices.append, frozenset(SEVERITIES)), case()
    for done in ("rolling back to step 400", "not rolled back: no answer from rank 1 in 5 s"):
        made.done = (done,)
        terminal.notify("updated", made)
        terminal.notify("updated", made)
    heard = {notice.id: notice.alert["done"] for notice in reversed(notices)}
    assert sorted(heard.values()) == [("not rolled back: no answer from rank 1 in 5 s",), ("rolling back to step 400",)]


def test_the_summary_is_whole_where_other_rows_can_be_shorter() -> None:
    summary = (
        "resident set 3021 MB on rank 0 at step 383: memory rises and does not fall back, since step 200, before which "
        "it had not risen, and the last 40 MB of it came within 20 steps"
    )
    made = msgspec.structs.replace(case(), diagnosis=LEAK, summary=summary, done=("stacks asked for " * 27,))
    lines = block(made).splitlines()
    assert len(lines) == LINES
    assert summary in " ".join(line[len("\u2503 what    ") :] for line in lines[1:4])
    assert any(line.endswith(" ...") for line in lines)


def test_causes_that_cannot_be_told_apart_are_named() -> None:
    unknown = Finding(cause="not known: this, or that", confidence="none", missing=("the norm",), command="look again")
    text = block(msgspec.structs.replace(case(), diagnosis=unknown))
    assert "why     not known: this, or that; missing: the norm" in text
    assert "to know look again" in text


def test_a_consequence_that_is_more_severe_names_what_it_follows() -> None:
    """Its own cause and advice are about the consequence: a loss spike where gradients are not cleared."""
    lines = block(msgspec.structs.replace(case(), parent="0.3")).splitlines()
    assert lines[2] == "┃ follows 0.3, an earlier alert of the same problem: see to it first"
    assert not any("follows" in line for line in block(case()).splitlines())
