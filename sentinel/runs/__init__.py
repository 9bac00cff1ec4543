"""Live state of runs, their ranks and their steps: written by the ingest, read by all other parts.

    Runs -> Run (name, id) -> Attempt (ranks, layer tables, steps) -> Rank (state, what it said in its hello)

What ranks report about a step becomes a `RunStep` (`steps.py`) once the step is closed.

    run.py        Runs, Run
    attempt.py    Attempt
    reported.py   a rank's batch, checked and taken apart into steps
    rank.py       Rank, and how its process ended
    rank_link.py  the way to the ranks
"""

from sentinel.runs.attempt import ARRIVAL_SECONDS, RECENT_LAYER_STATS, RECENT_STEPS, Attempt, Stage
from sentinel.runs.rank import RANK_MARKS, Ending, Rank, RankState
from sentinel.runs.rank_link import NoRanks, RankLink
from sentinel.runs.run import Run, Runs

__all__ = [
    "ARRIVAL_SECONDS",
    "RANK_MARKS",
    "RECENT_LAYER_STATS",
    "RECENT_STEPS",
    "Attempt",
    "Ending",
    "NoRanks",
    "Rank",
    "RankLink",
    "RankState",
    "Run",
    "Runs",
    "Stage",
]
