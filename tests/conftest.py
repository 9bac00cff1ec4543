"""What all tests share: private folders, one torch thread, and which tests may be skipped."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from sentinel.web import charts, fetch_charts
from tests.sampling import leave_out_cases, leave_out_slow
from tests.second_user import can

REQUIRE_ALL = bool(os.environ.get("SENTINEL_REQUIRE_ALL"))
"""Whether a skip is a failure: CI sets it, and installs every server and browser.

A failing test is tried a second time there, because a shared machine may starve its processes or servers. The first
try's failure is printed at the end. If the second try passes, there is a defect to look for.
"""

# An example's time depends on the machine. CI tries the same examples each time, other runs new ones, and fewer.
settings.register_profile(
    "ours", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=REQUIRE_ALL,
    max_examples=100 if REQUIRE_ALL else 30,
)  # fmt: skip
settings.load_profile("ours")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch loads; processes that tests start inherit it
os.environ.setdefault("TRITON_INTERPRET", "1")  # no test has a GPU; read when torch imports Triton


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample-seed", type=int, default=0, help="which of the tests run of which a sample does")
    parser.addoption("--slow-share", type=int, default=1, metavar="N", help="of the tests marked `slow` run an N-th")
    parser.addoption("--all-cases", action="store_true", help="run every case of the tests marked `sampled`")


@pytest.fixture(autouse=True)
def private_places(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make private folders for a test's sockets, history and settings. Their paths are short, as a socket's must be."""
    root = Path(tmp_path_factory.mktemp("s"))
    for name in [name for name in os.environ if name.startswith("SENTINEL_") and name != "SENTINEL_REQUIRE_ALL"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SENTINEL_RUNTIME", str(root / "run"))
    monkeypatch.setenv("SENTINEL_STATE", str(root / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(root / "config"))
    return root


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """Hide the objects made so far from the garbage collector, and from `attach`, which searches all objects.

    Most are of modules that pytest has loaded and no training process has, and would take most of the time of both.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # otherwise native modules report leaked objects at the exit


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Make results independent of the machine's cores, to the bit, if the test's process has loaded torch."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture
def still_charts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Act as if the library of the interactive charts could not be fetched."""
    monkeypatch.setattr(fetch_charts, "FOLDER", tmp_path / "no-library")


@pytest.fixture(scope="session")
def chromium() -> str:
    """Return the path of the browser; without one the test is skipped."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("Chromium is not installed (Debian package: chromium)")
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that cannot run here, and leave a sample of those marked `slow` or `sampled`.

    Some need root, or a kernel that lets users make namespaces, which cannot be installed; those of interactive charts
    need an npm registry at the build, without which Sentinel has still charts.
    """
    wanted = [
        item for item in items if all(map(can, {"root", "second_user", "namespaces", "networks"} & set(item.keywords)))
    ]
    if not charts.is_present():
        wanted = [item for item in wanted if "charts" not in item.keywords]
    if not config.getoption("--all-cases"):
        seed = config.getoption("--sample-seed")
        wanted = leave_out_slow(leave_out_cases(wanted, seed), seed, config.getoption("--slow-share"))
    if len(wanted) < len(items):
        left = set(wanted)
        config.hook.pytest_deselected(items=[item for item in items if item not in left])
        items[:] = wanted
    if REQUIRE_ALL:
        for item in items:
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if REQUIRE_ALL and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, and SENTINEL_REQUIRE_ALL is set: {report.longrepr}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not charts.is_present():
        terminalreporter.section("tests of interactive charts were left out: the build could not fetch their library")
        terminalreporter.write_line(f"{charts.COMMAND} fetches it from the npm registry.")
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.section("skipped: install what they name to run them")
        for report in skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            terminalreporter.write_line(f"{report.nodeid}: {reason}")
    again = terminalreporter.stats.get("rerun", [])
    if again:
        terminalreporter.section("tried again: why the first try failed")
        for report in again:
            terminalreporter.write_line(f"{report.nodeid}\n{report.longreprtext}\n")
