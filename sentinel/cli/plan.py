"""`sentinel plan`: estimate what a run needs of each GPU before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from sentinel.cli.options import json_option
from sentinel.cli.plain import echo, wrap_text
from sentinel.errors import ConfigError
from sentinel.text import format_bytes
from sentinel.toolkit.plan import configfile
from sentinel.toolkit.plan.quantity import parse_bytes, parse_count, readable_count
from sentinel.toolkit.plan.ranking import advice, rank_strategies
from sentinel.toolkit.plan.recipe import CARDS, OPTIMIZERS, PRECISIONS, Setup
from sentinel.toolkit.plan.strategies import Candidate
from sentinel.toolkit.plan.subject import Subject
from sentinel.toolkit.plan.transformer import Transformer
from sentinel.web import json

if TYPE_CHECKING:
    from torch import Tensor

_UNKNOWN_ADAPTERS = 0.01
"""Share of the parameters that LoRA adapters have, where the sizes of the layers are not known."""
_TYPES = ("float32", "float16", "bfloat16", "int64", "int32", "bool")


@click.command()
@click.argument("target", required=False)
@click.option("--params", metavar="N", help="Parameters of the model: 7.5e9, 7.5B, 350M.")
@click.option("--layers", type=click.IntRange(1, 100_000), help="Blocks of the transformer.")
@click.option("--hidden", type=click.IntRange(1, 10_000_000), help="Hidden size of the transformer.")
@click.option("--heads", type=click.IntRange(1, 100_000),
              help="Attention heads of the transformer. [default: hidden size / 128]")  # fmt: skip
@click.option("--vocab", type=click.IntRange(1, 10**9), default=50_000, show_default=True,
              help="Vocabulary size of the transformer.")  # fmt: skip
@click.option("--batch", type=click.IntRange(1, 10**6), default=1, show_default=True, help="Samples per GPU and step.")
@click.option("--sequence", type=click.IntRange(1, 10**8), help="Tokens per sample: needed for activations.")
@click.option("--input", "inputs", multiple=True, metavar="SHAPE:TYPE",
              help="An input of TARGET's module, such as 8x128:int64; repeat.")  # fmt: skip
@click.option("--gpus", type=click.IntRange(1, 10**6), default=1, show_default=True, help="GPUs in all.")
@click.option("--gpu", type=click.Choice(sorted(CARDS)), default="h100", show_default=True, help="Kind of GPU.")
@click.option("--gpu-memory", metavar="SIZE", help="Memory of one GPU: 80GB, 24GiB. [default: that of --gpu]")
@click.option("--link", default="50GB", show_default=True, metavar="SIZE", help="Bytes per second between GPUs.")
@click.option("--precision", type=click.Choice(sorted(PRECISIONS)), default="mixed", show_default=True,
              help="Types of weights, gradients and activations.")  # fmt: skip
@click.option("--optimizer", type=click.Choice(sorted(OPTIMIZERS)), default="adamw", show_default=True,
              help="Optimizer, for the size of its state.")  # fmt: skip
@click.option("--micro-batch", type=click.IntRange(1, 10**6),
              help="Samples per GPU and forward pass. [default: the fastest that fits]")  # fmt: skip
@click.option("--checkpointing/--no-checkpointing", default=None,
              help="Checkpoint activations of each block. [default: where it is needed]")  # fmt: skip
@click.option("--lora-rank", type=click.IntRange(1, 10_000), default=16, show_default=True,
              help="Rank of the adapters in strategies with LoRA.")  # fmt: skip
@click.option("--cpu", is_flag=True, help="Plan for steps on a CPU instead, as Sentinel's own tests measure them.")
@json_option()
@click.pass_context
def plan(ctx: click.Context, /, target: str | None, as_json: bool, **given: Any) -> None:
    """Show the memory that a model needs on each GPU, and which strategies fit, the fastest first.

    TARGET is a Hugging Face config.json, or my.module:build_model, a function that returns a torch module or
    (module, inputs) and is run on tensors without bytes. Or give --params, or --layers and --hidden.

    Exit code 0: a strategy fits; 1: none does.

    \b
    Example:  sentinel plan --params 7.5e9 --gpus 64
              sentinel plan config.json --gpus 8 --batch 8 --sequence 4096
              sentinel plan train:build_model --gpu a100 --json
    """
    subject, setup, candidates = rank_candidates(target, given)
    if as_json:
        echo(json.text(msgspec.to_builtins(candidates)))
    else:
        echo("\n".join(_page(subject, setup, candidates)))
    ctx.exit(0 if candidates[0].fits else 1)


def rank_candidates(target: str | None, given: dict[str, Any]) -> tuple[Subject, Setup, list[Candidate]]:
    """Return the model, the setup, and strategies for them, the fastest that fits first. `given`: all options of the
    command, by name."""
    setup = _setup(given)
    subject, share = _subject(target, setup, given)
    setup = msgspec.structs.replace(setup, lora=share)
    candidates = rank_strategies(
        subject, setup, checkpointing=given["checkpointing"], micro_batch=min(given["micro_batch"] or 0, setup.batch)
    )
    return subject, setup, candidates


def _setup(given: dict[str, Any]) -> Setup:
    card = CARDS[given["gpu"]]
    return Setup(
        gpus=given["gpus"],
        memory=parse_bytes(given["gpu_memory"]) if given["gpu_memory"] else card.memory,
        precision=PRECISIONS[given["precision"]],
        optimizer=OPTIMIZERS[given["optimizer"]],
        batch=given["batch"],
        flops=card.flops,
        link=parse_bytes(given["link"]),
        target="cpu" if given["cpu"] else "cuda",
    )


def _subject(target: str | None, setup: Setup, given: dict[str, Any]) -> tuple[Subject, float]:
    """Return the model to plan for, and the share of its parameters that LoRA would add."""
    if target and (given["params"] or given["layers"] or given["hidden"]):
        raise click.UsageError("give a config or a module, or sizes, not both")
    if target and ":" in target and not Path(target).exists():
        return _module(target, setup, given), _UNKNOWN_ADAPTERS
    if target:
        name, sizes = configfile.read(Path(target))
    elif given["layers"] and given["hidden"]:
        heads = given["heads"] or max(1, given["hidden"] // 128)
        if given["hidden"] % heads:
            raise click.UsageError(f"--hidden {given['hidden']} is no multiple of {heads} heads: say --heads")
        sizes = Transformer(layers=given["layers"], hidden=given["hidden"], heads=heads, vocabulary=given["vocab"])
        name = "transformer"
    elif given["params"]:
        return _bare(parse_count(given["params"]), given), _UNKNOWN_ADAPTERS
    else:
        raise click.UsageError("nothing to plan: give --params, --layers and --hidden, a config.json or a module")
    sizes = msgspec.structs.replace(sizes, on_cpu=given["cpu"])
    subject = sizes.subject(name, given["sequence"] or 0, setup.precision)
    if given["params"]:
        stated = parse_count(given["params"])
        linear = min(subject.linear, stated)
        subject = msgspec.structs.replace(subject, parameters=stated, trainable=stated, linear=linear)
    return subject, sizes.adapters(given["lora_rank"]) / sizes.parameters


def _bare(parameters: int, given: dict[str, Any]) -> Subject:
    layers = given["layers"] or 0
    return Subject(
        name="model",
        parameters=parameters,
        trainable=parameters,
        unit=parameters // layers if layers else 0,
        linear=parameters,
        tokens=given["sequence"] or 0,
    )


def _module(target: str, setup: Setup, given: dict[str, Any]) -> Subject:
    try:
        from sentinel.toolkit.plan import tracing
    except ImportError:
        raise ConfigError(
            f"{target}: planning for a module needs torch: pip install 'training-sentinel[torch]'"
        ) from None
    return tracing.subject(
        tracing.load(target), target, setup.precision, inputs=tuple(_input(text) for text in given["inputs"])
    )


def _input(text: str) -> Tensor:
    import torch

    shape, _, kind = text.partition(":")
    sizes = shape.split("x")
    kind = kind or "float32"
    if not all(size.isdecimal() and 0 < int(size) < 10**9 for size in sizes) or kind not in _TYPES:
        raise ConfigError(f"--input {text!r}: write it as 8x128:int64; types: {', '.join(_TYPES)}")
    return torch.empty([int(size) for size in sizes], dtype=getattr(torch, kind), device="meta")


def _page(subject: Subject, setup: Setup, candidates: list[Candidate]) -> list[str]:
    frozen = subject.parameters - subject.trainable
    trained = f", {readable_count(subject.trainable)} of them trained" if frozen else ""
    share = f"{setup.share:.0%} of it to plan with"
    tokens = f", {subject.tokens} tokens a sample" if subject.tokens > 1 else ""
    lines = [
        f"{subject.name}: {readable_count(subject.parameters)} parameters{trained}, on {setup.gpus} GPU"
        f"{'s' if setup.gpus > 1 else ''} of {format_bytes(setup.memory)}, {share}",
        f"{setup.precision.name} precision, {setup.optimizer.name}, batch {setup.batch} a GPU and step{tokens}",
        "",
        f"{'':4}{'strategy':<27}{'params':>8}{'grads':>8}{'optim':>8}{'activ.':>8}{'gather':>8}{'total':>8}",
    ]
    for place, candidate in enumerate(candidates, 1):
        lines += _row(place, candidate, subject.plain is not None)
    best = candidates[0]
    lines += ["", f"{best.strategy}: where its figures are from"]
    for line in best.formulas:
        size = format_bytes(line.bytes)
        source = f" [{line.source}]" if line.source else ""
        lines += wrap_text(f"  {line.what:<14}{size:>8}  ", line.formula + source)
    lines += wrap_text("  to write  ", best.line)
    for said in advice(subject, setup, candidates):
        lines += wrap_text("  note      ", said)
    return lines


def _row(place: int, candidate: Candidate, activations_known: bool) -> list[str]:
    memory = candidate.per_gpu
    sizes = (memory.parameters, memory.gradients, memory.optimizer, memory.activations, memory.gathered, memory.total)
    mark = f"{place:>2}  " if candidate.fits else "  - "
    cells = [format_bytes(size) if size else "-" for size in sizes]
    if not activations_known:
        cells[3] = "?"
    figures = "".join(f"{cell:>8}" for cell in cells)
    said = [
        f"{format_bytes(candidate.headroom)} left{'' if activations_known else ' for activations'}"
        if candidate.fits
        else f"{format_bytes(-candidate.headroom)} too large"
    ]
    if candidate.accumulation > 1 or candidate.micro_batch > 1:
        said.append(f"batch {candidate.micro_batch} x {candidate.accumulation}")
    said += ["checkpointed"] if candidate.checkpointing else []
    said += [f"sends {format_bytes(candidate.communication)} a step"] if candidate.communication else []
    said += [f"{format_bytes(candidate.host)} in the host"] if candidate.host else []
    return [f"{mark}{candidate.strategy:<27}{figures}", f"      {', '.join(said)}"]
