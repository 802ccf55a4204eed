"""The tokenizer's own ids of a text, several times faster than from the tokenizer: it sees each word once.

A unigram tokenizer of T5's kind cuts text at white space first, so a word's ids do not depend on its neighbours, and
natural text repeats its words. A "word" stands between two plain spaces across which no rule of such a tokenizer looks
(`word_boundary`): anything unusual beside a space joins what is left and right of it.
"""

import functools
import json
import re
import unicodedata
from collections.abc import Callable, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from corpora.tokenizers import plain_backend, plain_encoder

WORDS_KEPT = 2**18  # with their ids; the words used least recently are forgotten


def corpus_encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[str]], tuple[np.ndarray, np.ndarray]]:
    """texts -> (ids of all texts one after the other, where each text ends), as `plain_encoder` gives them."""
    if cuts_at_spaces(tokenizer):
        return word_encoder(tokenizer)
    encode = plain_encoder(tokenizer)
    return lambda texts: flat(encode(list(texts)))


def flat(ids: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """(all ids one after the other, where those of each text end): [[5, 6], [7]] -> [5 6 7], [2 3]."""
    return np.concatenate([np.asarray(one, dtype=np.int64) for one in ids] or [[]]), np.cumsum(list(map(len, ids)))


def word_encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[str]], tuple[np.ndarray, np.ndarray]]:
    """`corpus_encoder` of a tokenizer that `cuts_at_spaces`."""
    backend, _ = plain_backend(tokenizer)
    split = word_boundary().split

    @functools.lru_cache(WORDS_KEPT)
    def ids_of_word(word: str) -> bytes:
        return np.array(backend.encode(word, add_special_tokens=False).ids, dtype=np.uint32).tobytes()

    def encode(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        ids = [b"".join(map(ids_of_word, split(text))) for text in texts]
        ends = np.cumsum([len(one) // 4 for one in ids], dtype=np.int64)
        return np.frombuffer(b"".join(ids), dtype=np.uint32).astype(np.int64), ends

    return encode


def cuts_at_spaces(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether all rules of the tokenizer are known to work word by word, as the T5 family's do."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    content = json.loads(backend.to_str())
    special = {token["content"]: token["special"] for token in content["added_tokens"]}
    if content["model"].get("type") != "Unigram" or not all(special.values()) or tokenizer.eos_token not in special:
        return False
    return _known_normalizer(content["normalizer"]) and _cuts(content["pre_tokenizer"])


def _known_normalizer(rule: dict | None) -> bool:
    """Rules that turn a character into others, and those that remove superfluous spaces."""
    if rule is None or rule["type"] == "Precompiled":
        return True
    if rule["type"] == "Sequence":
        return all(map(_known_normalizer, rule["normalizers"]))
    if rule["type"] == "Replace":
        return (rule["pattern"].get("Regex"), rule["content"]) in ((" {2,}", " "), (r"\A | \z", ""), ("^ | $", ""))
    return False


def _cuts(rule: dict | None) -> bool:
    if rule is not None and rule["type"] == "Sequence":
        rules = rule["pretokenizers"]
        return len(rules) == 2 and rules[0]["type"] == "WhitespaceSplit" and _cuts(rules[1])
    return rule is not None and rule["type"] == "Metaspace" and rule["prepend_scheme"] == "always" and rule["split"]


@functools.cache
def word_boundary() -> re.Pattern:
    """Matches a space that is a boundary to every rule, between two safe characters.

    They are letters, numbers, punctuation and symbols that do not join their neighbour (as U+0D4E does), and that no
    normalisation turns into white space or a joining mark. U+2581 is how such tokenizers write a space themselves.
    """

    def is_safe(character: str) -> bool:
        if character in "^`":  # of the category Sk, yet they join nothing
            return True
        if unicodedata.category(character)[0] not in "LNPS" or character in "\u2581\u0d4e":
            return False
        forms = character + unicodedata.normalize("NFKC", character)
        return all(unicodedata.category(c)[0] in "LNPS" and unicodedata.category(c) != "Sk" for c in forms)

    safe = "".join(re.escape(character) for character in map(chr, range(0x10000)) if is_safe(character))
    return re.compile(f" (?<=[{safe}] )(?=[{safe}])")
