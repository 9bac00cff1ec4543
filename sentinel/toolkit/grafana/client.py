"""Grafana's HTTP API through grafana-api-sdk, with sentences in place of statuses.

Only the package's `call_the_api` is used, which does authentication, TLS and transport: its other methods raise bare
exceptions and lose statuses. Documents: grafana.com/docs/grafana/latest/developers/http_api.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sentinel.errors import ConfigError
from sentinel.node import small_files

OLDEST = (10, 0)
"""Oldest version that can be used: it has folders by uid, data sources by uid, and schema 39."""
TIMEOUT_SECONDS = 15.0


class Grafana:
    """One server. Every method raises ConfigError, whose words hold no token."""

    def __init__(self, url: str, token: str) -> None:
        try:
            import httpx
            from grafana_api.api import Api
            from grafana_api.model import APIModel, RequestsMethods
        except ImportError:
            raise ConfigError("this needs the extra: pip install 'training-sentinel[grafana]'") from None
        self.url = check_url(url)
        if not logging.getLogger().handlers:  # the package logs to the root logger: on a terminal, between our lines
            logging.getLogger().addHandler(logging.NullHandler())
        self._faults = (httpx.HTTPError, httpx.InvalidURL)
        self._methods = RequestsMethods
        self._api = Api(
            APIModel(host=self.url, token=token, timeout=TIMEOUT_SECONDS, retries=0, follow_redirects=False)
        )

    def version(self) -> str:
        """Return the server's version; "" if it tells none. Raises ConfigError if it is too old, or no Grafana."""
        status, content = self.ask("GET", "/api/health")
        if status != 200 or not isinstance(content, dict) or "database" not in content:
            raise ConfigError(f"{self.url}: what answers there is no Grafana (/api/health: {status})")
        version = str(content.get("version", ""))
        numbers = tuple(int(part) for part in version.split("-")[0].split(".")[:2] if part.isdigit())
        if numbers and numbers < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            raise ConfigError(
                f"{self.url}: Grafana {version} is too old for these dashboards; {oldest} or newer reads them"
            )
        return version

    def find(self, path: str, what: str) -> Any | None:
        """Return the content of a path; None if there is none. `what`: its name in an error."""
        status, content = self.ask("GET", path)
        if status == 404:
            return None
        return self._accept_answer(status, content, what)

    def list_all(self, path: str, what: str) -> list[Any]:
        """Return the list at a path. `what`: its name in an error."""
        content = self._call("GET", path, None, with_status=False)
        if not isinstance(content, list):
            self._accept_answer(_status_of(content), content, what)
            raise ConfigError(f"{self.url}: {what}: expected a list, got {type(content).__name__}")
        return content

    def put(self, method: str, path: str, body: dict[str, Any], what: str) -> None:
        """Write `body` to a path. `what`: its name in an error."""
        self._accept_answer(*self.ask(method, path, body), what)

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Make one call, and return (status, content)."""
        content = self._call(method, path, body, with_status=True)
        return int(content.get("status", 0)), content

    def _call(self, method: str, path: str, body: dict[str, Any] | None, *, with_status: bool) -> Any:
        text = None if body is None else json.dumps(body)
        try:
            return self._api.call_the_api(path, self._methods[method], text, response_status_code=with_status)
        except self._faults as error:
            if "API key" in str(error):  # the package raises this for some answers with status 401
                raise self._make_unauthorized_error() from None
            why = str(error) or type(error).__name__
            raise ConfigError(f"{self.url}: no Grafana answers there ({why}); see --url") from None

    def _accept_answer(self, status: int, content: Any, what: str) -> Any:
        if 200 <= status < 300:
            return content
        said = str(content.get("message", "")) if isinstance(content, dict) else ""
        if status == 401:
            raise self._make_unauthorized_error()
        if status == 403:
            mend = "give its service account the role Editor, and for a data source Admin"
            raise ConfigError(f"{self.url}: the token may not write {what} ({said or status}); {mend}")
        if status == 412:
            raise ConfigError(f"{self.url}: {what} was saved by another user meanwhile; look at it, and push again")
        if "provisioned" in said:
            raise ConfigError(f"{self.url}: {what} comes from files on that server (provisioning), and is not pushed")
        raise ConfigError(f"{self.url}: {what} was not taken: {status} {said}".rstrip())

    def _make_unauthorized_error(self) -> ConfigError:
        return ConfigError(
            f"{self.url}: the token is wrong or has expired; make one for a service account there "
            "(Administration, Service accounts), and set GRAFANA_TOKEN or --token-file"
        )


def check_url(url: str) -> str:
    """Return a server's address without the last slash. Raises ConfigError, which shows no password in it."""
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise ConfigError("--url holds a password; leave it out, and set GRAFANA_TOKEN or --token-file")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"--url {url}: expected http://host:3000 or https://...")
    return url.rstrip("/")


def read_token(file: Path | None, value: str) -> str:
    """Return the token from a file, or from the variable's value. Raises ConfigError if there is no valid one."""
    if file is not None:
        try:
            value = small_files.text(file)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: cannot be read ({getattr(error, 'strerror', None) or 'not text'})") from None
    value = value.strip()
    if not value:
        where = f"{file} is empty" if file else "GRAFANA_TOKEN is not set"
        raise ConfigError(f"no token: {where}; put that of a service account there, or name a file: --token-file")
    if not value.isascii() or not value.isprintable() or " " in value:
        raise ConfigError("the token has characters that no token has; is it the right file?")
    return value


def _status_of(content: Any) -> int:
    """Return the likely status of an answer that should have been a list: for lists the package returns no status."""
    if isinstance(content, dict):
        said = str(content.get("message", "")).lower()
        return 401 if "unauthorized" in said or "api key" in said else 403 if "permission" in said else 500
    return int(getattr(content, "status_code", 500))
