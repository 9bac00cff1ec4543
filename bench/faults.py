"""Train every fault beside its healthy twin, at default settings over several seeds; write docs/detection.md's table.

    python bench/faults.py                      # 8 minutes a seed on two idle cores; goes on where it was stopped
    python bench/faults.py --seeds 1 --family bugs
    python bench/faults.py --table              # only write the table, from what was kept

Each family is one process that trains, against one daemon. What was found is kept in build/faults.jsonl, beside a
digest of the code that it depends on.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.faults.fault import Fault  # noqa: E402
from tests.faults.train import FAMILIES, faults  # noqa: E402
from tests.faults.verdict import OF_THE_MACHINE, TIMED, verdicts  # noqa: E402

PAGE = ROOT / "docs" / "detection.md"
KEPT = ROOT / "build" / "faults.jsonl"
BEGIN, END = "<!-- trained -->", "<!-- end of trained -->"
SEEDS = 5


def digest(family: str) -> str:
    """Of what a family's results depend on."""
    files = [
        *(ROOT / "rules").glob("*.yaml"),
        *(ROOT / "hooks").rglob("*.py"),
        *(ROOT / "sentinel/diagnose").glob("*.*"),
        *(ROOT / "sentinel/engine").glob("*.py"),
        *(ROOT / "tests/faults" / f"{name}.py" for name in ("fault", "models", "train", "verdict", family)),
    ]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()


def kept() -> dict[tuple[str, int, str], dict[str, Any]]:
    """(family, seed, digest) -> its verdicts, as plain values."""
    if not KEPT.exists():
        return {}
    entries = map(json.loads, KEPT.read_text().splitlines())
    return {(entry["family"], entry["seed"], entry["digest"]): entry for entry in entries}


def measured(families: Sequence[str], seeds: int) -> None:
    """Train what is missing, seed by seed."""
    KEPT.parent.mkdir(exist_ok=True)
    for seed in range(seeds):
        for family in families:
            if (family, seed, digest(family)) in kept():
                continue
            try:
                found = verdicts(family, seed)
            except (AssertionError, subprocess.SubprocessError) as error:  # the others are still of use
                print(f"{family} {seed}: not trained, start again to do so: {str(error)[-500:]}", flush=True)
                continue
            entry = {"family": family, "seed": seed, "digest": digest(family)}
            with KEPT.open("a") as file:
                print(json.dumps(entry | {"verdicts": [dataclasses.asdict(one) for one in found]}), file=file)
            for one in found:
                print(f"{family} {seed}: {one.id}: {'; '.join(one.notes) or 'found'}", flush=True)


def table() -> list[str]:
    """A row a fault, over all seeds that are kept, each as it was trained last."""
    head = [
        "row",
        "fault",
        "alert",
        "in time",
        "delay in steps",
        "allowed",
        "right cause",
        "false alarms of the twin",
    ]
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    results, stale = kept(), list[str]()
    for family in FAMILIES:
        mine = {seed: entry for (name, seed, _), entry in results.items() if name == family}  # the last one wins
        stale += [family] if any(entry["digest"] != digest(family) for entry in mine.values()) else []
        for fault in faults(family):
            lines.append(
                "| "
                + " | ".join(row(fault, [_of(entry, fault) for entry in mine.values()], timed=family in TIMED))
                + " |"
            )
    if stale:
        lines += ["", f"Trained with an earlier state of the code: {', '.join(stale)}."]
    return lines


def row(fault: Fault, found: Sequence[dict[str, Any] | None], *, timed: bool) -> Iterator[str]:
    """One fault, over its seeds. `timed`: its family is about time."""
    told = [one for one in found if one is not None]
    count = len(told)
    delays = sorted(one["delay"] for one in told if one["delay"] is not None)
    yield fault.id
    yield fault.what + (f" ({fault.synthetic}: made up)" if fault.synthetic else "")
    yield fault.alert
    yield f"{sum(one['delay'] is not None and one['delay'] <= one['allowed'] for one in told)} of {count}"
    unit = {"seconds": " s", "readings": " readings"}.get(fault.signal, "")
    yield f"{delays[0]} to {delays[-1]}{unit}" if delays else "-"
    yield f"{fault.delay}{unit}"
    yield f"{sum(one['right'] for one in told)} of {count}"
    excused = () if timed else OF_THE_MACHINE
    yield f"{sum(bool(set(one['false_alarms']) - set(excused)) for one in told)} of {count}"


def _of(entry: dict[str, Any], fault: Fault) -> dict[str, Any] | None:
    """Its verdict in one seed of its family."""
    return next((one for one in entry["verdicts"] if one["id"] == fault.id), None)


def written() -> None:
    """The page, with the table between its markers."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(table()) + f"\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Faults that are trained beside their healthy twins.")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--family", choices=FAMILIES, action="append")
    parser.add_argument("--table", action="store_true", help="train nothing, write the table")
    asked = parser.parse_args()
    if not asked.table:
        measured(asked.family or FAMILIES, asked.seeds)
    written()


if __name__ == "__main__":
    main()
