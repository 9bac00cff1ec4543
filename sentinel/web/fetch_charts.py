"""Downloads uPlot, which draws the interactive charts, into this package: `python -m sentinel.web.fetch_charts`.

The build of a wheel or an sdist does the same if it can. Only the standard library is imported: a build has no more.
The package comes from the npm registry, and is only used if its hash is the pinned one. If npm is installed, it does
the download, as it knows this machine's registry, proxy and certificates; npm is not required.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path

VERSION = "1.6.32"
SHA512 = "KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw=="
"""Hash of the package, as in the registry and in lock files (`npm view uplot@VERSION dist.integrity`)."""
SCRIPT, STYLE, LICENSE = "uPlot.iife.min.js", "uPlot.min.css", "LICENSE"
MEMBERS = {SCRIPT: f"package/dist/{SCRIPT}", STYLE: f"package/dist/{STYLE}", LICENSE: f"package/{LICENSE}"}
FOLDER = Path(__file__).parent / f"uplot-{VERSION}"
REGISTRY = "https://registry.npmjs.org"
"""The registry, if npm is not installed and `npm_config_registry` names no other."""
TIMEOUT_SECONDS = 20


def fetch_library(folder: Path = FOLDER) -> None:
    """Write the files into `folder` unless they are there. Raises OSError, also for a package with another hash."""
    if all((folder / name).is_file() for name in MEMBERS):
        return
    package = _download_with_npm() if shutil.which("npm") else _download()
    if base64.b64encode(hashlib.sha512(package).digest()).decode() != SHA512:
        raise OSError(f"what was downloaded is not uplot {VERSION}: its hash is another one")
    folder.mkdir(exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        for name, member in MEMBERS.items():
            content = archive.extractfile(member)
            assert content is not None
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
                file.write(content.read())
                os.fchmod(file.fileno(), 0o644)
            os.replace(file.name, folder / name)  # a page that is being served gets the whole file or none


def _download_with_npm() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", f"uplot@{VERSION}", "--loglevel=error", "--pack-destination", folder]
        try:
            done = subprocess.run(
                [*command, "--fetch-retries=0"], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise OSError(f"npm did not download uplot {VERSION} within {TIMEOUT_SECONDS} s") from None
        if done.returncode:
            raise OSError(done.stderr.partition("\n")[0] or f"npm ended with exit code {done.returncode}")
        return Path(folder, f"uplot-{VERSION}.tgz").read_bytes()


def _download() -> bytes:
    registry = os.environ.get("npm_config_registry") or REGISTRY  # noqa: SIM112  # as npm spells it
    address = f"{registry.rstrip('/')}/uplot/-/uplot-{VERSION}.tgz"
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_SECONDS) as answer:
            package: bytes = answer.read()
    except (http.client.HTTPException, ValueError) as error:  # an incomplete answer; a registry that is no address
        raise OSError(f"{address}: {error}") from error
    return package


if __name__ == "__main__":
    try:
        fetch_library()
    except OSError as error:
        sys.exit(f"sentinel: no interactive charts: {error}")
    print(f"uPlot {VERSION} is in {FOLDER}")
