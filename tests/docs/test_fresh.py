"""Generated files are as `make docs` writes them."""

from __future__ import annotations

import pytest

from sentinel.toolkit.grafana import dashboards
from tests.docs.generate import DASHBOARDS, PARTS, ROOT, Part


@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part.file} {part.name}".strip())
def test_generated_text_is_fresh(part: Part) -> None:
    assert (ROOT / part.file).read_text() == part.render(), "run `make docs`"


def test_no_dashboard_is_left_from_earlier() -> None:
    assert {path.name for path in (ROOT / DASHBOARDS).iterdir()} == set(dashboards.files())
