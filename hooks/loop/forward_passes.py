"""Watches forward passes by hooks on the model's root: their time, whether they run in fp16, and the last call.

Of each model's last call, its arguments are kept by reference, and what is needed to make the same call again. They are
held from the call to the exit of the optimizer's step, a time in which the loop nearly always holds them itself; more
than `BATCH_BYTES` are not held. What another model made is held without its graph, which would keep that model's
activations, and the shapes that its parameters had. The gradients that came back to the outputs are held, too, unless
they exceed `GRADIENT_BYTES`: the loss function is the user's and cannot be called again, so a backward pass begins at
the outputs.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import get_ident
from time import perf_counter
from types import MemberDescriptorType
from typing import Any

import msgspec
import torch
from torch import Tensor, compiler, is_grad_enabled, nn
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from sentinel.hooks.loop.step_accumulator import StepAccumulator
from sentinel.hooks.torch_interop.internals import UncopiedHook, is_any_autocast_enabled, is_faking
from sentinel.hooks.torch_interop.layer_table import nbytes_of, unwrap_model
from sentinel.hooks.torch_interop.tensors import CUDA, is_capturing
from sentinel.wire.heartbeat_page import Work

ORIGIN = "where a value that is not finite came from"
"""What is not seen without a batch, as reported to the user."""
BATCH_BYTES = 256 * 1024 * 1024
GRADIENT_BYTES = 16 * 1024 * 1024
"""Most bytes of gradients held: those of a large vocabulary's logits are more, and would raise the peak of memory."""
FAST_SECONDS = 0.02
"""Seconds between two calls below which a loop is fast. There the hook of an output, 60 to 110 us in all, is measurable
(bench/overhead.py): gradients are held only in the first calls, and a constant stands for later ones."""
FIRST_CALLS = 256
LOOKS = 8
"""Calls that draw no random number, after which a model counts as drawing none. The state is 5 kB, 20 us."""
LEAVES = 16
"""Most tensors of a batch, or outputs of a model, that are examined."""
DEPTH = 4


class CapturedCall(msgspec.Struct):
    """One call of a model. Only the random number generator's state is copied."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: Sequence[Tensor]
    """The tensors in `args` and `kwargs`."""
    versions: Sequence[int]
    """Version counters of the inputs: each write into a tensor increments its counter."""
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    rng: Tensor | None = None
    """State of the random number generator; None where the model draws none."""
    device_rng: list[tuple[torch.device, Tensor]] = []
    gradients: dict[int, Tensor] = {}
    """Place among the differentiable outputs -> the last gradient that came back to it."""
    outputs: int = 0
    """Number of differentiable outputs whose gradients are held."""
    handles: list[RemovableHandle] | None = None
    """Of the hooks on these outputs."""

    @property
    def unchanged(self) -> bool:
        """Whether the batch has not been written to since the call."""
        return self.versions == [tensor._version for tensor in self.inputs]

    def hold_gradients(self, output: object) -> None:
        """Hold the gradients that will come back to the call's `output`, if they are small."""
        outputs = differentiable(output)
        if not outputs or _nbytes(outputs) > GRADIENT_BYTES:
            return
        self.outputs, self.handles, held = len(outputs), [], self.gradients
        for place, one in enumerate(outputs):
            if not one.is_leaf:  # the gradients of a parameter that is passed through are also those of other uses
                self.handles.append(one.register_hook(_Holder(held, place)))  # type: ignore[no-untyped-call]

    def release_gradients(self) -> None:
        """Remove the hooks on the outputs, which the loop may keep, as may the model: with them go the gradients."""
        for handle in self.handles or ():
            handle.remove()
        self.handles = None

    @property
    def drawn(self) -> bool:
        """Whether random numbers have been drawn since the call."""
        same = all(torch.equal(torch.cuda.get_rng_state(device), state) for device, state in self.device_rng)
        return self.rng is not None and not (torch.equal(torch.get_rng_state(), self.rng) and same)

    def seed(self) -> None:
        """Set the generators to their states at the call."""
        if self.rng is not None:
            torch.set_rng_state(self.rng)
        for device, state in self.device_rng:
            torch.cuda.set_rng_state(state, device)


def keep(
    args: tuple[Any, ...], kwargs: dict[str, Any], *, draws: bool = True, autocast: bool = True
) -> CapturedCall | None:
    """Return a call that begins now, to be kept. `draws`, `autocast`: whether the model may draw random numbers, and
    autocast may be on. None: its batch is too large, or from inference mode, where writes into it are not counted, or
    has a graph that cannot be left out."""
    inputs: Sequence[Tensor]
    try:
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor:  # nearly always so, and at every forward pass
            if args[0].requires_grad:
                args = (_without_graph(args[0]),)
            inputs, size, versions = args, nbytes_of(args[0]), [args[0]._version]
        else:
            inputs = leaves((args, kwargs))
            if len(inputs) == LEAVES or _have_graph(inputs):
                args, kwargs = _without_graph(args), _without_graph(kwargs)
                inputs = leaves((args, kwargs))
                if _have_graph(inputs):
                    return None
            size, versions = _nbytes(inputs), [tensor._version for tensor in inputs]
    except RuntimeError:
        if not any(tensor.is_inference() for tensor in leaves((args, kwargs))):
            raise
        return None
    if size > BATCH_BYTES:
        return None
    kept = CapturedCall(args, kwargs, inputs, versions)
    if autocast:
        kept.autocast = _autocast()
    if draws:
        kept.rng = torch.get_rng_state()
        kept.device_rng = _of_devices(inputs) if CUDA else []
    return kept


def _have_graph(tensors: Sequence[Tensor]) -> bool:
    return bool([tensor for tensor in tensors if tensor.requires_grad and not tensor.is_leaf])


def _without_graph(value: Any, depth: int = DEPTH) -> Any:
    """Return `value` with tensors that share memory and version counter with those in it, and have no graph. Tensors
    of other classes, and what objects of other classes hold, are left as they are: a copy would run the user's code."""
    kind = type(value)
    if kind is Tensor and not value.is_leaf:
        return value.detach().requires_grad_()
    if depth and (kind is tuple or kind is list):
        return kind([_without_graph(one, depth - 1) for one in value])
    if depth and kind is dict:
        return {key: _without_graph(one, depth - 1) for key, one in value.items()}
    return value


class CallSlot:
    """Holds the last call of one model. The model itself is held weakly."""

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        self.kept: CapturedCall | None = None
        """The last call."""
        self.frozen = False
        """Whether the call is kept to be examined: later calls do not replace it."""
        self.running = False
        """Whether we are repeating the call: then it is not a pass of the loop."""
        self.draws: bool | None = None
        """Whether the model draws random numbers; None: not known yet."""
        self.known = False
        """Whether the model has been called often enough to know its behaviour."""
        self.calls = 0
        """Number of calls with gradients since the last step."""
        self.returned_at = 0.0
        """Time at which it last returned (`time.perf_counter`)."""
        self._looks = self._calls = 0

    def record_return(self, output: object) -> None:
        """Record that the held call returned: one of the first, or one in a loop that is not fast."""
        kept = self.kept  # the sender's thread may release it meanwhile, where the watch ends by a fault
        if kept is None:
            return
        kept.hold_gradients(output)
        if self.draws is None:
            self.draws = True if kept.drawn else None
            self._looks += 1
            if self._looks == LOOKS and self.draws is None:
                self.draws = False
        self._calls += 1
        self.known = self._calls >= FIRST_CALLS

    def release(self) -> None:
        """Release the held call, if there is one."""
        if self.kept is not None:
            self.kept.release_gradients()
            self.kept = None

    def close(self) -> None:
        """Release the held call, and hold no other."""
        self.release()
        self.frozen = True


class _Holder:
    """Hook of an output: holds the gradient that comes back to it."""

    __slots__ = ("_held", "_place")
    __torch_unserializable__ = True
    """Set as `torch.utils.hooks.unserializable_hook` sets it on a function: so outputs can still be pickled."""

    def __init__(self, held: dict[int, Tensor], place: int) -> None:
        self._held, self._place = held, place

    def __call__(self, gradient: Tensor | None) -> None:
        if gradient is None:  # e.g. where a view of the output was written to
            return
        # With `create_graph=True` it has a graph that leads back to this hook: a cycle that gc does not find.
        self._held[self._place] = gradient.detach() if gradient.requires_grad else gradient


def leaves(value: object) -> list[Tensor]:
    """Return the tensors in `value`, the first `LEAVES` in order."""
    found: list[Tensor] = []
    _collect(value, DEPTH, found)
    return found


def name_tensors(value: object, name: str, depth: int = DEPTH) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for each tensor in `value`, with names such as `args[0]`, `kwargs['labels']`."""
    if isinstance(value, Tensor):
        yield name, value
    elif depth and (held := find_dict(value)) is not None:
        for key, one in dict.items(held):
            yield from name_tensors(one, f"{name}[{key!r}]", depth - 1)
    elif depth and isinstance(value, list | tuple):
        for place, one in enumerate(read_sequence(value)):
            yield from name_tensors(one, f"{name}[{place}]", depth - 1)
    elif depth:
        for field in _list_fields(value):
            yield from name_tensors(_read_field(value, field), f"{name}.{field}", depth - 1)


def differentiable(output: object) -> list[Tensor]:
    """Return the outputs of a model that a gradient comes back to."""
    return [tensor for tensor in leaves(output) if tensor.requires_grad]


def _collect(value: Any, depth: int, found: list[Tensor]) -> None:
    """Add the tensors in `value` to `found`. It runs at every forward pass: a generator, and isinstance of an abstract
    class, would cost several times as much."""
    if isinstance(value, Tensor):
        if len(found) < LEAVES:
            found.append(value)
        return
    kind = type(value)
    if depth == 0 or kind in _PLAIN:
        return
    if kind is tuple or kind is list:
        parts = value
    elif kind is dict:
        parts = value.values()
    elif (held := find_dict(value)) is not None:
        parts = dict.values(held)
    elif isinstance(value, list | tuple):
        parts = read_sequence(value)
    else:
        parts = [_read_field(value, field) for field in _list_fields(value)]
    for part in parts:
        _collect(part, depth - 1, found)


def find_dict(value: Any) -> dict[Any, Any] | None:
    """Return the dictionary that `value` is or, as a `UserDict` or a `TensorDict`, holds; to be read by methods of
    `dict`. A class of the user's may compute what it gives, and draw random numbers for it."""
    if isinstance(value, dict):
        return value
    if not isinstance(value, Mapping):
        return None
    held = _read_field(value, "data" if isinstance(value, UserDict) else "_tensordict")
    return held if isinstance(held, dict) else None


def read_sequence(value: list[Any] | tuple[Any, ...]) -> Iterator[Any]:
    """Iterate over what a list or tuple holds, without the methods of a class of the user's."""
    return list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value)


def _read_field(value: Any, field: str) -> Any:
    """Return what an object holds in a field, without the code of a property."""
    slot = getattr(type(value), field, None)
    try:
        if type(slot) is MemberDescriptorType:
            return slot.__get__(value)
        return object.__getattribute__(value, "__dict__").get(field)
    except AttributeError:  # not set yet
        return None


def _list_fields(value: object) -> Iterable[str]:
    """Return the fields of a data class, which may have slots in place of a dictionary; nothing for another object."""
    return getattr(type(value), "__dataclass_fields__", ())


_PLAIN = frozenset({int, float, str, bool, type(None)})


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(map(nbytes_of, tensors))


def _of_devices(inputs: Sequence[Tensor]) -> list[tuple[torch.device, Tensor]]:
    devices = {tensor.device for tensor in inputs if tensor.is_cuda}
    return [(device, torch.cuda.get_rng_state(device)) for device in devices]


def _autocast() -> tuple[tuple[str, torch.dtype], ...]:
    """Return (kind of device, dtype) for each kind that autocast is on for."""
    kinds = ("cpu", "cuda")
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind))


_FORWARD = Work.FORWARD


class ForwardHook:
    """A hook on a model's root. Copies of the model have none (`UncopiedHook`)."""

    def __init__(self, stopwatch: ForwardTimer) -> None:
        self.stopwatch = stopwatch

    def __reduce__(self) -> tuple[Any, ...]:
        # For a hook that torch's quantization moved to another module: the pickle must load where Sentinel is not
        # installed. `sys.audit` takes anything and returns None.
        return functools.partial, (sys.audit, "sentinel.copied_hook")


class _Begin(ForwardHook):
    def __call__(self, *called: object) -> None:
        # Inside a compiled graph this condition is a constant: the hook costs no graph break, and sees nothing.
        if not (is_dynamo_compiling() or compiler._is_compiling_flag):
            self.stopwatch.start(*called)


class _End(ForwardHook):
    def __call__(self, *called: object) -> None:
        if not (is_dynamo_compiling() or compiler._is_compiling_flag):
            self.stopwatch.stop(called[-1])


class ForwardTimer:
    """Times forward passes. It is called at each, without our code in the processor's caches, so small steps are
    written inline and not as functions."""

    def __init__(self, accumulator: StepAccumulator, device: str, slot: CallSlot | None) -> None:
        self._accumulator = weakref.ref(accumulator)
        self._device = device if _can_autocast(device) else ""
        self._begin = 0.0
        self._slot = slot
        self._keeps = False
        """Whether the slot holds the pass under way."""
        self._user_model: Callable[[], Any] = lambda: None
        """Returns the module inside the model's wrappers, whose mode counts; None before the first pass."""

    def start(self, model: Any, args: Any = (), kwargs: Any = None) -> None:
        """`kwargs`: None where torch's quantization moved the hook to another module, and forgot that it takes them."""
        slot, accumulator = self._slot, self._accumulator()
        if accumulator is None or (slot is not None and slot.running):
            return
        if get_ident() != accumulator.thread:
            if is_grad_enabled():
                accumulator.record_run_elsewhere()
            return
        self._keeps = False
        if is_faking():
            return
        if is_grad_enabled():
            # Lightning leaves DistributedDataParallel in evaluation mode after a validation, and its module not.
            user_model = self._user_model()
            if user_model is None:
                self._user_model = weakref.ref(user_model := unwrap_model(model))
            if not getattr(user_model, "training", True):
                accumulator.totals.evaluating = True
            elif accumulator.when_next is not None:  # an evaluation between the step and a scheduler's ends nothing
                accumulator.next_iteration()
            # Autocast that the model enters inside its own forward is not seen here.
            autocast = is_any_autocast_enabled()
            if autocast and self._device:
                fp16 = torch.is_autocast_enabled(self._device)
                if fp16 and torch.get_autocast_dtype(self._device) is torch.float16:
                    accumulator.totals.fp16 = True
            if slot is not None:
                slot.calls += 1
                try:
                    if not slot.frozen and not (CUDA and is_capturing()):
                        self._keeps, draws = kwargs is not None, slot.draws is not False
                        if slot.kept is not None:
                            slot.release()
                        slot.kept = keep(args, kwargs, draws=draws, autocast=autocast) if self._keeps else None
                        if accumulator.unseen.pausing:
                            accumulator.unseen.restore(ORIGIN)
                except Exception:
                    self._forget(accumulator)
        else:
            accumulator.ran_without_gradients()
        self._begin = perf_counter()

    def stop(self, output: object) -> None:
        now, begin, slot, accumulator = perf_counter(), self._begin, self._slot, self._accumulator()
        if accumulator is None or get_ident() != accumulator.thread:
            return
        self._begin = 0.0  # a forward that raises has no end, and the next one starts over
        if self._keeps and slot is not None and not slot.running:
            try:
                if (now - slot.returned_at >= FAST_SECONDS or not slot.known) and not (CUDA and is_capturing()):
                    slot.record_return(output)
                slot.returned_at = now
            except Exception:
                self._forget(accumulator)
        if begin:
            totals = accumulator.totals
            totals.forwards += 1
            totals.forward_seconds += now - begin
            accumulator.progress += 1
            accumulator.work = _FORWARD

    def _forget(self, accumulator: StepAccumulator) -> None:
        """Drop the batch of this pass after an exception; after an internal fault, keep none from now on."""
        slot, self._keeps = self._slot, False
        if slot is not None and not slot.frozen:
            slot.release()
        if accumulator.unseen.record_failure(
            ORIGIN, "keeping the batch", "a value that is not finite is not traced back"
        ):
            self._slot = None


@contextlib.contextmanager
def aside(callables: object) -> Iterator[None]:
    """Remove our hooks while the block runs: `make_graphed_callables` and `torch.jit.script` accept no module that has
    hooks. Other hooks stay."""
    given = callables if isinstance(callables, tuple) else (callables,)
    modules = [module for one in given if isinstance(one, nn.Module) for module in one.modules()]
    held: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for module in modules:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            held.append((hooks, dict(hooks)))
            for key in [key for key, hook in hooks.items() if isinstance(hook, ForwardHook)]:
                del hooks[key]
    try:
        yield
    finally:
        for hooks, before in held:
            hooks.clear()
            hooks.update(before)


def _can_autocast(device: str) -> bool:
    try:
        torch.is_autocast_enabled(device)
    except RuntimeError:  # a kind of device without autocast
        return False
    return True


def explain_no_hooks(model: nn.Module) -> str:
    """Return why no hooks are put on `model`; empty if they are."""
    if isinstance(model, torch.jit.ScriptModule):
        return "a ScriptModule takes no hooks"
    if isinstance(model, nn.TransformerEncoderLayer):  # its fused kernel gives other bits
        return "a TransformerEncoderLayer with hooks evaluates without its fused kernel"
    return ""


def watch(
    model: nn.Module, accumulator: StepAccumulator, slot: CallSlot | None, handles: list[RemovableHandle]
) -> None:
    """Time the forward passes of `model`, the object that the loop calls, wrapped or not. `slot`: for its last call.

    The handle of each hook is added to `handles` before the next is registered, which may fail.
    """
    first = next(model.parameters(), None)  # a module may have none yet, such as a loss with its own weights
    stopwatch = ForwardTimer(accumulator, first.device.type if first is not None else "cpu", slot)
    # Prepended, to run before FSDP's all-gather.
    before = model.register_forward_pre_hook(_Begin(stopwatch), prepend=True, with_kwargs=True)
    handles.append(UncopiedHook(before))
    handles.append(UncopiedHook(model.register_forward_hook(_End(stopwatch))))
