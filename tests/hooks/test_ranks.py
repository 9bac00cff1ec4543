"""Real ranks under torchrun, on gloo: the daemon combines their parts to what one process with all data has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.programs import ranks
from tests.programs.combined import WORLD, combined, hellos, layers_of, reference, torchrun

WAYS = ("ddp", "ddp-inner", "ddp-clip", "fsdp", "fsdp-clip", "hsdp", "hsdp-clip", "fsdp1", "fsdp1-flat")

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ranks")
    torchrun(ranks.__name__, made, WAYS)
    return made


@pytest.mark.parametrize("way", WAYS)
def test_the_ranks_are_one_run_of_the_users_model(way: str, folder: Path) -> None:
    said = hellos(folder, way)
    assert [hello.identity.rank for hello in said] == list(range(WORLD))
    assert len({hello.identity.run_id for hello in said}) == 1
    wrapper = "DistributedDataParallel" if way.startswith("ddp") else "FSDP1" if way.startswith("fsdp1") else "FSDP"
    assert {any("FSDP" in what for what in hello.unseen) for hello in said} == {wrapper.startswith("FSDP")}
    assert [(hello.facts["model"], hello.facts["wrappers"]) for hello in said] == [("Sequential", [wrapper])] * WORLD


@pytest.mark.parametrize("way", ["ddp", "ddp-inner"])
def test_replicas_are_compared(way: str, folder: Path) -> None:
    """Replicas are compared also where the module within was attached, as the Hugging Face Trainer's callback does."""
    assert any(all("replica_checksum" in rank for rank in step.ranks.values()) for step in combined(folder, way))


@pytest.mark.parametrize("way", WAYS)
def test_norms_are_those_of_the_whole_model(way: str, folder: Path) -> None:
    steps, expected = combined(folder, way), reference(clip=way.endswith("-clip"))
    assert [step.seq for step in steps] == list(range(ranks.STEPS))
    assert "weight_norm" in steps[0].run
    for step, whole in zip(steps, expected, strict=True):
        assert step.run["loss"] == pytest.approx(whole.loss, rel=1e-6)
        assert step.run["grad_norm"] == pytest.approx(whole.before, rel=1e-6)
        assert step.run["grad_norm_applied"] == pytest.approx(whole.after, rel=1e-6)
        if "weight_norm" in step.run:
            assert step.run["weight_norm"] == pytest.approx(whole.weights, rel=1e-5)
        found = layers_of(step)
        if way == "fsdp1-flat":
            assert found["_flat_param"][0] == pytest.approx(whole.before, rel=1e-6)
            continue
        assert found.keys() == whole.layers.keys()
        for name, values in whole.layers.items():
            assert found[name] == pytest.approx(values, rel=1e-6, abs=1e-6 * values[0]), name


def test_where_clipping_computed_the_norm_each_rank_has_it_whole_and_no_part_of_it(folder: Path) -> None:
    """As docs/rule-language.md says of `across(grad_norm, "max")`."""
    for step, whole in zip(combined(folder, "fsdp-clip"), reference(clip=True), strict=True):
        assert step.run["grad_norm_sharded"] == 0.0
        assert max(rank["grad_norm"] for rank in step.ranks.values()) == pytest.approx(whole.before, rel=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_weights_are_the_same_to_the_bit_and_no_collective_is_added(way: str, folder: Path) -> None:
    for rank in range(WORLD):
        said = json.loads((folder / f"{way}.{rank}.json").read_text())
        assert said["same"]
        assert said["watched"] == said["bare"] > 0
