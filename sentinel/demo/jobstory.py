"""The words for a job over several nodes, which the terminal, the picture and the page share."""

from __future__ import annotations

from sentinel.demo.inbox import Sent
from sentinel.demo.jobrecord import KINDS, JobFault, JobRecord
from sentinel.demo.story import ALONE_COLOUR, WATCHED_COLOUR, number
from sentinel.text import format_count

COLOURS = (WATCHED_COLOUR, ALONE_COLOUR, "#009E73", "#CC79A7", "#8C7400")
"""Colours of nodes, the same as in the picture: Okabe and Ito's."""


def title(job: JobRecord) -> str:
    """Return the outcome in one sentence."""
    done = "rolled back" if KINDS[job.fault].rolls_back else "started again"
    return f"{KINDS[job.fault].short.capitalize()}: one page, and all {job.nodes} nodes are {done} together"


def setting(fault: JobFault, nodes: int, first: int, apart: bool) -> str:
    """Return what is trained, where, and what goes wrong."""
    where = "network namespaces on a bridge" if apart else "all on one loopback"
    return (
        f"A small GPT on the bytes of Python's standard library, trained on {nodes} nodes ({where}) by torchrun over "
        f"gloo, a rank and a daemon on each. {KINDS[fault].what.format(first=first, node=nodes - 1)}"
    )


def verdict(job: JobRecord) -> str:
    """Return what people were told, and what was done. Needs a page."""
    page, back = job.page, job.back_at
    assert page is not None
    assert back is not None
    later = format_count(len(job.later), "later message")
    return (
        f"The receiver got one page, {page.time - job.fault_time:.0f} s after the fault, and {later} about it: "
        f"{page.alert}, {page.summary}. {page.cause[:1].upper()}{page.cause[1:]}. All {job.nodes} nodes were "
        f"{word_return(job)}, {back - job.fault_at:.0f} s after the fault; at the end their weights are the same, to "
        "the bit."
    )


def describe_message(sent: Sent, *, is_page: bool) -> str:
    """Return a message of the receiver in one line. `is_page`: it is the first about its problem."""
    _, _, node = sent.run_id.partition("@")
    alert = f"{sent.alert} of {node} by itself" if node else sent.alert
    if sent.firing:
        word = "PAGE" if is_page else "the same, changed:"
        return f"{word}  {sent.severity} {alert} at step {sent.step}: {sent.summary}"
    return f"resolved  {alert}: {sent.done}"


def word_return(job: JobRecord) -> str:
    """Return to which step all nodes went back, and how."""
    first = job.curves[0]
    if KINDS[job.fault].rolls_back:
        return f"rolled back to step {first.rollbacks[0].to}"
    return f"started again from step {first.starts[-1]}"


def name_columns(nodes: int) -> list[tuple[str, str]]:
    """Return name and colour of each node."""
    return [(f"node {node}", COLOURS[node]) for node in range(nodes)]


def comparison(job: JobRecord) -> list[tuple[str, ...]]:
    """Return the rows of the table: what is compared, and the value on each node."""
    curves = job.curves
    if KINDS[job.fault].rolls_back:
        way = "rolled back"
        went = [", ".join(f"{r.at} to {r.to}" for r in curve.rollbacks) for curve in curves]
    else:
        way, went = "began at step", [" and ".join(map(str, curve.starts)) for curve in curves]
    return [
        (way, *went),
        ("last step", *(str(curve.steps[-1]) for curve in curves)),
        ("loss at the end", *(number(curve.level()) for curve in curves)),
        ("weights at the end", *(curve.weights for curve in curves)),
    ]
