"""Mixtures of denoisers (UL2, prefix LM, own ones): rows of several corrupted examples, full to the last position.

Denoisers mask different fractions of a text, so their targets have different lengths. A row of S input and T target
tokens therefore holds two examples: one of a denoiser that masks less than the mixture does on average, one of a
denoiser that masks more. Two equations give their lengths such that both sides are exactly full. How often each pair of
denoisers comes is chosen such that the input tokens of every denoiser are in proportion to its weight. Masks come from
the row's key alone, as in data_collator_t5.py. Examples of a row do not attend to each other:
foundry/modeling/segment_masks.py.

Legend of shapes: B rows, G examples of all rows, R raw tokens of a row, S and T input and target length of a row, N raw
tokens of all rows, D denoisers.
"""

import copy
import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from constants import DENOISERS, OBJECTIVES
from data_collator_t5 import content_keys, example_keys, find_bos_id, find_eos_id, find_sentinel_ids, random_numbers
from foundry.arguments.text import PreTrainingDataArguments
from foundry.common.errors import UserError
from foundry.corpora.chunks import Examples
from foundry.corpora.tokenizers import plain_encoder
from foundry.objectives.packed_rows import PackedExamples, PackedObjective, places_within, ragged_noise_mask

PATTERN = 1024  # rows after which the sequence of kinds of rows repeats


@dataclass(frozen=True)
class Denoiser:
    """An entry of constants.DENOISERS, with the tokens of its mode. UserError for impossible values."""

    noise_density: float
    mean_noise_span_length: float | None = None  # None: a prefix denoiser, which masks the end of the example
    sentinels: bool = True  # a sentinel for each masked span; T5's prefix LM has none
    mode: str | None = None  # text at the beginning of the input
    mode_ids: tuple[int, ...] = ()  # its tokens

    def __post_init__(self):
        has_spans = self.is_prefix or self.mean_noise_span_length >= 1 and self.sentinels
        if not 0 < self.noise_density < 1 or not has_spans:
            raise UserError(
                f"DENOISERS: {self}: noise_density must lie between 0 and 1, mean_noise_span_length be at least 1, "
                "and only a prefix denoiser can do without sentinels"
            )

    @property
    def is_prefix(self) -> bool:
        return self.mean_noise_span_length is None

    @property
    def input_overhead(self) -> int:
        """Number of input tokens of an example that are neither text nor sentinels: EOS and the mode."""
        return 1 + len(self.mode_ids)

    def targets_for(self, inputs: float) -> float:
        """Mean number of target tokens for `inputs` input tokens at the denoiser's noise density; both counts include
        sentinels and EOS."""
        density = self.noise_density
        if self.is_prefix:  # prefix examples come in pairs
            kept = inputs - 2 * (self.input_overhead + self.sentinels)
            return density / (1 - density) * kept + 2 * (1 + self.sentinels)
        spans = density / self.mean_noise_span_length  # for each raw token
        raw = (inputs - self.input_overhead) / (1 - density + spans)
        return (density + spans) * raw + 1


@dataclass(frozen=True)
class Example:
    """One corrupted example of a row: `length` raw tokens, `noise` of them masked in `spans` spans.

    Prefix examples come in pairs that mask `noise` tokens together; the key draws how many each of them masks.
    """

    denoiser: int
    length: int
    noise: int
    spans: int
    pair: int = 0  # 1 and 2: first and second of a pair


def denoisers_of(objective: str) -> dict[str, tuple[Denoiser, float]]:
    """{name: (denoiser, weight)} of an entry of OBJECTIVES; the weights add up to 1. UserError for an unknown denoiser
    or impossible values."""
    weights = OBJECTIVES[objective]
    if unknown := [name for name in weights if name not in DENOISERS]:
        raise UserError(
            f"--objective {objective}: the denoiser {unknown[0]} is not in DENOISERS; available: {', '.join(DENOISERS)}"
        )
    total = sum(weights.values())
    return {name: (Denoiser(**DENOISERS[name]), weight / total) for name, weight in weights.items()}


# ---------------------------------------------------------------- rows
def mean_targets(denoisers: Sequence[Denoiser], weights: Sequence[float], inputs_length: int) -> float:
    """Target tokens for inputs of this length, averaged over the denoisers with their weights."""
    return sum(w * denoiser.targets_for(inputs_length) for w, denoiser in zip(weights, denoisers, strict=True))


def build_rows(
    denoisers: Sequence[Denoiser], weights: Sequence[float], inputs_length: int
) -> tuple[list[list[Example]], list[float], int]:
    """(kinds of rows, each a list of `Example`; the fraction of all rows that are of each kind; target length T).

    Let denoiser i alone have r_i targets per input token, and r be the mean of r_i with the weights w. A row of
    denoisers i below and j above the mean is full on both sides if i has the fraction a of its inputs, where
    a r_i + (1 - a) r_j = r. Such rows come in proportion to f_ij / (a (r - r_i)). Here f_ij =
    w_i (r - r_i) w_j (r_j - r) / F couples the deficit of i with the surplus of j, and F is the sum of all deficits,
    which equals that of all surpluses. Then denoiser i has the fraction w_i of all input tokens. ValueError if
    `inputs_length` is too short for the examples of a row.
    """
    alone = [denoiser.targets_for(inputs_length) for denoiser in denoisers]
    mean = mean_targets(denoisers, weights, inputs_length)
    targets_length = round(mean)
    deficits = [w * (mean - targets) for w, targets in zip(weights, alone, strict=True)]
    low = [i for i, deficit in enumerate(deficits) if deficit > 1e-9 * inputs_length]
    high = [i for i, deficit in enumerate(deficits) if deficit < -1e-9 * inputs_length]
    total = sum(deficits[i] for i in low)
    rows, shares = [], []
    for i in set(range(len(denoisers))) - set(low) - set(high):
        rows.append(_fill(i, denoisers[i], inputs_length, targets_length))
        shares.append(weights[i])
    for i, j in itertools.product(low, high):
        inputs = _inputs_of_first(denoisers[i], denoisers[j], inputs_length, targets_length)
        targets = round(denoisers[i].targets_for(inputs))
        first = _fill(i, denoisers[i], inputs, targets)
        rows.append(first + _fill(j, denoisers[j], inputs_length - inputs, targets_length - targets))
        flow = deficits[i] * -deficits[j] / total
        shares.append(flow / (mean - alone[i]) + flow / (alone[j] - mean))
    return rows, [share / sum(shares) for share in shares], targets_length


def _inputs_of_first(first: Denoiser, second: Denoiser, inputs_length: int, targets_length: int) -> int:
    """Number of input tokens of the first example with which the targets of both come nearest to `targets_length`."""
    base = second.targets_for(inputs_length) + first.targets_for(0)
    slope = first.targets_for(1) - first.targets_for(0) - second.targets_for(1) + second.targets_for(0)
    return round((targets_length - base) / slope)


def _fill(index: int, denoiser: Denoiser, inputs: int, targets: int) -> list[Example]:
    """The example, or pair of prefix examples, with exactly these numbers of input and target tokens; ValueError if
    they are too small."""
    if denoiser.is_prefix:
        noise = targets - 2 * (1 + denoiser.sentinels)
        kept = inputs - 2 * (denoiser.input_overhead + denoiser.sentinels)
        if noise < 2 or kept < 2:
            raise ValueError("too short")
        length = kept + noise
        first = Example(index, length // 2, noise, 1, pair=1)
        return [first, Example(index, length - length // 2, noise, 1, pair=2)]
    spans = max(1, round((targets - 1) / (1 + denoiser.mean_noise_span_length)))
    spans = min(spans, (inputs - denoiser.input_overhead) // 2, (targets - 1) // 2)
    noise, kept = targets - 1 - spans, inputs - denoiser.input_overhead - spans
    if spans < 1:
        raise ValueError("too short")
    return [Example(index, kept + noise, noise, spans)]


def most_spans(rows: list[list[Example]]) -> int:
    """The most spans that an example of the rows has, each of which needs a sentinel of its own."""
    return max(example.spans for row in rows for example in row)


def pattern_of(shares: Sequence[float], count: int = PATTERN) -> np.ndarray:
    """[count] indices of kinds, evenly spread: up to any place each kind has come about in proportion to its share."""
    shares, given = np.asarray(shares), np.zeros(len(shares))
    pattern = np.empty(count, dtype=np.int64)
    for place in range(count):
        pattern[place] = np.argmax(shares * (place + 1) - given)
        given[pattern[place]] += 1
    return pattern


class PackedChunks(Examples):
    """Rows of a flat array of tokens, of several kinds, which take different numbers of tokens.

    lengths: raw tokens of a row of each kind. pattern: the kinds of successive rows, repeated to the end of the text.
    Every token is in one row of an epoch, except less than a row at the end. Later epochs start elsewhere in the text
    and go on at its beginning, so that other denoisers mask a token.
    """

    def __init__(self, tokens: np.ndarray, lengths: np.ndarray, pattern: np.ndarray, seed: int = 0):
        self.tokens, self.lengths, self.pattern, self.seed = tokens, lengths, pattern, seed
        self.ends, self.tokens_length = np.cumsum(lengths[pattern]), float(lengths[pattern].mean())
        cycles, rest = divmod(len(tokens), int(self.ends[-1]))
        self.rows = cycles * len(pattern) + int(np.searchsorted(self.ends, rest, side="right"))

    def __len__(self) -> int:
        return self.rows

    def __getitems__(self, numbers: Sequence[int]) -> dict[str, np.ndarray]:
        """{"input_ids": [B, R], "row": [B] the kinds, "key": [B]}; R is the length of the longest kind, and shorter
        rows go on with the tokens behind them."""
        numbers = np.asarray(numbers)
        epochs, rows = np.divmod(numbers, len(self))
        cycles, places = np.divmod(rows, len(self.pattern))
        kinds = self.pattern[places]
        starts = cycles * self.ends[-1] + self.ends[places] - self.lengths[kinds] + self._first_token(epochs)
        where = (starts[:, None] + np.arange(self.lengths.max())) % len(self.tokens)
        return {"input_ids": self.tokens[where], "row": kinds, "key": example_keys(self.seed, numbers)}

    def _first_token(self, epochs: np.ndarray) -> np.ndarray:
        """[B] place in the text at which each of these epochs begins; 0 for the first epoch."""
        random = random_numbers(example_keys(self.seed + 1, epochs), 1)[:, 0]
        return np.where(epochs == 0, 0, random % np.uint64(len(self.tokens))).astype(np.int64)


class DenoiserMixture(PackedObjective):
    """Packed batches of a mixture of denoisers, from {"input_ids" [B, R], "row" [B], "key" [B]} of `PackedChunks`.

    Raises UserError, naming what to change, if sentinels are missing, the tokenizer cannot write a mode, or rows are
    too short.
    """

    shows_samples = False  # a row has sentinels of several denoisers

    @classmethod
    def of(
        cls, args: PreTrainingDataArguments, tokenizer: PreTrainedTokenizerBase, start_token_id: int
    ) -> "DenoiserMixture":
        return cls(tokenizer, args.objective, args.input_seq_length, start_token_id)

    @staticmethod
    def lengths(args: PreTrainingDataArguments) -> tuple[int, int]:
        denoisers, weights = zip(*denoisers_of(args.objective).values(), strict=True)
        return args.input_seq_length, round(mean_targets(denoisers, weights, args.input_seq_length))

    @staticmethod
    def new_tokenizer(tokenizer: PreTrainedTokenizerBase, args: PreTrainingDataArguments) -> PreTrainedTokenizerBase:
        return with_mode_tokens(tokenizer, args.objective)

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, objective: str, input_seq_length: int, decoder_start_token_id: int = 0
    ):
        mixture = denoisers_of(objective)
        self.objective, self.names = objective, list(mixture)
        modes = mode_ids(tokenizer, objective)
        self.denoisers = [dataclasses.replace(d, mode_ids=modes.get(d.mode, ())) for d, _ in mixture.values()]
        weights = [weight for _, weight in mixture.values()]
        self.inputs_length, self.decoder_start_token_id = input_seq_length, decoder_start_token_id
        self.sentinel_ids, self.eos_id = find_sentinel_ids(tokenizer), find_eos_id(tokenizer)
        self.bos_id = find_bos_id(tokenizer)

        def built(length: int):
            try:
                return build_rows(self.denoisers, weights, length)
            except ValueError:
                return None

        rows = built(input_seq_length)
        if rows is None:
            least = next(n for n in itertools.count(input_seq_length + 1) if built(n))
            raise UserError(f"--input_seq_length {input_seq_length}: --objective {objective} needs at least {least}")
        self.kinds, self.shares, self.targets_length = rows
        if most_spans(self.kinds) > len(self.sentinel_ids):
            shorter = [n for n in range(2, input_seq_length) if built(n)]
            fitting = [n for n in shorter if most_spans(built(n)[0]) <= len(self.sentinel_ids)]
            raise UserError(
                f"--input_seq_length {input_seq_length} with --objective {objective} masks {most_spans(self.kinds)} "
                f"spans in one example, but the tokenizer has {len(self.sentinel_ids)} sentinels: use "
                f"--input_seq_length {max(fitting, default=0)} or less, longer spans, or a tokenizer that has more"
            )
        self.pattern = pattern_of(self.shares)
        self.raw_lengths = np.array([sum(example.length for example in row) for row in self.kinds])
        self.tokens_length = float(self.raw_lengths[self.pattern].mean())  # raw tokens of a row, on average
        self.window = int(self.raw_lengths.max())

        self._counts = np.array([len(row) for row in self.kinds])
        self._first = np.cumsum(self._counts) - self._counts
        examples = [(example, self.denoisers[example.denoiser]) for row in self.kinds for example in row]
        # [6, examples of all kinds of rows, one kind after the other]
        self._examples = np.array(
            [(e.length, e.noise, e.spans, e.pair, e.denoiser, d.sentinels) for e, d in examples]
        ).T
        ids = [list(denoiser.mode_ids) for _, denoiser in examples]
        self._mode = np.array([mode + [-1] * (max(map(len, ids)) - len(mode)) for mode in ids], dtype=np.int64)

    def rows(self, tokens: np.ndarray, seed: int = 0) -> PackedChunks:
        return PackedChunks(tokens, self.raw_lengths, self.pattern, seed)

    def cut(self, tokens: np.ndarray, number: int) -> tuple[int, dict]:
        """As `Objective.cut`. A row's first tokens and the epoch decide its kind, which differs between epochs but not
        in a resumed stream."""
        key = example_keys(number, content_keys(tokens[None, : min(16, len(tokens))]))[0]
        kind = int(np.searchsorted(np.cumsum(self.shares), (key >> np.uint64(11)) * 2.0**-53, side="right"))
        kind = min(kind, len(self.raw_lengths) - 1)
        return int(self.raw_lengths[kind]), {"input_ids": tokens, "row": kind}

    def plan(self, rows: list[Examples]) -> dict[str, str]:  # noqa: ARG002
        return {"objective": f"{self.objective}: {', '.join(self.names)}"}

    def corrupt(self, rows: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        tokens, kinds, keys = rows["input_ids"], rows["row"], rows["key"]
        rows, width = tokens.shape
        in_row = np.arange(width) < self.raw_lengths[kinds][:, None]
        random = random_numbers(keys, width)[in_row]
        counts = self._counts[kinds]
        local = places_within(counts)
        chosen = np.repeat(self._first[kinds], counts) + local
        lengths, noise, spans, pair, denoiser, marked = self._examples[:, chosen]
        _divide_pairs(noise, lengths, np.flatnonzero(pair == 1), random)
        mask = ragged_noise_mask(random, lengths, noise, spans)
        examples = PackedExamples(local, lengths, noise, spans, denoiser, marked.astype(bool), self._mode[chosen])
        return self.inputs_and_targets(rows, tokens[in_row].astype(np.int64), mask, examples)


def _divide_pairs(noise: np.ndarray, lengths: np.ndarray, first: np.ndarray, random: np.ndarray) -> None:
    """Divides the masked tokens, in place in `noise` [G], between both prefix examples of each pair.

    first: index of the first example of each pair. It masks a number of tokens that is drawn uniformly, and the second
    example masks the rest, so that their sum, and with it the length of the row, is fixed.
    """
    total, own, other = noise[first], lengths[first], lengths[first + 1]
    least = np.maximum(1, total - (other - 1))
    most = np.minimum(own - 1, total - 1)
    drawn = (random[(np.cumsum(lengths) - lengths)[first]] >> np.uint64(11)) * 2.0**-53  # uniform in [0, 1)
    noise[first] = least + (drawn * (most - least + 1)).astype(np.int64)
    noise[first + 1] = total - noise[first]


def modes_of(objective: str) -> list[str]:
    """The different modes of an objective's denoisers, texts such as "[NLU]"."""
    return list(dict.fromkeys(denoiser.mode for denoiser, _ in denoisers_of(objective).values() if denoiser.mode))


def mode_ids(tokenizer: PreTrainedTokenizerBase, objective: str) -> dict[str, tuple[int, ...]]:
    """{mode: its token ids}: its own token if the tokenizer has one, else the tokens of its text, with which UL2's
    checkpoints were trained (`prepend_prompt` of GoogleCloudPlatform/t5x-on-vertex-ai). UserError for <unk>."""
    vocabulary, encode, ids = tokenizer.get_vocab(), plain_encoder(tokenizer), {}
    for mode in modes_of(objective):
        ids[mode] = (vocabulary[mode],) if mode in vocabulary else tuple(map(int, encode([mode])[0]))
        if tokenizer.unk_token_id in ids[mode]:
            raise UserError(
                f"--objective {objective}: the tokenizer {tokenizer.name_or_path} cannot write {mode}: "
                "use another objective, or other modes (DENOISERS in constants.py)"
            )
    return ids


def with_mode_tokens(tokenizer: PreTrainedTokenizerBase, objective: str) -> PreTrainedTokenizerBase:
    """The tokenizer with a token for each mode, for a new model: itself if it has them all, or a copy with new ones."""
    missing = [mode for mode in modes_of(objective) if mode not in tokenizer.get_vocab()]
    if not missing:
        return tokenizer
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(missing, special_tokens=True)
    return tokenizer
