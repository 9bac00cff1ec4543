"""Without torch, any import of the hooks says what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

HIDDEN = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name=name)
sys.meta_path.insert(0, Hidden())
"""


@pytest.mark.parametrize(
    "line", ["import sentinel; sentinel.attach", "from sentinel.hooks.lightning import SentinelCallback"]
)
def test_an_import_says_what_to_install(line: str) -> None:
    done = subprocess.run([sys.executable, "-c", HIDDEN + line], capture_output=True, text=True, cwd="/")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: sentinel.attach and the integrations work inside a PyTorch program")
    assert last.endswith("pip install 'training-sentinel[torch]'")
    assert "During handling" not in done.stderr
