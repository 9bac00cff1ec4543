"""Writes histories of made-up runs, with the store that daemons use."""

from __future__ import annotations

import math
import time
from array import array
from pathlib import Path
from typing import Any

import msgspec

from sentinel.runs.steps import LayerStats, RunStep
from sentinel.store.writer import Store

EVIL = "<script>alert('x')</script>\"&\x1b]0;x\x07\x9b31m\u202e\0"


def case(number: int, step: int, **more: Any) -> dict[str, Any]:
    return {
        "id": f"0.{number}", "run": "gpt", "run_id": "gpt-1", "attempt": 0, "alert": "LossSpike",
        "severity": "critical", "state": "rolled_back", "first_step": step - 3, "step": step, "time": 1e9,
        "resolved_step": step + 9, "summary": f"loss 8.12 at step {step}",
        "members": [{"scope": "run", "name": "gpt", "first_step": step, "values": {}}],
        "layers": [{"name": "blocks.1.weight"}],
        "diagnosis": {"cause": "a bad batch", "confidence": "medium", "evidence": ["loss 8.12"], "remedy": "skip it"},
        "done": ["rolled back to step 50"], **more,
    }  # fmt: skip


def history(
    path: Path,
    *,
    name: str = "gpt",
    steps: int = 200,
    ranks: int = 1,
    speed: float = 1.0,
    gpus: int = 0,
    cases: tuple[dict[str, Any], ...] = (),
) -> Path:
    """Write a history whose loss falls as 1 / (1 + speed * seq); it is NaN at step 120, a gradient inf at 64."""
    store = Store(path, run=name, run_id=path.stem)
    hello = msgspec.msgpack.encode({"step_offset": 0, "facts": {"model": name, "parameters": 1_000_000}})
    store.records.begin_attempt(0, hello)
    for rank in range(ranks):
        store.records.add_rank(0, rank, process=1, hello=hello)
    began = time.time()
    for seq in range(steps):
        loss = math.nan if seq == 120 else 1 / (1 + speed * seq)
        values = {"loss": loss, "step_seconds": 0.1 + 0.004 * math.sin(seq / speed), "rss_bytes": 2e9}
        layers = None
        if seq % 8 == 0:
            norms = array("f", [0.1, math.inf if seq == 64 else 1.0, 10.0])
            layers = LayerStats((f"{name}.0.weight", "blocks.1.weight", "head"), {"layer_grad_norm": norms}, b"\1\1\1")
        apart = {rank: {**values, "step_seconds": 0.1 * (1 + rank)} for rank in range(ranks)}
        store.records.add_step(0, RunStep(seq, began + seq / 10, apart if ranks > 1 else {0: values}, values, layers))
        for gpu in range(gpus if seq % 40 == 0 else 0):
            readings = {"gpu_temperature_celsius": 60.0 + seq / 10 + gpu, "gpu_memory_used_bytes": 61e9, "gpu_xid": 0.0}
            store.records.add_reading(0, f"gpu {gpu}", seq, began + seq / 10, readings)
        if seq % 4000 == 3999:
            store.write()
    for body in cases:
        store.records.put_incident(body["id"], body["step"], body)
        store.records.add_event(0, body["step"], "rollback", ok=True, alert=body["alert"], to=50, at=body["step"])
    store.records.add_event(0, 5, "rollback", ok=False, alert="LossSpike", to=-1, at=-1)
    store.write()
    store.close()
    return path
