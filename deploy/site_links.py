"""Hook of mkdocs.yml: adds the examples and CONTRIBUTING.md, to which docs/ links, and makes the site's navigation."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]


def make_nav(index: str) -> list[dict[str, object]]:
    """Return the site's navigation: each table in `index` (the text of docs/README.md) whose rows begin with pages."""
    nav: list[dict[str, object]] = [{"Overview": "README.md"}]
    for title, rows in re.findall(r"^\| ([^|\n]+) \|[^\n]*\n\| ---[^\n]*\n((?:\|.*\n)+)", index, re.MULTILINE):
        first_cells = [row.split("|")[1] for row in rows.splitlines()]
        if pages := [page for cell in first_cells for page in re.findall(r"\]\(([\w-]+\.md)\)", cell)]:
            nav.append({title.capitalize(): pages})
    return [*nav, {"Contributing": "CONTRIBUTING.md"}]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation, which mkdocs.yml lacks."""
    config.nav = make_nav((Path(config.docs_dir) / "README.md").read_text(encoding="utf-8"))
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add `examples/` and `CONTRIBUTING.md` to the site's files, at the same paths, beside its pages."""
    outside = [Path("CONTRIBUTING.md"), *(path.relative_to(ROOT) for path in ROOT.glob("examples/*.py"))]
    for path in outside:
        files.append(File(path.as_posix(), str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links out of docs/, and into it, into links between neighbours."""
    return re.sub(r"\]\((\.\./|docs/)", "](", markdown)
