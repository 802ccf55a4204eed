"""The texts that a model writes into gaps: "<extra_id_0> sat <extra_id_1> lay" -> {0: "sat", 1: "lay"}, in ids."""

from collections.abc import Iterable


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
