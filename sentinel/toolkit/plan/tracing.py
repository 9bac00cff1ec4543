"""Traces a module as a subject: one forward and backward on fake tensors, with the memory of each tensor counted.

Fake tensors have shape, type and device, but no bytes: a model of 70 B parameters can be traced on a laptop.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from sentinel.errors import ConfigError
from sentinel.toolkit.plan.recipe import Precision
from sentinel.toolkit.plan.subject import Point, Profile, Subject

_SOURCE = "one step on fake tensors, each operation's storages counted"


_CONVOLUTIONS = {torch.ops.aten.convolution, torch.ops.aten.convolution_backward}
"""Operations that copy their operands into the layout of oneDNN or cuDNN while they run."""


class TensorAccounting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages that operations made and that are still held."""

    def __init__(self, known: list[Tensor], moment: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self._moment = moment
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        for tensor in made:
            self._count(tensor.untyped_storage())
        self._moment(self.now + (_size(list(args)) if func.overloadpacket in _CONVOLUTIONS else 0))
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._live or key in self._known:
            return

        def forget(_: object) -> None:
            del self._live[key]
            self.now -= size

        self._live[key] = weakref.ref(storage, forget)
        self.now += size


def subject(build: Callable[[], Any], name: str, precision: Precision, *, inputs: tuple[Tensor, ...] = ()) -> Subject:
    """Return a builder's model as a subject, with the profile of a step.

    `build` returns a module, or (module, inputs): a tuple or a dict of tensors, the batch first. Raises ConfigError
    with the reason if it cannot be traced.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        with _default_type(precision):
            model, given = _build_model(build, name)
        if given is None and inputs:
            given = tuple(torch.empty_like(tensor, device="cpu") for tensor in inputs)
        return _trace_model(model, given, name, precision)


def _size(values: list[Any]) -> int:
    return sum(value.untyped_storage().nbytes() for value in values if isinstance(value, Tensor))


def load(target: str) -> Callable[[], Any]:
    """Return `my.module:build_model` as a callable. The working directory is searched first, as with `python -m`."""
    module, _, attribute = target.partition(":")
    if not module or not attribute:
        raise ConfigError(f"{target!r}: write it as my.module:build_model")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), attribute)
    except AttributeError:
        raise ConfigError(f"{target!r}: module {module} has no {attribute}") from None
    except Exception as error:
        raise ConfigError(f"{target!r} cannot be imported: {type(error).__name__}: {error}") from None
    if not callable(found):
        raise ConfigError(f"{target!r} is a {type(found).__name__}: name a function that returns the model")
    return found  # type: ignore[no-any-return]


def _build_model(build: Callable[[], Any], name: str) -> tuple[nn.Module, Any]:
    try:
        made = build()
    except Exception as error:
        raise ConfigError(
            f"{name} does not build on fake tensors ({type(error).__name__}: {error}); "
            "it must not load weights or read values"
        ) from None
    model, given = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{name} returned a {type(model).__name__}: a torch module, or (module, inputs), is wanted")
    return model.train(), given


@contextlib.contextmanager
def _default_type(precision: Precision) -> Iterator[None]:
    """Set the precision's type as the default of tensors for the builder."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if precision.weight == 2 else torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _trace_model(model: nn.Module, given: Any, name: str, precision: Precision) -> Subject:
    weights = list({id(p): p for p in model.parameters()}.values())
    blocks = list_repeated(model)
    inside = {id(p) for block in blocks for p in block.parameters()}
    plain = checkpointed = None
    batch = _batch(given)
    if batch:
        plain = _profile(model, given, batch, precision, name)
        if blocks:
            with _checkpointing(blocks):
                checkpointed = _profile(model, given, batch, precision, name)
    matrices = [m.weight.numel() for block in blocks for m in block.modules() if isinstance(m, nn.Linear)]
    units = [sum(p.numel() for p in block.parameters()) for block in blocks]
    notes = [] if batch else [f"{name} gave no inputs: return (module, inputs), or say --input 8x128:int64"]
    return Subject(
        name=name,
        parameters=sum(p.numel() for p in weights),
        trainable=sum(p.numel() for p in weights if p.requires_grad),
        buffers=sum(b.untyped_storage().nbytes() for b in model.buffers()),
        unit=max(units, default=0),
        rest=sum(p.numel() for p in weights if id(p) not in inside),
        largest=max((p.numel() for p in weights if p.requires_grad), default=0),
        linear=sum(matrices),
        largest_linear=max(matrices, default=0),
        tokens=_tokens(given),
        plain=plain,
        checkpointed=checkpointed,
        notes=tuple(notes),
    )


def list_repeated(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of the model: of its lists of modules of one class, the one with most parameters."""
    found: list[list[nn.Module]] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            by_type: dict[type, list[nn.Module]] = {}
            for child in module.children():
                by_type.setdefault(type(child), []).append(child)
            found += [group for group in by_type.values() if len(group) > 1 and any(group[0].children())]
    return max(found, key=lambda group: sum(p.numel() for m in group for p in m.parameters()), default=[])


@contextlib.contextmanager
def _checkpointing(blocks: list[nn.Module]) -> Iterator[None]:
    from torch.utils.checkpoint import checkpoint

    def wrap_forward(forward: Any) -> Any:
        # Without the random state: fake tensors have none, and its 5 kB are not worth a special case.
        return lambda *a, **k: checkpoint(forward, *a, use_reentrant=False, preserve_rng_state=False, **k)

    for block in blocks:
        block.forward = wrap_forward(block.forward)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _profile(model: nn.Module, given: Any, batch: int, precision: Precision, name: str) -> Profile:
    """Return the profile of one step: what it holds, moment by moment, with the batch and with twice as many samples.

    What both hold is as much for any number of samples. All is taken to grow with them where no such batch can be made.
    """
    try:
        once = _trace_step(model, given, precision)
    except Exception as error:
        raise ConfigError(f"{name} cannot take a step on fake tensors: {type(error).__name__}: {error}") from None
    try:
        twice = _trace_step(model, _double(given, batch), precision)
    except Exception:
        twice = []
    if len(twice) != len(once):
        twice = [(ready, 2 * held) for ready, held in once]
    total = sum(p.untyped_storage().nbytes() for p in model.parameters() if p.requires_grad)
    highest: dict[tuple[int, int], int] = {}
    for (ready, held), (_, more) in zip(once, twice, strict=True):
        growing = min(max(more - held, 0), held)
        key = ready, held - growing
        highest[key] = max(highest.get(key, 0), growing)
    points = tuple(
        Point(growing / batch, ready / total if total else 1.0, fixed)
        for (ready, fixed), growing in sorted(highest.items())
    )
    return Profile(points=points, formula="traced bytes of one sample", source=_SOURCE)


def _trace_step(model: nn.Module, given: Any, precision: Precision) -> list[tuple[int, int]]:
    """Make one step, with each tensor that its operations make counted while it is held. Return for each operation the
    bytes of the gradients that are ready by then, and the bytes of all else."""
    trained = [p for p in model.parameters() if p.requires_grad]
    ready = 0
    moments: list[tuple[int, int]] = []

    def count_gradient(parameter: Tensor) -> None:
        nonlocal ready
        assert parameter.grad is not None
        ready += parameter.grad.untyped_storage().nbytes()

    known = [*model.parameters(), *model.buffers(), *(t for t in tree_leaves(given) if isinstance(t, Tensor))]
    hooks = [p.register_post_accumulate_grad_hook(count_gradient) for p in trained]  # type: ignore[no-untyped-call]
    try:
        with TensorAccounting(known, lambda now: moments.append((ready, now - ready))):
            # Its copies of weights are released at its end, unless the backward pass needs them.
            with _autocast(precision):
                loss = _loss(_forward(model, given))
            loss.backward()  # type: ignore[no-untyped-call]
    finally:
        for hook in hooks:
            hook.remove()
        for p in trained:
            p.grad = None
    return moments


def _double(given: Any, batch: int) -> Any:
    """Return inputs of twice as many samples."""

    def double(value: Any) -> Any:
        has_samples = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == batch
        return torch.cat([value, value]) if has_samples else value

    return tree_map(double, given)


def _autocast(precision: Precision) -> Any:
    if precision.name == "amp":
        return torch.autocast("cpu", torch.bfloat16)
    return contextlib.nullcontext()


def _forward(model: nn.Module, given: Any) -> Any:
    if isinstance(given, dict):
        return model(**given)
    return model(*given) if isinstance(given, tuple | list) else model(given)


def _loss(output: Any) -> Tensor:
    """Return the output's loss, or the output if it is a scalar; otherwise its sum, which needs the same gradients."""
    found = getattr(output, "loss", None)
    if isinstance(found, Tensor):
        return found
    tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    if not tensors:
        raise ConfigError("its output has no tensor that leads to a gradient")
    return tensors[0] if tensors[0].dim() == 0 else tensors[0].float().sum()


def _batch(given: Any) -> int:
    tensors = [t for t in tree_leaves(given) if isinstance(t, Tensor) and t.dim() > 0]
    return tensors[0].shape[0] if tensors else 0


def _tokens(given: Any) -> int:
    """Return the length of a sample of integers (tokens), or 1; used for the time of computing."""
    tensors = [t for t in tree_leaves(given) if isinstance(t, Tensor) and not t.is_floating_point() and t.dim() == 2]
    return tensors[0].shape[1] if tensors else 1
