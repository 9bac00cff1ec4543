"""Sentinel's lines on a terminal on which a progress bar writes."""

from __future__ import annotations

import os
import pty
import termios
import threading
from pathlib import Path

import pytest

from sentinel.text import write_lines

COLUMNS = 20


def screen(data: bytes) -> list[str]:
    """Return lines as a terminal shows them, which wraps before the next character, not after one that fills a line."""
    lines, column = [""], 0
    for letter in data.decode():
        if letter == "\r":
            column = 0
        elif letter == "\n":
            lines.append("")
        else:
            if column == COLUMNS:
                lines.append("")
                column = 0
            lines[-1] = lines[-1][:column].ljust(column) + letter + lines[-1][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("width", [1, 7, COLUMNS - 1, COLUMNS])
def test_a_line_begins_below_a_bar_and_erases_nothing(width: int) -> None:
    assert screen(shown("\r" + "#" * width)) == ["#" * width, "sentinel: so", ""]


def test_no_line_is_left_empty_where_the_cursor_is_at_its_beginning() -> None:
    assert screen(shown("epoch 1\n")) == ["epoch 1", "sentinel: so", ""]


def shown(before: str) -> bytes:
    """Return the bytes that a terminal gets for `before` and a line of Sentinel after it."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, COLUMNS))
    got = list[bytes]()
    reader = threading.Thread(target=_read, args=(ours, got))
    reader.start()
    with os.fdopen(theirs, "w") as terminal:
        terminal.write(before)
        write_lines("sentinel: so", terminal)
    reader.join()
    os.close(ours)
    return b"".join(got)


def _read(descriptor: int, got: list[bytes]) -> None:
    try:
        while chunk := os.read(descriptor, 1000):
            got.append(chunk)
    except OSError:  # the other end is closed
        pass


def test_a_file_gets_the_text_alone(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        write_lines("a\nb", log)
    assert (tmp_path / "log").read_text() == "a\nb\n"


def test_control_characters_are_spelled_out(tmp_path: Path) -> None:
    """A line may hold the name of a layer, or an exception's text."""
    with (tmp_path / "log").open("w") as log:
        write_lines("layer \x1b]0;owned\x07\u202e\x9b2J\nis odd", log)
    assert (tmp_path / "log").read_text() == r"layer \x1b]0;owned\x07\u202e\x9b2J" + "\nis odd\n"


def test_a_stream_that_is_gone_is_no_reason_to_fail(tmp_path: Path) -> None:
    log = (tmp_path / "log").open("w")
    log.close()
    write_lines("a", log)
    write_lines("a", None)
