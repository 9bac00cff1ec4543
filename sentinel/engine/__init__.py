"""The rule engine: text and numbers in, incidents out.

    rules/          rule files, by way of `source` (YAML with its places), to rules
    expressions/    a rule's texts to plans: syntax -> compiler (functions, builder, operators) -> plan
    windows/        the memory of a plan
    judging/        observations through the rules: evaluation (rule_state, judgement, incident, history, state)
    ruletest, backtest    rules over made-up series, and over a recorded run

    rules = rules_of([load_rules(text, "stability.yaml")])
    evaluator = Evaluator(rules, run="gpt")
    for transition in evaluator.observe(Observation(seq, time, {RUN: {"loss": 2.5}})): ...

Pure: no I/O, no clock of its own, no torch.
"""

from __future__ import annotations

from sentinel.engine.judging.evaluation import Evaluator, RuleStatus
from sentinel.engine.judging.incident import Incident, Member, Transition
from sentinel.engine.judging.state import LAYOUT, RuleStateError
from sentinel.engine.observation import RUN, Entity, Observation, Rewound, Staged, Table
from sentinel.engine.rules.loading import load_rules
from sentinel.engine.rules.rule import Rule, RuleFile, rules_of

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
