"""The addresses of the server, and its process: `serve` returns when the process was told to end.

POST /v1/completions, or the addresses of encoded_texts.py; GET /v1/models, /health, /metrics. SIGTERM or Ctrl-C: what
was taken is answered, new requests get 503, and the process ends when nothing is left; the second signal ends it at
once.
"""

import asyncio
import contextlib
import hmac
import json
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import uvicorn
from accelerate import PartialState
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from features.server import KEY, Server
from features.server.completions import (
    Completion,
    CompletionReader,
    IncrementalDetokenizer,
    Prompt,
    bad,
    envelope,
    numbered_choices,
    usage_of,
)
from features.server.waiting_texts import ENDS, Counters, TextBatches, WaitingText
from foundry.common.errors import UserError
from foundry.common.reports import end_summary, start_summary
from foundry.common.terminal import say
from foundry.modeling.found_answers import Engine
from foundry.modeling.loading import load_config
from foundry.modeling.rows_at_a_time import rows_to_generate, rows_to_score
from foundry.modeling.weights import weights_of
from tasks.answering import Plan, summary

READS = ["GET", "HEAD"]  # many balancers and monitors ask by HEAD whether a server lives
HERE = {"localhost", "127.0.0.1", "[::1]"}
HOST = re.compile(r"(\[[0-9a-f:]+\]|[^\s:/?#@\[\]]+)(:\d*)?", re.IGNORECASE)  # of the header: a name, a port
MOST_BYTES = 2**22  # of a request
SECONDS = 60.0  # that a request may take to come, and a part of a response to be taken
GONE = 499  # in the counts: the client went away
FAILED = "the model could not answer; the server's log says why"
TOO_LONG = f"a request has at most {MOST_BYTES:,} bytes"


class Service:
    """What the addresses share. posts: {address: the method that answers requests to it}, of a subclass. models: one,
    or those of an ensemble. name: that of the models. about: what /v1/models says of them. key: what clients must send;
    None for nothing."""

    posts: dict[str, Callable]

    def __init__(self, models: list[str], feature: Server, batches: TextBatches, about: dict):
        self.feature, self.key, self.ends = feature, os.environ.get(KEY) or None, False
        self.name = "+".join(Path(model).resolve().name if Path(model).exists() else model for model in models)
        self.batches, self.counters, self.about, self.began = batches, batches.counters, about, int(time.time())
        self.thread = ThreadPoolExecutor(1, "texts")  # as a tokenizer serves one thread
        self.open = 0  # requests that are being answered
        self.deadlines: set[asyncio.Timeout] = set()  # of those whose bodies are on their way
        self.watchers: set[asyncio.Task] = set()

    async def call(self, function: Callable, *args: object) -> Any:
        """function(*args), computed in the thread of texts."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, function, *args)

    def bell(self) -> tuple[asyncio.Event, Callable[[], None]]:
        """(an event, the function by which the thread of the batches sets it)."""
        changed, loop = asyncio.Event(), asyncio.get_running_loop()

        def told() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(changed.set)

        return changed, told

    def put(self, request: Request, texts: list[WaitingText], field: str) -> None:
        """Lets the texts of a request's field wait, while its client does. HTTPException if they cannot."""
        self.check_count(len(texts), field)
        self.batches.put(texts)
        self.watch(request, lambda: self.batches.leave(texts))

    def check_count(self, texts: int, field: str) -> None:
        """HTTPException if a request's field makes more texts than may wait."""
        if texts > self.feature.max_queue:
            raise bad(f"{field}: makes {texts:,} texts, and at most {self.feature.max_queue:,} can wait")

    async def finished(self, texts: list[WaitingText], changed: asyncio.Event) -> None:
        """Waits for the answers to the texts. HTTPException if one failed."""
        while not all(text.is_answered for text in texts):
            await changed.wait()
            changed.clear()
        if any(text.failure for text in texts):
            raise HTTPException(500, FAILED)  # a client that is gone reads no response

    def watch(self, request: Request, leave: Callable[[], None]) -> None:
        """Calls `leave` when the client goes away, or has its response."""

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            leave()

        task = asyncio.create_task(watch())
        self.watchers.add(task)
        task.add_done_callback(self.watchers.discard)

    def model(self, name: str | None) -> dict:
        """What is told of the model, whose name it must be, if one is given. HTTPException 404 if it is another."""
        if name not in (None, self.name):
            raise HTTPException(404, f"model {(name or '')[:200]}: this server has {self.name}")
        return dict(id=self.name, object="model", created=self.began, owned_by="t5-foundry") | self.about


class Completions(Service):
    """Answers texts with texts."""

    def __init__(self, plan: Plan, engine: Engine, feature: Server):
        folders, device = [str(plan.folder), *plan.args.models[1:]], torch.device(PartialState().device)
        configs = [load_config(folder, "--model_name_or_path") for folder in folders]
        rows = min(rows_to_score(config, plan.entry.max_source_length, 1) for config in configs)
        rows = min(rows, plan.args.batch_size)
        tokens = rows_to_generate(configs, 1, 0, 1, device, plan.args.bf16)  # that the memory has room for
        batches = TextBatches(engine, Counters(), rows, tokens, feature.max_queue, seconds=feature.max_wait_ms / 1000)
        about: dict[str, Any] = dict(inputs=plan.reader.inputs, labels=list(plan.entry.labels) or None)
        about |= dict(max_source_tokens=plan.entry.max_source_length, max_tokens=plan.limit)
        if len(plan.args.models) > 1:
            about["ensemble"] = plan.args.models
        if weight_format := weights_of(plan.features).weight_format():
            about["weights"] = weight_format
        super().__init__(plan.args.models, feature, batches, about)
        self.reader = CompletionReader(plan, engine, feature, self.check_count)
        self.posts = {"/v1/completions": self.complete}

    async def complete(self, request: Request, body: Completion) -> Response:
        """The response to a request whose fields have the right types."""
        self.model(body.model)
        changed, told = self.bell()
        given = self.reader.given(body)
        self.check_count(len(given) * body.n, "prompt")
        seed = int.from_bytes(os.urandom(7), "big") if body.seed is None else body.seed
        prompts = []
        for place, one in enumerate(given):  # one by one: other requests' texts are tokenised in between
            prompts.append(await self.call(self.reader.prompt, body, one, place, seed, told))
        texts = [text for prompt in prompts for text in prompt.texts]
        self.put(request, texts, "prompt")
        if body.stream:
            parts = self.stream(body, prompts, changed)
            return StreamingResponse(parts, media_type="text/event-stream")
        await self.finished(texts, changed)
        choices = [await self.call(self.reader.choice, *one, body.stop) for one in numbered_choices(prompts, body.n)]
        head = envelope(self.name, self.reader.warning(body, prompts))
        return JSONResponse(head | {"choices": choices, "usage": self.counted(prompts)})

    async def stream(self, body: Completion, prompts: list[Prompt], changed: asyncio.Event) -> AsyncIterator[str]:
        """Server-sent events: what each answer has grown by. An answer that is found by beams, is made of pieces, or
        names a class comes whole."""
        head, reader, over = envelope(self.name, self.reader.warning(body, prompts)), self.reader, set()
        detokenizers = [IncrementalDetokenizer(reader.tokenizer) for _ in numbered_choices(prompts, body.n)]
        sent = [""] * len(detokenizers)
        grows = reader.writes_text and not reader.in_pieces and (reader.beams == 1 or body.temperature)
        while len(over) < len(detokenizers):
            changed.clear()
            for index, prompt, found in numbered_choices(prompts, body.n):
                if index in over or not (found.is_over or grows):
                    continue
                if found.failure == "failed":
                    yield event({"error": shape(500, FAILED)})
                    return
                part = {"index": index, "logprobs": None, "finish_reason": None}
                if found.is_over:
                    over.add(index)
                    part = await self.call(reader.choice, index, prompt, found, body.stop)
                    text = part["text"]
                else:
                    text = await self.call(reader.so_far, detokenizers[index], found.tokens[0], body.stop)
                if found.is_over or len(text) > len(sent[index]):
                    yield event(head | {"choices": [part | {"text": text[len(sent[index]) :]}]})
                    sent[index] = text
            if len(over) < len(detokenizers):
                await changed.wait()
        usage = self.counted(prompts)
        if body.stream_options.include_usage:
            yield event(head | {"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"

    def counted(self, prompts: list[Prompt]) -> dict:
        usage = usage_of(prompts)
        self.counters.tokens.update(read=usage["prompt_tokens"], written=usage["completion_tokens"])
        return usage


class RequestGuard:
    """ASGI middleware: refuses requests that are large, lack the key or come from elsewhere, and counts those that are
    posted.

    Without a key a server for this machine answers only its own names: a page that a browser opens under another name
    that leads here cannot ask it.
    """

    def __init__(self, app: Callable, service: Service):
        self.app, self.service = app, service

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        service, began, status, is_complete = self.service, time.perf_counter(), 500, False
        body: list[bytes] = []

        async def receiving() -> dict:
            nonlocal status
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
            message = await receive()
            if message["type"] == "http.disconnect" and not is_complete:
                status = GONE
            return message

        async def sending(message: dict) -> None:
            nonlocal status, is_complete
            if status == GONE:
                return
            status = message.get("status", status)
            is_complete = message["type"] == "http.response.body" and not message.get("more_body")
            try:
                async with asyncio.timeout(SECONDS):
                    await send(message)
            except TimeoutError:  # the client reads nothing
                status = GONE

        refusal = self._refusal(Request(scope))
        if refusal is None and scope["method"] == "POST":
            found = await self.received_body(receive)
            if isinstance(found, bytes):
                body.append(found)
            else:
                refusal = found
        service.open += 1
        try:
            await (refusal or self.app)(scope, receiving, sending)
        finally:
            service.open -= 1
            if scope["path"] in service.posts:
                service.counters.requests[status] += 1
            if scope["path"] in service.posts and status == 200:
                service.counters.seconds.add(time.perf_counter() - began)

    async def received_body(self, receive: Callable) -> bytes | Response:
        """The body of a request, or what is answered to one that is too long, or does not come. A request that has come
        in part when the process is told to end was not taken."""
        body, is_complete, deadlines = bytearray(), False, self.service.deadlines
        deadline = asyncio.timeout(SECONDS)
        try:
            async with deadline:
                deadlines.add(deadline)
                while not is_complete:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return error(GONE, "the client went away")
                    body += message.get("body", b"")
                    if len(body) > MOST_BYTES:
                        return error(413, TOO_LONG)
                    is_complete = not message.get("more_body")
        except TimeoutError:
            if self.service.ends:
                return error(503, ENDS)
            return error(408, f"the request must come within {SECONDS:g} seconds")
        finally:
            deadlines.discard(deadline)
        return bytes(body)

    def _refusal(self, request: Request) -> Response | None:
        service, headers, posts = self.service, request.headers, request.method == "POST"
        scheme, _, key = headers.get("authorization", "").partition(" ")
        sent = key.strip().encode() if scheme.lower() == "bearer" else b""
        is_known = service.key is None or hmac.compare_digest(sent, service.key.encode())
        is_for_here = service.feature.host in (*HERE, "::1")
        is_elsewhere = is_for_here and not all(map(names_this_machine, headers.getlist("host")))
        length, kind = headers.get("content-length", ""), headers.get("content-type", "")
        size = int(length) if length.isdecimal() else 0  # of one in chunks it is not known before
        if posts and service.ends:
            return error(503, ENDS)
        if service.key is None and is_elsewhere:
            return error(403, "this server is for its own machine: --host and the key open it to others")
        if not is_known and request.url.path != "/health":
            return error(401, "the key is missing or wrong: send it as Authorization: Bearer KEY")
        if posts and size > MOST_BYTES:
            return error(413, TOO_LONG)
        # A page in a browser can send any other type to this machine without being asked.
        if posts and kind.partition(";")[0].strip().lower() != "application/json":
            return error(415, f"Content-Type {kind or '(none)'}: must be application/json")
        return None


def names_this_machine(host: str) -> bool:
    """Whether a header Host, "localhost:8000", names this machine for itself."""
    found = HOST.fullmatch(host)
    return found is not None and found[1].lower() in HERE


def shape(status: int, message: str) -> dict:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"message": message, "type": kind, "param": None, "code": status}


def error(status: int, message: str) -> JSONResponse:
    """A refusal in OpenAI's shape, one line. The connection ends with it: the rest of the request is not read. Halves
    of characters, which a request may hold and no response can, are shown as \\ud800."""
    message = message.encode(errors="backslashreplace").decode()
    return JSONResponse({"error": shape(status, message)}, status, headers={"connection": "close"})


def event(content: dict) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def make_app(service: Service) -> FastAPI:
    """The application, for uvicorn or any other ASGI server. `service.batches` must have been started."""
    app = FastAPI(title="T5 Foundry", openapi_url=None)  # its page of documentation would ask other machines
    app.add_middleware(RequestGuard, service=service)
    if origins := service.feature.cors_origin:  # outside the guard: refusals are read by the page too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            allow_private_network=True,  # a page of the internet may ask this machine
        )

    for path, answer in service.posts.items():
        app.post(path)(answer)

    @app.api_route("/v1/models", methods=READS)
    async def models() -> dict:
        return {"object": "list", "data": [service.model(service.name)]}

    @app.api_route("/v1/models/{name:path}", methods=READS)
    async def model(name: str) -> dict:
        return service.model(name)

    @app.api_route("/health", methods=READS)
    async def health() -> Response:
        if service.ends or not service.batches.is_alive():
            raise HTTPException(503, ENDS)
        return JSONResponse({"status": "ok"})

    @app.api_route("/metrics", methods=READS)
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

    @app.exception_handler(HTTPException)
    async def refused(request: Request, problem: HTTPException) -> Response:
        if problem.detail == "Not Found":
            return error(404, f"{request.url.path}: this server answers {', '.join(service.posts)}")
        return error(problem.status_code, problem.detail)

    return app


class Process(uvicorn.Server):
    """uvicorn, which ends when all that was taken is answered."""

    service: Service

    def handle_exit(self, sig: int, frame: object) -> None:
        if self.service.ends:
            self.should_exit = self.force_exit = True
        self.service.ends = True

    async def on_tick(self, counter: int) -> bool:
        while self.service.ends and self.service.deadlines:
            self.service.deadlines.pop().reschedule(asyncio.get_running_loop().time())
        self.should_exit |= self.service.ends and not self.service.open
        return await super().on_tick(counter)


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens. UserError if it cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as problem:
        raise UserError(f"--host {host} --port {port}: cannot be listened on: {problem}. Take others") from None


def serve(plan: Plan, engine: Engine, feature: Server) -> None:
    """Answers requests for completions until the process is told to end."""
    rows = summary(plan, f"those of requests: {', '.join(plan.reader.inputs)}", engine)
    run(Completions(plan, engine, feature), rows)


def run(service: Service, rows: dict) -> None:
    """Answers requests until the process is told to end. rows: of the printed plan."""
    feature, batches, counters = service.feature, service.batches, service.counters
    place = listening(feature.host, feature.port)
    rows["batches"] = f"at most {batches.most_rows:,} texts, {batches.most_tokens:,} tokens"
    rows["key"] = f"that of {KEY}" if service.key else f"none ({KEY} is not set)"
    start_summary(rows, title="a server")
    batches.start()
    host = f"[{feature.host}]" if ":" in feature.host else feature.host
    say(f"the server answers at http://{host}:{place.getsockname()[1]} until Ctrl-C or SIGTERM")
    # uvicorn's own logs are warnings and errors: a request's texts and headers are in none.
    config = uvicorn.Config(
        make_app(service),
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=int(SECONDS),  # for responses that are being read
    )
    process = Process(config)
    process.service = service
    process.run(sockets=[place])
    batches.close()
    batches.join()
    tokens = {side: f"{count:,} tokens" for side, count in counters.tokens.items()}
    end_summary({"requests": f"{counters.requests.total():,}"} | tokens)
