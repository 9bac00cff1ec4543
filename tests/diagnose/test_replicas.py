"""Which of the replicas differs."""

from __future__ import annotations

from sentinel.diagnose.catalogue import diagnose
from sentinel.diagnose.evidence import Evidence, Finding
from sentinel.runs.steps import RunStep


def diagnosis(*sums: tuple[int, ...], layers: tuple[str, ...] = ()) -> Finding:
    """Diagnose steps that are 256 apart, each given by a tuple with the checksum of each rank."""
    steps = [
        RunStep(
            256 * place, 0.0, {n: {"replica_checksum": float(s)} for n, s in enumerate(each)}, {"replica_checksum": 1.0}
        )
        for place, each in enumerate(sums)
    ]
    last = steps[-1] if steps else RunStep(0, 0.0, {}, {})
    evidence = Evidence(
        alert="ReplicaDivergence", since=last.seq, until=last.seq, last=last, steps=steps, step_offset=1000,
        differing={last.seq: layers},
    )  # fmt: skip
    return diagnose(evidence, "what the rule says")


def test_the_rank_that_differs_from_most() -> None:
    found = diagnosis((7, 7, 7, 7), (9, 9, 9, 9), (11, 11, 12, 11))
    assert found.cause == "rank 2 holds other parameters than the other 3, after step 1256"
    assert found.confidence == "high"


def test_the_layers_are_named() -> None:
    found = diagnosis((7, 7, 7), (9, 12, 9), layers=("0.weight", "2.bias"))
    assert found.cause == "rank 1 holds other parameters than the other 2, after step 1000"
    assert found.evidence == ("at step 1256 2 layers differ: 0.weight, 2.bias",)
    assert not found.missing
    assert "which layers" in diagnosis((7, 7, 7), (9, 12, 9)).missing[0]


def test_of_two_replicas_neither_is_known_to_be_right() -> None:
    found = diagnosis((7, 8))
    assert found.cause == (
        "ranks 0, 1 hold different parameters, since the run began, or before it was looked at; "
        "nothing shows which is right"
    )
    assert found.confidence == "medium"


def test_of_two_halves_each_is_named() -> None:
    found = diagnosis((7, 7, 7, 7), (8, 8, 9, 9))
    assert found.cause == (
        "ranks 0, 1 hold other parameters than ranks 2, 3, after step 1000; nothing shows which is right"
    )


def test_without_the_steps_the_differing_rank_is_not_known() -> None:
    assert diagnosis().cause == "not known"


def test_a_list_says_how_much_it_leaves_out() -> None:
    names = tuple(f"{number}.weight" for number in range(12))
    found = diagnosis((7,) * 20, (1, 2) * 10, layers=names)
    assert found.evidence[-1].endswith(" 12 layers differ: " + ", ".join(names[:8]) + " and 4 more")
    assert "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 2 more hold other parameters than ranks 1, 3, " in found.cause
