"""The input side: the collator against the per-example algorithm, tokenise-and-cut against datasets.map, the loader.

Legend of shapes: B batch, R raw tokens of a chunk.
"""

import itertools
import multiprocessing
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from arguments.text import PreTrainingDataArguments
from benchmarks.material import word_less_tokenizer
from benchmarks.measure import NotAvailableError, failure, interleaved, median, process_memory
from corpora.examples import ChunkDataset, EpochSampler
from corpora.files import read_documents
from corpora.sources import Source
from corpora.token_files import tokenised
from data_collator_t5 import T5DataCollator

VOCABULARY = 32_128
BLOCK = 32 * 2**20  # tokens that a synthetic corpus repeats: making random ones would take longer than reading them


# ---------------------------------------------------------------- collator
def per_example_collator(tokenizer, noise_density: float, mean_span_length: float, lengths: tuple[int, int]):
    """The peer: the algorithm of the widely used scripts, example by example where it can be no other way.

    A mask per example by a random segmentation of kept and hidden tokens; sentinels by a cumulative sum over the spans'
    starts; a filter that drops the rest of each span; EOS; decoder inputs by a shift. Written anew from the algorithm.
    """
    last_sentinel_plus_one = max(tokenizer.get_vocab().values()) + 1
    inputs_length, targets_length = lengths

    def segmentation(items: int, segments: int) -> np.ndarray:
        is_start = np.arange(items - 1) < segments - 1
        np.random.shuffle(is_start)  # the global generator, as there
        segment_of = np.cumsum(np.pad(is_start, [[1, 0]]))
        return np.unique(segment_of, return_counts=True)[1]

    def noise_mask(length: int) -> np.ndarray:
        num_noise = min(max(int(np.round(length * noise_density)), 1), length - 1)
        num_spans = max(int(np.round(num_noise / mean_span_length)), 1)
        hidden, kept = segmentation(num_noise, num_spans), segmentation(length - num_noise, num_spans)
        ends = np.cumsum(np.stack([kept, hidden], axis=1).reshape(-1))[:-1]
        starts = np.zeros(length, dtype=np.int8)
        starts[ends] = 1
        return np.cumsum(starts) % 2 == 1

    def sentinels(mask: np.ndarray) -> np.ndarray:
        starts = mask - np.roll(mask, 1, axis=-1) * mask
        starts[:, 0] = mask[:, 0]
        numbers = np.where(starts != 0, np.cumsum(starts, axis=-1), starts)
        return np.where(numbers != 0, last_sentinel_plus_one - numbers, 0) - (mask - starts)  # -1: drop

    def filtered(tokens: np.ndarray, ids: np.ndarray) -> np.ndarray:
        merged = np.where(ids != 0, ids, tokens)
        rows = merged[merged >= 0].reshape(len(tokens), -1)
        return np.concatenate([rows, np.full((len(tokens), 1), tokenizer.eos_token_id, dtype=np.int64)], axis=-1)

    def collate(examples: list[dict]) -> dict[str, torch.Tensor]:
        tokens = np.array([example["input_ids"] for example in examples])
        mask = np.asarray([noise_mask(tokens.shape[1]) for _ in range(len(tokens))])
        inputs = filtered(tokens, sentinels(mask.astype(np.int8)))
        labels = filtered(tokens, sentinels((~mask).astype(np.int8)))
        if inputs.shape[1] != inputs_length or labels.shape[1] != targets_length:
            raise ValueError(f"lengths {inputs.shape[1]} and {labels.shape[1]} instead of {lengths}")
        shifted = np.zeros_like(labels)
        shifted[:, 1:] = labels[:, :-1]
        batch = {"input_ids": inputs, "labels": labels, "decoder_input_ids": shifted}
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    return collate


def measure_collator(batch: int, source_length: int, rounds: int, seed: int = 0) -> dict:
    """{"rows": ours and the peer in examples/s, "ratio": ours over the peer} on one core, in turn A B A B.

    Both get what their data set hands over: the peer `datasets`' rows, lists of numbers; ours a slice of a
    memory-mapped array. Rates are those of the quickest turn, since other work on the machine only adds;
    "ratio_of_medians" tells how much it did.
    """
    tokenizer = word_less_tokenizer(VOCABULARY)
    ours = T5DataCollator(tokenizer, source_length)
    peer = per_example_collator(tokenizer, 0.15, 3.0, (ours.inputs_length, ours.targets_length))
    generator = np.random.default_rng(seed)
    tokens = generator.integers(3, VOCABULARY - 110, size=(batch, ours.tokens_length), dtype=np.uint16)
    rows_of_peer = [{"input_ids": row.tolist()} for row in tokens]
    for_ours = {"input_ids": tokens, "key": generator.integers(0, 2**63, size=batch, dtype=np.uint64)}
    # The quicker one is called several times a turn, so that both turns are long against the clock and its neighbours.
    repeat = 10

    def ours_repeated() -> None:
        for _ in range(repeat):
            ours(for_ours)

    seconds = interleaved({"ours": ours_repeated, "peer": lambda: peer(rows_of_peer)}, rounds, warm_up=2)
    rates = {"ours": batch * repeat / min(seconds["ours"]), "peer": batch / min(seconds["peer"])}
    texts = {"ours": "T5DataCollator, the whole batch at once", "peer": "the per-example algorithm"}
    return {
        "batch": batch,
        "raw_tokens_per_sequence": ours.tokens_length,
        "rows": [
            {
                "name": name,
                "what": texts[name],
                "sequences_per_second": rate,
                "raw_tokens_per_second": rate * ours.tokens_length,
            }
            for name, rate in rates.items()
        ],
        "ratio": rates["ours"] / rates["peer"],
        "ratio_of_medians": repeat * median(seconds["peer"]) / median(seconds["ours"]),
    }


# ---------------------------------------------------------------- tokenise and cut
def generated_documents(megabytes: float, seed: int = 0) -> list[str]:
    """Documents of 20 to 400 words, drawn from 20,000 made-up words as often as natural ones (Zipf's law)."""
    generator = np.random.default_rng(seed)
    syllables = [a + b for a in "bcdfghklmnprstvwz" for b in ("a", "e", "i", "o", "u", "an", "er", "in", "on", "st")]
    words = ["".join(generator.choice(syllables, size=generator.integers(1, 5))) for _ in range(20_000)]
    weights = 1 / np.arange(1, len(words) + 1)
    documents, size = [], 0
    while size < megabytes * 1e6:
        numbers = generator.choice(len(words), size=int(generator.integers(20, 400)), p=weights / weights.sum())
        documents.append(" ".join(words[number] for number in numbers) + ".")
        size += len(documents[-1]) + 1
    return documents


def small_tokenizer(documents: list[str], vocab_size: int = 4096):
    """A unigram tokenizer in T5's layout, trained with the `tokenizers` library, which transformers brings along."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>", *(f"<extra_id_{number}>" for number in range(100))]
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(documents[:2000], trainer)
    names = dict(pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names, additional_special_tokens=special[3:])


def lines_of(files: list[str], megabytes: float) -> list[str]:
    """The lines of the files' documents that are not blank, the first `megabytes` of them if there are as many."""
    lines, size = [], 0
    documents = itertools.chain.from_iterable(read_documents(Path(file), "text") for file in files)
    for line in itertools.chain.from_iterable(document.split("\n") for document in documents):
        if size >= megabytes * 1e6:
            break
        if line.strip():
            lines.append(line)
            size += len(line.encode()) + 1
    return lines


def measure_tokenise(megabytes: float, length: int, rounds: int, files: list[str] | None = None) -> dict:
    """{"rows": MB/s of text to chunks of `length` tokens, "ratio"}: ours, and datasets.map with per-example grouping.

    The text is made up (20,000 words), or the lines of `files`: natural text has many more words, of which each is new
    once. Both write their result to disk, on the threads that the tokenizer takes. Each turn starts without a cache.
    """
    documents = lines_of(files, megabytes) if files else generated_documents(megabytes)
    tokenizer = small_tokenizer(documents)
    size = sum(len(document.encode()) + 1 for document in documents) / 1e6
    rows = [
        {"name": "ours", "what": "tokenised() into one flat file, chunks are views of it"},
        {"name": "peer", "what": "datasets.map(batched), then grouping in a second map"},
    ]
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("\n".join(documents) + "\n", encoding="utf-8")
        turn = itertools.count()
        counts = {}

        def ours() -> None:
            args = PreTrainingDataArguments(
                data_cache_dir=f"{folder}/ours{next(turn)}",
                validation_split_percentage=0.0,
                preprocessing_num_workers=os.cpu_count(),
            )
            source = Source("generated", "generated", [text], "text", size=text.stat().st_size)
            tokens = tokenised(args, {"train": source}, tokenizer)["train"].tokens
            counts["ours"] = len(ChunkDataset(tokens, length))

        runs = {"ours": ours}
        try:
            import datasets
        except ImportError as error:
            rows[1]["error"] = failure(NotAvailableError(str(error)))
        else:
            datasets.disable_progress_bars()

            def group(batch: dict) -> dict:
                joined = list(itertools.chain.from_iterable(batch["input_ids"]))
                whole = len(joined) // length * length
                return {"input_ids": [joined[start : start + length] for start in range(0, whole, length)]}

            def peer() -> None:
                cache = f"{folder}/peer{next(turn)}"
                loaded = datasets.load_dataset("text", data_files=str(text), split="train", cache_dir=cache)
                loaded = loaded.map(
                    lambda batch: {"input_ids": tokenizer(batch["text"], add_special_tokens=False)["input_ids"]},
                    batched=True,
                    remove_columns=["text"],
                    load_from_cache_file=False,
                )
                counts["peer"] = len(loaded.map(group, batched=True, load_from_cache_file=False))
                shutil.rmtree(cache)

            runs["peer"] = peer
        seconds = interleaved(runs, rounds, warm_up=0)
    for row in rows:
        if row["name"] in seconds:
            row |= {"megabytes_per_second": size / median(seconds[row["name"]]), "chunks": counts[row["name"]]}
    result = {"text": "files" if files else "made up", "megabytes": size, "chunk_length": length, "rows": rows}
    if "peer" in seconds:
        result["ratio"] = median(seconds["peer"]) / median(seconds["ours"])
    return result


# ---------------------------------------------------------------- loading
def write_corpus(path: Path, gigabytes: float) -> int:
    """Writes a flat file of random uint16 tokens; returns its bytes. ValueError if the disk has no room for it."""
    size = int(gigabytes * 1e9) // 2 * 2
    free = shutil.disk_usage(path.parent).free
    if size > 0.9 * free:
        raise ValueError(
            f"--gigabytes {gigabytes:g}: {path.parent} has {free / 1e9:.1f} GB free; use less, or another --folder"
        )
    block = (
        np.random.default_rng(0).integers(3, VOCABULARY - 110, size=min(BLOCK, size // 2), dtype=np.uint16).tobytes()
    )
    with path.open("wb") as file:
        for start in range(0, size, len(block)):
            file.write(block[: size - start])
    return size


def measure_load(
    sizes: list[float], batch: int, source_length: int, workers: int, seconds: float, folder: str | None = None
) -> dict:
    """{"rows": sequences/s of a DataLoader over a memory-mapped corpus of each size in GB, and the memory it takes}.

    Memory is that of this process and its workers: "private" is theirs, "mapped" are pages of the corpus that the
    kernel keeps as long as nobody needs the memory. "private_growth_gib" is what a corpus of this size added.
    """
    rows = []
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        for gigabytes in sizes:
            row = {"name": f"{gigabytes:g} GB", "gigabytes": gigabytes}
            rows.append(row)
            path = Path(temporary) / "tokens.bin"
            write_corpus(path, gigabytes)
            row |= load_for(path, batch, source_length, workers, seconds)
            path.unlink()
    result = {"batch": batch, "workers": workers, "rows": rows}
    if len(rows) > 1:
        result["private_growth_from_first_to_last_gib"] = rows[-1]["private_gib"] - rows[0]["private_gib"]
    return result


def load_for(path: Path, batch: int, source_length: int, workers: int, seconds: float) -> dict:
    """Reads batches as pre_train_t5.py does for so many seconds; rate, and private and mapped memory at the end."""
    collator = T5DataCollator(word_less_tokenizer(VOCABULARY), source_length)
    before = process_memory()
    chunks = ChunkDataset(np.memmap(path, dtype=np.uint16, mode="r"), collator.tokens_length)
    loader = torch.utils.data.DataLoader(
        chunks,
        batch_size=batch,
        sampler=EpochSampler(len(chunks), seed=1, group=batch, count_epochs=True),
        collate_fn=collator,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        drop_last=True,
    )
    batches = itertools.chain.from_iterable(iter(loader) for _ in itertools.count())  # epoch after epoch
    for _ in range(2 * max(workers, 1)):
        next(batches)  # the workers start
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        next(batches)
        count += 1
    rate = count * batch / (time.perf_counter() - start)
    pids = ["self", *(child.pid for child in multiprocessing.active_children())]
    after = process_memory(pids)
    del batches, loader  # ends the workers
    return {
        "sequences": len(chunks),
        "sequences_per_second": rate,
        "raw_tokens_per_second": rate * collator.tokens_length,
        "private_before_gib": before["private"] / 2**30,
        "private_gib": after["private"] / 2**30,
        "mapped_gib": after["mapped"] / 2**30,
        "processes": len(pids),
    }


COLLATOR_COLUMNS = {"name": "", "what": "", "sequences_per_second": "{:,.0f}", "raw_tokens_per_second": "{:,.0f}"}
TOKENISE_COLUMNS = {"name": "", "what": "", "megabytes_per_second": "{:.2f}", "chunks": "{:,}"}
LOAD_COLUMNS = {
    "name": "",
    "sequences": "{:,}",
    "sequences_per_second": "{:,.0f}",
    "private_before_gib": "{:.2f}",
    "private_gib": "{:.2f}",
    "mapped_gib": "{:.2f}",
    "processes": "{:d}",
}
