"""Lines with gaps, as pre-training would mask them: "The cat <extra_id_0> on the mat." -> ids, and the gaps' texts."""

import json
import re
from collections.abc import Callable, Iterable, Sequence

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from constants import DENOISERS
from data_collator_t5 import find_bos_id, is_byte_level
from foundry.corpora.tokenizers import plain_backend, plain_encoder

GAP = re.compile(r"<extra_id_(\d+)>")
_MODES = {denoiser["mode"] for denoiser in DENOISERS.values() if "mode" in denoiser}


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


def gap_encoder(tokenizer: PreTrainedTokenizerBase, sentinels: list[int]) -> Callable[[str], list[int]]:
    """A function from a line to the ids that pre-training would make of the whole text when it masks what stands in the
    gaps: a gap <extra_id_n> becomes a sentinel, and a BOS is added in front or, without one, an EOS at the end.

    In pre-training a space is part of the token of the next word, so a gap takes the space before it. Text right after
    a gap is the rest of a word: "mat<extra_id_0>." ends in "." and not in "▁.".
    """
    encode, encode_rest, modes = plain_encoder(tokenizer), _word_end_encoder(tokenizer), tokenizer.get_added_vocab()
    modes = {token: number for token, number in modes.items() if token in _MODES}

    def ids_of(line: str) -> list[int]:
        mode = next(filter(line.startswith, modes), "")
        ids, begin = [modes[mode]] if mode else [], len(mode)
        gaps = [gap for gap in GAP.finditer(line) if int(gap[1]) < len(sentinels)]
        for gap in [*gaps, None]:
            text = line[begin : gap.start()] if gap else line[begin:]
            text = text.rstrip(" ") if gap and not is_byte_level(tokenizer) else text
            rest = re.match(r"\S*", text)[0] if ids and begin > len(mode) else ""  # of a word that a gap began
            for part, encoder in ((rest, encode_rest), (text[len(rest) :], encode)):
                ids += map(int, encoder([part])[0])
            if gap:
                ids, begin = [*ids, sentinels[int(gap[1])]], gap.end()
        bos = find_bos_id(tokenizer)
        return [*ids, tokenizer.eos_token_id] if bos is None else [bos, *ids]

    return ids_of


def _word_end_encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[str]], Sequence[Sequence[int]]]:
    """A function from texts to ids, like `plain_encoder`'s, for texts without white space that are the rest of a word:
    no mark of a word's beginning is put before them."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return plain_encoder(tokenizer)
    backend, _ = plain_backend(tokenizer)
    rules = json.loads(re.sub(r'"prepend_scheme": ?"\w+"', '"prepend_scheme":"never"', backend.to_str()))
    if steps := (rules["normalizer"] or {}).get("normalizers"):
        rules["normalizer"]["normalizers"] = [step for step in steps if step["type"] != "Prepend"]
    backend = Tokenizer.from_str(json.dumps(rules))
    return lambda texts: [encoding.ids for encoding in backend.encode_batch(texts, add_special_tokens=False)]
