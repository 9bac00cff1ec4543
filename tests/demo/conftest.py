"""Fixtures: the records of two real demo runs of 400 steps, with losses rounded to 0.001."""

from __future__ import annotations

from pathlib import Path

import pytest

from sentinel.demo.record import DemoRecord, load

HERE = Path(__file__).parent


@pytest.fixture
def spike() -> DemoRecord:
    return load(HERE / "spike.json")


@pytest.fixture
def nan() -> DemoRecord:
    return load(HERE / "nan.json")


@pytest.fixture(params=["spike", "nan"])
def record(request: pytest.FixtureRequest) -> DemoRecord:
    return load(HERE / f"{request.param}.json")
