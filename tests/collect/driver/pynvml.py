"""Replaces nvidia-ml-py on the path of a daemon under test: two fake GPUs.

The first reports the XIDs in FAKE_XIDS. `FAKE_STUCK=1`: the second never answers. FAKE_STATE names a file with the
first GPU's present state: `{"xid": 48}`, `{"reasons": 64}`, `{"busy": 12}`; while the file is missing both are healthy.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

_HERE = Path(__file__).parent.resolve()
_real = next(
    found
    for place in sys.path
    if Path(place or ".").resolve() != _HERE and (found := Path(place or ".") / "pynvml.py").is_file()
)
_spec = importlib.util.spec_from_file_location("pynvml_itself", _real)
assert _spec is not None
assert _spec.loader is not None
_itself = importlib.util.module_from_spec(_spec)
sys.modules["pynvml_itself"] = _itself  # the real module looks itself up there
_spec.loader.exec_module(_itself)
globals().update({name: value for name, value in vars(_itself).items() if not name.startswith("__")})

from tests.collect.fake_nvml import FakeBoard, FakeNvml  # noqa: E402 (it imports this module's constants)

_fake = FakeNvml()
globals().update({name: getattr(_fake, name) for name in vars(FakeNvml) if name.startswith("nvml")})
for _code in filter(None, os.environ.get("FAKE_XIDS", "").split(",")):
    _fake.events.put((_fake.boards[0], int(_code)))


_told: set[int] = set()


def _follow(file: Path) -> None:
    """Put the first GPU into the state that the file says now."""
    state = json.loads(file.read_text()) if file.exists() else {}
    _fake.boards[0].reasons = state.get("reasons", 0)
    _fake.boards[0].busy = state.get("busy", FakeBoard.busy)
    if (code := state.get("xid")) and code not in _told:
        _told.add(code)
        _fake.events.put((_fake.boards[0], code))
    elif not state:
        _told.clear()


if os.environ.get("FAKE_STATE"):

    def nvmlDeviceGetRemappedRows(board: object) -> tuple[int, int, int, int]:
        """Return that no rows are remapped."""
        return 0, 0, 0, 0

    def nvmlEventSetWait(events: object, timeout_ms: int) -> object:
        """Wait for an event; one that the file asks for comes even if no figure is read meanwhile."""
        end = time.monotonic() + timeout_ms / 1000
        while _fake.events.empty() and time.monotonic() < end:
            _follow(Path(os.environ["FAKE_STATE"]))
            time.sleep(0.05)
        return _fake.nvmlEventSetWait(events, 0)


def nvmlDeviceGetUtilizationRates(board: object) -> object:
    """Return the utilization; never returns for the second GPU if it is stuck."""
    if os.environ.get("FAKE_STATE"):
        _follow(Path(os.environ["FAKE_STATE"]))
    if os.environ.get("FAKE_STUCK") and board is _fake.boards[1]:
        _fake.boards[1].free.clear()
    return _fake.nvmlDeviceGetUtilizationRates(board)  # type: ignore[arg-type]
