"""Which function explains which alert: each registers itself, where it stands."""

from __future__ import annotations

from collections.abc import Callable

from sentinel.diagnose.evidence import Evidence, Finding

Explanation = Callable[[Evidence], Finding]
_EXPLANATIONS: dict[str, Explanation] = {}


def explains(*alerts: str) -> Callable[[Explanation], Explanation]:
    """Has the function called for these alerts."""

    def register(explanation: Explanation) -> Explanation:
        for alert in alerts:
            assert alert not in _EXPLANATIONS, f"{alert} has an explanation already"
            _EXPLANATIONS[alert] = explanation
        return explanation

    return register


def find_explanation(alert: str) -> Explanation | None:
    """The function for an alert; None where nobody wrote any."""
    return _EXPLANATIONS.get(alert)


def list_explained_alerts() -> frozenset[str]:
    """The alerts that have a function."""
    return frozenset(_EXPLANATIONS)
