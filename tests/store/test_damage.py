"""A damaged history is moved aside, that is reported, and a new one takes its place."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import zlib
from array import array
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from sentinel import wire
from sentinel.cli import cli
from sentinel.errors import ConfigError, DamageError
from sentinel.node import paths
from sentinel.notify import silences, undelivered
from sentinel.notify.entry import Entry
from sentinel.notify.outbox import Outbox, row
from sentinel.report.content import report
from sentinel.runs.steps import LayerStats, RunStep
from sentinel.store import History, Store, layout, thinning
from tests.daemon.simulated import SimulatedRank, daemon_process
from tests.waiting import until


def filled(path: Path, steps: int = 2000) -> Store:
    store = Store(path, run="train", run_id="r1")
    store.records.begin_attempt(0, msgspec.msgpack.encode({"step_offset": 7}))
    store.records.add_rank(0, 0, process=1, hello=b"hello")
    for seq in range(steps):
        values = {"loss": float(seq), "noise": float(os.urandom(1)[0])}
        store.records.add_step(0, RunStep(seq, 1000.0 + seq, {0: values}, values))
    store.records.put_incident("0.1", 5, {"id": "0.1", "alert": "LossSpike"})
    store.write()
    return store


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def scribbled(path: Path) -> None:
    """Overwrite all but the first page, which holds the header and the schema."""
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(path.stat().st_size - 4096))


def no_database(path: Path) -> None:
    path.write_bytes(b"what is this" * 1000)


harm = pytest.mark.parametrize("harm", [truncated, scribbled, no_database], ids=lambda harm: harm.__name__)


@harm
def test_a_reader_reports_damage(tmp_path: Path, harm: object) -> None:
    path = tmp_path / "r1.sqlite"
    filled(path).close()
    harm(path)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"r1.sqlite: (the history is damaged|not a history that can be read)"):
        read(path)


def read(path: Path) -> None:
    with History(path) as history:
        list(history.steps())
        history.incidents()


NO_UTF8 = b"\x81\xa2id\xa2\xc3\x28"
"""A map of msgpack in whose text a bit was flipped: SQLite keeps no checksums, and finds nothing wrong with it."""


def flipped(path: Path, table: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        assert database.execute(f"UPDATE {table} SET body = ?", (NO_UTF8,)).rowcount


def test_text_that_is_no_utf8_any_more_is_damage_to_a_reader(tmp_path: Path) -> None:
    path = tmp_path / "r1.sqlite"
    filled(path, 10).close()
    flipped(path, "incidents")
    with pytest.raises(ConfigError, match=r"r1.sqlite: the history is damaged"):
        read(path)


def packed(content: object) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(content))


def chunk(*, seqs: bytes = bytes(8), values: bytes = bytes(8), rows: bytes = b"") -> bytes:
    return packed({"seqs": seqs, "times": bytes(8), "columns": {"loss": [values, rows]}})


BODIES = {
    "an incident of another type": ("incidents", msgspec.msgpack.encode(7)),
    "an incident whose time is text": ("incidents", msgspec.msgpack.encode({"id": "0.1", "time": "noon"})),
    "an incident in the year 30,000": ("incidents", msgspec.msgpack.encode({"id": "0.1", "time": 1e12})),
    "an incident without a body": ("incidents", None),
    "a rollback that does not say where to": ("events", msgspec.msgpack.encode({"ok": True})),
    "a chunk that is cut": ("chunks", chunk()[:-4]),
    "a column of half a number": ("chunks", chunk(values=b"abc")),
    "a column of more steps": ("chunks", chunk(values=bytes(16))),
    "a row that is not there": ("chunks", chunk(rows=b"\7\0")),
    "a seq of 2**62": ("chunks", chunk(seqs=(2**62).to_bytes(8, "little"))),
    "layers without their numbers": ("layers", packed({"names": ["a"], "stats": {}, "present": b""})),
}  # fmt: skip


def read_whole(path: Path) -> None:
    with History(path) as history:
        report(history)
        list(history.rows())


@pytest.mark.parametrize("body", list(BODIES))
def test_a_row_that_no_writer_wrote_is_damage_to_every_reader(body: str, private_places: Path) -> None:
    path = paths.state_directory() / "runs" / "r1.sqlite"
    with contextlib.closing(filled(path, 10)) as store:
        store.records.add_event(0, 5, "rollback", ok=True, to=2, at=5)
        layers = LayerStats(("a",), {"layer_grad_norm": array("f", [1.0])}, b"\1")
        store.records.add_step(0, RunStep(10, 1010.0, {0: {"loss": 1.0}}, {"loss": 1.0}, layers))
    table, content = BODIES[body]
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        assert database.execute(f"UPDATE {table} SET body = ?", (content,)).rowcount
    with pytest.raises(ConfigError, match=r"r1\.sqlite: the history is damaged"):
        read_whole(path)
    for command in (["incidents"], ["history"], ["incidents", "--run", "r1"]):
        with contextlib.suppress(DamageError):  # of the run that is asked for; nothing else may come out
            CliRunner().invoke(cli, command, catch_exceptions=False)


def test_fields_of_an_incident_that_an_older_version_did_not_write_are_empty(tmp_path: Path) -> None:
    with contextlib.closing(filled(tmp_path / "r1.sqlite", 10)):
        pass
    with History(tmp_path / "r1.sqlite") as history:
        (incident,) = history.incidents()
    assert (incident["alert"], incident["summary"], incident["diagnosis"]["missing"]) == ("LossSpike", "", [])


@pytest.mark.slow
def test_a_few_bytes_that_unpack_to_gigabytes_are_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "r1.sqlite"
    filled(path, 10).close()
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE chunks SET body = ?", (zlib.compress(bytes(256 * 1024**2), 9),))
    with pytest.raises(ConfigError, match=r"r1\.sqlite: the history is damaged \(a packed row has over 2\d+ bytes"):
        read(path)


@pytest.mark.slow
def test_many_rows_that_each_unpack_to_little_are_counted_together(tmp_path: Path) -> None:
    path = tmp_path / "r1.sqlite"
    filled(path, 10).close()
    values = {f"column {number}": (bytes(8 * 2048), b"") for number in range(400)}
    body = layout.pack_chunk(layout.Chunk(bytes(8 * 2048), bytes(8 * 2048), values))
    rows = [(first, first + 2048, body) for first in range(100_000, 200_000, 2048)]
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.executemany("INSERT INTO chunks VALUES (0, -1, ?, ?, ?, 0)", rows)
    with pytest.raises(ConfigError, match=r"it unpacks to far more than its \d+ bytes can be of a run"):
        read(path)


def test_a_view_in_place_of_a_table_is_not_read(tmp_path: Path) -> None:
    """A view is not read in place of a table, as it may have any number of rows."""
    path = tmp_path / "r1.sqlite"
    filled(path, 10).close()
    endless = (
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x AS seq, x AS id, x AS body FROM n"
    )
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("DROP TABLE incidents")
        database.execute(f"CREATE VIEW incidents AS {endless}")
    with pytest.raises(ConfigError, match=r"r1\.sqlite: the history is damaged \(it has no incidents\)"):
        read(path)


def test_an_incident_that_cannot_be_read_does_not_stop_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thinning reads where incidents were, in a transaction of its own, which must not stay open when that fails."""
    monkeypatch.setattr(thinning, "LEVELS", ((512, 16),))
    monkeypatch.setattr(thinning, "GROUP", 1)
    path = tmp_path / "r1.sqlite"
    store = filled(path, 10)
    flipped(path, "incidents")
    for seq in range(10, 1500):
        store.records.add_step(0, RunStep(seq, 1000.0 + seq, {0: {"loss": 1.0}}, {"loss": 1.0}))
        if seq % 100 == 0:
            store.write()
            assert not store.trouble
    store.close()
    with History(path) as history:
        assert len(history.series("loss").seqs) == 1500


def test_a_notification_that_cannot_be_read_is_dropped_and_the_others_are_not(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "r1.sqlite")
    receiver, alert, body = row(Entry(receiver="ops", alert="Alert"), 0.0)
    outbox.write([(receiver, alert, body.replace(b"Alert", b"\xc1lert")), row(Entry(receiver="ops", alert="B"), 0.0)])
    assert [entry.alert for entry in outbox.entries()] == ["B"]
    outbox.close()


def test_lines_and_silences_that_cannot_be_read(tmp_path: Path) -> None:
    told = undelivered.Left(run="r", run_id="r1", alert="A", receiver="ops", why="away")
    undelivered.leave(tmp_path, [told])
    with (tmp_path / undelivered.FILE).open("ab") as file:
        file.write(b'{"run": "\xc3\x28"}\n')
    assert undelivered.read(tmp_path) == [told]
    (tmp_path / silences.FILE).write_bytes(b'[{"id": "\xc3\x28"}]')
    with pytest.raises(ConfigError, match="remove it to begin with no silences"):
        silences.read(tmp_path / silences.FILE)


def test_a_history_that_is_damaged_when_it_is_opened_is_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "r1.sqlite"
    no_database(path)
    store = filled(path, 10)
    store.close()
    (aside,) = tmp_path.glob("r1.sqlite.damaged-*")
    assert aside.read_bytes().startswith(b"what is this")
    assert store.notes == [
        f"the history was damaged (file is not a database) and is moved to {aside}; a new one begins"
    ]
    with History(path) as history:
        assert len(history.series("loss").seqs) == 10


@harm
def test_a_history_that_is_damaged_while_it_is_written_is_replaced(tmp_path: Path, harm: object) -> None:
    path = tmp_path / "r1.sqlite"
    store = filled(path)
    store._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store._database.close()
    harm(path)  # type: ignore[operator]
    store._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    for seq in range(2000, 4000):
        store.records.add_step(0, RunStep(seq, 1000.0 + seq, {0: {"loss": float(seq)}}, {"loss": float(seq)}))
        if seq % 100 == 0:
            store.write()
            if store.notes:
                break
    assert store.notes, "nobody noticed"
    store.write()
    assert store.trouble == ""
    store.close()
    assert list(tmp_path.glob("r1.sqlite.damaged-*"))
    with History(path) as history:
        assert history.attempts()[0][0] == 0
        assert history.step_offset(0) == 7
        assert history.ranks(0)[0].hello == b"hello"
        assert [case["alert"] for case in history.incidents()] == ["LossSpike"]
        assert history.series("loss").seqs[-1] >= 2000


def test_the_outbox_moves_with_a_damaged_history(tmp_path: Path) -> None:
    path = tmp_path / "r1.sqlite"
    store, outbox = filled(path), Outbox(path)
    store.before_moving = outbox.release
    outbox.write([("ops", "LossSpike", b"first")])
    store.replace_damaged("as if")
    store.write()
    outbox.write([("ops", "Hang", b"second")])
    store.records.add_step(0, RunStep(2000, 1.0, {0: {}}, {"loss": 1.0}))
    store.write()
    assert (store.trouble, outbox.trouble) == ("", "")
    outbox.close()
    with sqlite3.connect(path) as database:
        assert sorted(database.execute("SELECT alert, body FROM outbox")) == [
            ("Hang", b"second"),
            ("LossSpike", b"first"),
        ]
    database.close()
    store.close()
    with History(path) as history:
        assert list(history.series("loss").values)[-1] == 1.0
        assert [case["alert"] for case in history.incidents()] == ["LossSpike"]


@pytest.mark.slow
@pytest.mark.processes
def test_a_daemon_goes_on_and_reports_damage(private_places: Path) -> None:
    path = paths.state_directory() / "runs" / "r1.sqlite"
    filled(path).close()
    scribbled(path)
    with daemon_process() as (socket, _), SimulatedRank(socket) as rank:
        rank.hello()
        notice = rank.expect(wire.Notice)
        assert "the history was damaged" in notice.text
        rank.steps(0, [1.0, float("nan")])
        until(lambda: "NonFiniteLoss" in rank.expect(wire.Notice).text, "the alert")
    assert list(path.parent.glob("r1.sqlite.damaged-*"))


def test_commands_pass_over_a_damaged_history(private_places: Path) -> None:
    path = paths.state_directory() / "runs" / "r1.sqlite"
    filled(path).close()
    scribbled(path)
    with pytest.raises(ConfigError, match=r"r1.sqlite: .*(damaged|not a history)"):
        CliRunner().invoke(cli, ["history", "export", "r1"], catch_exceptions=False)
    listed = CliRunner().invoke(cli, ["history"], catch_exceptions=False)
    assert (listed.exit_code, "damaged" in listed.output) == (1, True)
    CliRunner().invoke(cli, ["incidents"], catch_exceptions=False)
