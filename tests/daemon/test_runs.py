"""Runs, attempts and ranks: 1, 4 and 64 of them, late, silent, lost, restarted or run again."""

from __future__ import annotations

import math
from array import array

import msgspec
import pytest

from sentinel import wire
from sentinel.errors import ProtocolError
from sentinel.runs import ARRIVAL_SECONDS, RECENT_LAYER_STATS, Attempt, Run, Runs
from sentinel.runs.steps import RunStep, combine_layers, combine_ranks


def hello(rank: int = 0, world: int = 1, *, session: str = "a", attempt: int = 0, next_seq: int = 0) -> wire.Hello:
    identity = wire.Identity(
        run="train",
        run_id="r1",
        attempt=attempt,
        rank=rank,
        world_size=world,
        pid=100 + rank,
        session=f"{session}{rank}",
    )
    return wire.Hello(version="test", identity=identity, next_seq=next_seq)


def batch(seqs: list[int], **columns: list[float]) -> wire.Batch:
    return wire.Batch(
        seqs=array("q", seqs).tobytes(),
        times=array("d", map(float, seqs)).tobytes(),
        columns={name: wire.Column(array("d", values).tobytes()) for name, values in columns.items()},
    )


@pytest.mark.parametrize("world", [1, 4, 64])
def test_the_runs_loss_is_the_mean_of_the_ranks(world: int) -> None:
    run = Run("train", "r1", now=0.0)
    for number in range(world):
        run.hello(hello(number, world), now=0.0)
    for number, rank in run.attempt.ranks.items():
        run.attempt.take(rank, batch([0, 1], loss=[float(number), 2.0 * number]), now=0.1)
    steps = list(run.attempt.take_closed(0.1))
    assert [step.run["loss"] for step in steps] == [(world - 1) / 2, world - 1]
    assert all(len(step.ranks) == world for step in steps)
    assert run.attempt.complete


@pytest.mark.parametrize("world", [4, 64])
def test_ranks_that_have_not_arrived_are_waited_for_and_then_not(world: int) -> None:
    attempt = Attempt(0, now=0.0)
    rank = attempt.hello(hello(0, world), now=0.0)
    attempt.take(rank, batch([0], loss=[1.0]), now=0.1)
    assert list(attempt.take_closed(0.2)) == []
    assert [step.seq for step in attempt.take_closed(2.2)] == [0]
    assert not attempt.complete
    # Only rank 0 is attached: from now on nothing waits for the others.
    assert list(attempt.take_closed(ARRIVAL_SECONDS + 1)) == []
    attempt.take(rank, batch([1], loss=[1.0]), now=ARRIVAL_SECONDS + 1)
    assert [step.seq for step in attempt.take_closed(ARRIVAL_SECONDS + 1)] == [1]


@pytest.mark.parametrize("world", [4, 64])
def test_a_lost_rank_stops_no_other_and_can_come_back(world: int) -> None:
    run = Run("train", "r1", now=0.0)
    for number in range(world):
        run.hello(hello(number, world), now=0.0)
    first = run.attempt
    first.lose(world - 1, goodbye=None)
    for number in range(world - 1):
        first.take(first.ranks[number], batch([0], loss=[1.0]), now=0.1)
    assert [len(step.ranks) for step in first.take_closed(0.1)] == [world - 1]
    assert first.ranks[world - 1].state == "lost"
    _, began = run.hello(hello(world - 1, world, next_seq=1), now=0.2)
    assert not began
    assert run.attempt is first
    assert first.complete


def test_a_silent_rank_is_told_apart_from_a_lost_one() -> None:
    attempt = Attempt(0, now=0.0)
    attempt.hello(hello(0, 2), now=0.0)
    attempt.hello(hello(1, 2), now=0.0)
    attempt.take(attempt.ranks[0], batch(list(range(10)), loss=[1.0] * 10), now=0.1)
    assert len(list(attempt.take_closed(1.2))) == 10
    assert attempt.silent() == {1}
    assert attempt.ranks[1].state == "live"


@pytest.mark.parametrize("world", [1, 4, 64])
def test_a_restart_is_a_new_attempt_into_which_all_ranks_follow(world: int) -> None:
    run = Run("train", "r1", now=0.0)
    for number in range(world):
        run.hello(hello(number, world), now=0.0)
    order = [*range(world - 1, -1, -1)]
    began = [run.hello(hello(number, world, session="b", attempt=1), now=9.0)[1] for number in order]
    assert began == [True] + [False] * (world - 1)
    assert run.attempt.number == 1
    assert run.attempt.complete
    assert run.attempt.last_seq == -1


def test_a_rank_of_an_attempt_that_is_over_is_refused() -> None:
    run = Run("train", "r1", now=0.0)
    run.hello(hello(0, 2, attempt=1, session="b"), now=0.0)
    with pytest.raises(ProtocolError, match="attempt 0 of train is over"):
        run.hello(hello(1, 2, attempt=0), now=0.1)


def test_a_cell_that_runs_again_is_a_new_attempt_though_nothing_was_restarted() -> None:
    run = Run("notebook", "r1", now=0.0)
    run.hello(hello(session="a"), now=0.0)
    _, began = run.hello(hello(session="b"), now=1.0)
    assert began
    assert run.attempt.number == 1


def test_runs_are_told_apart_by_their_ids() -> None:
    runs = Runs()
    first = runs.find_run(wire.Identity(run="x", run_id="1"), now=0.0)
    second = runs.find_run(wire.Identity(run="x", run_id="2"), now=0.0)
    assert first is not second
    assert runs.find_run(wire.Identity(run="x", run_id="1"), now=1.0) is first
    assert list(runs) == [first, second]


def test_norms_of_shards_add_in_squares_and_replicas_count_once() -> None:
    ranks = [
        {"grad_norm": math.sqrt(4.0 + 9.0), "grad_norm_sharded": 3.0},
        {"grad_norm": math.sqrt(4.0 + 16.0), "grad_norm_sharded": 4.0},
    ]
    assert combine_ranks(ranks)["grad_norm"] == pytest.approx(math.sqrt(4.0 + 9.0 + 16.0))
    assert combine_ranks([{"grad_norm": 5.0}, {"grad_norm": 5.0}])["grad_norm"] == 5.0
    # Replicas of shards: the second rank has the shards of the first, and does not count them.
    replicas = [{**ranks[0]}, {"grad_norm": math.sqrt(4.0 + 9.0), "grad_norm_sharded": 0.0}]
    for order in (replicas, replicas[::-1]):
        assert combine_ranks(order)["grad_norm"] == pytest.approx(math.sqrt(4.0 + 9.0))


@pytest.mark.parametrize("place", range(3))
def test_the_norm_is_the_same_wherever_a_rank_without_shards_stands(place: int) -> None:
    """Its norm is that of the replicated part alone, and is paired with no other rank's shards."""
    ranks = [{"grad_norm": math.sqrt(9.0 + shard * shard), "grad_norm_sharded": shard} for shard in (4.0, 12.0)]
    ranks.insert(place, {"grad_norm": 3.0})
    assert combine_ranks(ranks)["grad_norm"] == pytest.approx(13.0)
    assert combine_ranks(ranks)["grad_norm_sharded"] == pytest.approx(math.hypot(4.0, 12.0))


@pytest.mark.parametrize("odd", [math.nan, math.inf])
@pytest.mark.parametrize("shard", [{}, {"grad_norm_sharded": 3.0}], ids=["replicas", "shards"])
def test_a_norm_that_is_not_finite_on_one_rank_is_not_left_out(odd: float, shard: dict[str, float]) -> None:
    """As in a script that forgot to wrap the model: no collective hands the NaN to the other ranks."""
    ranks = [{"grad_norm": 5.0, **shard}, {"grad_norm": odd, **shard}]
    for order in (ranks, ranks[::-1]):
        assert combine_ranks(order)["grad_norm"] == pytest.approx(odd, nan_ok=True)


def test_no_norm_is_given_where_a_shard_is_missing() -> None:
    """A rank over its limit leaves a sample out: the norm of the others' shards alone would be too small."""
    sampled = {"loss": 1.0, "grad_norm": 5.0, "grad_norm_sharded": 3.0}
    for order in ([sampled, {"loss": 1.0}], [{"loss": 1.0}, sampled]):
        assert combine_ranks(order) == {"loss": 1.0, "grad_norm_sharded": 3.0}
    assert combine_ranks([{"loss": 1.0, "grad_norm": 5.0}, {"loss": 1.0}])["grad_norm"] == 5.0, "replicas are whole"


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_norm_is_not_finite_where_a_shard_or_a_replica_is_not(odd: float) -> None:
    fine = {"grad_norm": 5.0, "grad_norm_sharded": 3.0}
    in_shard, in_replica = {"grad_norm": odd, "grad_norm_sharded": odd}, {"grad_norm": odd, "grad_norm_sharded": 3.0}
    for ranks in ([fine, in_shard], [in_shard, fine], [in_replica, in_replica]):
        assert combine_ranks(ranks)["grad_norm"] == pytest.approx(odd, nan_ok=True)


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_one_non_finite_rank_makes_the_run_non_finite(odd: float) -> None:
    values = combine_ranks([{"loss": 1.0, "step_seconds": 1.0}, {"loss": odd, "step_seconds": odd}])
    assert not math.isfinite(values["loss"])
    assert not math.isfinite(values["step_seconds"])


def test_layers_of_shards_are_put_together() -> None:
    def table(shard: int) -> wire.LayerTable:
        layers = (
            wire.Layer(
                name="w", shape=(8, 2), dtype="float32", placement=("shard(0)",), mesh=(2,), coordinates=(shard,)
            ),
            wire.Layer(name="b", shape=(2,), dtype="float32"),
        )
        return wire.LayerTable(digest=str(shard), layers=layers)

    def block(shard: int, norms: list[float], lows: list[float]) -> wire.LayerBlock:
        stats = {"layer_grad_norm": array("f", norms).tobytes(), "layer_grad_min": array("f", lows).tobytes()}
        return wire.LayerBlock(seq=0, table=str(shard), stats=stats)

    stats = combine_layers(
        [(table(0), block(0, [3.0, 1.0], [-1.0, 0.0])), (table(1), block(1, [4.0, 1.0], [-2.0, 0.0]))]
    )
    assert dict(stats.items()) == {
        "w": {"layer_grad_norm": 5.0, "layer_grad_min": -2.0},
        "b": {"layer_grad_norm": 1.0, "layer_grad_min": 0.0},
    }


def test_layers_without_a_value_are_left_out() -> None:
    table = wire.LayerTable(digest="t", layers=tuple(wire.Layer(name=n, shape=(1,), dtype="float32") for n in "abc"))
    block = wire.LayerBlock(
        seq=0, table="t", stats={"layer_grad_norm": array("f", [2.0]).tobytes()}, layers=array("I", [1]).tobytes()
    )
    assert dict(combine_layers([(table, block)]).items()) == {"b": {"layer_grad_norm": 2.0}}


def test_a_missing_row_is_not_a_nan() -> None:
    attempt = Attempt(0, now=0.0)
    rank = attempt.hello(hello(), now=0.0)
    sparse = wire.Column(array("d", [math.nan]).tobytes(), array("H", [1]).tobytes())
    message = wire.Batch(
        seqs=array("q", [0, 1]).tobytes(), times=array("d", [0, 1]).tobytes(), columns={"grad_norm": sparse}
    )
    attempt.take(rank, message, now=0.1)
    first, second = attempt.take_closed(0.1)
    assert "grad_norm" not in first.run
    assert math.isnan(second.run["grad_norm"])


@pytest.mark.parametrize(
    "broken",
    [
        wire.Batch(seqs=array("q", [0, 1]).tobytes(), times=array("d", [0]).tobytes()),
        wire.Batch(seqs=array("q", [0]).tobytes(), times=b"123"),
        wire.Batch(
            seqs=array("q", [0]).tobytes(),
            times=array("d", [0]).tobytes(),
            columns={"loss": wire.Column(array("d", [1, 2]).tobytes())},
        ),
        wire.Batch(
            seqs=array("q", [0]).tobytes(),
            times=array("d", [0]).tobytes(),
            columns={"loss": wire.Column(array("d", [1]).tobytes(), array("H", [7]).tobytes())},
        ),
    ],
)
def test_a_batch_that_does_not_fit_together_is_refused(broken: wire.Batch) -> None:
    attempt = Attempt(0, now=0.0)
    rank = attempt.hello(hello(), now=0.0)
    with pytest.raises(ProtocolError):
        attempt.take(rank, broken, now=0.0)


def test_rewinding_forgets_what_came_after() -> None:
    attempt = Attempt(0, now=0.0)
    rank = attempt.hello(hello(), now=0.0)
    attempt.take(rank, batch(list(range(10)), loss=[1.0] * 10), now=0.1)
    assert len(list(attempt.take_closed(0.1))) == 10
    attempt.rewind(to=3, at=8)
    assert [step.seq for step in attempt.recent] == [0, 1, 2, 3, 9]


def test_steps_of_other_optimizers_do_not_pile_up() -> None:
    attempt = Attempt(0, 0.0)
    rank = attempt.hello(hello(), 0.0)
    other = batch([0, 1, 2], loss=[1.0, 1.0, 1.0])
    attempt.take(rank, wire.Batch(stream=1, seqs=other.seqs, times=other.times, columns=other.columns), 0.0)
    assert list(attempt.take_closed(0.0)) == []
    assert rank.last_seq == -1


def test_layer_tables_are_kept_up_to_a_limit_the_newest_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sentinel.runs.attempt.TABLE_LAYERS", 4)
    run = Attempt(0, now=0.0)
    layer = wire.Layer(name="w", shape=(1,), dtype="float32")
    kept = []
    for digest, count in (("a", 2), ("b", 2), ("c", 1), ("d", 9), ("e", 1)):
        run.add_table(wire.LayerTable(digest=digest, layers=(layer,) * count))
        kept.append("".join(run.tables))
    assert kept == ["a", "ab", "bc", "d", "e"]


def test_an_alert_looks_back_from_its_own_step_whatever_else_its_batch_holds() -> None:
    attempt, count = Attempt(0, now=0.0), 400  # more than are kept
    rank = attempt.hello(hello(), now=0.0)
    attempt.tables["t"] = wire.LayerTable(digest="t", layers=(wire.Layer(name="a", shape=(1,), dtype="float32"),))
    message = batch(list(range(count)), loss=[1.0] * count)
    blocks = [
        wire.LayerBlock(seq=seq, table="t", stats={name: array("f", [seq]).tobytes() for name in of_step(seq)})
        for seq in range(count)
    ]
    attempt.take(rank, msgspec.structs.replace(message, layers=tuple(blocks)), now=0.1)
    for step in attempt.take_closed(0.1):
        assert attempt.recent[-1].seq == attempt.recent_layers[-1][0] == step.seq
    assert attempt.recent_layers[0][0] == count - RECENT_LAYER_STATS
    rare = [seq for seq, layers in attempt.layer_samples if "layer_update_ratio" in layers.stats]
    assert rare == [0, 100, 200, 300], "what is taken rarely is kept for longer"
    attempt.rewind(to=99, at=250)
    assert [seq for seq, layers in attempt.layer_samples if "layer_update_ratio" in layers.stats] == [0, 300]


def of_step(seq: int) -> list[str]:
    return ["layer_grad_norm", "layer_update_ratio"] if seq % 100 == 0 else ["layer_grad_norm"]


def test_what_is_shown_of_a_fast_loop_is_the_newest_of_each_signal() -> None:
    attempt = Attempt(0, 0.0)
    for seq in range(160):
        values = {"loss": float(seq)}
        if seq % 64 == 0:
            values |= {"learning_rate": 0.1 * seq, **({"old": 1.0} if seq < 64 else {})}
        attempt.recent.append(RunStep(seq=seq, time=0.0, ranks={3: values}, run=values))
    attempt.hello(wire.Hello(version="t", identity=wire.Identity(run="t", run_id="r", rank=3, world_size=5)), 0.0)
    assert attempt.present() == {"loss": 159.0, "learning_rate": pytest.approx(12.8)}
    assert attempt.latest_of_ranks("learning_rate") == {3: pytest.approx(12.8)}
    assert attempt.latest_of_ranks("old") == {}


def test_what_is_logged_after_the_last_step_becomes_part_of_it() -> None:
    attempt = Attempt(0, now=0.0)
    one, other = (attempt.hello(hello(number, 2), now=0.0) for number in (0, 1))
    attempt.take(one, batch([0], loss=[1.0]), now=0.1)
    assert attempt.take(one, batch([0], val=[4.0]), now=0.1) == [], "the other rank is waited for"
    attempt.take(other, batch([0], loss=[3.0]), now=0.1)
    (step,) = attempt.take_closed(0.1)
    assert step.run == {"loss": 2.0, "val": 4.0}
    (more,) = attempt.take(other, batch([0], val=[6.0], loss=[9.0]), now=0.2)
    assert (more.seq, more.run) == (0, {"val": 5.0})
    assert attempt.recent[-1].run == {"loss": 2.0, "val": 5.0}, "what was said before stays"
    assert attempt.take(other, batch([0], val=[7.0]), now=0.3) == [], "nor is it said twice"
    assert list(attempt.take_closed(0.3)) == []


def test_a_batch_may_hold_a_step_and_what_was_logged_after_it() -> None:
    attempt = Attempt(0, now=0.0)
    rank = attempt.hello(hello(), now=0.0)
    columns = {
        "loss": wire.Column(values=array("d", [1.0]).tobytes(), rows=array("H", [0]).tobytes()),
        "val": wire.Column(values=array("d", [4.0]).tobytes(), rows=array("H", [1]).tobytes()),
    }
    attempt.take(rank, msgspec.structs.replace(batch([0, 0]), columns=columns), now=0.1)
    assert [(step.seq, step.run) for step in attempt.take_closed(0.1)] == [(0, {"loss": 1.0, "val": 4.0})]
