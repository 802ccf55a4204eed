"""The input pipeline: our collator and the per-example algorithm, our tokenisation and datasets.map, the data loader.

Legend of shapes: B batch, R raw tokens of a chunk.
"""

import importlib.util
import itertools
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import typing
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import PaddingStrategy

from arguments.text import PreTrainingDataArguments
from benchmarks.material import bare_tokenizer
from benchmarks.measure import NotAvailableError, interleaved, process_memory, recording
from common.reports import first_line
from corpora.examples import ChunkDataset, EpochSampler
from corpora.reading import read_documents
from corpora.sources import Source
from corpora.token_files import tokenised
from data_collator_t5 import T5DataCollator, noise_counts

VOCABULARY = 32_128
NANOT5_COLLATOR = "nanoT5/utils/copied_utils.py"  # in a checkout of nanoT5
BLOCK = 32 * 2**20  # tokens that a synthetic corpus repeats: making random ones would take longer than reading them


# ---------------------------------------------------------------- collator
def per_example_collator(tokenizer: SimpleNamespace) -> Callable[[list[dict]], dict[str, torch.Tensor]]:
    """A stand-in for the peer: the algorithm of the widely used scripts, rewritten.

    A mask per example by a random segmentation of kept and masked tokens; sentinels by a cumulative sum over the spans'
    starts; a filter that drops the rest of each span; EOS; decoder inputs by a shift.
    """
    last_sentinel_plus_one = max(tokenizer.get_vocab().values()) + 1

    def segmentation(items: int, segments: int) -> np.ndarray:
        is_start = np.arange(items - 1) < segments - 1
        np.random.shuffle(is_start)  # the global generator, as there
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
    """(collator of a checkout of nanoT5, for our collator's lengths; its name). Without a checkout, the stand-in.
    NotAvailableError if its file fails."""
    tokenizer = bare_tokenizer(vocab_size)
    if nanot5 is None:
        return per_example_collator(tokenizer), "stand-in: the per-example algorithm, written anew"
    path = Path(nanot5, NANOT5_COLLATOR)
    spec = importlib.util.spec_from_file_location(path.stem, path)  # without its package
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)  # where a dataclass looks up its module
    # Names that the file imports from an older transformers.
    vars(module).update(Union=typing.Union, Optional=typing.Optional, PaddingStrategy=PaddingStrategy)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise NotAvailableError(f"{path}: {first_line(error)}") from None
    sized = type("Sized", (), {"__len__": lambda _: vocab_size, "eos_token_id": tokenizer.eos_token_id})()
    lengths = ours.inputs_length, ours.targets_length
    return module.DataCollatorForT5MLM(sized, 0.15, 3.0, *lengths, pad_token_id=0), "nanoT5's own file"


def measure_collator(args: Namespace) -> dict:
    """{"rows": ours and the peer in examples/s, "ratio": ours over the peer} on one core, in turn A B A B.

    Both get what their data set gives: the peer `datasets`' rows, lists of numbers; ours a slice of a memory-mapped
    array. Rates are those of the quickest turn, since other work on the machine only slows down; "ratio_of_medians"
    shows how much it did.
    """
    batch, generator = args.batch, np.random.default_rng(0)
    ours = T5DataCollator(bare_tokenizer(VOCABULARY), args.source_length)
    peer, name_of_peer = peer_collator(args.nanot5, ours, VOCABULARY)
    tokens = generator.integers(3, VOCABULARY - 110, size=(batch, ours.tokens_length), dtype=np.uint16)
    rows_of_peer = [{"input_ids": row.tolist()} for row in tokens]
    for_ours = {"input_ids": tokens, "key": generator.integers(0, 2**63, size=batch, dtype=np.uint64)}
    repeat = 10  # calls of the faster one, so that the clock is precise enough for both
    runs = {"ours": lambda: [ours(for_ours) for _ in range(repeat)], "peer": lambda: peer(rows_of_peer)}
    seconds = interleaved(runs, args.rounds, warm_up=2)
    seconds["ours"] = [value / repeat for value in seconds["ours"]]
    whats = {"ours": "T5DataCollator, the whole batch at once", "peer": name_of_peer}
    rows = [{"name": name, "what": what} | rates(batch / min(seconds[name]), ours) for name, what in whats.items()]
    result = dict(batch=batch, raw_tokens_per_sequence=ours.tokens_length, peer=name_of_peer, rows=rows)
    result["ratio_of_medians"] = median(seconds["peer"]) / median(seconds["ours"])
    return result | {"ratio": min(seconds["peer"]) / min(seconds["ours"])}


def rates(sequences_per_second: float, collator: T5DataCollator) -> dict[str, float]:
    """The rate in sequences and in the raw tokens that they are made of."""
    raw = sequences_per_second * collator.tokens_length
    return dict(sequences_per_second=sequences_per_second, raw_tokens_per_second=raw)


# ---------------------------------------------------------------- tokenise and cut
def generated_documents() -> Iterator[str]:
    """Documents of 20 to 400 words, drawn from 20,000 made-up words by Zipf's law, as in natural text; endless."""
    generator = np.random.default_rng(0)
    syllables = [a + b for a in "bcdfghklmnprstvwz" for b in ("a", "e", "i", "o", "u", "an", "er", "in", "on", "st")]
    words = ["".join(generator.choice(syllables, size=generator.integers(1, 5))) for _ in range(20_000)]
    weights = 1 / np.arange(1, len(words) + 1)
    while True:
        numbers = generator.choice(len(words), size=int(generator.integers(20, 400)), p=weights / weights.sum())
        yield " ".join(words[number] for number in numbers) + "."


def small_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    """A unigram tokenizer in T5's layout, trained with the `tokenizers` library, which transformers needs anyway."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>", *(f"<extra_id_{number}>" for number in range(100))]
    options = dict(vocab_size=4096, special_tokens=special, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(documents[:2000], trainers.UnigramTrainer(**options))
    names = dict(pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names, additional_special_tokens=special[3:])


def measure_tokenise(args: Namespace) -> dict:
    """{"rows": MB/s from text to chunks of --source_length tokens, "ratio"}: ours, and datasets.map with grouping.

    The text is made up (20,000 words), or the lines of --text_file: natural text has many more words. Both write their
    result to disk, on the threads that the tokenizer takes. Each turn starts without a cache.
    """
    texts = (document for file in args.text_file or [] for document in read_documents(Path(file), "text"))
    lines = (line for text in texts for line in text.split("\n") if line.strip())
    documents, size = [], 0.0  # in megabytes, line ends included
    for document in lines if args.text_file else generated_documents():
        documents.append(document)
        size += (len(document.encode()) + 1) / 1e6
        if size >= args.megabytes:
            break
    tokenizer, length, turn = small_tokenizer(documents), args.source_length, itertools.count()
    rows = {"ours": {"name": "ours", "what": "tokenised() into one flat file, chunks are views of it"}}
    rows["peer"] = {"name": "peer", "what": "datasets.map(batched), then grouping in a second map"}
    with recording(rows["peer"]):
        import datasets

        datasets.disable_progress_bars()

    def ours(text: Path) -> None:
        options = dict(validation_split_percentage=0.0, preprocessing_num_workers=os.cpu_count())
        flags = PreTrainingDataArguments(data_cache_dir=str(text.with_name(f"ours{next(turn)}")), **options)
        source = Source("generated", "generated", [text], "text", size=text.stat().st_size)
        tokens = tokenised(flags, {"train": source}, tokenizer)["train"].tokens
        rows["ours"]["chunks"] = len(ChunkDataset(tokens, length))

    def ids_of(batch: dict) -> dict:
        return {"input_ids": tokenizer(batch["text"], add_special_tokens=False)["input_ids"]}

    def group(batch: dict) -> dict:
        joined = list(itertools.chain.from_iterable(batch["input_ids"]))
        whole = len(joined) // length * length
        return {"input_ids": [joined[start : start + length] for start in range(0, whole, length)]}

    def peer(text: Path) -> None:
        cache = text.with_name(f"peer{next(turn)}")
        loaded = datasets.load_dataset("text", data_files=str(text), split="train", cache_dir=str(cache))
        loaded = loaded.map(ids_of, batched=True, remove_columns=["text"], load_from_cache_file=False)
        rows["peer"]["chunks"] = len(loaded.map(group, batched=True, load_from_cache_file=False))
        shutil.rmtree(cache)

    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("\n".join(documents) + "\n", encoding="utf-8")
        runs = {"ours": partial(ours, text), "peer": partial(peer, text)}
        seconds = interleaved(runs, min(args.rounds, 3), warm_up=0, rows=rows)
    for name, values in seconds.items():
        rows[name]["megabytes_per_second"] = size / median(values)
    ratio = {"ratio": median(seconds["peer"]) / median(seconds["ours"])} if len(seconds) == 2 else {}
    result = dict(text="files" if args.text_file else "made up", megabytes=size, chunk_length=length)
    return result | ratio | {"rows": list(rows.values())}


# ---------------------------------------------------------------- loading
def write_corpus(path: Path, gigabytes: float) -> None:
    """Writes a flat file of random uint16 tokens. ValueError if the disk has no room for it."""
    size, free = int(gigabytes * 1e9) // 2 * 2, shutil.disk_usage(path.parent).free
    if size > 0.9 * free:
        place = f"{path.parent} has {free / 1e9:.1f} GB free"
        raise ValueError(f"--gigabytes {gigabytes:g}: {place}; use less, or another --folder")
    block = np.random.default_rng(0).integers(3, VOCABULARY - 110, min(BLOCK, size // 2), np.uint16).tobytes()
    with path.open("wb") as file:
        for start in range(0, size, len(block)):
            file.write(block[: size - start])


def measure_load(args: Namespace) -> dict:
    """{"rows": sequences/s of a DataLoader over a memory-mapped corpus of each size in GB, and the memory it takes}.

    Memory is that of this process and its workers: "private" is their own, "mapped" are pages of the corpus, which the
    kernel keeps until the memory is needed. "private_growth_from_first_to_last_gib" shows the effect of size.
    """
    rows = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for gigabytes in args.gigabytes:
            path = Path(folder) / "tokens.bin"
            write_corpus(path, gigabytes)
            rows.append({"name": f"{gigabytes:g} GB", "gigabytes": gigabytes} | load_for(path, args))
    result = dict(batch=args.batch, workers=args.workers, rows=rows)
    if len(rows) > 1:
        result["private_growth_from_first_to_last_gib"] = rows[-1]["private_gib"] - rows[0]["private_gib"]
    return result


def load_for(path: Path, args: Namespace) -> dict:
    """Reads batches for --seconds as pre_train_t5.py does; gives the rate, and private and mapped memory at the end."""
    collator, before = T5DataCollator(bare_tokenizer(VOCABULARY), args.source_length), process_memory()
    chunks = ChunkDataset(np.memmap(path, dtype=np.uint16, mode="r"), collator.tokens_length)
    if len(chunks) < args.batch:
        size = f"{path.stat().st_size / 1e9:g} GB has {len(chunks):,} sequences"
        raise ValueError(f"--gigabytes: a corpus of {size}, fewer than --batch {args.batch}: use more gigabytes")
    sampler = EpochSampler(len(chunks), seed=1, group=args.batch, count_epochs=True)
    options = dict(num_workers=args.workers, prefetch_factor=4 if args.workers else None, drop_last=True)
    options |= dict(multiprocessing_context="fork" if args.workers else None)  # as in training
    loader = torch.utils.data.DataLoader(chunks, args.batch, sampler=sampler, collate_fn=collator, **options)
    batches = itertools.chain.from_iterable(iter(loader) for _ in itertools.count())  # epoch after epoch
    for _ in range(2 * max(args.workers, 1)):
        next(batches)  # the workers start
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < args.seconds:
        next(batches)
        count += 1
    rate = count * args.batch / (time.perf_counter() - start)
    pids = ["self", *(child.pid for child in multiprocessing.active_children())]
    gib = {"private_before": before["private"]} | process_memory(pids)
    found = {f"{name}_gib": size / 2**30 for name, size in gib.items()} | rates(rate, collator)
    return found | dict(sequences=len(chunks), processes=len(pids))
