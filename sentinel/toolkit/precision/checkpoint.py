"""Reads a checkpoint file as magnitudes: torch's own format, without running code in it, and safetensors."""

from __future__ import annotations

import json
import math
import mmap
import re
import struct
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sentinel.errors import ConfigError
from sentinel.toolkit.precision import advice
from sentinel.toolkit.precision.magnitudes import LOST, Magnitudes

_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module", "net")
_BUFFERS = ("running_mean", "running_var")
"""Ends of the names of BatchNorm's statistics, which no optimizer has."""
_HEADER = 100 * 1024 * 1024
_PIECE = 1 << 22
_SAFE = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


class _AdamState(NamedTuple):
    """What Adam keeps of one parameter."""

    label: str
    """The parameter's name, if the optimizer has it; otherwise its number in the optimizer, in words."""
    group: Mapping[str, Any]
    moments: Mapping[str, Any]


def read(path: Path) -> list[advice.Tensor]:
    """Return the floating-point tensors of a checkpoint, with typical gradients and updates if it has Adam's state.

    Raises ConfigError for no file, an unknown format, a damaged file, or one that would run code.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    content = _safetensors(path) if path.suffix == ".safetensors" else _torch(path)
    weights = {name: t for name, t in _weights(content).items() if t.is_floating_point() and t.numel()}
    states = dict(_match(list(_states(content)), weights))
    if not weights and not states:
        raise ConfigError(f"{path}: holds no floating-point tensors by name")
    found = [_tensor(name, weight, states.pop(name, None)) for name, weight in weights.items()]
    unknown = torch.empty(0)
    return found + [_tensor(label, unknown, state) for label, state in states.items()]


def _torch(path: Path) -> Any:
    if zipfile.is_zipfile(path):
        try:
            with zipfile.ZipFile(path) as archive:
                entries = archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, EOFError) as error:
            raise ConfigError(f"{path}: a damaged archive ({str(error)[:160]}): not a checkpoint") from None
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ConfigError(f"{path}: a compressed archive; torch.save writes none, and none is unpacked")
        if sum(entry.file_size for entry in entries) > path.stat().st_size:
            raise ConfigError(f"{path}: says that it holds more than it does: not a checkpoint")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes can raise anything
        first = str(error).strip().splitlines()[:1]
        code = re.search(r"GLOBAL ([\w.]+) was not an allowed global", str(error))
        why = (
            f"it holds {code[1]}; save tensors, numbers and text alone"
            if code
            else f"{type(error).__name__}: {''.join(first)[:160]}"
        )
        raise ConfigError(f"{path}: not a checkpoint that can be read without running what is in it ({why})") from None


def _safetensors(path: Path) -> dict[str, Tensor]:
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(_HEADER, size - 8):
                raise ConfigError(f"{path}: a header of {length} bytes in a file of {size}: not safetensors")
            header = json.loads(file.read(length))
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        header.pop("__metadata__", None)
        return {str(name): _map_tensor(data, 8 + length, entry) for name, entry in header.items()}
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise ConfigError(f"{path}: not safetensors ({type(error).__name__}: {str(error)[:120]})") from None


def _map_tensor(data: mmap.mmap, start: int, entry: Mapping[str, Any]) -> Tensor:
    first, last = entry["data_offsets"]
    kind, shape = _SAFE[entry["dtype"]], [int(n) for n in entry["shape"]]
    count = math.prod(shape)
    if (
        not 0 <= first <= last <= len(data) - start
        or last - first != count * kind.itemsize
        or min(shape, default=0) < 0
    ):
        raise ValueError(f"offsets {first} to {last} do not hold {shape} of {entry['dtype']}")
    if not count:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(data, dtype=kind, count=count, offset=start + first).view(shape)


def _weights(content: Any) -> dict[str, Tensor]:
    """Return the tensors under a key of the model; else those of the checkpoint, or of the dictionaries in it."""
    if not isinstance(content, Mapping):
        return {}
    for key in _MODEL_KEYS:
        if isinstance(content.get(key), Mapping):
            return _weights(content[key])
    if own := _tensors(content):
        return own
    inner = {id(value): (key, _tensors(value)) for key, value in content.items() if isinstance(value, Mapping)}
    parts = [(key, tensors) for key, tensors in inner.values() if any(t.is_floating_point() for t in tensors.values())]
    if len(parts) == 1:
        return parts[0][1]
    return {f"{key}.{name}": tensor for key, tensors in parts for name, tensor in tensors.items()}


def _tensors(content: Mapping[Any, Any]) -> dict[str, Tensor]:
    return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}


def _states(content: Any) -> Iterator[_AdamState]:
    """Yield what the checkpoint's first optimizer keeps, as far as it is Adam's."""
    values = (content, *content.values()) if isinstance(content, Mapping) else ()
    firsts = (value[0] if isinstance(value, list) and value else value for value in values)
    found: Mapping[str, Any] = next((one for one in firsts if isinstance(one, Mapping) and "param_groups" in one), {})
    states = found.get("state")
    if not isinstance(states, Mapping):
        return
    for group in found["param_groups"]:
        numbers = group.get("params", ())
        for number, name in zip(numbers, group.get("param_names") or numbers, strict=False):
            state = states.get(number)
            if not isinstance(state, Mapping):
                continue
            if all(isinstance(state.get(moment), Tensor) for moment in ("exp_avg", "exp_avg_sq")):  # not Adafactor's
                label = name if isinstance(name, str) else f"parameter {number} of the optimizer"
                yield _AdamState(label, group, state)


def _match(states: list[_AdamState], weights: Mapping[str, Tensor]) -> Iterator[tuple[str, _AdamState]]:
    """Yield (name of a weight, the state of it), or the state's own label if its weight is not known.

    An optimizer without names has its parameters in the model's order, which says whose a state is only if each weight
    of that shape has a state, and all of these are in one group: frozen weights have none.
    """
    free: dict[torch.Size, dict[int, str]] = defaultdict(dict)  # tied weights have one state
    for name, weight in weights.items():
        if not name.endswith(_BUFFERS):
            free[weight.shape].setdefault(weight.data_ptr(), name)
    unnamed: dict[torch.Size, list[_AdamState]] = defaultdict(list)
    for state in states:
        shape = state.moments["exp_avg_sq"].shape
        if state.label in weights and weights[state.label].shape == shape:
            yield state.label, state
        else:
            unnamed[shape].append(state)
    for shape, alike in unnamed.items():
        names = free[shape].values()
        known = len(names) == len(alike) and len({id(state.group) for state in alike}) == 1
        yield from zip(names if known else [state.label for state in alike], alike, strict=True)


def _tensor(name: str, weight: Tensor, state: _AdamState | None) -> advice.Tensor:
    """Return what is known of a tensor; `weight` is empty if only the state is known."""
    gradients = lost = None
    if state is not None:
        first, second = state.moments["exp_avg"].float(), state.moments["exp_avg_sq"].float()
        beta1, beta2 = (float(beta) for beta in state.group.get("betas", (0.9, 0.999)))
        step = max(1.0, float(state.moments.get("step", 1000)))
        typical = (second / (1 - beta2**step)).sqrt()
        gradients = _magnitudes(typical)
        rate, eps = float(state.group.get("lr", 0.0)), float(state.group.get("eps", 1e-8))
        if rate and weight.numel():
            update = rate * (first / (1 - beta1**step)) / (typical + eps)
            lost = float((update.abs() < weight.float().abs() * LOST).float().mean())
    dtype = str(weight.dtype).removeprefix("torch.")
    return advice.Tensor(name=name, dtype=dtype, weights=_magnitudes(weight), gradients=gradients, lost=lost)


def _magnitudes(tensor: Tensor) -> Magnitudes:
    counts: dict[int, int] = {}
    zeros = nonfinite = 0
    for piece in tensor.reshape(-1).split(_PIECE):  # type: ignore[no-untyped-call]
        values = piece.double() if piece.dtype == torch.float64 else piece.float()
        finite = values[torch.isfinite(values)]
        nonfinite += values.numel() - finite.numel()
        alive = finite[finite != 0]
        zeros += finite.numel() - alive.numel()
        exponents, numbers = torch.frexp(alive).exponent.unique(return_counts=True)  # type: ignore[no-untyped-call]
        for exponent, number in zip(exponents.tolist(), numbers.tolist(), strict=True):
            counts[exponent - 1] = counts.get(exponent - 1, 0) + number
    return Magnitudes(counts=counts, zeros=zeros, nonfinite=nonfinite)
