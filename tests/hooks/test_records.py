"""How values on a device are read, with the CPU in its place: packed, copied, read once a marker word has arrived."""

from __future__ import annotations

import pytest
import torch

from sentinel import wire
from sentinel.hooks.core.faults import Unseen
from sentinel.hooks.loop.step_accumulator import StepTotals
from sentinel.hooks.measure.probe import Step
from sentinel.hooks.torch_interop.layer_table import Layers
from sentinel.hooks.torch_interop.tensors import pack_float32
from sentinel.hooks.transport.records import Record, Transfers, make_batch, record
from tests.hooks.loops import model


def of_device(values: dict[str, float], layers: dict[str, list[float]], transfers: Transfers) -> Record:
    made = Record(0, 7, 1.0, wire.LayerTable(digest="", layers=()))
    parts = [(name, False, torch.tensor(value)) for name, value in values.items()]
    parts += [(name, True, torch.tensor(column)) for name, column in layers.items()]
    made.transfer = transfers.begin(parts)
    return made


def buffer_of(record: Record) -> torch.Tensor:
    assert record.transfer is not None
    return record.transfer._buffer


def test_values_come_back_in_their_places() -> None:
    made = of_device({"loss": 2.5, "grad_norm": 7.0}, {"layer_grad_norm": [1.0, 2.0, 3.0]}, Transfers())
    assert made.ready()
    assert made.values == {"loss": 2.5, "grad_norm": 7.0}
    assert list(wire.unpack_column("f", made.block["layer_grad_norm"])) == [1.0, 2.0, 3.0]


def test_nothing_is_read_before_the_word_has_arrived() -> None:
    transfers = Transfers()
    made = of_device({"loss": 2.5}, {}, transfers)
    buffer = buffer_of(made)
    buffer[0] = 0.0  # as if the copy were under way
    assert not made.ready()
    assert made.values == {}
    buffer[0] = 1.0
    assert made.ready()
    assert made.values == {"loss": 2.5}


def test_layers_that_are_under_way_count_and_can_be_left_out() -> None:
    wanted, stripped = (of_device({"loss": 2.5}, {"layer_grad_norm": [1.0, 2.0]}, Transfers()) for _ in range(2))
    stripped.strip()
    assert (wanted.nbytes(), stripped.nbytes()) == (8, 0)
    assert wanted.ready()
    assert stripped.ready()
    assert (wanted.nbytes(), stripped.nbytes()) == (8, 0), "as much comes out of the queue as went into it"
    assert (stripped.values, stripped.block) == ({"loss": 2.5}, {})


def test_buffers_are_used_again_once_read_and_not_before() -> None:
    transfers = Transfers()
    first, second = of_device({"loss": 1.0}, {}, transfers), of_device({"loss": 2.0}, {}, transfers)
    address = buffer_of(first).data_ptr()
    assert buffer_of(second).data_ptr() != address
    assert first.ready()
    third = of_device({"loss": 3.0}, {}, transfers)
    assert buffer_of(third).data_ptr() == address
    assert second.ready()
    assert third.ready()
    assert [made.values["loss"] for made in (first, second, third)] == [1.0, 2.0, 3.0]


def test_host_values_are_read_at_once() -> None:
    net = model()
    layers = Layers(0, [net], torch.optim.SGD(net.parameters(), lr=0.1))
    step = Step(3, None, StepTotals(), values={"loss": 1.5, "grad_norm": torch.tensor(2.5)})
    made = record(step, layers, 9.0, Transfers(), Unseen())
    assert made.ready()
    assert (made.stream, made.seq, made.time, made.values) == (0, 3, 9.0, {"loss": 1.5, "grad_norm": 2.5})


@pytest.mark.faults
@pytest.mark.parametrize("value", [torch.empty(2, device="meta"), torch.empty((), dtype=torch.cfloat, device="meta")])
def test_a_value_on_a_device_that_is_no_number_is_left_out(value: torch.Tensor) -> None:
    """It is a plugin's. Read on the sender's thread, it would end the watch over the run."""
    net = model()
    layers = Layers(0, [net], torch.optim.SGD(net.parameters(), lr=0.1))
    made = record(Step(3, None, StepTotals(), values={"loss": 1.5, "mine": value}), layers, 9.0, Transfers(), Unseen())
    assert made.ready()
    assert made.values == {"loss": 1.5}


def test_packed() -> None:
    column = torch.arange(6, dtype=torch.float64).reshape(2, 3).t()
    assert list(wire.unpack_column("f", pack_float32(column))) == column.flatten().tolist()
    assert pack_float32(torch.empty(0)) == b""


def test_columns_hold_what_each_step_had() -> None:
    table = wire.LayerTable(digest="d", layers=())
    records = [Record(0, seq, float(seq), table) for seq in (4, 5, 6)]
    for made in records:
        made.values["loss"] = made.seq / 2
    records[1].values["grad_norm"] = 9.0
    records[2].block, records[2].rows = {"layer_grad_norm": b"1234"}, b"5678"
    pace = wire.Pace(spacing={"2": 8}, wanted={"2": 8}, costs={})
    batch = make_batch(records, dropped=3, pace=pace)
    assert list(wire.unpack_column("q", batch.seqs)) == [4, 5, 6]
    assert batch.columns["loss"].rows == b""
    assert list(wire.unpack_column("d", batch.columns["loss"].values)) == [2.0, 2.5, 3.0]
    assert list(wire.unpack_column("H", batch.columns["grad_norm"].rows)) == [1]
    assert batch.layers == (wire.LayerBlock(seq=6, table="d", stats=records[2].block, layers=b"5678"),)
    assert (batch.dropped, batch.pace) == (3, pace)
    assert wire.from_rank(wire.frame(batch)[4:]) == batch
