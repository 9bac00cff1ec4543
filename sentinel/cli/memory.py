"""`sentinel memory`: analyse snapshots of the CUDA caching allocator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from sentinel.cli.options import json_option
from sentinel.cli.plain import echo, wrap_text
from sentinel.text import format_bytes
from sentinel.toolkit.advice import Advice
from sentinel.toolkit.memory.findings import findings
from sentinel.toolkit.memory.occupancy import Occupancy, occupancies, picture
from sentinel.toolkit.memory.reading import AllocatorSnapshot, read
from sentinel.toolkit.memory.stacks import Growth, StackHolder, growing, holders, place, select_telling
from sentinel.toolkit.memory.timeline import TimelineMoment, peaks
from sentinel.web import json

_BAR, _FRAME = 56, 72
"""Characters of a picture of memory, and of a stack's frame."""
_SEGMENTS = 8
"""Most lines of a GPU's map."""


@click.command()
@click.argument("snapshots", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--top", type=click.IntRange(1, 1000), default=5, show_default=True, help="Allocation stacks to show.")
@click.option(
    "--frames", type=click.IntRange(1, 64), default=3, show_default=True, help="Stack frames to show of each stack."
)
@json_option()
@click.pass_context
def memory(ctx: click.Context, /, snapshots: tuple[Path, ...], top: int, frames: int, as_json: bool) -> None:
    """Show what fills a GPU: fragmentation, the largest stacks, and of several SNAPSHOTS what grew.

    A snapshot is what torch.cuda.memory._dump_snapshot("snapshot.pickle") wrote. Give several in the order of
    their times. Nothing in a snapshot is run.

    Exit code 0: nothing to fix; 1: there is.

    \b
    Example:  sentinel memory snapshot.pickle
              sentinel memory step100.pickle step200.pickle step300.pickle
    """
    read_in = [read(path) for path in snapshots]
    growth = growing(read_in) if len(read_in) > 1 else []
    found = findings(read_in, growth)
    if as_json:
        echo(json.text(describe_snapshots(read_in, growth, found, top)))
    else:
        echo("\n".join(_page(read_in, growth, found, top, frames)))
    ctx.exit(1 if any(finding.severity == "warning" for finding in found) else 0)


def describe_snapshots(
    snapshots: list[AllocatorSnapshot], growth: list[Growth], found: list[Advice], top: int
) -> dict[str, Any]:
    """Return what `--json` prints: `top` stacks of the last snapshot, and of what grew."""
    return {
        "snapshots": [{"file": snapshot.file, "gpus": _gpus(snapshot)} for snapshot in snapshots],
        "stacks": [_builtins(holder) for holder in holders(snapshots[-1])[:top]],
        "growth": [_builtins(grown) for grown in growth[:top]],
        "findings": msgspec.to_builtins(found),
    }


def _gpus(snapshot: AllocatorSnapshot) -> list[dict[str, Any]]:
    held = peaks(snapshot)
    return [
        {
            **msgspec.to_builtins(gpu),
            "fragmentation": gpu.fragmentation,
            "peak": msgspec.to_builtins(held.get(gpu.device)),
        }
        for gpu in occupancies(snapshot)
    ]


def _builtins(held: StackHolder | Growth) -> dict[str, Any]:
    return {"place": held.place, **msgspec.to_builtins(held)}


def _page(
    snapshots: list[AllocatorSnapshot], growth: list[Growth], found: list[Advice], top: int, frames: int
) -> list[str]:
    last = snapshots[-1]
    lines: list[str] = []
    held = peaks(last)
    for gpu in occupancies(last):
        lines += _gpu(gpu, held.get(gpu.device))
        lines += _map(picture([s for s in last.segments if s.device == gpu.device], _BAR))
    if not last.segments:
        lines.append(f"{last.file}: nothing is reserved on any GPU")
    lines += ["", "largest holders"] if last.recorded else []
    for holder in holders(last)[:top] if last.recorded else ():
        lines += _stack(f"{format_bytes(holder.bytes):>9} in {holder.blocks} blocks", holder.stack, frames)
    lines += ["", "growing"] if growth else []
    for grown in growth[:top]:
        lines += _stack(" -> ".join(format_bytes(size) for size in grown.bytes[-4:]), grown.stack, frames)
    lines += ["", "findings"] if found else ["", "nothing to fix"]
    for finding in found:
        lines += wrap_text(f"  {finding.severity:<9}", finding.what)
        lines += wrap_text("  do       ", finding.do)
    return lines


def _gpu(gpu: Occupancy, peak: TimelineMoment | None) -> list[str]:
    pools = f", {format_bytes(gpu.private)} in private pools" if gpu.private else ""
    return [
        f"GPU {gpu.device}: {format_bytes(gpu.reserved)} reserved in {gpu.segments} segments{pools}",
        f"  live {format_bytes(gpu.live)}, waiting {format_bytes(gpu.waiting)}, free in pieces "
        f"{format_bytes(gpu.pieces)} "
        f"({gpu.fragmentation:.0%}),",
        f"  free whole {format_bytes(gpu.whole)}; largest free block {format_bytes(gpu.largest_free)}",
        *([_at_peak(peak)] if peak is not None else []),
    ]


def _at_peak(peak: TimelineMoment) -> str:
    return (
        f"  at the peak: live {format_bytes(peak.live)} of {format_bytes(peak.reserved)} "
        f"({peak.live / max(peak.reserved, 1):.0%}), free in pieces {format_bytes(peak.pieces)}"
    )


def _map(bars: list[tuple[Any, str]]) -> list[str]:
    lines = [
        f"  {format_bytes(segment.size):>8} {'large' if segment.large else 'small'} |{bar}|" for segment, bar in bars
    ]
    hidden = len(lines) - _SEGMENTS
    return lines[:_SEGMENTS] + ([f"  and {hidden} segments more that are torn less"] if hidden > 0 else [])


def _stack(title: str, stack: tuple[str, ...], frames: int) -> list[str]:
    if not stack:
        return [f"  {title}", "      no stack was recorded"]
    where = place(stack)
    told = [where] if where not in stack else []  # a stack of C++ alone: what its thread does
    return [f"  {title}", *(f"      {_short(frame)}" for frame in (*told, *select_telling(stack))[:frames])]


def _short(frame: str) -> str:
    return frame if len(frame) <= _FRAME else "..." + frame[3 - _FRAME :]
