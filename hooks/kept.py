"""The last call of each model: its arguments, by reference, and what is needed to make the same call again.

They are held from the call to the exit of the optimizer's step, in which the loop nearly always holds them itself; more
than `BATCH_BYTES` are not held. Of the gradient that came back to the outputs `GRADIENT_BYTES` are, for a backward pass
that begins where the model ends: the loss function is the user's, and cannot be called again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

BATCH_BYTES = 256 * 1024 * 1024
GRADIENT_BYTES = 16 * 1024 * 1024
"""Logits of a large vocabulary are more, and would raise the peak of memory by their size."""
_CUDA = torch.version.cuda is not None or torch.version.hip is not None
LOOKS = 8
"""Calls of a model that drew no random number: then it is taken for one that draws none. Its state is 5 kB, 20 us."""
LEAVES = 16
"""Tensors of a batch, or outputs of a model, that are looked at."""
DEPTH = 4


class Kept:
    """One call of a model. Nothing of it is copied but the state of the random number generator."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], draws: bool = True) -> None:
        """`draws`: whether the model may draw random numbers."""
        self.args, self.kwargs = args, kwargs
        self.gradients: dict[int, Tensor] = {}
        """Place among the differentiable outputs -> the gradient that came back to it, the last one."""
        self.outputs = 0
        """Differentiable outputs whose gradients are held."""
        self.autocast = _autocast()
        self.rng = torch.get_rng_state() if draws else None
        self.device_rng = [] if not draws or not _CUDA else _of_devices(args, kwargs)
        self.versions = [tensor._version for tensor in leaves((args, kwargs))]

    @property
    def unchanged(self) -> bool:
        """Whether nobody wrote into the batch since."""
        return self.versions == [tensor._version for tensor in leaves((self.args, self.kwargs))]

    def returned(self, output: object) -> None:
        """The call returned: hold the gradients that will come back, if they are small."""
        outputs = differentiable(output)
        if not outputs or sum(one.nbytes for one in outputs) > GRADIENT_BYTES:
            return
        self.outputs, held = len(outputs), self.gradients
        for place, one in enumerate(outputs):
            one.register_hook(_holder(held, place))  # type: ignore[no-untyped-call]

    @property
    def drawn(self) -> bool:
        """Whether random numbers were drawn since."""
        same = all(torch.equal(torch.cuda.get_rng_state(device), state) for device, state in self.device_rng)
        return self.rng is not None and not (torch.equal(torch.get_rng_state(), self.rng) and same)

    def seed(self) -> None:
        """Set the generators to where they were at the call."""
        if self.rng is not None:
            torch.set_rng_state(self.rng)
        for device, state in self.device_rng:
            torch.cuda.set_rng_state(state, device)


class Slot:
    """The place for the last call of one model, which is held weakly."""

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        self.kept: Kept | None = None
        self.frozen = False
        """It is the one to be looked into: calls that follow do not take its place."""
        self.running = False
        """The call is being made once more: it is nobody's pass."""
        self._draws: bool | None = None
        """Whether the model draws random numbers; None: not known yet."""
        self._looks = 0

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is called."""
        if not self.frozen:
            self.kept = None
            if sum(tensor.nbytes for tensor in leaves((args, kwargs))) <= BATCH_BYTES:
                self.kept = Kept(args, kwargs, draws=self._draws is not False)

    def returned(self, output: object) -> None:
        """And returned."""
        if self.kept is None or self.frozen:
            return
        self.kept.returned(output)
        if self._draws is None:
            self._draws = True if self.kept.drawn else None
            self._looks += 1
            if self._looks == LOOKS and self._draws is None:
                self._draws = False

    def release(self) -> None:
        """Let go of it."""
        self.kept, self.frozen = None, False


def _holder(held: dict[int, Tensor], place: int) -> Any:
    @unserializable_hook  # type: ignore[untyped-decorator]
    def hold(gradient: Tensor) -> None:
        held[place] = gradient

    return hold


def leaves(value: object) -> list[Tensor]:
    """Tensors in it, the first few, in order."""
    found: list[Tensor] = []
    for tensor in _tensors(value, DEPTH):
        found.append(tensor)
        if len(found) == LEAVES:
            break
    return found


def named(value: object, name: str, depth: int = DEPTH) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor): `args[0]`, `kwargs['labels']`."""
    if isinstance(value, Tensor):
        yield name, value
    elif depth and isinstance(value, Mapping):
        for key, one in value.items():
            yield from named(one, f"{name}[{key!r}]", depth - 1)
    elif depth and isinstance(value, list | tuple):
        for place, one in enumerate(value):
            yield from named(one, f"{name}[{place}]", depth - 1)


def differentiable(output: object) -> list[Tensor]:
    """Outputs of a model that a gradient comes back to."""
    return [tensor for tensor in leaves(output) if tensor.requires_grad]


def _tensors(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one, depth - 1)
    elif depth and hasattr(value, "__dataclass_fields__"):  # outputs of some libraries' models
        for one in vars(value).values():
            yield from _tensors(one, depth - 1)


def _of_devices(args: Any, kwargs: Any) -> list[tuple[torch.device, Tensor]]:
    devices = {tensor.device for tensor in leaves((args, kwargs)) if tensor.is_cuda}
    return [(device, torch.cuda.get_rng_state(device)) for device in devices]


def _autocast() -> tuple[tuple[str, torch.dtype], ...]:
    """(kind of device, dtype) that autocast is on for."""
    if not torch._C._is_any_autocast_enabled():
        return ()
    kinds = ("cpu", "cuda")
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind))
