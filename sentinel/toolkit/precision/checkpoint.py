"""Reads a checkpoint file as magnitudes: torch's own format, without running code in it, and safetensors."""

from __future__ import annotations

import json
import math
import mmap
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sentinel.errors import ConfigError
from sentinel.toolkit.precision import advice
from sentinel.toolkit.precision.magnitudes import LOST, Magnitudes

_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module", "net")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optimizer_states", "optim")
_HEADER = 100 * 1024 * 1024
_PIECE = 1 << 22
_SAFE = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def read(path: Path) -> list[advice.Tensor]:
    """Return the floating-point tensors of a checkpoint, with typical gradients and updates if it has Adam's state.

    Raises ConfigError for no file, an unknown format, a damaged file, or one that would run code.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    content = _safetensors(path) if path.suffix == ".safetensors" else _torch(path)
    weights = {name: t for name, t in _weights(content).items() if t.is_floating_point() and t.numel()}
    if not weights:
        raise ConfigError(f"{path}: holds no floating-point tensors by name")
    states = dict(_states(content, list(weights.values())))
    return [_tensor(name, weight, states.get(at)) for at, (name, weight) in enumerate(weights.items())]


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
        raise ConfigError(
            f"{path}: not a checkpoint that can be read without running what is in it "
            f"({type(error).__name__}: {''.join(first)[:160]})"
        ) from None


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
    if isinstance(content, Mapping):
        for key in _MODEL_KEYS:
            if isinstance(content.get(key), Mapping):
                return _weights(content[key])
        return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    return {}


def _states(content: Any, weights: list[Tensor]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (position of a weight, Adam's state of it). Each group has its parameters in the model's order."""
    found = (
        next((content[key] for key in _OPTIMIZER_KEYS if key in content), None) if isinstance(content, dict) else None
    )
    found = found[0] if isinstance(found, list) and found else found
    if not isinstance(found, dict) or not isinstance(found.get("state"), dict):
        return
    taken: set[int] = set()
    for group in found.get("param_groups", ()):
        at = 0
        for number in group.get("params", ()):
            state = found["state"].get(number)
            moments = [state.get(name) for name in ("exp_avg", "exp_avg_sq")] if isinstance(state, dict) else []
            if not moments or not all(isinstance(moment, Tensor) for moment in moments):  # Adafactor has no first one
                continue
            shape = state["exp_avg_sq"].shape
            free = (n for n in range(at, len(weights)) if n not in taken)
            match = next((n for n in free if weights[n].shape == shape), None)
            if match is not None:
                taken.add(match)
                at = match + 1
                yield match, {**state, "group": group}


def _tensor(name: str, weight: Tensor, state: dict[str, Any] | None) -> advice.Tensor:
    gradients = lost = None
    if state is not None:
        first, second = state["exp_avg"].float(), state["exp_avg_sq"].float()
        beta1, beta2 = (float(beta) for beta in state["group"].get("betas", (0.9, 0.999)))
        step = max(1.0, float(state.get("step", 1000)))
        typical = (second / (1 - beta2**step)).sqrt()
        gradients = _magnitudes(typical)
        rate, eps = float(state["group"].get("lr", 0.0)), float(state["group"].get("eps", 1e-8))
        update = rate * (first / (1 - beta1**step)) / (typical + eps)
        lost = float((update.abs() < weight.float().abs() * LOST).float().mean()) if rate else None
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
