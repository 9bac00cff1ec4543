"""Sends closed steps from the nodes to the rules of the whole job.

    RunStep of a node -> DigestSender -> Digest, once a second -> JobSteps -> RunStep of all nodes

A digest has each rank's value of each signal that the job's rules read, and no sums of them: what is combined from the
values of all ranks is then the same as on one node, to the last bit, whatever a signal's `combine` is. For a norm whose
gradients are sharded, it has each rank's part, too: no node has the whole norm.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from sentinel import wire
from sentinel.cluster.protocol.messages import Digest
from sentinel.errors import ProtocolError
from sentinel.runs.reported import MOST_STEPS, MOST_VALUES, list_reported_steps
from sentinel.runs.step_alignment import Alignment
from sentinel.runs.steps import RunStep, combine_ranks
from sentinel.signals import SIGNALS

DIGEST_BYTES = 2048
"""Bytes per second and node, compressed, in the long run. Where a loop's steps need more, not every one is sent whole.
"""
BURST_BYTES = 10 * DIGEST_BYTES
"""The most bytes at once: a run's first steps are measured in full, and what was lost is sent again."""
AGAIN_SECONDS = 3.0
"""Seconds after which steps that the coordinator does not confirm are sent again: three of its beats."""
CLOSED_STEPS = 64
"""The most closed steps whose values to send are not yet chosen: they are held in full, with all that was measured."""
KEPT_ROWS = MOST_STEPS
"""The most rows, each the values of one rank at one step, in a digest or waiting for one."""
COARSEST = 4096
PATIENCE_SECONDS = 10.0
"""Seconds for which a step waits for nodes that have not reported that they are past it; then it is judged without
them. The same time after which a node counts as silent (`coordinator.SILENT_SECONDS`)."""
_NEVER = 1 << 60
"""The lead, in steps, of one node at which the others are no longer waited for: never, as digests come once a second,
however fast a loop is."""
_UNPACKED_BYTES = 16 * MOST_VALUES


_SHARDS = {name: signal.part_of for name, signal in SIGNALS.items() if signal.part_of}
"""A rank's own part of a norm -> the norm."""


class NodeStep(NamedTuple):
    """A step of a node, or only its rare values: signals that most steps lack, and values that are not finite."""

    step: RunStep
    whole: bool


class _Body(msgspec.Struct, frozen=True, array_like=True):
    """The content of a digest, uncompressed: a row for each rank of each step, in rising order of steps."""

    ranks: bytes
    """uint32, packed: the rank of each row."""
    whole: bytes
    """uint8: for each row, whether its step is whole."""
    rows: wire.Batch


class DigestSender:
    """The node's side, for one attempt: which steps the coordinator has, and which must be sent again."""

    def __init__(self, node: int, attempt: int, signals: Collection[str]) -> None:
        """Start with nothing sent. `signals`: those that the job's rules read."""
        self._node, self._attempt, self.signals = node, attempt, signals
        self._closed: list[RunStep] = []
        """The last steps that closed. What to send of them is chosen for many at once: for each by itself, with cold
        caches, it takes three times as long in a fast loop."""
        self._fresh = deque[NodeStep]()
        self._sent = deque[NodeStep]()
        """Steps that were sent and are not confirmed."""
        self._ranks = 1
        """The most ranks that a step had."""
        self._closed_to = self._sent_to = self._confirmed = -1
        self._progressed = 0.0
        """Time at which something was last confirmed, or sent with nothing unconfirmed before it."""
        self._allowed, self._made = float(BURST_BYTES), 0.0
        """Bytes that may be sent, and the time at which that held."""
        self.every = 1
        """One of so many steps is sent whole. A power of two: the steps that a slower node's budget allows are among a
        faster one's."""

    @property
    def unconfirmed(self) -> bool:
        """Whether the coordinator does not have all steps yet."""
        return self._confirmed < self._closed_to

    def list_unconfirmed(self) -> list[NodeStep]:
        """Return the steps that no coordinator has, in order; the oldest are forgotten."""
        self._choose_values()
        return [*self._sent, *self._fresh]

    def add(self, step: RunStep) -> None:
        """Take a closed step of this node."""
        self._closed_to = step.seq
        self._closed.append(step)
        if len(self._closed) >= CLOSED_STEPS:
            self._choose_values()

    def _choose_values(self) -> None:
        """Keep what is sent of the closed steps: a step in full, or its rare values."""
        for step in self._closed:
            ranks = {
                number: {name: value for name, value in values.items() if name in self.signals} | _select_shards(values)
                for number, values in step.ranks.items()
            }
            self._ranks = max(self._ranks, len(ranks))
            self._fresh.extend(_thin([NodeStep(RunStep(step.seq, step.time, ranks, {}), True)], self.every))
        self._closed.clear()
        self._forget_oldest(self._fresh)

    def make_digest(self, now: float) -> Digest | None:
        """Return what is new, called once a second; None where nothing is."""
        self._allowed = min(self._allowed + (now - self._made) * DIGEST_BYTES, BURST_BYTES)
        self._made = now
        self._choose_values()
        after = self._sent_to
        if self._confirmed >= self._sent_to:
            self._progressed = now
        elif now - self._progressed > AGAIN_SECONDS:
            self._fresh.extendleft(reversed(self._sent))
            self._sent.clear()
            after, self._progressed = self._confirmed, now
        if self._closed_to == after:
            return None
        body = self._fit_budget()
        self._sent_to = self._closed_to
        return Digest(node=self._node, attempt=self._attempt, after=after, upto=self._sent_to, body=body)

    def confirm(self, upto: int, now: float) -> None:
        """Take note that the coordinator has all up to this step; -1: nothing. A newly started one may have less."""
        upto = min(upto, self._sent_to)
        if upto > self._confirmed:
            self._progressed = now
        self._confirmed = upto
        while self._sent and self._sent[0].step.seq <= upto:
            self._sent.popleft()

    def _fit_budget(self) -> bytes:
        """Return all fresh steps, packed: only every second, fourth ... one whole, as the allowed bytes demand; where
        even that is too much, the newest."""
        allowed = max(self._allowed, DIGEST_BYTES)
        self._forget_oldest(self._fresh)
        steps = list(self._fresh)
        body = _pack(steps)
        while len(body) > allowed and len(steps) > 1:
            if self.every < COARSEST:
                self.every *= 2
                steps = _thin(steps, self.every)
            else:
                steps = steps[len(steps) // 2 :]
            body = _pack(steps)
        self._allowed -= len(body)
        if self._allowed > 0.75 * BURST_BYTES and self.every > 1:
            self.every //= 2
        self._fresh.clear()
        self._sent.extend(steps)
        self._forget_oldest(self._sent)
        return body

    def _forget_oldest(self, steps: deque[NodeStep]) -> None:
        while len(steps) > max(KEPT_ROWS // self._ranks, 1):
            steps.popleft()


class JobSteps:
    """The coordinator's side, for one attempt: joins the nodes' steps, each once and in order.

    A step that one node did not send whole is whole for none: where a node sends every fourth, the job has every
    fourth. Of the other steps, the rare values stay. A node that sent nothing for `PATIENCE_SECONDS` does not make a
    step incomplete; but without its shards there is no norm.
    """

    def __init__(self, own: int, nodes: Iterable[int]) -> None:
        """Start with no steps. `own`: the coordinator's node. `nodes`: the job's; each is waited for, for a while."""
        self._own, self._nodes = own, set(nodes)
        self._alignment = Alignment[NodeStep](seconds=PATIENCE_SECONDS, steps=_NEVER)
        self._alignment.join_all(self._nodes)
        self.reached: dict[int, int] = {}
        """Node -> the last step that it need not send again."""
        self.nodes: dict[int, int] = {}
        """Rank -> the node that it is on."""

    def list_awaited(self) -> frozenset[int]:
        """Return the nodes that steps wait for."""
        return self._alignment.awaited

    def add_own(self, step: RunStep, now: float) -> None:
        """Take a closed step of the coordinator's node."""
        self._alignment.report(self._own, step.seq, NodeStep(step, True), now)

    def take_own(self, steps: Iterable[NodeStep], now: float) -> None:
        """Take steps of the coordinator's node from before it was the coordinator."""
        self._alignment.report_all(self._own, [(one.step.seq, one) for one in steps], now)

    def take(self, digest: Digest, now: float) -> None:
        """Take steps of another node. Known ones are skipped; those after a gap are not taken, and come again. Raises
        ProtocolError."""
        reached = self.reached.get(digest.node, -1)
        if digest.node == self._own or digest.after > reached:
            return
        steps = [(one.step.seq, one) for one in _unpack(digest.body) if reached < one.step.seq <= digest.upto]
        self._alignment.report_all(digest.node, steps, now)
        if digest.upto > reached:
            self.reached[digest.node] = digest.upto
            self._alignment.join(digest.node, digest.upto + 1)

    def leave(self, node: int) -> None:
        """Stop waiting for a node that has gone."""
        self._alignment.leave(node)

    def take_closed(self, now: float) -> Iterator[RunStep]:
        """Yield the steps that closed since the last call."""
        for seq, by_node in self._alignment.take_closed(now):
            self.nodes |= {rank: node for node, one in by_node.items() for rank in one.step.ranks}
            ranks = dict(sorted(pair for one in by_node.values() for pair in one.step.ranks.items()))
            if self._alignment.awaited - by_node.keys() or not all(one.whole for one in by_node.values()):
                ranks = _select_rare(ranks)
                if not ranks:
                    continue
            if self._nodes - by_node.keys():
                ranks = _drop_partial_norms(ranks)
            own = by_node.get(self._own)
            yield RunStep(
                seq=seq,
                time=max(one.step.time for one in by_node.values()),
                ranks=ranks,
                run=combine_ranks(ranks.values()),
                layers=own.step.layers if own is not None else None,
            )


def _thin(steps: Iterable[NodeStep], every: int) -> list[NodeStep]:
    """Return one of `every` steps whole, and the rare values of the others."""
    found = []
    for one in steps:
        if one.step.seq % every == 0 or not one.whole:
            found.append(one)
        elif ranks := _select_rare(one.step.ranks):
            found.append(NodeStep(msgspec.structs.replace(one.step, ranks=ranks), False))
    return found


def _select_rare(ranks: Mapping[int, Mapping[str, float]]) -> dict[int, Mapping[str, float]]:
    found = {
        rank: {name: value for name, value in values.items() if _is_rare(name) or not math.isfinite(value)}
        for rank, values in ranks.items()
    }
    return {rank: values for rank, values in found.items() if values}


def _is_rare(signal: str) -> bool:
    return signal in SIGNALS and SIGNALS[signal].tier > 1


def _select_shards(values: Mapping[str, float]) -> dict[str, float]:
    """Return a rank's parts of norms, and the rank's values of those norms."""
    return {name: values[name] for part, norm in _SHARDS.items() if part in values for name in (part, norm)}


def _drop_partial_norms(ranks: Mapping[int, Mapping[str, float]]) -> dict[int, Mapping[str, float]]:
    """Return the values without the norms of which a missing node may have shards."""
    sharded = {part for values in ranks.values() for part in _SHARDS.keys() & values.keys()}
    dropped = sharded | {_SHARDS[part] for part in sharded}
    return {
        rank: {name: value for name, value in values.items() if name not in dropped} for rank, values in ranks.items()
    }


def _pack(steps: Sequence[NodeStep]) -> bytes:
    rows = [(one, rank, values) for one in steps for rank, values in sorted(one.step.ranks.items())]
    names = dict.fromkeys(name for _, _, values in rows for name in values)
    batch = wire.Batch(
        seqs=array("q", [one.step.seq for one, _, _ in rows]).tobytes(),
        times=array("d", [one.step.time for one, _, _ in rows]).tobytes(),
        columns={name: _make_column(name, [values for _, _, values in rows]) for name in names},
    )
    ranks, whole = array("I", [rank for _, rank, _ in rows]), bytes(one.whole for one, _, _ in rows)
    return zlib.compress(msgspec.msgpack.encode(_Body(ranks.tobytes(), whole, batch)))


def _make_column(name: str, rows: Sequence[Mapping[str, float]]) -> wire.Column:
    there = [row for row, values in enumerate(rows) if name in values]
    values = array("d", [rows[row][name] for row in there]).tobytes()
    return wire.Column(values, b"" if len(there) == len(rows) else array("H", there).tobytes())


def _unpack(packed: bytes) -> list[NodeStep]:
    """Return the steps of a digest, without the run's values. Raises ProtocolError."""
    try:
        stream = zlib.decompressobj()
        body = msgspec.msgpack.decode(stream.decompress(packed, _UNPACKED_BYTES), type=_Body)
    except (zlib.error, msgspec.DecodeError) as error:
        raise ProtocolError(f"a digest that cannot be read: {error}") from None
    ranks, rows = wire.unpack_column("I", body.ranks), list_reported_steps(body.rows, ())
    if not len(ranks) == len(body.whole) == len(rows):
        raise ProtocolError(f"a digest of {len(rows)} rows of {len(ranks)} ranks")
    found: dict[int, NodeStep] = {}
    values: dict[int, dict[int, Mapping[str, float]]] = defaultdict(dict)
    for rank, whole, (seq, reported) in zip(ranks, body.whole, rows, strict=True):
        values[seq][rank] = reported.take_values()
        found[seq] = NodeStep(RunStep(seq, reported.time, values[seq], {}), bool(whole))
    return [found[seq] for seq in sorted(found)]
