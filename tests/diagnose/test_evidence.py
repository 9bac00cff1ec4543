"""What ranks collect gets into the case whenever it arrives, and into the diagnosis together with what it lacks."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from sentinel import wire
from sentinel.actions.evidence import EvidenceRequests
from sentinel.diagnose.case import Case, CaseMember
from sentinel.diagnose.catalogue import diagnose
from sentinel.diagnose.evidence import Evidence, Finding
from sentinel.runs import Attempt, Rank
from sentinel.runs.steps import RunStep
from sentinel.wire.evidence import Census, Holder, Moment, Moments, OutOfMemory, Provenance
from tests.diagnose.made import RULES, judged
from tests.diagnose.test_causes import run_of
from tests.run_parts import FakeIncidents, SentMessages


def diagnosis(alert: str, *found: Provenance, loss: float = math.nan) -> Finding:
    steps = run_of(41, lambda seq: {"loss": loss if seq == 40 else 2.0, "step_skipped": float(seq > 37)})
    evidence = Evidence(
        alert=alert, since=40, until=40, last=steps[-1], steps=steps, ranks=(0,),
        provenance=dict(enumerate(found)), live={number: make_rank(number, len(found)) for number in range(len(found))},
    )  # fmt: skip
    return diagnose(evidence, "what the rule says")


def make_rank(number: int, world_size: int) -> Rank:
    identity = wire.Identity(run="r", run_id="r-1", rank=number, world_size=world_size)
    return Rank(wire.Hello(version="1", identity=identity), 0.0)


def of(origin: Any, **fields: Any) -> Provenance:
    return Provenance(seq=40, origin=origin, **fields)


SQRT = of(
    "operation", phase="backward", module="h.2", kind="Block", operation="aten.div in SqrtBackward0", line="net.py:7"
)


def test_the_module_is_the_cause() -> None:
    found = diagnosis("NonFiniteGradient", SQRT, loss=2.0)
    assert found.cause.startswith("h.2 (Block) made it in the backward pass of step 40: aten.div in SqrtBackward0")
    assert found.confidence == "high"
    assert "add an epsilon inside" in found.remedy
    assert not [one for one in found.missing if "re-run" in one]


def test_a_value_from_outside_is_not_said_to_be_made_of_finite_inputs() -> None:
    met = of("operation", phase="forward", module="h.2", kind="Block", operation="aten.add", inputs_finite=False)
    found = diagnosis("NonFiniteLoss", met)
    assert found.cause.startswith("h.2 (Block) met it in the forward pass of step 40: aten.add got a value that was")
    assert "finite inputs" not in found.cause
    assert found.confidence == "medium"


def test_one_nodes_ranks_do_not_say_what_made_the_gradients_of_all() -> None:
    """Gradients are averaged over ranks of other nodes, whose losses are not seen here."""
    two = [RunStep(seq, 0.0, {0: {"loss": 2.0}, 1: {"loss": 2.0}}, {"loss": 2.0}) for seq in range(41)]
    here = judged("NonFiniteGradient", two, live={0: make_rank(0, 4), 1: make_rank(1, 4)})
    assert here.confidence == "low"
    assert "or a loss that is not finite on a rank that is not seen here" in here.cause
    every = judged("NonFiniteGradient", two, live={0: make_rank(0, 2), 1: make_rank(1, 2)})
    assert (every.confidence, every.cause) == (
        "high", "the backward pass of step 40 made it: the loss of that step is finite (2)"
    )  # fmt: skip


def test_one_nodes_ranks_do_not_say_what_poisoned_the_weights() -> None:
    def values(seq: int) -> dict[str, float]:
        return {"loss": math.nan if seq == 40 else 2.0, "grad_norm": math.nan if seq == 39 else 1.0}

    steps = [RunStep(seq, 0.0, {0: values(seq)}, values(seq)) for seq in range(41)]
    every, here = (judged("NonFiniteLoss", steps, live={0: make_rank(0, ranks)}) for ranks in (1, 2))
    assert (every.confidence, here.confidence) == ("high", "medium")
    assert here.cause == f"{every.cause}; they are averaged over ranks that are not seen here"


def test_of_several_ranks_the_one_that_found_something_counts() -> None:
    found = diagnosis("NonFiniteGradient", of("nothing"), of("data", phase="forward", tensors=("args[0]",)))
    assert found.cause == "bad data: NaN or infinite values in args[0] of the batch of step 40 of rank 1"


def test_weights_that_are_bad_are_no_root() -> None:
    found = diagnosis("NonFiniteLoss", of("weights", bad_weights=("a.weight",), between=("a.weight", "b.weight")))
    assert found.confidence == "medium"
    assert "it was a backward pass that broke, between b.weight and a.weight" in found.cause
    assert "the update that put it there" in found.missing


def test_weights_that_broke_after_the_alert_do_not_replace_its_cause() -> None:
    """A GPU's loss may be known some steps late, when the weights are broken already."""
    late = msgspec.structs.replace(of("weights", bad_weights=("a.weight",)), seq=43)
    bare, found = diagnosis("NonFiniteGradient"), diagnosis("NonFiniteGradient", late)
    assert (found.cause, found.confidence) == (bare.cause, bare.confidence)
    assert "a batch could be run again at step 43 only" in " ".join(found.missing)


def test_a_batch_that_was_only_looked_at_is_a_cause_of_medium_confidence() -> None:
    looked = of("data", tensors=("args[0]",), exact=False, rerun=False, missing=("the pass of that step",))
    found = diagnosis("NonFiniteLoss", looked)
    assert (found.cause, found.confidence) == (
        "bad data: NaN or infinite values in args[0] of the batch of step 40", "medium"
    )  # fmt: skip
    assert found.evidence[-1] == "the batch of step 40, looked at: data, args[0]"


@pytest.mark.parametrize("origin", ["nothing", "not known"])
def test_a_run_that_found_nothing_adds_no_certainty(origin: Any) -> None:
    bare, found = diagnosis("NonFiniteLoss"), diagnosis("NonFiniteLoss", of(origin, missing=("why",)))
    assert (found.cause, found.confidence) == (bare.cause, bare.confidence)
    assert "why" in found.missing
    assert found.evidence[0].startswith("the batch of step 40, run once more")


def test_a_provenance_that_is_not_exact_is_not_certain() -> None:
    assert diagnosis("NonFiniteGradient", msgspec.structs.replace(SQRT, exact=False)).confidence == "medium"


def test_a_collapse_of_the_scale_keeps_its_cause_and_gets_the_module() -> None:
    found = diagnosis("ScalerCollapse", SQRT)
    assert "; h.2 (Block) made it in the backward pass of step 40" in found.cause


# Requests for evidence.


def hello(rank: int) -> wire.Hello:
    identity = wire.Identity(run="r", run_id="r", rank=rank, world_size=2)
    return wire.Hello(version="test", identity=identity)


def case(alert: str, *ranks: str) -> Case:
    return Case(
        id="0.1", run="r", run_id="r", attempt=0, alert=alert, severity="critical", state="firing", first_step=40,
        first_seq=40, step=40, time=0.0, members=tuple(CaseMember("rank", name, 40, {}) for name in ranks), summary="",
        diagnosis=Finding("", "none"),
    )  # fmt: skip


def requests() -> tuple[EvidenceRequests, Attempt, list[tuple[int, wire.Message]], list[str]]:
    attempt, link, incidents = Attempt(0, 0.0), SentMessages(), FakeIncidents()
    for rank in range(2):
        attempt.hello(hello(rank), 0.0)
    return EvidenceRequests(attempt, link, incidents), attempt, link.sent, incidents.evidence


def test_ranks_are_asked_for_what_they_did_not_send_by_themselves() -> None:
    act, attempt, sent, taken = requests()
    act.add_evidence(1, wire.Collected(what="provenance", seq=40, content=msgspec.to_builtins(SQRT)))
    assert taken == ["provenance"]
    assert attempt.ranks[1].collected["provenance"] == SQRT
    act.ask_ranks(case("NonFiniteLoss"), RULES["NonFiniteLoss"].evidence)
    assert [(rank, message.what) for rank, message in sent if isinstance(message, wire.Ask)] == [(0, "provenance")]


def test_only_the_ranks_of_the_incident_are_asked() -> None:
    act, _, sent, _ = requests()
    act.ask_ranks(case("ScalerCollapse", "1"), RULES["ScalerCollapse"].evidence)
    assert [(rank, message.what) for rank, message in sent if isinstance(message, wire.Ask)] == [
        (1, "provenance"), (1, "moments"),
    ]  # fmt: skip
    act.ask_ranks(case("RankLost", "1"), RULES["RankLost"].evidence)
    assert len(sent) == 2


def test_evidence_that_an_incident_began_with_is_kept() -> None:
    """The batch came before the rank's own provenance, so the rank was asked, whose weights are broken by then."""
    act, attempt, sent, _ = requests()
    alert = case("NonFiniteLoss")
    act.ask_ranks(alert, RULES["NonFiniteLoss"].evidence)
    act.add_evidence(0, wire.Collected(what="provenance", seq=40, content=msgspec.to_builtins(SQRT)))
    later = msgspec.structs.replace(SQRT, seq=60, origin="weights")
    act.add_evidence(0, wire.Collected(what="provenance", seq=60, content=msgspec.to_builtins(later)))
    assert attempt.ranks[0].collected["provenance"] == SQRT
    alert.state = "resolved"
    act.add_evidence(0, wire.Collected(what="provenance", seq=60, content=msgspec.to_builtins(later)))
    assert attempt.ranks[0].collected["provenance"] == later, "another incident's"
    assert len(sent) == 2


def test_a_rank_that_says_goodbye_is_waited_for_while_it_owes_an_answer() -> None:
    act, _, _, _ = requests()
    act.ask_ranks(case("LossSpike", "1"), RULES["LossSpike"].evidence)
    assert [act.is_owed(0), act.is_owed(1)] == [False, True]
    act.add_evidence(1, wire.Collected(what="moments", seq=40, content={"seq": 40, "missing": ["all"]}))
    assert not act.is_owed(1)
    act.ask_ranks(case("NonFiniteLoss", "1"), RULES["NonFiniteLoss"].evidence)
    assert not act.is_owed(1), "a provenance takes a step, and there is none at the end"


@pytest.mark.parametrize(
    "content", [{}, {"seq": 1, "origin": "elsewhere"}, {**msgspec.to_builtins(SQRT), "line": "x" * 70000}]
)
def test_content_that_is_no_evidence_is_dropped(content: dict[str, Any]) -> None:
    act, attempt, _, taken = requests()
    act.add_evidence(0, wire.Collected(what="provenance", seq=40, content=content))
    act.add_evidence(0, wire.Collected(what="tea leaves", seq=40, content={}))
    assert not taken
    assert not attempt.ranks[0].collected


# Object growth (`census`).


def creep(*holders: Holder, missing: tuple[str, ...] = ()) -> Finding:
    steps = run_of(1600, lambda seq: {"step_seconds": 0.1} | ({"rss_bytes": 3e8 + 5e4 * seq} if seq % 8 == 0 else {}))
    taken = Census(seq=1590, steps=32, holders=holders, missing=missing)
    evidence = Evidence(
        alert="MemoryCreep", since=1599, until=1599, last=steps[-1], steps=steps, ranks=(0,), census={0: taken}
    )
    return diagnose(evidence, "what the rule says")


def test_a_run_that_ended_between_the_counts_names_no_holder() -> None:
    steps = run_of(1600, lambda seq: {"step_seconds": 0.1} | ({"rss_bytes": 3e8 + 5e4 * seq} if seq % 8 == 0 else {}))
    taken = Census(seq=1599, steps=0, missing=("who holds it: the run ended",))
    evidence = Evidence(
        alert="MemoryCreep", since=1599, until=1599, last=steps[-1], steps=steps, ranks=(0,), census={0: taken}
    )
    found = diagnose(evidence, "what the rule says")
    assert (found.confidence, found.missing) == ("medium", ("who holds it: the run ended",))
    assert found.cause.startswith("something keeps what each step makes")


LOSSES = Holder(
    name="losses, a variable of module __main__", kind="list", line="train.py:9", length=1590, entries_per_step=1.0,
    bytes_per_step=4.0, tensors=True, graph=True, example="scalar float32",
)  # fmt: skip


def test_a_holder_of_graphs_is_the_cause() -> None:
    found = creep(LOSSES)
    assert found.cause.startswith("losses, a variable of module __main__ (train.py:9) keeps what each step makes: the")
    assert found.keeper == "losses, a variable of module __main__ (train.py:9)"
    assert found.confidence == "high"
    assert found.remedy.startswith("put loss.item(), or output.detach(), into losses")
    assert not [one for one in found.missing if one.startswith("who holds it")]
    assert "gets 1 entry of scalar float32 a step, 4 bytes, each with the graph" in found.evidence[1]


def test_a_chain_of_graphs_and_a_hook_have_their_own_remedies() -> None:
    mean = msgspec.structs.replace(LOSSES, name="mean, a local of train", kind="tensor", nodes=9000, nodes_per_step=9.0)
    assert "compute it from loss.item()" in creep(mean).remedy
    assert "handle.remove()" in creep(msgspec.structs.replace(LOSSES, hook="h.3")).remedy


def test_a_holder_that_is_small_is_not_certain() -> None:
    small = msgspec.structs.replace(LOSSES, graph=False)
    assert creep(small).confidence == "medium"
    assert creep(msgspec.structs.replace(small, bytes_per_step=4e4)).confidence == "high"


def test_numbers_in_a_list_are_not_blamed() -> None:
    found = creep(msgspec.structs.replace(LOSSES, graph=False, tensors=False, bytes_per_step=24.0, example="float"))
    assert found.cause.startswith("something keeps what each step makes")
    assert "look at data loader workers" in found.missing[0]


# Second moments.


def test_layers_out_of_line_are_facts() -> None:
    odd = Moments(seq=40, usual=1.1, layers=(Moment("h.3.weight", 1e-3, 0.4), Moment("h.4.weight", 1e-3, 2e-3)))
    steps = run_of(41, lambda _: {"loss": 2.0})
    evidence = Evidence(
        alert="OptimizerStateCorrupt", since=40, until=40, last=steps[-1], steps=steps, moments={0: odd}
    )
    facts = diagnose(evidence, "").evidence
    assert "second moments out of line at step 40: h.3.weight (400x its gradient)" in facts


def test_second_moments_of_a_later_step_do_not_lead() -> None:
    odd = Moments(seq=90, usual=1.1, layers=(Moment("h.3.weight", 1e-3, 0.4),))
    steps = run_of(41, lambda seq: {"loss": 9.0 if seq == 40 else 2.0, "grad_norm": 1.0})
    facts = judged("LossSpike", steps, moments={0: odd}).evidence
    assert facts[0] == "loss was unusual at step 40: 9, usually 2"
    assert "at step 90" in facts[-1]


# Out of memory.

GB = 10**9
FULL = OutOfMemory(
    seq=40, device="cuda", phase="backward", line="train.py:9", requested=2 * GB, parameters=4 * GB, gradients=4 * GB,
    optimizer=8 * GB, allocated=70 * GB, reserved=75 * GB, free=GB, limit=80 * GB,
)  # fmt: skip


def mortem(found: OutOfMemory | None, world: int = 1, batch: float = 32.0, **facts: str) -> Finding:
    """Diagnose rank 0 of a job, of which each rank takes `batch` samples at a time."""
    own = {"batch_size": batch}
    steps = [
        RunStep(seq, float(seq), dict.fromkeys(range(world), own), {"batch_size": batch * world}) for seq in range(41)
    ]
    ranks = Attempt(0, 0.0)
    ranks.hello(msgspec.structs.replace(hello(0), identity=wire.Identity(run="r", run_id="r", world_size=world)), 0.0)
    evidence = Evidence(
        alert="OutOfMemory", since=40, until=40, last=steps[-1], steps=steps, ranks=(0,), live=ranks.ranks,
        out_of_memory={0: found} if found else {}, facts=facts,
    )  # fmt: skip
    return diagnose(evidence, "what the rule says")


def test_the_parts_and_the_cheapest_change_that_fits() -> None:
    found = mortem(FULL)
    assert found.cause == (
        "activations and the rest are the largest part (54 GB) of what rank 0 held when it asked for 2 GB in the "
        "backward pass at train.py:9"
    )
    assert found.evidence[0].startswith("activations and the rest 54 GB, optimizer states 8 GB, idle pieces of the")
    assert found.remedy.startswith("set PYTORCH_ALLOC_CONF=expandable_segments:True")
    buffered = mortem(msgspec.structs.replace(FULL, buffers=3 * GB))
    assert buffered.evidence[0].startswith("activations and the rest 51 GB, optimizer states 8 GB, parameters 7 GB")
    whole = mortem(msgspec.structs.replace(FULL, reserved=70 * GB))
    assert whole.remedy == "half of the micro-batch (32 to 16) with 2 times the accumulation"


def test_the_micro_batch_is_one_ranks_and_one_sample_is_not_split() -> None:
    full = msgspec.structs.replace(FULL, reserved=70 * GB)
    assert mortem(full, world=8, batch=4.0).remedy == "half of the micro-batch (4 to 2) with 2 times the accumulation"
    assert mortem(full, world=8, batch=1.0).remedy.startswith("activation checkpointing")


def test_states_that_the_first_step_makes_are_in_what_must_fit() -> None:
    """Of two tensors per parameter the optimizer has made a few; no activation is left by then."""
    begun = msgspec.structs.replace(
        FULL, phase="optimizer", parameters=16 * GB, gradients=16 * GB, optimizer=4 * GB, allocated=40 * GB,
        reserved=40 * GB, limit=60 * GB, requested=GB // 10, free=20 * GB,
    )  # fmt: skip
    assert mortem(begun, optimizer="AdamW").remedy == "an 8-bit optimizer (bitsandbytes: AdamW8bit)"
    assert "8-bit" not in mortem(begun, optimizer="AdamW8bit").remedy
    assert "micro-batch" not in mortem(begun, optimizer="AdamW").remedy + mortem(begun, optimizer="SGD").remedy


def test_states_that_are_too_large_are_sharded() -> None:
    states = msgspec.structs.replace(
        FULL,
        parameters=20 * GB,
        gradients=20 * GB,
        optimizer=36 * GB,
        allocated=77 * GB,
        reserved=77 * GB,
        requested=36 * GB,
    )
    assert mortem(states, world=8).remedy == "fully_shard over the 8 ranks"
    assert mortem(states).remedy.startswith("no single change makes room for")


def test_a_shape_that_is_wrong_is_no_lack_of_memory() -> None:
    assert "a size or a shape is wrong there" in mortem(msgspec.structs.replace(FULL, requested=4 << 50)).cause


def test_without_figures_nothing_is_known() -> None:
    assert mortem(None).cause == "not known"
