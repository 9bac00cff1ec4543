"""`sentinel memory`: a snapshot of the CUDA caching allocator, read for people."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import click
import msgspec

from sentinel import plain_json
from sentinel.allocator.findings import Finding, findings
from sentinel.allocator.occupancy import Occupancy, occupancies, picture
from sentinel.allocator.reading import Snapshot, read
from sentinel.allocator.stacks import Growth, Holder, growing, holders
from sentinel.cli.options import json_option
from sentinel.planning.quantity import readable

_BAR = 56
_SEGMENTS = 8
"""Lines of the map."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("snapshots", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--top", type=click.IntRange(1, 1000), default=5, show_default=True, help="Allocation stacks to show.")
@click.option(
    "--frames", type=click.IntRange(1, 64), default=3, show_default=True, help="Stack frames to show of each stack."
)
@json_option()
@click.pass_context
def memory(ctx: click.Context, /, snapshots: tuple[Path, ...], top: int, frames: int, as_json: bool) -> None:
    """Show what fills a GPU: fragmentation, the largest stacks, and of several SNAPSHOTS what grew.

    A snapshot is what torch.cuda.memory._dump_snapshot("snapshot.pickle") wrote. Several are taken to be in order
    of time. Nothing in a snapshot is run.

    Exit code 0: nothing to fix; 1: there is.

    \b
    Example:  sentinel memory snapshot.pickle
              sentinel memory step100.pickle step200.pickle step300.pickle
    """
    read_in = [read(path) for path in snapshots]
    growth = growing(read_in) if len(read_in) > 1 else []
    found = findings(read_in, growth)
    if as_json:
        click.echo(plain_json.text(_content(read_in, growth, found, top)))
    else:
        click.echo("\n".join(_page(read_in, growth, found, top, frames)))
    ctx.exit(1 if any(finding.severity == "warning" for finding in found) else 0)


def _content(snapshots: list[Snapshot], growth: list[Growth], found: list[Finding], top: int) -> dict[str, Any]:
    return {
        "snapshots": [
            {
                "file": snapshot.file,
                "gpus": [
                    {**msgspec.to_builtins(gpu), "fragmentation": gpu.fragmentation} for gpu in occupancies(snapshot)
                ],
            }
            for snapshot in snapshots
        ],
        "stacks": [_builtins(holder) for holder in holders(snapshots[-1])[:top]],
        "growth": [_builtins(grown) for grown in growth[:top]],
        "findings": msgspec.to_builtins(found),
    }


def _builtins(held: Holder | Growth) -> dict[str, Any]:
    return {"place": held.place, **msgspec.to_builtins(held)}


def _page(snapshots: list[Snapshot], growth: list[Growth], found: list[Finding], top: int, frames: int) -> list[str]:
    last = snapshots[-1]
    lines: list[str] = []
    for gpu in occupancies(last):
        lines += _gpu(gpu)
        lines += _map([pair for pair in picture([s for s in last.segments if s.device == gpu.device], _BAR)])
    if not last.segments:
        lines.append(f"{last.file}: nothing is reserved on any GPU")
    lines += ["", "largest holders"] if last.recorded else []
    for holder in holders(last)[:top] if last.recorded else ():
        lines += _stack(f"{readable(holder.bytes):>9} in {holder.blocks} blocks", holder.stack, frames)
    lines += ["", "growing"] if growth else []
    for grown in growth[:top]:
        lines += _stack(" -> ".join(readable(size) for size in grown.bytes[-4:]), grown.stack, frames)
    lines += ["", "findings"] if found else ["", "nothing to fix"]
    for finding in found:
        lines += _wrapped(f"  {finding.severity:<9}", finding.what)
        lines += _wrapped("  do       ", finding.do)
    return lines


def _gpu(gpu: Occupancy) -> list[str]:
    pools = f", {readable(gpu.private)} in private pools" if gpu.private else ""
    return [
        f"GPU {gpu.device}: {readable(gpu.reserved)} reserved in {gpu.segments} segments{pools}",
        f"  live {readable(gpu.live)}, waiting {readable(gpu.waiting)}, free in pieces {readable(gpu.pieces)} "
        f"({gpu.fragmentation:.0%}),",
        f"  free whole {readable(gpu.whole)}; largest free block {readable(gpu.largest_free)}",
    ]


def _map(bars: list[tuple[Any, str]]) -> list[str]:
    lines = [f"  {readable(segment.size):>8} {'large' if segment.large else 'small'} |{bar}|" for segment, bar in bars]
    hidden = len(lines) - _SEGMENTS
    return lines[:_SEGMENTS] + ([f"  and {hidden} segments more that are torn less"] if hidden > 0 else [])


def _stack(title: str, stack: tuple[str, ...], frames: int) -> list[str]:
    own = [frame for frame in stack if frame.split(":")[0].endswith(".py")] or list(stack)
    return [f"  {title}", *(f"      {_short(frame)}" for frame in own[:frames] or ["no stack was recorded"])]


def _short(frame: str, width: int = 72) -> str:
    return frame if len(frame) <= width else "..." + frame[3 - width :]


def _wrapped(start: str, text: str) -> list[str]:
    return textwrap.wrap(text, 80, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False)
