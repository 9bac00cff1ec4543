"""A seeded sample of each long proof (bench/proof.py): a few trials of what `make proof` runs for hours."""

from __future__ import annotations

import pytest

from bench.proof import list_parts, load_part, run_seed

SAMPLE = [(part, seed) for part in list_parts() for seed in load_part(part).SAMPLE]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("part", "seed"), SAMPLE, ids=[f"{part}-{seed}" for part, seed in SAMPLE])
def test_sample(part: str, seed: int) -> None:
    outcome = run_seed(part, seed)
    assert outcome["held"], outcome.get("trace")
