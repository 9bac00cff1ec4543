"""Framing and messages: any chunks, NaN, other versions, nonsense."""

from __future__ import annotations

import math
from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sentinel import wire
from sentinel.errors import ProtocolError

IDENTITY = wire.Identity(run="train", run_id="r1")


@given(st.lists(st.binary(max_size=64), max_size=8), st.integers(1, 17))
def test_frames_are_cut_whatever_the_chunks(reasons: list[bytes], size: int) -> None:
    messages = [wire.Goodbye(detail=reason.hex()) for reason in reasons]
    stream = b"".join(map(wire.frame, messages))
    frames = wire.Frames()
    chunks = [stream[start : start + size] for start in range(0, len(stream), size)]
    assert [wire.from_rank(body) for chunk in chunks for body in frames.feed(chunk)] == messages


def test_non_finite_numbers_survive() -> None:
    values = array("d", [math.nan, math.inf, -math.inf])
    pace = wire.Pace(spacing={}, wanted={}, costs={"hooks": math.inf})
    batch = wire.Batch(seqs=b"", times=b"", columns={"loss": wire.Column(values.tobytes())}, pace=pace)
    (body,) = wire.Frames().feed(wire.frame(batch))
    back = wire.from_rank(body)
    assert isinstance(back, wire.Batch)
    assert back.pace == pace
    assert array("d", back.columns["loss"].values).tobytes() == values.tobytes()


@pytest.mark.parametrize(
    "message",
    [
        wire.Hello(version="x", identity=IDENTITY, rollback=wire.RollbackTerms(every=1, keep=2, margin=1, budget=3)),
        wire.Hello(version="x", identity=IDENTITY, gpus=("8f3c-1", "aa-2")),
        wire.LayerTable(digest="d", layers=(wire.Layer(name="w", shape=(2, 3), dtype="float32"),)),
        wire.PhaseChanged(name="eval", seq=3, time=1.0),
        wire.StageBegan(name="longer sequences", seq=3, time=1.0),
        wire.SnapshotTaken(seq=3, nbytes=9, seconds=0.1, time=1.0, void=(1,)),
        wire.Prepared(id=1, ok=False, seq=9),
        wire.RolledBack(id=1, ok=True, to=3, at=9, seconds=0.1),
        wire.Reply(id=1, ok=True, content={"stacks": []}),
        wire.Goodbye(),
        wire.Query(what="status"),
    ],
)
def test_messages_of_a_rank_arrive_unchanged(message: wire.FromRank) -> None:
    (body,) = wire.Frames().feed(wire.frame(message))
    assert wire.from_rank(body) == message


@pytest.mark.parametrize(
    "message",
    [
        wire.Welcome(version="x"),
        wire.Refused(reason="no"),
        wire.Notice(text="t", alert={"a": math.inf}),
        wire.Closing(summary=wire.RunSummary(steps=3, step=2, incidents={"critical": 1}, snapshot=1)),
        wire.Closing(summary=None),
        wire.Attend(steps=5),
        wire.Withhold(steps=5),
        wire.Spacing(at=3, tiers={"1": 4}),
        wire.Prepare(id=1, at=5, to=2),
        wire.Commit(id=1),
        wire.Abort(id=1),
        wire.Stop(reason="r"),
        wire.Ask(id=1, what="stacks"),
        wire.Answer(ok=True, content=[1]),
    ],
)
def test_messages_of_the_daemon_arrive_unchanged(message: wire.ToRank) -> None:
    (body,) = wire.Frames().feed(wire.frame(message))
    assert wire.to_rank(body) == message


def test_a_message_of_a_later_version_is_read_as_far_as_it_is_known() -> None:
    body = msgspec.msgpack.encode({"type": "goodbye", "reason": "exit", "time": 1.5, "colour": "blue"})
    assert wire.from_rank(body) == wire.Goodbye(reason="exit", time=1.5)


def test_the_protocol_of_any_hello_can_be_read() -> None:
    body = msgspec.msgpack.encode({"type": "hello", "protocol": 99, "identity": "in a form of the future"})
    assert wire.opening_protocol(body) == 99
    with pytest.raises(ProtocolError):
        wire.from_rank(body)


@given(st.binary(max_size=200))
def test_nonsense_is_a_protocol_error_and_nothing_else(body: bytes) -> None:
    for decode in (wire.from_rank, wire.to_rank, wire.opening_protocol):
        try:
            decode(body)
        except ProtocolError:
            pass


def test_a_frame_over_the_limit_is_refused_on_both_sides() -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        list(wire.Frames().feed(b"\xff\xff\xff\xff"))
    with pytest.raises(ProtocolError, match="over the limit"):
        wire.frame(wire.Batch(seqs=bytes(wire.FRAME_LIMIT + 1), times=b""))


def test_a_column_that_is_cut_is_refused() -> None:
    assert wire.unpack_column("d", array("d", [1.5]).tobytes()) == array("d", [1.5])
    with pytest.raises(ProtocolError, match="cut short"):
        wire.unpack_column("d", b"1234")
