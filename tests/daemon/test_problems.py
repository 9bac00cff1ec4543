"""From steps to receivers: one page for one problem, two pages for two, whatever else the rules find."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sentinel import wire
from sentinel.config.settings import SEVERITIES, Duration, Grouping
from sentinel.daemon.run import clock as clock_module
from sentinel.daemon.run.context import RunContext
from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.diagnose.case import Case
from sentinel.engine import Entity, Observation, Rule
from sentinel.engine.rules.loading import load_rules
from sentinel.notify import Message, Route, silences
from sentinel.notify.limiter import Limiter
from sentinel.notify.notifier import Notifier
from sentinel.notify.outbox import Outbox
from sentinel.notify.pipeline import Pipeline
from sentinel.notify.receivers.terminal import Terminal
from sentinel.notify.silences import Silences
from sentinel.rulebook import loader
from sentinel.runs import NoRanks, Run
from sentinel.runs.devices import Devices, Gpu, GpuFault
from sentinel.store import History, Store
from sentinel.wire.evidence import Provenance
from tests.notify.test_pipeline import Fake, until

AT_ONCE = Grouping(wait=Duration(0), interval=Duration(0), repeat=Duration(3600))
OWN = """
group: mine
rules:
  - {alert: Mild, expr: mild > 0, severity: warning, problem: shared}
  - {alert: Severe, expr: severe > 0, severity: critical, problem: shared, actions: [evidence]}
  - {alert: Follows, expr: follows > 0, severity: warning, consequence_of: [shared]}
  - {alert: Grave, expr: grave > 0, severity: critical, problem: grave, consequence_of: [shared]}
  - {alert: Leak, expr: leaked > 0, severity: critical, problem: memory}
"""
SIGNALS = {name: "rank" for name in ("mild", "severe", "follows", "grave", "leaked")}
LINE = "[sentinel] "
DEAD_AND_ALIVE = wire.LayerTable(
    digest="d", layers=tuple(wire.Layer(name=name, shape=(2, 2), dtype="float32") for name in ("a.weight", "b.weight"))
)
"""The layers of a model of which one is dead."""


class Watched:
    """A watched run with three receivers, in a running event loop."""

    def __init__(self, folder: Path, rules: Sequence[Rule]) -> None:
        run = Run("train", "r1", 0.0)
        store = Store(folder / "r1.sqlite", run="train", run_id="r1")
        context = RunContext(run, store, NoRanks())
        self.bot, self.hook, self.pager = Fake(), Fake(), Fake()
        routes = [
            Route("bot", self.bot, lambda _: True, 30, AT_ONCE, Limiter(), edits=True),
            Route("hook", self.hook, lambda _: True, 30, AT_ONCE, Limiter()),
            Route("pager", self.pager, lambda case: case.severity == "critical", 30, AT_ONCE, Limiter(), edits=True),
        ]
        self.notices: list[wire.Notice] = []
        self.silences = folder / silences.FILE
        self.pipeline = Pipeline("train", "r1", routes, outbox=Outbox(None))
        self.pipeline.start()
        terminal = Terminal(self.notices.append, frozenset(SEVERITIES))
        notifier = Notifier(terminal, self.pipeline, Silences(self.silences), context.record_case)
        self.watch = WatchedRun(context, notifier, rules)
        identity = wire.Identity(run="train", run_id="r1", rank=0, world_size=1, session="s")
        self.rank = self.watch.ingest.hello(wire.Hello(version="t", identity=identity), 0.0)
        self.next = 0
        self.zero = 1e9
        """The node's clock at step 0, as it is set now."""

    async def steps(self, layers: Sequence[wire.LayerBlock] = (), **columns: Sequence[float]) -> None:
        """Report the next steps, a second each, and return once all messages are delivered."""
        count = len(next(iter(columns.values())))
        seqs = range(self.next, self.next + count)
        batch = wire.Batch(
            seqs=array("q", seqs).tobytes(),
            times=array("d", [self.zero + seq for seq in seqs]).tobytes(),
            columns={name: wire.Column(array("d", values).tobytes()) for name, values in columns.items()},
            layers=tuple(layers),
        )
        self.watch.ingest.message(self.rank, batch, float(self.next))
        self.next += count
        await self.tick()

    async def tick(self) -> None:
        self.watch.tick(float(self.next))
        await until(lambda: not self.pipeline.pending)

    def case(self, alert: str) -> Case:
        return [case for case in self.watch.incidents.log.cases.values() if case.alert == alert][-1]

    @property
    def cases(self) -> dict[str, str]:
        return {case.alert: case.parent for case in self.watch.incidents.log.cases.values()}

    def shown(self) -> list[str]:
        """Return what the terminal printed: the alert's name for a block, and whole lines."""
        texts = [notice.text for notice in self.notices if notice.text]
        return [text if text.startswith(LINE) else text.split()[3] for text in texts]


def watched(folder: Path, scenario: Callable[[Watched], Coroutine[Any, Any, None]], *, stock: bool = False) -> Watched:
    own = load_rules(OWN, "own.yaml", signals=SIGNALS).rules
    kept: list[Watched] = []

    async def run() -> None:
        made = Watched(folder, [*loader.stock_rules(), *own] if stock else own)
        kept.append(made)
        await scenario(made)
        await made.pipeline.close()

    asyncio.run(run())
    return kept[0]


def alerts(messages: Sequence[Message]) -> list[str]:
    return [message.leading.alert for message in messages]


def pages(messages: Sequence[Message]) -> set[str]:
    return {message.key for message in messages}


def values(count: int, **odd: tuple[int, int]) -> dict[str, list[float]]:
    """Return a column for each signal: 1 from one step up to another for those named, otherwise 0."""
    names = {name: [0.0] * count for name in SIGNALS}
    for name, (since, end) in odd.items():
        names[name][since:end] = [1.0] * (min(end, count) - since)
    return names


def training(count: int, jump: int) -> dict[str, list[float]]:
    """Return columns of a run whose learning rate rises a thousandfold at step `jump`."""
    noise = random.Random(0)
    before = [2 + 2 * 0.99**seq + noise.gauss(0, 0.02) for seq in range(jump)]
    after = [9 + min(seq, 100) * 0.2 + noise.gauss(0, 0.5) for seq in range(count - jump)]
    norms = [1 + noise.gauss(0, 0.05) for _ in range(jump)]
    norms += [60 * 1.1 ** min(seq, 80) + noise.gauss(0, 1) for seq in range(count - jump)]
    return {"loss": before + after, "grad_norm": norms, "learning_rate": [1e-3] * jump + [1.0] * (count - jump)}


def part(columns: Mapping[str, list[float]], first: int, last: int) -> dict[str, list[float]]:
    return {name: column[first:last] for name, column in columns.items()}


def test_a_rate_that_jumps_is_one_page_everywhere(tmp_path: Path) -> None:
    async def scenario(run: Watched) -> None:
        made = training(700, 300)
        for first in range(0, 700, 10):
            await run.steps(**part(made, first, first + 10))

    run = watched(tmp_path, scenario, stock=True)
    members = ("LearningRateJump", "GradientSpike", "Divergence", "ExplodingGradient")
    assert run.cases == {"LossSpike": "", **dict.fromkeys(members, "0.1")}
    assert alerts(run.hook.got) == ["LossSpike"]
    for receiver in (run.bot, run.pager):
        assert pages(receiver.got) == pages(run.hook.got)
        assert not any(message.escalated for message in receiver.got)
    assert {case.alert for case in run.bot.got[-1].cases} == set(run.cases)
    block, *lines = run.shown()
    assert block == "LossSpike"
    assert len(lines) == 4
    assert all("with 0.1: " in line and "\n" not in line for line in lines)


@pytest.mark.parametrize("apart", [5, 50, 500])
def test_two_independent_faults_are_two_pages(tmp_path: Path, apart: int) -> None:
    async def scenario(run: Watched) -> None:
        made = {**training(1000, 300), **values(1000, leaked=(300 + apart, 1000))}
        for first in range(0, 1000, 50):
            await run.steps(**part(made, first, first + 50))

    run = watched(tmp_path, scenario, stock=True)
    opened = {case.problem_id: case.alert for case in reversed(run.watch.incidents.log.cases.values())}
    assert sorted(opened.values()) == ["Leak", "LossSpike"]
    assert sorted(alerts(run.hook.got)) == ["Leak", "LossSpike"]
    for receiver in (run.bot, run.hook, run.pager):
        assert len(pages(receiver.got)) == 2


def test_a_critical_consequence_of_a_warning_pages_under_the_same_key(tmp_path: Path) -> None:
    async def scenario(run: Watched) -> None:
        await run.steps(**values(5, mild=(2, 5)))
        await run.steps(**values(5, mild=(0, 5), severe=(3, 5)))

    run = watched(tmp_path, scenario)
    assert run.cases == {"Mild": "", "Severe": "0.1"}
    for receiver in (run.bot, run.hook):
        assert alerts(receiver.got) == ["Mild", "Severe"]
        assert [message.escalated for message in receiver.got] == [False, True]
    assert alerts(run.pager.got) == ["Severe"]
    assert len(pages([*run.bot.got, *run.hook.got, *run.pager.got])) == 1
    assert run.shown() == ["Mild", "Severe"]


def test_a_consequence_that_nothing_explains_has_the_cause_of_its_parent(tmp_path: Path) -> None:
    async def scenario(run: Watched) -> None:
        noise = random.Random(0)
        healthy = [2 + noise.gauss(0, 0.02) for _ in range(100)]
        await run.steps(loss=healthy, gradients_kept=[0.0] * 80 + [1.0] * 20)
        await run.steps(loss=[9.0 + seq for seq in range(20)], gradients_kept=[1.0] * 20)

    run = watched(tmp_path, scenario, stock=True)
    parent, case = run.case("GradientsNotCleared"), run.case("LossSpike")
    assert case.parent == parent.id
    assert case.diagnosis.cause == f"as of GradientsNotCleared ({parent.id}): {parent.diagnosis.cause}"
    assert (case.diagnosis.confidence, case.diagnosis.remedy) == ("medium", parent.diagnosis.remedy)


def test_a_cause_that_is_known_late_explains_its_earlier_consequences(tmp_path: Path) -> None:
    """GradientsNotCleared is certain only some samples after the spike and the climb that it causes."""

    async def scenario(run: Watched) -> None:
        noise = random.Random(0)
        healthy = [2 + 2 * 0.97**seq + noise.gauss(0, 0.005) for seq in range(200)]
        await run.steps(loss=healthy, grad_norm=[1.0 + noise.gauss(0, 0.05) for _ in range(200)])
        climb = [2.0] * 3 + [4.0 + 0.1 * seq for seq in range(57)]
        await run.steps(loss=climb, grad_norm=[90.0 + seq for seq in range(60)])
        before = [run.case(alert).diagnosis.confidence for alert in ("GradientSpike", "Divergence")]
        assert before == ["none"] * 2
        await run.steps(loss=[10.0] * 5, grad_norm=[150.0] * 5, gradients_kept=[1.0] * 5)

    run = watched(tmp_path, scenario, stock=True)
    origin = run.case("GradientsNotCleared")
    for alert in ("GradientSpike", "Divergence"):
        assert run.case(alert).diagnosis.cause == f"as of GradientsNotCleared ({origin.id}): {origin.diagnosis.cause}"
    with History(tmp_path / "r1.sqlite") as kept:
        causes = {case["alert"]: case["diagnosis"]["cause"] for case in kept.incidents()}
    assert causes["Divergence"] == run.case("Divergence").diagnosis.cause


def test_a_card_that_dies_with_its_rank_is_one_page_and_the_cause_of_both(tmp_path: Path) -> None:
    async def scenario(run: Watched) -> None:
        await run.steps(loss=[2.0] * 50)
        devices = Devices("n", gpus={"GPU-0": Gpu(index=0, uuid="GPU-0")})
        devices.gpus["GPU-0"].record_fault(GpuFault(0.0, "xid", 79, "the GPU has fallen off the bus"))
        lost = {Entity("rank", "0"): {"rank_lost": 1.0}}
        run.watch.incidents.observe_between(Observation(seq=50, time=50.0, values=lost), 50.0)
        dead = {Entity("gpu", "0"): {"gpu_xid": 79.0, "gpu_lost": 1.0}}
        run.watch.ingest.observe_machine(devices, Observation(seq=50, time=50.5, values=dead), (), 50.5)
        await run.tick()

    run = watched(tmp_path, scenario, stock=True)
    assert run.cases == {"RankLost": "", "GpuFault": "0.1"}
    for receiver in (run.bot, run.hook, run.pager):
        assert len(pages(receiver.got)) == 1
    diagnosis = run.case("RankLost").diagnosis
    fault = "GPU 0: XID 79, the GPU has fallen off the bus, and it is lost: so says the driver"
    assert diagnosis.cause == f"as of GpuFault (0.2): {fault}"
    assert diagnosis.confidence == "medium"


def test_what_follows_from_a_spike_is_not_given_as_its_cause(tmp_path: Path) -> None:
    """By its rule a dead layer is a consequence of the spike."""

    async def scenario(run: Watched) -> None:
        noise = random.Random(0)
        healthy = [2 + noise.gauss(0, 0.02) for _ in range(100)]
        await run.steps(loss=healthy[:98], grad_norm=[1.0] * 98)
        await run.steps(loss=[*healthy[98:], *(9.0 + seq for seq in range(20))])
        assert run.case("LossSpike").diagnosis.confidence == "none"
        run.watch.ingest.message(run.rank, DEAD_AND_ALIVE, float(run.next))
        for _ in range(48):
            stats = {"layer_grad_norm": array("f", [0.0, 1.0]).tobytes()}
            await run.steps(
                layers=[wire.LayerBlock(seq=run.next, table="d", stats=stats)], loss=[9.0], grad_norm_applied=[1.0]
            )

    run = watched(tmp_path, scenario, stock=True)
    dead, spike = run.case("DeadLayer"), run.case("LossSpike")
    assert (dead.parent, spike.problem_id) == (spike.id, spike.id)
    assert dead.diagnosis.confidence != "none"
    assert spike.diagnosis.confidence == "none"


def test_a_cause_that_lacked_a_reading_of_the_host_is_known_with_it(tmp_path: Path) -> None:
    async def scenario(run: Watched) -> None:
        hello = wire.Hello(version="t", identity=run.rank.identity, facts={"loader": {"num_workers": 2}})
        run.rank = run.watch.ingest.hello(hello, 0.0)
        await run.steps(step_seconds=[0.1] * 160, data_seconds=[0.05] * 160)
        assert run.case("InputBound").diagnosis.missing == ("how busy the host's CPUs are",)
        for seen in ({"host_load_ratio": 0.1}, {"host_load_ratio": 0.1, "host_cpu_ratio": 0.2}):
            reading = Observation(seq=159, time=0.0, values={Entity("node", "n"): seen})
            run.watch.ingest.observe_machine(Devices("n", host=seen), reading, (), 160.0)
        await run.tick()

    run = watched(tmp_path, scenario, stock=True)
    assert run.case("InputBound").diagnosis.confidence == "medium"


def test_a_consequence_that_outlives_its_parent_is_its_own_under_the_same_key(tmp_path: Path) -> None:
    async def scenario(run: Watched) -> None:
        await run.steps(**values(5, severe=(2, 5)))
        await run.steps(**values(5, severe=(0, 5), mild=(0, 5), follows=(1, 5)))
        await run.steps(**values(5, mild=(0, 5), follows=(0, 5)))
        for _ in range(5):
            await run.steps(**values(50, mild=(0, 50), follows=(0, 50)))

    run = watched(tmp_path, scenario)
    assert run.cases == {"Severe": "", "Mild": "", "Follows": "0.2"}
    assert run.bot.got[-1].firing
    assert run.bot.got[-1].leading.alert == "Mild"
    assert pages(run.bot.got) == pages(run.hook.got) == pages(run.pager.got)
    assert alerts(run.hook.got) == ["Severe"]  # for this receiver it is still firing
    assert run.shown()[-1] == "[sentinel] Severe (since step 2): over at step 10; Mild, Follows still firing"
    with History(tmp_path / "r1.sqlite") as kept:
        assert {case["alert"]: case["parent"] for case in kept.incidents()} == run.cases


def test_what_is_over_says_what_it_leaves_behind(tmp_path: Path) -> None:
    async def scenario(run: Watched) -> None:
        losses = [2.0 + 0.01 * (seq % 3) for seq in range(1500)]
        await run.steps(loss=losses, learning_rate=[1e-3] * 300 + [0.05] * 1200)

    run = watched(tmp_path, scenario, stock=True)
    (over,) = [
        text for text in run.shown() if text.startswith("[sentinel] LearningRateJump (since step 300): over at step ")
    ]
    assert over.endswith(": no further jump; the rate is 0.05")
    with History(tmp_path / "r1.sqlite") as kept:
        (case,) = [case for case in kept.incidents() if case["alert"] == "LearningRateJump"]
    assert case["leaves"] == "no further jump; the rate is 0.05"


def test_an_alert_that_fires_again_soon_is_the_same_problem_and_no_new_page(tmp_path: Path) -> None:
    async def scenario(run: Watched) -> None:
        for _ in range(3):
            await run.steps(**values(130, severe=(20, 60)))
        assert [message.firing for message in run.pager.got] == [True] * len(run.pager.got)
        for _ in range(5):
            await run.steps(**values(60))

    run = watched(tmp_path, scenario)
    assert run.watch.incidents.log.fired["Severe", "critical"] == 3
    assert len(pages(run.pager.got)) == 1
    assert [message.firing for message in run.hook.got] == [True, False]
    assert [message.firing for message in run.pager.got].index(False) == len(run.pager.got) - 1


def test_a_pager_that_knows_the_critical_one_alone_is_not_paged_again_while_a_warning_lasts(tmp_path: Path) -> None:
    async def scenario(run: Watched) -> None:
        for _ in range(3):
            await run.steps(**values(60, mild=(0, 60), severe=(20, 40)))

    run = watched(tmp_path, scenario)
    assert len(pages(run.pager.got)) == 1
    assert all(message.firing for message in run.pager.got)


def test_a_critical_alert_is_paged_though_a_warning_of_its_problem_never_ends(tmp_path: Path) -> None:
    async def scenario(run: Watched) -> None:
        await run.steps(**values(60, mild=(0, 60), grave=(20, 40)))
        await run.steps(**values(400, mild=(0, 400), grave=(300, 320)))

    run = watched(tmp_path, scenario)
    assert run.watch.incidents.log.fired["Grave", "critical"] == 2
    assert len(pages(run.pager.got)) == 2


def test_a_clock_that_is_set_back_withholds_neither_a_page_nor_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(run: Watched) -> None:
        shown = SimpleNamespace(time=lambda: run.zero + run.next, monotonic=lambda: float(run.next))
        monkeypatch.setattr(clock_module, "time", shown)
        run.watch.incidents.clock = clock_module.Clock(run.watch.run.attempt)
        await run.steps(**values(5, severe=(1, 5)))
        run.zero -= 36_000
        await run.steps(**values(1200, severe=(0, 1200), grave=(1190, 1200)))
        assert alerts(run.hook.got) == ["Severe", "Grave"]
        await run.steps(**values(2))
        run.zero -= 36_000
        await run.steps(**values(300))
        assert [message.firing for message in run.hook.got] == [True, True, False, False]

    run = watched(tmp_path, scenario)
    assert run.cases == {"Severe": "", "Grave": ""}
    assert len(pages(run.pager.got)) == 2


def test_silencing_one_alert_silences_no_other(tmp_path: Path) -> None:
    async def scenario(run: Watched) -> None:
        silences.add(run.silences, alert="Severe", run="", seconds=3600, comment="")
        await run.steps(**values(5, severe=(1, 5)))
        await run.steps(**values(5, severe=(0, 5), mild=(2, 5)))

    run = watched(tmp_path, scenario)
    assert run.case("Severe").silenced
    assert run.cases["Mild"] == "0.1"
    assert run.shown() == ["Mild"]
    assert alerts(run.hook.got) == alerts(run.bot.got) == ["Mild"]


def test_an_alert_that_is_silenced_after_it_was_sent_makes_room_for_the_next(tmp_path: Path) -> None:
    async def scenario(run: Watched) -> None:
        await run.steps(**values(5, severe=(1, 5)))
        silences.add(run.silences, alert="Severe", run="", seconds=3600, comment="")
        await run.tick()
        await run.steps(**values(5, severe=(0, 5), mild=(2, 5)))

    run = watched(tmp_path, scenario)
    assert alerts(run.hook.got) == ["Severe", "Mild"]
    assert [message.escalated for message in run.bot.got] == [False, True]


def test_a_consequence_whose_cause_turns_out_to_be_another_is_a_page_of_its_own(tmp_path: Path) -> None:
    async def scenario(run: Watched) -> None:
        made = training(320, 300)
        made["loss"][315:] = [float("nan")] * 5
        for first in range(0, 320, 5):
            await run.steps(**part(made, first, first + 5))
        assert run.cases["NonFiniteLoss"] == "0.1"
        found = Provenance(seq=315, origin="data", phase="forward", tensors=["input"], exact=True)
        run.rank.collected["provenance"] = found
        run.watch.incidents.add_evidence("provenance", 315)
        await run.tick()

    run = watched(tmp_path, scenario, stock=True)
    assert run.case("NonFiniteLoss").diagnosis.cause.startswith("bad data")
    assert (run.cases["NonFiniteLoss"], run.case("NonFiniteLoss").problem) == ("", "data")
    assert alerts(run.hook.got) == ["LossSpike", "NonFiniteLoss"]
    assert len(pages(run.pager.got)) == 2
    assert run.shown()[-1] == "NonFiniteLoss"


def test_actions_of_a_consequence_run_as_if_it_stood_alone(tmp_path: Path) -> None:
    asked: list[str] = []

    async def scenario(run: Watched) -> None:
        fire = run.watch.actions.fire
        run.watch.incidents.actions.fire = lambda case, *rest: (asked.append(case.alert), fire(case, *rest))[1]  # type: ignore[method-assign]
        await run.steps(**values(5, mild=(1, 5), severe=(2, 5)))

    watched(tmp_path, scenario)
    assert asked == ["Mild", "Severe"]
