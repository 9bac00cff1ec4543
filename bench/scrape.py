"""Measures the cost of one scrape: 64 ranks of a model of 400 layers, after 256 steps.

    python -m bench.scrape            # bars: 20 ms, 300 kB

The answer is made and formatted in pieces on the daemon's event loop, which serves its ranks in between: the longest
piece is how long a step may have to wait for a scrape.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import time
from array import array

from sentinel import wire
from sentinel.daemon.frontend.faults import FaultCounter
from sentinel.daemon.frontend.metrics import LiveCollector
from sentinel.daemon.replay import make_silent_notifier
from sentinel.daemon.run.context import RunContext
from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.rulebook import loader
from sentinel.rulebook.loader import Reloads
from sentinel.runs import NoRanks, Run
from sentinel.signals import SIGNALS
from sentinel.web.http import pieces

STEPS, SAMPLED = 256, 16
BAR_SECONDS, BAR_BYTES = 0.020, 300_000


def make_crowd(ranks: int, layers: int) -> WatchedRun:
    """Return a watched run of many ranks that have sent values of all signals."""
    run, draw = Run("train", "r1", 0.0), random.Random(0)
    context = RunContext(run, None, NoRanks())
    watch = WatchedRun(context, make_silent_notifier(context), loader.load().rules)
    placed = [wire.Layer(name=f"model.layers.{n}.mlp.weight", shape=(8, 8), dtype="float32") for n in range(layers)]
    table = wire.LayerTable(digest="t", layers=tuple(placed))
    names = [s.name for s in SIGNALS.values() if s.scope == "rank" and s.tier >= 0 and not s.part_of]
    of_layers = [s.name for s in SIGNALS.values() if s.scope == "layer"]
    pace = wire.Pace(spacing={"1": 1, "2": 8, "3": 64}, wanted={}, costs={"hooks": 0.01, "sender": 0.0, "daemon": 0.0})
    for number in range(ranks):
        identity = wire.Identity(run="train", run_id="r1", rank=number, world_size=ranks, session=f"s{number}")
        watch.ingest.hello(wire.Hello(version="bench", identity=identity), 0.0)
    for first in range(0, STEPS, SAMPLED):
        seqs, times = array("q", range(first, first + SAMPLED)), array("d", range(first, first + SAMPLED))
        for number, rank in watch.run.attempt.ranks.items():
            values = {n: wire.Column(array("d", [draw.random() for _ in seqs]).tobytes()) for n in names}
            stats = {n: array("f", [draw.random() for _ in range(layers)]).tobytes() for n in of_layers}
            sampled = (wire.LayerBlock(seq=first, table="t", stats=stats),) if number == 0 else ()
            batch = wire.Batch(seqs=seqs.tobytes(), times=times.tobytes(), columns=values, layers=sampled, pace=pace)
            watch.run.attempt.tables["t"] = table
            watch.run.attempt.take(rank, batch, 0.0)
        list(watch.run.attempt.take_closed(0.0))
    return watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--layers", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    watch = make_crowd(options.ranks, options.layers)
    gc.freeze()  # a full garbage collection comes now and then, and is not a cost of the scrape
    collector = LiveCollector({"r1": watch}, Reloads(), FaultCounter())
    whole, wall, longest, size = list[float](), list[float](), list[float](), 0
    for _ in range(options.repeats):
        began, called, size = time.thread_time(), time.perf_counter(), 0
        moments = [began]
        for family in collector.collect():
            for piece in pieces(family):
                size += len(piece)
                moments.append(time.thread_time())
        longest.append(max(after - before for before, after in itertools.pairwise(moments)))
        whole.append(time.thread_time() - began)
        wall.append(time.perf_counter() - called)
    result = {
        "ranks": options.ranks, "layers": options.layers, "bytes": size,
        "piece_ms": 1e3 * statistics.median(longest), "scrape_ms": 1e3 * statistics.median(whole),
        "wall_ms": 1e3 * statistics.median(wall), "wall_ms_p95": 1e3 * statistics.quantiles(wall, n=20)[-1],
    }  # fmt: skip
    if options.json:
        print(json.dumps(result, indent=2))
        return
    print(
        f"{options.ranks} ranks, {options.layers} layers: {result['wall_ms']:.1f} ms a scrape (p95 "
        f"{result['wall_ms_p95']:.1f} ms); CPU {result['scrape_ms']:.1f} ms, at most {result['piece_ms']:.1f} a piece; "
        f"{size / 1e3:.0f} kB"
    )
    good = statistics.median(wall) <= BAR_SECONDS and size <= BAR_BYTES
    print(f"bars: {BAR_SECONDS * 1e3:.0f} ms, {BAR_BYTES / 1e3:.0f} kB: " + ("held" if good else "MISSED"))


if __name__ == "__main__":
    main()
