"""What ranks collect at an incident: the shapes in which it travels, lies in a case and is read by the catalogue.

    Provenance       where the first value that is not finite came from: one re-run of the step's batch

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
    """The step whose batch was run again."""
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
    seconds: float = 0.0
    missing: tuple[str, ...] = ()


KINDS: Mapping[str, type[Any]] = {"provenance": Provenance}
"""`wire.Collected.what` -> the shape of its content."""
