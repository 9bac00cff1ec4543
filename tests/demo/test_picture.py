from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sentinel.demo import story
from sentinel.demo.record import Record

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'training-sentinel[demo]'")


def pixels(image: np.ndarray, colour: str) -> int:
    """How many pixels are of `colour`, but for antialiasing."""
    rgb = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return int((np.abs(image[..., :3] - rgb).max(axis=-1) < 0.02).sum())


def test_both_runs_and_the_damage_are_in_the_picture(record: Record, tmp_path: Path) -> None:
    from matplotlib.image import imread

    from sentinel.demo import picture

    path = tmp_path / "demo.png"
    picture.draw(record, path)
    image = imread(path)
    assert image.shape[:2] == (650, 1430)
    for colour in (story.WATCHED_COLOUR, story.ALONE_COLOUR, story.DAMAGED):
        assert pixels(image, colour) > 1000, colour
    assert path.stat().st_size < 200_000, "the README shows it"


def test_a_run_without_rollback_can_be_drawn(spike: Record, tmp_path: Path) -> None:
    from sentinel.demo import picture

    spike.alerts.clear()
    spike.watched.rollbacks.clear()
    picture.draw(spike, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").stat().st_size > 10_000
