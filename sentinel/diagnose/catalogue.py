"""From evidence to cause. A diagnosis says how sure it is and what is missing: wrong certainty is worse than none.

Each alert has one function, which registers itself by `@explains("LossSpike")` in a module of `explainers`; an alert
without one gets its rule's remedy and the cause "not known". The function decides which cause holds; `causes.yaml` has
the words, and the source of each cause.
"""

from __future__ import annotations

import msgspec

import sentinel.diagnose.explainers  # noqa: F401  # its modules register themselves
from sentinel.diagnose.evidence import NOT_KNOWN, SAMPLE_MORE, Evidence, Finding
from sentinel.diagnose.explanations import find_explanation
from sentinel.diagnose.gradient_facts import describe_gradients, describe_second_moments
from sentinel.diagnose.traced import add_origin


def diagnose(evidence: Evidence, remedy: str) -> Finding:
    """Return the diagnosis of an incident. `remedy` is the one that the rule itself gives."""
    explain = find_explanation(evidence.alert)
    found = add_origin(evidence, explain(evidence) if explain else Finding(NOT_KNOWN, "none"))
    facts, missing, command = found.evidence, found.missing, found.command
    if evidence.about_layers:
        facts += describe_gradients(evidence)
        if not evidence.layers:
            missing += ("layer statistics of these steps: they are sampled, and none fell here",)
            command = command or (SAMPLE_MORE if found.confidence == "none" else "")
    facts += describe_second_moments(evidence)  # last, as ranks may have looked at them at a later step
    return msgspec.structs.replace(
        found, evidence=facts, remedy=found.remedy or remedy, missing=missing, command=command
    )
