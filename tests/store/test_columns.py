"""Rows are turned into columns and back."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from sentinel.store.layout import Chunk, pack_chunk, pack_columns, unpack_chunk

ROWS = st.lists(st.dictionaries(st.sampled_from(["loss", "grad_norm", "learning_rate"]), st.floats(allow_nan=False)))


@given(ROWS)
def test_rows_come_back_whatever_they_lack(rows: list[dict[str, float]]) -> None:
    seqs, times = array("q", range(len(rows))), array("d", map(float, range(len(rows))))
    body = pack_chunk(Chunk(seqs.tobytes(), times.tobytes(), pack_columns(rows)))
    assert [values for _, _, values in unpack_chunk(body).rows()] == rows


def test_a_column_that_all_rows_have_lists_no_rows_and_columns_keep_their_order() -> None:
    columns = pack_columns([{"loss": 1.0}, {"grad_norm": 2.0, "loss": 3.0}, {"loss": 4.0}])
    assert list(columns) == ["loss", "grad_norm"]
    assert columns["loss"] == (array("d", [1.0, 3.0, 4.0]).tobytes(), b"")
    assert columns["grad_norm"] == (array("d", [2.0]).tobytes(), array("H", [1]).tobytes())
