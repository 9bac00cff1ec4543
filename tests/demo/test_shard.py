from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from sentinel.demo.shard import BATCH_ROWS, BURST, ROW_BYTES, Damage, Fault, write_shard
from sentinel.demo.trainee import SCRIPT

ROWS, BYTES, BATCHES = 4, 65, 30
BATCH = ROWS * BYTES


def shard(path: Path, seed: int = 0, damage: Damage | None = None) -> bytes:
    write_shard(path, batches=BATCHES, batch_rows=ROWS, row_bytes=BYTES, seed=seed, damage=damage)
    return path.read_bytes()


def test_same_seed_gives_the_same_text(tmp_path: Path) -> None:
    first = shard(tmp_path / "a")
    assert len(first) == BATCHES * BATCH
    assert first == shard(tmp_path / "b")
    assert first != shard(tmp_path / "c", seed=1)
    assert 0 not in first, "zero is padding: no text holds it"


@pytest.mark.parametrize("fault", get_args(Fault))
def test_only_the_stretch_is_damaged(tmp_path: Path, fault: Fault) -> None:
    clean = shard(tmp_path / "clean")
    damaged = shard(tmp_path / "damaged", damage=Damage(fault=fault, first=10, batches=5))
    begin, end = 10 * BATCH, 15 * BATCH
    assert damaged[:begin] == clean[:begin]
    assert damaged[end:] == clean[end:]
    ruined = damaged[begin:end]
    if fault == "nan":
        assert set(ruined) == {0}
    else:
        assert sum(byte >= 128 for byte in ruined) > len(ruined) / 3, "compressed bytes are no ASCII text"


def test_the_demo_and_its_script_agree() -> None:
    script = SCRIPT.read_text()
    assert f"skip_batches={BURST}" in script
    assert f"batch_size={BATCH_ROWS}" in script
    assert f"CONTEXT, WIDTH, HEADS, DEPTH = 256, {ROW_BYTES - 1}," in script
