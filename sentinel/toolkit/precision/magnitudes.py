"""Counts of numbers by their power of two, and which of them each format can hold. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Format(msgspec.Struct, frozen=True):
    """A floating-point format."""

    name: str
    overflow: int
    """Numbers of this power of two and above become infinite (in float16, also the last 16 below 2^16)."""
    normal: int
    """Smallest power of two with full precision."""
    zero: int
    """Numbers below this power of two become zero: half of the smallest subnormal."""


FLOAT16 = Format("float16", 16, -14, -25)
BFLOAT16 = Format("bfloat16", 128, -126, -134)
LOST = 2.0**-9
"""An update smaller than this share of a bfloat16 weight is rounded away: half of the last of its 8 bits."""


class Magnitudes(msgspec.Struct, frozen=True, kw_only=True):
    """How many numbers of one tensor, or of several together, have which power of two."""

    counts: Mapping[int, int]
    """Number of nonzero finite numbers by floor(log2(|x|))."""
    zeros: int = 0
    nonfinite: int = 0

    @property
    def nonzero(self) -> int:
        """Finite numbers other than zero."""
        return sum(self.counts.values())

    @property
    def total(self) -> int:
        """How many numbers there are, including zeros and non-finite ones."""
        return self.nonzero + self.zeros + self.nonfinite

    @property
    def highest(self) -> int:
        """The largest power of two; -1074 if there is none."""
        return max(self.counts, default=-1074)

    def share_under(self, power: int, scale: int = 0) -> float:
        """Return the share of the nonzero finite numbers that are below 2^power after multiplication by 2^scale."""
        few = sum(count for exponent, count in self.counts.items() if exponent + scale < power)
        return few / self.nonzero if self.nonzero else 0.0

    def share_over(self, power: int) -> float:
        """Return the share of the nonzero finite numbers that are 2^power or more."""
        return 1.0 - self.share_under(power) if self.nonzero else 0.0


def together(several: list[Magnitudes]) -> Magnitudes:
    """Return the magnitudes of several tensors together."""
    counts: dict[int, int] = {}
    for one in several:
        for exponent, count in one.counts.items():
            counts[exponent] = counts.get(exponent, 0) + count
    return Magnitudes(
        counts=counts, zeros=sum(one.zeros for one in several), nonfinite=sum(one.nonfinite for one in several)
    )


SCALES = range(0, 33)
"""Exponents of the loss scales to choose from, powers of two."""
_HEADROOM = 4
"""Powers of two that a scaled gradient stays below float16's largest: gradients vary from step to step."""


def best_scale(gradients: Magnitudes) -> int:
    """Return the exponent of the loss scale that loses fewest gradients in float16; of equal ones the smallest."""
    highest = FLOAT16.overflow - _HEADROOM - 1
    usable = [scale for scale in SCALES if gradients.highest + scale <= highest] or [0]
    return min(usable, key=lambda scale: (round(gradients.share_under(FLOAT16.zero, scale), 4), scale))
