"""Sources, and those with sentinels as pre-training would mask them: "The cat <extra_id_0> on the mat." -> ids."""

import functools
import json
import re
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from constants import DENOISERS
from data_collator_t5 import find_bos_id, find_sentinel_ids, is_byte_level

SENTINEL = re.compile(r"<extra_id_(\d+)>")
_MODES = {denoiser["mode"] for denoiser in DENOISERS.values() if "mode" in denoiser}
Encode = Callable[[list[str]], Sequence[Sequence[int]]]


def source_ids(tokenizer: PreTrainedTokenizerBase, texts: list[str], most: int | None = None) -> list[list[int]]:
    """The token ids of sources, each cut at `most` of them, with what the tokenizer puts around a text.

    In training and at all entry points a text with <extra_id_n> has the ids of `sentinel_encoder`. The tokenizer itself
    would write a token that no checkpoint was trained on (ByT5), or begin a new word behind it (T5).
    """
    if not texts:
        return []
    ids = tokenizer(texts, max_length=most, truncation=most is not None, verbose=False)["input_ids"]
    for number, text in enumerate(texts):
        if SENTINEL.search(text) and (encode := find_sentinel_encoder(tokenizer, len(tokenizer))):
            ids[number] = cut_source(tokenizer, encode(text), most)
    return ids


@functools.lru_cache(maxsize=4)
def find_sentinel_encoder(tokenizer: PreTrainedTokenizerBase, size: int) -> Callable[[str], list[int]] | None:  # noqa: ARG001
    """The `sentinel_encoder` with the tokenizer's sentinels; None if it has none. size: of the vocabulary, which
    changes when tokens are added."""
    sentinels = find_sentinel_ids(tokenizer, required=False).tolist()
    return sentinel_encoder(tokenizer, sentinels) if sentinels else None


def cut_source(tokenizer: PreTrainedTokenizerBase, ids: list[int], most: int | None) -> list[int]:
    """At most so many ids of a source; the last one is still EOS: [5, 6, 7, 1] cut at 3 -> [5, 6, 1]."""
    if most is None or len(ids) <= most:
        return ids
    if ids[-1] == tokenizer.eos_token_id:
        return [*ids[: most - 1], ids[-1]]
    return ids[:most]


def sentinel_encoder(tokenizer: PreTrainedTokenizerBase, sentinels: list[int]) -> Callable[[str], list[int]]:
    """A function from a line to the ids that pre-training would make of the whole text when it masks what stands in the
    sentinels: <extra_id_n> becomes one, and a BOS is added in front or, without one, an EOS at the end.

    In pre-training a space is part of the token of the next word, so a sentinel takes the space before it. Text right
    after one is the rest of a word: "mat<extra_id_0>." ends in "." and not in "▁.".
    """
    encode, encode_rest, modes = _encoder(tokenizer), _word_end_encoder(tokenizer), tokenizer.get_added_vocab()
    modes = {token: number for token, number in modes.items() if token in _MODES}

    def ids_of(line: str) -> list[int]:
        mode = next(filter(line.startswith, modes), "")
        ids = [modes[mode]] if mode else []
        begin = len(mode)
        for mark in SENTINEL.finditer(line):
            if int(mark[1]) < len(sentinels):
                text = line[begin : mark.start()]
                if not is_byte_level(tokenizer):
                    text = text.rstrip(" ")
                ids += [*between(text, begin > len(mode)), sentinels[int(mark[1])]]
                begin = mark.end()
        ids += between(line[begin:], begin > len(mode))
        bos = find_bos_id(tokenizer)
        return [*ids, tokenizer.eos_token_id] if bos is None else [bos, *ids]

    def between(text: str, follows_sentinel: bool) -> list[int]:
        rest = re.match(r"\S*", text)[0] if follows_sentinel else ""  # of a word that a sentinel began
        return [*map(int, encode_rest([rest])[0]), *map(int, encode([text[len(rest) :]])[0])]

    return ids_of


def _encoder(tokenizer: PreTrainedTokenizerBase) -> Encode:
    return lambda texts: tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def _word_end_encoder(tokenizer: PreTrainedTokenizerBase) -> Encode:
    """A function from texts to ids, like `_encoder`'s, for texts without white space that are the rest of a word: no
    mark of a word's beginning is put before them."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return _encoder(tokenizer)
    rules = json.loads(
        re.sub(r'"prepend_scheme": ?"\w+"', '"prepend_scheme":"never"', tokenizer.backend_tokenizer.to_str())
    )
    rules |= {"truncation": None, "padding": None}  # left there by whoever called it last
    if steps := (rules["normalizer"] or {}).get("normalizers"):
        rules["normalizer"]["normalizers"] = [step for step in steps if step["type"] != "Prepend"]
    backend = Tokenizer.from_str(json.dumps(rules))
    return lambda texts: [encoding.ids for encoding in backend.encode_batch(texts, add_special_tokens=False)]
