"""The metrics that Prometheus scrapes: one collector over live state, so that the series of a run end with it.

Names begin with `sentinel_` and end in their base unit. The label `run` is the run's id, which is unique, unlike its
name; `rank` is on a handful of gauges; `layer` on a few, limited to ten layers a run: 1,024 ranks x 400 layers would be
400,000 series. (Advice: fewer than 10 values a label, think again above 100; prometheus.io/docs/practices/naming and
.../instrumentation.)
"""

from __future__ import annotations

import logging
import resource
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from sentinel._version import __version__
from sentinel.daemon.frontend import layer_metrics
from sentinel.daemon.frontend.faults import FaultCounter
from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.engine.judging.judgement import STATES
from sentinel.notify.deadman import Deadman
from sentinel.prometheus import metric_names
from sentinel.prometheus.metric_names import with_unit
from sentinel.rulebook.loader import Reloads
from sentinel.runs import Rank
from sentinel.signals import CLOCK, SIGNALS

log = logging.getLogger(__name__)

UNSEEN = 16
"""Most series of one rank that name something that Sentinel cannot see there."""

LOGGED = 256
"""Most numbers logged by the script of one run that have a series each."""

Labels = tuple[str, ...]
Samples = Iterable[tuple[Labels, float | None]]


class LiveCollector(Collector):
    """Families of everything that a daemon serves now."""

    def __init__(
        self,
        watches: Mapping[str, WatchedRun],
        reloads: Reloads,
        faults: FaultCounter,
        deadman: Deadman | None = None,
    ) -> None:
        self._watches, self._reloads, self._faults, self._deadman = watches, reloads, faults, deadman
        self._told: set[str] = set()

    def collect(self) -> Iterator[Metric]:
        """Yield all families, each made on demand: with a thousand ranks, one takes a millisecond or two, and the
        daemon serves its ranks in between. A family that fails is logged once and left out, with those after it of the
        same part; the others are served."""
        watches = list(self._watches.values())
        parts = (  # generators: none of them has begun
            _daemon(self._reloads, self._faults),
            _heartbeats(self._deadman),
            _runs(watches),
            _ranks(watches),
            _rank_signals(watches),
            _layers(watches),
            _judgement(watches),
            _jobs(watches),
            _notifications(watches),
            _devices(watches),
        )
        for number, part in enumerate(parts):
            try:
                yield from part
            except Exception:
                if str(number) not in self._told:
                    self._told.add(str(number))
                    log.exception("some metrics are left out")


def _daemon(reloads: Reloads, faults: FaultCounter) -> Iterator[Metric]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    yield _gauge("build_info", "Version of the daemon.", ("version",), [((__version__,), 1.0)])
    yield _counter("daemon_cpu_seconds", "CPU time that the daemon used.", (), [((), used.ru_utime + used.ru_stime)])
    yield _gauge("daemon_resident_memory_bytes", "Resident set size of the daemon.", (), [((), _resident())])
    what = "Faults of the daemon itself, each with a traceback in its log."
    yield _counter("daemon_faults", what, (), [((), float(faults.count))])
    yield _gauge(
        "config_last_reload_successful",
        "1 where the rule files could be read when they were read last.",
        (),
        [((), float(not reloads.mistakes))],
    )
    yield _gauge(
        "config_last_reload_success_timestamp_seconds",
        "When the rule files were last read without a mistake.",
        (),
        [((), reloads.succeeded_at)],
    )


def _heartbeats(deadman: Deadman | None) -> Iterator[Metric]:
    heartbeat = deadman.status() if deadman is not None else None
    counts = [((state,), float(heartbeat[state])) for state in ("sent", "withheld", "failed")] if heartbeat else []
    yield _counter("heartbeats", "Heartbeats to the dead man's switch: sent, withheld or failed.", ("state",), counts)


def _runs(watches: list[WatchedRun]) -> Iterator[Metric]:
    info = [((w.run.run_id, w.run.name, str(w.run.attempt.number)), 1.0) for w in watches]
    yield _gauge("run_info", "Name and attempt of a run.", ("run", "name", "attempt"), info)
    for signal in SIGNALS.values():
        if metric_names.of_run(signal):
            samples = [((w.run.run_id,), w.run.attempt.latest(signal.name)) for w in watches]
            family = _counter if signal.kind == "counter" else _gauge
            yield family(f"run_{with_unit(signal)}", f"Of the run: {signal.meaning}.", ("run",), samples)
    logged = [
        ((w.run.run_id, name), value) for w in watches for name, value in w.run.attempt.latest_logged(LOGGED).items()
    ]
    what = "Of the run: a number that the script or its trainer logs, by name; as it was logged last."
    yield _gauge("run_logged", what, ("run", "name"), logged)
    closed = [((w.run.run_id,), float(w.run.attempt.closed_to + 1)) for w in watches]
    yield _counter("run_steps", "Steps of the present attempt that all ranks have reported.", ("run",), closed)
    done = [((w.run.run_id,), float(len(w.actions.rollback.done))) for w in watches]
    yield _counter("rollbacks", "Rollbacks of the present attempt.", ("run",), done)
    trouble = [((w.run.run_id,), float(bool(w.store is None or w.store.trouble))) for w in watches]
    yield _gauge("history_failing", "1 where the history is not written.", ("run",), trouble)
    sizes = [((w.run.run_id,), float(w.store.bytes)) for w in watches if w.store]
    yield _gauge("history_bytes", "Size of the run's history, as of its last transaction.", ("run",), sizes)
    dropped = [((w.run.run_id, kind), float(n)) for w in watches if w.store for kind, n in w.store.dropped.items()]
    what = "Rows that were given up, as the history could not be written for too long."
    yield _counter("history_lost_writes", what, ("run", "kind"), dropped)


def _ranks(watches: list[WatchedRun]) -> Iterator[Metric]:
    each = [(w, rank) for w in watches for rank in w.run.attempt.ranks.values() if rank.state != "gone"]
    info = [((*_labels(w, r), str(r.identity.local_rank), r.identity.hostname), 1.0) for w, r in each]
    yield _gauge("rank_info", "Where a rank runs.", ("run", "rank", "local_rank", "hostname"), info)
    per_rank = ("run", "rank")
    up = [(_labels(w, r), float(r.state == "live")) for w, r in each]
    yield _gauge("rank_up", "1 where the rank is connected.", per_rank, up)
    steps = [(_labels(w, r), float(r.last_seq + r.hello.step_offset)) for w, r in each]
    yield _gauge("step", "Last step that the rank reported.", per_rank, steps)
    stalled = [(_labels(w, r), r.stall.seconds if r.heartbeat else None) for w, r in each]
    yield _gauge("stalled_seconds", f"Of a rank: {SIGNALS['stalled_seconds'].meaning}.", per_rank, stalled)
    limits = [(_labels(w, r), r.stall.limit if r.heartbeat else None) for w, r in each]
    yield _gauge("stall_limit_seconds", f"Of a rank: {SIGNALS['stall_limit_seconds'].meaning}.", per_rank, limits)
    dropped = [(_labels(w, r), float(r.dropped)) for w, r in each]
    yield _counter("steps_dropped", "Steps that a rank dropped, its queue being full.", per_rank, dropped)
    skipped = [(_labels(w, r), float(r.skipped)) for w, r in each]
    says = "Samples that a rank left out, the machine having no memory, descriptor or thread to spare."
    yield _counter("samples_skipped", says, per_rank, skipped)
    unseen = [((*_labels(w, r), what), 1.0) for w, r in each for what in r.hello.unseen[:UNSEEN]]
    yield _gauge(
        "not_seen", "1 for each thing that cannot be seen of a rank now, in words.", (*per_rank, "what"), unseen
    )
    cost = [((*_labels(w, r), part), share) for w, r in each for part, share in r.pace.costs.items()]
    says = "Share of the loop's time that a part of Sentinel takes, as its governor has it."
    yield _gauge("cost_ratio", says, (*per_rank, "part"), cost)
    spacing = [((*_labels(w, r), tier), float(k)) for w, r in each for tier, k in r.pace.spacing.items()]
    yield _gauge("sampling_spacing_steps", "A tier is sampled every so many steps.", (*per_rank, "tier"), spacing)


def _rank_signals(watches: list[WatchedRun]) -> Iterator[Metric]:
    per_rank = ("run", "rank")
    last = [(w, w.run.attempt.recent[-1]) for w in watches if w.run.attempt.recent]
    times = [((w.run.run_id,), step.time) for w, step in last]
    yield _gauge("last_step_timestamp_seconds", "When the run's last step ended.", ("run",), times)
    for signal in SIGNALS.values():
        if not signal.by_rank or signal.tier == CLOCK:  # those of the daemon's own clock are written above
            continue
        values = [
            ((w.run.run_id, str(number)), value)
            for w in watches
            for number, value in w.run.attempt.latest_of_ranks(signal.name).items()
            if number in w.run.attempt.ranks and w.run.attempt.ranks[number].state != "gone"
        ]
        yield _gauge(with_unit(signal), f"Of a rank: {signal.meaning}.", per_rank, values)


def _layers(watches: list[WatchedRun]) -> Iterator[Metric]:
    for row in layer_metrics.rows(watches):
        yield _gauge(*row)
    yield layer_metrics.histogram(watches)


def _judgement(watches: list[WatchedRun]) -> Iterator[Metric]:
    fired: dict[Labels, float] = {}
    firing: dict[Labels, float] = {}
    for watch in watches:
        firing_now = Counter(
            (case.alert, case.severity) for case in watch.incidents.log.cases.values() if case.state == "firing"
        )
        for key, count in watch.incidents.log.fired.items():
            fired[watch.run.run_id, *key] = count
            firing[watch.run.run_id, *key] = firing_now[key]
    labels = ("run", "alert", "severity")
    yield _counter("incidents", "Incidents that fired.", labels, fired.items())
    yield _gauge("incidents_firing", "Incidents that are open.", labels, firing.items())
    states = [
        ((watch.run.run_id, state.replace(" ", "_")), float(count))
        for watch in watches
        for state, count in (dict.fromkeys(STATES, 0) | watch.incidents.evaluator.states()).items()
    ]
    yield _gauge("rules", "Rules by state, an entity each.", ("run", "state"), states)
    evaluations = [((watch.run.run_id,), float(watch.incidents.evaluations)) for watch in watches]
    yield _counter("rule_evaluations", "Times that a rule was applied to a step.", ("run",), evaluations)


def _jobs(watches: list[WatchedRun]) -> Iterator[Metric]:
    """Yield metrics of jobs over several nodes. Every node says whether it hears the coordinator; values of the whole
    job come from the coordinator alone, so that a sum over nodes counts them once."""
    jobs = [(w.run.run_id, w.membership.status()) for w in watches if w.membership is not None]
    joined = [((run,), float(job["view"] in ("coordinator", "joined"))) for run, job in jobs]
    what = "1 where this node hears the coordinator of the run's job, or is it; 0: it has a local view only."
    yield _gauge("job_joined", what, ("run",), joined)
    refused = [((run,), float(job["refused"])) for run, job in jobs]
    yield _counter("job_messages_refused", "Messages of other nodes that were refused.", ("run",), refused)
    rejected = [((run,), float(job["rejected"])) for run, job in jobs if job["rejected"] is not None]
    what = "Connections to this node's port that were not let in, at least; of a node that listens, on Linux."
    yield _counter("job_connections_rejected", what, ("run",), rejected)
    led = [(run, job) for run, job in jobs if job["view"] == "coordinator"]
    states = [
        ((run, state), float(sum(node["state"] == state for node in job["nodes"])))
        for run, job in led
        for state in ("alive", "silent", "left")
    ]
    states += [((run, "never_heard"), float(job["expected"] - len(job["nodes"]))) for run, job in led]
    states += [((run, "left_out"), float(len(job["left_out"]))) for run, job in led]
    yield _gauge("job_nodes", "Nodes of the job by state; from its coordinator.", ("run", "state"), states)
    firing = Counter((run, incident["alert"]) for run, job in led for incident in job["incidents"])
    what = "Incidents of the job that are open; from its coordinator. Those of one node are in incidents_firing, too."
    yield _gauge("job_incidents_firing", what, ("run", "alert"), [(key, float(n)) for key, n in firing.items()])
    steps = {run: [node["step"] for node in job["nodes"] if node["state"] == "alive"] for run, job in led}
    reached = [((run,), float(min(known))) for run, known in steps.items()]
    yield _gauge(
        "job_step", "Step that all nodes that are heard have reached; from the coordinator.", ("run",), reached
    )
    lag = [((run,), float(max(known) - min(known))) for run, known in steps.items()]
    what = "Steps by which the last of the nodes that are heard is behind the first; from the coordinator."
    yield _gauge("job_lag_steps", what, ("run",), lag)
    judges = [((watch.run.run_id,), watch.incidents.job) for watch in watches if watch.incidents.job is not None]
    for norm in [SIGNALS[part.part_of] for part in SIGNALS.values() if part.part_of]:
        found = [(run, judge.find_newest(norm.name)) for run, judge in judges]
        what = f"Over the ranks of all nodes, where gradients are sharded: {norm.meaning}; from the coordinator."
        yield _gauge(f"job_{norm.name}", what, ("run",), [(run, value) for run, value in found if value is not None])


def _notifications(watches: list[WatchedRun]) -> Iterator[Metric]:
    each = [(w.run.run_id, queue) for w in watches for queue in w.notifier.pipeline.queues]
    labels = ("run", "receiver")
    sent = [((run, queue.name), float(queue.counts.sent)) for run, queue in each]
    yield _counter("notifications", "Messages that a receiver took.", labels, sent)
    failed = [
        ((run, queue.name, fault.replace(" ", "_")), float(count))
        for run, queue in each
        for fault, count in queue.counts.failed.items()
    ]
    yield _counter("notifications_failed", "Attempts to deliver that failed.", (*labels, "reason"), failed)
    given_up = [((run, queue.name), float(queue.counts.given_up)) for run, queue in each]
    yield _counter("notifications_given_up", "Messages that were not delivered and will not be.", labels, given_up)
    held = [((run, queue.name), float(queue.counts.held)) for run, queue in each]
    yield _counter("notifications_held", "Messages that waited for a rate limit.", labels, held)
    pending = [((run, queue.name), float(queue.pending)) for run, queue in each]
    yield _gauge("notifications_pending", "Messages that wait to be delivered.", labels, pending)


def _devices(watches: list[WatchedRun]) -> Iterator[Metric]:
    """Yield metrics of the host and of the GPUs that runs train on. Labels are dcgm-exporter's, for joins on UUID."""
    joined = [
        (gpu, watch, rank, watch.run.attempt.devices.hostname)
        for watch in watches
        for rank in watch.run.attempt.live
        for gpu in watch.run.attempt.devices.find_gpus(rank.hello.gpus)
    ]
    labels = ("run", "rank", "hostname", "gpu", "UUID", "pci_bus_id", "device", "modelName")
    info = [((*_labels(w, r), host, str(g.index), g.uuid, g.bus, g.device, g.model), 1.0) for g, w, r, host in joined]
    yield _gauge("rank_gpu_info", "GPU that a rank trains on. To DCGM's series: on (UUID).", labels, info)
    gpus = {gpu.uuid: (gpu, (host, str(gpu.index), gpu.uuid)) for gpu, _, _, host in joined}.values()
    hosts = {watch.run.attempt.devices.hostname: watch.run.attempt.devices.read_node() for watch in watches}
    for signal in SIGNALS.values():
        family = _counter if signal.kind == "counter" else _gauge
        meaning = f"{signal.meaning[0].upper()}{signal.meaning[1:]}."
        if signal.scope == "gpu" and signal.kind != "event":
            samples = [(place, gpu.values.get(signal.name)) for gpu, place in gpus]
            yield family(with_unit(signal), meaning, ("hostname", "gpu", "UUID"), samples)
        elif signal.scope == "node":
            own = [((host,), values.get(signal.name)) for host, values in hosts.items() if values]
            yield family(with_unit(signal), meaning, ("hostname",), own)
    faults = [((*place, *map(str, key)), float(n)) for gpu, place in gpus for key, n in gpu.counts.items()]
    what = "Faults that a GPU reported: xid, with its code; silent; lost."
    yield _counter("gpu_faults", what, ("hostname", "gpu", "UUID", "kind", "code"), faults)


def _resident() -> float | None:
    try:
        return float(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return None


def _labels(watch: WatchedRun, rank: Rank) -> tuple[str, str]:
    return watch.run.run_id, str(rank.identity.rank)


def _gauge(name: str, text: str, labels: Labels, samples: Samples) -> Metric:
    return _fill_family(GaugeMetricFamily(f"sentinel_{name}", text, labels=labels), samples)


def _counter(name: str, text: str, labels: Labels, samples: Samples) -> Metric:
    return _fill_family(CounterMetricFamily(f"sentinel_{name}", text, labels=labels), samples)


def _fill_family(family: GaugeMetricFamily | CounterMetricFamily, samples: Samples) -> Metric:
    for labels, value in samples:
        if value is not None:
            family.add_metric(labels, value)
    return family
