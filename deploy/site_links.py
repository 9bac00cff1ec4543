"""Takes into the site what docs/ links to outside of it: the examples and CONTRIBUTING.md. A hook of mkdocs.yml."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """They keep their places: `examples/` and `CONTRIBUTING.md` are beside the pages of the site."""
    outside = [Path("CONTRIBUTING.md"), *(path.relative_to(ROOT) for path in ROOT.glob("examples/*.py"))]
    for path in outside:
        files.append(File(path.as_posix(), str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links out of docs/ and into it are links beside each other here."""
    return re.sub(r"\]\((\.\./|docs/)", "](", markdown)
