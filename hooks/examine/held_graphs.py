"""Names that keep the graphs of earlier losses alive, as `total += loss` does.

The node that a backward pass begins at is marked with the number of its step, in the dictionary that autograd has for
each node: nothing is held by that. Who reaches the marks of two earlier steps keeps a history.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from sentinel.hooks.evidence.referrers import attributes, describe_frame, frames, is_a, locals_of

_MARK = "sentinel.step"
_NODES = 10_000
"""Of one walk: a sum over some hundred steps is shorter."""
_ENTRIES = 64
"""Of a container that is looked into, the newest."""
_LEAST = 2
"""Earlier steps. The loss of one is held by any loop: its variable is written again after the next forward pass."""


def mark_loss(loss: Tensor, step: int) -> None:
    """Note the step whose loss it is. Where it is divided or scaled for its backward pass, what it was before, too."""
    node: Any = loss.grad_fn
    while node is not None:
        node.metadata[_MARK] = step
        scaled = type(node).__name__.startswith(("Div", "Mul"))
        node = next((above for above, _ in node.next_functions if above is not None), None) if scaled else None


def find_holder(step: int) -> dict[str, Any] | None:
    """Who keeps the losses of two steps before this one: its name, where that is, and how many steps it keeps."""
    for frame in frames():
        for name, value in _names(locals_of(frame)):
            steps = {found for tensor in _tensors(value) for found in _steps(tensor)} - {step}
            if len(steps) >= _LEAST:
                what, line = describe_frame(frame)
                return {"name": name, "what": what, "file": line.rpartition(":")[0], "steps": len(steps)}
    return None


def _names(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Variables, and the attributes of what they hold."""
    for name, value in values.items():
        yield name, value
        for attribute, inner in list((attributes(value) or {}).items()):
            yield f"{name}.{attribute}", inner


def _tensors(value: Any) -> list[Tensor]:
    if is_a(value, Tensor):
        return [value]
    newest: Any = ()
    if is_a(value, list, tuple, deque):
        newest = itertools.islice(reversed(value), _ENTRIES)
    elif is_a(value, dict):
        newest = itertools.islice(reversed(value.values()), _ENTRIES)
    return [one for one in newest if is_a(one, Tensor)]


def _steps(tensor: Tensor) -> set[int]:
    """Whose losses its graph reaches; it is not followed beyond them."""
    waiting, seen, found = list[Any]([tensor.grad_fn]), set[Any](), set[int]()
    while waiting and len(seen) < _NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (step := node.metadata.get(_MARK)) is not None:
            found.add(step)
        else:
            waiting += [above for above, _ in node.next_functions]
    return found
