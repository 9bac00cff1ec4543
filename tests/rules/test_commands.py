"""`sentinel rules check` and `sentinel rules test`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sentinel.cli import cli
from sentinel.rulebook.loader import ACTIONS

GOOD = "group: mine\nrules:\n  - alert: Mine\n    expr: loss > 5\n"
BAD = "group: mine\nrules:\n  - alert: Yours\n    expr: lss > 5\n"
TEST = """\
rule_files: [good.yaml]
tests:
  - name: high
    input_series: [{series: loss, values: "1 9"}]
    fired: {Mine: [%d]}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "good.yaml").write_text(GOOD)
    return tmp_path


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["rules", *map(str, arguments)])
    return result.exit_code, result.output


def test_check_names_file_line_and_column(folder: Path) -> None:
    (folder / "bad.yaml").write_text(BAD)
    code, output = run("check", folder / "bad.yaml", folder / "good.yaml")
    assert code == 1
    assert f"{folder}/bad.yaml:4:11: unknown metric 'lss'; did you mean 'loss'?" in output
    assert f"{folder}/good.yaml: ok, Mine" in output


def test_check_knows_the_actions(folder: Path) -> None:
    (folder / "acts.yaml").write_text(GOOD.replace("Mine", "Acts") + "    actions: [rollback, stop]\n")
    assert run("check", folder / "acts.yaml") == (0, f"{folder}/acts.yaml: ok, Acts\n")
    (folder / "acts.yaml").write_text(GOOD + "    actions: [sto]\n")
    code, output = run("check", folder / "acts.yaml")
    assert code == 1
    assert "did you mean 'stop'?" in output


def test_check_reports_each_rule_with_a_mistake(folder: Path) -> None:
    more = "  - alert: Third\n    expr: loss >\n  - alert: Fourth\n    expr: loss > 1\n    severity: high\n"
    (folder / "bad.yaml").write_text(BAD + more)
    code, output = run("check", folder / "bad.yaml")
    places = [line.split(": ")[0].removeprefix(f"{folder}/") for line in output.splitlines()]
    assert (code, places) == (1, ["bad.yaml:4:11", "bad.yaml:6:17", "bad.yaml:9:15"])
    (bad,) = json.loads(run("check", folder / "bad.yaml", "--json")[1])["files"]
    assert [bad["error"]["line"], *(one["line"] for one in bad["others"])] == [4, 6, 9]


HEADED = """\
group: My Rules
owner: me
signals:
  loss: mine
  reward_kl: 3
rules:
  - alert: First
    severity: severe
  - alert: Second
    expr: los > 3
    annotations: {sumary: high}
    let: 3
  - alert: Third
    expr: reward_kl > 1
    for: 3 bananas
"""


def test_mistakes_of_the_head_of_a_file_hide_none_of_its_rules(folder: Path) -> None:
    (folder / "bad.yaml").write_text(HEADED)
    _, output = run("check", folder / "bad.yaml")
    found = [line.removeprefix(f"{folder}/bad.yaml:").partition(": ") for line in output.splitlines()]
    assert [(int(place.partition(":")[0]), words.partition(" ")[0]) for place, _, words in found] == [
        (1, "group"), (2, "unknown"), (4, "loss"), (5, "expected"), (7, "a"), (8, "severity:"), (11, "unknown"),
        (12, "expected"), (15, "for:"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "mistakes"),
    [
        ("grou: mine\nrules: []\n", ["1:1: unknown key 'grou' in a rule file; did you mean 'group'?"]),
        (
            "owner: me\nrules: []\n",
            [
                "1:1: unknown key 'owner' in a rule file; there are: group, signals, rules",
                "1:1: a rule file needs 'group'",
            ],
        ),
        ("group: mine\nrule: []\n", ["2:1: unknown key 'rule' in a rule file; did you mean 'rules'?"]),
        (
            "group: mine\nowner: me\n",
            [
                "1:1: a rule file needs 'rules'",
                "2:1: unknown key 'owner' in a rule file; there are: group, signals, rules",
            ],
        ),
        (
            "group: mine\nrules:\n  - alert: High\n    runbok: x\n",
            ["3:5: a rule needs 'expr'", "4:5: unknown key 'runbok' in a rule"],
        ),
        (
            "group: mine\nrules:\n  - alert: High\n    exp: loss > 1\n",
            ["4:5: unknown key 'exp' in a rule; did you mean 'expr'?"],
        ),
    ],
)
def test_a_missing_key_is_reported_unless_another_is_a_misspelling_of_it(
    folder: Path, text: str, mistakes: list[str]
) -> None:
    (folder / "bad.yaml").write_text(text)
    _, output = run("check", folder / "bad.yaml")
    assert [line.removeprefix(f"{folder}/bad.yaml:") for line in output.splitlines()] == mistakes


@pytest.mark.parametrize("command", ["check", "test"])
def test_a_test_with_a_mistake_does_not_hide_that_of_another(folder: Path, command: str) -> None:
    file = folder / "good_test.yaml"
    file.write_text(
        "rule_files: [good.yaml]\ntests:\n  - nme: one\n    input_series: []\n"
        "  - name: two\n    input_series: []\n    fird: {}\n"
    )
    (bad,) = json.loads(run(command, file, "--json")[1])["files"]
    assert [bad["error"]["line"], *(one["line"] for one in bad["others"])] == [3, 7]
    code, output = run(command, file)
    places = [line.split(": ")[0] for line in output.splitlines() if str(file) in line]
    assert (code, places) == (1, [f"{file}:3:5", f"{file}:7:5"])


def test_mistakes_of_a_rule_file_that_a_test_file_names_are_found_from_here(folder: Path) -> None:
    (folder / "bad.yaml").write_text(BAD + "  - alert: Third\n    expr: loss >\n")
    (folder / "bad_test.yaml").write_text(TEST.replace("good.yaml", "bad.yaml") % 1)
    places = [line.split(": ")[0] for line in run("test", folder)[1].splitlines()]
    assert places == [f"{folder}/bad.yaml:4:11", f"{folder}/bad.yaml:6:17", "0 passed, 0 failed"]


def test_a_test_of_a_rule_file_that_is_no_text(folder: Path) -> None:
    (folder / "good.yaml").write_bytes(b"group: \xff")
    (folder / "good_test.yaml").write_text(TEST % 1)
    code, output = run("test", folder)
    assert code == 1
    assert f"{folder}/good_test.yaml:1:14: cannot read good.yaml: not text, invalid start byte at byte 7" in output


MANY = """\
group: mine
rules:
  - alert: Many
    expr: los > 3
    severity: hihg
    form: 3 steps
    for: 3
    layers: some
    let:
      a: loss +
      b: a * 2
      c: (loss
    actions: [rolback, stacks, page]
    annotations:
      sumary: x
      summary: "{a}"
    downgrade: {when: loss >, severity: infoo}
"""


def test_check_reports_all_mistakes_of_a_rule_in_the_files_order(folder: Path) -> None:
    (folder / "many.yaml").write_text(MANY)
    code, output = run("check", folder / "many.yaml")
    said = [line.removeprefix(f"{folder}/many.yaml:") for line in output.splitlines()]
    assert code == 1
    assert said == [
        "5:15: severity: 'hihg' is not one of info, warning, critical",
        "6:5: unknown key 'form' in a rule; did you mean 'for'?",
        "7:10: for: 3 of what? Write `3 steps`, or a time, as `90s`",
        "8:13: expected layers: true or false, found text (some)",
        "10:16: syntax error: the expression ends too early",
        "12:10: syntax error: '(' was never closed",
        "13:15: unknown action 'rolback'; did you mean 'rollback'?",
        f"13:32: unknown action 'page'; there are: {', '.join(ACTIONS)}",
        "15:7: unknown key 'sumary' in annotations; did you mean 'summary'?",
        "17:29: syntax error: the expression ends too early",
        "17:41: severity: 'infoo' is not one of info, warning, critical; did you mean 'info'?",
    ]


def test_a_name_that_is_unknown_only_because_of_another_mistake_is_not_reported(folder: Path) -> None:
    text = "group: mine\nrules:\n  - alert: One\n    let: {base: los * 2}\n    expr: loss > base\n    at: loss\n"
    (folder / "one.yaml").write_text(text)
    _, output = run("check", folder / "one.yaml")
    (line,) = output.splitlines()
    assert line.startswith(f"{folder}/one.yaml:4:17: unknown metric 'los'; did you mean 'loss'?")


def test_check_of_a_folder_as_json(folder: Path) -> None:
    (folder / "bad.yaml").write_text(BAD)
    (folder / "good_test.yaml").write_text(TEST % 1)
    code, output = run("check", folder, "--json")
    bad, good, test = json.loads(output)["files"]
    assert (code, bad["ok"], bad["error"]["line"], bad["error"]["column"]) == (1, False, 4, 11)
    assert (good["ok"], good["alerts"], good["error"]) == (True, ["Mine"], None)
    assert (test["ok"], test["tests"]) == (True, 1)


def test_check_finds_the_same_alert_in_two_files(folder: Path) -> None:
    (folder / "other.yaml").write_text(GOOD)
    code, output = run("check", folder)
    assert code == 1
    assert f"{folder}/other.yaml:3:1: alert 'Mine' is there twice; the first is in {folder}/good.yaml, line 3" in output


def test_stock_rules_are_checked_and_tested_without_a_file() -> None:
    code, output = run("check")
    assert (code, "LossSpike" in output, "NonFiniteLoss" in output) == (0, True, True)


@pytest.mark.parametrize(("step", "code"), [(1, 0), (0, 1)])
def test_tests_pass_or_say_what_they_got(folder: Path, step: int, code: int) -> None:
    (folder / "good_test.yaml").write_text(TEST % step)
    got, output = run("test", folder / "good_test.yaml")
    assert got == code
    if code:
        assert f"{folder}/good_test.yaml:5: fired: expected {{Mine: [0]}}, got {{Mine: [1]}}" in output
        assert "0 passed, 1 failed" in output
    else:
        assert "1 passed, 0 failed" in output
    (outcome,) = json.loads(run("test", folder, "--json")[1])["files"][0]["tests"]
    assert (outcome["name"], outcome["ok"]) == ("high", not code)


def test_a_test_of_rules_that_are_not_there(folder: Path) -> None:
    (folder / "good_test.yaml").write_text(TEST.replace("good.yaml", "gone.yaml") % 1)
    code, output = run("test", folder)
    assert code == 1
    assert f"{folder}/good_test.yaml:1:14: cannot read gone.yaml: No such file or directory" in output


@pytest.mark.parametrize(
    ("command", "lacking"),
    [("check", "rule file (*.yaml, *.yml)"), ("test", "test file (*_test.yaml, *_test.yml)")],
)
def test_a_folder_without_such_files_is_wrong_use(tmp_path: Path, command: str, lacking: str) -> None:
    """`sentinel init ./x` makes such a folder: its rules are in x/rules."""
    (tmp_path / "sentinel.toml").write_text("")
    (tmp_path / "rules").mkdir()
    code, output = run(command, tmp_path)
    assert (code, output.count("Usage: ")) == (2, 1)
    assert f"Error: {tmp_path}: no {lacking} in this folder" in output


def test_a_folder_of_rules_without_tests_has_nothing_to_test(folder: Path) -> None:
    code, output = run("test", folder)
    assert (code, "no test file" in output) == (2, True)


@pytest.mark.parametrize("name", ["good_test.yaml", "good_test.yml"])
def test_a_rule_file_is_no_test_file_and_says_where_its_tests_are(folder: Path, name: str) -> None:
    code, output = run("test", folder / "good.yaml")
    assert code == 1
    assert f"{folder}/good.yaml: this is a rule file; its tests belong in a file good_test.yaml beside it" in output
    (folder / name).write_text(TEST % 1)
    assert f"{folder}/good.yaml: this is a rule file; its tests are in {name}\n" in run("test", folder / "good.yaml")[1]


def test_a_test_file_with_an_unknown_key_is_reported_for_the_key(folder: Path) -> None:
    (folder / "odd.yaml").write_text("group: mine\n" + TEST % 1)
    code, output = run("test", folder / "odd.yaml")
    assert (code, f"{folder}/odd.yaml:1:1: unknown key 'group' in a test file" in output) == (1, True)


def test_files_that_are_no_text(folder: Path) -> None:
    (folder / "odd.yaml").write_bytes(b"\xff\xfe\x00")
    code, output = run("check", folder / "odd.yaml")
    assert (code, "odd.yaml:1:1: not text: invalid start byte at byte 0" in output) == (1, True)


def test_wrong_use_is_2(folder: Path) -> None:
    assert run("check", folder / "gone.yaml")[0] == 2
    assert run("chekc")[0] == 2


@pytest.mark.parametrize("command", ["check", "test"])
def test_help_has_an_example(command: str) -> None:
    code, output = run(command, "--help")
    assert (code, "Example:  sentinel rules " in output, "Exit code" in output) == (0, True, True)
