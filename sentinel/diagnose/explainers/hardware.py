"""Explain what is wrong with a GPU or a node: the driver's words, the ranks concerned, the node to take out."""

from __future__ import annotations

from collections.abc import Mapping

from sentinel.diagnose.evidence import Evidence, Finding, report_unknown
from sentinel.diagnose.explanations import explains
from sentinel.runs.devices import Gpu
from sentinel.text import format_count, name_ranks

_REASONS = (
    ("gpu_throttled_thermal", "heat"),
    ("gpu_throttled_hardware", "the board itself (heat, power supply or power brake)"),
    ("gpu_throttled_power", "the power limit"),
)
_ASK = "nvidia-smi -q, and dmesg"
_GONE = report_unknown("the GPU's numbers: it is not read any more", command=_ASK)


@explains("GpuFault")
def gpu_fault(evidence: Evidence) -> Finding:
    """Quote code, meaning, GPU, the ranks on it, and the node to drain."""
    if not evidence.gpus:
        return _GONE
    found = {gpu.index: _describe_fault(gpu, evidence.numbers.get(str(gpu.index), gpu.values)) for gpu in evidence.gpus}
    if not all(found.values()):
        return report_unknown("which of its readings was at fault", command=_ASK, evidence=_describe_gpus(evidence))
    said = [f"GPU {index}: {fault}" for index, fault in found.items()]
    numbers = ", ".join(str(gpu.index) for gpu in evidence.gpus)
    node, first = evidence.devices.hostname, evidence.step(evidence.since)
    remedy = (
        f"drain node {node} after this job, and have GPU {numbers} reset and tested (dcgmi diag -r 3) before it is "
        f"used again; what was computed since step {first} may be wrong, where an error was uncorrectable"
    )
    return Finding("; ".join(said), "high", remedy, evidence=_describe_gpus(evidence))


@explains("GpuThrottled")
def gpu_throttled(evidence: Evidence) -> Finding:
    """Find the reason, and the ranks that it slows."""
    if not evidence.gpus:
        return _GONE
    held = []
    for gpu in evidence.gpus:
        reasons = " and ".join(reason for name, reason in _REASONS if gpu.values.get(name))
        held.append(f"clocks of GPU {gpu.index} are held down by {reasons or 'what is over by now'}")
    return Finding("; ".join(held), "high", evidence=_describe_gpus(evidence))


@explains("GpuWearing", "GpuShared")
def other(evidence: Evidence) -> Finding:
    """Name the GPUs and ranks of an alert that says all there is to say."""
    return Finding("as the alert says, by the driver's own numbers", "high", evidence=_describe_gpus(evidence))


@explains("HostMemoryLow", "CgroupMemoryLow")
def host_memory(evidence: Evidence) -> Finding:
    """Find which ranks hold the memory, as far as they have reported it."""
    held = [(number, rank) for number in evidence.live if (rank := _resident(evidence, number))]
    facts = tuple(f"rank {number} holds {size / 1e9:.1f} GB" for number, size in held)
    missing = () if facts else ("how much the ranks hold: it was not sampled yet",)
    return Finding(
        "all processes of the node, or of the container, together", "medium", evidence=facts, missing=missing
    )


def _resident(evidence: Evidence, number: int) -> float:
    series = evidence.series("rss_bytes", number)
    return series[-1][1] if series else 0.0


def _describe_fault(gpu: Gpu, values: Mapping[str, float]) -> str:
    """Return words for what the rule fired for, by the numbers that it fired with; empty if they do not show it."""
    code = values.get("gpu_xid", 0.0)
    texts = {(fault.kind, fault.code): fault.text for fault in gpu.faults}
    silent, errors, lost_links = (
        values.get(name, 0.0) for name in ("gpu_silent_seconds", "new_ecc_errors", "nvlinks_lost")
    )
    found = (
        (code > 0, f"XID {code:.0f}, {texts.get(('xid', int(code)), 'whose text the kernel log has')}"),
        (values.get("gpu_lost", 0.0) > 0, f"it is lost: {texts.get(('lost', 0), 'so says the driver')}"),
        (silent > 0, f"silent: no answer from the driver in {silent:.0f} s"),
        (errors > 0, f"{format_count(int(errors), 'uncorrectable ECC error')} since the run began"),
        (values.get("gpu_row_remap_failed", 0.0) > 0, "a row of its memory could not be replaced"),
        (lost_links > 0, f"{format_count(int(lost_links), 'NVLink')} that had been up went down"),
    )
    return ", and ".join(words for holds, words in found if holds)


def _describe_gpus(evidence: Evidence) -> tuple[str, ...]:
    lines = []
    for gpu in evidence.gpus:
        on_it = evidence.devices.find_gpus
        ranks = [n for n, rank in sorted(evidence.live.items()) if gpu in on_it(rank.hello.gpus)]
        on = name_ranks(ranks) if ranks else "no rank that is known"
        lines.append(f"GPU {gpu.index} of {evidence.devices.hostname}: {gpu.model} {gpu.uuid} at {gpu.bus}; on it {on}")
        lines += [f"  {fault.kind} {fault.code or ''}: {fault.text}".replace(" :", ":") for fault in gpu.faults[-4:]]
        lines += [f"  {', '.join(shown)}"] if (shown := list(_numbers(gpu))) else []
    return tuple(lines)


def _numbers(gpu: Gpu) -> list[str]:
    wanted = (
        ("gpu_temperature_celsius", 1.0, "{:.0f} C"),
        ("gpu_power_watts", 1.0, "{:.0f} W"),
        ("gpu_clock_hertz", 1e-6, "{:.0f} MHz"),
        ("gpu_ecc_uncorrected", 1.0, "{:.0f} uncorrectable ECC errors"),
        ("gpu_nvlinks_up", 1.0, "{:.0f} NVLinks up"),
    )
    return [form.format(gpu.values[name] * unit) for name, unit, form in wanted if name in gpu.values]
