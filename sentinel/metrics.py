"""What Prometheus scrapes: one collector over live state, so that a run that has gone takes its series with it.

Names begin with `sentinel_` and end in their base unit. The label `run` is the run's id, unique where names are not;
`rank` is on a handful of gauges; `layer` on a few, limited to ten layers a run: 1,024 ranks x 400 layers would be
400,000 series. (Advice: fewer than 10 values a label, think again above 100; prometheus.io/docs/practices/naming and
.../instrumentation.)
"""

from __future__ import annotations

import logging
import resource
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from sentinel import __version__, layer_metrics, series
from sentinel.daemon.faults import Faults
from sentinel.daemon.watched_run import WatchedRun
from sentinel.rulebook import Reloads
from sentinel.runs import Rank
from sentinel.series import BY_RANK, COUNTED, XIDS, with_unit
from sentinel.signals import SIGNALS

log = logging.getLogger(__name__)

RULE_STATES = ("inactive", "pending", "firing", "warming", "no data", "not applicable", "nonfinite")

Labels = tuple[str, ...]
Samples = Iterable[tuple[Labels, float | None]]


class LiveCollector(Collector):
    """Families of everything that a daemon serves now."""

    def __init__(
        self,
        watches: Mapping[str, WatchedRun],
        reloads: Reloads,
        faults: Faults,
        heartbeat: Callable[[], Mapping[str, Any] | None] = lambda: None,
    ) -> None:
        self._watches, self._reloads, self._faults, self._heartbeat = watches, reloads, faults, heartbeat
        self._told: set[str] = set()

    def collect(self) -> Iterator[Metric]:
        """All of them, each made when it is asked for: of a thousand ranks one takes a millisecond or two, and the
        daemon looks after its ranks in between. One that fails is logged once and left out, with those after it of the
        same part; the others are served."""
        watches = list(self._watches.values())
        parts: tuple[Callable[[], Iterable[Metric]], ...] = (
            lambda: _daemon(self._reloads, self._faults),
            lambda: _heartbeats(self._heartbeat()),
            lambda: _runs(watches),
            lambda: _ranks(watches),
            lambda: _rank_signals(watches),
            lambda: _layers(watches),
            lambda: _judgement(watches),
            lambda: _notifications(watches),
            lambda: _devices(watches),
        )
        for number, part in enumerate(parts):
            try:
                yield from part()
            except Exception:
                if str(number) not in self._told:
                    self._told.add(str(number))
                    log.exception("some metrics are left out")


def _daemon(reloads: Reloads, faults: Faults) -> Iterator[Metric]:
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


def _heartbeats(heartbeat: Mapping[str, Any] | None) -> Iterator[Metric]:
    counts = [((state,), float(heartbeat[state])) for state in ("sent", "withheld", "failed")] if heartbeat else []
    yield _counter("heartbeats", "Heartbeats to the dead man's switch: sent, withheld or failed.", ("state",), counts)


def _runs(watches: list[WatchedRun]) -> Iterator[Metric]:
    info = [((w.run.run_id, w.run.name, str(w.attempt.number)), 1.0) for w in watches]
    yield _gauge("run_info", "Name and attempt of a run.", ("run", "name", "attempt"), info)
    for signal in SIGNALS.values():
        if series.of_run(signal):
            samples = [((w.run.run_id,), w.attempt.latest(signal.name)) for w in watches]
            family = _counter if signal.name in COUNTED else _gauge
            yield family(f"run_{with_unit(signal)}", f"Of the run: {signal.meaning}.", ("run",), samples)
    closed = [((w.run.run_id,), float(w.attempt.closed_to + 1)) for w in watches]
    yield _counter("run_steps", "Steps of the present attempt that all ranks have reported.", ("run",), closed)
    done = [((w.run.run_id,), float(len(w.rollback.done))) for w in watches]
    yield _counter("rollbacks", "Rollbacks of the present attempt.", ("run",), done)
    trouble = [((w.run.run_id,), float(bool(w.store is None or w.store.trouble))) for w in watches]
    yield _gauge("history_failing", "1 where the history is not written.", ("run",), trouble)
    sizes = [((w.run.run_id,), float(w.store.bytes)) for w in watches if w.store]
    yield _gauge("history_bytes", "Size of the run's history, as of its last transaction.", ("run",), sizes)
    lost = [((w.run.run_id,), float(w.store.lost)) for w in watches if w.store]
    yield _counter("history_lost_writes", "Rows that were given up, the disk being full for too long.", ("run",), lost)


def _ranks(watches: list[WatchedRun]) -> Iterator[Metric]:
    each = [(w, rank) for w in watches for rank in w.attempt.ranks.values() if rank.state != "gone"]
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
    cost = [((*_labels(w, r), part), share) for w, r in each for part, share in r.pace.costs.items()]
    says = "Share of the loop's time that a part of Sentinel takes, as its governor has it."
    yield _gauge("cost_ratio", says, (*per_rank, "part"), cost)
    spacing = [((*_labels(w, r), tier), float(k)) for w, r in each for tier, k in r.pace.spacing.items()]
    yield _gauge("sampling_spacing_steps", "A tier is sampled every so many steps.", (*per_rank, "tier"), spacing)


def _rank_signals(watches: list[WatchedRun]) -> Iterator[Metric]:
    per_rank = ("run", "rank")
    last = [(w, w.attempt.recent[-1]) for w in watches if w.attempt.recent]
    times = [((w.run.run_id,), step.time) for w, step in last]
    yield _gauge("last_step_timestamp_seconds", "When the run's last step ended.", ("run",), times)
    for name in BY_RANK:
        values = [
            ((w.run.run_id, str(number)), value)
            for w in watches
            for number, value in w.attempt.latest_of_ranks(name).items()
            if number in w.attempt.ranks and w.attempt.ranks[number].state != "gone"
        ]
        yield _gauge(with_unit(SIGNALS[name]), f"Of a rank: {SIGNALS[name].meaning}.", per_rank, values)


def _layers(watches: list[WatchedRun]) -> Iterator[Metric]:
    for row in layer_metrics.rows(watches):
        yield _gauge(*row)
    yield layer_metrics.histogram(watches)


def _judgement(watches: list[WatchedRun]) -> Iterator[Metric]:
    fired: dict[Labels, float] = {}
    firing: dict[Labels, float] = {}
    for watch in watches:
        firing_now = Counter((case.alert, case.severity) for case in watch.cases.values() if case.state == "firing")
        for key, count in watch.book.fired.items():
            fired[watch.run.run_id, *key] = count
            firing[watch.run.run_id, *key] = firing_now[key]
    labels = ("run", "alert", "severity")
    yield _counter("incidents", "Incidents that fired.", labels, fired.items())
    yield _gauge("incidents_firing", "Incidents that are open.", labels, firing.items())
    states = [
        ((watch.run.run_id, state.replace(" ", "_")), float(count))
        for watch in watches
        for state, count in (dict.fromkeys(RULE_STATES, 0) | watch.evaluator.states()).items()
    ]
    yield _gauge("rules", "Rules by state, an entity each.", ("run", "state"), states)
    evaluations = [((watch.run.run_id,), float(watch.evaluations)) for watch in watches]
    yield _counter("rule_evaluations", "Times that a rule was applied to a step.", ("run",), evaluations)


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
    """The node's GPUs that a run trains on, and its host. Labels are those of dcgm-exporter, to be joined on UUID."""
    joined = [
        (gpu, watch, rank, watch.attempt.devices.hostname)
        for watch in watches
        for rank in watch.attempt.live
        for gpu in watch.attempt.devices.of(rank.hello.gpus)
    ]
    labels = ("run", "rank", "hostname", "gpu", "UUID", "pci_bus_id", "device", "modelName")
    info = [((*_labels(w, r), host, str(g.index), g.uuid, g.bus, g.device, g.model), 1.0) for g, w, r, host in joined]
    yield _gauge("rank_gpu_info", "GPU that a rank trains on. To DCGM's series: on (UUID).", labels, info)
    gpus = {gpu.uuid: (gpu, (host, str(gpu.index), gpu.uuid)) for gpu, _, _, host in joined}.values()
    hosts = {watch.attempt.devices.hostname: watch.attempt.devices.host for watch in watches}
    for signal in SIGNALS.values():
        family = _counter if signal.name in COUNTED else _gauge
        meaning = f"{signal.meaning[0].upper()}{signal.meaning[1:]}."
        if signal.scope == "gpu" and signal.name not in XIDS:
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
    return _filled(GaugeMetricFamily(f"sentinel_{name}", text, labels=labels), samples)


def _counter(name: str, text: str, labels: Labels, samples: Samples) -> Metric:
    return _filled(CounterMetricFamily(f"sentinel_{name}", text, labels=labels), samples)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: Samples) -> Metric:
    for labels, value in samples:
        if value is not None:
            family.add_metric(labels, value)
    return family
