"""Trains every fault beside its healthy twin, at default settings, with several seeds; writes docs/detection.md.

    python -m bench.faults                      # 8 minutes a seed on two idle cores; goes on where it was stopped
    python -m bench.faults --seeds 1 --family bugs              # the rows of other families stay as they are
    python -m bench.faults --seeds 1 --pace 20 --workers 4      # steps of 20 ms, for the third table
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
MARKS = "<!-- trained -->", "<!-- end of trained -->"
HEAD = (
    "row", "fault", "alert", "in time", "delay in steps", "allowed", "right cause", "one page",
    "false alarms of the twin",
)  # fmt: skip
LATE_MARKS = "<!-- late -->", "<!-- end of late -->"
PACED_MARKS = "<!-- paced -->", "<!-- end of paced -->"
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
    kept = read_kept()
    for seed in range(seeds):
        for family in families:
            digest = find_digest(family)
            able = [one for one in faults(family) if (one.begins or not late) and not (pace and one.own_pace)]
            paces = {one.id: LATE_PACE if late and not one.own_pace else pace for one in able}
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


def find_verdicts(kept: dict[Training, dict[str, Any]], fault: Fault, pace: int) -> list[dict[str, Any]]:
    """Return a fault's verdicts of all seeds."""
    return [entry["verdict"] for training, entry in kept.items() if (training.id, training.pace) == (fault.id, pace)]


def tabulate_faults(kept: dict[Training, dict[str, Any]], shown: Mapping[str, Sequence[str]], *, late: bool) -> str:
    """Return a table with one row per fault, over all kept seeds; a fault not trained here keeps the row in `shown`.

    `late`: only the faults that can begin at any step, planted late.
    """
    kept = {key: entry for key, entry in kept.items() if key.late == late and (late or not key.pace)}
    rows, untrained = list[Iterable[object]](), list[str]()
    for family in FAMILIES:
        for fault in (one for one in faults(family) if one.begins or not late):
            found = find_verdicts(kept, fault, LATE_PACE if late and not fault.own_pace else 0)
            if not found and fault.id in shown:
                rows.append(shown[fault.id])
                untrained.append(fault.id)
            elif found or not late:
                rows.append(row(fault, found, timed=family in TIMED))
    return make_table(HEAD, rows) + note_stale(kept, untrained)


def tabulate_paces(kept: dict[Training, dict[str, Any]]) -> str:
    """Return a table with one row per fault, and a column for each pace at which faults were trained."""
    kept = {key: entry for key, entry in kept.items() if key.pace and not key.late}
    paces = sorted({key.pace for key in kept})
    head = ("row", "alert", "allowed", *(f"in time at {pace} ms (delay in steps)" for pace in paces))
    rows = [
        paced_row(fault, [find_verdicts(kept, fault, pace) for pace in paces])
        for family in FAMILIES
        for fault in faults(family)
        if not fault.own_pace
    ]
    return make_table((*head, "right cause", "one page", "false alarms of the twin"), rows) + note_stale(kept)


def note_stale(kept: dict[Training, dict[str, Any]], untrained: Sequence[str] = ()) -> str:
    """Return a sentence on what was trained with earlier code: `untrained`, and some of what is kept. May be empty."""
    digests = {fault.id: find_digest(family) for family in FAMILIES for fault in faults(family)}
    changed = (key.id for key, entry in kept.items() if entry["digest"] != digests.get(key.id))
    stale = dict.fromkeys([*untrained, *changed])
    which = "all" if {*untrained, *(key.id for key in kept)} == stale.keys() else ", ".join(stale)
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


def paced_row(fault: Fault, by_pace: Sequence[Sequence[dict[str, Any]]]) -> Iterator[str]:
    """Yield the cells of one fault, with its verdicts at each pace in the order of the columns."""
    yield from (fault.id, fault.alert, f"{fault.delay}")
    for found in by_pace:
        delays = " to ".join(map(str, sorted({*list_delays(found)[:1], *list_delays(found)[-1:]})))
        yield f"{count_in_time(found)} ({delays or '-'})" if found else "-"
    yield from count_rest([one for found in by_pace for one in found], timed=False)


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
    parser.add_argument("--pace", type=int, default=0, metavar="MS", help="a step takes so many milliseconds at least")
    parser.add_argument("--workers", type=int, default=1, help="how many train at a time")
    parser.add_argument("--table", action="store_true", help="train nothing, write the tables")
    options = parser.parse_args()
    if options.late and options.pace:
        parser.error(f"--late has steps of {LATE_PACE} ms: 5,000 of 200 ms are 17 minutes")
    if not options.table:
        families = options.family or FAMILIES
        train_missing(families, options.seeds, late=options.late, pace=options.pace, workers=options.workers)
    kept, page = read_kept(), DOCS / "detection.md"
    for late, marks in ((False, MARKS), (True, LATE_MARKS)):
        if any(training.late == late and (late or not training.pace) for training in kept):
            write_section(page, marks, tabulate_faults(kept, read_rows(page, marks), late=late))
    if any(training.pace and not training.late for training in kept):
        write_section(page, PACED_MARKS, tabulate_paces(kept))


if __name__ == "__main__":
    main()
