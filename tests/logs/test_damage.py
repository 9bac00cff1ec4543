"""Whatever a file contains, it is read as far as possible, or refused in one sentence."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest

from sentinel.errors import LogError
from sentinel.toolkit import logs
from tests.logs.test_formats import DEEPSPEED, LIGHTNING, MEGATRON
from tests.logs.test_tensorboard import WRITTEN_BY_TORCH

SAMPLES = {
    "megatron": MEGATRON.encode(),
    "deepspeed": DEEPSPEED.encode(),
    "csv": LIGHTNING.encode(),
    "jsonl": b'{"step": 1, "loss": 2.5, "train": {"lr": 1e-3}}\n{"step": 2, "loss": NaN, "time": "2024-05-01"}\n' * 9,
    "state": b'{"log_history": [{"step": 1, "loss": 2.5}, {"step": 2, "eval": {"loss": 3}}, 7]}',
    "text": b"".join(b"step %d | loss %.2f | lr 1e-3\n" % (step, 3 - step / 10) for step in range(20)),
    "gzip": gzip.compress(b'{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.5}\n' * 25),
    "tensorboard": WRITTEN_BY_TORCH.read_bytes(),
}
EDITS = 150


def damaged(content: bytes, generator: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(generator.randint(1, 4)):
        at = generator.randrange(len(data) or 1)
        data = data or bytearray(b"x")
        match generator.randrange(4):
            case 0:
                data[at] = generator.randrange(256)
            case 1:
                del data[at : at + generator.randint(1, 30)]
            case 2:
                data[at:at] = generator.choice(
                    [b"-1", b"1e999", b"nan", b"\n", b"{", b'"', b"\xff\xfe", b"|", b"\0" * 9]
                )
            case _:
                del data[at + 1 :]
    return bytes(data)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_damaged_log_is_read_or_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    damage(SAMPLES[name], tmp_path / "x", seed=name)


def test_there_is_a_sample_of_each_format(tmp_path: Path) -> None:
    found = set()
    for name, content in SAMPLES.items():
        (tmp_path / name).write_bytes(content)
        found |= {recording.format for recording in logs.read(tmp_path / name)}
    elsewhere = {"Trackio", "W&B"}  # test_trackers.py
    others = {"Sentinel's history", "MLflow"}  # a database, which tests/store damages; a folder
    assert found | elsewhere | others == set(logs.FORMATS), "a sample of each in SAMPLES"


def damage(content: bytes, path: Path, *, seed: str) -> None:
    """Damage a log in many ways: it must be read, or be refused in a sentence."""
    generator, read = random.Random(seed), 0
    for _ in range(EDITS):
        path.write_bytes(damaged(content, generator))
        try:
            recordings = logs.read(path)
        except LogError as error:
            said = str(error)
            assert said.startswith(f"{path}: ")
            continue
        for recording in recordings:
            chosen = logs.choose_columns(recording.names, ["loss", "step_seconds"], {})
            assert bool(chosen) == any(True for _ in recording.observations(chosen))
            read += 1
    assert read > 0


def test_a_gzipped_log_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    rows = "".join(f'{{"step": {i}, "loss": {random.Random(i).random()}}}\n' for i in range(5000))
    path.write_bytes(gzip.compress(rows.encode())[:-2000])
    (recording,) = logs.read(path)
    assert 4000 < len(recording) < 5000
