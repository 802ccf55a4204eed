"""The input pipeline: our collator beside the usual per-example one, and our tokenisation beside datasets.map."""

import importlib.util
import itertools
import sys
import tempfile
import typing
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import PaddingStrategy

from benchmarks.measure import NotAvailableError, bare_tokenizer, compared, interleaved, timed
from data_collator_t5 import T5DataCollator, noise_counts
from foundry.arguments.text import PreTrainingDataArguments
from foundry.common.machine import cores_here
from foundry.common.reports import first_line
from foundry.corpora.chunks import ChunkDataset
from foundry.corpora.reading import read_documents
from foundry.corpora.sources import SplitSource
from foundry.corpora.token_files import tokenised

VOCABULARY = 32_128
NANOT5_COLLATOR = "nanoT5/utils/copied_utils.py"  # in a checkout of nanoT5


# ---------------------------------------------------------------- collator
def per_example_collator(tokenizer: SimpleNamespace) -> Callable[[list[dict]], dict[str, torch.Tensor]]:
    """A stand-in for the peer: the algorithm of the widely used scripts, rewritten.

    For each example it draws a mask, by cutting kept and masked tokens into random segments. For the batch it then puts
    a sentinel at each span's start (their numbers are a cumulative sum), drops the rest of each span, adds EOS, and
    shifts the labels into decoder inputs.
    """
    last_sentinel_plus_one = max(tokenizer.get_vocab().values()) + 1

    def segmentation(items: int, segments: int) -> np.ndarray:
        is_start = np.arange(items - 1) < segments - 1
        np.random.shuffle(is_start)  # numpy's global generator, as in those scripts
        segment_of = np.cumsum(np.pad(is_start, [[1, 0]]))
        return np.unique(segment_of, return_counts=True)[1]

    def noise_mask(length: int) -> np.ndarray:
        num_noise, num_spans = noise_counts(length, 0.15, 3.0)
        masked, kept = segmentation(num_noise, num_spans), segmentation(length - num_noise, num_spans)
        starts = np.zeros(length, dtype=np.int8)
        starts[np.cumsum(np.stack([kept, masked], axis=1).reshape(-1))[:-1]] = 1
        return np.cumsum(starts) % 2 == 1

    def with_sentinels(tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
        mask = mask.astype(np.int8)
        starts = mask - np.roll(mask, 1, axis=-1) * mask
        starts[:, 0] = mask[:, 0]
        numbers = np.where(starts != 0, np.cumsum(starts, axis=-1), starts)
        ids = np.where(numbers != 0, last_sentinel_plus_one - numbers, 0) - (mask - starts)  # -1: drop
        merged = np.where(ids != 0, ids, tokens)
        rows = merged[merged >= 0].reshape(len(tokens), -1)
        return np.concatenate([rows, np.full((len(tokens), 1), tokenizer.eos_token_id, dtype=np.int64)], axis=-1)

    def collate(examples: list[dict]) -> dict[str, torch.Tensor]:
        tokens = np.array([example["input_ids"] for example in examples])
        mask = np.asarray([noise_mask(tokens.shape[1]) for _ in range(len(tokens))])
        inputs, labels = with_sentinels(tokens, mask), with_sentinels(tokens, ~mask)
        shifted = np.zeros_like(labels)
        shifted[:, 1:] = labels[:, :-1]
        batch = {"input_ids": inputs, "labels": labels, "decoder_input_ids": shifted}
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    return collate


def peer_collator(nanot5: str | None, ours: T5DataCollator, vocab_size: int) -> tuple[Callable, str]:
    """(collator, its name): nanoT5's own for the lengths of our collator, from a checkout; without one, the stand-in.
    NotAvailableError if nanoT5's file cannot be loaded."""
    tokenizer = bare_tokenizer(vocab_size)
    if nanot5 is None:
        return per_example_collator(tokenizer), "stand-in: the per-example algorithm, written anew"
    path = Path(nanot5, NANOT5_COLLATOR)
    spec = importlib.util.spec_from_file_location(path.stem, path)  # the file alone, not its package
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)  # its dataclasses look their module up here
    # Names that the file expects from an older transformers.
    vars(module).update(Union=typing.Union, Optional=typing.Optional, PaddingStrategy=PaddingStrategy)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise NotAvailableError(f"{path}: {first_line(error)}") from None
    sized = type("Sized", (), {"__len__": lambda _: vocab_size, "eos_token_id": tokenizer.eos_token_id})()
    lengths = ours.inputs_length, ours.targets_length
    return module.DataCollatorForT5MLM(sized, 0.15, 3.0, *lengths, pad_token_id=0), "nanoT5's own file"


def measure_collator(args: Namespace) -> dict:
    """Sequences/s of our collator and of the peer on one core, timed in turn A B A B.

    Each gets what its own data set would give it: the peer rows of `datasets`, which are lists of numbers; ours a slice
    of a memory-mapped array.
    """
    batch, generator = args.batch, np.random.default_rng(0)
    ours = T5DataCollator(bare_tokenizer(VOCABULARY), args.source_length)
    peer, name_of_peer = peer_collator(args.nanot5, ours, VOCABULARY)
    tokens = generator.integers(3, VOCABULARY - 110, size=(batch, ours.tokens_length), dtype=np.uint16)
    rows_of_peer = [{"input_ids": row.tolist()} for row in tokens]
    for_ours = {"input_ids": tokens, "key": generator.integers(0, 2**63, size=batch, dtype=np.uint64)}
    rows = {"ours": {"name": "ours", "what": "T5DataCollator, the whole batch at once", "ours": True}}
    rows["peer"] = {"name": "peer", "what": name_of_peer, "ours": False}
    runs = {"ours": timed(lambda: ours(for_ours)), "peer": timed(lambda: peer(rows_of_peer))}
    interleaved(rows, runs, args.rounds, warm_up=2)
    for row in rows.values():  # the quickest turn counts: other work on the machine can only slow it down
        if "error" not in row:
            row["seconds"] = [min(row["seconds"])]
    return compared(rows, batch) | dict(batch=batch, raw_tokens_per_sequence=ours.tokens_length)


# ---------------------------------------------------------------- tokenise and cut
def generated_documents() -> Iterator[str]:
    """Documents of 20 to 400 words, drawn from 20,000 made-up words by Zipf's law, as in natural text; endless."""
    generator, letters = np.random.default_rng(0), np.array(list("aaeeiioubcdfghklmnnprrsstt"))
    words = ["".join(generator.choice(letters, size)) for size in generator.integers(2, 9, 20_000)]
    weights = 1 / np.arange(1, len(words) + 1)
    while True:
        yield " ".join(generator.choice(words, generator.integers(20, 400), p=weights / weights.sum())) + "."


def small_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    """A unigram tokenizer in T5's layout, trained by the `tokenizers` library, which transformers brings along."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>", *(f"<extra_id_{number}>" for number in range(100))]
    options = dict(vocab_size=4096, special_tokens=special, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(documents[:2000], trainers.UnigramTrainer(**options))
    names = dict(pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names, additional_special_tokens=special[3:])


def measure_tokenise(args: Namespace) -> dict:
    """MB/s from text to chunks of --source_length tokens, by ours and by datasets.map with grouping.

    The text is made up of 20,000 words, or it is the lines of --train_file; natural text has many more words. Both ways
    write their result to disk and leave the number of threads to the tokenizer. Each turn starts without a cache.
    """
    texts = (document for file in args.train_file or [] for document in read_documents(Path(file), "text"))
    lines = (line for text in texts for line in text.split("\n") if line.strip())
    documents, size = [], 0.0  # in megabytes, line ends included
    for document in lines if args.train_file else generated_documents():
        documents.append(document)
        size += (len(document.encode()) + 1) / 1e6
        if size >= args.megabytes:
            break
    tokenizer, length, turn = small_tokenizer(documents), args.source_length, itertools.count()
    rows = {"ours": {"name": "ours", "what": "tokenised() into one flat file, chunks are views of it", "ours": True}}
    rows["peer"] = {"name": "peer", "what": "datasets.map(batched), then grouping in a second map", "ours": False}

    def ours(text: Path) -> None:
        options = dict(validation_split_percentage=0.0, preprocessing_num_workers=cores_here())
        flags = PreTrainingDataArguments(data_cache_dir=str(text.with_name(f"ours{next(turn)}")), **options)
        source = SplitSource("generated", "generated", [text], "text", size=text.stat().st_size)
        tokens = tokenised(flags, {"train": source}, tokenizer)["train"].tokens
        rows["ours"]["chunks"] = len(ChunkDataset(tokens, length))

    def ids_of(batch: dict) -> dict:
        return {"input_ids": tokenizer(batch["text"], add_special_tokens=False)["input_ids"]}

    def group(batch: dict) -> dict:
        joined = list(itertools.chain.from_iterable(batch["input_ids"]))
        used = len(joined) // length * length
        return {"input_ids": [joined[start : start + length] for start in range(0, used, length)]}

    def peer(text: Path) -> None:
        import datasets

        datasets.disable_progress_bars()
        cache = str(text.with_name(f"peer{next(turn)}"))
        loaded = datasets.load_dataset("text", data_files=str(text), split="train", cache_dir=cache)
        loaded = loaded.map(ids_of, batched=True, remove_columns=["text"], load_from_cache_file=False)
        rows["peer"]["chunks"] = len(loaded.map(group, batched=True, load_from_cache_file=False))

    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("\n".join(documents) + "\n", encoding="utf-8")
        runs = {"ours": timed(partial(ours, text)), "peer": timed(partial(peer, text))}
        interleaved(rows, runs, min(args.rounds, 3))
    return compared(rows, size, "megabytes_per_second") | dict(megabytes=size, chunk_length=length)
