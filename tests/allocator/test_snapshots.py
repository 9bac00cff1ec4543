"""What is read from a snapshot, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from torch.cuda import _memory_viz

from sentinel.allocator.findings import findings
from sentinel.allocator.occupancy import occupancies, picture
from sentinel.allocator.reading import read
from sentinel.allocator.stacks import growing, holders
from sentinel.cli import cli
from tests.allocator import synthetic
from tests.allocator.synthetic import MiB, frames, segment, snapshot, written


def called(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["memory", *map(str, arguments)])


def test_the_synthetic_layout_is_the_one_that_torch_reads() -> None:
    said = _memory_viz.segsum(synthetic.torn())
    assert "640.0MiB" in said  # ten segments of 64 MiB
    assert "train.py" in _memory_viz.memory(synthetic.torn(), format_flamegraph=lambda text: text)


def test_bytes_are_told_apart(tmp_path: Path) -> None:
    content = snapshot(
        [
            segment(
                [
                    (10 * MiB, "active_allocated", []),
                    (5 * MiB, "inactive", []),
                    (1 * MiB, "active_awaiting_free", []),
                ]
            ),
            segment([(20 * MiB, "inactive", [])]),
            segment([(2 * MiB, "active_allocated", [])], device=1, segment_pool_id=(0, 7), is_expandable=True),
        ]
    )
    first, second = occupancies(read(written(tmp_path / "s.pickle", content)))
    assert (first.reserved, first.live, first.waiting) == (36 * MiB, 10 * MiB, 1 * MiB)
    assert (first.pieces, first.whole, first.largest_free) == (5 * MiB, 20 * MiB, 20 * MiB)
    assert first.rounding == 100
    assert (second.device, second.private, second.expandable) == (1, 2 * MiB, True)


def test_the_map_shows_where_a_segment_is_full() -> None:
    halves = [(32 * MiB, "active_allocated", []), (32 * MiB, "inactive", [])]
    read_in = read_segments([segment(halves)])
    assert picture(read_in, 8)[0][1] == "████    "


def read_segments(segments: list[Any]) -> list[Any]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return list(read(written(Path(folder) / "s", snapshot(segments))).segments)


def test_torn_memory_is_a_warning_with_the_present_name(tmp_path: Path) -> None:
    done = called(written(tmp_path / "torn.pickle", synthetic.torn()))
    assert done.exit_code == 1
    assert "(50%) are free in pieces" in " ".join(done.output.split())
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in done.output
    assert max(map(len, done.output.splitlines())) <= 80


def test_where_segments_are_expandable_already_other_advice_is_given(tmp_path: Path) -> None:
    content = synthetic.torn()
    for one in content["segments"]:
        one["is_expandable"] = True
    (finding,) = findings([read(written(tmp_path / "s", content))], [])
    assert "PYTORCH_ALLOC_CONF" not in finding.do
    assert "pad batches" in finding.do


def test_a_healthy_snapshot_is_nothing_to_mend(tmp_path: Path) -> None:
    done = called(written(tmp_path / "s.pickle", synthetic.healthy()))
    assert done.exit_code == 0
    assert "nothing to fix" in done.output


def test_the_largest_holder_is_named_by_the_users_line(tmp_path: Path) -> None:
    first, *_ = holders(read(written(tmp_path / "s", synthetic.torn())))
    assert first.place == "/home/ada/train.py:31 forward"
    assert (first.bytes, first.blocks) == (320 * MiB, 40)


def test_what_grows_from_snapshot_to_snapshot_is_a_leak_and_what_comes_and_goes_is_not(tmp_path: Path) -> None:
    files = [written(tmp_path / f"{step}.pickle", synthetic.growing(step)) for step in (1, 2, 3)]
    (leak,) = growing([read(file) for file in files])
    assert leak.place == "/home/ada/train.py:44 step"
    assert leak.bytes == (2 * MiB, 4 * MiB, 6 * MiB)
    done = called(*files)
    assert done.exit_code == 1
    assert "train.py:44 step holds 4.19 MB more in 2 more blocks over 3 snapshots" in " ".join(done.output.split())


def test_two_snapshots_are_not_enough_for_an_alarm(tmp_path: Path) -> None:
    done = called(*(written(tmp_path / f"{step}", synthetic.growing(step)) for step in (1, 2)))
    assert done.exit_code == 0
    assert "take a third to be sure" in " ".join(done.output.split())


@pytest.mark.parametrize(("asked", "word"), [(256 * MiB, "fragmentation, not size"), (2**40, "too much, not torn")])
def test_out_of_memory_is_told_apart_from_fragmentation(asked: int, word: str, tmp_path: Path) -> None:
    failure = {"action": "oom", "size": asked, "device_free": 5 * MiB, "frames": frames("/home/ada/train.py:9 f")}
    content = synthetic.torn() | {"device_traces": [[{"action": "alloc"}, failure]]}
    found = findings([read(written(tmp_path / "s", content))], [])
    (oom,) = [finding for finding in found if "out of memory" in finding.what]
    assert word in oom.do
    assert "/home/ada/train.py:9 f" in oom.what


def test_memory_that_waits_for_a_stream_is_told(tmp_path: Path) -> None:
    content = snapshot([segment([(100 * MiB, "active_awaiting_free", synthetic.LAYER)])])
    (finding,) = findings([read(written(tmp_path / "s", content))], [])
    assert "record_stream" in finding.what


def test_json_is_for_scripts(tmp_path: Path) -> None:
    content = json.loads(called("--json", written(tmp_path / "s", synthetic.torn())).output)
    assert content["snapshots"][0]["gpus"][0]["fragmentation"] == pytest.approx(0.5)
    assert content["stacks"][0]["place"] == "/home/ada/train.py:31 forward"
    assert content["findings"][0]["severity"] == "warning"
