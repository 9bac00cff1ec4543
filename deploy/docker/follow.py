"""Runs a Dockerfile's steps without a container engine, in a folder that stands for the image's root.

    python deploy/docker/follow.py deploy/docker/Dockerfile --target daemon

FROM python makes a virtual environment; COPY copies; RUN runs, with paths of the image's folders mapped into the root;
then the container starts as ENTRYPOINT and CMD say, and its HEALTHCHECK must succeed. The base image and users are not
tried.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HEALTHY_SECONDS = 60.0
OWN = ("/src", "/wheels", "/var/lib/sentinel", "/run/sentinel")
"""Folders of the image that steps name, and that are mapped into the root."""
PROJECT = re.compile(r"sentinel$|training_sentinel-|__editable__")
"""Matches the names under which this project is installed."""


class Stage:
    """A stage of the file: its base, its name, and its own steps."""

    def __init__(self, base: str, name: str) -> None:
        self.base, self.name = base, name
        self.steps: list[tuple[str, str]] = []


def stages(text: str) -> dict[str, Stage]:
    """Return the stages by name; the last one also under the empty name."""
    found: dict[str, Stage] = {}
    for word, rest in _instructions(text):
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stage = found[name or "final"] = Stage(base, name or "final")
        else:
            stage.steps.append((word, rest))
    found[""] = stage
    return found


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    joined = re.sub(r"\\\n\s*", "", text)
    for line in joined.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            word, _, rest = line.partition(" ")
            yield word.upper(), rest.strip()


class Image:
    """The image, as far as the steps have built it."""

    def __init__(self, file: Path, context: Path, root: Path) -> None:
        self._stages, self._context, self._root = stages(file.read_text()), context, root
        self._folder = "/"
        self.env: dict[str, str] = {}
        self.entrypoint: list[str] = []
        self.command: list[str] = []
        self.health: list[str] = []

    def build(self, target: str) -> None:
        """Run all steps of a stage, after those of its base; a stage that it copies from is built first."""
        stage = self._stages[target]
        if stage.base in self._stages:
            self.build(stage.base)
        for word, rest in stage.steps:
            other = re.match(r"--from=(\w+)", rest)
            if other and not self._under(rest.split()[-1]).exists():
                self.build(other[1])
            print(f"{word} {rest}", flush=True)
            getattr(self, f"_{word.lower()}")(rest)

    def environment(self) -> dict[str, str]:
        """Return the environment of a process in the image."""
        inside = {name: self._mapped(value) for name, value in self.env.items()}
        kept = {name: os.environ[name] for name in ("HOME", "PIP_INDEX_URL", "PIP_CONFIG_FILE") if name in os.environ}
        return kept | {"PATH": f"{self._root}/venv/bin:{os.environ['PATH']}", "LANG": "C.UTF-8"} | inside

    def _workdir(self, rest: str) -> None:
        self._folder = rest
        self._under(rest).mkdir(parents=True, exist_ok=True)

    def _copy(self, rest: str) -> None:
        *sources, target = [part for part in shlex.split(rest) if not part.startswith("--")]
        into = self._under(target if target.startswith("/") else f"{self._folder}/{target}")
        if "--from=" in rest:
            assert self._under(sources[0]).exists(), f"{sources[0]}: the other stage did not make it"
            return
        for source in sources:
            here = self._context / source
            if here.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.so")
                shutil.copytree(here, into, symlinks=True, dirs_exist_ok=True, ignore=ignored)
            else:
                into.mkdir(parents=True, exist_ok=True)
                shutil.copy(here, into)

    def _run(self, rest: str) -> None:
        folder = self._under(self._folder)
        subprocess.run(["sh", "-ec", self._mapped(rest)], cwd=folder, env=self.environment(), check=True)

    def _env(self, rest: str) -> None:
        self.env |= dict(part.split("=", 1) for part in shlex.split(rest))

    def _entrypoint(self, rest: str) -> None:
        self.entrypoint, self.command = json.loads(rest), []

    def _cmd(self, rest: str) -> None:
        self.command = json.loads(rest)

    def _healthcheck(self, rest: str) -> None:
        self.health = json.loads(rest.partition("CMD ")[2])

    def _user(self, rest: str) -> None:
        assert re.fullmatch(r"\d+:\d+", rest), f"USER {rest}: by number, as Kubernetes' runAsNonRoot can check it"

    def _volume(self, rest: str) -> None:
        assert self._under(rest).is_dir(), f"VOLUME {rest}: there is no such folder"

    def _expose(self, rest: str) -> None:
        assert rest.isdigit()

    def _under(self, path: str) -> Path:
        return self._root / path.lstrip("/")

    def _mapped(self, text: str) -> str:
        owned = "|".join(map(re.escape, OWN))
        return re.sub(rf"(?<![\w./])(?:{owned})(?![\w-])", lambda found: f"{self._root}{found[0]}", text)


def started(image: Image) -> None:
    """Start the container as an engine would; exit if it does not become healthy, or does not end on SIGTERM."""
    command = [*image.entrypoint, *image.command]
    print("starts:", shlex.join(command), flush=True)
    with subprocess.Popen(command, env=image.environment(), cwd="/") as process:
        deadline = time.monotonic() + HEALTHY_SECONDS
        try:
            while not healthy(image):
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"it did not become healthy (exit status {process.poll()})")
                time.sleep(0.2)
            print("healthy", flush=True)
            process.send_signal(signal.SIGTERM)
            if process.wait(20):
                sys.exit(f"told to end, it ended with {process.returncode}")
            print("ended as it was told to")
        finally:
            process.kill()


def healthy(image: Image) -> bool:
    """Return whether the health check succeeds; it asks the port that the daemon got, if the image's is taken here."""
    state = next(Path(image.environment()["SENTINEL_RUNTIME"]).glob("*/daemon.json"), None)
    if state is None:
        return False
    address = json.loads(state.read_text())["http"].removeprefix("http://")
    check = [part.replace("127.0.0.1:9477", address) for part in image.health]
    return subprocess.run(check, env=image.environment(), stderr=subprocess.DEVNULL).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("--context", type=Path, default=Path.cwd())
    parser.add_argument("--target", default="")
    parser.add_argument("--borrow", action="store_true", help="Use this Python's packages: nothing is downloaded.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        venv = [
            sys.executable,
            "-m",
            "venv",
            *(["--system-site-packages"] if options.borrow else []),
            str(root / "venv"),
        ]
        subprocess.run(venv, check=True)
        if options.borrow:
            _borrow(root / "venv", root / "lent")
        image = Image(options.dockerfile, options.context, root)
        image.build(options.target)
        started(image)


def _borrow(venv: Path, lent: Path) -> None:
    """Let an environment use this Python's packages, from all its site-packages folders.

    This project's own are left out, because pip would take it for installed.
    """
    (site,) = venv.glob("lib/python*/site-packages")
    lent.mkdir()
    for folder in (Path(entry) for entry in sys.path if entry.endswith("site-packages")):
        for package in folder.iterdir():
            seen = lent / package.name
            if not (PROJECT.match(package.name) or seen.exists()):
                seen.symlink_to(package)
    (site / "borrowed.pth").write_text(f"{lent}\n")


if __name__ == "__main__":
    main()
