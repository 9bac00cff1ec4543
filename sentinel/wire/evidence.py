"""The shapes of the evidence that ranks collect at an incident: as it is sent, stored in a case and read by the
catalogue.

    Provenance       where the first value that is not finite came from: one re-run of the step's batch
    Census           who holds what grows from step to step: two counts of what Python holds
    OutOfMemory      what memory was spent on when an allocation failed
    Moments          the optimizer's second moments against the gradients, and the exponents of these

Each is sent in a `wire.Collected`. Steps are seqs. A field `missing` says in words what could not be found out,
and why.
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
    operation       `module` made it, from finite values: `operation`, at `line`. Or met it, where `inputs_finite` is
                    False: it is in a constant, or in a tensor that is neither a weight nor found in the arguments
    loss            the model's outputs are finite, and what comes after them makes it: in `phase`
    nothing         the batch and the weights as they are make only finite values, in both passes
    not known       `missing` says why
    """

    seq: int
    """The step whose batch was run again, or was looked at."""
    origin: Origin
    phase: Literal["forward", "backward", ""] = ""
    module: str = ""
    """Qualified name of the module; empty: the model itself."""
    kind: str = ""
    """Class of the module."""
    operation: str = ""
    """PyTorch's operation: `aten.log`; in the backward pass with the node of the graph: `aten.div in SqrtBackward0`."""
    line: str = ""
    """`file:line` of the code that called it, in the user's code if possible."""
    tensors: tuple[str, ...] = ()
    """Inputs, parameters or buffers that are not finite."""
    inputs_finite: bool | None = None
    """Whether the inputs of the module's operation are finite; of the model, where the origin is the data."""
    weights_finite: bool | None = None
    """Whether all parameters of the model are finite."""
    bad_weights: tuple[str, ...] = ()
    """Names of the parameters that are not finite, the first few in the model's order."""
    bad_weight_count: int = 0
    between: tuple[str, ...] = ()
    """The last parameter that is not finite and the first finite one, where all up to the one are not finite and the
    rest are: a backward pass broke between the two, and its update was applied."""
    bad_buffers: tuple[str, ...] = ()
    """Names of the buffers that are not finite, as they are after the step: statistics of batch norm keep what the step
    put into them."""
    exact: bool = True
    """Whether weights and batch were those of the step: the update had not been applied."""
    rerun: bool = True
    """Whether the batch was run again; else its inputs were looked at, without the model."""
    seconds: float = 0.0
    missing: tuple[str, ...] = ()


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A Python object that holds more from step to step."""

    name: str
    """Its name and what it is: `losses, a variable of module __main__`; `Trainer.history, an attribute of a
    train.Trainer`."""
    kind: str
    """Type of the container; `tensor` for a single tensor."""
    line: str = ""
    """`file:line` of the frame that has it, or of the function in whose closure it is; or the file alone."""
    length: int = 0
    """Number of its entries."""
    entries_per_step: float = 0.0
    bytes_per_step: float = 0.0
    """Bytes per step; for tensors, those of their storages: a view holds all of the storage that it is a view of."""
    tensors: bool = False
    """Whether its newest entries hold tensors."""
    graph: bool = False
    """Whether these hold the graph that made them, or are the end of a chain of graphs that grows."""
    nodes: int = 0
    nodes_per_step: float = 0.0
    """Growth per step of the nodes of the graph that a single tensor is the end of; the count ends at 20,000."""
    example: str = ""
    """Shape and type of one of its tensors: `64x10 float32`."""
    hook: str = ""
    """The module whose forward hook fills it."""


class Census(msgspec.Struct, frozen=True, kw_only=True):
    """What grew between two counts: first what holds graphs, then the largest holders."""

    seq: int
    """The step of the second count."""
    steps: int
    """Steps between the two counts."""
    holders: tuple[Holder, ...] = ()
    tensors: int = 0
    """Number of all tensors that Python knows, including the model's."""
    tensor_bytes: int = 0
    """Bytes of their storages, each counted once."""
    seconds: float = 0.0
    """Seconds from the first count to the last name; the census used a tenth of them at most."""
    missing: tuple[str, ...] = ()


class OutOfMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank held when an allocation failed, in bytes; 0 where a number is not known."""

    seq: int
    """The step in which the allocation failed."""
    device: str
    """Type of the device: `cuda`, `cpu` and so on."""
    phase: Literal["forward", "backward", "optimizer"]
    line: str = ""
    """`file:line` of the user's code."""
    requested: int = 0
    parameters: int = 0
    gradients: int = 0
    buffers: int = 0
    optimizer: int = 0
    """Bytes of the optimizers' states."""
    allocated: int = 0
    """Bytes in live tensors of all kinds; on the CPU the resident set of the process."""
    reserved: int = 0
    """Bytes that the allocator held from the device."""
    free: int = 0
    """Bytes of the device that no process held."""
    limit: int = 0
    """Bytes that the process may take: the device's memory, a set fraction of it, or the host's limit."""
    largest_layer: str = ""
    largest_layer_bytes: int = 0
    """Bytes of its parameters in full: where they are sharded, what a gather has to hold."""
    gathered: bool = False
    """Whether they are gathered, being sharded."""

    @property
    def activations(self) -> int:
        """Bytes of the live tensors that nothing else explains: activations, batches, work space; on the CPU the
        interpreter, too."""
        known = self.parameters + self.gradients + self.buffers + self.optimizer
        return max(self.allocated - known, 0)

    @property
    def idle(self) -> int:
        """Bytes in the allocator's cache that could not serve this request."""
        return max(self.reserved - self.allocated, 0)


class Moment(msgspec.Struct, frozen=True):
    """The second moment of one layer."""

    layer: str
    gradient: float
    """Root mean square of the elements of its gradient at that step."""
    second: float
    """Root of the mean of its second moment, corrected for bias as Adam does: in a steady run about the same as
    `gradient`."""

    @property
    def ratio(self) -> float:
        """How many times the gradient the second moment is; NaN where the gradient is 0."""
        return self.second / self.gradient if self.gradient else float("nan")


class Moments(msgspec.Struct, frozen=True, kw_only=True):
    """The optimizer's second moments, and the exponents of the gradients, from a strided sample of one step."""

    seq: int
    layers: tuple[Moment, ...] = ()
    """The layers whose second moment is furthest above their gradient, the first few."""
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
