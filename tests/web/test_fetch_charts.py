"""The charts' library comes from a registry, and only the pinned version. The registry here is a local fake."""

from __future__ import annotations

import base64
import hashlib
import io
import stat
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from sentinel.web import fetch_charts
from sentinel.web.fetch_charts import MEMBERS, VERSION, fetch_library

DEAD = "http://127.0.0.1:9"
"""An address at which nothing listens: the port `discard`."""


def package() -> bytes:
    """Return a package as the registry has it, with the files that are used."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, member in {**MEMBERS, "other": "package/other"}.items():
            about = tarfile.TarInfo(member)
            about.size = len(name)
            archive.addfile(about, io.BytesIO(name.encode()))
    return file.getvalue()


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The package, with its hash as the pinned one."""
    content = package()
    monkeypatch.setattr(fetch_charts, "SHA512", base64.b64encode(hashlib.sha512(content).digest()).decode())
    return content


@pytest.fixture
def registry(published: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The paths that a registry is asked for, on a machine without npm."""
    asked: list[str] = []

    class Registry(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(published)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Registry) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("npm_config_registry", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setenv("PATH", "")
        yield asked
        server.shutdown()


def have_npm(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    folder.mkdir()
    (folder / "npm").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_the_library_is_fetched_once(registry: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "library"
    for _ in range(2):
        fetch_library(folder)
    assert registry == [f"/uplot/-/uplot-{VERSION}.tgz"]
    assert {path.name: path.read_text() for path in folder.iterdir()} == {name: name for name in MEMBERS}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o644}


def test_another_package_is_refused(registry: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_charts, "SHA512", "another")
    with pytest.raises(OSError, match="its hash is another one"):
        fetch_library(tmp_path / "library")
    assert not (tmp_path / "library").exists()


@pytest.mark.parametrize("registry", [DEAD, "no address"])
def test_without_a_registry_the_error_says_why(registry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("npm_config_registry", registry)
    with pytest.raises(OSError, match=r"refused|no address"):
        fetch_library(tmp_path / "library")


def test_npm_is_asked_where_it_is_installed(published: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package.tgz").write_bytes(published)
    script = f'while [ "$1" != --pack-destination ]; do shift; done; cp {tmp_path}/package.tgz $2/uplot-{VERSION}.tgz'
    have_npm(tmp_path / "bin", monkeypatch, script)
    fetch_library(tmp_path / "library")
    assert (tmp_path / "library" / "LICENSE").read_text() == "LICENSE"


def test_the_first_line_of_npm_says_why_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have_npm(tmp_path / "bin", monkeypatch, "echo npm error code ENOTFOUND >&2; echo more >&2; exit 1")
    with pytest.raises(OSError, match=r"^npm error code ENOTFOUND$"):
        fetch_library(tmp_path / "library")
