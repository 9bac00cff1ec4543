"""The rule engine: text and numbers in, incidents out.

    rule files    source -> syntax -> compiler (functions, builder, operators, template) -> loading (rule)
    steps         observation -> plan (windows) -> judgement -> evaluation (incident, history, state)
    tests         series, ruletest; reference writes the docs

    rules = rules_of([load_rules(text, "stability.yaml")])
    evaluator = Evaluator(rules, run="gpt")
    for transition in evaluator.observe(Observation(seq, time, {RUN: {"loss": 2.5}})): ...

Pure: no I/O, no clock of its own, no torch.
"""

from __future__ import annotations

from sentinel.engine.evaluation import Evaluator, RuleStatus
from sentinel.engine.incident import Incident, Member, Transition
from sentinel.engine.loading import load_rules
from sentinel.engine.observation import RUN, Entity, Observation, Rewound, Staged, Table
from sentinel.engine.rule import Rule, RuleFile, rules_of
from sentinel.engine.state import LAYOUT, RuleStateError

__all__ = [
    "LAYOUT",
    "RUN",
    "Entity",
    "Evaluator",
    "Incident",
    "Member",
    "Observation",
    "Rewound",
    "Rule",
    "RuleFile",
    "RuleStateError",
    "RuleStatus",
    "Staged",
    "Table",
    "Transition",
    "load_rules",
    "rules_of",
]
