"""A fake Grafana that enforces its documented HTTP API: authentication, statuses, versions, required keys.

grafana.com/docs/grafana/latest/developers/http_api: dashboard, folder, data_source, annotations, other (health).
"""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "glsa_right_0123456789"
VIEWER = "glsa_viewer_0123456789"


class RejectedError(Exception):
    """A request that is answered with an error's status."""

    def __init__(self, code: int, message: str, **more: Any) -> None:
        super().__init__(message)
        self.code, self.body = code, {"message": message, **more}


class FakeGrafana:
    """The fake's state, and the write requests that it got."""

    def __init__(self) -> None:
        self.url, self.version = "", "11.6.0"
        self.sources: dict[str, dict[str, Any]] = {}
        self.folders: dict[str, dict[str, Any]] = {}
        self.dashboards: dict[str, dict[str, Any]] = {}
        self.in_folder: dict[str, str] = {}
        self.provisioned: set[str] = set()
        self.annotations: list[dict[str, Any]] = []
        self.writes: list[str] = []
        self.saved_between: set[str] = set()
        """Dashboards that another user saves right after they were read."""

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any, token: str) -> Any:
        if path == "/api/health":
            return {"commit": "abc", "database": "ok", **({"version": self.version} if self.version else {})}
        if token not in (TOKEN, VIEWER):
            raise RejectedError(401, "Invalid API key" if token.startswith("glsa_") else "Unauthorized")
        if method != "GET":
            if token == VIEWER:
                needed = "You'll need additional permissions to perform this action. Permissions needed: folders:create"
                raise RejectedError(403, needed, title="Access denied", accessErrorId="ACE1")
            self.writes.append(f"{method} {path}")
        for pattern, handler in _ROUTES:
            found = re.fullmatch(pattern, f"{method} {path}")
            if found:
                return handler(self, body, query, *found.groups())
        raise RejectedError(404, "Not found")

    def read_source(self, _: Any, __: Any, uid: str) -> Any:
        if uid not in self.sources:
            raise RejectedError(404, "Data source not found")
        return self.sources[uid]

    def make_source(self, body: Any, _: Any) -> Any:
        _required(body, "name", "type", "access")
        if any(known["name"] == body["name"] or known["uid"] == body.get("uid") for known in self.sources.values()):
            raise RejectedError(409, "data source with the same name already exists")
        self.sources[body["uid"]] = {"id": len(self.sources) + 1, "orgId": 1, "readOnly": False, **body}
        return {"id": 1, "message": "Datasource added", "name": body["name"], "datasource": self.sources[body["uid"]]}

    def change_source(self, body: Any, _: Any, uid: str) -> Any:
        self.read_source(None, None, uid)
        _required(body, "name", "type", "access")
        self.sources[uid] |= body
        return {"id": 1, "message": "Datasource updated", "name": body["name"]}

    def read_folder(self, _: Any, __: Any, uid: str) -> Any:
        if uid not in self.folders:
            raise RejectedError(404, "folder not found", status="not-found")
        return self.folders[uid]

    def make_folder(self, body: Any, _: Any) -> Any:
        _required(body, "title")
        if body["uid"] in self.folders:
            raise RejectedError(409, "the folder has been changed by someone else")
        self.folders[body["uid"]] = {"id": len(self.folders) + 1, "version": 1, **body}
        return self.folders[body["uid"]]

    def read_dashboard(self, _: Any, __: Any, uid: str) -> Any:
        if uid not in self.dashboards:
            raise RejectedError(404, "Dashboard not found")
        there = json.loads(json.dumps(self.dashboards[uid]))
        if uid in self.saved_between:
            self.dashboards[uid]["version"] += 1
        return {"dashboard": there, "meta": {"folderUid": self.in_folder[uid], "version": there["version"]}}

    def save_dashboard(self, body: Any, _: Any) -> Any:
        _required(body, "dashboard")
        given = body["dashboard"]
        if not given.get("title"):
            raise RejectedError(400, "Dashboard title cannot be empty")
        if len(given.get("uid") or "") > 40 or not re.fullmatch(r"[a-zA-Z0-9_-]+", given.get("uid") or "x"):
            raise RejectedError(400, "uid contains illegal characters or is too long")
        if body.get("folderUid") and body["folderUid"] not in self.folders:
            raise RejectedError(400, "folder not found")
        if given["uid"] in self.provisioned:
            raise RejectedError(400, "Cannot save provisioned dashboard")
        known = self.dashboards.get(given["uid"])
        if known is None and given.get("id") is not None:
            raise RejectedError(404, "Dashboard not found", status="not-found")
        if known is not None and not body.get("overwrite") and given.get("version") != known["version"]:
            said = "The dashboard has been changed by someone else"
            raise RejectedError(412, said, status="version-mismatch")
        version = (known["version"] if known else 0) + 1
        identity = known["id"] if known else len(self.dashboards) + 1
        self.dashboards[given["uid"]] = given | {"id": identity, "version": version}
        self.in_folder[given["uid"]] = body.get("folderUid", "")
        return {
            "id": identity,
            "uid": given["uid"],
            "url": "/d/x",
            "status": "success",
            "version": version,
            "slug": "x",
        }

    def find_annotations(self, _: Any, query: dict[str, list[str]]) -> Any:
        tags = set(query.get("tags", ()))
        return [one for one in self.annotations if tags <= set(one["tags"])][: int(query.get("limit", ["100"])[0])]

    def make_annotation(self, body: Any, _: Any) -> Any:
        _required(body, "text")
        if not isinstance(body["time"], int) or not all(isinstance(tag, str) for tag in body["tags"]):
            raise RejectedError(400, "bad request data")
        self.annotations.append({"id": len(self.annotations) + 1, "timeEnd": body["time"], **body})
        return {"message": "Annotation added", "id": len(self.annotations)}

    def change_annotation(self, body: Any, _: Any, identity: str) -> Any:
        if not 1 <= int(identity) <= len(self.annotations):
            raise RejectedError(404, "Could not find annotation to update")
        self.annotations[int(identity) - 1] |= body
        return {"message": "Annotation patched"}


_ROUTES = (
    (r"GET /api/datasources/uid/(.+)", FakeGrafana.read_source),
    (r"POST /api/datasources", FakeGrafana.make_source),
    (r"PUT /api/datasources/uid/(.+)", FakeGrafana.change_source),
    (r"GET /api/folders/(.+)", FakeGrafana.read_folder),
    (r"POST /api/folders", FakeGrafana.make_folder),
    (r"GET /api/dashboards/uid/(.+)", FakeGrafana.read_dashboard),
    (r"POST /api/dashboards/db", FakeGrafana.save_dashboard),
    (r"GET /api/annotations", FakeGrafana.find_annotations),
    (r"POST /api/annotations", FakeGrafana.make_annotation),
    (r"PATCH /api/annotations/(\d+)", FakeGrafana.change_annotation),
)


def _required(body: Any, *keys: str) -> None:
    if not isinstance(body, dict) or any(not body.get(key) for key in keys):
        raise RejectedError(400, "bad request data")


@contextmanager
def fake_grafana() -> Iterator[FakeGrafana]:
    """Run a fake Grafana that listens, and yield its state."""
    state = FakeGrafana()

    class Handler(http.server.BaseHTTPRequestHandler):
        def _serve(self) -> None:
            parts = urlsplit(self.path)
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            try:
                if raw and self.headers.get("Content-Type") != "application/json":
                    raise RejectedError(415, "unsupported media type")
                body = json.loads(raw) if raw else None
                status, content = 200, state.answer(self.command, parts.path, parse_qs(parts.query), body, token)
            except RejectedError as error:
                status, content = error.code, error.body
            except ValueError:
                status, content = 400, {"message": "bad request data"}
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = do_PATCH = _serve

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()
