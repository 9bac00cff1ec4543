"""More than sixty made-up standstills: the layout of the ranks, what goes wrong, which ranks are to blame."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tests.hang.made_ranks import Call, Ranks

WORLD = "0"
STEPS = 3


class Layout:
    """Axes of a device mesh, the outermost first, and the process groups that training on it uses."""

    def __init__(self, **axes: int) -> None:
        self.axes = axes
        self.places = list(itertools.product(*(range(size) for size in axes.values())))
        self.groups: dict[str, tuple[str, tuple[int, ...]]] = {WORLD: ("default_pg", tuple(range(len(self.places))))}
        for number, axis in enumerate(axes):
            lines: dict[tuple[int, ...], list[int]] = {}
            for rank, place in enumerate(self.places):
                lines.setdefault(place[:number] + place[number + 1 :], []).append(rank)
            for ranks in lines.values():
                self.groups[str(len(self.groups))] = f"mesh_{axis}", tuple(ranks)

    @property
    def world(self) -> int:
        return len(self.places)

    def group(self, rank: int, axis: str) -> str:
        return next(
            name
            for name, (description, ranks) in self.groups.items()
            if rank in ranks and description in (f"mesh_{axis}", axis)
        )

    def beside(self, rank: int, axis: str, by: int) -> int:
        """Return the rank `by` places further along an axis; -1: there is none."""
        ranks = self.groups[self.group(rank, axis)][1]
        index = ranks.index(rank) + by
        return ranks[index] if 0 <= index < len(ranks) else -1

    def train(self, rank: int, steps: int = STEPS) -> list[Call]:
        """Return the calls that a rank of a healthy training issues."""
        return [call for _ in range(steps) for call in self._step(rank)]

    def _step(self, rank: int) -> Iterator[Call]:
        along = {axis: self.group(rank, axis) for axis in self.axes}
        layers = [
            *([Call("all_reduce", along["tp"], 16)] if "tp" in along else []),
            *([Call("_all_gather_base", along["shard"], 8)] if "shard" in along else []),
            *([Call("all_to_all", along["ep"], 12)] if "ep" in along else []),
        ] * 2
        before, after = (self.beside(rank, "pp", by) if "pp" in along else -1 for by in (-1, 1))
        yield from [Call("recv", along["pp"], 6, before)] if before >= 0 else []
        yield from layers
        yield from [Call("send", along["pp"], 6, after), Call("recv", along["pp"], 6, after)] if after >= 0 else []
        yield from layers
        yield from [Call("send", along["pp"], 6, before)] if before >= 0 else []
        yield from [Call("_reduce_scatter_base", along["shard"], 8)] if "shard" in along else []
        for axis in ("dp", "replicate"):
            if axis in along:
                yield from (Call("all_reduce", along[axis], size, waits=False) for size in (1000, 24))
        yield Call("all_reduce", WORLD, 1)
        yield Call("sync")


class Case(NamedTuple):
    """One standstill, and the verdict that is expected of it."""

    family: str
    name: str
    backend: str
    records: dict[int, dict[str, Any]]
    """Rank -> its flight record, as dumped."""
    kinds: tuple[str, ...]
    """Verdicts that are right; none: no rank is stuck."""
    culprits: tuple[int, ...]
    says: str = ""
    """Words in the cause."""
    recorded: bool = True
    """Whether the records show the cause. Pipelines on gloo record no transfers: then no rank may be blamed wrongly."""


DP = Layout(dp=4)
LAYOUTS = {
    "DP": DP,
    "TP x DP": Layout(dp=2, tp=2),
    "TP x DP x PP": Layout(pp=2, dp=2, tp=2),
    "HSDP": Layout(replicate=2, shard=4),
    "experts": Layout(dp=2, ep=4),
    "pipeline": Layout(pp=4),
}
BACKENDS = ("nccl", "gloo")
MIDDLE = {"DP": 4, "TP x DP": 9, "TP x DP x PP": 12, "HSDP": 9, "experts": 8, "pipeline": 5}
"""Layout -> index of the call that goes wrong, which is in the second step."""


def make_cases() -> list[Case]:
    """Return all cases."""
    return [case._replace(family=family) for family, make in FAMILIES.items() for case in make()]


def _record(
    name: str, backend: str, layout: Layout, programs: list[list[Call]], kinds: tuple[str, ...],
    culprits: tuple[int, ...] = (), *, dead: tuple[int, ...] = (), ring: int = 2000, timing: bool = False,
    says: str = "", **faults: Any,
) -> Case:  # fmt: skip
    ranks = Ranks(layout.groups, programs, backend, **faults)
    records = {rank: ranks.dump(rank, ring, timing) for rank in range(layout.world) if rank not in dead}
    recorded = backend != "gloo" or "pp" not in layout.axes or not culprits
    return Case("", f"{name}, {backend}", backend, records, kinds, culprits, says, recorded)


def _spoil(layout: Layout, rank: int, spoil: Callable[[list[Call]], list[Call]]) -> list[list[Call]]:
    programs = [layout.train(each) for each in range(layout.world)]
    programs[rank] = spoil(programs[rank])
    return programs


def _laid_out() -> Iterator[Case]:
    """Yield for each layout: healthy, one rank in its own code, one that died, two in their own code."""
    for (name, layout), backend in itertools.product(LAYOUTS.items(), BACKENDS):
        middle, late = MIDDLE[name], layout.world - 1
        programs = [layout.train(rank) for rank in range(layout.world)]
        yield _record(f"{name}: healthy", backend, layout, programs, ())
        one = _spoil(layout, 1, lambda calls, to=middle: calls[:to])
        yield _record(f"{name}: rank 1 in its own code", backend, layout, one, ("missing",), (1,))
        yield _record(f"{name}: rank 1 died", backend, layout, one, ("silent", "missing"), (1,), dead=(1,))
        two = [calls[:middle] if rank in (1, late) else calls for rank, calls in enumerate(programs)]
        blamed = (1,) if name == "pipeline" else (1, late)  # no rank waits yet for the last stage
        yield _record(f"{name}: ranks 1 and {late} in their own code", backend, layout, two, ("missing",), blamed)


def _chains() -> Iterator[Case]:
    """Yield groups of two along a row, in which each rank but the last waits for the next one."""
    start = Call("all_reduce", WORLD)
    for backend, length in itertools.product(BACKENDS, (3, 4)):
        layout, last = Layout(all=length), length - 1
        layout.groups = {WORLD: layout.groups[WORLD]} | {
            str(rank + 1): (f"pair{rank}", (rank, rank + 1)) for rank in range(last)
        }
        programs = []
        for rank in range(length):
            pairs = [Call("barrier", str(group)) for group in (rank + 1, rank) if 0 < group < length]
            calls = [start, *pairs, start, *pairs]
            programs.append([each for call in calls for each in (call, Call("sync"))])
        yield _record(f"a chain over {last} groups that is whole", backend, layout, programs, ())
        programs[last] = programs[last][:6]
        says = f"rank {last} never came to barrier, number 2 in group pair{last - 1}"
        name = f"a chain over {last} groups"
        yield _record(name, backend, layout, programs, ("missing",), (last,), says=says)


def _between() -> Iterator[Case]:
    """Yield cases in which all ranks are in a collective, or some have completed it."""
    healthy = [DP.train(rank) for rank in range(4)]
    halted = {1: 7}
    yield _record("a kernel that does not end", "nccl", DP, healthy, ("unreached",), (1,), halted=halted, timing=True)
    yield _record("a kernel that does not end, untimed", "nccl", DP, healthy, ("together",), (), halted=halted)
    layout = LAYOUTS["TP x DP"]
    split = [layout.train(rank) for rank in range(4)]
    for backend in BACKENDS:
        down: dict[tuple[str, int], set[int]] = {("1", 3): {0, 1, 2, 3}}
        yield _record("a link that is down", backend, DP, healthy, ("together",), broken=down, says="and it did not")
        down = {("1", 3): {2}}
        yield _record("others have completed it", backend, DP, healthy, ("left behind",), (2,), broken=down)
        down = {(layout.group(2, "tp"), 6): {2, 3}}
        yield _record("a link of a TP group that is down", backend, layout, split, ("together",), broken=down)
        for op, kinds, blamed, says in (
            ("broadcast", ("together", "left behind"), (), "broadcast"),
            ("gather", ("mismatch",), (0, 1, 2, 3), "differing roots"),
        ):
            roots = [[Call("all_reduce"), Call(op, root=3 * (rank == 3)), Call("barrier")] for rank in range(4)]
            yield _record(f"a {op} with two roots", backend, DP, roots, kinds, blamed, says=says)


def _mismatches() -> Iterator[Case]:
    """Yield mismatches of operations, sizes and orders."""
    layout = LAYOUTS["TP x DP"]
    for backend in BACKENDS:
        for name, other, says in (
            ("another operation", {"op": "broadcast"}, "rank 2 broadcast of 1000"),
            ("another size", {"size": 7}, "rank 2 all_reduce of 7"),
        ):
            programs = _spoil(DP, 2, lambda calls, to=other: [*calls[:4], calls[4]._replace(**to), *calls[5:]])
            yield _record(name, backend, DP, programs, ("mismatch",), (2,), says=says)
        skips = _spoil(DP, 2, lambda calls: [*calls[:4], *calls[5:]])
        yield _record("one left out", backend, DP, skips, ("mismatch",), (2,), says="rank 2 all_reduce of 24")
        for once in (True, False):
            programs = []
            for rank in range(4):
                calls = [Call("all_reduce", layout.group(rank, "tp"), 16), Call("barrier", WORLD), Call("sync")]
                turned = [calls[1], calls[0], calls[2]]
                programs.append([*(calls if once else []), *(turned if rank == 3 else calls)])
            name = "the other order in two groups" + (", once" if once else ", from the first step on")
            # gloo does not say who is in a group in which rank 3 never issued anything
            kinds, blamed = (("circle",), (2, 3)) if once or backend == "nccl" else (("unlisted",), (3,))
            yield _record(name, backend, layout, programs, kinds, blamed)


def _recorders() -> Iterator[Case]:
    """Yield cases whose records the ring has dropped or that were not copied, and with hundreds of open calls."""
    many = [Call("all_reduce", "1", waits=False)] * 520
    layout, healthy = LAYOUTS["TP x DP"], [DP.train(rank) for rank in range(4)]
    for backend in BACKENDS:
        for ring in (2000, 100):
            programs = [[*DP.train(rank, 2), *(many[:10] if rank == 1 else many)] for rank in range(4)]
            name = f"500 outstanding, a ring of {ring}"
            yield _record(name, backend, DP, programs, ("missing",), (1,), ring=ring)
        deep = [[Call("all_reduce", layout.group(rank, "tp"), 16)] * 200 for rank in range(4)]
        programs = [[*layout.train(rank, 2), *deep[rank], *layout.train(rank, 1)] for rank in range(4)]
        programs[1] = programs[1][: len(layout.train(1, 2)) + 200]
        yield _record("a ring that TP has filled", backend, layout, programs, ("missing",), (1,), ring=50)
        programs = _spoil(layout, 1, lambda calls: calls[:9])
        yield _record("rank 3's record was not copied", backend, layout, programs, ("missing",), (1,), dead=(3,))
        kind, blamed = ("silent", (3,)) if backend == "nccl" else ("together", ())  # gloo: no size of the job
        down = {("1", 3): {0, 1, 2, 3}}
        name = "a link that is down, one record not copied"
        yield _record(name, backend, DP, healthy, (kind,), blamed, dead=(3,), broken=down)


def _transfers() -> Iterator[Case]:
    """Yield cases of transfers on NCCL; gloo records none."""
    layout = LAYOUTS["pipeline"]
    group, healthy = layout.group(0, "pp"), [layout.train(rank) for rank in range(4)]
    start, end = Call("all_reduce"), Call("sync")
    down = {(group, -1): {0, 1}}
    yield _record("a transfer whose link is down", "nccl", layout, healthy, ("together",), (), broken=down)
    fifth = [call for call in healthy[2] if call.op in ("send", "recv")][4]
    without = [*healthy[:2], [call for call in healthy[2] if call is not fifth], healthy[3]]
    yield _record("a receive that was left out", "nccl", layout, without, ("circle",), (1, 2))
    for name, pair, kinds, blamed in (
        ("two that send first", [[Call(op, group, 6, 1 - rank) for op in ("send", "recv")] for rank in (0, 1)],
         ("circle",), (0, 1)),
        ("a transfer of two sizes", [[Call("send", group, 6, 1)], [Call("recv", group, 9, 0)]], ("mismatch",), (0, 1)),
        ("one that fetches ahead and stops", [[Call("recv", group, 6, 1)], [Call("recv", group, 6, 0, waits=False)]],
         ("circle",), (1,)),
    ):  # fmt: skip
        programs = [[start, *pair[0], end], [start, *pair[1]], [start], [start]]
        yield _record(name, "nccl", layout, programs, kinds, blamed)
    batches = [
        [
            Call(op, group, 6, (rank + by) % 4, batch=step)
            for step in range(1, 4)
            for op, by in (("send", 1), ("recv", -1))
        ]
        for rank in range(4)
    ]
    programs = [[start, *batches[rank], end, Call("barrier")] for rank in range(4)]
    yield _record("a ring of batched transfers", "nccl", layout, programs, ())
    programs[3] = programs[3][:3]
    name = "a ring of batched transfers, rank 3 in its own code"
    yield _record(name, "nccl", layout, programs, ("missing",), (3,))


FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    "in six layouts: healthy, one in its own code, one dead, two missing": _laid_out,
    "chains over two and three groups": _chains,
    "all in it, some through it, differing roots, a kernel that does not end": _between,
    "operations, sizes, one left out, opposite orders": _mismatches,
    "500 outstanding, wrapped rings, records not copied": _recorders,
    "transfers: pipelines, batches, orders, sizes": _transfers,
}
