"""`sentinel --version`, as bug reports quote it."""

from __future__ import annotations

import platform
import re
import subprocess
import sys

import torch


def test_the_version_names_torch_python_the_platform_and_the_kernel() -> None:
    program = (
        "import sys; from sentinel.cli import cli; cli.main(['--version'], standalone_mode=False);"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert re.fullmatch(r"sentinel, version \d+\.\d+\.\d+", first)
    assert second.startswith(f"torch {torch.__version__.partition('+')[0]}")
    assert f"Python {platform.python_version()}, {platform.platform()}, gradient kernel built" in second
