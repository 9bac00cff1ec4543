"""Where the source is that Sentinel is built from."""

from __future__ import annotations

import os
from pathlib import Path

SOURCE = Path(os.environ.get("SENTINEL_SOURCE") or Path(__file__).parent.parent).resolve()
"""CI runs the tests in a tree without the package, and names the one with it. (Each test loses such variables.)"""
