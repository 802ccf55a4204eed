"""What an encoder says of texts: embeddings in the shape of OpenAI's API, answers of heads in that of vLLM's /classify.

POST /v1/embeddings    https://platform.openai.com/docs/api-reference/embeddings
POST /v1/classify      a record of predict_t5.py for each input: tags, a class, classes or a number
"""

import base64
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
from fastapi import Request
from fastapi.responses import JSONResponse, Response

from features.server import Server
from features.server.app import Service, run
from features.server.completions import Fields, bad, longest_of, values_of
from features.server.waiting_texts import Counters, TextBatches, WaitingText
from foundry.common.errors import UserError
from foundry.common.machine import run_in_short_lived_thread
from foundry.modeling.loading import load_config
from foundry.modeling.rows_at_a_time import rows_to_score
from tasks.model_folders import LoadedEncoder


class Classify(Fields):
    """The fields of a request to a head."""

    input: Any  # a text, an object of source columns, or a list of these
    model: str | None = None
    user: str | None = None


class Embeddings(Classify):
    """The fields of a request for embeddings, of which `input_type` is ours."""

    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    input_type: Literal["query", "document"] | None = None


@dataclass(eq=False, kw_only=True)
class EncodedText(WaitingText):
    """An input of an encoder. uncut_length: how many tokens it had before it was cut. known: what
    `LoadedEncoder.answer` must know. found: its answer."""

    uncut_length: int = 0
    known: Any = None
    found: dict = field(default_factory=dict)


class EncoderBatches(TextBatches):
    """The queue of an encoder's inputs."""

    def _answer(self, batch: list[Any], is_alone: bool) -> None:  # noqa: ARG002
        answers = self.engine.answer([(text.ids, text.uncut_length, text.known) for text in batch])
        for text, found in zip(batch, answers, strict=True):
            text.found = found
            self._end(text)


class EncoderService(Service):
    """Answers with what an encoder says of texts."""

    def __init__(self, args: Any, encoder: LoadedEncoder, feature: Server):
        self.encoder = encoder
        longest = rows_to_score(load_config(args.model_name_or_path, "--model_name_or_path"), encoder.most, 1)
        rows, seconds = min(args.batch_size, longest), feature.max_wait_ms / 1000
        batches = EncoderBatches(encoder, Counters(), rows, longest * encoder.most, feature.max_queue, seconds)
        about = dict(kind=encoder.kind, inputs=encoder.columns, labels=encoder.labels, max_source_tokens=encoder.most)
        self.posts: dict[str, Callable] = {"/v1/classify": self.classify}
        if encoder.kind == "embedding":
            self.posts = {"/v1/embeddings": self.embed}
            (empty,) = run_in_short_lived_thread(partial(encoder.answer, [encoder.read("")]))
            about["dimensions"] = len(empty["embedding"])
        super().__init__([args.model_name_or_path], feature, batches, about)
        self.longest = longest_of(encoder.most, feature.cut_sources)

    async def embed(self, request: Request, body: Embeddings) -> Response:
        """The response to a request for embeddings."""
        width = self.about["dimensions"]
        if body.dimensions not in (None, width):
            raise bad(f"dimensions {body.dimensions:,}: an embedding has {width:,} numbers: leave it out")
        rows = await self.answered(request, body, self.text)
        return await self.call(self.response, rows, lambda row: {"object": "embedding"} | shown_embedding(row, body))

    async def classify(self, request: Request, body: Classify) -> Response:
        """The response to a request to a head."""
        rows = await self.answered(request, body, self.values)
        head = {"id": f"classify-{uuid.uuid4().hex}", "created": int(time.time())}
        return await self.call(self.response, rows, lambda row: row.found, head)

    async def answered(
        self, request: Request, body: Classify, given_as: Callable[[Any, Any, str], Any]
    ) -> list[EncodedText]:
        """The rows of a request's input, answered. given_as: what the encoder reads of (an input, the body, its name in
        errors). HTTPException for an input that cannot be answered."""
        self.model(body.model)
        changed, told = self.bell()
        inputs = body.input if isinstance(body.input, list) else [body.input]
        if not inputs:
            raise bad("input: is an empty list")
        self.check_count(len(inputs), "input")
        rows = []
        for number, given in enumerate(inputs):
            where = f"input[{number}]" if isinstance(body.input, list) else "input"
            rows.append(await self.call(self.row, given_as, given, body, where, told))
        self.put(request, rows, "input")
        await self.finished(rows, changed)
        return rows

    def row(
        self, given_as: Callable, given: Any, body: Classify, where: str, told: Callable[[], object]
    ) -> EncodedText:
        """The row of an input. HTTPException if it cannot be answered."""
        most = None if self.feature.cut_sources else self.encoder.most
        values = given_as(given, body, where)
        if most and (fewest := self.encoder.fewest(values)) > most:
            raise bad(f"{where}: has at least {fewest:,} tokens, and the model reads at most {most:,}")
        try:
            source, uncut_length, known = self.encoder.read(values)
        except UserError as error:
            raise bad(f"{where}: {error}") from None
        if most and uncut_length > most:
            raise bad(f"{where}: has {uncut_length:,} tokens, and the model reads at most {most:,}")
        return EncodedText(source, 0, told=told, uncut_length=uncut_length, known=known)

    def text(self, given: Any, body: Embeddings, where: str) -> str:
        """What is read of a text to embed: as sentence-transformers' encode_query, encode_document or encode does."""
        if not isinstance(given, str):
            raise bad(
                f"{where}: must be a text, and input a text or a list of texts; token ids are refused, since those of "
                "another tokenizer would be other texts"
            )
        if not given.strip():
            raise bad(f"{where}: is an empty text")
        given = self.longest.within(given, where)
        return self.encoder.prompt + given if body.input_type == "query" else given

    def values(self, given: Any, _: Classify, where: str) -> dict[str, Any]:
        """{column: value} of an input of a head."""
        return values_of(given, self.encoder.columns, where, self.longest, of_lists=self.encoder.kind == "tokens")

    def response(
        self, rows: list[EncodedText], made: Callable[[EncodedText], dict], head: dict | None = None
    ) -> Response:
        """The answers in the order of the inputs, with what was cut and counted."""
        cuts = ({"cut_from": row.uncut_length} if row.uncut_length > len(row.ids) else {} for row in rows)
        data = [{"index": number} | made(row) | cut for number, (row, cut) in enumerate(zip(rows, cuts, strict=True))]
        read = sum(len(row.ids) for row in rows)
        self.counters.tokens.update(read=read)
        usage = {"prompt_tokens": read, "total_tokens": read}
        return JSONResponse((head or {}) | {"object": "list", "data": data, "model": self.name, "usage": usage})


def shown_embedding(row: EncodedText, body: Embeddings) -> dict:
    """An embedding as the request asks for it; base64: of its numbers in float32, the lowest byte first."""
    numbers = row.found["embedding"]
    if body.encoding_format == "base64":
        return {"embedding": base64.b64encode(np.asarray(numbers, "<f4").tobytes()).decode()}
    return {"embedding": numbers.tolist()}


def serve_encoder(args: Any, encoder: LoadedEncoder, feature: Server) -> None:
    """Answers requests until the process is told to end. args: the flags of predict_t5.py."""
    service = EncoderService(args, encoder, feature)
    run(service, encoder.about | {"inputs": f"those of requests to {', '.join(service.posts)}"})
