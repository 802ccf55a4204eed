"""A Hugging Face Hub of one thread: creates repositories and takes commits over the real HTTP API, and remembers them.

with FakeHub() as hub:
    ...                       # whatever uploads
hub.commits                   # [{"message": "...", "files": {"config.json": b"..."}}, ...]
"""

import base64
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest import mock


class FakeHub:
    """While it is entered, huggingface_hub in this process talks to it. refuse: {part of a path: HTTP status}."""

    def __init__(self, refuse: dict[str, int] | None = None):
        self.refuse, self.requests, self.repositories, self.commits = refuse or {}, [], {}, []

    def __enter__(self) -> "FakeHub":
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"
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
        self.server.shutdown()
        self.server.server_close()


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
        self.answer({"id": "nobody/x", "sha": "0" * 40, "siblings": []})

    def answer(self, value: dict, status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass
