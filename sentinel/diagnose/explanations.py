"""Which function explains which alert: each function registers itself where it is defined."""

from __future__ import annotations

from collections.abc import Callable

from sentinel.diagnose.evidence import Evidence, Finding

Explanation = Callable[[Evidence], Finding]
_EXPLANATIONS: dict[str, Explanation] = {}
_OVER_NODES: set[str] = set()


def explains(*alerts: str, over_nodes: bool = False) -> Callable[[Explanation], Explanation]:
    """Register a function for these alerts. `over_nodes`: ranks of other nodes may decide; in a job over several nodes,
    it is called once more with the ranks of all nodes."""

    def register(explanation: Explanation) -> Explanation:
        for alert in alerts:
            assert alert not in _EXPLANATIONS, f"{alert} has an explanation already"
            _EXPLANATIONS[alert] = explanation
            if over_nodes:
                _OVER_NODES.add(alert)
        return explanation

    return register


def is_explained_over_nodes(alert: str) -> bool:
    """Return whether an alert's cause may be a rank of another node."""
    return alert in _OVER_NODES


def find_explanation(alert: str) -> Explanation | None:
    """Return the function for an alert; None if there is none."""
    return _EXPLANATIONS.get(alert)


def list_explained_alerts() -> frozenset[str]:
    """Return the alerts that have a function."""
    return frozenset(_EXPLANATIONS)
