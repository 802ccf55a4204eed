"""Rows of T5's span corruption, to be mixed with those of tasks.

rows = CorruptedText(task_args, tokenizer, inputs_length=512, seed=0)
rows[7]      {"input_ids": [512 ids], "attention_mask": [512 ones], "labels": [114 ids]}
"""

import hashlib
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from arguments.task import TaskArguments
from arguments.text import PreTrainingDataArguments
from corpora.examples import ChunkDataset
from corpora.sources import find_sources
from corpora.token_files import tokenised
from corpora.tokenizers import tokenizer_fingerprint
from data_collator_t5 import T5DataCollator

CORRUPTED = "span_corruption"  # the name of these rows in a mixture


class CorruptedText:
    """The rows of `--span_corruption_file`, made as they are asked for; each keeps its mask, a function of the seed and
    its number. ValueError if the text gives none."""

    def __init__(self, args: TaskArguments, tokenizer: PreTrainedTokenizerBase, inputs_length: int, seed: int):
        shared = ("data_cache_dir", "overwrite_cache", "preprocessing_num_workers")
        text = PreTrainingDataArguments(train_file=args.span_corruption_file, **{n: getattr(args, n) for n in shared})
        source = find_sources(text)["train"]
        self.collator = T5DataCollator(tokenizer, inputs_length)
        tokens = tokenised(text, {"train": source}, tokenizer)["train"].tokens
        self.chunks = ChunkDataset(tokens, self.collator.tokens_length, seed)
        if not len(self):
            files = " ".join(args.span_corruption_file)
            raise ValueError(f"--span_corruption_file {files}: its {len(tokens):,} tokens give no row of "
                             f"{self.collator.tokens_length}")  # fmt: skip
        decisive = f"{source.fingerprint} {tokenizer_fingerprint(tokenizer)} {inputs_length} {seed}"
        self._fingerprint = hashlib.sha256(decisive.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, number: int) -> dict:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[dict]:
        batch = self.collator(self.chunks.__getitems__(numbers))
        pairs = zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
        return [{"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels} for ids, labels in pairs]
