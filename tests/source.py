"""The path of the source from which Sentinel is built."""

from __future__ import annotations

import os
from pathlib import Path

SOURCE = Path(os.environ.get("SENTINEL_SOURCE") or Path(__file__).parent.parent).resolve()
"""The source tree: CI runs tests in a tree without the package, and names the other (tests lose such variables)."""
