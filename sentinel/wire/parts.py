"""What several messages are made of: who a rank is, and what it watches."""

from __future__ import annotations

from typing import Annotated

import msgspec

from sentinel.text import describe_incidents, format_bytes

PROTOCOL = 1
"""Raised when a message changes its meaning. Peers of different protocols refuse each other, in words."""

Integer = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
"""From a peer: a float holds it exactly, and the sum of two fits into 64 bits, which is what a history keeps."""
Ordinal = Annotated[int, msgspec.Meta(ge=0, lt=2**18)]
World = Annotated[int, msgspec.Meta(ge=1, le=2**18)]
"""More than the largest clusters have GPUs: each rank of the world is waited for."""
Name = Annotated[str, msgspec.Meta(max_length=1024)]
"""Of a layer, a signal, a run: a qualified name of a module 100 levels deep has 1,000 characters."""
Mesh = msgspec.Meta(max_length=64)
"""Dimensions of a tensor or of a device mesh: torch has no more of a tensor."""


class Message(msgspec.Struct, tag_field="type", frozen=True, kw_only=True):
    """Base of all messages."""


class Members(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes that a job has since one of its starts. Later ones are a part of those before."""

    start: Ordinal = 0
    nodes: Annotated[tuple[Ordinal, ...], msgspec.Meta(max_length=4096)] = ()
    """(): all that the launcher started; none can be left out."""
    whole: Ordinal = 0
    """How many the job began with, where `nodes` says which are left."""
    job: Name = ""
    """Mark of node 0's supervisor, where that is known: another job under the same run id has another. Earlier versions
    do not say."""

    def is_of_other_job(self, job: str) -> bool:
        """Whether these are the nodes of another job than that with this mark. False where either is not known."""
        return bool(self.job and job) and self.job != job

    def has(self, node: int) -> bool:
        """Whether a node is one of them."""
        return not self.nodes or node in self.nodes

    def admits(self, node: int, launched: int) -> bool:
        """The same, where the launcher started so many."""
        return node in self.nodes if self.nodes else node < launched

    def count(self, launched: int) -> int:
        """How many they are; `launched`: by the launcher, where all are in."""
        return len(self.nodes) or launched

    @property
    def left_out(self) -> tuple[int, ...]:
        """Nodes that the job began with, and goes on without."""
        return tuple(node for node in range(self.whole) if not self.has(node))


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who a rank is."""

    run: Name
    """Name of the run, for people."""
    run_id: Name
    """Unique id of the run, equal on all its ranks and attempts. Letters, digits, `-`, `_`; at most 40."""
    attempt: Ordinal = 0
    rank: Ordinal = 0
    world_size: World = 1
    local_rank: Ordinal = 0
    local_world_size: Annotated[int, msgspec.Meta(ge=0, le=2**18)] = 0
    """Ranks on this node; 0: the launcher does not say."""
    node: Ordinal = 0
    """Number of the node in the job. Rank 0 is on node 0. It stays where nodes are left out."""
    members: Members = Members()
    """The nodes of this attempt."""
    hostname: Name = ""
    pid: Integer = 0
    session: Name = ""
    """Unique to one `attach`: a notebook cell that runs again is another session of the same process."""


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter tensor."""

    name: Name
    """Qualified name, `module.` and `_orig_mod.` stripped."""
    model: Name = ""
    shape: Annotated[tuple[int, ...], Mesh]
    dtype: Name
    trainable: bool = True
    held: bool = True
    """Whether the optimizer whose table it is has it."""
    tied_to: Name = ""
    """Name of the first parameter that shares this storage."""
    placement: Annotated[tuple[Name, ...], Mesh] = ()
    """A mesh dimension each: `shard(0)`, `replicate`, `partial`. Empty: a plain tensor, the same on every rank."""
    mesh: Annotated[tuple[int, ...], Mesh] = ()
    coordinates: Annotated[tuple[int, ...], Mesh] = ()

    @property
    def sharded(self) -> bool:
        """Whether ranks hold different parts of it."""
        return any(p.startswith("shard") for p in self.placement)

    @property
    def part(self) -> tuple[int, ...]:
        """Coordinates along the dimensions of the mesh that shard it: ranks that have the same hold the same part."""
        return self._along(shards=True)

    @property
    def replica(self) -> int:
        """0 on one of the ranks that hold the same part: what is added up over ranks is taken from that one."""
        return max(self._along(shards=False), default=0)

    def _along(self, *, shards: bool) -> tuple[int, ...]:
        pairs = zip(self.placement, self.coordinates, strict=False)  # a rank outside the mesh has no coordinates
        return tuple([at for placement, at in pairs if placement.startswith("shard") is shards])


class RollbackTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What the user armed, as the daemon needs to know it."""

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
    """What a run came to, as far as its daemon has judged it: for the line at its end."""

    steps: Integer
    """Steps of the current attempt, up to the last one judged."""
    step: Integer
    """The user's number of that one."""
    cut: bool = False
    """There were more: a rank that said no goodbye had not told of all."""
    lost: Integer = 0
    """How many of these steps never reached the daemon."""
    incidents: dict[str, Integer] = {}
    """Severity -> how many there were, in all attempts."""
    worst: str = ""
    """The first of the worst, in words."""
    snapshot: Integer | None = None
    """The user's step of the newest snapshot on disk."""
    rose: float = 0.0
    """Bytes by which memory rose in a straight line up to the end, where that was too short to be judged."""
    kept: bool = True
    """A history of it is kept, with which commands can say more."""
    seconds: float = 0.0
    """From the first attach to the last goodbye, as the history has it; 0: an earlier version does not say."""
    lacks: str = ""
    """What its history lacks, in words."""
    elsewhere: str = ""
    """What is open on the job's other nodes and not on this one, in words."""
    unheard: str = ""
    """Ranks whose end is not known though one ended by an exception, in words."""

    @property
    def text(self) -> str:
        """What was found, and what is left to go on from."""
        parts = [describe_incidents(self.incidents, self.worst) + (" on this node" if self.elsewhere else "")]
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
