"""A hub on the loopback interface: the few routes of the Hugging Face Hub that uploads and downloads use, repositories in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

Files = dict[str, bytes]


class Hub:
    """Repositories by name; each has commits in order, and branch main at the last."""

    def __init__(self) -> None:
        self.commits: dict[str, list[tuple[str, Files]]] = {}
        self.large: dict[str, bytes] = {}
        self.claimed: dict[str, int] = {}
        """Sizes that the hub states for files of these names, whatever they have."""
        self.log: list[tuple[str, str]] = []
        self.url = ""

    def commit(self, repository: str, files: Files) -> str:
        known = self.commits.setdefault(repository, [])
        known.append((hashlib.sha1(f"{repository} {len(known)}".encode()).hexdigest(), files))
        return known[-1][0]

    def files(self, repository: str, revision: str) -> tuple[str, Files] | None:
        known = self.commits.get(repository, [])
        return next((one for one in reversed(known) if revision in ("main", one[0])), None)

    def fetched(self) -> list[str]:
        return [path.rpartition("/resolve/")[2].partition("/")[2] for verb, path in self.log if verb == "GET"]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        """Tests need no log on the terminal."""

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self.hub.log.append(("PUT", self.path))
        self.hub.large[self.path.rpartition("/")[2]] = self._body()
        self._answer(200, b"")

    def do_POST(self) -> None:
        self.hub.log.append(("POST", self.path))
        path, body = self.path.partition("?")[0], self._body()
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if self.headers.get("Authorization") != "Bearer hf_secret":
            return self._json({"error": "Invalid username or password."}, 401)
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            new = name not in self.hub.commits
            self.hub.commits.setdefault(name, [])
            return self._json({"url": f"{self.hub.url}/{name}"}, 200 if new else 409)
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            upload = [{**one, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{one['oid']}"}}} for one in objects]
            return self._json({"objects": upload})
        found = re.fullmatch(r"/api/models/(.+?)/(preupload|commit)/main", path)
        assert found, path
        if found[2] == "preupload":
            files = [
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if one["path"].endswith("safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for one in json.loads(body)["files"]
            ]
            return self._json({"files": files})
        files = dict(self.hub.files(found[1], "main")[1]) if self.hub.commits[found[1]] else {}
        for line in body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
        oid = self.hub.commit(found[1], files)
        return self._json({"commitUrl": f"{self.hub.url}/{found[1]}/commit/{oid}", "commitOid": oid, "success": True})

    def _serve(self) -> None:
        self.hub.log.append((self.command, self.path))
        match = re.fullmatch(r"/(?P<repository>.+?)/resolve/(?P<revision>[^/]+)/(?P<file>.+)", unquote(self.path))
        if match is None or match["repository"] not in self.hub.commits:
            return self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        found = self.hub.files(match["repository"], match["revision"])
        if found is None:
            return self._json({"error": "Invalid rev"}, 404, {"X-Error-Code": "RevisionNotFound"})
        commit, files = found
        if match["file"] not in files:
            wrong = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}
            return self._json({"error": "Entry not found"}, 404, wrong)
        content = files[match["file"]]
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": commit}
        return self._answer(200, content, headers, self.hub.claimed.get(match["file"]))

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _json(self, value: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._answer(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _answer(
        self, status: int, content: bytes, headers: dict[str, str] | None = None, size: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) if size is None else size))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def running() -> Iterator[Hub]:
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def python(hub: Hub, home: Path, code: str, token: str | None = "hf_secret", offline: bool = False) -> object:
    """Run code in a process of its own, where huggingface_hub reads its environment; the code puts what it found into ``found``."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    env |= {"HF_TOKEN": token} if token else {}
    env |= {"HF_HUB_OFFLINE": "1"} if offline else {}
    whole = f"import json\nfound = None\n{code}\nprint('FOUND ' + json.dumps(found))"
    done = subprocess.run([sys.executable, "-c", whole], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rpartition("FOUND ")[2])
