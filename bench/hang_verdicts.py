"""Compares verdicts on made-up standstills with those of torch's own analyser of flight records (`torchfrtrace`).

    python -m bench.hang_verdicts            print one line per case
    python -m bench.hang_verdicts --write    and write the table of docs/hang.md

right: exactly the ranks to blame are named (none where none is to blame). more: others are named besides them
(Sentinel: with low confidence and what would decide). nothing: no rank is named, though some are to blame. wrong: any
other ranks are named. fails: an exception, or no end within a minute. A pipeline of gloo leaves no record of its
transfers: such cases count as right where no rank is named with more than low confidence.
"""

from __future__ import annotations

import argparse
import collections
import logging
import pickle
import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.pages import DOCS, make_table, write_section
from tests.hang.made_cases import FAMILIES, Case, make_cases
from tests.hang.test_made_cases import judge

MARKS = "<!-- bench/hang_verdicts.py writes this -->", "<!-- to here -->"
HEAD = ("made standstills", "of", "Sentinel", "torchfrtrace")
GRADES = ("right", "more", "wrong", "nothing", "fails")
LIMIT_SECONDS = 60
_NAMED = re.compile(r"missing ranks: \{([\d, ]+)\}|Culprit rank (\d+)|Missing dump files from ranks \{([\d, ]+)\}")


def grade(case: Case, named: set[int]) -> str:
    """Return the grade of the named ranks, compared with those to blame."""
    blamed = set(case.culprits)
    if named == blamed:
        return "right"
    if not named:
        return "nothing"
    return "more" if blamed and blamed < named else "wrong"


def ask_sentinel(case: Case) -> str:
    """Return the grade of Sentinel's verdict; whatever is not right, but has more than low confidence, is `wrong`."""
    with tempfile.TemporaryDirectory() as folder:
        stand, _, confidence = judge(case, Path(folder))
    if not case.recorded and confidence in ("none", "low"):
        return "right"
    found = grade(case, set(stand.culprits) if stand is not None else set())
    return found if confidence == "low" or found == "right" else "wrong"


def ask_torch(case: Case) -> str:
    """Return the grade of what torchfrtrace prints about the same records."""
    from torch.distributed.flight_recorder import fr_trace

    lines = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("Flight Recorder")
    logger.handlers, logger.propagate = [handler], False
    failed = ""
    with tempfile.TemporaryDirectory() as folder:
        for rank, record in case.records.items():
            (Path(folder) / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(record))
        sizes = [record["pg_config"].get("0", {}).get("ranks", "").count(",") + 1 for record in case.records.values()]
        arguments = [folder, *(["--allow-incomplete-ranks"] if len(case.records) < max(sizes) else [])]
        signal.signal(signal.SIGALRM, _give_up)
        signal.alarm(LIMIT_SECONDS)
        try:
            fr_trace.main(arguments)
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
        finally:
            signal.alarm(0)
            logger.handlers = []
    text = "\n".join([*lines, failed])
    lists = [group for match in _NAMED.finditer(text) for group in match.groups() if group]
    named = {int(rank) for each in lists for rank in each.split(",")}
    return "fails" if failed and not named else grade(case, named)


def _give_up(*_: Any) -> None:
    raise TimeoutError


def list_rows(grades: list[tuple[Case, str, str]]) -> Iterator[tuple[str, int, str, str]]:
    """Yield one row for each recorder (backend) and family."""
    for backend in ("nccl", "gloo"):
        for family in [*FAMILIES, "all"]:
            own = [each for each in grades if each[0].backend == backend and family in (each[0].family, "all")]
            if own:
                ours, theirs = (_count([each[column] for each in own]) for column in (1, 2))
                yield f"{backend}: {family}", len(own), ours, theirs


def _count(grades: list[Any]) -> str:
    counts = collections.Counter(grades)
    return ", ".join(f"{counts[each]} {each}" for each in GRADES if counts[each])


def main() -> None:
    """Judge all cases, print the grades, and write the page if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="the table of docs/hang.md")
    options = parser.parse_args()
    grades = []
    for case in make_cases():
        grades.append((case, ask_sentinel(case), ask_torch(case)))
        print(f"{case.name:<70} {grades[-1][1]:<8} {grades[-1][2]}", flush=True)
    table = make_table(HEAD, list_rows(grades))
    print(table)
    if options.write:
        write_section(DOCS / "hang.md", MARKS, table)


if __name__ == "__main__":
    main()
