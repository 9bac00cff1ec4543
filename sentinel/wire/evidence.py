"""What ranks collect at an incident: the shapes in which it travels, lies in a case and is read by the catalogue.

    Provenance       where the first value that is not finite came from: one re-run of the step's batch
    Census           who holds what grows from step to step: two counts of what Python holds
    OutOfMemory      what memory was spent on when an allocation failed
    Moments          the optimizer's second moments against the gradients, and the exponents of these

Each is sent in a `wire.Evidence`. Steps are seqs. A field `missing` says in words what could not be found out, and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

Origin = Literal["data", "weights", "operation", "loss", "nothing", "not known"]


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Where the first value that is not finite came from.

    origin          what it means
    data            the batch holds it: `tensors` names the inputs
    weights         a parameter or buffer of `module` holds it: `tensors` names them
    operation       `module` made it, from finite values: `operation`, at `line`
    loss            the model's outputs are finite, and what comes after them makes it: in `phase`
    nothing         the batch and the weights as they are make only finite values, in both passes
    not known       `missing` says why
    """

    seq: int
    """The step whose batch was run again, or was looked at."""
    origin: Origin
    phase: Literal["forward", "backward", ""] = ""
    module: str = ""
    """Qualified name; empty: the model itself."""
    kind: str = ""
    """Class of the module."""
    operation: str = ""
    """Of PyTorch: `aten.log`; in the backward pass with the node of the graph: `aten.div in SqrtBackward0`."""
    line: str = ""
    """`file:line` of the code that called it, the user's where there is one."""
    tensors: tuple[str, ...] = ()
    """Inputs, parameters or buffers that are not finite."""
    inputs_finite: bool | None = None
    """Of the module's operation; of the model, where the origin is the data."""
    weights_finite: bool | None = None
    """All parameters of the model."""
    bad_weights: tuple[str, ...] = ()
    """Names of parameters that are not finite, the first few in the model's order."""
    bad_weight_count: int = 0
    between: tuple[str, ...] = ()
    """The last parameter that is not finite and the first that is, where those up to one are not and the rest are: a
    backward pass broke between the two, and its update was applied."""
    bad_buffers: tuple[str, ...] = ()
    """The same of buffers, as they are after the step: statistics of batch norm keep what the step put into them."""
    exact: bool = True
    """Whether weights and batch were those of the step: the update had not been applied."""
    rerun: bool = True
    """Whether the batch was run again; else its inputs were looked at, without the model."""
    seconds: float = 0.0
    missing: tuple[str, ...] = ()


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Something that holds more from step to step."""

    name: str
    """And what that is: `losses, a variable of module __main__`; `Trainer.history, an attribute of a train.Trainer`."""
    kind: str
    """Type of the container; `tensor` where it is a tensor by itself."""
    line: str = ""
    """`file:line` of the frame that has it, or of the function in whose closure it is; or the file alone."""
    length: int = 0
    """Entries that it has."""
    entries_per_step: float = 0.0
    bytes_per_step: float = 0.0
    """Of tensors the bytes of their storages: a view holds all of what it is a view of."""
    tensors: bool = False
    """Whether its newest entries hold tensors."""
    graph: bool = False
    """Whether these hold the graph that made them, or are the end of a chain of graphs that grows."""
    nodes: int = 0
    nodes_per_step: float = 0.0
    """Of the graph that a tensor by itself is the end of; the walk ends at 20,000."""
    example: str = ""
    """Shape and type of one of its tensors: `64x10 float32`."""
    hook: str = ""
    """The module whose forward hook fills it."""


class Census(msgspec.Struct, frozen=True, kw_only=True):
    """What grew between two counts, what holds graphs first, then what holds most."""

    seq: int
    """The step of the second count."""
    steps: int
    """Between the two."""
    holders: tuple[Holder, ...] = ()
    tensors: int = 0
    """Of all kinds that Python knows, the model's among them."""
    tensor_bytes: int = 0
    """Of their storages, each once."""
    seconds: float = 0.0
    """From the first count to the last name; it used a tenth of them at most."""
    missing: tuple[str, ...] = ()


class OutOfMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank held when an allocation failed. Bytes; 0 where they are not known."""

    seq: int
    """The step that was under way."""
    device: str
    """`cuda`, `cpu` and so on."""
    phase: Literal["forward", "backward", "optimizer"]
    line: str = ""
    """`file:line` of the user's code."""
    requested: int = 0
    parameters: int = 0
    gradients: int = 0
    buffers: int = 0
    optimizer: int = 0
    """Of the optimizers' states."""
    allocated: int = 0
    """In live tensors, of all kinds; on the CPU the resident set of the process."""
    reserved: int = 0
    """Held from the device."""
    free: int = 0
    """Bytes that no process held."""
    limit: int = 0
    """That there is."""
    largest_layer: str = ""
    largest_layer_bytes: int = 0
    """Its parameters in full: where they are sharded, what a gather has to hold."""
    gathered: bool = False
    """Whether they are."""

    @property
    def activations(self) -> int:
        """What is left of the live tensors: activations, batches, work space; on the CPU the interpreter, too."""
        known = self.parameters + self.gradients + self.buffers + self.optimizer
        return max(self.allocated - known, 0)

    @property
    def idle(self) -> int:
        """In the allocator's cache, and of no use for this request."""
        return max(self.reserved - self.allocated, 0)


class Moment(msgspec.Struct, frozen=True):
    """Of one layer."""

    layer: str
    gradient: float
    """Root mean square of its gradient's elements, at that step."""
    second: float
    """Root of the mean of its second moment, corrected for bias as Adam does: in a steady run about the same."""

    @property
    def ratio(self) -> float:
        """How far the second moment is over the gradient; NaN where that is 0."""
        return self.second / self.gradient if self.gradient else float("nan")


class Moments(msgspec.Struct, frozen=True, kw_only=True):
    """The optimizer's second moments, and the exponents of the gradients, from a strided sample of one step."""

    seq: int
    layers: tuple[Moment, ...] = ()
    """Those whose second moment is furthest over their gradient, the first few."""
    usual: float = 0.0
    """Median of `second / gradient` over all layers."""
    exponents: dict[str, float] = {}
    """Power of two -> share of the non-zero gradient elements below it."""
    zero_share: float = 0.0
    missing: tuple[str, ...] = ()


KINDS: Mapping[str, type[Any]] = {
    "provenance": Provenance,
    "census": Census,
    "out_of_memory": OutOfMemory,
    "moments": Moments,
}
"""`wire.Collected.what` -> the shape of its content."""
