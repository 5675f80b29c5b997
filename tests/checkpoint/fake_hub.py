"""A Hugging Face hub on a local port: the endpoints that downloads use, and the ways in which they fail."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

_MODEL = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+?)(/revision/(?P<revision>[^/]+))?")
_TREE = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)")
_FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


@dataclass
class Repo:
    files: dict[str, bytes]
    commit: str = "c0ffee" + "0" * 34
    branches: tuple[str, ...] = ("main",)
    token: str = ""  # without it the files are refused, as of a gated model
    sizes: dict[str, int] = field(default_factory=dict)  # what the listing says of a file, if that is not true
    breaks: set[str] = field(default_factory=set)  # files whose first transfer ends in the middle
    stalls: set[str] = field(default_factory=set)  # files whose transfer stops in the middle

    def size(self, name: str) -> int:
        return self.sizes.get(name, len(self.files[name]))


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    range: str


class FakeHub:
    """`with FakeHub({"org/name": Repo(...)}) as hub:` answers at `hub.url`."""

    def __init__(self, repos: dict[str, Repo]) -> None:
        self.repos = repos
        self.status = 0  # that every request is answered with, if not 0
        self.answers = True  # else it accepts and says nothing
        self.body = b""  # that every request is answered with, if not empty
        self.requests: list[Request] = []
        self.stalled = threading.Event()
        self.ended = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.01,)).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()

    def transfers(self) -> list[str]:
        """Names of the files that were asked for, in order."""
        asked = [_FILE.fullmatch(request.path) for request in self.requests if request.method == "GET"]
        return [match["file"] for match in asked if match]


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(Request(self.command, path, self.headers.get("Range", "")))
            match = _TREE.fullmatch(path) or _MODEL.fullmatch(path) or _FILE.fullmatch(path)
            if not hub.answers:
                hub.ended.wait(30)
                self.close_connection = True
                return None
            if hub.body:
                return self._send("text/html", hub.body)
            if hub.status:
                return self._refuse(hub.status, "")
            if match is None or match["repo"] not in hub.repos:
                return self._refuse(404, "RepoNotFound")
            repo = hub.repos[match["repo"]]
            if (match["revision"] or "main") not in (*repo.branches, repo.commit):
                return self._refuse(404, "RevisionNotFound")
            if match.re is _MODEL:
                siblings = [{"rfilename": name, "size": repo.size(name)} for name in repo.files]
                return self._json({"id": match["repo"], "sha": repo.commit, "siblings": siblings})
            if match.re is _TREE:
                listed = [
                    {"type": "file", "path": name, "size": repo.size(name), "oid": _etag(repo.files[name])}
                    for name in repo.files
                ]
                return self._json(listed)
            if repo.token and self.headers.get("Authorization") != f"Bearer {repo.token}":
                return self._refuse(403, "GatedRepo")
            return self._file(repo, match["file"])

        def _refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _json(self, value: Any) -> None:
            self._send("application/json", json.dumps(value).encode())

        def _send(self, kind: str, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _file(self, repo: Repo, name: str) -> None:
            content = repo.files[name]
            begin = int(re.sub(r"\D", "", self.headers.get("Range", "")) or 0)
            self.send_response(206 if begin else 200)
            self.send_header("ETag", f'"{_etag(content)}"')
            self.send_header("X-Repo-Commit", repo.commit)
            self.send_header("Content-Length", str(len(content) - begin))
            if begin:
                self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
            self.end_headers()
            if self.command == "HEAD":
                return
            if name in repo.breaks and not begin:
                self.wfile.write(content[: len(content) // 2])
                self.close_connection = True
            elif name in repo.stalls:
                self.wfile.write(content[: len(content) // 2])
                hub.stalled.set()
                hub.ended.wait(30)
                self.close_connection = True
            else:
                self.wfile.write(content[begin:])

    return Handler


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
