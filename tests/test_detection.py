"""bench/detection.py on made-up runs: it counts correctly, and continues where it was stopped."""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from bench import detection, peers, recorded

ROOT = Path(__file__).parent.parent
FIELDS = ("run", "kind", "domain", "source", "truth", "repo", "commit", "path", "licence")


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(detection, "KEPT", tmp_path / "build" / "kept.jsonl")
    (tmp_path / "page.md").write_text("# Title\n<!-- measured -->\nold\n")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    generator = random.Random(1)
    calm = [3 + generator.gauss(0, 0.02) for _ in range(400)]
    runs = {
        "calm": ("healthy", "", calm),
        "restart": ("healthy_event", "planned restart", [*calm[:300], *[loss + 4 for loss in calm[:60]]]),
        "doomed": ("faulty", "NaN at 250 | as told", [*calm[:200], *[9.0] * 50, "nan", "nan"]),
        "dead": ("faulty", "never learns", calm[:200]),
        "late": ("faulty", "DIVERGED at 300", [*calm[:300], *[9 + loss for loss in calm[:60]]]),
        "early": ("faulty", "diverged (ends at 9)", [3.0, 1e6, *[6 + loss for loss in calm[:200]]]),
    }
    with (tmp_path / "labels.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for run, (kind, truth, losses) in runs.items():
            writer.writerow(dict.fromkeys(FIELDS, "x") | {"run": run, "kind": kind, "domain": run, "truth": truth})
            path = tmp_path / "runs" / kind / f"{run}.jsonl.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = "\n".join(json.dumps({"step": i, "loss": loss}) for i, loss in enumerate(losses))
            path.write_bytes(gzip.compress(rows.encode()))
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, data: Path, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["detection.py", "--data", str(data), "--jobs", "1", *options])
    return int(detection.main())


def test_it_counts_correctly_and_continues_where_it_was_stopped(monkeypatch: pytest.MonkeyPatch, data: Path) -> None:
    assert run(monkeypatch, data, "--check") == 1
    assert run(monkeypatch, data) == 0
    text = detection.PAGE.read_text()
    assert text.startswith("# Title\n<!-- measured -->\n")
    assert "\nold\n" not in text
    restart, doomed, dead = (recorded.Label(run, "", run, "x", *"    ").half for run in ("restart", "doomed", "dead"))
    for line in (
        f"| restart | {restart} | LossSpike | 300 | planned restart |",
        f"| NaN after 150 rows or more | {doomed} | 1 of 1 (21 % to 100 %) | 1 of 1 (21 % to 100 %) | 50 |",
        f"| no NaN | {dead} | 2 of 3 (21 % to 94 %) |  |  |",
        f"| dead | {dead} | 200 | none | never learns |",
        "| after 150 rows or more | held out | 1 of 1 (21 % to 100 %) |",
        "| before | held out | 1 of 1 (21 % to 100 %) |",
        "| late | held out | 300 | LossSpike | 300 | 0 |",
        "| early | held out | 1 | Divergence | 100 | 99 |",
        "| 3 rows over 20 MAD | held out | 0 of 1 (0 % to 79 %) | 1 of 1 (21 % to 100 %) |",
        "| stock rules, critical | held out | 0 of 1 (0 % to 79 %) | 1 of 1 (21 % to 100 %) |",
        "| Megatron-LM 10x | held out | 0 of 1 (0 % to 79 %) | 0 of 1 (0 % to 79 %) |",
        "| Megatron-LM 10x | 0 | 1 | 1 | 0 | 0 | 0 |",
        "| metaseq ratio 1.2 | 0 | 3 | 0 | 2 | 1 | 0 |",
        "| early | held out | Lightning SpikeDetection | 1 | 100 |",
    ):
        assert line in text
    blind = text.partition("Could look in none")[2].partition("\n")[0]
    assert "LossSpike" not in blind
    for rule in ("ParametersNotUpdated", "GpuThrottled", "GradientSpike"):  # no inputs, no times, no norm
        assert f" {rule}" in blind
    kept = detection.KEPT.read_text()
    monkeypatch.setattr(detection, "replay_log", lambda path: pytest.fail("it was kept"))
    assert run(monkeypatch, data, "--check") == 0
    assert detection.KEPT.read_text() == kept


def test_intervals_are_the_known_ones() -> None:
    assert recorded.share(1, 10) == "1 of 10 (2 % to 40 %)"  # Wilson: 0.018 to 0.404
    assert recorded.rate(0, 10_000) == "0.000 (0.000 to 3.689)"  # -ln 0.025
    assert recorded.rate(10, 10_000) == "10.000 (4.795 to 18.390)"  # Garwood's table


def test_where_a_loss_begins_to_rise() -> None:
    assert recorded.rise([3.0, 2.0] * 50 + [4.0] * 29 + [2.0]) is None
    assert recorded.rise([3.0, 2.0] * 50 + [4.0] * 29 + [2.0] + [3.1] * 40) == 130
    assert recorded.rise([2.3, *[90.0] * 30]) == 1


def flagged(
    detector: Callable[..., npt.NDArray[np.bool_]], losses: list[float], norms: list[float] | None
) -> list[int]:
    with np.errstate(all="ignore"):
        return list(np.flatnonzero(detector(np.array(losses), None if norms is None else np.array(norms))))


def test_the_detectors_of_others_flag_what_their_rules_say() -> None:
    calm = [3 + 0.01 * math.sin(i) for i in range(300)]
    nan = math.nan
    for name, losses, norms, rows in (
        ("lightning", [*calm, 9.1, 9.1, 3.0, 8.9, nan], None, [300, 301, 304]),
        ("foundry", [*calm, *[6.5] * 7, 3.0], None, [304, 305, 306]),
        ("foundry", [2.0] * 100 + [3.9] * 160, None, list(range(200, 260))),
        ("megatron", [*calm, 30.0, 30.2, nan, 3.0], None, [301, 302]),
        ("olmo", [*calm, 3.2, 3.0], None, [300]),
        ("olmo", calm, [*calm[:-1], 5.0], [299]),
        ("olmo", [*calm, nan, *calm[:130]], None, list(range(300, 429))),
        ("metaseq", [*calm, 3.7, 3.0, 3.5, nan, 99.0], None, [300]),
        ("first_try", [9.0] * 5 + [*calm, 3.9, nan, 3.9, 3.9, 3.9, 3.0, 3.0], None, [307, 308, 309, 310]),
        ("first_try", [9.0] * 5 + [*calm, 3.5, 3.5, 3.5, 3.5], None, []),
    ):
        assert flagged(getattr(peers, name), losses, norms) == rows, name
    assert {detector.__name__ for detector in peers.PEERS.values()} == {
        "lightning", "foundry", "megatron", "olmo", "metaseq",
    }  # fmt: skip


def test_the_last_measurement_meets_the_promised_numbers() -> None:
    rows = [line.strip("| ").split(" | ") for line in (ROOT / "docs" / "detection.md").read_text().splitlines()]

    def row(*starts: str) -> list[list[int]]:
        """Return the shares in the row that begins with `starts`, each as [part, whole]."""
        (cells,) = (cells for cells in rows if tuple(cells[: len(starts)]) == starts)
        return [[int(number) for number in cell.split(" (")[0].split(" of ")] for cell in cells if " of " in cell]

    healthy, shaken = row("healthy", "both"), row("healthy, with an event", "both")
    assert healthy[0][0] == 0, "critical alarms"
    assert 10 * (healthy[1][0] + shaken[1][0]) <= healthy[1][1] + shaken[1][1], "warnings: one run in ten"
    assert row("NaN after 150 rows or more", "both")[1][0] >= 36, "foreseen"
    part, whole = row("stock rules, critical", "both")[3]
    assert part == whole, "every NaN at its row"
    part, whole = row("after 150 rows or more", "both")[0]
    assert part == whole > 0, "every divergence that could be seen coming"
    assert any(cells[0].startswith("On no faulty run was one of these earlier") for cells in rows)


def test_recorded_runs_raise_their_known_alarms() -> None:
    """Real logs in the folder that SENTINEL_RECORDED_RUNS names raise known alarms; missing logs are skipped."""
    folder = Path(os.environ.get("SENTINEL_RECORDED_RUNS", "nowhere")) / "runs"
    for run, alarms in {
        "healthy_event/algoperf_v05_self_nadamw_sequential_imagenet_resnet_jax_t1": [],  # a planned restart
        "healthy_event/mlperf_llama31_8b_Cisco_n16": [("LossSpike", 883)],  # a real spike
        "faulty/deepobs_F_fmnist_vae_Momentum_lr0.016_lateNaN": [("LossSpike", 2872), ("NonFiniteLoss", 2873)],
        "faulty/deepobs_F_cifar100_allcnnc_SGD_lr0.4_lateNaN": [("LossSpike", 1697), ("NonFiniteLoss", 1702)],
        "healthy/mlperf_flux1_Nebius_n4": [],
        "healthy_event/dschat_ppo_opt1.3b": [],  # negative losses
        "faulty/mlperf_F_rnnt_xFusion_aborted": [("LossSpike", 559), ("Divergence", 626)],
        "faulty/deepobs_F_cifar100_allcnnc_Momentum_lr4_earlyNaN": [("NonFiniteLoss", 7)],
    }.items():
        path = folder / f"{run}.jsonl.gz"
        if path.exists():
            found = detection.replay_log(path)
            assert [(a.rule, a.row) for a in found.alarms if a.severity == "critical"] == alarms, run
