"""A request for completions, and its response, in the shape of OpenAI's API.

https://platform.openai.com/docs/api-reference/completions
"""

import asyncio
import copy
import os
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from features.server import Server
from features.server.waiting_texts import Answer, Row
from foundry.corpora.preview import UNCUT
from tasks.answering import Engine, Plan, tokenised
from tasks.examples import class_label_ids, decode_texts
from tasks.predictions import Input

MOST_STOPS = 4
LEAST_TEMPERATURE = 0.01  # but for 0, which draws nothing


class BadRequest(Exception):
    """What is wrong with a request, in one line."""


class Completion(BaseModel):
    """The fields of a request. `cut_sources` is a flag of the server."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    prompt: Any  # a text, an object of source columns, or a list of these
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    n: int = Field(1, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = None
    stop: Any = None
    logprobs: int | None = Field(None, ge=0, le=1)
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] | None = None
    user: str | None = None
    probabilities: bool = False  # ours: of the classes
    # Fields that clients send with the value that changes nothing.
    echo: Literal[False] | None = None
    suffix: None = None
    best_of: Literal[1] | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logit_bias: dict[str, Literal[0]] | None = None


class Prompt:
    """One prompt: its Input, the token ids of its texts, how many tokens they had where they were cut, its rows."""

    def __init__(self, item: Input, sources: list[list[int]], uncut: int | None):
        self.item, self.sources, self.uncut = item, sources, uncut
        self.rows: list[Row] = []

    def choices(self, n: int) -> list[list[Answer]]:
        """The answers to each of its texts, n times."""
        answers = [answer for row in self.rows for answer in row.answers]
        return [[answer] for answer in answers] if len(self.sources) == 1 else [answers] * n


class Reader:
    """Makes prompts of texts and texts of answers, in a thread of its own, as a tokenizer serves one thread."""

    def __init__(self, plan: Plan, engine: Engine, feature: Server):
        self.plan, self.engine, self.cuts = plan, engine, feature.cut_sources
        self.own = copy.copy(plan)
        self.own.tokenizer = copy.deepcopy(plan.tokenizer)
        self.for_stops = copy.deepcopy(plan.tokenizer)  # the thread of the batches decodes too
        self.labels = class_label_ids(plan.entry, plan.tokenizer)
        self.beams = (engine.settings | plan.search).get("num_beams") or 1
        self.can_draw = plan.args.backend == "transformers"
        self.thread = ThreadPoolExecutor(1, "texts")

    async def call(self, function: Callable, *args: object) -> Any:
        """function(*args), computed in its thread."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, function, *args)

    def prompts(self, body: Completion) -> list[Prompt]:
        """The prompts of a request. BadRequest for one that cannot be answered."""
        given = body.prompt if isinstance(body.prompt, list) else [body.prompt]
        if not given:
            raise BadRequest("prompt: is an empty list")
        return [self._prompt(one, body.n) for one in given]

    def _prompt(self, given: object, n: int) -> Prompt:
        columns = self.plan.reader.inputs
        if isinstance(given, str) and len(columns) == 1:
            given = {columns[0]: given}
        if isinstance(given, str):
            raise BadRequest(f"prompt: the task reads {', '.join(columns)}: give an object with these columns")
        if not isinstance(given, dict):
            raise BadRequest("prompt: must be a text, an object of source columns, or a list of these")
        if given.keys() != {*columns}:
            raise BadRequest(
                f"prompt: must have the columns {', '.join(columns)}, and has {', '.join(given) or 'none'}"
            )
        for name, value in given.items():
            if not isinstance(value, str | int | float) or isinstance(value, bool):
                raise BadRequest(f"prompt: {name} must be a text or a number")
            if any("\ud800" <= letter <= "\udfff" for letter in str(value)):
                raise BadRequest(f"prompt: {name} holds half of a character (\\ud800 to \\udfff)")
        item = self.plan.reader.made({}, given)
        if n > 1 and self.plan.entry.get("max_piece_length"):
            raise BadRequest(f"n {n}: the task answers a text in pieces; leave it out")
        sources, most = tokenised(item.texts, self.own, UNCUT), self.plan.entry["max_source_length"]
        longest = max(map(len, sources), default=0)
        if longest <= most:
            return Prompt(item, sources, None)
        if not self.cuts:
            raise BadRequest(f"prompt: has {longest:,} tokens, and the model reads at most {most:,}")
        return Prompt(item, tokenised(item.texts, self.own), longest)

    def add_rows(self, body: Completion, prompts: list[Prompt], stops: list[str], told: Callable[[], object]) -> None:
        """Gives the prompts their rows. BadRequest for settings that do not go together."""
        limit = body.max_tokens or self.plan.limit
        if limit > self.plan.limit:
            raise BadRequest(f"max_tokens {limit:,}: an answer has at most {self.plan.limit:,}")
        if (body.logprobs is not None or body.probabilities) and body.stream:
            raise BadRequest("stream: goes with neither logprobs nor probabilities")
        if body.logprobs is not None and self.plan.entry.get("max_piece_length"):
            raise BadRequest("logprobs: the task answers a text in pieces; leave it out")
        if body.probabilities and self.labels is None:
            raise BadRequest("probabilities: the model's task has no classes")
        if body.temperature and body.temperature < LEAST_TEMPERATURE:
            raise BadRequest(f"temperature {body.temperature:g}: must be 0, or {LEAST_TEMPERATURE:g} to 2")
        if body.temperature and not self.can_draw:
            raise BadRequest(f"temperature {body.temperature:g}: --backend {self.plan.args.backend} draws no answers")
        if not body.temperature and (body.top_p or 1) < 1:
            raise BadRequest(f"top_p {body.top_p:g}: is for drawn answers, which need a temperature above 0")
        beams = 1 if body.temperature else self.beams
        if not body.temperature and body.n > beams:
            raise BadRequest(
                f"n {body.n}: the server finds {beams} answers to a text (--num_beams); more need a temperature above 0"
            )
        if beams > 1 and stops and body.logprobs is not None:
            raise BadRequest("logprobs: not with stop where answers are found by beams")
        seed = int.from_bytes(os.urandom(7), "big") if body.seed is None else body.seed
        shared = dict(
            limit=limit,
            told=told,
            wants_log_probs=body.logprobs is not None,
            labels=self.labels if body.probabilities else None,
            ends_text=self._ends_text(stops) if stops and beams == 1 else None,
        )
        for place, prompt in enumerate(prompts):
            for source in prompt.sources:
                if not body.temperature:
                    prompt.rows.append(Row(source, beams=beams, count=body.n, **shared))
                    continue
                drawn = dict(temperature=body.temperature, top_p=body.top_p or 1.0)
                for number in range(body.n):
                    random = torch.Generator().manual_seed(hash((seed, place, number, len(prompt.rows))) % 2**63)
                    prompt.rows.append(Row(source, random=random, **drawn, **shared))

    def _ends_text(self, stops: list[str]) -> Callable[[list[int]], bool]:
        def ends_text(tokens: list[int]) -> bool:
            (text,) = decode_texts(self.plan.entry, self.for_stops, [tokens])
            return any(stop in text for stop in stops)

        return ends_text

    def text(self, prompt: Prompt, answers: list[Answer], stops: list[str]) -> tuple[str, bool]:
        """(the answers to a prompt's texts, as one text before the first of `stops`; whether that was found)."""
        written = [answer.tokens for answer in answers]
        text = prompt.item.answer(decode_texts(self.plan.entry, self.own.tokenizer, written) if written else [])
        found = [text.index(stop) for stop in stops if stop in text]
        return text[: min(found, default=None)], bool(found)

    def choice(self, index: int, prompt: Prompt, answers: list[Answer], stops: list[str]) -> dict:
        """A choice of the response."""
        text, is_stopped = self.text(prompt, answers, stops)
        is_cut = not is_stopped and any(answer.reason == "length" for answer in answers)
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": "length" if is_cut else "stop"}
        for answer in answers:
            if answer.log_probs is not None:
                choice["logprobs"] = self._log_probs(prompt, answer)
        if prompt.uncut:
            choice["cut_from"] = prompt.uncut
        if any(row.probabilities for row in prompt.rows):
            choice["probabilities"] = dict(zip(self.plan.entry["labels"], prompt.rows[0].probabilities, strict=True))
        return choice

    def _log_probs(self, prompt: Prompt, answer: Answer) -> dict:
        places = [len(self.text(prompt, [Answer(answer.tokens[:end])], [])[0]) for end in range(len(answer.tokens))]
        names = self.own.tokenizer.convert_ids_to_tokens(answer.tokens)
        return dict(tokens=names, token_logprobs=answer.log_probs, top_logprobs=None, text_offset=places)

    def usage(self, prompts: list[Prompt]) -> dict:
        """Tokens read, each prompt once, and written, the end's included."""
        read = sum(len(source) for prompt in prompts for source in prompt.sources)
        written = sum(len(answer.tokens) for prompt in prompts for row in prompt.rows for answer in row.answers)
        return dict(prompt_tokens=read, completion_tokens=written, total_tokens=read + written)


def stops_of(body: Completion) -> list[str]:
    """The texts at which answers stop."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise BadRequest(f"stop: must be a text or a list of at most {MOST_STOPS} texts, none of them empty")
    return stops


def numbered(prompts: list[Prompt], n: int) -> Iterator[tuple[int, Prompt, list[Answer]]]:
    """(index of the choice, its prompt, the answers to its texts), as the response has them."""
    found = ((prompt, answers) for prompt in prompts for answers in prompt.choices(n))
    yield from ((index, *one) for index, one in enumerate(found))


def envelope(model: str) -> dict:
    """What the response, and each of its parts, begins with."""
    identity = f"cmpl-{uuid.uuid4().hex}"
    return {"id": identity, "object": "text_completion", "created": int(time.time()), "model": model}
