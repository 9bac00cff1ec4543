"""What is read from allocator snapshots, and what is reported about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from torch.cuda import _memory_viz

from sentinel.cli import cli
from sentinel.toolkit.memory.findings import findings
from sentinel.toolkit.memory.occupancy import occupancies, picture
from sentinel.toolkit.memory.reading import read
from sentinel.toolkit.memory.stacks import growing, holders
from sentinel.toolkit.memory.timeline import peaks
from tests.allocator import synthetic
from tests.allocator.synthetic import MiB, frames, segment, snapshot, written


def called(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["memory", *map(str, arguments)])


def test_the_synthetic_layout_is_the_one_that_torch_reads() -> None:
    said = _memory_viz.segsum(synthetic.torn())
    assert "640.0MiB" in said  # ten segments of 64 MiB
    assert "train.py" in _memory_viz.memory(synthetic.torn(), format_flamegraph=lambda text: text)


def test_a_snapshot_of_a_process_that_reserved_nothing(tmp_path: Path) -> None:
    file = written(tmp_path / "s.pickle", snapshot([]))
    assert f"{file}: nothing is reserved on any GPU" in called(file).stdout


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


def test_the_map_has_no_line_for_a_segment_that_nothing_uses() -> None:
    used, unused = [(32 * MiB, "active_allocated", [])], [(64 * MiB, "inactive", [])]
    assert [shown for _, shown in picture(read_segments([segment(used), segment(unused)]), 4)] == ["████"]


@pytest.mark.parametrize(
    ("settings", "advised"),
    [("max_split_size_mb:512", True), ("max_split_size_mb:512,expandable_segments:True", False), ("", False)],
)
def test_the_older_setting_against_fragmentation_is_named(settings: str, advised: bool, tmp_path: Path) -> None:
    content = snapshot([segment([(2 * MiB, "active_allocated", [])])], PYTORCH_CUDA_ALLOC_CONF=settings)
    said = " ".join(called(written(tmp_path / "s", content)).output.split())
    assert ("the allocator ran with max_split_size_mb" in said) == advised


def read_segments(segments: list[Any]) -> list[Any]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return list(read(written(Path(folder) / "s", snapshot(segments))).segments)


def test_fragmented_memory_is_a_warning_that_names_the_current_variable(tmp_path: Path) -> None:
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


def test_a_healthy_snapshot_needs_no_fix(tmp_path: Path) -> None:
    done = called(written(tmp_path / "s.pickle", synthetic.healthy()))
    assert done.exit_code == 0
    assert "nothing to fix" in done.output


def test_the_largest_holder_is_named_by_the_users_line(tmp_path: Path) -> None:
    first, *_ = holders(read(written(tmp_path / "s", synthetic.torn())))
    assert first.place == "/home/ada/train.py:31 forward"
    assert (first.bytes, first.blocks) == (320 * MiB, 40)


def test_stacks_that_grow_from_snapshot_to_snapshot_are_leaks_and_those_that_shrink_again_are_not(
    tmp_path: Path,
) -> None:
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


def entries(*changes: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"action": action, "addr": address, "size": size, "frames": []} for action, address, size in changes]


def test_memory_that_is_torn_between_steps_and_full_at_the_peak_is_not_fragmented(tmp_path: Path) -> None:
    """Expandable segments are not advised where the history in the file shows every piece in use at the peak."""
    content = synthetic.torn()
    free = [
        (one["address"] + at * 8 * MiB, 8 * MiB - 100) for one in content["segments"] for at in range(1, 8, 2)
    ]  # fmt: skip
    content["device_traces"] = [
        entries(
            *(("alloc", *block) for block in free),
            *((action, *block) for block in free for action in ("free_requested", "free_completed")),
        )
    ]
    done = called(written(tmp_path / "torn.pickle", content))
    said = " ".join(done.output.split())
    assert done.exit_code == 0, said
    assert "at the peak: live 671 MB of 671 MB (100%)" in said
    assert "are free in pieces now, but at the peak 671 MB of 671 MB (100%) were in use" in said
    assert "expandable_segments" not in said
    assert max(map(len, done.output.splitlines())) <= 80


def test_memory_that_was_torn_at_the_peak_is_fragmented_even_if_all_is_free_by_now(tmp_path: Path) -> None:
    content = synthetic.torn()
    gone = []
    for one in content["segments"]:
        gone += [(block["address"], block["size"]) for block in one["blocks"] if block["state"] != "inactive"]
        one["blocks"] = [{**one["blocks"][0], "size": one["total_size"], "state": "inactive", "frames": []}]
    content["device_traces"] = [
        entries(*(("alloc", *block) for block in gone), *(("free_completed", *block) for block in gone))
    ]
    (finding, *_) = findings([read(written(tmp_path / "s", content))], [])
    assert finding.severity == "warning"
    assert "at the peak 336 MB of 671 MB (50%) are free in pieces, the largest 8.39 MB" in finding.what


def test_changes_since_the_peak_are_undone(tmp_path: Path) -> None:
    """The peak is computed backwards, over segments of cudaMalloc and over mapped pages of an expandable segment."""
    content = snapshot([segment([(10 * MiB, "active_allocated", []), (10 * MiB, "inactive", [])], is_expandable=True)])
    start = content["segments"][0]["address"]
    content["device_traces"] = [
        entries(
            ("segment_alloc", 2**40, 100 * MiB),
            ("alloc", 2**40, 90 * MiB),
            ("free_requested", 2**40, 90 * MiB),
            ("free_completed", 2**40, 90 * MiB),
            ("segment_free", 2**40, 100 * MiB),
            ("segment_map", start + 10 * MiB, 10 * MiB),
        )
    ]
    (peak,) = peaks(read(written(tmp_path / "s", content))).values()
    assert (peak.entry, peak.entries, peak.live) == (1, 6, 100 * MiB)
    assert (peak.reserved, peak.pieces, peak.whole) == (110 * MiB, 10 * MiB, 0)


NATIVE = [
    {"filename": "??", "line": 0, "name": name}
    for name in (
        "torch::unwind::unwind()",
        "torch::CapturedTraceback::gather(bool, bool, bool)",
        "c10::cuda::CUDACachingAllocator::Native::NativeCachingAllocator::malloc(void**, signed char, unsigned long)",
        "at::detail::empty_generic(c10::ArrayRef<long>, c10::Allocator*, c10::DispatchKeySet)",
        "at::native::empty_cuda(c10::ArrayRef<long>, std::optional<c10::ScalarType>)",
        "at::(anonymous namespace)::structured_mm_out_cuda_functional::set_output_raw_strided(long)",
        "at::_ops::mm::call(at::Tensor const&, at::Tensor const&)",
    )
]


@pytest.mark.parametrize(
    ("outer", "place"),
    [
        (
            ["torch::autograd::generated::MmBackward0::apply(std::vector<at::Tensor>&&)",
             "torch::autograd::Engine::evaluate_function(std::shared_ptr<torch::autograd::GraphTask>&)",
             "torch::autograd::Engine::thread_main(std::shared_ptr<torch::autograd::GraphTask> const&)"],
            "gradients (autograd engine): torch::autograd::generated::MmBackward0::apply",
        ),
        (["start_thread"], "at::anonymous::structured_mm_out_cuda_functional::set_output_raw_strided"),
    ],
)  # fmt: skip
def test_a_stack_without_python_frames_is_named_by_its_operation(outer: list[str], place: str, tmp_path: Path) -> None:
    """The innermost frame says nothing: 13.5 GB of gradients were once reported as held by `torch::unwind::unwind`."""
    stack = [*NATIVE, *({"filename": "??", "line": 0, "name": name} for name in outer)]
    file = written(tmp_path / "s", snapshot([segment([(64 * MiB, "active_allocated", stack)])]))
    (holder,) = holders(read(file))
    assert holder.place == place
    shown = called(file).output
    assert "unwind" not in shown
    assert place[-40:] in shown


def test_memory_that_waits_for_a_stream_is_reported(tmp_path: Path) -> None:
    content = snapshot([segment([(100 * MiB, "active_awaiting_free", synthetic.LAYER)])])
    (finding,) = findings([read(written(tmp_path / "s", content))], [])
    assert "record_stream" in finding.what


def test_json_is_for_scripts(tmp_path: Path) -> None:
    content = json.loads(called("--json", written(tmp_path / "s", synthetic.torn())).output)
    assert content["snapshots"][0]["gpus"][0]["fragmentation"] == pytest.approx(0.5)
    assert content["stacks"][0]["place"] == "/home/ada/train.py:31 forward"
    assert content["findings"][0]["severity"] == "warning"
