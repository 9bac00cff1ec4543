"""Reads 2,000 damaged files: histories, checkpoints, allocator snapshots, flight-recorder dumps, logs.

A trial is 25 mutations of one kind of file, read by every command that takes such a file, in one process of its own.
It holds if no command ends in a traceback, each exit status is 0, 1 or 2 (never 1 together with an error: 1 means that
something was found), and none takes more than 500 MB beyond what the process had.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import sqlite3
import subprocess
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TRIALS = 80
SAMPLE = (2, 3, 4)
"""One trial each of `safetensors`, `snapshot` and `dump`."""
MUTATIONS = 25
LIMIT_BYTES = 500 * 1000**2
TIME_SECONDS = 600


def run_trial(seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SENTINEL_")}
        environment |= {"SENTINEL_STATE": f"{folder}/state", "SENTINEL_RUNTIME": f"{folder}/run"}
        environment |= {"XDG_CONFIG_HOME": f"{folder}/config", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "bench.proofs.damaged", str(seed), folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIME_SECONDS)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    counted: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return counted


def _run_mutations(seed: int, folder: Path) -> dict[str, Any]:
    rng = random.Random(seed)
    kind, (make, name, commands, mutations) = list(KINDS.items())[seed % len(KINDS)]
    whole = folder / "whole" / name
    whole.parent.mkdir(parents=True)
    make(whole)
    damaged = folder / "state" / "runs" / name  # where histories lie; the other kinds may lie anywhere
    damaged.parent.mkdir(parents=True)
    peak = codes = 0
    for number in range(MUTATIONS):
        damaged.write_bytes(whole.read_bytes())
        for _ in range(rng.choice((1, 1, 3))):
            rng.choice((*mutations, *ANYWHERE))(damaged, rng)
        for command in commands:
            arguments = [each.format(path=damaged, out=folder / "out") for each in command]
            used, code = _run_command(arguments, f"{kind} {seed}.{number}")
            peak, codes = max(peak, used), codes + (code == 2)
    counted = {"mutations": MUTATIONS, "commands": MUTATIONS * len(commands), "refused": codes}
    return {"case": kind, **counted, "peak_mb": peak / 1e6}


def _run_command(arguments: list[str], what: str) -> tuple[int, int]:
    """Run a command in this process; return (its peak bytes beyond those taken before, exit status)."""
    from sentinel.cli import main

    before, said = _reset_peak(), io.StringIO()
    sys.argv = ["sentinel", *arguments]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
            code: object = 0
        except SystemExit as ended:
            code = ended.code or 0
        except BaseException:
            raise AssertionError(f"{what}: sentinel {' '.join(arguments)}\n{traceback.format_exc()}") from None
    used, words = _peak() - before, said.getvalue()
    assert code in (0, 1, 2), f"{what}: {arguments} ended with {code}"
    assert not (code == 1 and "\nsentinel: " in f"\n{words}" and arguments[0] not in LISTS), f"{what}: {words[-500:]}"
    assert "Traceback (most recent call last)" not in words, f"{what}: {words[-2000:]}"
    assert used < LIMIT_BYTES, f"{what}: {arguments} took {used / 1e6:.0f} MB"
    return used, int(str(code))


LISTS = ("incidents", "history", "hang")
"""Commands that report a damaged file, and go on with the others."""


def _reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


# Files as they should be.


def _make_history(path: Path) -> None:
    from tests.report.runs import case, history

    history(path, ranks=2, gpus=1, cases=(case(1, 60), case(2, 120)))


def _make_checkpoint(path: Path) -> None:
    import torch

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    if path.suffix == ".pt":
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        return
    header, data = {}, b""
    for name, tensor in model.state_dict().items():
        content = tensor.numpy().tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    said = json.dumps(header).encode()
    path.write_bytes(len(said).to_bytes(8, "little") + said + data)


def _make_snapshot(path: Path) -> None:
    from tests.allocator import synthetic

    synthetic.written(path, synthetic.torn())


def _make_dump(path: Path) -> None:
    entries = [
        {
            "process_group": ("0", "default_pg"), "pg_id": 0, "collective_seq_id": seq, "op_id": seq,
            "profiling_name": "nccl:all_reduce", "input_sizes": [[4, 7]], "time_created_ns": 10**18 + seq,
            "state": "completed" if seq < 40 else "started", "timeout_ms": 600_000, "retired": seq < 40,
        }
        for seq in range(1, 41)
    ]  # fmt: skip
    status = {"0": {"last_enqueued_collective": 40, "last_started_collective": 40, "last_completed_collective": 39}}
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    path.write_bytes(pickle.dumps({"version": "2.10", "entries": entries, "pg_config": config, "pg_status": status}))


def _make_log(path: Path) -> None:
    from tests.hang.logs import CASES

    path.write_text("\n".join(case.text for case in CASES))


# How they are damaged.


def _flip_bits(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 4, 64))):
        if content:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def _cut(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content) + 1)])


def _scribble(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content) + 1)
    content[start : start + rng.randrange(1, 4096)] = rng.randbytes(rng.randrange(1, 4096))
    path.write_bytes(content)


def _blank(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content) + 1)
    end = min(len(content), start + rng.randrange(1, 4096))
    content[start:end] = bytes(end - start)
    path.write_bytes(content)


def _repeat(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    start = rng.randrange(len(content) + 1)
    path.write_bytes(content[:start] + content[start : start + 2000] * rng.choice((2, 40)) + content[start:])


ANYWHERE: tuple[Callable[[Path, random.Random], None], ...] = (_flip_bits, _cut, _scribble, _blank, _repeat)


def _damage_row(path: Path, rng: random.Random) -> None:
    """Damage a stored value; SQLite has no checksum of it, so the database itself stays intact."""
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(path)) as database, database:
        table, key = rng.choice(ROWS)
        rows = database.execute(
            f"SELECT rowid_, {key} FROM (SELECT {key}, row_number() OVER () AS rowid_ FROM {table})"
        )
        values = [value for _, value in rows]
        if values:
            value = rng.choice(values)
            database.execute(f"UPDATE {table} SET {key} = ? WHERE {key} IS ?", (_damage_value(value, rng), value))


ROWS = (
    *((table, "body") for table in ("chunks", "incidents", "events", "layers", "readings", "incidents", "chunks")),
    *(("attempts", key) for key in ("hello", "number", "began", "ended")),
    *(("meta", key) for key in ("key", "value")),
    *(("ranks", key) for key in ("hello", "rank")),
    *(("chunks", key) for key in ("first_seq", "last_seq", "rank", "attempt")),
    *(("events", key) for key in ("kind", "seq", "time")),
    ("incidents", "seq"), ("incidents", "id"), ("readings", "entity"), ("layers", "seq"),
)  # fmt: skip
BOMB = 512 * 1024**2


def _damage_value(value: Any, rng: random.Random) -> Any:
    if isinstance(value, int | float) or value is None:
        return rng.choice((0, -1, 2**62, None, 1e300))
    if isinstance(value, str):
        return rng.choice(("", "\x1b[2J", value[:-1] + "\x07", "-1"))
    inside = rng.random() < 0.5 and _unpack(value)
    content = bytearray(inside or value)
    way = rng.randrange(4)
    if way == 0 and inside:
        return zlib.compress(bytes(BOMB), 9)
    if way == 1:
        del content[rng.randrange(len(content) + 1) :]
    elif content:
        for _ in range(rng.choice((1, 1, 4))):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return zlib.compress(content) if inside else bytes(content)


def _unpack(value: bytes) -> bytes | None:
    try:
        return zlib.decompress(value)
    except zlib.error:
        return None


def _damage_pickle(path: Path, rng: random.Random) -> None:
    """Replace one value somewhere in a pickled object, and pickle it again."""
    try:
        content = pickle.loads(path.read_bytes())
    except Exception:
        return
    holders = list(_holders(content))
    if holders:
        holder, key = rng.choice(holders)
        holder[key] = rng.choice(
            (None, -1, 2**70, 1.5, float("nan"), "", "\x1b]0;x\x07", [], {}, [[]], (1,), b"\xff", True)
        )
        path.write_bytes(pickle.dumps(content))


def _holders(content: Any) -> Iterator[tuple[Any, Any]]:
    pairs = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in list(pairs):
        yield content, key
        yield from _holders(value)


def _damage_header(path: Path, rng: random.Random) -> None:
    """Replace one value in a safetensors header."""
    content = path.read_bytes()
    try:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
    except ValueError:
        return
    holders = list(_holders(header))
    if holders:
        holder, key = rng.choice(holders)
        holder[key] = rng.choice((None, -1, 2**70, 1.5, "", "F64", [], [2**40, 2**40], {}, [-1, 4], True))
        said = json.dumps(header).encode()
        path.write_bytes(len(said).to_bytes(8, "little") + said + content[8 + length :])


def _damage_lines(path: Path, rng: random.Random) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    if lines:
        for _ in range(20):
            way, at = rng.randrange(4), rng.randrange(len(lines))
            if way == 0:
                lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]
            elif way == 1:
                lines.insert(at, rng.choice(lines))
            elif way == 2:
                lines[at] = rng.choice((b"", b"[rank", b"[rank999999]: ", b"7: ")) + lines[at]
            else:
                lines[at] = lines[at].replace(b"1", b"9" * rng.choice((1, 30, 5000)))
    path.write_bytes(b"".join(lines))


History = [
    ["incidents"], ["incidents", "--json"], ["incidents", "show", "0.1"], ["history"], ["history", "export", "{path}"],
    ["history", "export", "{path}", "--layers"], ["report", "{path}", "--output", "{out}"], ["precision", "{path}"],
    ["rules", "backtest", "{path}"], ["replay", "{path}"],
]  # fmt: skip
Kind = tuple[Callable[[Path], None], str, list[list[str]], tuple[Callable[[Path, random.Random], None], ...]]
KINDS: dict[str, Kind] = {
    "history": (_make_history, "run-1.sqlite", History, (_damage_row, _damage_row, _damage_row, _damage_row)),
    "checkpoint": (_make_checkpoint, "model.pt", [["precision", "{path}"]], ()),
    "safetensors": (_make_checkpoint, "model.safetensors", [["precision", "{path}"]], (_damage_header, _damage_header)),
    "snapshot": (_make_snapshot, "s.pickle", [["memory", "{path}"], ["memory", "{path}", "--json"]], (_damage_pickle,)),
    "dump": (_make_dump, "nccl_trace_rank_0", [["hang", "{path}"], ["hang", "--json", "{path}"]], (_damage_pickle,)),
    "log": (_make_log, "job.out", [["hang", "{path}"], ["rules", "backtest", "{path}"]], (_damage_lines,)),
}


if __name__ == "__main__":
    print(json.dumps(_run_mutations(int(sys.argv[1]), Path(sys.argv[2]))))
