"""Colours of the page and the report are readable for all, and no meaning is carried by colour alone."""

from __future__ import annotations

import itertools
import re

import pytest

from sentinel.report.heatmap import _STOPS
from sentinel.web.charts import STYLE

LIGHT, DARK = (dict(re.findall(r"--([\w]+): (#[0-9a-f]+)", block)) for block in re.findall(r":root \{([^}]+)\}", STYLE))
THEMES = pytest.mark.parametrize("theme", [LIGHT, {**LIGHT, **DARK}], ids=["light", "dark"])
SEEN_AS = {
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
}
"""Matrices to linear RGB as seen with a deficiency (Machado, Oliveira, Fernandes 2009, table 1, severity 1)."""


def linear(colour: str) -> tuple[float, ...]:
    """Return an sRGB colour as linear light."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    return tuple(part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)


def luminance(colour: str) -> float:
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours (WCAG 2.2, 1.4.3)."""
    bright, dim = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def seen(colour: str, deficiency: str) -> tuple[float, ...]:
    light = linear(colour)
    return tuple(sum(a * b for a, b in zip(row, light, strict=True)) for row in SEEN_AS[deficiency])


@THEMES
@pytest.mark.parametrize("ink", ["ink", "muted", "critical", "warning", "info"])
def test_words_can_be_read(theme: dict[str, str], ink: str) -> None:
    for paper in ("paper", "card"):
        assert contrast(theme[ink], theme[paper]) >= 4.5


@THEMES
def test_curves_stand_out_from_the_paper(theme: dict[str, str]) -> None:
    assert all(contrast(theme[f"s{n}"], theme["paper"]) >= 2.8 for n in range(5))


@THEMES
@pytest.mark.parametrize("deficiency", list(SEEN_AS))
def test_no_two_curves_look_the_same_with_a_colour_deficiency(theme: dict[str, str], deficiency: str) -> None:
    shades = [seen(theme[f"s{n}"], deficiency) for n in range(5)]
    for one, other in itertools.combinations(shades, 2):
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 0.1


def test_no_two_curves_have_the_same_dashes() -> None:
    dashes = [re.search(rf"\.s{n} {{ stroke: var\(--s{n}\);?([^}}]*)}}", STYLE)[1].strip() for n in range(5)]  # type: ignore[index]
    assert len(set(dashes)) == 5


def test_the_heat_map_rises_in_lightness() -> None:
    shades = [luminance(stop) for stop in _STOPS]
    assert shades == sorted(shades)
    assert shades[-1] > 10 * shades[0]


def test_the_focused_element_is_outlined() -> None:
    assert "a.mark:focus-visible, button:focus-visible { outline:" in STYLE
