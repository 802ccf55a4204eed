"""The prompt of predict_t5.py --interactive: each line of standard input gets an answer."""

import sys
from collections.abc import Callable, Iterable, Iterator

from accelerate.utils import set_seed
from transformers import PreTrainedTokenizerBase

from data_collator_t5 import find_sentinel_ids
from foundry.common.terminal import say
from foundry.corpora.sentinels import SENTINEL, source_ids
from foundry.corpora.tokenizers import decoded
from foundry.modeling.decoding import Source
from foundry.modeling.found_answers import Engine
from tasks.answering import Plan


def spans(ids: Iterable[int], sentinel_ids: list[int], eos_id: int) -> dict[int, list[int]]:
    """{number of a sentinel: the tokens after it, up to the next sentinel or EOS}: [99, 5, 6, 98, 7, 1] -> {0: [5, 6],
    1: [7]} with sentinels 99, 98, ... If a sentinel is repeated, the first one counts."""
    places = {sentinel: number for number, sentinel in enumerate(sentinel_ids)}
    filled, current = {}, []  # tokens before the first sentinel, or after a repeated one, get into no list of `filled`
    for token in ids:
        if token == eos_id:
            break
        if token in places:
            current = []
            filled.setdefault(places[token], current)
        else:
            current.append(token)
    return filled


def answers_to(
    lines: Iterable[str],
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    most_tokens: int | None = None,
    show: Callable[[str], object] | None = None,
) -> Iterator[str]:
    """For each line that is not empty: the line with its sentinels <extra_id_n> filled or, if it has none, the text
    that the model generates for it. most_tokens: of a line without them; a longer one is cut. show: gets the text that
    the model reads, decoded from its ids."""
    sentinels: list[int] = []
    for line in map(str.strip, lines):
        if not line:
            continue
        has_sentinels = SENTINEL.search(line) is not None
        if has_sentinels and not sentinels:
            sentinels = find_sentinel_ids(tokenizer).tolist()
        (ids,) = source_ids(tokenizer, [line], None if has_sentinels else most_tokens)  # as in fine-tuning
        if show:
            show(tokenizer.decode(ids))
        source = Source(ids)
        engine.find([source])
        written = source.answers[0].tokens
        if not has_sentinels:
            yield decoded(tokenizer, [written])[0].strip()
            continue
        filled = spans(written, sentinels, tokenizer.eos_token_id)
        texts = {number: text.strip() for number, text in zip(filled, decoded(tokenizer, filled.values()), strict=True)}
        # a sentinel that the model left out stays visible
        yield SENTINEL.sub(lambda mark, texts=texts: texts.get(int(mark[1]), mark[0]), line)


def prompt(plan: Plan, engine: Engine) -> int:
    """Prints an answer to each line of standard input until its end, and on stderr what the model reads of the line;
    returns the number of answers. In a terminal it shows a prompt."""

    def ask() -> str:
        say("> " if sys.stdin.isatty() else "", end="")
        return sys.stdin.readline()

    def show(read: str) -> None:
        say(f"the model reads: {read}", stream=sys.stderr)

    set_seed(plan.args.seed)
    count = 0
    for answer in answers_to(iter(ask, ""), engine, plan.tokenizer, plan.args.max_source_length, show):
        say(answer)
        count += 1
    return count
