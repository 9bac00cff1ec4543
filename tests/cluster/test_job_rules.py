"""Rules over the ranks of all nodes find what they would find if all ranks were on one node."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from sentinel import wire
from sentinel.cluster.protocol import digest
from sentinel.cluster.protocol.digest import BURST_BYTES, DIGEST_BYTES, PATIENCE_SECONDS, DigestSender, JobSteps
from sentinel.cluster.protocol.job_rules import JobRules, find_signals, select_job_rules
from sentinel.cluster.protocol.messages import Digest, NodeRollback, Pulse, RankReport, decode, encode
from sentinel.engine import RUN, Evaluator, Transition, load_rules
from sentinel.errors import ProtocolError
from sentinel.rulebook.loader import stock_rules
from sentinel.rulebook.observation import observation
from sentinel.runs.steps import RunStep, combine_ranks
from sentinel.signals import CLOCK, SIGNALS

RULES = tuple(
    rule
    for rule in stock_rules()
    if rule.scopes <= {"run", "rank"} and all(SIGNALS[name].tier != CLOCK for name in rule.metrics if name in SIGNALS)
)
"""Rules, also others than those that compare ranks: the steps from the digests are good enough for all of these."""
NAMES = find_signals(RULES)
STEPS = 240

Found = tuple[str, str, int, tuple[tuple[str, int], ...]]
"""A transition: kind, alert, step, members with their first step."""


def describe(transition: Transition) -> Found:
    incident = transition.incident
    seq = incident.seq if transition.kind in ("fired", "joined") else incident.resolved_seq or -1
    members = tuple((f"{entity.scope} {entity.name}", member.first_seq) for entity, member in incident.members.items())
    return transition.kind, incident.rule, seq, members


class MadeRun:
    """Steps of all ranks of a job, with faults of some ranks at some steps."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.ranks = self.random.randint(2, 8)
        self.began = self.random.choice([0, 0, 400])
        pick = self.random.randrange
        self.slow = (pick(self.ranks), pick(60, 120)) if pick(2) else (-1, 0)
        self.apart = (pick(self.ranks), pick(STEPS)) if pick(2) else (-1, 0)
        self.short = pick(self.ranks) if pick(2) else -1
        self.nan = (pick(self.ranks), pick(100, STEPS)) if pick(2) else (-1, 0)
        self.sharded = bool(pick(2))
        self.spike = (pick(self.ranks), pick(150, STEPS)) if pick(2) else (-1, 0)
        self.steps = [self.make_step(seq) for seq in range(STEPS)]

    def make_step(self, seq: int) -> RunStep:
        ranks = {rank: self.make_values(rank, seq) for rank in range(self.ranks)}
        return RunStep(self.began + seq, 1e9 + seq * 0.5, ranks, combine_ranks(ranks.values()))

    def make_values(self, rank: int, seq: int) -> dict[str, float]:
        draw = self.random.uniform
        values = {
            "loss": 3.0 * math.exp(-seq / 200) + draw(-0.02, 0.02),
            "learning_rate": 1e-3,
            "step_seconds": 0.5 + draw(-0.01, 0.01),
            "forward_seconds": 0.1 + draw(-0.01, 0.01),
            "backward_seconds": 0.2 + draw(-0.01, 0.01),
            "data_seconds": 0.01,
            "grad_norm": 1.0 + 0.1 * math.sin(seq),
        }
        if self.sharded:  # FSDP: each rank has its own part
            values["grad_norm"] = values["grad_norm_sharded"] = draw(0.9, 1.1) * (30.0 if 150 <= seq < 153 else 1.0)
        if rank == self.slow[0] and seq >= self.slow[1]:
            values["backward_seconds"] = 0.01
        if (rank, seq) == self.nan:
            values["loss"] = math.nan
        if rank == self.spike[0] and self.spike[1] <= seq < self.spike[1] + 8:
            values["loss"] += 60.0
        if seq % 8 == 0:
            values["loader_batches"] = 90.0 if rank == self.short else 100.0
            values["replica_checksum"] = float(seq + (rank == self.apart[0] and seq >= self.apart[1]))
        if seq % 4 == 0 and rank % 3 != 2:  # not all of them sample it
            values["update_ratio"] = 1e-3 + draw(0.0, 1e-4)
        return values


class RecordedRun(MadeRun):
    """The losses that a real run logged, taken as means over ranks with batches of their own."""

    def __init__(self, path: Path, seed: int) -> None:
        self.random, self.ranks = random.Random(seed), 6
        with gzip.open(path, "rt") as file:
            losses = [float(json.loads(line)["loss"]) for line in file][:STEPS]
        self.steps = [self.spread(seq, loss) for seq, loss in enumerate(losses)]

    def spread(self, seq: int, loss: float) -> RunStep:
        ranks = {rank: {"loss": loss * self.random.uniform(0.99, 1.01)} for rank in range(self.ranks)}
        return RunStep(seq, 1e9 + seq * 0.5, ranks, combine_ranks(ranks.values()))


def show(step: RunStep) -> str:
    """Return all values of a step as text, to the last bit; nan equals nan."""
    ranks = [(rank, sorted(values.items())) for rank, values in step.ranks.items()]
    return f"{step.seq} {step.time} {ranks} {sorted(step.run.items())}"


def judge_on_one_node(run: MadeRun) -> list[Found]:
    evaluator = Evaluator(RULES, run="r", rewindable=False)
    found: list[Found] = []
    for step in run.steps:
        seen = observation(step)
        if step.seq and not evaluator.began:
            seen = msgspec.structs.replace(seen, values={**seen.values, RUN: {**seen.values[RUN], "resumed": 1.0}})
        found += map(describe, evaluator.observe(seen))
    return found


class NodesOfJob:
    """Senders of all nodes except the coordinator's, and a net that loses, doubles and reorders digests and beats."""

    def __init__(self, run: MadeRun, seed: int) -> None:
        self.random = random.Random(seed)
        self.run = run
        names = list(range(self.random.randint(2, min(4, run.ranks))))
        ranks = [*names, *(self.random.choice(names) for _ in range(run.ranks - len(names)))]
        self.random.shuffle(ranks)
        self.ranks = {node: [rank for rank, on in enumerate(ranks) if on == node] for node in names}
        self.rules = JobRules(RULES, "r", 0, range(len(names)))
        self.senders = {node: DigestSender(node, 0, NAMES) for node in names[1:]}
        self.closed = dict.fromkeys(names, 0)
        self.loss = self.random.choice([0.0, 0.1, 0.3])
        self.net: list[tuple[float, float, bytes]] = []
        self.found: list[Found] = []

    def part(self, node: int, step: RunStep) -> RunStep:
        ranks = {rank: step.ranks[rank] for rank in self.ranks[node]}
        return RunStep(step.seq, step.time, ranks, combine_ranks(ranks.values()))

    def play(self) -> list[Found]:
        now = 0.0
        while now < 600.0 and (any(one.unconfirmed for one in self.senders.values()) or now < STEPS + 10):
            now += 1.0
            for node, closed in self.closed.items():
                self.close_steps(node, closed, now)
            self.deliver(now)
            for node, sender in self.senders.items():
                if self.random.random() >= self.loss:
                    sender.confirm(self.rules.steps.reached.get(node, -1), now)
            self.found += map(describe, self.rules.advance((), 0, now))
        self.found += map(describe, self.rules.finish(now))
        return self.found

    def close_steps(self, node: int, closed: int, now: float) -> None:
        """Close a node's steps of this second, some of which are late on this node."""
        upto = min(STEPS, int(now) - self.random.randint(0, 1))
        for step in self.run.steps[closed:upto]:
            if node == 0:
                self.rules.steps.add_own(self.part(0, step), now)
            else:
                self.senders[node].add(self.part(node, step))
        self.closed[node] = max(upto, closed)
        if node and (message := self.senders[node].make_digest(now)) is not None:
            for _ in range(2 if self.random.random() < self.loss else 1):
                if self.random.random() >= self.loss:
                    at = now + self.random.choice([0.0, 0.0, 2.0])
                    self.net.append((at, self.random.random(), encode(message)))

    def deliver(self, now: float) -> None:
        for packet in sorted(packet for packet in self.net if packet[0] <= now):
            self.net.remove(packet)
            self.rules.take(decode(packet[2], Digest), now)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_any_split_into_nodes_and_any_order_of_arrival_finds_the_same(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "PATIENCE_SECONDS", 300.0)  # a digest that is lost six times in a row still counts
    run = MadeRun(seed)
    job = NodesOfJob(run, 1000 + seed)
    assert job.play() == judge_on_one_node(run)
    assert all(sender.every == 1 for sender in job.senders.values())
    assert list(map(show, job.rules.recent)) == list(map(show, run.steps[-len(job.rules.recent) :]))


@pytest.mark.parametrize(
    ("name", "alert"),
    [("faulty/deepobs_F_cifar100_allcnnc_Momentum_lr4_earlyNaN", "NonFiniteLoss"),
     ("healthy/mlperf_flux1_Nebius_n4", "")],
)  # fmt: skip
def test_any_split_of_a_recorded_run_finds_the_same(name: str, alert: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real logs, from the folder that SENTINEL_RECORDED_RUNS names; nothing is checked where there is none."""
    path = Path(os.environ.get("SENTINEL_RECORDED_RUNS", "nowhere")) / "runs" / f"{name}.jsonl.gz"
    if path.exists():
        monkeypatch.setattr(digest, "PATIENCE_SECONDS", 300.0)
        for seed in range(3):
            run = RecordedRun(path, seed)
            judged = judge_on_one_node(run)
            assert NodesOfJob(run, seed).play() == judged
            assert alert in {"", *(found[1] for found in judged)}


@pytest.mark.slow
def test_the_made_runs_fire_rules_that_compare_ranks_and_rules_over_their_mean() -> None:
    fired = {found[1] for seed in range(24) for found in judge_on_one_node(MadeRun(seed)) if found[0] == "fired"}
    assert fired >= {"Straggler", "ReplicaDivergence", "UnevenBatches", "LossSpike", "NonFiniteLoss"}


def steps_of(count: int, rank: int, *, first: int = 0) -> Iterator[RunStep]:
    for seq in range(first, first + count):
        yield RunStep(seq, 1e9 + seq, {rank: {"loss": 1 / (1 + seq + rank)}}, {})


def closed_at(job: JobSteps, now: float) -> list[tuple[int, list[int]]]:
    """Return step and ranks of the steps that close now."""
    return [(step.seq, list(step.ranks)) for step in job.take_closed(now)]


def test_a_node_that_falls_silent_is_waited_for_and_then_not_missed() -> None:
    job, sender = JobSteps(0, range(2)), DigestSender(1, 0, {"loss"})
    for step in steps_of(4, 0):
        job.add_own(step, 0.0)
    for step in steps_of(2, 1):
        sender.add(step)
    message = sender.make_digest(0.0)
    assert message is not None
    job.take(message, 0.0)
    assert closed_at(job, PATIENCE_SECONDS - 1) == [(0, [0, 1]), (1, [0, 1])]
    assert closed_at(job, PATIENCE_SECONDS) == [(2, [0]), (3, [0])]
    for step in steps_of(1, 0, first=4):
        job.add_own(step, 20.0)
    for step in steps_of(3, 1, first=2):
        sender.add(step)
    again = sender.make_digest(20.0)
    assert again is not None
    job.take(again, 20.0)
    assert closed_at(job, 20.0) == [(4, [0, 1])]


@pytest.mark.slow
def test_a_fast_loop_is_thinned_to_the_budget_and_nodes_agree_on_which_steps() -> None:
    job, senders = JobSteps(0, range(3)), {node: DigestSender(node, 0, {"loss"}) for node in (1, 2)}
    judged: list[RunStep] = []
    sent, coarsest = dict.fromkeys(senders, 0), dict.fromkeys(senders, 1)
    for second in range(60):
        for node, sender in senders.items():
            ranks = range(8 * node, 8 * node + (8 if node == 1 else 2))
            for seq in range(200 * second, 200 * second + 200):
                sender.add(RunStep(seq, 1e9 + seq, {rank: {"loss": random.random()} for rank in ranks}, {}))
            message = sender.make_digest(float(second))
            assert message is not None
            sent[node] += len(encode(message))
            coarsest[node] = max(sender.every, coarsest[node])
            job.take(message, float(second))
        for step in steps_of(200, 0, first=200 * second):
            job.add_own(step, float(second))
        judged += job.take_closed(float(second))
        for node, upto in job.reached.items():
            senders[node].confirm(upto, float(second))
    assert max(sent.values()) < BURST_BYTES + 60 * (DIGEST_BYTES + 200)
    assert coarsest[1] > coarsest[2] > 1
    assert all(len(step.ranks) == 11 for step in judged)
    assert len(judged) >= 12000 // coarsest[1]


def test_what_is_rare_and_what_is_not_finite_is_not_thinned_away() -> None:
    names = ("loss", "replica_checksum")
    job, senders = JobSteps(0, range(3)), [DigestSender(1, 0, names), DigestSender(2, 0, names)]
    for seq in range(3999):
        rare = {"replica_checksum": 5.0} if seq % 500 == 499 else {}
        job.add_own(RunStep(seq, 1e9 + seq, {0: {"loss": 1.0, **rare}}, {}), 0.0)
        for node, sender in enumerate(senders, 1):
            values = {"loss": math.nan if (node, seq) == (1, 3501) else random.random(), **rare}
            sender.add(RunStep(seq, 1e9 + seq, dict.fromkeys((node, 2 + node), values), {}))
            if seq % 1000 == 0:
                message = sender.make_digest(0.0)
                assert message is not None
                job.take(message, 0.0)
    for sender in senders:
        message = sender.make_digest(0.0)
        assert message is not None
        assert sender.every > 1
        job.take(message, 0.0)
    judged = {step.seq: step for step in job.take_closed(0.0)}
    assert [seq for seq, step in judged.items() if "replica_checksum" in step.run] == list(range(499, 3999, 500))
    assert {len(judged[seq].ranks) for seq in range(499, 3999, 500)} == {5}
    assert "loss" not in judged[3499].run, "the loss of the coordinator's node alone"
    assert math.isnan(judged[3501].run["loss"])
    assert list(judged[3501].ranks) == [1, 3], "what the third node left out makes no mean"


@pytest.mark.parametrize("body", [b"", b"no digest", digest.zlib.compress(b"\x93\x01\x02\x03")])
def test_what_is_no_digest_is_refused(body: bytes) -> None:
    job = JobSteps(0, range(2))
    with pytest.raises(ProtocolError):
        job.take(Digest(node=1, attempt=0, after=-1, upto=3, body=body), 0.0)


def test_rules_that_compare_no_ranks_stay_on_their_node() -> None:
    text = (
        "group: mine\nsignals: {tokens: how many}\nrules:\n"
        "  - {alert: OverMean, expr: tokens > 3, annotations: {summary: s}}\n"
        "  - {alert: OverRank, scope: rank, expr: tokens > 3, annotations: {summary: s}}\n"
        "  - {alert: Behind, scope: rank, expr: 'across(tokens, \"max\") > 2 * tokens', annotations: {summary: s}}\n"
        "  - {alert: Layers, expr: 'across(layer_grad_norm, \"max\") > 3', annotations: {summary: s}}\n"
        "  - {alert: Clock, expr: stalled_seconds > 3, annotations: {summary: s}}\n"
    )
    rules = load_rules(text, "rules.yaml").rules
    assert [rule.name for rule in select_job_rules(rules)] == ["Behind"]
    assert find_signals(select_job_rules(rules)) == {"tokens"}
    names: Sequence[str] = [rule.name for rule in select_job_rules(stock_rules())]
    assert names == ["Straggler", "UnevenBatches", "ReplicaDivergence"]


def send_shards(rules: JobRules, sender: DigestSender, now: float, *, silent: bool = False) -> None:
    """Send the step of this second; each of two nodes has a rank with its own part of the norm."""
    for rank, part in enumerate((3.0, 4.0)):
        values = {"loss": 1.0, "grad_norm": part, "grad_norm_sharded": part}
        step = RunStep(int(now), 1e9 + now, {rank: values}, combine_ranks([values]))
        if rank == 0:
            rules.steps.add_own(step, now)
        elif not silent:
            sender.add(step)
    if (message := sender.make_digest(now)) is not None:
        rules.take(message, now)
    sender.confirm(int(now), now)


def test_the_norm_of_shards_is_that_of_all_nodes_or_none() -> None:
    rules, sender = JobRules((), "r", 0, range(2)), DigestSender(1, 0, ())
    for second in range(4):
        send_shards(rules, sender, float(second))
    rules.advance((), 0, 3.0)
    assert rules.find_newest("grad_norm") == 5.0
    for second in range(4, 40):
        send_shards(rules, sender, float(second), silent=True)
    rules.advance((), 0, 40.0)
    assert rules.recent[-1].seq > 20, "steps are judged without the node that is silent"
    assert all("grad_norm" not in step.run for step in rules.recent if step.seq >= 4)


def test_a_rule_over_the_norm_of_shards_is_judged_over_all_nodes() -> None:
    text = (
        "group: mine\nrules:\n"
        "  - {alert: Large, expr: 'across(grad_norm_sharded, \"norm\") > 4.5', annotations: {summary: s}}\n"
        "  - {alert: Part, expr: 'across(grad_norm_sharded, \"norm\") < 4.5', annotations: {summary: s}}\n"
    )
    rules = JobRules(select_job_rules(load_rules(text, "rules.yaml").rules), "r", 0, range(2))
    sender = DigestSender(1, 0, ())
    fired = []
    for second in range(40):
        send_shards(rules, sender, float(second), silent=second >= 20)
        fired += [found.incident.rule for found in rules.advance((), 0, float(second)) if found.kind == "fired"]
    assert fired == ["Large"]


def test_a_node_of_eight_ranks_sends_less_than_4_kb_a_second() -> None:
    """At one step per second, with all signals that the stock rules of a job read, and eight snapshots per rank."""
    random_values = random.Random(1)
    names, sizes = find_signals(select_job_rules(RULES)), []
    sender = DigestSender(1, 0, names)
    terms = wire.RollbackTerms(every=10, keep=8, margin=5, budget=2)
    for second in range(120):
        seq = 100_000 + second
        ranks = {rank: {name: random_values.random() for name in names} for rank in range(8, 16)}
        sender.add(RunStep(seq, 1e9 + second, ranks, {}))
        digested = sender.make_digest(float(second))
        assert digested is not None
        sender.confirm(seq, float(second))
        reports = tuple(
            RankReport(rank=rank, state="live", last_seq=seq, held=tuple(range(seq - 80, seq, 10)), terms=terms)
            for rank in ranks
        )
        pulse = Pulse(
            node=1, incarnation=10**12, hostname="node1.of.a.cluster", attempt=1, step=seq,
            ranks={str(rank): seq for rank in ranks}, job=wire.JobReport(restarts=3),
            rollback=NodeRollback(attempt=1, step_offset=0, step_seconds=1.0, ranks=reports),
        )  # fmt: skip
        sizes.append(len(encode(digested)) + len(encode(pulse)))
    print(f"{sum(sizes) / len(sizes):.0f} bytes a second")
    assert sum(sizes) / len(sizes) < 4096
