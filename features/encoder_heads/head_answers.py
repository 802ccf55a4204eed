"""Evaluates and answers with a trained head, known by the field "head" of its task.json.

The steps are those of every encoder (encoder_answers.py).
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from features.encoder_heads import unused_flags
from features.encoder_heads.conll import ConllColumns, conll_rows, is_conll
from features.encoder_heads.encoder_answers import (
    NO_SEARCH,
    EncoderAnswers,
    EncoderReader,
    Evaluated,
    Read,
    splits_to_evaluate,
)
from features.encoder_heads.head_kinds import Kind, Labels, Number, Tokens
from features.encoder_heads.head_models import load_saved
from features.encoder_heads.head_records import heads_of, saved_kind
from features.encoder_heads.head_rows import LoadedHead, report_of_head
from features.encoder_heads.head_tasks import SOURCE_LENGTH, HeadTasks
from features.encoder_heads.head_trainer import HeadCollator, HeadTrainer, outputs_of
from features.encoder_heads.tagged_texts import (
    Tagged,
    cut_ids,
    first_tokens,
    joined_words,
    of_source,
    offset_encoder,
)
from foundry.arguments.task import OWN, TaskArguments
from foundry.common.errors import UserError
from foundry.common.reports import plain_json
from foundry.corpora.files import is_plain_text, open_text
from foundry.corpora.reading import read_rows
from tasks.answer_job import AnswerJob
from tasks.entry import TaskEntry
from tasks.model_folders import LoadedEncoder
from tasks.predictions import AnswerFile, InputReader, recorded_task
from tasks.row_texts import reference_texts
from tasks.task import LoadedTask
from tasks.task_records import read_record, recorded_fields, recorded_rows

# Flags of an evaluation that a head cannot follow, and why.
_NOT_EVALUATED = {
    "do_predict": "rows without labels are answered by predict_t5.py: leave it out",
    "predict_with_generate generation_num_beams generation_max_length max_target_length": NO_SEARCH,
    "attn_implementation allow_missing task": "not for a head, whose task.json says what is evaluated: leave it out",
}
FEWER = 4  # tokens of running text that become one, where a space is put between its words, at the very most


class HeadReader(EncoderReader):
    """The inputs of predict_t5.py, as a head reads them, and its answers."""

    if_full = AnswerJob.if_full

    def __init__(self, args: Any):
        super().__init__(args)
        self.kind: Kind = saved_kind(self.folder, TaskEntry())
        flags = read_record(self.folder)
        if self.kind.name in ("class", "number"):
            entry, _ = recorded_task(self.folder, None)
        else:
            column = "text"
            if flags.get("source_column") and self.kind.name == "labels":
                column = flags["source_column"][0]
            length = flags.get("max_source_length") or SOURCE_LENGTH
            entry = TaskEntry(inputs={"": column}, target="labels", target_type="class", max_source_length=length)
        self.kind = dataclasses.replace(self.kind, entry=entry)
        word, tag = args.source_column or flags.get("source_column"), flags.get("target_column")
        are_given = bool(args.source_column)
        self.columns = ConllColumns(word and word[0], tag and tag[0], flags.get("tsv_header"), are_given)
        self.most = args.max_source_length or entry.max_source_length
        self.encode = offset_encoder(self.tokenizer)
        self.collate = HeadCollator(self.tokenizer, self.kind)
        if args.source_prefix is not None and isinstance(self.kind, Tokens):
            raise UserError(f"--source_prefix {args.source_prefix}: has no effect on words with tags: leave it out")
        self.entry = self.prefixed(entry)

    def plan(self) -> dict[str, str]:
        return self.kind.plan()

    def inputs(self) -> Iterator[tuple[dict, Tagged | str]]:
        path = Path(self.args.input_file)
        found = self.tagged(path) if isinstance(self.kind, Tokens) else self.texts(path)
        return itertools.islice(found, self.args.max_samples)

    def texts(self, path: Path) -> Iterator[tuple[dict, str]]:
        for item in InputReader(self.entry, self.args.source_column).read(path):
            yield item.row, item.texts[0] if item.texts else ""

    def tagged(self, path: Path) -> Iterator[tuple[dict, Tagged]]:
        """Lines of a text file, sentences of a CoNLL file, or rows with a text or a list of words."""
        assert isinstance(self.kind, Tokens)
        row_format, scheme, labels = self.kind.row_format, self.kind.scheme, self.kind.labels
        named = self.args.source_column

        def is_tag(field: str) -> bool:
            return row_format.reads != "letters" and scheme.meant(field) in labels  # which letters alone may be

        if is_plain_text(path) and named or is_conll(path, self.columns, is_tag):
            rows = conll_rows(path, self.columns, has_tags=False, is_tag=is_tag)
            for number, row in enumerate(rows, start=1):
                yield row, joined_words(row["words"], f"{path}, row {number:,}")
            return
        if is_plain_text(path):
            with open_text(path, newline="\n") as lines:
                for line in lines:
                    text = line.rstrip("\r\n")
                    yield {"source": text}, of_source(text, row_format)
            return
        column = self.args.source_column[0] if self.args.source_column else None
        for number, row in enumerate(read_rows(path), start=1):
            place = f"{path}, row {number:,}"
            name = column or next(
                (n for n in (row_format.columns[0], "text", "words", "tokens", "sequence") if n in row), None
            )
            if name not in row:
                raise UserError(f"{place}: no column {name or row_format.columns[0]}: name yours with --source_column")
            if "prediction" in row:
                raise UserError(f"{place}: has a column prediction, under which the answer would be written. Rename it")
            value = row[name]
            if isinstance(value, str):
                yield row, of_source(value, row_format)
            else:
                yield row, joined_words(value, f"{place}: the column {name}")

    def read(self, one: Tagged | str) -> Read:
        uncut, places = self.encode(one.text if isinstance(one, Tagged) else one)
        ids, places = cut_ids(uncut, places, self.most)
        return ids, len(uncut), (first_tokens(places, one.words) if isinstance(one, Tagged) else None, one)

    def model(self) -> Any:
        return load_saved(self.folder, self.device)

    @torch.no_grad()
    def of_batch(self, model: Any, inputs: list[Read]) -> list[dict]:
        batch = self.collate([{"input_ids": ids} for ids, *_ in inputs])
        batch = {name: values.to(model.device) for name, values in batch.items()}
        with torch.autocast(model.device.type, torch.bfloat16, enabled=self.args.bf16):
            outputs = outputs_of(model, batch, self.kind).cpu()
        rows = zip(outputs, inputs, strict=True)
        return [plain_json(self.kind.answer(of_row, *known)) for of_row, (_, _, known) in rows]

    def output(self, settings: dict) -> AnswerFile:
        return AnswerFile(Path(self.args.output_file), settings, self.args.overwrite_output_file)

    def finished(self, output: AnswerFile, new: int) -> dict[str, str]:
        return {"answers": f"{new:,} new, {output.done + new:,} in {output.path}"}

    def record(self, row: dict, one: Tagged | str, answer: dict) -> dict:
        is_nothing = one == ""  # a text that is blank has no class
        return plain_json(row) | ({"prediction": None} if is_nothing else answer)

    def encoder(self) -> LoadedEncoder:
        kind, model = self.kind, self.model()
        reader = InputReader(self.entry, self.args.source_column)
        columns = [kind.row_format.columns[0]] if isinstance(kind, Tokens) else reader.inputs

        def read(given: str | dict) -> Read:
            values = {columns[0]: given} if isinstance(given, str) else given
            if all(isinstance(value, str) and not value.strip() for value in values.values()):
                raise UserError("is an empty text")
            if not isinstance(kind, Tokens):
                return self.read("".join(reader.made({}, values).texts))
            (value,) = values.values()
            if isinstance(value, str):
                return self.read(of_source(value, kind.row_format))
            return self.read(joined_words(value, columns[0]))

        def fewest(values: dict) -> int:
            """Of a text whose words are to be found; spaces between them could at most make few tokens of many."""
            texts = [value for value in values.values() if isinstance(value, str) and isinstance(kind, Tokens)]
            return sum(len(self.encode(text)[0]) // FEWER for text in texts)

        def answer(inputs: list[Read]) -> list[dict]:
            found = self.of_batch(model, inputs)
            if not isinstance(kind, Tokens) or not kind.scheme.is_plain:
                return found
            places = [one.places for _, _, (_, one) in inputs]  # of the words: a client has not cut its text
            return [one | {"offsets": of_words} for one, of_words in zip(found, places, strict=True)]

        labels = None if isinstance(kind, Number) else kind.labels
        about = {"checkpoint": self.folder} | kind.plan()
        return LoadedEncoder(kind.name, columns, labels, "", self.most, about, read, answer, fewest)


class HeadAnswers(EncoderAnswers):
    """What evaluate_t5.py and predict_t5.py do with the folder of a head."""

    not_evaluated, reader = _NOT_EVALUATED, HeadReader
    files = f"{EncoderAnswers.files}, predictions.jsonl"
    next = "--input_file new.jsonl"

    def followed(self, model: str, recorded: dict) -> dict:
        """As of `EncoderAnswers`: an earlier training took flags that its head did not follow."""
        unused = unused_flags(saved_kind(model, {}).name, TaskArguments)
        return {name: value for name, value in recorded.items() if name not in unused}

    def found(self, evaluation: Any, task_args: TaskArguments, args: Any, tokenizer: Any) -> Evaluated:
        folder = evaluation.model_name_or_path
        kind, recorded = saved_kind(folder, {}), recorded_fields(folder, OWN, self.given)
        tasks = HeadTasks(heads_of(kind), task_args, kind, {} if kind.name == "number" else recorded)
        loaded = LoadedHead(tasks, splits_to_evaluate(evaluation, tasks.tasks[0]), tokenizer)
        loaded.trained = recorded_rows(folder).get(loaded.name, loaded.trained)
        return Evaluated(
            loaded=loaded,
            report=report_of_head(loaded),
            model=functools.partial(load_saved, folder, args.device),
            trainer_type=HeadTrainer.of(kind=tasks.kind),
            collator=HeadCollator(tokenizer, tasks.kind),
            plan=dict(tasks.kind.plan()),
        )

    def write(self, folder: Path, loaded: LoadedTask, split: str, kept: Any) -> None:
        """Appends a split's rows to predictions.jsonl: source, prediction and target."""
        assert isinstance(loaded, LoadedHead)
        kind, places = loaded.kind, loaded.places[split] or [None] * len(kept)
        folder.mkdir(parents=True, exist_ok=True)
        mode = "w" if split == next(iter(loaded.data)) else "a"
        with (folder / "predictions.jsonl").open(mode, encoding="utf-8") as file:
            for index, (row, one, of_row) in enumerate(zip(loaded.rows[split], kept, places, strict=True)):
                record = {"task": loaded.name, "split": split, "index": index, "source": loaded.text_of(row)}
                record["prediction"] = kind.shown(one, of_row)
                of_several = isinstance(kind, Tokens | Labels)
                record["target"] = row["labels"] if of_several else reference_texts(kind.name, kind.entry, row)[0]
                file.write(json.dumps(plain_json(record), ensure_ascii=False) + "\n")
