"""A W&B server with one sweep: the parts of the GraphQL API and the file stream that `wandb agent` and its runs use.

with FakeWandb(sweep) as server:      # the words of a sweep file, and the arguments of its trials
    server.environment                # for `wandb agent us/ours/abc`
    server.history["trial-1"]         # the rows that this run has logged, as they came
"""

import gzip
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml


class FakeWandb:
    """Hands out trials one after the other; `stop` ends one as the button of the page does.

    sweep: its file as a dictionary. trials: {run id: {flag: value}}.
    """

    def __init__(self, sweep: dict, trials: dict[str, dict]):
        self.sweep, self.waiting, self.commands = sweep, dict(trials), []
        self.history = {run: [] for run in trials}
        self.summary, self.exit_codes, self.operations, self.heartbeats = {}, {}, [], []

    def __enter__(self) -> "FakeWandb":
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"wandb": self}))
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.environment = {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": "0" * 40}
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def stop(self, run: str) -> None:
        self.commands.append({"type": "stop", "run_id": run})

    # ------------------------------------------------------------ GraphQL
    def answer(self, operation: str, variables: dict) -> dict:
        """The `data` of an operation; unknown operations get none."""
        self.operations.append(operation)
        return getattr(self, f"on_{operation}", lambda _: {})(variables)

    def on_SweepWithRuns(self, _) -> dict:
        sweep = {"id": "s", "name": "abc", "config": yaml.safe_dump(self.sweep), "runs": {"edges": []}}
        return {"project": {"sweep": sweep}}

    def on_CreateAgent(self, _) -> dict:
        return {"createAgent": {"agent": {"id": "agent-1"}}}

    def on_Heartbeat(self, variables) -> dict:
        running = json.loads(variables["runState"])
        self.heartbeats.append(running)
        commands, self.commands = self.commands, []
        if not running and not commands:
            if self.waiting:
                run = next(iter(self.waiting))
                arguments = {name: {"value": value} for name, value in self.waiting.pop(run).items()}
                commands = [{"type": "run", "run_id": run, "program": self.sweep["program"], "args": arguments}]
            else:
                commands = [{"type": "exit"}]
        return {"agentHeartbeat": {"agent": {"id": "agent-1"}, "commands": json.dumps(commands)}}

    def on_UpsertBucket(self, variables) -> dict:
        run = variables["name"]
        project = {"id": "p", "name": "ours", "entity": {"id": "e", "name": "us"}}
        bucket = {"id": f"id-{run}", "name": run, "displayName": run, "description": None, "project": project}
        bucket |= {"sweepName": "abc", "historyLineCount": 0, "config": variables.get("config") or "{}"}
        return {"upsertBucket": {"bucket": bucket, "inserted": True}}

    def on_CreateRunFiles(self, variables) -> dict:
        files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in variables["files"]]
        return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}

    def on_Viewer(self, _) -> dict:
        return {"viewer": {"id": "v", "entity": "us", "username": "us", "flags": "{}", "teams": {"edges": []}}}

    on_GetViewer = on_GetDefaultEntity = on_Viewer

    # ------------------------------------------------------------ the file stream
    def stream(self, run: str, body: dict) -> None:
        for name, part in (body.get("files") or {}).items():
            if name == "wandb-history.jsonl":
                self.history[run] += [json.loads(line) for line in part["content"]]
            elif name == "wandb-summary.json" and part["content"]:
                self.summary[run] = json.loads(part["content"][-1])
        if body.get("complete"):
            self.exit_codes[run] = body.get("exitcode")


class _Handler(BaseHTTPRequestHandler):
    wandb: FakeWandb

    def do_POST(self):
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data = gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data
        body = json.loads(data) if data.startswith(b"{") else {}
        if self.path == "/graphql":
            name = re.search(r"(?:query|mutation)\s+(\w+)", body["query"])
            return self.say({"data": self.wandb.answer(name[1] if name else "", body.get("variables") or {})})
        run = re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", self.path)
        if run:
            self.wandb.stream(run[1], body)
        return self.say({"limits": {}})

    def do_PUT(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.say({})

    do_GET = do_HEAD = do_PUT

    def say(self, answer: dict):
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_):
        pass
