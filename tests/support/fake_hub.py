"""A Hugging Face Hub on this machine, with the real HTTP API: accepts and records commits, and serves files.

with FakeHub() as hub:
    ...                       # whatever uploads
hub.commits                   # [{"message": "...", "files": {"config.json": b"..."}}, ...]

os.environ["HF_ENDPOINT"] = FakeHub(files=folder).start()     # before huggingface_hub is imported
...                           # whatever loads folder/models/google/t5-small/*, folder/datasets/nyu-mll/glue/*
"""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40  # of every repository that is served


class FakeHub:
    """While it is entered, huggingface_hub in this process talks to it. refuse: {part of a path: HTTP status}. files:
    the folder that it serves."""

    def __init__(self, refuse: dict[str, int] | None = None, files: Path | None = None):
        self.refuse, self.requests, self.repositories, self.commits = refuse or {}, [], {}, []
        self.files = files

    def start(self) -> str:
        """Starts the server; returns its URL."""
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        return self.url

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def __enter__(self) -> "FakeHub":
        self.start()
        self.patches = [
            mock.patch("huggingface_hub.constants.ENDPOINT", self.url),
            mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", False),
            mock.patch.dict("os.environ", {"HF_TOKEN": "hf_of_nobody"}),
        ]
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *_):
        for patch in self.patches:
            patch.stop()
        self.stop()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.hub.requests.append(self.path)
        for part, status in self.hub.refuse.items():
            if part in self.path:
                return self.answer({"error": "you may not do this"}, status)
        if self.path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted.get('organization') or 'nobody'}/{wanted['name']}"
            self.hub.repositories[name] = wanted
            return self.answer({"url": f"{self.hub.url}/{name}", "name": name, "id": name})
        if "/preupload/" in self.path:
            files = [file["path"] for file in json.loads(body)["files"]]
            return self.answer(
                {"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in files]}
            )
        if "/commit/" in self.path:
            name = re.match("/api/models/(.*)/commit/", self.path)[1]
            entries = [json.loads(line) for line in body.splitlines()]
            files = {e["value"]["path"]: base64.b64decode(e["value"]["content"]) for e in entries if e["key"] == "file"}
            message = next(entry["value"]["summary"] for entry in entries if entry["key"] == "header")
            self.hub.commits.append({"repository": name, "message": message, "files": files})
            oid = f"{len(self.hub.commits):040x}"
            return self.answer({"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid, "success": True})
        return self.answer({})  # validate-yaml

    def do_GET(self):
        self.hub.requests.append(self.path)
        path = unquote(urlsplit(self.path).path)
        if self.hub.files is None:
            return self.answer({"id": "nobody/x", "sha": "0" * 40, "siblings": []})
        if file := re.fullmatch("/(datasets/)?([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            return self.send_file(self.hub.files / (file[1] or "models") / file[2], file[3])
        asked = re.fullmatch("/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/[^/]+/?(.*))?", path)
        folder = self.hub.files / asked[1] / asked[2] if asked else None
        if folder is None or not folder.is_dir():
            return self.answer({"error": "not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        if asked[3] != "tree":
            names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
            return self.answer({"id": asked[2], "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]})
        found = (folder / asked[4]).glob("**/*" if "recursive=true" in self.path.lower() else "*")
        kinds = [(path, "directory" if path.is_dir() else "file") for path in sorted(found)]
        return self.answer(
            [
                {"type": kind, "path": str(path.relative_to(folder)), "size": path.stat().st_size, "oid": COMMIT}
                for path, kind in kinds
            ]
        )

    do_HEAD = do_GET

    def send_file(self, folder: Path, name: str) -> None:
        if not (folder / name).is_file():
            return self.answer({"error": "not found"}, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        content = (folder / name).read_bytes()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if part:
            first, last = int(part[1]), min(int(part[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content = content[first : last + 1]
        return self.send(content, 206 if part else 200, headers)

    def answer(self, value: dict | list, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send(json.dumps(value).encode(), status, {"Content-Type": "application/json"} | (headers or {}))

    def send(self, content: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_):
        pass
