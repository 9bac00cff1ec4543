"""`[links]`: the settings for the links in messages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import quote, urlsplit

import msgspec


class LinkSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[links]`: absolute addresses that receivers show as links. In `page` and `report`, `{run}`, `{run_id}`, `{host}`
    and `{user}` are filled in."""

    runbook: str = ""
    """Address of the runbook: `#` and the section are added; `{section}` is filled in, where sections are separate
    pages."""
    page: str = ""
    """Address of the live page. It asks for the token, which no message contains."""
    report: str = ""
    """Address of a run's report, if a report is put there."""

    def __post_init__(self) -> None:
        for key in self.__struct_fields__:
            check_link(key, getattr(self, key))

    def make_section_link(self) -> str:
        """Return `runbook` with `{section}` in it; empty where there is none."""
        if not self.runbook or "{section}" in self.runbook:
            return self.runbook
        return self.runbook.partition("#")[0] + "#{section}"


def fill_link(link: str, names: Mapping[str, str]) -> str:
    """Return a link with `{name}` replaced by its quoted value; other braces stay."""
    return re.sub(r"\{(\w+)\}", lambda place: quote(names[place[1]], safe="") if place[1] in names else place[0], link)


def check_link(key: str, link: str) -> None:
    """Raise ValueError, which does not show the link, unless it is a link that everyone may read."""
    if link and not (is_http(link) and not urlsplit(link).username and not re.search(r"[<>|\"]", link)):
        raise ValueError(
            f'{key}: no http:// or https:// URL, or one with a user in it; write {key} = "https://host/path"'
        )


def is_http(url: str) -> bool:
    """Return whether this is an http or https URL that can be requested."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.netloc) and url.isprintable() and " " not in url
