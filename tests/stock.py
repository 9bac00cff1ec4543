"""The stock rules, compiled once for all tests that use them."""

from __future__ import annotations

from sentinel.rulebook import loader

RULES = {rule.name: rule for rule in loader.stock_rules()}
