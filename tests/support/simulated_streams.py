"""What a stream reads for a number of ranks and workers, simulated in one process."""

import itertools
from pathlib import Path

import numpy as np

from features.streams.blocks import FileCorpus
from features.streams.virtual_shards import StreamDataset, packed
from foundry.corpora.chunks import readers_of

WINDOW = 568  # raw tokens of an example, from which span corruption makes 512 input and 114 target tokens
CHARACTERS = 4  # characters that count as a token
BATCH = 8  # examples of a rank in a step
MEAN_ROW = 600  # mean characters of a row; lengths are log-normal, like those of paragraphs


class CountedText:
    """Text files in which no token occurs twice, so that a token which comes again shows that its text was repeated.

    The row "12 xxx..." has the tokens begins[12], begins[12] + 1 ...; `rows` and `characters` count what was read.
    """

    def __init__(self, folder: Path, files: int, megabytes: float):
        self.rows = self.characters = 0
        random = np.random.default_rng(0)
        count = max(files, int(megabytes * 1e6 / MEAN_ROW))
        lengths = np.maximum(random.lognormal(np.log(MEAN_ROW) - 0.5, 1.0, count).astype(int), 16)
        texts = (f"{number} ".ljust(length, "x") + "\n" for number, length in enumerate(lengths.tolist()))
        for file, part in enumerate(np.array_split(np.arange(count), files)):
            (folder / f"{file:05}.txt").write_text("".join(itertools.islice(texts, len(part))))
        tokens = lengths // CHARACTERS
        self.begins, self.tokens = np.cumsum(tokens) - tokens, tokens
        self.files = sorted(folder.glob("*.txt"))

    def read(self, row: dict) -> str:
        self.rows += 1
        self.characters += len(row["text"])
        return row["text"]

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """(the tokens of all texts, where those of each text end)."""
        numbers = [int(text[: text.index(" ")]) for text in (text + " " for text in texts)]
        ids = [np.arange(self.begins[n], self.begins[n] + self.tokens[n], dtype=np.uint32) for n in numbers]
        return np.concatenate(ids), np.cumsum([len(part) for part in ids])


def simulated(folder: Path, ranks: int, workers: int, files: int, megabytes: float) -> dict:
    """What all data workers of all ranks together read in an epoch, and in which order the text comes.

    - rows_read, characters_tokenised: how often a row is read and a character tokenised on average, in the second half
      of the epoch, when all buffers are full
    - first_repeat: examples given out before the first token comes again, as a share of the text
    - repeated, unseen: shares of the text that came twice or not at all, after as many examples as the text has
    """
    text = CountedText(folder, files, megabytes)
    steps = int(text.tokens.sum()) // (WINDOW * BATCH * ranks)
    assert steps > 2, "only the steps after the middle of the epoch are counted"
    corpus = FileCorpus(text.files)
    units = packed(text.read, text.encode, WINDOW, lambda ids, _: (WINDOW, ids), None)
    streams = [
        StreamDataset([(corpus, units)], lambda _, units: units, BATCH, 0, 10_000, rank, ranks) for rank in range(ranks)
    ]
    next(streams[0].items(0, workers))
    examples, read = {}, np.zeros(2)
    for stream, worker in itertools.product(streams, range(workers)):
        items = stream.items(worker, workers)
        for step, (found, _) in enumerate(itertools.islice(items, steps)):
            if step == steps // 2:
                before = np.array([text.rows, text.characters])
            examples |= found
        read += np.array([text.rows, text.characters]) - before
    order = np.concatenate([examples[number] for number in sorted(examples)])
    first = np.zeros(len(order), bool)
    first[np.unique(order, return_index=True)[1]] = True
    whole, used = int(text.tokens.sum()), (steps - steps // 2 - 1) * BATCH * ranks * WINDOW
    rows, characters = read / (used / whole * np.array([len(text.tokens), text.tokens.sum() * CHARACTERS]))
    return {
        "ranks": ranks,
        "workers": workers,
        "files": files,
        "megabytes": megabytes,
        "lanes": streams[0].shards,
        "ranks_that_read_each_row": readers_of(ranks, streams[0].shards),
        "rows_read": round(rows, 3),
        "characters_tokenised": round(characters, 3),
        "first_repeat": round(float(np.argmin(first) if not first.all() else len(order)) / whole, 4),
        "repeated": round(float((~first).sum()) / whole, 4),
        "unseen": round(1 - float(first.sum()) / whole, 4),
    }
