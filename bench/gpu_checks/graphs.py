"""Checks CUDA graphs under watch: captured steps, graphed callables, reduce-overhead; each also with rollback armed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import sentinel
from bench.gpu_checks import Line
from bench.gpu_checks.loops import Loop, compare_states, deterministic, settle, toy
from bench.gpu_checks.quiet import profile_steps
from bench.gpu_checks.watched import watched
from sentinel import wire
from sentinel.hooks.torch_interop import tensors

REPLAYS = 8


def check(device: str) -> Iterator[Line]:
    deterministic()
    ways: dict[str, Callable[[Loop], Any]] = {"captured step": _capture_step if device == "cuda" else _pretend_capture}
    if device == "cuda":
        ways |= {"graphed callables": _graph_model, "reduce-overhead": _reduce_overhead}
    for name, way in ways.items():
        bare, again = _make_loop(device), _make_loop(device)
        kernels = {way(bare), way(again)}
        for armed in (False, True):
            seen = _make_loop(device)
            terms = {"rollback": sentinel.Rollback(every=1, keep=2, margin=1)} if armed else {}
            with watched(seen, every_step=True, **terms) as (daemon, _):
                launched = way(seen)
                settle(device)
            what = f"{name}, rollback armed" if armed else name
            yield compare_states(f"{what}: weights", bare, again, seen)
            if name == "captured step" and device == "cuda":
                usual = " or ".join(map(str, sorted(kernels)))
                figure = str(launched) if launched in kernels else f"{launched} against {usual}"
                yield Line(f"{what}: kernels of a replay", figure, launched in kernels and launched > 0)
            unseen = " ".join(daemon.of(wire.Hello)[-1].unseen)
            if name == "captured step":
                yield Line(f"{what}: said to be unseen", unseen or "nothing", "CUDA graph" in unseen)
            else:
                yield Line(f"{what}: steps that arrived", str(len(daemon.seqs())), len(daemon.seqs()) >= REPLAYS)


def _make_loop(device: str) -> Loop:
    capturable = {"capturable": True} if device == "cuda" else {}
    return Loop(device, **toy(device), optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-4, **capturable))


def _capture_step(loop: Loop) -> int:
    """Capture the whole step in one graph after a warm-up on a side stream, as torch's documentation does.

    Returns the kernels of a replay.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loop.run(3)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    loop.optimizer.zero_grad()
    with torch.cuda.graph(graph):
        loop.step()
    for _ in range(REPLAYS):
        graph.replay()
    return _kernels(lambda: graph.replay())


def _graph_model(loop: Loop) -> int:
    """Run steps with the forward and backward pass in graphs, and the optimizer outside."""
    loop.model = torch.cuda.make_graphed_callables(loop.model, (loop.data[0],))
    loop.run(REPLAYS)
    return 0


def _reduce_overhead(loop: Loop) -> int:
    whole, plain = torch.compile(loop.model, mode="reduce-overhead"), loop.model
    loop.model = whole
    for _ in range(REPLAYS):
        torch.compiler.cudagraph_mark_step_begin()
        loop.step()
    loop.model = plain
    return 0


def _pretend_capture(loop: Loop) -> int:
    """Run steps on the CPU while pretending that the stream is capturing."""

    loop.run(2)
    real = tensors.is_capturing
    tensors.is_capturing = lambda: True
    try:
        loop.run(2)
    finally:
        tensors.is_capturing = real
    return 0


def _kernels(replay: Callable[[], None]) -> int:
    class Replay:
        device = "cuda"

        def run(self, _: int) -> None:
            replay()

    found: int = profile_steps(Replay(), 1)["kernels"]
    return found
