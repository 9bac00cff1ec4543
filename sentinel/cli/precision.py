"""`sentinel precision`: find fp16 and bf16 problems of a checkpoint or a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from sentinel.cli.history import find_history
from sentinel.cli.options import json_option
from sentinel.cli.plain import echo, wrap_text
from sentinel.errors import ConfigError
from sentinel.store import History
from sentinel.toolkit.advice import Advice
from sentinel.toolkit.plan.quantity import readable_count
from sentinel.toolkit.precision.advice import Tensor, findings
from sentinel.toolkit.precision.magnitudes import BFLOAT16, FLOAT16
from sentinel.web import json

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")


@click.command()
@click.argument("target")
@click.option("--top", type=click.IntRange(1, 10_000), default=10, show_default=True, help="Tensors to show.")
@json_option()
@click.pass_context
def precision(ctx: click.Context, /, target: str, top: int, as_json: bool) -> None:
    """Check a checkpoint or a run for fp16 and bf16 problems.

    TARGET is a checkpoint (.pt, .pth, .bin, .ckpt, .safetensors), which is read without running what is in it:
    weights that overflow or vanish, and with Adam's state typical gradients, the loss scale they need, and updates that
    bfloat16 weights would round away. Or it is a run: the same, from what its hooks sampled.

    Exit code 0: nothing to fix; 1: there is.

    \b
    Example:  sentinel precision checkpoint.pt
              sentinel precision train_gpt
    """
    if Path(target).suffix in _SUFFIXES:
        said, content = _checkpoint(Path(target), top)
    else:
        said, content = _run(target, top)
    worth = [msgspec.convert(finding, Advice) for finding in content["findings"]]
    echo(json.text(content) if as_json else "\n".join([*said, *_format_findings(worth)]))
    ctx.exit(1 if any(finding.severity != "info" for finding in worth) else 0)


def _checkpoint(path: Path, top: int) -> tuple[list[str], dict[str, Any]]:
    try:
        from sentinel.toolkit.precision import checkpoint
    except ImportError:
        raise ConfigError(f"{path}: reading it needs torch: pip install 'training-sentinel[torch]'") from None
    tensors = checkpoint.read(path)
    rows = sorted((_row(tensor) for tensor in tensors), key=lambda row: -row["worst"])
    return _table(rows[:top], len(rows)), {"tensors": rows, "findings": msgspec.to_builtins(findings(tensors))}


def _row(tensor: Tensor) -> dict[str, Any]:
    weights, gradients = tensor.weights, tensor.gradients
    row: dict[str, Any] = {
        "tensor": tensor.name,
        "dtype": tensor.dtype,
        "elements": weights.total,
        "nonfinite": weights.nonfinite,
        "fp16_zero": weights.share_under(FLOAT16.zero),
        "fp16_subnormal": weights.share_under(FLOAT16.normal) - weights.share_under(FLOAT16.zero),
        "fp16_overflow": weights.share_over(FLOAT16.overflow),
        "bf16_zero": weights.share_under(BFLOAT16.zero),
        "gradient_fp16_zero": gradients.share_under(FLOAT16.zero) if gradients else None,
        "lost_updates": tensor.lost,
    }
    shares = (row["fp16_zero"], row["fp16_overflow"], row["gradient_fp16_zero"] or 0.0, row["lost_updates"] or 0.0)
    return {**row, "worst": 2.0 if weights.nonfinite else max(shares)}


def _table(rows: list[dict[str, Any]], total: int) -> list[str]:
    lines = [f"{'tensor':<33}{'type':<12}{'weights':>9}{'to zero':>9}{'grads 0':>9}{'lost':>8}"]
    for row in rows:
        name = row["tensor"] if len(row["tensor"]) < 33 else "..." + row["tensor"][-29:]
        kind, size, zero = row["dtype"].removesuffix("fn"), readable_count(row["elements"]), row["fp16_zero"]
        if not row["elements"]:  # only the optimizer's state is known
            kind, size, zero = "-", "-", None
        shares = (zero, row["gradient_fp16_zero"], row["lost_updates"])
        cells = (size, *("-" if share is None else f"{share:.1%}" for share in shares))
        lines.append(f"{name:<33}{kind:<12}{cells[0]:>9}{cells[1]:>9}{cells[2]:>9}{cells[3]:>8}")
    hidden = f", {total - len(rows)} tensors more" if total > len(rows) else ""
    told = f"shares in float16 (weights, typical gradients) and of updates lost in bfloat16{hidden}"
    return ["".join(c if c.isprintable() else " " for c in line) for line in (*lines, *wrap_text("", told))]


def _run(name: str, top: int) -> tuple[list[str], dict[str, Any]]:
    from sentinel.toolkit.precision import living

    with History(find_history(name)) as history:
        audit = living.audit(history)
    lines = [f"{audit.run}, step {audit.step}: as its hooks sampled it"]
    lines += [f"  {what:<58}{value:.2%}" for what, value in audit.shares.items()]
    for what, rows in (("updates lost in", audit.lost), ("too small for float16 in", audit.tiny)):
        for layer, share in [row for row in rows if row[1] > 0][:top]:
            lines.append(f"  {f'{what} {layer}'[:57]:<58}{share:.1%}")
    for layer, size in audit.largest[:1]:
        lines.append(f"  {f'largest gradient, in {layer}'[:57]:<58}{size:.3g}")
    if audit.scale is not None:
        lines.append(f"  {f'steps withheld, with the loss scale {audit.scale:g}':<58}{audit.skipped:.2%}")
    return lines, {**msgspec.to_builtins(audit), "findings": msgspec.to_builtins(audit.findings)}


def _format_findings(worth: list[Advice]) -> list[str]:
    lines = [""] if worth else ["", "nothing to fix"]
    for finding in worth:
        for start, words in ((f"{finding.severity:<9} ", finding.what), ("  do      ", finding.do)):
            lines += wrap_text(start, words)
    return lines
