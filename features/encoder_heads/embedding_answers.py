"""Evaluates an encoder that embeds texts, and embeds the texts of a file.

Its folder is known by the field "embedding" of its task.json. The steps are those of every encoder
(encoder_answers.py).
"""

import functools
import io
import itertools
import math
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import torch
from pyarrow import parquet

from constants import TASK_RECORD
from features.encoder_heads import POOLINGS
from features.encoder_heads.embedder import Embedder
from features.encoder_heads.encoder_answers import (
    EncoderAnswers,
    EncoderReader,
    Evaluated,
    Read,
    splits_to_evaluate,
)
from features.encoder_heads.head_models import load_encoder
from features.encoder_heads.pair_rows import LoadedPairs, PairTasks, trainer_of
from foundry.arguments.task import TaskArguments
from foundry.common.errors import UserError
from foundry.common.reports import is_of, read_json
from foundry.common.whole_folders import patiently
from foundry.corpora.sentinels import cut_source, source_ids
from foundry.model_t5 import fit_vocabulary
from foundry.training.batching import padding_collator
from tasks.entry import TaskEntry
from tasks.model_folders import LoadedEncoder
from tasks.predictions import InputReader, recorded_task
from tasks.report import report_of_tasks
from tasks.task_records import recorded_rows

Embed = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # ids and mask [B, S] -> embeddings [B, D] in float32
SUFFIXES = (".npy", ".parquet")
COLUMN = "embedding"  # of a parquet file
_NO_TEXT = "an encoder writes no text: leave it out"
# Flags of an evaluation that an encoder cannot follow, and why.
_NOT_EVALUATED = {
    "do_predict": "texts are embedded by predict_t5.py: leave it out",
    "predict_with_generate generation_num_beams generation_max_length metrics target_type labels": _NO_TEXT,
    "allow_missing task": "task.json says which pairs are evaluated: leave it out",
}


def embedder_of(folder: str) -> Embedder:
    """The Embedder that a folder's task.json records. UserError if it is damaged."""
    path = Path(folder) / TASK_RECORD
    record, types = read_json(path).get("embedding"), typing.get_type_hints(Embedder)
    is_one = isinstance(record, dict) and record.keys() == types.keys()
    is_one = is_one and all(is_of(record[name], kind) for name, kind in types.items())
    if not is_one or record["pooling"] not in POOLINGS or not 0 < record["temperature"] < math.inf:
        raise UserError(f"{path}: its field embedding is not as fine_tune_t5.py writes it: {record!r:.200}")
    return Embedder(**record)


class EmbeddingReader(EncoderReader):
    """The texts of predict_t5.py, and their embeddings. Those of a file are cut as sources are, those that a Frontend
    is given at the folder's longest text, as by sentence-transformers."""

    entry: TaskEntry  # of the task: its prefix stands before texts
    described: str  # for the plan

    def __init__(self, args: Any):
        super().__init__(args)
        if args.output_file:
            check_output(Path(args.output_file), args.overwrite_output_file)
        self.understand()

    def understand(self) -> None:
        """Finds out how the folder's texts are embedded."""
        self.embedder, (entry, self.task_record) = embedder_of(self.folder), recorded_task(self.folder, None)
        self.entry, self.described = self.prefixed(entry), self.embedder.described()
        lengths = [entry.max_source_length]
        if self.args.input_file is None:
            lengths.append(entry.max_target_length)
        self.most = self.args.max_source_length or max(lengths)

    def plan(self) -> dict[str, str]:
        return {"embedding": self.described}

    def inputs(self) -> Iterator[tuple[dict, str]]:
        """As of `EncoderReader`. UserError if there are none."""
        reader, count = InputReader(self.entry, self.args.source_column, self.task_record.get("tsv_header")), 0
        for item in itertools.islice(reader.read(Path(self.args.input_file)), self.args.max_samples):
            yield item.row, "".join(item.texts)
            count += 1
        if not count:
            raise UserError(f"--input_file {self.args.input_file}: has no text")

    def read(self, one: str) -> Read:
        (uncut,) = source_ids(self.tokenizer, [one])
        return cut_source(self.tokenizer, uncut, self.most), len(uncut), None

    def model(self) -> Embed:
        """The function that embeds a batch. UserError for a model whose embeddings are no numbers."""
        model = load_encoder(self.folder).to(self.device).eval()
        fit_vocabulary(model, self.tokenizer)
        embed = functools.partial(self.embedder.embed_texts, model)
        self.of_batch(embed, [self.read("")])
        return embed

    @torch.no_grad()
    def of_batch(self, model: Embed, inputs: list[Read]) -> list[dict]:
        ids, padding = [ids for ids, *_ in inputs], self.tokenizer.pad_token_id
        longest = max(map(len, ids))
        rows = torch.tensor([one + [padding] * (longest - len(one)) for one in ids], device=self.device)
        mask = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in ids], device=self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.args.bf16):
            found = model(rows, mask).cpu().numpy()
        if not np.isfinite(found).all():
            raise UserError(
                f"--model_name_or_path {self.folder}: gives embeddings that are not finite. Take an earlier checkpoint"
            )
        return [{"embedding": one} for one in found]

    def output(self, settings: dict) -> "EmbeddingFile":  # noqa: ARG002
        return EmbeddingFile(Path(self.args.output_file), (row for row, _ in self.inputs()))

    def record(self, row: dict, one: str, answer: dict) -> np.ndarray:  # noqa: ARG002
        return answer["embedding"]

    def finished(self, output: "EmbeddingFile", new: int) -> dict[str, str]:
        width = output.write()
        return {"embeddings": f"{new:,} of {width:,} numbers in {output.path}"}

    def encoder(self) -> LoadedEncoder:
        answer = functools.partial(self.of_batch, self.model())

        def read(given: str | dict) -> Read:
            (text,) = [given] if isinstance(given, str) else given.values()
            return self.read(text)

        about = {"checkpoint": self.folder, "embedding": self.described}
        return LoadedEncoder("embedding", ["text"], None, self.entry.source_prefix, self.most, about, read, answer)


class EmbeddingAnswers(EncoderAnswers):
    """What evaluate_t5.py and predict_t5.py do with the folder of an encoder that embeds texts."""

    not_evaluated, reader = _NOT_EVALUATED, EmbeddingReader
    next, suffix = "--input_file texts.txt --output_file texts.npy", SUFFIXES[0]

    def found(self, evaluation: Any, task_args: TaskArguments, args: Any, tokenizer: Any) -> Evaluated:  # noqa: ARG002
        embedder = embedder_of(folder := evaluation.model_name_or_path)
        (task,) = PairTasks.of_flags_and(task_args, embedder)
        loaded = LoadedPairs(task, splits_to_evaluate(evaluation, task), tokenizer, embedder)
        loaded.trained = recorded_rows(folder).get(loaded.name, loaded.trained)
        return Evaluated(
            loaded=loaded,
            report=report_of_tasks([loaded]),
            model=functools.partial(load_encoder, folder, evaluation.attn_implementation),
            trainer_type=trainer_of(embedder, task),
            collator=padding_collator(tokenizer),
            plan={"embedding": embedder.described()},
        )


def check_output(path: Path, overwrite: bool) -> None:
    """UserError unless embeddings can be written there."""
    if path.suffix not in SUFFIXES:
        raise UserError(
            f"--output_file {path}: embeddings are written as .npy (an array) or .parquet (with the rows' columns). "
            "Name such a file"
        )
    if path.is_dir() or path.exists() and not overwrite:
        raise UserError(f"--output_file {path}: is there. Name another one, or give --overwrite_output_file")


class EmbeddingFile:
    """The file of embeddings, which is written when all are there. rows: of its texts, whose columns a .parquet has."""

    done = 0  # no text of an earlier run is kept

    def __init__(self, path: Path, rows: Iterable[dict]):
        """UserError for rows that Parquet cannot hold."""
        self.path = path
        self.table = table_of(list(rows), path) if path.suffix == ".parquet" else None
        self.embeddings: list[np.ndarray] = []

    def append(self, embeddings: list[np.ndarray]) -> None:
        self.embeddings += embeddings

    def write(self) -> int:
        """Writes the embeddings [N, D] as an array, or beside the columns of their rows, and renames the file into
        place. Returns D."""
        aside, found = self.path.with_name(f".{self.path.name}.part"), np.stack(self.embeddings)
        width = found.shape[1]
        try:
            if self.table is None:
                with aside.open("wb") as file:
                    # An object that can only write: NumPy writes to a file without saying why that failed.
                    np.save(SimpleNamespace(write=file.write), found)
            else:
                column = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(found.ravel()), width)
                parquet.write_table(self.table.append_column(COLUMN, column), aside)
            patiently(functools.partial(aside.replace, self.path))
        finally:
            aside.unlink(missing_ok=True)
        return width


def table_of(rows: list[dict], path: Path) -> pyarrow.Table:
    """The rows as they stand in a .parquet, with all columns that a row has. UserError, which names the column, for one
    that has no place there."""
    columns, advice = {}, "Rename it, or name a .npy file"
    for name in dict.fromkeys(itertools.chain.from_iterable(rows)):
        place = f"--output_file {path}: the column {name} of the rows"
        if name == COLUMN:
            raise UserError(f"{place} is the one that embeddings are written to. {advice}")
        try:
            columns[name] = pyarrow.array([row.get(name) for row in rows])
            # Without rows: Parquet refuses some types, such as that of an empty record.
            parquet.write_table(pyarrow.table({name: columns[name][:0]}), io.BytesIO())
        except (pyarrow.ArrowException, OverflowError) as error:
            raise UserError(f"{place} has values that Parquet cannot hold ({error}). {advice}") from None
    return pyarrow.table(columns)
