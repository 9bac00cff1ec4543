from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

from sentinel.demo.outcome import describe_rescue
from sentinel.demo.page import draw_picture
from sentinel.demo.record import DemoRecord

SVG = "{http://www.w3.org/2000/svg}"


def read_texts(path: Path) -> list[str]:
    return [element.text or "" for element in ElementTree.parse(path).iter(f"{SVG}text")]


def count_curves(path: Path, style: str) -> int:
    """Return the number of paths drawn as curves of `style`, without the legend's key."""
    paths = ElementTree.parse(path).iter(f"{SVG}path")
    return sum({"curve", style} <= set(element.get("class", "").split()) for element in paths) - 1


def test_both_runs_the_damage_and_what_was_done_are_in_the_picture(record: DemoRecord, tmp_path: Path) -> None:
    path = tmp_path / "demo.svg"
    draw_picture(describe_rescue(record), path)
    texts = read_texts(path)
    assert record.alert is not None
    assert record.rollback is not None
    assert f"{record.alert.alert}, step {record.alert.step}" in texts
    assert f"rolled back at step {record.rollback.at}, to the state of step {record.rollback.to}" in texts
    assert {"with Sentinel", "without Sentinel"} <= set(texts)
    assert (count_curves(path, "s0"), count_curves(path, "s1")) == (4, 3), "the watched run's has a gradient norm"
    assert path.read_text().count('class="band"') == 3
    assert path.stat().st_size < 200_000, "the README shows it"
