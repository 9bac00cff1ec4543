"""How a daemon closes many runs that have ended at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sentinel.daemon import shutdown
from sentinel.store import Store


def test_receivers_of_many_runs_take_no_longer_than_those_of_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each run may take 5 s: one after the other, twenty runs would take 100 s, and systemd kills after 90 s."""
    closed: list[str] = []

    async def scenario() -> None:
        everybody = asyncio.Barrier(3)

        def watch(name: str, fault: type[Exception] | None = None) -> Any:
            async def close(_: float) -> None:
                await everybody.wait()
                if fault is not None:
                    raise fault

            store = Store(tmp_path / "runs" / f"{name}.sqlite", run=name, run_id=name)
            really = store.close

            def shut(patience: float = 0.0) -> None:
                really(patience)
                closed.append(name)
                if fault is not None:
                    raise fault

            store.close = shut  # type: ignore[method-assign]
            run, pipeline = SimpleNamespace(name=name, run_id=name), SimpleNamespace(close=close, entries=())
            notifier = SimpleNamespace(pipeline=pipeline)
            return SimpleNamespace(store=store, run=run, notifier=notifier, membership=None)

        await shutdown.close([watch("a"), watch("b", OSError), watch("c")], 5.0)

    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert sorted(closed) == ["a", "b", "c"]
    assert "run b: its history is not closed" in caplog.text
