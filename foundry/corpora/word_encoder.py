"""The tokenizer's own ids of a text, several times faster than from the tokenizer: it sees each word once.

A unigram tokenizer of T5's kind cuts text at white space first, so a word's ids do not depend on its neighbours, and
natural text repeats its words. Here the words of a whole batch are looked up at once with numpy; the tokenizer sees
only new ones. A "word" stands between two plain spaces across which no rule of such a tokenizer looks
(`safe_neighbours`): anything unusual beside a space joins what is left and right of it.

Legend of shapes: C characters of a batch, W its words.
"""

import functools
import json
import unicodedata
from collections.abc import Callable, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from foundry.corpora.sentencepiece_models import CUTS_BYTE_NAMES
from foundry.corpora.tokenizers import plain_backend, plain_encoder

WORDS_OF_A_TEXT = 64  # new words that are tokenised together, as one text
LONGEST_WORD = 64  # characters; longer words, which are rare, are tokenised each time
SLOTS = 1 << 22  # slots of the table of known words; a newer word replaces an older one in its slot
MOST_KEPT = 1 << 24  # ids and characters kept; when there are more, all are forgotten
_SPACE_RULES = ((" {2,}", " "), (" {2,}", "▁"), (r"\A | \z", ""), ("^ | $", ""))  # (what is replaced, by what)
_FIRST_MARK = {"type": "Prepend", "prepend": "▁"}
_WHITE_SPACE = {"type": "WhitespaceSplit"}
BASE = np.uint64(0x9E3779B97F4A7C15)  # of the polynomial hash; odd, so that it has an inverse modulo 2^64


def corpus_encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[str]], tuple[np.ndarray, np.ndarray]]:
    """texts -> (ids of all texts one after the other, where each text ends), as `plain_encoder` gives them."""
    if cuts_at_spaces(tokenizer):
        return WordEncoder(word_list_encoder(tokenizer))
    encode = plain_encoder(tokenizer)
    return lambda texts: flat(encode(list(texts)))


def flat(ids: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """(all ids one after the other, where those of each text end): [[5, 6], [7]] -> [5 6 7], [2 3]."""
    return np.concatenate([np.asarray(one, dtype=np.int64) for one in ids] or [[]]), np.cumsum(list(map(len, ids)))


def word_list_encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[str]], tuple[np.ndarray, np.ndarray]]:
    """words -> (ids of all words one after the other, how many each has), each word as if it stood alone.

    Many words go to the tokenizer as one text, with EOS between them: special tokens cut a text before all other rules.
    This takes two thirds of the time of a text for each word.
    """
    backend, names = plain_backend(tokenizer)
    eos = names[tokenizer.eos_token]

    def encode(words: list[str]) -> tuple[np.ndarray, np.ndarray]:
        if any("\uffff" in word for word in words):  # the names of special tokens are made of this non-character
            alone = [encoding.ids for encoding in backend.encode_batch_fast(words, add_special_tokens=False)]
            return np.concatenate(alone).astype(np.int64), np.array(list(map(len, alone)))
        groups = (words[start : start + WORDS_OF_A_TEXT] for start in range(0, len(words), WORDS_OF_A_TEXT))
        texts = [eos.join(group) + eos for group in groups]
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        ids = np.concatenate([np.array(encoding.ids) for encoding in encodings])
        is_eos = ids == tokenizer.eos_token_id
        return ids[~is_eos], np.diff(np.flatnonzero(is_eos), prepend=-1) - 1

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
    rules = content["normalizer"] or {}
    is_marked = _FIRST_MARK in rules.get("normalizers", [rules])
    return _known_normalizer(content["normalizer"]) and _cuts(content["pre_tokenizer"], is_marked)


def _known_normalizer(rule: dict | None) -> bool:
    """Rules that turn a character into others, those that remove superfluous spaces, and the mark of a first word."""
    if rule is None or rule["type"] in ("Precompiled", "NFC", "Strip"):
        return True
    if rule["type"] == "Sequence":
        return all(map(_known_normalizer, rule["normalizers"]))
    if rule["type"] == "Replace":
        pattern = rule["pattern"]
        is_symbol = "String" in pattern and not set(pattern["String"] + rule["content"]) & set(" ▁")
        return is_symbol or (pattern.get("Regex"), rule["content"]) in _SPACE_RULES
    return rule == _FIRST_MARK


def _cuts(rule: dict | None, is_marked: bool) -> bool:
    """Whether words are cut at spaces and each begins with ▁. is_marked: the normalizer has put one before a text."""
    if rule is None:
        return False
    if rule["type"] == "Sequence":
        rules = [part for part in rule["pretokenizers"] if part not in (_WHITE_SPACE, CUTS_BYTE_NAMES)]
        return len(rules) == 1 and _cuts(rules[0], is_marked)
    return rule["type"] == "Metaspace" and rule["split"] and (is_marked or rule["prepend_scheme"] == "always")


@functools.cache
def safe_neighbours() -> np.ndarray:
    """[65,537] bool: characters beside which a space is a boundary to every rule. The last one stands for all others.

    They are letters, numbers, punctuation and symbols that do not join their neighbour (as U+0D4E does), and that no
    normalisation turns into white space or a joining mark. U+2581 is how such tokenizers write a space themselves.
    """

    def is_safe(character: str) -> bool:
        if unicodedata.category(character)[0] not in "LNPS" or character in "\u2581\u0d4e":
            return False
        forms = character + unicodedata.normalize("NFKC", character)
        return all(unicodedata.category(c)[0] in "LNPS" and unicodedata.category(c) != "Sk" for c in forms)

    ascii_marks = "^`"  # of the category Sk, yet they join nothing
    return np.array([is_safe(chr(code)) or chr(code) in ascii_marks for code in range(0x10000)] + [False])


class WordEncoder:
    """Called with texts, returns (ids int64, ends int64): all ids one after the other, and where each text ends."""

    def __init__(self, encode: Callable[[list[str]], tuple[np.ndarray, np.ndarray]]):
        """encode: of a list of words, as `word_list_encoder` makes it."""
        self.encode = encode
        self._powers = self._inverses = np.ones(1, dtype=np.uint64)
        self._forget()

    def _forget(self) -> None:
        self._hashes = np.zeros(SLOTS, dtype=np.uint64)
        self._word_in = np.full(SLOTS, -1, dtype=np.int32)  # a slot's word
        # Of every known word: where its ids begin, how many there are, and the same of its characters.
        self._ids, self._characters = _GrowingArray(np.int32), _GrowingArray(np.uint32)
        self._words = _GrowingArray(np.int64, columns=4)

    def __call__(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        if max(self._ids.size, self._characters.size) > MOST_KEPT:
            self._forget()
        if not texts:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        text = "\n".join(texts) + "\n"
        characters = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        text_ends = np.cumsum([len(t) + 1 for t in texts]) - 1
        ends = self._word_ends(characters, text_ends)
        starts = np.concatenate([[0], ends[:-1] + 1])
        words = self._find(text, characters, starts, ends)
        offsets, sizes = self._words.values[words, 0], self._words.values[words, 1]
        ids_ends = np.cumsum(sizes)
        ids = self._ids.values[_ranges(offsets, sizes, ids_ends)]
        return ids, ids_ends[np.searchsorted(ends, text_ends)]

    def _word_ends(self, characters: np.ndarray, text_ends: np.ndarray) -> np.ndarray:
        spaces = np.flatnonzero(characters == 32)
        spaces = spaces[spaces > 0]
        safe = safe_neighbours()
        left, right = np.minimum(characters[spaces - 1], 0x10000), np.minimum(characters[spaces + 1], 0x10000)
        spaces = spaces[safe[left] & safe[right]]
        is_end = np.zeros(len(characters), dtype=bool)
        is_end[spaces] = is_end[text_ends] = True
        return np.flatnonzero(is_end)

    def _find(self, text: str, characters: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """[W] numbers of the words between `starts` and `ends`; those not known yet are tokenised."""
        lengths = ends - starts
        hashes = self._hash(characters, starts, ends)
        slots = (hashes >> np.uint64(64 - SLOTS.bit_length() + 1)).astype(np.int64)
        words = np.where(self._hashes[slots] == hashes, self._word_in[slots], -1).astype(np.int64)
        self._forget_unequal(characters, starts, lengths, words)
        missing = np.flatnonzero(words < 0)
        if len(missing):
            spelt = [text[s:e] for s, e in zip(starts[missing].tolist(), ends[missing].tolist(), strict=True)]
            first = {}
            numbers = np.array([first.setdefault(word, len(first)) for word in spelt])
            words[missing] = len(self._words.values) + numbers
            self._learn(list(first))
            short = missing[lengths[missing] <= LONGEST_WORD]
            self._hashes[slots[short]] = hashes[short]
            self._word_in[slots[short]] = words[short]
        return words

    def _hash(self, characters: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """[W] sum of characters[start + i] * BASE^i modulo 2^64 up to the word's end, spread over all bits."""
        if len(self._powers) <= len(characters):
            size = 2 * len(characters)
            self._powers = np.cumprod(np.full(size, BASE, dtype=np.uint64))
            self._inverses = np.cumprod(np.full(size, pow(int(BASE), -1, 2**64), dtype=np.uint64))
        sums = np.cumsum(characters * self._powers[: len(characters)])
        before = np.where(starts > 0, sums[starts - 1], 0).astype(np.uint64)
        sums = np.where(ends > starts, sums[ends - 1] - before, 0) * self._inverses[starts]
        return (sums ^ sums >> np.uint64(32)) * BASE

    def _forget_unequal(self, characters, starts, lengths, words) -> None:
        """Sets words[w] to -1 where the known word is spelt differently: equal hashes may be chance."""
        found = np.flatnonzero(words >= 0)
        same_length = self._words.values[words[found], 3] == lengths[found]
        words[found[~same_length]] = -1
        found = found[same_length]
        sizes = lengths[found]
        ends = np.cumsum(sizes)
        known = self._characters.values[_ranges(self._words.values[words[found], 2], sizes, ends)]
        here = characters[_ranges(starts[found], sizes, ends)]
        if not np.array_equal(known, here):
            differs = np.flatnonzero(known != here)
            words[found[np.searchsorted(ends, differs, side="right")]] = -1

    def _learn(self, words: list[str]) -> None:
        ids, sizes = self.encode(words)
        lengths = np.array([len(word) for word in words])
        places = np.cumsum(sizes) - sizes + self._ids.size, np.cumsum(lengths) - lengths + self._characters.size
        self._words.extend(np.stack([places[0], sizes, places[1], lengths], axis=1))
        self._ids.extend(ids)
        self._characters.extend(np.frombuffer("".join(words).encode("utf-32-le"), dtype=np.uint32))


class _GrowingArray:
    """An array that is extended at its end, at a cost in proportion to what is added."""

    def __init__(self, dtype, columns: int | None = None):
        self.size = 0
        self._room = np.empty((1024,) if columns is None else (1024, columns), dtype=dtype)

    @property
    def values(self) -> np.ndarray:
        return self._room[: self.size]

    def extend(self, values: np.ndarray) -> None:
        end = self.size + len(values)
        if end > len(self._room):
            room = np.empty((2 * end, *self._room.shape[1:]), dtype=self._room.dtype)
            room[: self.size] = self.values
            self._room = room
        self._room[self.size : end] = values
        self.size = end


def _ranges(starts: np.ndarray, sizes: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Places of all items of ranges that start at `starts` and have `sizes` items, whose running sum is `ends`."""
    return np.repeat(starts - ends + sizes, sizes) + np.arange(ends[-1] if len(ends) else 0)
