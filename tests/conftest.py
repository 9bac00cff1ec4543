"""What all tests share: places of their own, one torch thread, and what may be skipped."""

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
"""CI sets it, and installs every server and browser: a skip is then a failure.

A test that fails is tried a second time there, as a machine that others use may starve its processes or servers.
What the first try said is printed at the end. Where the second one passes there is a defect to look for.
"""

# How long an example takes is up to the machine. CI tries the same ones each time, everybody else new ones.
settings.register_profile("ours", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=REQUIRE_ALL)
settings.load_profile("ours")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch loads; processes that tests start inherit it
os.environ.setdefault("TRITON_INTERPRET", "1")  # no test has a GPU; read where torch imports Triton


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample-seed", type=int, default=0, help="which of the tests run of which a sample does")
    parser.addoption("--slow-share", type=int, default=1, metavar="N", help="of the tests marked `slow` run an N-th")
    parser.addoption("--all-cases", action="store_true", help="run every case of the tests marked `sampled`")


@pytest.fixture(autouse=True)
def private_places(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sockets, history, settings of one test, apart from the user's and other tests'. Short: a socket's path is."""
    root = Path(tmp_path_factory.mktemp("s"))
    for name in [name for name in os.environ if name.startswith("SENTINEL_") and name != "SENTINEL_REQUIRE_ALL"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SENTINEL_RUNTIME", str(root / "run"))
    monkeypatch.setenv("SENTINEL_STATE", str(root / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(root / "config"))
    return root


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """Hides what was made so far from the garbage collector, and from `attach`, which looks through all objects for
    what belongs to a run: the objects of all modules that pytest has loaded, which no training process has, would take
    both most of their time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or native modules say at the exit that their objects leak


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Figures and bits do not depend on the machine's cores. Only where the test itself has loaded torch."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture
def still_charts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the library of the interactive charts could not be fetched."""
    monkeypatch.setattr(fetch_charts, "FOLDER", tmp_path / "no-library")


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of the browser, or a skip."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("Chromium is not installed (Debian package: chromium)")
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only root can try, or a kernel that lets users make namespaces: nobody can install these; and the
    interactive charts where no npm registry was reached, as Sentinel has still ones then. Of what is marked so, leave a
    sample."""
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
