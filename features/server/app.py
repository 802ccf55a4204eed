"""The addresses of the server, and its process: `serve` returns when the process was told to end.

POST /v1/completions, GET /v1/models, /health, /metrics. SIGTERM or Ctrl-C: what was taken is answered, new requests get
503, and the process ends when nothing is left; the second signal ends it at once.
"""

import asyncio
import contextlib
import hmac
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import torch
import uvicorn
from accelerate import PartialState
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from features.server import KEY, Server
from features.server.completions import BadRequest, Completion, Prompt, Reader, envelope, numbered, stops_of
from features.server.counters import Counters
from features.server.waiting_texts import Batches, Closed, Full
from foundry.common.errors import UserError
from foundry.common.processes import say
from foundry.common.reports import end_summary, start_summary
from foundry.modeling.loading import load_config
from foundry.modeling.rows_at_a_time import rows_to_generate, rows_to_score
from tasks.answering import Engine, Plan, summary

HERE = {"localhost", "127.0.0.1", "::1"}
MOST_BYTES = 2**22  # of a request
GONE = 499  # in the counts: the client went away
ENDS = "the server ends: ask another one, or this one later"


class Service:
    """What the addresses share. name: of the model. key: what clients must send; None for nothing."""

    def __init__(self, plan: Plan, engine: Engine, feature: Server, key: str | None = None):
        self.plan, self.feature, self.key, self.ends = plan, feature, key, False
        path = Path(plan.args.model_name_or_path)
        self.name = path.resolve().name if path.exists() else plan.args.model_name_or_path
        self.counters, self.reader, self.began = Counters(), Reader(plan, engine, feature), int(time.time())
        rows, tokens = self.most(plan)
        self.batches = Batches(
            engine, self.counters, rows, tokens, feature.max_queue, seconds=feature.max_wait_ms / 1000
        )
        self.open = 0  # requests that are being answered
        self.watchers: set[asyncio.Task] = set()

    @staticmethod
    def most(plan: Plan) -> tuple[int, int]:
        """(texts, tokens) of a batch: --batch_size, and what the memory has room for."""
        config, device = load_config(str(plan.folder), "--model_name_or_path"), PartialState().device
        tokens = rows_to_generate(config, 1, 0, 1, torch.device(device), plan.args.bf16)
        rows = rows_to_score(config, plan.entry["max_source_length"], 1)
        return min(plan.args.batch_size, rows), tokens

    # ------------------------------------------------------------ completions
    async def complete(self, request: Request, body: Completion) -> Response:
        """The response to a request whose fields have the right types."""
        if body.model not in (None, self.name):
            return error(404, f"model {body.model}: this server has {self.name}")
        changed, loop = asyncio.Event(), asyncio.get_running_loop()

        def told() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(changed.set)

        stops = stops_of(body)
        prompts = await self.reader.call(self.reader.prompts, body)
        self.reader.add_rows(body, prompts, stops, told)
        rows = [row for prompt in prompts for row in prompt.rows]
        if len(rows) > self.feature.max_queue:
            raise BadRequest(f"prompt: makes {len(rows):,} texts, and at most {self.feature.max_queue:,} can wait")
        self.batches.put(rows)
        self.watch(request, lambda: self.batches.leave(rows))
        if body.stream:
            parts = self.stream(body, prompts, stops, changed)
            return StreamingResponse(parts, media_type="text/event-stream")
        while not all(row.done for row in rows):
            await changed.wait()
            changed.clear()
        return await self.whole(body, prompts, stops)

    def watch(self, request: Request, leave: Callable[[], None]) -> None:
        """Calls `leave` when the client goes away, or has its response."""

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            leave()

        task = asyncio.create_task(watch())
        self.watchers.add(task)
        task.add_done_callback(self.watchers.discard)

    async def whole(self, body: Completion, prompts: list[Prompt], stops: list[str]) -> Response:
        reasons = {answer.reason for prompt in prompts for row in prompt.rows for answer in row.answers}
        if "gone" in reasons:
            return error(GONE, "the client went away")
        if "failed" in reasons:
            return error(500, "the model could not answer; the server's log says why")
        choices = [await self.reader.call(self.reader.choice, *one, stops) for one in numbered(prompts, body.n)]
        return JSONResponse(envelope(self.name) | {"choices": choices, "usage": self.counted(prompts)})

    async def stream(
        self, body: Completion, prompts: list[Prompt], stops: list[str], changed: asyncio.Event
    ) -> AsyncIterator[str]:
        """Server-sent events: what each answer has grown by. An answer that is found by beams, is made of pieces, or
        names a class comes whole."""
        head, sent, over = envelope(self.name), {}, set()
        held = max(map(len, stops), default=1) - 1  # what may be the beginning of a stop
        reader, grows = self.reader, self.plan.entry["target_type"] == "text"
        while True:
            changed.clear()
            for index, prompt, answers in numbered(prompts, body.n):
                is_over = all(row.done for row in prompt.rows)
                grows_here = grows and len(answers) == 1 and prompt.rows[0].beams == 1
                is_over |= grows_here and answers[0].reason is not None
                if index in over or not (is_over or grows_here):
                    continue
                choice = await reader.call(reader.choice, index, prompt, answers, stops)
                text, before = choice["text"], sent.get(index, "")
                if not is_over:
                    text = text[: len(text) - held].rstrip("\ufffd")
                    if len(text) <= len(before):
                        continue
                sent[index] = text
                part = choice | {"text": text[len(before) :]}
                part |= {"finish_reason": choice["finish_reason"] if is_over else None}
                if any(answer.reason == "failed" for answer in answers):
                    yield event({"error": shape(500, "the model could not answer; the server's log says why")})
                    return
                yield event(head | {"choices": [part]})
                if is_over:
                    over.add(index)
            if len(over) == len(list(numbered(prompts, body.n))):  # a row that ended meanwhile has its part to come
                break
            await changed.wait()
        usage = self.counted(prompts)
        if (body.stream_options or {}).get("include_usage"):
            yield event(head | {"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"

    def counted(self, prompts: list[Prompt]) -> dict:
        usage = self.reader.usage(prompts)
        self.counters.tokens.update(read=usage["prompt_tokens"], written=usage["completion_tokens"])
        return usage

    def models(self) -> dict:
        about = dict(id=self.name, object="model", created=self.began, owned_by="t5-foundry")
        about |= dict(inputs=self.plan.reader.inputs, labels=self.plan.entry.get("labels"))
        about |= dict(max_source_tokens=self.plan.entry["max_source_length"], max_tokens=self.plan.limit)
        return {"object": "list", "data": [about]}


class Guard:
    """ASGI middleware: refuses requests that are large, lack the key or come from elsewhere, and counts completions.

    Without a key a server for this machine answers only its own names: a page that a browser opens under another name
    that leads here cannot ask it.
    """

    def __init__(self, app: Callable, service: Service):
        self.app, self.service = app, service

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        service, began, status = self.service, time.perf_counter(), GONE

        async def sending(message: dict) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        service.open += 1
        try:
            refusal = self._refusal(Request(scope))
            await (refusal or self.app)(scope, receive, sending)
        finally:
            service.open -= 1
            if scope["path"] == "/v1/completions":
                service.counters.requests[status] += 1
                service.counters.seconds.add(time.perf_counter() - began)

    def _refusal(self, request: Request) -> Response | None:
        service, headers, length = self.service, request.headers, request.headers.get("content-length", "")
        if request.method == "POST" and service.ends:
            return error(503, ENDS)
        if service.key is None and service.feature.host in HERE and request.url.hostname not in HERE:
            return error(403, "this server is for its own machine: --host and the key open it to others")
        sent = headers.get("authorization", "").removeprefix("Bearer ")
        is_known = service.key is None or hmac.compare_digest(sent.encode(), service.key.encode())
        if not is_known and request.url.path != "/health":
            return error(401, "the key is missing or wrong: send it as Authorization: Bearer KEY")
        if request.method == "POST" and not length.isdecimal():
            return error(411, "the request must say its length")
        if request.method == "POST" and int(length) > MOST_BYTES:
            return error(413, f"a request has at most {MOST_BYTES:,} bytes")
        return None


def shape(status: int, message: str) -> dict:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"message": message, "type": kind, "param": None, "code": status}


def error(status: int, message: str) -> JSONResponse:
    """A refusal in OpenAI's shape, one line. The connection ends with it: the rest of the request is not read."""
    return JSONResponse({"error": shape(status, message)}, status, headers={"connection": "close"})


def event(content: dict) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def make_app(service: Service) -> FastAPI:
    """The application, for uvicorn or any other ASGI server. `service.batches` must have been started."""
    app = FastAPI(title="T5 Foundry", openapi_url=None)  # its page of documentation would ask other machines
    app.add_middleware(Guard, service=service)

    @app.post("/v1/completions")
    async def complete(request: Request, body: Completion) -> Response:
        return await service.complete(request, body)

    @app.get("/v1/models")
    async def models() -> dict:
        return service.models()

    @app.get("/health")
    async def health() -> Response:
        if service.ends or not service.batches.is_alive():
            return error(503, ENDS)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        text = service.counters.text(len(service.batches.waiting))
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, problem: RequestValidationError) -> Response:
        first = problem.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:] if isinstance(part, str))
        if first["type"] == "json_invalid" or not where:
            return error(400, f"the request is no JSON object: {first.get('ctx', {}).get('error', first['msg'])}")
        return error(400, f"{where}: {first['msg']}")

    for kind, status, message in (
        (BadRequest, 400, ""),
        (Full, 429, "too many texts wait: try again later"),
        (Closed, 503, ENDS),
        (HTTPException, 400, ""),
    ):

        async def refused(_: Request, problem: Exception, status: int = status, message: str = message) -> Response:
            return error(getattr(problem, "status_code", status), message or getattr(problem, "detail", str(problem)))

        app.add_exception_handler(kind, refused)
    return app


class Process(uvicorn.Server):
    """uvicorn, which ends when all that was taken is answered."""

    service: Service

    def handle_exit(self, sig: int, frame: object) -> None:
        if self.service.ends:
            self.should_exit = self.force_exit = True
        self.service.ends = True

    async def on_tick(self, counter: int) -> bool:
        self.should_exit |= self.service.ends and not self.service.open
        return await super().on_tick(counter)


def process_of(service: Service) -> Process:
    """The process that serves it. Its own logs are warnings and errors: a request's texts and headers are in none."""
    process = Process(uvicorn.Config(make_app(service), access_log=False, log_config=None, server_header=False))
    process.service = service
    return process


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens. UserError if it cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as problem:
        raise UserError(f"--host {host} --port {port}: cannot be listened on: {problem}. Take others") from None


def serve(plan: Plan, engine: Engine, feature: Server) -> None:
    """Answers requests until the process is told to end."""
    service = Service(plan, engine, feature, os.environ.get(KEY) or None)
    place = listening(feature.host, feature.port)
    rows = summary(plan, f"those of requests: {', '.join(plan.reader.inputs)}", engine)
    rows["batches"] = f"at most {service.batches.most_rows:,} texts, {service.batches.most_tokens:,} tokens"
    rows["key"] = f"that of {KEY}" if service.key else f"none ({KEY} is not set)"
    start_summary(rows, title="a server")
    service.batches.start()
    host = f"[{feature.host}]" if ":" in feature.host else feature.host
    say(f"the server answers at http://{host}:{place.getsockname()[1]} until Ctrl-C or SIGTERM")
    process_of(service).run(sockets=[place])
    service.batches.close()
    service.batches.join()
    counters = service.counters
    end_summary({"requests": f"{counters.requests.total():,}", "written": f"{counters.tokens['written']:,} tokens"})
