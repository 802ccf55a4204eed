"""Batches of rows with several corrupted examples: masks of any lengths, inputs, targets and segments.

What a row holds is decided by a feature: features/ul2 (mixtures of denoisers), features/documents (each document an
example). Examples of a row do not attend to each other: modeling/segment_masks.py.

Legend of shapes: B rows, G examples of all rows, S and T input and target length of a row, N raw tokens of all rows, D
denoisers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from data_collator_t5 import whole_keys
from foundry.objectives.objective import Objective


def places_within(counts: np.ndarray) -> np.ndarray:
    """[sum of counts] the place of every item in its group, for groups of these sizes: [2, 3] -> 0 1 0 1 2."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def ragged_noise_mask(random: np.ndarray, lengths: np.ndarray, noise: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """bool [N], True where a token is masked, for examples of different lengths one after the other, from random 64-bit
    numbers [N].

    lengths, noise, spans: [G] tokens, masked tokens and masked spans of each example. As in `masks_from_random`, each
    mask begins kept, ends masked and is uniform over all segmentations. The first `noise` numbers of an example cut its
    masked tokens into spans, the others its kept tokens: the places of the lowest numbers are the cuts.
    """
    starts, places = np.cumsum(lengths) - lengths, places_within(lengths)
    kept_part = places >= np.repeat(noise, lengths)
    group = 2 * np.repeat(np.arange(len(lengths)), lengths) + kept_part
    forced = (places == 0) | (places == np.repeat(noise, lengths))
    assert len(lengths) < 1 << 19 and lengths.max() < 1 << 16, "too many or too long examples in a batch"
    # 20 bits hold the group, 28 are random, and 16 hold the place itself, so that one sort finds the places.
    ranked = group.astype(np.uint64) << np.uint64(44) | places.astype(np.uint64)
    ranked |= np.where(forced, 0, random >> np.uint64(36) << np.uint64(16))
    ranked.sort()
    # The sort keeps each group in its place, so the rank of a number is its new place in its group.
    rank = np.where(kept_part, places - np.repeat(noise, lengths), places)
    cut = np.zeros(len(random), dtype=bool)
    sorted_places = (ranked & np.uint64(0xFFFF)).astype(np.int64) + np.repeat(starts, lengths)
    cut[sorted_places[rank < np.repeat(spans, lengths)]] = True
    pieces = np.diff(np.append(np.flatnonzero(cut), len(random)))  # lengths: an example's masked spans, its kept ones
    count = np.repeat(spans, 2 * spans)
    place = places_within(2 * spans)
    masked = place < count
    interleaved = np.empty_like(pieces)
    interleaved[np.arange(len(pieces)) - place + np.where(masked, 2 * place + 1, 2 * (place - count))] = pieces
    return np.repeat(np.tile(np.array([False, True]), len(pieces) // 2), interleaved)


@dataclass
class PackedExamples:
    """The examples of a batch, row by row; every array but the last is [G]."""

    place: np.ndarray  # number of the example in its row, from 0
    lengths: np.ndarray  # raw tokens
    noise: np.ndarray  # masked tokens
    spans: np.ndarray  # masked spans
    denoiser: np.ndarray  # index
    marked: np.ndarray  # whether each span has a sentinel
    mode: np.ndarray  # [G, M]: tokens at the beginning of the input, padded with -1


class PackedObjective(Objective):
    """Several examples in a row, of D denoisers.

    Called with a batch of rows, returns tensors {"input_ids" [B, S], "labels" [B, T], "decoder_input_ids" [B, T],
    "input_segments" [B, S], "target_segments" [B, T], "target_kinds" [B, T]}. Segments number the examples of a row
    from 1. Kinds are those of `target_kinds`; a masked EOS of the text counts as EOS too.
    """

    decoder_start_token_id: int
    packs_examples = True

    def __call__(self, examples: dict | Sequence[dict]) -> dict[str, torch.Tensor]:
        if not isinstance(examples, dict):
            examples = {name: [example[name] for example in examples] for name in examples[0]}
        made_by = {"key": whole_keys}
        return self.corrupt({name: made_by.get(name, np.asarray)(values) for name, values in examples.items()})

    def corrupt(self, rows: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """The tensors of a batch of raw rows {"input_ids" [B, R], "key" [B], ...}."""
        raise NotImplementedError

    def target_kinds(self, labels: torch.Tensor, batch: dict) -> torch.Tensor:  # noqa: ARG002
        return batch["target_kinds"]

    def inputs_and_targets(
        self, rows: int, tokens: np.ndarray, mask: np.ndarray, examples: PackedExamples
    ) -> dict[str, torch.Tensor]:
        """The tensors of a batch of this many rows, from the raw tokens [N] and the mask [N] of their examples."""
        lengths, noise, spans = examples.lengths, examples.noise, examples.spans
        marked, mode = examples.marked, examples.mode
        mode_sizes = (mode >= 0).sum(axis=1)
        example = np.repeat(np.arange(len(lengths)), lengths)
        opens = mask.copy()
        opens[1:] &= ~mask[:-1]  # every example begins with a kept token, so no span continues into it
        sentinels = self.sentinel_ids[places_within(spans)][np.repeat(marked, spans)]
        written = opens & marked[example]  # where a sentinel replaces a span

        ends = np.cumsum(lengths - noise + spans * marked + 1 + mode_sizes)
        first = 0 if self.bos_id is None else 1  # BOS stands before an example, EOS behind it
        inputs = np.full(ends[-1], self.eos_id if self.bos_id is None else self.bos_id)
        stays = ~mask | written
        shifts = np.cumsum(mode_sizes + 1) - 1 + first  # modes and EOS or BOS before an example's text
        places = np.cumsum(stays) - 1 + shifts[example]
        inputs[places[stays]] = tokens[stays]
        inputs[places[written]] = sentinels
        sizes = np.diff(ends, prepend=0)
        inputs[np.repeat(ends - sizes + first, mode_sizes) + places_within(mode_sizes)] = mode[mode >= 0]

        target_sizes = noise + spans * marked + 1
        target_ends = np.cumsum(target_sizes)
        targets = np.full(target_ends[-1], self.eos_id)
        places = np.cumsum(mask)[mask] - 1 + np.cumsum(written)[mask] + example[mask]
        targets[places] = tokens[mask]
        targets[places[written[mask]] - 1] = sentinels
        kinds = np.repeat(examples.denoiser, target_sizes) + len(self.names)
        kinds[places] -= len(self.names) * (tokens[mask] != self.eos_id)  # a document's own EOS is no text
        decoder_inputs = np.empty_like(targets)
        decoder_inputs[1:] = targets[:-1]
        decoder_inputs[target_ends - target_sizes] = self.decoder_start_token_id
        segment = examples.place + 1
        arrays = {
            "input_ids": inputs,
            "labels": targets,
            "decoder_input_ids": decoder_inputs,
            "input_segments": np.repeat(segment, sizes),
            "target_segments": np.repeat(segment, target_sizes),
            "target_kinds": kinds,
        }
        return {name: torch.from_numpy(array.reshape(rows, -1)) for name, array in arrays.items()}
