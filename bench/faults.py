"""Train every fault beside its healthy twin, at default settings over several seeds; write docs/detection.md's table.

    python -m bench.faults                      # 8 minutes a seed on two idle cores; goes on where it was stopped
    python -m bench.faults --seeds 1 --family bugs
    python -m bench.faults --late               # those that can begin at any step, at a random one from 2,000 to 5,000
    python -m bench.faults --table              # only write the table, from what was kept

Each family is one process that trains, against one daemon. What was found is kept in build/faults.jsonl, beside a
digest of the code that it depends on.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

from bench.pages import BUILD, DOCS, ROOT, make_table, write_section
from tests.faults.fault import Fault
from tests.faults.train import FAMILIES, faults
from tests.faults.verdict import OF_THE_MACHINE, TIMED, verdicts

KEPT = BUILD / "faults.jsonl"
MARKS = "<!-- trained -->", "<!-- end of trained -->"
HEAD = (
    "row", "fault", "alert", "in time", "delay in steps", "allowed", "right cause", "one page",
    "false alarms of the twin",
)  # fmt: skip
SEEDS = 5


def find_digest(family: str) -> str:
    """Of what a family's results depend on."""
    files = [
        *(ROOT / "rules").glob("*.yaml"),
        *(ROOT / "hooks").rglob("*.py"),
        *(ROOT / "sentinel/diagnose").glob("*.*"),
        *(ROOT / "sentinel/engine").glob("*.py"),
        *(ROOT / "tests/faults" / f"{name}.py" for name in ("fault", "models", "train", "verdict", family)),
    ]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()


def read_kept() -> dict[tuple[str, int, bool, str], dict[str, Any]]:
    """(family, seed, whether the faults began late, digest) -> its verdicts, as plain values."""
    if not KEPT.exists():
        return {}
    entries = map(json.loads, KEPT.read_text().splitlines())
    return {(entry["family"], entry["seed"], entry["late"], entry["digest"]): entry for entry in entries}


def train_missing(families: Sequence[str], seeds: int, *, late: bool) -> None:
    """Train what is missing, seed by seed."""
    KEPT.parent.mkdir(exist_ok=True)
    for seed in range(seeds):
        for family in families:
            if (family, seed, late, find_digest(family)) in read_kept():
                continue
            try:
                found = verdicts(family, seed, late=late)
            except (AssertionError, subprocess.SubprocessError) as error:  # the others are still of use
                print(f"{family} {seed}: not trained, start again to do so: {str(error)[-500:]}", flush=True)
                continue
            entry = {"family": family, "seed": seed, "late": late, "digest": find_digest(family)}
            with KEPT.open("a") as file:
                print(json.dumps(entry | {"verdicts": [dataclasses.asdict(one) for one in found]}), file=file)
            for one in found:
                print(f"{family} {seed}: {one.id}: {'; '.join(one.notes) or 'found'}", flush=True)


def tabulate_faults() -> str:
    """A row a fault, or two where it was planted late as well, over all seeds that are kept, each as it was trained
    last."""
    rows, results, stale = list[Iterator[str]](), read_kept(), list[str]()
    for family in FAMILIES:
        mine = {(late, seed): entry for (name, seed, late, _), entry in results.items() if name == family}
        stale += [family] if any(entry["digest"] != find_digest(family) for entry in mine.values()) else []
        for fault in faults(family):
            for late in (False, True):
                found = [find_verdict(entry, fault) for (kind, _), entry in mine.items() if kind is late]
                rows += [row(fault, found, timed=family in TIMED, late=late)] if any(found) or not late else []
    note = f"\n\nTrained with an earlier state of the code: {', '.join(stale)}." if stale else ""
    return make_table(HEAD, rows) + note


def row(fault: Fault, found: Sequence[dict[str, Any] | None], *, timed: bool, late: bool = False) -> Iterator[str]:
    """One fault, over its seeds. `timed`: its family is about time."""
    known = [one for one in found if one is not None]
    count = len(known)
    delays = sorted(one["delay"] for one in known if one["delay"] is not None)
    yield fault.id + (", late" if late else "")
    yield fault.what + (f" ({fault.synthetic}: made up)" if fault.synthetic else "")
    yield fault.alert
    yield f"{sum(one['delay'] is not None and one['delay'] <= one['allowed'] for one in known)} of {count}"
    unit = {"seconds": " s", "readings": " readings"}.get(fault.signal, "")
    yield f"{delays[0]} to {delays[-1]}{unit}" if delays else "-"
    yield f"{fault.delay}{unit}"
    yield f"{sum(one['right'] for one in known)} of {count}"
    yield f"{sum(set(one['pages'].values()) == {1} for one in known)} of {count}"
    excused = () if timed else OF_THE_MACHINE
    yield f"{sum(bool(set(one['false_alarms']) - set(excused)) for one in known)} of {count}"


def find_verdict(entry: dict[str, Any], fault: Fault) -> dict[str, Any] | None:
    """Its verdict in one seed of its family."""
    return next((one for one in entry["verdicts"] if one["id"] == fault.id), None)


def main() -> None:
    parser = argparse.ArgumentParser(description="Faults that are trained beside their healthy twins.")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--family", choices=FAMILIES, action="append")
    parser.add_argument("--late", action="store_true", help="faults begin at a random step, where they can")
    parser.add_argument("--table", action="store_true", help="train nothing, write the table")
    options = parser.parse_args()
    if not options.table:
        families = options.family or FAMILIES
        if options.late:
            families = [family for family in families if any(fault.begins for fault in faults(family))]
        train_missing(families, options.seeds, late=options.late)
    write_section(DOCS / "detection.md", MARKS, tabulate_faults())


if __name__ == "__main__":
    main()
