"""A request for completions, and its response, in the shape of OpenAI's API.

https://platform.openai.com/docs/api-reference/completions
"""

import copy
import re
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException
from transformers import PreTrainedTokenizerBase, TopPLogitsWarper

from features.server import Server
from features.server.waiting_texts import WaitingText
from foundry.corpora.sentinels import source_ids
from foundry.corpora.tokenizers import decoded
from foundry.modeling.found_answers import Engine
from foundry.report.preview import UNCUT
from foundry.training.drawn_answers import uniform_numbers
from tasks.answering import Plan
from tasks.examples import class_label_ids, labels_as_read_back
from tasks.predictions import Input

BYTE = re.compile("<0x..>")  # a token that is one byte of a letter
LEAST_TEMPERATURE = 0.01  # but for 0, which draws nothing
LETTERS = 2**16  # of a text, at least: they are tokenised in a tenth of a second
LETTERS_OF_A_TOKEN = 32  # at most: 16 in T5's vocabularies, 31 in Gemma's


def bad(message: str) -> HTTPException:
    """What is wrong with a request, in one line."""
    return HTTPException(400, message)


@dataclass
class Longest:
    """The longest text that is tokenised, in letters: tokenising takes time and memory, which others lack meanwhile.
    cuts: whether a longer one is cut there, as those with too many tokens are."""

    letters: int
    cuts: bool

    def within(self, text: str, what: str) -> str:
        """The text, cut. HTTPException if it is too long, or no tokenizer reads it."""
        if len(text) > self.letters and not self.cuts:
            raise bad(f"{what}: has {len(text):,} characters, and at most {self.letters:,} are read")
        text = text[: self.letters]
        try:
            text.encode()
        except UnicodeEncodeError:
            raise bad(f"{what} holds half of a character (\\ud800 to \\udfff)") from None
        return text


def longest_of(tokens: int, cuts: bool) -> Longest:
    """The longest text of which a model that reads so many tokens is asked. A longer one has more tokens, unless it has
    thousands of letters that the tokenizer drops or knows none of."""
    return Longest(max(LETTERS, tokens * LETTERS_OF_A_TOKEN), cuts)


def values_of(
    given: object, columns: list[str], field: str, longest: Longest, of_lists: bool = False
) -> dict[str, Any]:
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
    return {name: _within(value, longest, f"{field}: {name}") for name, value in given.items()}


def _within(value: Any, longest: Longest, what: str) -> Any:
    if isinstance(value, str):
        return longest.within(value, what)
    if isinstance(value, list):  # of words, each of which has an answer: none is cut off
        Longest(longest.letters, cuts=False).within(" ".join(map(str, value)), what)
    return value


class IncrementalDetokenizer:
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


class Fields(BaseModel):
    """The fields of a request. One that is null is as if it were left out: many clients send all that they know."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None or name not in cls.model_fields}


class StreamOptions(Fields):
    """What a stream holds beside the texts."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None  # OpenAI's padding against listeners, which we do not write


class Completion(Fields):
    """The fields of a request for texts. `cut_sources` is a flag of the server."""

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
    stream_options: StreamOptions = StreamOptions()
    user: str | None = None
    probabilities: bool = False  # ours: of the classes
    # Fields that clients send with the value that changes nothing.
    echo: Literal[False] | None = None
    suffix: None = None
    best_of: Literal[1] | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logit_bias: dict[str, Literal[0]] | None = None


class Choice(NamedTuple):
    """What is written of one answer to a prompt. tokens: of each of the prompt's texts. log_probs: of the tokens, where
    they were asked for. failure: why there is no answer."""

    tokens: list[list[int]]
    log_probs: list[float] | None
    is_over: bool
    failure: str | None


@dataclass
class Prompt:
    """One prompt of a request, and its answers. item: its Input. sources: the token ids of its texts. uncut: how many
    the longest had, where they were cut. texts: those that wait for answers; one for each answer that is drawn."""

    item: Input
    sources: list[list[int]]
    uncut: int | None
    texts: list[WaitingText] = field(default_factory=list)

    def choices(self, n: int) -> list[Choice]:
        """The answers so far, n of them."""
        if len(self.sources) == 1:
            choices = []
            for text in self.texts:
                for number, answer in enumerate(text.answers):
                    log_probs = text.log_probs and text.log_probs[number]
                    choices.append(Choice([answer.tokens], log_probs, text.is_answered, text.failure))
            return choices
        is_over = all(text.is_answered for text in self.texts)
        failures = [text.failure for text in self.texts if text.failure]
        tokens = [answer.tokens for text in self.texts for answer in text.answers]
        return [Choice(tokens, None, is_over, failures[0] if failures else None)] * n


class CompletionReader:
    """Makes prompts of texts and texts of answers, in the thread of texts, as a tokenizer serves one thread.

    check_count: raises HTTPException if a field of a request makes more texts than may wait.
    """

    def __init__(self, plan: Plan, engine: Engine, feature: Server, check_count: Callable[[int, str], None]):
        self.plan, self.check_count, self.cuts = plan, check_count, feature.cut_sources
        self.limit, self.most = plan.limit, plan.entry.max_source_length
        self.longest = longest_of(self.most, self.cuts)
        self.tokenizer = copy.deepcopy(plan.tokenizer)
        self.for_stops = copy.deepcopy(plan.tokenizer)  # the thread of the batches decodes too
        self.labels = class_label_ids(plan.entry, plan.tokenizer)
        self.names = labels_as_read_back(plan.entry, plan.tokenizer)
        self.beams = (engine.settings | plan.search).get("num_beams") or 1
        self.by_limit, self.ends = "forced_eos_token_id" in engine.settings, frozenset(engine.ends)
        self.in_pieces = plan.entry.is_running_text
        self.writes_text = plan.entry.target_type == "text"
        if self.in_pieces:
            self.longest = Longest(feature.max_queue * plan.entry.max_piece_length, cuts=False)

    def given(self, body: Completion) -> list[Any]:
        """The prompts of a request as they were sent. HTTPException for settings that do not go together: that is known
        before a text is tokenised."""
        given = body.prompt if isinstance(body.prompt, list) else [body.prompt]
        if not given:
            raise bad("prompt: is an empty list")
        self._check(body)
        return given

    def _check(self, body: Completion) -> None:
        temperature, top_p, wants_log_probs = body.temperature or 0, body.top_p or 1.0, body.logprobs is not None
        beams = 1 if temperature else self.beams
        backend, values = self.plan.args.backend, ", ".join(self.plan.entry.labels or ["a number"])
        drawn = f"temperature {temperature:g}"
        if body.n > 1 and self.in_pieces:
            raise bad(f"n {body.n}: the task answers a text in pieces; leave it out")
        if body.stream and (wants_log_probs or body.probabilities):
            raise bad("stream: goes with neither logprobs nor probabilities")
        if wants_log_probs and self.in_pieces:
            raise bad("logprobs: the task answers a text in pieces; leave it out")
        if body.probabilities and self.labels is None:
            raise bad("probabilities: the model's task has no classes")
        if 0 < temperature < LEAST_TEMPERATURE:
            raise bad(f"{drawn}: must be 0, or {LEAST_TEMPERATURE:g} to 2")
        if temperature and not self.writes_text:
            raise bad(f"{drawn}: the task answers {values}, and a drawn text may be none: leave it out")
        if temperature and backend != "transformers":
            raise bad(f"{drawn}: --backend {backend} draws no answers")
        if body.temperature is None and top_p < 1:  # with 0, which many clients send, it changes nothing
            raise bad(f"top_p {top_p:g}: is for drawn answers, which need a temperature above 0")
        if not temperature and body.n > beams:
            raise bad(f"n {body.n}: the server finds {beams} answers to a text (--num_beams); more need a temperature")
        if beams > 1 and body.stop and wants_log_probs:
            raise bad("logprobs: not with stop where answers are found by beams")

    def warning(self, body: Completion, prompts: list[Prompt]) -> str | None:
        """What a response says of a setting that was followed in part, and of letters that the model cannot read.
        Clients send 256 tokens where nobody asked."""
        said = []
        if (body.max_tokens or 0) > self.limit:
            said.append(f"max_tokens {body.max_tokens:,}: an answer has at most {self.limit:,}")
        sources = [source for prompt in prompts for source in prompt.sources]
        if unknown := sum(source.count(self.tokenizer.unk_token_id) for source in sources):
            said.append(f"prompt: {unknown:,} of {sum(map(len, sources)):,} tokens are <unk>, letters without a token")
        return "; ".join(said) or None

    def prompt(self, body: Completion, given: object, place: int, seed: int, told: Callable[[], object]) -> Prompt:
        """A prompt of a request, the one at this place, with its texts. seed: of what is drawn. HTTPException if it
        cannot be answered."""
        item = self.plan.reader.made({}, values_of(given, self.plan.reader.inputs, "prompt", self.longest))
        self.check_count(len(item.texts), "prompt")
        prompt = self._tokenised(item)
        settings: dict[str, Any] = dict(told=told, by_limit=self.by_limit, wants_log_probs=body.logprobs is not None)
        settings |= dict(labels=self.labels if body.probabilities else None)
        if not body.temperature:
            settings |= dict(beams=self.beams, count=body.n)
        limit = min(body.max_tokens or self.limit, self.limit)
        for source in prompt.sources:
            first = len(prompt.texts)
            for number in range(body.n if body.temperature else 1):
                text = WaitingText(source, limit, **settings)
                if body.temperature:
                    (draws,) = uniform_numbers(seed % 2**64, [(place, number, first + number)], 1, limit)
                    text.draws, text.warp = draws, warp_of(body.temperature, body.top_p or 1.0)
                if body.stop and text.beams == 1 and self.writes_text:
                    text.ends_text = self._ends_text(body.stop)
                prompt.texts.append(text)
        return prompt

    def _tokenised(self, item: Input) -> Prompt:
        sources = source_ids(self.tokenizer, item.texts, UNCUT)
        longest = max(map(len, sources), default=0)
        if longest <= self.most:
            return Prompt(item, sources, None)
        if not self.cuts:
            raise bad(f"prompt: has {longest:,} tokens, and the model reads at most {self.most:,}")
        return Prompt(item, source_ids(self.tokenizer, item.texts, self.most), longest)

    def _ends_text(self, stops: list[str]) -> Callable[[list[int]], bool]:
        detokenizer = IncrementalDetokenizer(self.for_stops)

        def ends_text(tokens: list[int]) -> bool:
            text = detokenizer.text(tokens).rstrip()
            return any(stop in text for stop in stops)

        return ends_text

    def so_far(self, detokenizer: IncrementalDetokenizer, tokens: list[int], stops: list[str]) -> str:
        """What no further token changes of the text of an answer that is being written."""
        detokenizer.text([*tokens])
        held = max(map(len, stops), default=1) - 1  # what may be the beginning of a stop
        return before_any(stops, detokenizer.settled)[: max(0, len(detokenizer.settled) - held)].rstrip()

    def choice(self, index: int, prompt: Prompt, found: Choice, stops: list[str]) -> dict:
        """A choice of the response."""
        texts = [self.names.get(text.strip(), text.rstrip()) for text in decoded(self.tokenizer, found.tokens)]
        answer = prompt.item.answer(texts)
        text = before_any(stops, answer)
        is_cut = text == answer and any(self.ends.isdisjoint(tokens[-1:]) for tokens in found.tokens)
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": "length" if is_cut else "stop"}
        if found.log_probs is not None:
            choice["logprobs"] = self._log_probs(found.tokens[0], found.log_probs)
        if prompt.uncut:
            choice["cut_from"] = prompt.uncut
        if prompt.texts and prompt.texts[0].probabilities:
            choice["probabilities"] = dict(zip(self.plan.entry.labels, prompt.texts[0].probabilities, strict=True))
        return choice

    def _log_probs(self, tokens: list[int], log_probs: list[float]) -> dict:
        detokenizer = IncrementalDetokenizer(self.tokenizer)
        places = [len(detokenizer.text(tokens[:end]).rstrip()) for end in range(len(tokens))]
        names = self.tokenizer.convert_ids_to_tokens(tokens)
        return dict(tokens=names, token_logprobs=log_probs, top_logprobs=None, text_offset=places)


def warp_of(temperature: float, top_p: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """What changes the logits of a token before it is drawn."""
    within = TopPLogitsWarper(top_p)
    return lambda scores: within(None, scores / temperature)


def usage_of(prompts: list[Prompt]) -> dict:
    """Tokens read, each prompt once, and written, the end's included."""
    read = sum(len(source) for prompt in prompts for source in prompt.sources)
    written = sum(len(answer.tokens) for prompt in prompts for text in prompt.texts for answer in text.answers)
    return dict(prompt_tokens=read, completion_tokens=written, total_tokens=read + written)


def before_any(stops: list[str], text: str) -> str:
    """The text before the first of the stops in it."""
    return text[: min((text.index(stop) for stop in stops if stop in text), default=None)]


def numbered_choices(prompts: list[Prompt], n: int) -> Iterator[tuple[int, Prompt, Choice]]:
    """(index of the choice, its prompt, what is written of it), as the response has them."""
    index = 0
    for prompt in prompts:
        for choice in prompt.choices(n):
            yield index, prompt, choice
            index += 1


def envelope(model: str, warning: str | None) -> dict:
    """What the response, and each of its parts, begins with. warning: what the client must know of it."""
    identity = f"cmpl-{uuid.uuid4().hex}"
    head = {"id": identity, "object": "text_completion", "created": int(time.time()), "model": model}
    return head if warning is None else head | {"warning": warning}
