"""Evaluates and answers with a trained head, in the place of evaluate_t5.py and predict_t5.py.

They know its folder by the field "head" of task.json (`Answers` of tasks/model_folders.py).
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from tqdm.auto import tqdm

from constants import TASK_RECORD
from features.encoder_heads.conll import ConllColumns, conll_rows, is_conll
from features.encoder_heads.head_kinds import Kind, Labels, Number, Tokens
from features.encoder_heads.head_models import load_saved
from features.encoder_heads.head_records import heads_of, saved_kind
from features.encoder_heads.head_rows import HeadRows, LoadedHead
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
from foundry.arguments.task import TaskArguments
from foundry.arguments.training import decide_features
from foundry.common.command_line import parse_arguments
from foundry.common.digests import contents_digest
from foundry.common.errors import UserError
from foundry.common.flags import Flags, refuse
from foundry.common.paths import check_output_dir, refuse_links
from foundry.common.processes import check_alike, finish_process_group, has_accelerator, is_first_process, print_once
from foundry.common.reports import end_summary, plain_json, start_summary
from foundry.common.whole_folders import told_if_full
from foundry.corpora.chunks import longest_first
from foundry.corpora.files import is_plain_text, open_text
from foundry.corpora.preview import Sample, print_preview
from foundry.corpora.reading import read_rows
from foundry.corpora.tokenizers import answering_tokenizer
from foundry.features import Features
from foundry.model_t5 import fit_vocabulary
from foundry.modeling.weights import frozen_form
from foundry.runs.callbacks import T5ProgressCallback, install_callbacks
from foundry.runs.run import Run, shown_numbers
from foundry.runs.tracker import finish_trackers, start_trackers
from tasks.front import Front, check_front
from tasks.model_folders import Encoder
from tasks.predictions import AnswerFile, InputReader, check_files, recorded_task
from tasks.registry import as_list, eval_splits, reference_texts
from tasks.task_records import read_record, recorded_flags, recorded_rows
from tasks.tasks import LoadedTask, TaskRows

WINDOW = 32  # batches of each process that are sorted by length and written together
GO_ON = "The answers written so far stay. Free some space: then the same command resumes."
_NO_SEARCH = "a head writes no text that is searched for: leave it out"
# Flags of an evaluation that a head cannot follow, and why.
_NOT_EVALUATED = {
    "do_predict": "rows without labels are answered by predict_t5.py: leave it out",
    "predict_with_generate generation_num_beams generation_max_length max_target_length": _NO_SEARCH,
    "attn_implementation allow_missing task": "not for a head, whose task.json says what is evaluated: leave it out",
}


@dataclasses.dataclass
class Evaluated:
    """What an evaluation needs. rows: of one task. model: loads it. plan: further rows of the plan."""

    rows: TaskRows
    model: Callable[[], Any]
    trainer_type: type
    collator: Callable
    plan: dict[str, str | None]

    @property
    def loaded(self) -> Any:
        """The task of the rows; its `measured(split, output)` has the metrics of a split."""
        return self.rows.tasks[0]


class EncoderAnswers:
    """What evaluate_t5.py does with the folder of an encoder."""

    not_evaluated: ClassVar[dict[str, str]]  # flags that an encoder cannot follow, and why
    files = "all_results.json"  # are written
    next: str  # flags of predict_t5.py, with which one may go on

    def found(self, evaluation: Any, task_args: TaskArguments, args: Any, tokenizer: Any) -> Evaluated:
        """What is evaluated, of the task that the flags name or task.json. UserError if they do not fit."""
        raise NotImplementedError

    def write(self, folder: Path, loaded: LoadedTask, split: str, kept: Any) -> None:
        """Writes what a split's rows were answered."""

    def evaluate(self, argv: list[str] | None, groups: list[type], about: str) -> dict:
        """The metrics of the task's evaluation rows, or of others that the flags name; writes all_results.json."""
        evaluation, task_args, args, *features = parse_arguments(groups, argv, fill_in=fill_in, about=about)
        args, folder = args.replaced(features=Features(features)), evaluation.model_name_or_path
        refuse_all(self.not_evaluated, evaluation, task_args, args)
        decide_features(args, evaluation, task_args)
        tokenizer = answering_tokenizer(folder, evaluation.tokenizer_name)
        found = self.found(evaluation, task_args, args, tokenizer)
        settle_output_dir(args, evaluation, found.loaded)
        if args.world_size > 1:
            prints = {split: data._fingerprint for split, data in found.loaded.data.items()}
            check_alike(prints, "give all nodes the same files")
        model, run = found.model(), Run(args, "evaluation")
        fit_vocabulary(model, tokenizer)
        run.announce({"checkpoint": folder} | found.plan | found.rows.described())
        print_preview(tokenizer, found.rows.shown(whole=False))
        options = dict(args=args, data_collator=found.collator, processing_class=tokenizer)
        trainer = found.trainer_type(model=model, **options)
        install_callbacks(trainer, [T5ProgressCallback()] if is_first_process() else [])
        start_trackers(trainer, vars(evaluation) | vars(task_args) | args.to_dict() | args.features.flags())
        results: dict[str, Any] = {}
        for split, data in found.loaded.data.items():
            trainer.compute_metrics = functools.partial(found.loaded.measured, split)
            label = "_".join(filter(None, ("eval", found.loaded.label(split))))
            output = trainer.predict(data, metric_key_prefix=label)
            results |= {name: value for name, value in output.metrics.items() if not name.endswith("preparation_time")}
            if is_first_process():
                self.write(run.output_dir, found.loaded, split, output.predictions[0])
        finish_trackers(trainer)
        if is_first_process():
            run.write_results(results)
            more = f"python predict_t5.py --model_name_or_path {folder} {self.next}"
            end_summary(shown_numbers(results) | {"written to": f"{run.output_dir}: {self.files}", "next": more})
        finish_process_group()
        return results


class HeadAnswers(EncoderAnswers):
    """What evaluate_t5.py and predict_t5.py do with the folder of a head."""

    not_evaluated, files = _NOT_EVALUATED, f"{EncoderAnswers.files}, predictions.jsonl"
    next = "--input_file new.jsonl"

    def found(self, evaluation: Any, task_args: TaskArguments, args: Any, tokenizer: Any) -> Evaluated:
        folder = evaluation.model_name_or_path
        kind = saved_kind(folder, {})
        tasks = HeadTasks(heads_of(kind), task_args, kind)
        loaded = LoadedHead(tasks, splits_to_evaluate(evaluation, tasks.tasks[0]), tokenizer)
        loaded.trained = recorded_rows(folder).get(loaded.name)
        return Evaluated(
            rows=HeadRows([loaded]),
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

    # ------------------------------------------------------------ predict_t5.py
    def predict(self, argv: list[str] | None, groups: list[type], about: str) -> dict:
        """{"inputs", "answered"}: how many there are, and how many this run answered, into --output_file."""
        args, search, *features = parse_arguments(groups, argv, about=about)
        fronts = check_prediction(args, search, Features(features))
        reader = Reader(args)
        state = PartialState(cpu=args.use_cpu or not has_accelerator())
        for front in fronts:
            front.encode(args, functools.partial(reader.encoder, state.device))
            return {"inputs": 0, "answered": 0}
        sizes = sum(1 for _ in reader.inputs())  # a broken row is found before the long work
        settings = reader.settings()
        check_alike({n: v for n, v in settings.items() if "name" not in n}, "give all nodes the same flags and files")
        output = None
        if state.is_main_process:
            with told_if_full(f"--output_file {args.output_file}", GO_ON):
                output = AnswerFile(Path(args.output_file), settings, args.overwrite_output_file)
        (done,) = broadcast_object_list([output and output.done])
        done = answered_before = min(done, sizes)
        rows = {"checkpoint": args.model_name_or_path} | reader.kind.plan()
        rows |= {"inputs": f"{sizes:,} of {args.input_file}", "written to": args.output_file}
        start_summary(rows | {"continued": f"{done:,} were answered before" if done else None}, title="prediction")
        for _, one in itertools.islice(reader.inputs(), 1):
            ids, _ = reader.encoded(one)
            print_preview(reader.tokenizer, [[Sample("first input", ids, len(reader.encode(text_of(one))[0]))]])
        model = load_saved(args.model_name_or_path, state.device) if done < sizes else None
        window, items = WINDOW * args.batch_size * state.num_processes, itertools.islice(reader.inputs(), done, None)
        cut = 0
        while some := list(itertools.islice(items, window)):
            records, longer = reader.answers(model, some, state)
            cut += longer
            if output:
                with told_if_full(f"--output_file {args.output_file}", GO_ON):
                    output.append(records)
            done += len(some)
        answers = {"answers": f"{done - answered_before:,} new, {sizes:,} in {args.output_file}"}
        answers |= {"cut": f"{cut:,} texts at {reader.most:,} tokens (--max_source_length)"} if cut else {}
        end_summary(answers)
        finish_process_group()
        return {"inputs": sizes, "answered": done - answered_before}


def refuse_all(reasons: dict[str, str], *groups: Any) -> None:
    """UserError for a flag of the groups that is given. reasons: {names of flags: why they are refused}."""
    for names, reason in reasons.items():
        for flags in groups:
            refuse(flags, names, reason)


def splits_to_evaluate(evaluation: Any, task: Any) -> list[str]:
    """--split, or without it all evaluation splits of the task. UserError for a split that there is not."""
    known = ["train", *eval_splits(task.entry)]
    if evaluation.split not in (None, *known):
        raise UserError(f"--split {evaluation.split}: there are {', '.join(known)}. Name one of them")
    return [evaluation.split] if evaluation.split else known[1:]


def settle_output_dir(args: Any, evaluation: Any, task: Any) -> None:
    """Completes --output_dir. UserError unless results can be written there."""
    folder = evaluation.model_name_or_path
    if args.output_dir is None:
        name = "_".join(filter(None, ("eval", task.name, evaluation.split)))
        refuse_links(Path(folder), [name])
        args.output_dir = str(Path(folder) / name)
    check_output_dir(args.output_dir, args.overwrite_output_dir, [folder])


def by_batches(
    lengths: Sequence[int], size: int, state: PartialState, answered: Callable[[list[int]], Iterable], shows: bool
) -> list:
    """In every process, what was answered to each input in their order. Inputs of similar length make a batch, of which
    each process answers its share. answered: function from the numbers of a batch's inputs to their answers. shows: a
    progress bar."""
    order = longest_first([*lengths]).tolist()
    batches = [order[begin : begin + size] for begin in range(0, len(order), size)]
    found: dict[int, Any] = {}
    for numbers in tqdm(batches[state.process_index :: state.num_processes], disable=not shows):
        found |= zip(numbers, answered(numbers), strict=True)
    parts = gather_object([found]) if state.num_processes > 1 else [found]
    together = functools.reduce(dict.__or__, parts)
    return [together[number] for number in range(len(order))]


def fill_in(values: dict, names: set[str]) -> dict:
    """{flag: value} of task.json for flags that are not given, which a printed line names."""
    model = values["model_name_or_path"]
    flags = recorded_flags(model, values, names)
    shown = " ".join(f"--{name} {' '.join(map(str, as_list(value)))}" for name, value in flags.items())
    print_once(f"{Path(model) / TASK_RECORD}: evaluating with its flags: {shown}")
    return flags


def check_prediction(args: Any, search: Any, features: Features, suffix: str = ".answers.jsonl") -> list[Front]:
    """[the front that answers in place of a file], or [], and then --output_file is completed, by the name of the input
    file and the suffix. UserError for flags that a head does not follow, and for files that cannot be used."""
    refuse(search, " ".join(vars(search)), _NO_SEARCH)
    refuse(args, "dataset_name attn_implementation", "not for a head: leave it out")
    if args.backend != "transformers":
        raise UserError(f"--backend {args.backend}: a head is answered by transformers: leave it out")
    flags = Flags(args, search, *features.groups)
    check_front(flags)
    features.decide(flags)
    if frozen_form(features) is not None:
        raise UserError("a head on the encoder is held in float32: leave out the flag that asks for another form")
    fronts = features.of(Front)
    if not fronts:
        check_files(args, suffix=suffix)
    return fronts


def text_of(one: Tagged | str) -> str:
    """What the model reads of an input."""
    return one.text if isinstance(one, Tagged) else one


class Reader:
    """The inputs of predict_t5.py, as a head reads them, and its answers. args: the flags of predict_t5.py."""

    def __init__(self, args: Any):
        self.args, folder = args, args.model_name_or_path
        self.kind: Kind = saved_kind(folder, {})
        flags = read_record(folder)
        if self.kind.name in ("class", "number"):
            self.entry, _ = recorded_task(folder, None)
        else:
            self.entry = dict(inputs={"": "text"}, target="labels", target_type="class", metrics=["accuracy"])
            self.entry["max_source_length"] = flags.get("max_source_length") or SOURCE_LENGTH
            if flags.get("source_column") and self.kind.name == "labels":
                self.entry["inputs"] = {"": flags["source_column"][0]}
        self.kind = dataclasses.replace(self.kind, entry=self.entry)
        word, tag = args.source_column or flags.get("source_column"), flags.get("target_column")
        self.columns = ConllColumns(word and word[0], tag and tag[0], flags.get("tsv_header"))
        self.most = args.max_source_length or self.entry["max_source_length"]
        self.tokenizer = answering_tokenizer(folder, args.tokenizer_name)
        self.encode = offset_encoder(self.tokenizer)
        self.collate = HeadCollator(self.tokenizer, self.kind)
        if args.source_prefix is not None and isinstance(self.kind, Tokens):
            raise UserError(f"--source_prefix {args.source_prefix}: has no effect on words with tags: leave it out")
        if args.source_prefix is not None:
            from foundry.arguments.own_pairs import prefix_of

            self.entry = self.entry | {"prefix": prefix_of(args.source_prefix)}

    def inputs(self) -> Iterator[tuple[dict, Tagged | str]]:
        """(row, what the model reads of it) of each input, read from the file each time."""
        path = Path(self.args.input_file)
        found = self.tagged(path) if isinstance(self.kind, Tokens) else self.texts(path)
        return itertools.islice(found, self.args.max_samples)

    def texts(self, path: Path) -> Iterator[tuple[dict, str]]:
        for item in InputReader(self.entry, self.args.source_column).read(path):
            yield item.row, item.texts[0] if item.texts else ""

    def tagged(self, path: Path) -> Iterator[tuple[dict, Tagged]]:
        """Lines of a text file, sentences of a CoNLL file, or rows with a text or a list of words."""
        assert isinstance(self.kind, Tokens)
        form, named = self.kind.form, self.args.source_column
        labels = [] if form.reads == "letters" else self.kind.labels  # which letters alone may be
        if is_plain_text(path) and named or is_conll(path, self.columns, labels):
            rows = conll_rows(path, self.columns, has_tags=False, labels=self.kind.labels)
            for number, row in enumerate(rows, start=1):
                yield row, joined_words(row["words"], f"{path}, row {number:,}")
            return
        if is_plain_text(path):
            with open_text(path, newline="\n") as lines:
                for line in lines:
                    text = line.rstrip("\r\n")
                    yield {"source": text}, of_source(text, form)
            return
        column = self.args.source_column[0] if self.args.source_column else None
        for number, row in enumerate(read_rows(path), start=1):
            place = f"{path}, row {number:,}"
            name = column or next(
                (n for n in (form.columns[0], "text", "words", "tokens", "sequence") if n in row), None
            )
            if name not in row:
                raise UserError(f"{place}: no column {name or form.columns[0]}: name yours with --source_column")
            if "prediction" in row:
                raise UserError(f"{place}: has a column prediction, under which the answer would be written. Rename it")
            value = row[name]
            if isinstance(value, str):
                yield row, of_source(value, form)
            else:
                yield row, joined_words(value, f"{place}: the column {name}")

    def encoded(self, one: Tagged | str) -> tuple[list[int], list[tuple[int, int]]]:
        """(ids, places of the tokens), cut."""
        return cut_ids(*self.encode(text_of(one)), self.most)

    def read(self, one: Tagged | str) -> tuple[list[int], int, Any]:
        """(ids of its tokens, cut; how many there were; what `of_batch` must know) of what the model reads."""
        whole, places = self.encode(text_of(one))
        ids, places = cut_ids(whole, places, self.most)
        return ids, len(whole), (first_tokens(places, one.words) if isinstance(one, Tagged) else None, one)

    @torch.no_grad()
    def of_batch(self, model: Any, inputs: list[tuple[list[int], int, Any]]) -> list[dict]:
        """The answers to a batch of what `read` returned."""
        batch = self.collate([{"input_ids": ids} for ids, *_ in inputs])
        batch = {name: values.to(model.device) for name, values in batch.items()}
        with torch.autocast(model.device.type, torch.bfloat16, enabled=self.args.bf16):
            outputs = outputs_of(model, batch, self.kind).cpu()
        rows = zip(outputs, inputs, strict=True)
        return [plain_json(self.kind.answer(of_row, *known)) for of_row, (_, _, known) in rows]

    def answers(self, model: Any, some: list, state: PartialState) -> tuple[list[dict], int]:
        """(the records of these inputs, how many of them were cut). Each process answers its share of the batches."""
        inputs = [self.read(one) for _, one in some]

        def answered(numbers: list[int]) -> list[dict]:
            return self.of_batch(model, [inputs[number] for number in numbers])

        found = by_batches([len(ids) for ids, *_ in inputs], self.args.batch_size, state, answered, shows=False)
        records = []
        for (row, one), answer in zip(some, found, strict=True):
            is_nothing = one == ""  # a text that is blank has no class
            records.append(plain_json(row) | ({"prediction": None} if is_nothing else answer))
        return records, sum(whole > self.most for _, whole, _ in inputs)

    def encoder(self, device: torch.device) -> Encoder:
        """What a Front asks."""
        kind, model = self.kind, load_saved(self.args.model_name_or_path, device)
        reader = InputReader(self.entry, self.args.source_column)
        columns = [kind.form.columns[0]] if isinstance(kind, Tokens) else reader.inputs

        def read(given: str | dict) -> tuple[list[int], int, Any]:
            values = {columns[0]: given} if isinstance(given, str) else given
            if all(isinstance(value, str) and not value.strip() for value in values.values()):
                raise UserError("is an empty text")
            if not isinstance(kind, Tokens):
                return self.read("".join(reader.made({}, values).texts))
            (value,) = values.values()
            if isinstance(value, str):
                return self.read(of_source(value, kind.form))
            return self.read(joined_words(value, columns[0]))

        def answer(inputs: list[tuple[list[int], int, Any]]) -> list[dict]:
            found = self.of_batch(model, inputs)
            if not isinstance(kind, Tokens) or not kind.scheme.is_plain:
                return found
            places = [one.places for _, _, (_, one) in inputs]  # of the words: a client has not cut its text
            return [one | {"offsets": of_words} for one, of_words in zip(found, places, strict=True)]

        labels = None if isinstance(kind, Number) else kind.labels
        about = {"checkpoint": self.args.model_name_or_path} | kind.plan()
        return Encoder(kind.name, columns, labels, "", self.most, about, read, answer)

    def settings(self) -> dict:
        """Everything that decides the answers, for the file beside them."""
        args, folder = self.args, Path(self.args.model_name_or_path)
        weights = [path for name in ("*model*.safetensors", TASK_RECORD) for path in sorted(folder.glob(name))]
        names = ("model_name_or_path", "tokenizer_name", "source_column", "source_prefix", "bf16")
        settings = {name: getattr(args, name) for name in names} | {"max_source_length": self.most}
        settings |= {"input": contents_digest([Path(args.input_file)]), "weights": contents_digest(weights)}
        return json.loads(json.dumps(settings))
