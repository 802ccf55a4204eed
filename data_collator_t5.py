"""T5's span corruption, on a whole batch at once.

The pure functions follow T5's own definition (Raffel et al. 2020, section 3.1.4, and the released preprocessors):
masks begin with kept tokens and end with a masked span, sentinels come in order from <extra_id_0> on, inputs and
targets end in EOS, and there is no closing sentinel. All lengths are therefore fixed and no batch is ever padded.

Here too, for all files that need them: what a tokenizer's special tokens are (`find_bos_id`, `find_sentinel_ids`,
`is_byte_level`, `vocabulary_size`).

Legend of shapes: B batch, R raw tokens of a chunk, S source (input) length, T target length, K masked spans of a chunk.
"""

import itertools
import re
from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from constants import IGNORE_INDEX, NUM_SENTINELS
from foundry.common.errors import UserError

SENTINEL_NAME = re.compile(r"(▁?)<extra_id_(\d+)>")  # mT5's pieces begin with the mark of a space
UNUSED_NAME = re.compile(r"<unused(\d+)>")  # Gemma's tokens for future uses
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: the step of the splitmix64 generator
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


# ---------------------------------------------------------------- lengths
def noise_counts(length: int, noise_density: float, mean_noise_span_length: float) -> tuple[int, int]:
    """(masked tokens, masked spans) of a chunk of `length` raw tokens: (568, .15, 3) -> (85, 28).

    Both are at least 1, and there are no more spans than kept tokens, so that spans never touch.
    """
    num_noise = min(max(int(np.round(length * noise_density)), 1), length - 1)
    num_spans = max(int(np.round(num_noise / mean_noise_span_length)), 1)
    return num_noise, min(num_spans, num_noise, length - num_noise)


def _corrupted_lengths(length: int, noise_density: float, mean_noise_span_length: float) -> tuple[int, int]:
    """(input tokens, target tokens), EOS included, of a chunk of `length` raw tokens."""
    num_noise, num_spans = noise_counts(length, noise_density, mean_noise_span_length)
    return length - num_noise + num_spans + 1, num_noise + num_spans + 1


def compute_input_and_target_lengths(
    inputs_length: int, noise_density: float, mean_noise_span_length: float
) -> tuple[int, int]:
    """(raw tokens that fill an input of `inputs_length`, length of their targets): (512, .15, 3) -> (568, 114).

    Lengths are in tokens, EOS included. An input holds at least a kept token, a sentinel and EOS. AssertionError unless
    0 < noise_density < 1, mean_noise_span_length >= 1 and inputs_length >= 3.
    """
    assert 0 < noise_density < 1 and mean_noise_span_length >= 1 and inputs_length >= 3, "no such corruption"
    tokens_length = 2
    while _corrupted_lengths(tokens_length + 1, noise_density, mean_noise_span_length)[0] <= inputs_length:
        tokens_length += 1
    # As T5 does at a density of one half: one raw token less rather than targets that are longer than inputs.
    if noise_density == 0.5 and _corrupted_lengths(tokens_length, 0.5, mean_noise_span_length)[1] > inputs_length:
        tokens_length -= 1
    return tokens_length, _corrupted_lengths(tokens_length, noise_density, mean_noise_span_length)[1]


# ---------------------------------------------------------------- masks
def masks_from_random(random: np.ndarray, num_noise: int, num_spans: int) -> np.ndarray:
    """Random masks, bool [B, R], True where a token is masked. Each starts kept, ends masked, and is drawn uniformly
    from all masks of `num_noise` masked tokens in `num_spans` spans.

    random: uint32 or uint64 [B, R - 2], one number for every place at which masked or kept tokens may be divided.
    """
    batch, length = random.shape[0], random.shape[1] + 2
    lengths = np.empty((batch, num_spans, 2), dtype=np.int64)
    lengths[:, :, 0] = _random_segmentation(random[:, num_noise - 1 :], length - num_noise, num_spans)
    lengths[:, :, 1] = _random_segmentation(random[:, : num_noise - 1], num_noise, num_spans)
    kept_masked = np.tile(np.array([False, True]), batch * num_spans)
    return np.repeat(kept_masked, lengths.ravel()).reshape(batch, length)


def _random_segmentation(random: np.ndarray, num_items: int, num_segments: int) -> np.ndarray:
    """Lengths [B, segments] (each at least 1) of a uniformly random split of `num_items`, from [B, items - 1] numbers.

    The places of the smallest `segments - 1` numbers are the cuts. The low bits of a number are replaced by its place,
    so that one partition finds the places themselves; numpy vectorises partition, but not argpartition. At least 18 of
    32 bits stay random, 23 for T5's 482 kept tokens; if two numbers agree in these, the earlier place is the smaller.
    """
    cuts = np.empty((random.shape[0], num_segments + 1), dtype=np.int64)
    cuts[:, 0], cuts[:, -1] = 0, num_items
    if num_segments > 1:
        low_bits = random.dtype.type((1 << int(num_items).bit_length()) - 1)
        tagged = random & ~low_bits
        tagged |= np.arange(1, num_items, dtype=random.dtype)
        tagged.partition(num_segments - 2, axis=1)
        cuts[:, 1:-1] = np.sort(tagged[:, : num_segments - 1] & low_bits, axis=1)
    return np.diff(cuts, axis=1)


def random_numbers(keys: np.ndarray, count: int) -> np.ndarray:
    """[B, count] uint64 random numbers; row i depends on keys[i] alone, which seeds a splitmix64 generator.

    So the mask of an example does not depend on its batch, its worker or what ran before.
    """
    state = keys.astype(np.uint64)[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
    state ^= state >> np.uint64(30)
    state *= _MIX[0]
    state ^= state >> np.uint64(27)
    state *= _MIX[1]
    state ^= state >> np.uint64(31)
    return state


def cut_numbers(keys: np.ndarray, length: int) -> np.ndarray:
    """[B, length - 2] random numbers for `masks_from_random`: uint32, of which each 64-bit number gives two, or uint64
    for chunks of more than 2^14 tokens."""
    dtype = np.uint32 if length <= 2**14 else np.uint64  # numpy partitions 32 bits seven times as fast
    count = -(-(length - 2) * np.dtype(dtype).itemsize // 8)
    return random_numbers(keys, count).view(dtype)[:, : length - 2]


def example_keys(seed: int, examples: np.ndarray) -> np.ndarray:
    """[B] keys for `random_numbers`, one for each (seed, example number). If the numbers count on through the epochs,
    an example gets a new key in each."""
    seed_key = random_numbers(np.array([seed % 2**64], dtype=np.uint64), 1)[0]
    return random_numbers(seed_key ^ examples.astype(np.uint64), 1)[:, 0]


# ---------------------------------------------------------------- inputs and targets
def inputs_and_targets(
    tokens: np.ndarray, mask: np.ndarray, sentinel_ids: np.ndarray, eos_id: int, bos_id: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Corrupted inputs [B, S] and targets [B, T] of tokens [B, R] under a mask [B, R]; both end in EOS.

    With sentinels 999, 998 ... the tokens 10 11 12 13 14 15 under the mask T T F F T F become
        inputs  999 12 13 998 15 EOS        (kept tokens, and a sentinel in place of each masked span)
        targets 999 10 11 998 14 EOS        (each span's sentinel, then its tokens)
    With a BOS, inputs begin with it and have no EOS, as Gemma's tokenizer writes them.
    ValueError unless all rows mask equally many tokens in equally many spans, at least one, and sentinels suffice.
    """
    batch, length = tokens.shape
    # Indices into flat int32 arrays take half the time of boolean indexing in int64. Each row has one more place before
    # its text, so that there is a place before every masked span: in the targets it holds the span's sentinel.
    width, rows = length + 1, np.arange(batch)
    masked = np.zeros((batch, width), dtype=bool)
    masked[:, 1:] = mask
    text = np.empty((batch, width), dtype=np.int32)
    text[:, 1:] = tokens
    kept = ~masked
    kept[:, 0] = False
    masked, kept, text = masked.ravel(), kept.ravel(), text.ravel()
    starts = np.flatnonzero(masked[1:] & ~masked[:-1]) + 1
    kept[starts] = masked[starts - 1] = True

    def by_rows(places: np.ndarray) -> np.ndarray:
        """Sorted flat places as [B, n]; ValueError unless every row has the same number n > 0 of them."""
        is_even = places.size and places.size % batch == 0
        if not is_even or (places.reshape(batch, -1)[:, [0, -1]] // width != rows[:, None]).any():
            raise ValueError(
                "all masks of a batch must mask the same number of tokens in the same number of spans, one at least"
            )
        return places.reshape(batch, -1)

    num_spans = by_rows(starts).shape[1]
    if num_spans > len(sentinel_ids):
        raise ValueError(f"{num_spans} masked spans need {num_spans} sentinels; the tokenizer has {len(sentinel_ids)}")
    sentinels = np.tile(sentinel_ids[:num_spans], batch)
    first_masked = text[starts]
    text[starts] = sentinels
    inputs = _closed(text[by_rows(np.flatnonzero(kept))], eos_id if bos_id is None else bos_id)
    inputs = inputs if bos_id is None else np.roll(inputs, 1, axis=1)
    text[starts - 1], text[starts] = sentinels, first_masked
    targets = _closed(text[by_rows(np.flatnonzero(masked))], eos_id)
    return inputs, targets


def _closed(ids: np.ndarray, eos_id: int) -> np.ndarray:
    """[B, n + 1] int64: the ids [B, n], each row closed by EOS."""
    closed = np.empty((len(ids), ids.shape[1] + 1), dtype=np.int64)
    closed[:, :-1], closed[:, -1] = ids, eos_id
    return closed


def find_sentinel_ids(tokenizer: PreTrainedTokenizerBase, required: bool = True) -> np.ndarray:
    """[sentinels] ids of the first sentinel, the second ..., with which the published checkpoints were trained.

    T5, LongT5, umT5 and own tokenizers have tokens <extra_id_0>, <extra_id_1> ..., mT5 has pieces ▁<extra_id_0> ...
    ByT5 counts down from its last byte, 258 257 ... 159: the tokens <extra_id_n> that its tokenizer adds after the
    bytes were never trained. Gemma's tokenizers have <unused0> <unused1> ... Ids derived from a vocabulary size are
    wrong for mT5, ByT5 and own tokenizers. If there is no sentinel: UserError, or an empty array if not `required`.
    """
    if is_byte_level(tokenizer):
        last = tokenizer.offset + tokenizer.vocab_size - 1
        return np.arange(last, last - NUM_SENTINELS, -1)
    found: dict[str, dict[int, int]] = {"▁": {}, "": {}, "unused": {}}
    for token, number in tokenizer.get_vocab().items():
        if name := SENTINEL_NAME.fullmatch(token):
            found[name[1]][int(name[2])] = number
        elif (name := UNUSED_NAME.fullmatch(token)) and int(name[1]) < NUM_SENTINELS:
            found["unused"][int(name[1])] = number
    # mT5's pieces come first: a token <extra_id_n> that was added beside them has no trained embedding.
    by_number = found["▁"] or found[""] or found["unused"]
    ids = list(itertools.takewhile(lambda i: i is not None, map(by_number.get, range(len(by_number)))))
    if not ids and required:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path} has no sentinels (<extra_id_0> ...): train one with "
            "create_tokenizer.py, or use one of the T5 family"
        )
    return np.array(ids, dtype=np.int64)


def is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer is ByT5's, whose tokens from id 3 on are the bytes of UTF-8."""
    return type(tokenizer).__name__ == "ByT5Tokenizer"


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """The ids that an embedding needs rows for: those up to the largest. Of {"<pad>": 0, "a": 3} 4; the tokenizer's own
    length counts tokens, which are fewer where ids have none."""
    return 1 + max(tokenizer.get_vocab().values())


def find_eos_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of EOS; UserError if the tokenizer has none."""
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer {tokenizer.name_or_path} has no EOS token, with which T5 ends every text")
    return tokenizer.eos_token_id


def find_bos_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id of BOS if it is all that the tokenizer adds to a text (Gemma's); None if it adds EOS (T5's) or both
    (CodeT5's)."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return bos if bos is not None and tokenizer("")["input_ids"] == [bos] else None


def shift_right(labels: torch.Tensor, decoder_start_token_id: int, pad_token_id: int) -> torch.Tensor:
    """Decoder inputs [..., T] of teacher forcing, from labels [..., T]: [a, b, EOS, -100, -100] -> [start, a, b, EOS,
    pad]."""
    shifted = torch.full_like(labels, decoder_start_token_id)
    shifted[..., 1:] = labels[..., :-1]
    return shifted.masked_fill_(shifted == IGNORE_INDEX, pad_token_id)


class T5DataCollator:
    """Turns chunks of raw tokens into T5 pre-training batches; every length is fixed and nothing is padded.

    Called with a list of {"input_ids": [R tokens], "key": 64-bit int} or with one {"input_ids": [B, R], "key": [B]}
    (a `ChunkDataset`'s), it returns tensors {"input_ids" [B, S], "labels" [B, T], "decoder_input_ids" [B, T]}.
    `key` stands for (seed, epoch, example) and alone decides the example's mask; without one the tokens decide it, so
    that it is the same in each epoch. Trainer keeps keys, and takes a `ChunkDataset`, with remove_unused_columns=False.

    Making one raises UserError if the tokenizer has no EOS or too few sentinels; calling it raises ValueError if a
    chunk is not `tokens_length` long.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        input_seq_length: int = 512,
        noise_density: float = 0.15,
        mean_noise_span_length: float = 3.0,
        decoder_start_token_id: int = 0,
    ):
        lengths = compute_input_and_target_lengths(input_seq_length, noise_density, mean_noise_span_length)
        self.tokens_length, self.targets_length = lengths
        self.num_noise, self.num_spans = noise_counts(self.tokens_length, noise_density, mean_noise_span_length)
        self.inputs_length = self.tokens_length - self.num_noise + self.num_spans + 1
        self.sentinel_ids = find_sentinel_ids(tokenizer)
        if self.num_spans > len(self.sentinel_ids):
            flags = (
                f"--input_seq_length {input_seq_length} with --noise_density {noise_density} and "
                f"--mean_noise_span_length {mean_noise_span_length}"
            )
            raise UserError(
                f"{flags} masks {self.num_spans} spans, but the tokenizer has {len(self.sentinel_ids)} "
                "sentinels: use longer spans, a lower density or a shorter input"
            )
        self.eos_id, self.bos_id = find_eos_id(tokenizer), find_bos_id(tokenizer)
        self.mean_noise_span_length = mean_noise_span_length
        self.decoder_start_token_id = decoder_start_token_id

    def __call__(self, examples: dict | Sequence[dict]) -> dict[str, torch.Tensor]:
        if not isinstance(examples, dict):
            examples = {name: [example[name] for example in examples] for name in examples[0]}
        lengths = {len(chunk) for chunk in examples["input_ids"]}
        if lengths != {self.tokens_length}:
            raise ValueError(f"chunks must be {self.tokens_length} tokens long, got lengths {sorted(lengths)}")
        tokens = np.asarray(examples["input_ids"])
        keys = whole_keys(examples["key"]) if "key" in examples else content_keys(tokens)
        mask = masks_from_random(cut_numbers(keys, self.tokens_length), self.num_noise, self.num_spans)
        inputs, targets = inputs_and_targets(tokens, mask, self.sentinel_ids, self.eos_id, self.bos_id)
        decoder_inputs = np.empty_like(targets)
        decoder_inputs[:, 0], decoder_inputs[:, 1:] = self.decoder_start_token_id, targets[:, :-1]
        arrays = {"input_ids": inputs, "labels": targets, "decoder_input_ids": decoder_inputs}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def whole_keys(keys: np.ndarray | Sequence[int]) -> np.ndarray:
    """[B] keys as an array, of uint64 if they are a list. Numpy by itself would make floats of integers below and above
    2^63, as `datasets` gives them, and lose their last bits."""
    return keys if isinstance(keys, np.ndarray) else np.array([int(key) % 2**64 for key in keys], dtype=np.uint64)


def content_keys(tokens: np.ndarray) -> np.ndarray:
    """[B] keys that are hashes of the tokens [B, R]."""
    weights = random_numbers(np.zeros(1, dtype=np.uint64), tokens.shape[1])[0] | np.uint64(1)
    return (tokens.astype(np.uint64) * weights).sum(axis=1, dtype=np.uint64)
