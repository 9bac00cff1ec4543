"""Under `sentinel run` frameworks resume from their own checkpoint, which Sentinel chooses; the examples fail."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import sentinel.examples
from sentinel.errors import AttachError, RollbackError
from sentinel.hooks.core import faults
from sentinel.hooks.rollback import framework_checkpoints

EXAMPLES = Path(next(iter(sentinel.examples.__path__)))
Integration = tuple[Callable[..., str | None], Callable[..., Path], Callable[[Path], None]]
"""(the function that chooses a checkpoint, a function that makes one, a function that truncates one)."""


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("library", "breaks", "goes_on"),
    [
        ("transformers", "--nan-at=250", "going on after 240 steps"),
        ("lightning", "--nan-at=1650", "going on after 1600 steps"),
        ("lightning", "--break-at=1650", "going on after 1600 steps"),
    ],
)
def test_an_example_that_breaks_is_completed(
    private_places: Path, tmp_path: Path, library: str, breaks: str, goes_on: str
) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    script = EXAMPLES / f"{library}_restarted.py"
    folder = tmp_path / "saved"
    folder.mkdir()
    command = [sys.executable, "-m", "sentinel", "run", "--pause", "0.1", "--", sys.executable, str(script)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "80"}
    done = subprocess.run(
        [*command, "--folder", str(folder), breaks], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert goes_on in done.stderr
    assert "the run is complete, after 1 restart(s)" in done.stderr


def transformers_checkpoint(folder: Path, steps: int, weight: float = 1.0) -> Path:
    from safetensors.torch import save_file

    path = folder / f"checkpoint-{steps}"
    path.mkdir()
    save_file({"w": torch.tensor([1.0, weight])}, path / "model.safetensors")
    torch.save({}, path / "optimizer.pt")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": steps}))
    return path


def spread(path: Path, name: str, weight: float) -> None:
    """Write weights as FSDP's ranks do."""
    from torch.distributed import checkpoint

    state = {name: {"w": torch.tensor([1.0, weight])}, "optimizer_0": {"w": torch.tensor(torch.inf)}}
    checkpoint.save(state, checkpoint_id=path, no_dist=True)


def transformers_folder(folder: Path, steps: int, weight: float = 1.0) -> Path:
    path = transformers_checkpoint(folder, steps)
    (path / "model.safetensors").unlink()
    spread(path / "pytorch_model_fsdp_0", "model", weight)
    return path


def lightning_folder(folder: Path, steps: int, weight: float = 1.0) -> Path:
    path = folder / f"epoch=0-step={steps}.ckpt"
    spread(path, "model" if steps % 200 else "state_dict", weight)  # of FSDPStrategy, of ModelParallelStrategy
    torch.save({"global_step": steps}, path / "meta.pt")
    return path


def lightning_checkpoint(folder: Path, steps: int, weight: float = 1.0) -> Path:
    path = folder / f"epoch=0-step={steps}.ckpt"
    torch.save({"global_step": steps, "state_dict": {"w": torch.tensor([1.0, weight])}}, path)
    return path


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.fixture(params=["lightning", "transformers"])
def integration(request: pytest.FixtureRequest) -> Integration:
    library = request.param
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    module = importlib.import_module(f"sentinel.hooks.{library}")
    if library == "lightning":
        return module.checkpoint, lightning_checkpoint, cut
    return module.checkpoint, transformers_checkpoint, lambda path: cut(path / "optimizer.pt")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the minute in which what fails is tried again."""
    monkeypatch.setattr(faults, "RETRY_SECONDS", 0.2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch warns that there is no process group
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("library", "make"),
    [("lightning", lightning_folder), ("transformers", transformers_folder)],
    ids=("lightning", "transformers"),
)
def test_checkpoints_whose_weights_are_spread_over_ranks(
    tmp_path: Path, library: str, make: Callable[..., Path]
) -> None:
    """They are folders. Only their weights are read: of a large job the optimizer's state would take minutes."""
    module = pytest.importorskip(f"sentinel.hooks.{library}", reason=f"{library} is not installed")
    paths = [make(tmp_path, steps) for steps in (100, 200)]
    make(tmp_path, 300, weight=float("nan"))
    make(tmp_path, 400, weight=float("inf"))
    for name, steps in (("*.distcp", 500), (".metadata", 600)):
        next(make(tmp_path, steps).rglob(name)).unlink()
    next(make(tmp_path, 700).rglob("*.distcp")).write_bytes(b"")
    if library == "lightning":
        (make(tmp_path, 800) / "meta.pt").unlink()
    assert module.checkpoint(tmp_path) == str(paths[-1])
    assert sum("void" in path.name for path in tmp_path.iterdir()) == (6 if library == "lightning" else 5)


def test_checkpoints_without_their_step_in_the_name_are_not_passed_over_in_silence(tmp_path: Path) -> None:
    module = pytest.importorskip("sentinel.hooks.lightning", reason="lightning is not installed")
    torch.save({}, tmp_path / "model-epoch=3.ckpt")
    with pytest.raises(RollbackError, match=r"without `step=` in their names \(model-epoch=3.ckpt\)"):
        module.checkpoint(tmp_path)
    void = lightning_checkpoint(tmp_path, 100)
    assert module.checkpoint(tmp_path, before=50) is None, "the beginning is what the bound asks for"
    assert not void.exists()
    assert module.checkpoint(tmp_path) is None, "nor at the next start"


@pytest.mark.usefixtures("short")
def test_the_newest_whole_and_finite_checkpoint_is_taken_and_bad_ones_are_set_aside(
    integration: Integration, tmp_path: Path
) -> None:
    checkpoint, make, cut_short = integration
    assert checkpoint(tmp_path) is None, "nothing is there yet"
    paths = [make(tmp_path, steps) for steps in (20, 100, 300)]
    make(tmp_path, 400, weight=float("nan"))
    cut_short(make(tmp_path, 1000))
    assert checkpoint(tmp_path) == str(paths[-1])
    left = {path.name for path in tmp_path.iterdir()}
    assert {path.name for path in paths} < left
    assert sum("void" in name for name in left) == 2
    assert checkpoint(tmp_path) == str(paths[-1]), "and again"


def test_checkpoints_saved_since_the_first_sign_are_not_taken(
    integration: Integration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, make, _ = integration
    paths = [make(tmp_path, steps) for steps in (100, 230, 231)]
    monkeypatch.setenv("SENTINEL_RESUME_BEFORE", "230")
    assert checkpoint(tmp_path) == str(paths[1]), "230 steps are 0 to 229"
    assert not paths[2].exists()
    assert checkpoint(tmp_path, before=200) == str(paths[0])
    monkeypatch.setenv("SENTINEL_RESUME_BEFORE", "soon")
    with pytest.raises(AttachError, match="SENTINEL_RESUME_BEFORE=soon"):
        checkpoint(tmp_path)


def test_other_ranks_choose_the_same_and_rename_nothing(
    integration: Integration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, make, _ = integration
    good, bad = make(tmp_path, 100), make(tmp_path, 200, weight=float("inf"))
    monkeypatch.setenv("RANK", "1")
    assert checkpoint(tmp_path) == str(good)
    assert bad.exists()


@pytest.mark.usefixtures("short")
def test_without_a_usable_checkpoint_nothing_is_changed(integration: Integration, tmp_path: Path) -> None:
    checkpoint, make, cut_short = integration
    cut_short(make(tmp_path, 100))
    make(tmp_path, 200, weight=float("nan"))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(RollbackError, match=r"none can be used: .*200.*not finite.*Nothing was changed"):
        checkpoint(tmp_path)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("passes", [True, False])
def test_a_read_that_fails_never_leads_to_an_older_checkpoint(
    integration: Integration,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    passes: bool,
) -> None:
    checkpoint, make, _ = integration
    make(tmp_path, 100)
    newest, before = make(tmp_path, 200), sorted(tmp_path.iterdir())
    read, failures = framework_checkpoints.read_through, []

    def stale(path: Path) -> None:
        if "200" in str(path.relative_to(tmp_path)) and (not passes or len(failures) < 3):
            failures.append(path)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        read(path)

    monkeypatch.setattr(framework_checkpoints, "read_through", stale)
    if passes:
        assert checkpoint(tmp_path) == str(newest)
        assert len(failures) == 3
    else:
        request.getfixturevalue("short")
        with pytest.raises(RollbackError, match="Stale file handle"):
            checkpoint(tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_a_checkpoint_that_is_incomplete_for_a_moment_is_not_passed_over(
    integration: Integration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may show an old size, or no file yet."""
    checkpoint, make, cut_short = integration
    folder, whole = tmp_path / "saved", tmp_path / "whole"
    folder.mkdir()
    make(folder, 100)
    newest, before = make(folder, 200), sorted(folder.iterdir())
    shutil.copytree(folder, whole)
    cut_short(newest)
    if (last := newest / "trainer_state.json").exists():
        last.unlink()
    clock = SimpleNamespace(
        monotonic=time.monotonic, sleep=lambda _: shutil.copytree(whole, folder, dirs_exist_ok=True)
    )
    monkeypatch.setattr(faults, "time", clock)
    assert checkpoint(folder) == str(newest)
    assert sorted(folder.iterdir()) == before


def test_a_listing_that_fails_for_a_moment_costs_nothing(
    integration: Integration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, make, _ = integration
    newest, stat, failures = make(tmp_path, 200), Path.stat, []

    def fail_once(path: Path, **more: Any) -> os.stat_result:
        if path == newest and not failures:
            failures.append(path)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return stat(path, **more)

    monkeypatch.setattr(Path, "stat", fail_once)
    assert checkpoint(tmp_path) == str(newest)
    assert failures


def test_ranks_that_see_different_files_choose_the_same_checkpoint(
    integration: Integration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of a process group compare the checkpoints they see: one of them may not have mounted the folder yet."""
    checkpoint, make, _ = integration
    (tmp_path / "saved").mkdir()
    newest = make(tmp_path / "saved", 100)
    store, here = dist.HashStore(), threading.local()
    monkeypatch.setattr(framework_checkpoints, "group_store", lambda: store)
    monkeypatch.setattr(framework_checkpoints, "group_store", lambda: store)
    monkeypatch.setattr(framework_checkpoints, "place", lambda: (here.rank, 2))
    exchanges = []
    for here.rank in (0, 1):
        monkeypatch.setattr(framework_checkpoints, "_made", 0)
        exchanges.append(framework_checkpoints.RankExchange("checkpoint"))
    monkeypatch.setattr(framework_checkpoints, "RankExchange", lambda _: exchanges[here.rank])
    found: dict[int, str | None] = {}

    def run(rank: int, folder: Path) -> None:
        here.rank = rank
        found[rank] = checkpoint(folder)

    threads = [
        threading.Thread(target=run, args=(rank, tmp_path / name), daemon=True)
        for rank, name in enumerate(("saved", "mount"))
    ]
    for thread in threads:
        thread.start()
    (tmp_path / "mount").symlink_to(tmp_path / "saved")
    for thread in threads:
        thread.join(60)
    assert found == {0: str(newest), 1: str(tmp_path / "mount" / newest.name)}
