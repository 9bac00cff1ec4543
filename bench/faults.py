"""Trains every fault beside its healthy twin, at default settings, with several seeds; writes docs/detection.md.

    python -m bench.faults                      # 8 minutes a seed on two idle cores; goes on where it was stopped
    python -m bench.faults --seeds 1 --family bugs              # the rows of other families stay as they are
    python -m bench.faults --seeds 1 --pace 20 --workers 4      # steps of 20 ms, for a table of their own
    python -m bench.faults --late               # those that can begin at any step, at a random one from 2,000 to 5,000
    python -m bench.faults --table              # only write the tables, from what was kept

The faults of a family train in one process with one daemon; with --pace or --late each fault has its own. `--workers`
processes train at a time. Results are kept in build/faults.jsonl, with a digest of the code that they depend on.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, NamedTuple

from bench.pages import BUILD, DOCS, ROOT, make_table, read_rows, write_section
from tests.faults.fault import Fault
from tests.faults.train import FAMILIES, faults
from tests.faults.verdict import OF_THE_MACHINE, TIMED, Verdict, verdicts

KEPT = BUILD / "faults.jsonl"
HEAD = (
    "row", "fault", "alert", "in time", "delay in steps", "allowed", "right cause", "one page",
    "false alarms of the twin",
)  # fmt: skip
SEEDS = 5
LATE_PACE = 3
"""Least milliseconds of a step of the loops whose fault begins late, except where the time of a step is the fault."""


class Training(NamedTuple):
    """How a fault was trained; of several verdicts on the same training the newest counts."""

    id: str
    seed: int
    late: bool
    pace: int
    """Least milliseconds of a step; 0: the loop's own speed."""


class Table(NamedTuple):
    """A table of docs/detection.md: which trainings it counts."""

    name: str
    late: bool = False
    pace: int = 0

    def find_pace(self, fault: Fault) -> int | None:
        """Return the pace at which a fault is trained for this table; None if it is not."""
        if (self.late and not fault.begins) or (self.pace and fault.own_pace):
            return None
        return LATE_PACE if self.late and not fault.own_pace else self.pace

    def mark_ends(self) -> tuple[str, str]:
        """Return the comments of the page between which it stands."""
        return f"<!-- {self.name} -->", f"<!-- end of {self.name} -->"


TABLES = (
    Table("trained"),
    Table("late", late=True),
    Table("paced 3", pace=3),
    Table("paced 20", pace=20),
    Table("paced 200", pace=200),
)


def find_digest(family: str) -> str:
    """Return a digest of the files that a family's results depend on."""
    files = [
        *(ROOT / "rules").glob("*.yaml"),
        *(ROOT / "hooks").rglob("*.py"),
        *(ROOT / "sentinel/diagnose").rglob("*.py"),
        *(ROOT / "sentinel/diagnose").glob("*.yaml"),
        *(ROOT / "sentinel/engine").rglob("*.py"),
        *(ROOT / "tests/faults" / f"{name}.py" for name in ("fault", "models", "train", "verdict", family)),
    ]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()


def read_kept() -> dict[Training, dict[str, Any]]:
    """Return the kept entries by training, each with `digest` and `verdict` as plain values."""
    entries = map(json.loads, KEPT.read_text().splitlines()) if KEPT.exists() else ()
    return {Training(*entry["training"]): entry for entry in entries}


def list_missing(
    families: Sequence[str], seeds: int, *, late: bool, pace: int
) -> Iterator[tuple[str, int, list[str], int]]:
    """Yield what was not trained with the present code, by seed: (family, seed, ids that one process trains, pace)."""
    kept, table = read_kept(), Table("missing", late, pace)
    for seed in range(seeds):
        for family in families:
            digest = find_digest(family)
            paces = {fault.id: own for fault in faults(family) if (own := table.find_pace(fault)) is not None}
            ids = [
                name
                for name, own in paces.items()
                if kept.get(Training(name, seed, late, own), {}).get("digest") != digest
            ]
            if pace or late:
                yield from ((family, seed, [name], paces[name]) for name in ids)
            elif ids:
                yield family, seed, ids, 0


def train_missing(families: Sequence[str], seeds: int, *, late: bool, pace: int, workers: int) -> None:
    """Train what is missing, and keep the verdicts."""
    KEPT.parent.mkdir(exist_ok=True)
    with ProcessPoolExecutor(workers) as pool:
        begun = {
            pool.submit(verdicts, family, seed, ids, late=late, pace=own): (family, seed, ids, own)
            for family, seed, ids, own in list_missing(families, seeds, late=late, pace=pace)
        }
        for future in as_completed(begun):
            family, seed, ids, own = begun[future]
            try:
                keep_verdicts(family, future.result(), late=late, pace=own)
            except (AssertionError, subprocess.SubprocessError) as error:  # the other trainings are still of use
                print(
                    f"{', '.join(ids)}, seed {seed}: not trained, start again to do so: {str(error)[-500:]}", flush=True
                )


def keep_verdicts(family: str, found: Sequence[Verdict], *, late: bool, pace: int) -> None:
    digest = find_digest(family)
    with KEPT.open("a") as file:
        for one in found:
            training = Training(one.id, one.seed, late, pace)
            print(json.dumps({"training": training, "digest": digest, "verdict": dataclasses.asdict(one)}), file=file)
            print(f"{family} {one.seed}: {one.id}: {'; '.join(one.notes) or 'found'}", flush=True)


def tabulate_faults(kept: dict[Training, dict[str, Any]], shown: Mapping[str, Sequence[str]], table: Table) -> str:
    """Return a table with one row per fault, over all kept seeds; a fault not trained here keeps the row in `shown`.

    Empty if no fault was trained here.
    """
    rows, counted, untrained = list[Iterable[object]](), dict[Training, dict[str, Any]](), list[str]()
    for family in FAMILIES:
        for fault in faults(family):
            pace = table.find_pace(fault)
            found = {key: kept[key] for key in kept if key == Training(fault.id, key.seed, table.late, pace)}
            counted |= found
            if not found and fault.id in shown:
                rows.append(shown[fault.id])
                untrained.append(fault.id)
            elif found or table == TABLES[0]:
                rows.append(row(fault, [entry["verdict"] for entry in found.values()], timed=family in TIMED))
    return make_table(HEAD, rows) + note_stale(counted, untrained) if counted else ""


def note_stale(kept: dict[Training, dict[str, Any]], untrained: Sequence[str]) -> str:
    """Return a sentence on what was trained with earlier code: `untrained`, and some of what is kept. May be empty."""
    digests = {fault.id: digest for family in FAMILIES for digest in [find_digest(family)] for fault in faults(family)}
    changed = (key.id for key, entry in kept.items() if entry["digest"] != digests.get(key.id))
    stale = dict.fromkeys([*untrained, *changed])
    fresh = dict.fromkeys(key.id for key in kept if key.id not in stale)
    which = ", ".join(stale) if len(stale) <= len(fresh) else " but ".join(filter(None, ("all", ", ".join(fresh))))
    return f"\n\nTrained with an earlier state of the code: {which}." if stale else ""


def row(fault: Fault, found: Sequence[dict[str, Any]], *, timed: bool) -> Iterator[str]:
    """Yield the cells of one fault, over its seeds. `timed`: its family is about time."""
    yield fault.id
    yield fault.what + (f" ({fault.synthetic}: made up)" if fault.synthetic else "")
    yield fault.alert
    yield count_in_time(found)
    unit = {"seconds": " s", "readings": " readings"}.get(fault.signal, "")
    delays = list_delays(found)
    yield f"{delays[0]} to {delays[-1]}{unit}" if delays else "-"
    yield f"{fault.delay}{unit}"
    yield from count_rest(found, timed=timed)


def list_delays(found: Sequence[dict[str, Any]]) -> list[int]:
    """Return the delays in ascending order; faults that were not found have none."""
    return sorted(one["delay"] for one in found if one["delay"] is not None)


def count_in_time(found: Sequence[dict[str, Any]]) -> str:
    count = sum(one["delay"] is not None and one["delay"] <= one["allowed"] for one in found)
    return f"{count} of {len(found)}"


def count_rest(found: Sequence[dict[str, Any]], *, timed: bool) -> Iterator[str]:
    """Yield the counts of right causes, of single pages and of false alarms."""
    yield f"{sum(one['right'] for one in found)} of {len(found)}"
    yield f"{sum(one['one_page'] for one in found)} of {len(found)}"
    excused = () if timed else OF_THE_MACHINE
    yield f"{sum(bool(set(one['false_alarms']) - set(excused)) for one in found)} of {len(found)}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Faults that are trained beside their healthy twins.")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--family", choices=FAMILIES, action="append")
    parser.add_argument("--late", action="store_true", help="faults begin at a random step, where they can")
    paces = sorted({table.pace for table in TABLES})
    parser.add_argument("--pace", type=int, default=0, choices=paces, help="least milliseconds of a step")
    parser.add_argument("--workers", type=int, default=1, help="how many train at a time")
    parser.add_argument("--table", action="store_true", help="train nothing, write the tables")
    options = parser.parse_args()
    if options.late and options.pace:
        parser.error(f"--late has steps of {LATE_PACE} ms: 5,000 of 200 ms are 17 minutes")
    if not options.table:
        families = options.family or FAMILIES
        train_missing(families, options.seeds, late=options.late, pace=options.pace, workers=options.workers)
    kept, page = read_kept(), DOCS / "detection.md"
    for table in TABLES:
        marks = table.mark_ends()
        if rows := tabulate_faults(kept, read_rows(page, marks), table):
            write_section(page, marks, rows)


if __name__ == "__main__":
    main()
