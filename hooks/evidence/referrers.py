"""Finds what holds an object, by name and place: a variable, an attribute, a local, a closure.

The garbage collector is asked what refers to the object, which looks at all objects each time: 20 to 60 ms. Each such
query is one step of the generator, so that a training loop can go on in between. Locals of functions are not among the
referrers; they are looked for in the frames of all threads.

Graphs of earlier losses, which `total += loss` keeps alive, are found by marks instead, for `sentinel doctor`: the node
at which a backward pass begins is marked with the number of its step, in the dictionary that autograd has for each
node. The mark keeps nothing alive. A variable that reaches the marks of two earlier steps keeps a history.
"""

from __future__ import annotations

import gc
import itertools
import sys
import types
from collections import deque
from collections.abc import Generator, Iterator
from typing import Any

from torch import Tensor, nn

from sentinel.hooks.evidence.nonfinite_trace import library

DEPTH = 5
QUESTIONS = 8
"""Most queries to the garbage collector for one name."""
_CONTAINERS = (dict, list, tuple, set, frozenset)
_OURS = 3
"""References to a frame's dictionary of variables: the frame's, our name for it, and the query itself."""
_MARK = "sentinel.step"
_NODES = 10_000
"""Most nodes of one walk: a sum over some hundred steps is shorter."""
_ENTRIES = 64
"""Number of newest entries of a container that are looked into."""
_LEAST = 2
"""Fewest earlier steps that count as a history.

Any loop holds the loss of one: its variable is written again only after the next forward pass.
"""


def is_a(value: Any, *kinds: type) -> bool:
    """Test the real type: to `isinstance`, an object may give any answer, or warn."""
    return issubclass(type(value), kinds)


def attributes(value: Any) -> dict[str, Any] | None:
    """Return the `__dict__` of a plain object; None for a type, a module or another kind of object."""
    plain: Any = object.__getattribute__
    if type(value).__getattribute__ is not plain or is_a(value, type, types.ModuleType):
        return None
    held = getattr(value, "__dict__", None)
    return held if type(held) is dict else None


def name_of(target: Any) -> Generator[None, None, tuple[str, str]]:
    """Return (name, `file:line` where there is one) of what holds the target; empty if not found. Yields once per
    query."""
    questions = QUESTIONS
    waiting: list[tuple[Any, str]] = [(target, "")]
    seen = {id(target)}
    for _ in range(DEPTH):
        for held, rest in waiting:
            if (found := _local(held)) is not None:
                return f"{found[0]}{rest}, {found[1]}", found[2]
        above: list[tuple[Any, str]] = []
        for held, rest in waiting:
            if questions <= 0:
                return "", ""
            questions -= 1
            yield
            for holder in _referrers(held, [waiting, above]):
                if id(holder) in seen:
                    continue
                seen.add(id(holder))
                if (named := _owner(holder, held)) is not None:
                    return f"{named[0]}{rest}, {named[1]}", named[2]
                if is_a(holder, *_CONTAINERS):
                    above.append((holder, _place(holder, held) + rest))
        waiting = above[:4]
    return "", ""


def find_hooked_module(function: Any, models: list[nn.Module]) -> str:
    """Return the module that has this function as a forward hook; empty if there is none."""
    for model in models:
        for name, module in model.named_modules():
            if any(one is function for one in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())):
                return name or "the model"
    return ""


def frames() -> Iterator[types.FrameType]:
    """Yield the frames of all threads, without PyTorch's and ours."""
    for frame in sys._current_frames().values():
        here: types.FrameType | None = frame
        while here is not None:
            if not library(here.f_code.co_filename):
                yield here
            here = here.f_back


def locals_of(frame: types.FrameType) -> dict[str, Any]:
    """Copy the frame's variables. Before Python 3.13 reading them makes the frame keep their values alive."""
    values = frame.f_locals
    copied = dict(values)
    function = frame.f_code.co_flags & 1 and type(values) is dict  # CO_OPTIMIZED; a module's are its globals
    # Code that called `locals()` there has this same dictionary, and a debugger writes it back into the variables.
    if function and sys.getrefcount(values) <= _OURS and frame.f_trace is None:
        values.clear()
    return copied


def _local(held: Any) -> tuple[str, str, str] | None:
    for frame in frames():
        for name, value in locals_of(frame).items():
            if value is held:
                return name, *describe_frame(frame)
    return None


def describe_frame(frame: types.FrameType) -> tuple[str, str]:
    """Describe what a variable of this frame is, and where the frame is."""
    line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    if frame.f_code.co_name == "<module>":
        return f"a variable of module {frame.f_globals.get('__name__', '')}", line
    return f"a local of {frame.f_code.co_qualname}", line


def _referrers(held: Any, own: list[Any]) -> list[Any]:
    ours = {id(own), *map(id, own)}
    found = gc.get_referrers(held)
    return [one for one in found if id(one) not in ours and not is_a(one, types.FrameType, types.GeneratorType)]


def _owner(holder: Any, held: Any) -> tuple[str, str, str] | None:
    """Return (name, what that is, line) if `holder` has a name for the object; else None."""
    if is_a(holder, dict):
        name = next((key for key, value in holder.items() if value is held), None)
        for owner in gc.get_referrers(holder) if isinstance(name, str) else ():
            if is_a(owner, types.ModuleType) and vars(owner) is holder:
                return str(name), f"a variable of module {owner.__name__}", ""
            if (is_a(owner, type) and owner.__dict__.get(name) is held) or attributes(owner) is holder:
                return _attribute(owner, str(name))
        return None
    if is_a(holder, types.CellType):
        return _closure(holder)
    if is_a(holder, tuple):
        for function in gc.get_referrers(holder):
            if is_a(function, types.FunctionType) and function.__defaults__ is holder:
                return "a default argument", f"of {function.__qualname__}", _find_definition(function)
        return None
    if (values := attributes(holder)) is not None:  # the dict is made on access
        name = next((key for key, value in values.items() if value is held), None)
        return _attribute(holder, name) if name is not None else None
    return None


def _attribute(owner: Any, name: str) -> tuple[str, str, str]:
    if isinstance(owner, type):
        return f"{owner.__name__}.{name}", f"an attribute of class {owner.__module__}.{owner.__qualname__}", ""
    kind = type(owner)
    called = vars(kind).get("forward" if isinstance(owner, nn.Module) else "__call__")
    line = _find_definition(called) if isinstance(called, types.FunctionType) else ""
    return f"{kind.__name__}.{name}", f"an attribute of a {kind.__module__}.{kind.__qualname__}", line


def _closure(cell: types.CellType) -> tuple[str, str, str] | None:
    for closure in gc.get_referrers(cell):
        if is_a(closure, tuple):
            for function in gc.get_referrers(closure):
                if is_a(function, types.FunctionType) and function.__closure__ is closure:
                    place = next(place for place, one in enumerate(closure) if one is cell)
                    name = function.__code__.co_freevars[place]
                    return name, f"in the closure of {function.__qualname__}", _find_definition(function)
    return None


def _find_definition(function: types.FunctionType) -> str:
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"


def _place(holder: Any, held: Any) -> str:
    if is_a(holder, dict):
        return next((f"[{key!r}]" for key, value in holder.items() if value is held), "[...]")
    return "[...]"


def mark_loss(loss: Tensor, step: int) -> None:
    """Mark the graph of a loss with its step, also that of the loss before division or scaling."""
    node: Any = loss.grad_fn
    while node is not None:
        node.metadata[_MARK] = step
        scaled = type(node).__name__.startswith(("Div", "Mul"))
        node = next((above for above, _ in node.next_functions if above is not None), None) if scaled else None


def find_holder(step: int) -> dict[str, Any] | None:
    """Find a variable that keeps the losses of two earlier steps: its name, its place, and how many steps it keeps."""
    for frame in frames():
        for name, value in _name_values(locals_of(frame)):
            steps = {found for tensor in _list_tensors(value) for found in _find_steps(tensor)} - {step}
            if len(steps) >= _LEAST:
                what, line = describe_frame(frame)
                return {"name": name, "what": what, "file": line.rpartition(":")[0], "steps": len(steps)}
    return None


def _name_values(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield variables, and the attributes of what they hold."""
    for name, value in values.items():
        yield name, value
        for attribute, inner in list((attributes(value) or {}).items()):
            yield f"{name}.{attribute}", inner


def _list_tensors(value: Any) -> list[Tensor]:
    if is_a(value, Tensor):
        return [value]
    newest: Any = ()
    if is_a(value, list, tuple, deque):
        newest = itertools.islice(reversed(value), _ENTRIES)
    elif is_a(value, dict):
        newest = itertools.islice(reversed(value.values()), _ENTRIES)
    return [one for one in newest if is_a(one, Tensor)]


def _find_steps(tensor: Tensor) -> set[int]:
    """Return the steps whose losses the tensor's graph reaches; the graph is not followed beyond them."""
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
