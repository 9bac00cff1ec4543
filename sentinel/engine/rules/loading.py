"""Turn the text of a rule file into rules. `load_rules` is the entry point.

text -> source (YAML with places) -> Definition (a rule's values; an override's put in) -> Rule (compiled)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from sentinel.engine.expressions.builder import Vocabulary
from sentinel.engine.rules.rule import ANNOTATIONS, OVERRIDE_KEYS, RULE_KEYS, Definition, Rule, RuleFile
from sentinel.engine.rules.rule_reader import SLUG, RuleReader, read_free_name, read_word
from sentinel.engine.source import Mistakes, Source, YamlNode
from sentinel.signals import SIGNALS
from sentinel.text import did_you_mean


def load_rules(
    text: str,
    file: str,
    *,
    base: Iterable[Rule] = (),
    signals: Mapping[str, str] | None = None,
    actions: Collection[str] | None = None,
    evidence: Collection[str] | None = None,
) -> RuleFile:
    """Parse and compile a rule file. Raises RuleError with file, line and column, and nothing else: the first mistake,
    with all others that were found.

    `base` are the rules that the file may override or disable; `signals` are metrics beyond Sentinel's own, with their
    scope, as a run's hello brings them; `actions` and `evidence`, where given, are the only ones that a rule may name.
    """
    mistakes = Mistakes()
    fields = Source(text, file).root.fields(
        "a rule file", ("group", "signals", "rules"), ("rules",), mistakes, needed=("group",)
    )
    declared = _signals(fields["signals"], mistakes) if "signals" in fields else {}
    vocabulary = {name: signal.scope for name, signal in SIGNALS.items()} | dict(signals or {})
    vocabulary |= {name: "rank" for name in declared}
    group = ""
    if "group" in fields:
        with mistakes:
            group = read_word(fields["group"], "group", SLUG, "letters a-z, digits and dashes")
    known = {rule.name: rule for rule in base}
    seen, rules, disabled = dict[str, int](), list[Rule](), list[str]()
    for node in fields["rules"].sequence("rules"):
        with mistakes:
            definition = _definition(node, group, vocabulary, known, mistakes)
            name = definition.name.word()
            if name in seen:
                raise definition.name.error(f"alert {name!r} is there twice; the first is in line {seen[name]}")
            seen[name] = definition.name.line
            if "disable" in definition.fields:
                disabled.append(name)
            else:
                rules.append(RuleReader(definition, file, actions, evidence, mistakes).rule())
    mistakes.raise_first()
    return RuleFile(file, group, tuple(rules), declared, tuple(disabled))


def _definition(
    node: YamlNode, group: str, vocabulary: Vocabulary, known: Mapping[str, Rule], mistakes: Mistakes
) -> Definition:
    """Return the definition of a rule; for an override, that of the overridden rule with the changes in it."""
    if not any(key.word() == "override" for key, _ in node.items("a rule")):
        fields = node.fields("a rule", RULE_KEYS, ("alert",), mistakes, needed=("expr",))
        return _split_definition(fields["alert"], fields, group, vocabulary, node.written, mistakes)
    noted = len(mistakes.found)
    fields = node.fields("an override", OVERRIDE_KEYS, (), mistakes)
    name = fields.pop("override")
    if name.word() not in known:
        raise name.error(f"there is no rule {name.word()!r} to override{did_you_mean(name.word(), known)}")
    if not fields and len(mistakes.found) == noted:
        raise node.error("this override changes nothing; add the keys that it changes, or `disable: true`")
    if "disable" in fields:
        if len(fields) > 1 or not fields["disable"].truth("disable"):
            raise fields["disable"].error("`disable: true` stands alone: take it out, or the other keys")
        return _split_definition(name, fields, group, vocabulary, node.written, mistakes)
    old = known[name.word()].definition
    words = {**old.vocabulary, **vocabulary}
    new = _split_definition(name, fields, old.group, words, f"{old.written}\n{node.written}", mistakes)
    return Definition(
        name,
        {**old.fields, **new.fields},
        {**old.lets, **new.lets},
        {**old.annotations, **new.annotations},
        new.group,
        new.vocabulary,
        new.written,
    )


def _split_definition(
    name: YamlNode,
    fields: Mapping[str, YamlNode],
    group: str,
    vocabulary: Vocabulary,
    written: str,
    mistakes: Mistakes,
) -> Definition:
    lets, annotations = dict[str, tuple[YamlNode, YamlNode]](), dict[str, YamlNode]()
    if "annotations" in fields:
        annotations = fields["annotations"].fields("annotations", ANNOTATIONS, (), mistakes)
    if "let" in fields:
        lets = {key.word(): (key, value) for key, value in fields["let"].items("let")}
    rest = {key: value for key, value in fields.items() if key not in ("alert", "let", "annotations")}
    return Definition(name, rest, lets, annotations, group, vocabulary, written)


def _signals(node: YamlNode, mistakes: Mistakes) -> dict[str, str]:
    """Return name -> meaning. A signal without a meaning is included, so that rules that read it cause no further
    mistakes."""
    declared = {}
    for key, value in node.items("signals"):
        with mistakes:
            name = read_free_name(key, "signal", ())
            if name in SIGNALS:
                raise key.error(f"{name} is a signal of Sentinel's own already")
            declared[name] = ""
            declared[name] = value.string(f"the meaning of {name}")
    return declared
