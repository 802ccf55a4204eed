"""A request for completions, and its response, in the shape of OpenAI's API.

https://platform.openai.com/docs/api-reference/completions
"""

import copy
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from starlette.exceptions import HTTPException
from transformers import PreTrainedTokenizerBase

from features.server import Server
from features.server.waiting_texts import Answer, Row
from foundry.corpora.preview import UNCUT
from foundry.corpora.tokenizers import decoded
from foundry.training.drawn_answers import uniform_numbers
from tasks.answering import Engine, Plan, tokenised
from tasks.examples import class_label_ids, decode_texts
from tasks.predictions import Input
from tasks.rows import is_text_corpus

BYTE = re.compile("<0x..>")  # a token that is one byte of a letter
LEAST_TEMPERATURE = 0.01  # but for 0, which draws nothing


def bad(message: str) -> HTTPException:
    """What is wrong with a request, in one line."""
    return HTTPException(400, message)


def values_of(given: object, columns: list[str], field: str, of_lists: bool = False) -> dict[str, Any]:
    """{column: value} of an input: a text, if there is one column, or an object of the columns. of_lists: whether a
    value may be a list of texts. HTTPException, which names the field, if it is none."""
    if isinstance(given, str) and len(columns) == 1:
        given = {columns[0]: given}
    if not isinstance(given, dict) or given.keys() != {*columns}:
        text = "a text, " if len(columns) == 1 else ""
        raise bad(f"{field}: must be {text}an object with the columns {', '.join(columns)}, or a list of these")
    for name, value in given.items():
        if not isinstance(value, str | int | float | (list if of_lists else str)) or isinstance(value, bool):
            raise bad(f"{field}: {name} must be a text or a number")
        for part in value if isinstance(value, list) else [value]:
            check_letters(str(part), f"{field}: {name}")
    return given


def check_letters(text: str, what: str) -> None:
    """HTTPException for a text that no tokenizer reads."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise bad(f"{what} holds half of a character (\\ud800 to \\udfff)")


class Growing:
    """The text of an answer that is being written: that of all its tokens, of which each call decodes the last ones.

    settled: the text that no further token changes, of the tokens before `end`. The last tokens are decoded with those
    from `begin` on, which are settled too: a tokenizer drops the space at the beginning of what it decodes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer, self.settled, self.begin, self.end = tokenizer, "", 0, 0

    def text(self, tokens: list[int]) -> str:
        """The text of the tokens, which begin with those of the calls before, or with less: an answer begun anew."""
        if len(tokens) < self.end:
            self.settled, self.begin, self.end = "", 0, 0
        parts = [tokens[self.begin : place] for place in (self.end, -1, None)]
        known, before, found = decoded(self.tokenizer, parts)
        text = self.settled + found[len(known) :]
        # A token that adds no text may begin a letter. Of letters in bytes the next byte may change all.
        if len(found) > max(len(before), len(known)) and not self._is_byte(tokens[-1]):
            self.settled, self.begin, self.end = text, self.end, len(tokens)
        return text

    def _is_byte(self, token: int) -> bool:
        return BYTE.fullmatch(str(self.tokenizer.convert_ids_to_tokens(token))) is not None


Stop = Annotated[str, Field(min_length=1)]
Stops = Annotated[list[Stop], BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop or [])]


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
    stop: Stops = Field([], max_length=4)
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
    """Makes prompts of texts and texts of answers, in the thread of texts, as a tokenizer serves one thread."""

    def __init__(self, plan: Plan, engine: Engine, feature: Server):
        self.plan, self.engine, self.cuts = plan, engine, feature.cut_sources
        self.own = copy.copy(plan)
        self.own.tokenizer = copy.deepcopy(plan.tokenizer)
        self.for_stops = copy.deepcopy(plan.tokenizer)  # the thread of the batches decodes too
        self.labels = class_label_ids(plan.entry, plan.tokenizer)
        self.beams = (engine.settings | plan.search).get("num_beams") or 1
        self.in_pieces = is_text_corpus(plan.entry)
        self.writes_text = plan.entry["target_type"] == "text"

    def prompts(self, body: Completion) -> list[Prompt]:
        """The prompts of a request. HTTPException for one that cannot be answered."""
        given = body.prompt if isinstance(body.prompt, list) else [body.prompt]
        if not given:
            raise bad("prompt: is an empty list")
        return [self._prompt(one, body.n) for one in given]

    def _prompt(self, given: object, n: int) -> Prompt:
        item = self.plan.reader.made({}, values_of(given, self.plan.reader.inputs, "prompt"))
        if n > 1 and self.in_pieces:
            raise bad(f"n {n}: the task answers a text in pieces; leave it out")
        sources, most = tokenised(item.texts, self.own, UNCUT), self.plan.entry["max_source_length"]
        longest = max(map(len, sources), default=0)
        if longest <= most:
            return Prompt(item, sources, None)
        if not self.cuts:
            raise bad(f"prompt: has {longest:,} tokens, and the model reads at most {most:,}")
        return Prompt(item, tokenised(item.texts, self.own), longest)

    def add_rows(self, body: Completion, prompts: list[Prompt], told: Callable[[], object]) -> None:
        """Gives the prompts their rows. HTTPException for settings that do not go together."""
        limit, temperature, top_p = body.max_tokens or self.plan.limit, body.temperature or 0, body.top_p or 1.0
        beams, wants_log_probs = 1 if temperature else self.beams, body.logprobs is not None
        backend, values = self.plan.args.backend, ", ".join(self.plan.entry.get("labels", ["a number"]))
        for is_wrong, message in (
            (limit > self.plan.limit, f"max_tokens {limit:,}: an answer has at most {self.plan.limit:,}"),
            (
                body.stream and (wants_log_probs or body.probabilities),
                "stream: goes with neither logprobs nor probabilities",
            ),
            (wants_log_probs and self.in_pieces, "logprobs: the task answers a text in pieces; leave it out"),
            (body.probabilities and self.labels is None, "probabilities: the model's task has no classes"),
            (
                0 < temperature < LEAST_TEMPERATURE,
                f"temperature {temperature:g}: must be 0, or {LEAST_TEMPERATURE:g} to 2",
            ),
            (
                temperature and not self.writes_text,
                f"temperature {temperature:g}: the task answers {values}, and a drawn text may be none: leave it out",
            ),
            (
                temperature and backend != "transformers",
                f"temperature {temperature:g}: --backend {backend} draws no answers",
            ),
            (
                not temperature and top_p < 1,
                f"top_p {top_p:g}: is for drawn answers, which need a temperature above 0",
            ),
            (
                not temperature and body.n > beams,
                f"n {body.n}: the server finds {beams} answers to a text (--num_beams); more need a temperature",
            ),
            (
                beams > 1 and body.stop and wants_log_probs,
                "logprobs: not with stop where answers are found by beams",
            ),
        ):
            if is_wrong:
                raise bad(message)
        seed = int.from_bytes(os.urandom(7), "big") if body.seed is None else body.seed
        shared = dict(
            limit=limit,
            told=told,
            wants_log_probs=wants_log_probs,
            labels=self.labels if body.probabilities else None,
        )
        for place, prompt in enumerate(prompts):
            for source in prompt.sources:
                if not temperature:
                    prompt.rows.append(Row(source, beams=beams, count=body.n, **shared))
                    continue
                for number in range(body.n):
                    (draws,) = uniform_numbers(seed % 2**64, [(place, number, len(prompt.rows))], 1, limit)[0]
                    prompt.rows.append(Row(source, draws=draws, temperature=temperature, top_p=top_p, **shared))
            if body.stop and beams == 1 and self.writes_text:
                for row in prompt.rows:
                    row.ends_text = self._ends_text(body.stop)

    def _ends_text(self, stops: list[str]) -> Callable[[list[int]], bool]:
        growing = Growing(self.for_stops)

        def ends_text(tokens: list[int]) -> bool:
            text = growing.text(tokens).rstrip()
            return any(stop in text for stop in stops)

        return ends_text

    def so_far(self, growing: Growing, answer: Answer, stops: list[str]) -> str:
        """What no further token changes of the text of an answer that is being written."""
        growing.text([*answer.tokens])
        held = max(map(len, stops), default=1) - 1  # what may be the beginning of a stop
        return before_any(stops, growing.settled)[: max(0, len(growing.settled) - held)].rstrip()

    def choice(self, index: int, prompt: Prompt, answers: list[Answer], stops: list[str]) -> dict:
        """A choice of the response."""
        written = [answer.tokens for answer in answers]
        whole = prompt.item.answer(decode_texts(self.plan.entry, self.own.tokenizer, written) if written else [])
        text = before_any(stops, whole)
        is_cut = text == whole and any(answer.reason == "length" for answer in answers)
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": "length" if is_cut else "stop"}
        for answer in answers:
            if answer.log_probs is not None:
                choice["logprobs"] = self._log_probs(answer)
        if prompt.uncut:
            choice["cut_from"] = prompt.uncut
        if any(row.probabilities for row in prompt.rows):
            choice["probabilities"] = dict(zip(self.plan.entry["labels"], prompt.rows[0].probabilities, strict=True))
        return choice

    def _log_probs(self, answer: Answer) -> dict:
        growing = Growing(self.own.tokenizer)
        places = [len(growing.text(answer.tokens[:end]).rstrip()) for end in range(len(answer.tokens))]
        names = self.own.tokenizer.convert_ids_to_tokens(answer.tokens)
        return dict(tokens=names, token_logprobs=answer.log_probs, top_logprobs=None, text_offset=places)

    def usage(self, prompts: list[Prompt]) -> dict:
        """Tokens read, each prompt once, and written, the end's included."""
        read = sum(len(source) for prompt in prompts for source in prompt.sources)
        written = sum(len(answer.tokens) for prompt in prompts for row in prompt.rows for answer in row.answers)
        return dict(prompt_tokens=read, completion_tokens=written, total_tokens=read + written)


def before_any(stops: list[str], text: str) -> str:
    """The text before the first of the stops in it."""
    return text[: min((text.index(stop) for stop in stops if stop in text), default=None)]


def numbered(prompts: list[Prompt], n: int) -> Iterator[tuple[int, Prompt, list[Answer]]]:
    """(index of the choice, its prompt, the answers to its texts), as the response has them."""
    found = ((prompt, answers) for prompt in prompts for answers in prompt.choices(n))
    yield from ((index, *one) for index, one in enumerate(found))


def envelope(model: str) -> dict:
    """What the response, and each of its parts, begins with."""
    identity = f"cmpl-{uuid.uuid4().hex}"
    return {"id": identity, "object": "text_completion", "created": int(time.time()), "model": model}
