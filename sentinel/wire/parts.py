"""Types that several messages share: the identity of a rank, and what it watches."""

from __future__ import annotations

from typing import Annotated

import msgspec

from sentinel.text import describe_incidents, format_bytes

PROTOCOL = 1
"""Version of the protocol, raised when a message changes its meaning. Peers of different protocols refuse each other,
with a reason in words."""

Integer = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
"""An integer from a peer: a float holds it exactly, and the sum of two fits into the 64 bits that a history keeps."""
Ordinal = Annotated[int, msgspec.Meta(ge=0, lt=2**18)]
World = Annotated[int, msgspec.Meta(ge=1, le=2**18)]
"""Number of ranks, up to more than the GPUs of the largest clusters: the daemon waits for each rank of the world."""
Name = Annotated[str, msgspec.Meta(max_length=1024)]
"""Name of a layer, a signal, a run: the qualified name of a module 100 levels deep has 1,000 characters."""
Mesh = msgspec.Meta(max_length=64)
"""Bound on the dimensions of a tensor or of a device mesh: torch allows a tensor no more."""


class Message(msgspec.Struct, tag_field="type", frozen=True, kw_only=True):
    """Base of all messages."""


class Members(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes that a job has since one of its starts. Later sets are subsets of earlier ones."""

    start: Ordinal = 0
    nodes: Annotated[tuple[Ordinal, ...], msgspec.Meta(max_length=4096)] = ()
    """Numbers of the nodes; (): all that the launcher started, and none can be left out."""
    whole: Ordinal = 0
    """How many nodes the job began with, where `nodes` lists those that are left."""
    job: Name = ""
    """Mark of node 0's supervisor, if known: another job under the same run id has a different one. Earlier versions do
    not send it."""

    def is_of_other_job(self, job: str) -> bool:
        """Return whether these are the nodes of another job than that with this mark. False where either mark is not
        known."""
        return bool(self.job and job) and self.job != job

    def has(self, node: int) -> bool:
        """Return whether a node is one of them."""
        return not self.nodes or node in self.nodes

    def admits(self, node: int, launched: int) -> bool:
        """Return whether a node is one of them, where the launcher started `launched` nodes."""
        return node in self.nodes if self.nodes else node < launched

    def count(self, launched: int) -> int:
        """Return the number of nodes; `launched`: how many the launcher started, which counts where all are in."""
        return len(self.nodes) or launched

    @property
    def left_out(self) -> tuple[int, ...]:
        """The nodes that the job began with and goes on without."""
        return tuple(node for node in range(self.whole) if not self.has(node))


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Which rank of which run it is, and where."""

    run: Name
    """Name of the run, for people."""
    run_id: Name
    """Unique id of the run, equal on all its ranks and attempts. Letters, digits, `-`, `_`; at most 40."""
    attempt: Ordinal = 0
    rank: Ordinal = 0
    world_size: World = 1
    local_rank: Ordinal = 0
    local_world_size: Annotated[int, msgspec.Meta(ge=0, le=2**18)] = 0
    """Number of ranks on this node; 0: the launcher does not say."""
    node: Ordinal = 0
    """Number of the node in the job. Rank 0 is on node 0. The number stays the same where nodes are left out."""
    members: Members = Members()
    """The nodes of this attempt."""
    hostname: Name = ""
    pid: Integer = 0
    session: Name = ""
    """Id unique to one `attach`: a notebook cell that runs again is another session of the same process."""


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter tensor."""

    name: Name
    """Qualified name, with `module.` and `_orig_mod.` stripped."""
    model: Name = ""
    shape: Annotated[tuple[int, ...], Mesh]
    dtype: Name
    trainable: bool = True
    held: bool = True
    """Whether the optimizer of this table holds it."""
    tied_to: Name = ""
    """Name of the first parameter that shares this storage."""
    placement: Annotated[tuple[Name, ...], Mesh] = ()
    """Placement for each mesh dimension: `shard(0)`, `replicate`, `partial`. Empty: a plain tensor, the same on every
    rank."""
    mesh: Annotated[tuple[int, ...], Mesh] = ()
    coordinates: Annotated[tuple[int, ...], Mesh] = ()

    @property
    def sharded(self) -> bool:
        """Whether ranks hold different parts of it."""
        return any(p.startswith("shard") for p in self.placement)

    @property
    def part(self) -> tuple[int, ...]:
        """Coordinates along the mesh dimensions that shard it: ranks with the same coordinates hold the same part."""
        return self._along(shards=True)

    @property
    def replica(self) -> int:
        """0 on exactly one of the ranks that hold the same part: sums over ranks take its value only."""
        return max(self._along(shards=False), default=0)

    def _along(self, *, shards: bool) -> tuple[int, ...]:
        pairs = zip(self.placement, self.coordinates, strict=False)  # a rank outside the mesh has no coordinates
        return tuple([at for placement, at in pairs if placement.startswith("shard") is shards])


class RollbackTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The terms of the rollback that the user armed, as far as the daemon needs them."""

    every: Integer
    keep: Integer
    margin: Integer
    budget: Integer
    skip_batches: Integer = 0
    lr_factor: float = 1.0
    disk_every: Integer = 0
    """How many times `every` lie between two snapshots on disk; 0: none are written."""
    disk_keep: Integer = 2


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a run, as far as its daemon has judged it: for the line at its end."""

    steps: Integer
    """Steps of the current attempt, up to the last judged one."""
    step: Integer
    """The user's number of the last judged step."""
    cut: bool = False
    """Whether there were more steps: a rank without a goodbye had not sent all of them."""
    lost: Integer = 0
    """How many of these steps never reached the daemon."""
    incidents: dict[str, Integer] = {}
    """Severity -> number of incidents, in all attempts."""
    worst: str = ""
    """The first of the worst incidents, in words."""
    snapshot: Integer | None = None
    """The user's step of the newest snapshot on disk."""
    rose: float = 0.0
    """Bytes by which memory rose in a straight line up to the end, where the run was too short to judge the rise."""
    kept: bool = True
    """Whether a history of it is kept, from which commands can show more."""
    seconds: float = 0.0
    """Seconds from the first attach to the last goodbye, as in the history; 0: an earlier version does not say."""
    lacks: str = ""
    """What its history lacks, in words."""
    nodes: World = 1
    """Number of nodes of the job. What was found is that of this one. An earlier version does not say."""
    elsewhere: str = ""
    """What is open on the job's other nodes but not on this one, in words."""
    unheard: str = ""
    """Ranks whose end is not known although another rank ended by an exception, in words."""

    @property
    def text(self) -> str:
        """What was found, and what is left to go on from."""
        parts = [describe_incidents(self.incidents, self.worst) + (" on this node" if self.nodes > 1 else "")]
        parts += [f"open on others: {self.elsewhere}"] if self.elsewhere else []
        parts += [f"no word yet of how {self.unheard} ended"] if self.unheard else []
        parts += [f"{self.lost:,} of the steps were not seen"] if self.lost else []
        parts += (
            [f"memory rose by {format_bytes(self.rose)}, and the run was too short to judge it"] if self.rose else []
        )
        parts += [f"newest snapshot on disk: step {self.snapshot:,}"] if self.snapshot is not None else []
        parts += [] if self.kept else ["no history of it could be written"]
        parts += [self.lacks] if self.lacks else []
        return "; ".join(parts)


class RuleText(msgspec.Struct, frozen=True, kw_only=True):
    """A rule file that a run brings."""

    file: str
    text: str
