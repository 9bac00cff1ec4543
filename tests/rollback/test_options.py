"""The arguments of `Rollback`, and the error messages for wrong ones."""

from __future__ import annotations

from typing import Any

import pytest

from sentinel.errors import AttachError
from sentinel.hooks.rollback.options import Rollback


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"every": 0}, ["every=0", "at least 1"]),
        ({"every": 2.5}, ["every=2.5", "whole number"]),
        ({"keep": 1, "margin": 0}, ["keep=1", "at least 2", "the other must serve"]),
        ({"margin": -1}, ["margin=-1"]),
        ({"budget": True}, ["budget=True"]),
        ({"skip_batches": -3}, ["skip_batches=-3", "at least 0"]),
        ({"lr_factor": 0.0}, ["lr_factor=0.0", "over 0"]),
        ({"lr_factor": 1.5}, ["lr_factor=1.5", "at most 1"]),
        ({"every": 50, "keep": 3, "margin": 101}, ["margin=101", "every=50", "keep=3", "at most", "100"]),
        ({"state": {"ema": 3}}, ["'ema'", "int", "state_dict"]),
        ({"state": [3]}, ["a list has no names", "state={'ema': ema}"]),
    ],
)
def test_refused_with_the_field_the_value_and_the_remedy(terms: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(AttachError) as refusal:
        Rollback(**terms)
    for word in words:
        assert word in str(refusal.value)


def test_the_longest_margin_is_allowed() -> None:
    assert Rollback(every=50, keep=3, margin=100).terms().margin == 100
