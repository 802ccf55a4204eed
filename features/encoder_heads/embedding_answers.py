"""Evaluates an encoder that embeds texts, and embeds the texts of a file.

`EmbeddingAnswers` does what evaluate_t5.py and predict_t5.py ask of `Answers` (tasks/model_folders.py). They know the
folder by the field "embedding" of its task.json.
"""

import functools
import itertools
import math
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import torch
from accelerate import PartialState
from pyarrow import parquet

from constants import TASK_RECORD
from features.encoder_heads import POOLINGS
from features.encoder_heads.embedder import Embedder
from features.encoder_heads.encoders import load_encoder
from features.encoder_heads.head_answers import (
    EncoderAnswers,
    Evaluated,
    by_batches,
    check_prediction,
    splits_to_evaluate,
)
from features.encoder_heads.pair_rows import LoadedPairs, PairTasks, trainer_of
from foundry.arguments.own_pairs import prefix_of
from foundry.arguments.task import TaskArguments
from foundry.common.command_line import parse_arguments
from foundry.common.errors import UserError
from foundry.common.processes import finish_process_group, has_accelerator, is_first_process
from foundry.common.reports import end_summary, is_of, read_json, start_summary
from foundry.common.whole_folders import patiently, told_if_full
from foundry.corpora.gaps import cut_source, source_ids
from foundry.corpora.preview import Sample, print_preview
from foundry.corpora.tokenizers import answering_tokenizer
from foundry.features import Features
from foundry.model_t5 import fit_vocabulary
from foundry.training.batching import padding_collator
from tasks.model_folders import Encoder
from tasks.predictions import InputReader, recorded_task
from tasks.registry import source_prefix
from tasks.task_records import recorded_rows
from tasks.tasks import TaskRows

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
    wrong = "is no record"
    if isinstance(record, dict):
        differing = sorted(record.keys() ^ types.keys())
        strange = [name for name in record.keys() & types.keys() if not is_of(record[name], types[name])]
        wrong = next((f"{name} {record.get(name, 'is missing')!r:.40}" for name in (*differing, *strange)), "")
        if not wrong and (record["pooling"] not in POOLINGS or not 0 < record["temperature"] < math.inf):
            wrong = f"pooling {record['pooling']!r:.40}, temperature {record['temperature']}"
    if wrong:
        raise UserError(f"{path}: its field embedding is not as fine_tune_t5.py writes it ({wrong})")
    return Embedder(**record)


class EmbeddingAnswers(EncoderAnswers):
    """What evaluate_t5.py and predict_t5.py do with the folder of an encoder that embeds texts."""

    not_evaluated = _NOT_EVALUATED
    next = "--input_file texts.txt --output_file texts.npy"

    def found(self, evaluation: Any, task_args: TaskArguments, args: Any, tokenizer: Any) -> Evaluated:  # noqa: ARG002
        embedder = embedder_of(folder := evaluation.model_name_or_path)
        (task,) = PairTasks.of_flags_and(task_args, embedder)
        loaded = LoadedPairs(task, splits_to_evaluate(evaluation, task), tokenizer, embedder)
        loaded.trained = recorded_rows(folder).get(loaded.name)
        return Evaluated(
            rows=TaskRows([loaded]),
            model=functools.partial(load_encoder, folder, evaluation.attn_implementation),
            trainer_type=trainer_of(embedder, task),
            collator=padding_collator(tokenizer),
            plan={"embedding": embedder.described()},
        )

    def predict(self, argv: list[str] | None, groups: list[type], about: str) -> dict:
        """{"inputs", "answered"}: how many texts there are; their embeddings are written to --output_file."""
        args, search, *features = parse_arguments(groups, argv, about=about)
        folder = args.model_name_or_path
        for front in check_prediction(args, search, Features(features), SUFFIXES[0]):
            front.encode(args, functools.partial(encoder_of, args))
            return {"inputs": 0, "answered": 0}
        output = check_output(args)
        embedder, (entry, record) = embedder_of(folder), recorded_task(folder, None)
        most = args.max_source_length or entry["max_source_length"]
        if args.source_prefix is not None:
            entry = entry | {"prefix": prefix_of(args.source_prefix)}
        tokenizer = answering_tokenizer(folder, args.tokenizer_name)
        reader = InputReader(entry, args.source_column, record.get("tsv_header"))
        inputs = list(itertools.islice(reader.read(Path(args.input_file)), args.max_samples))
        if not inputs:
            raise UserError(f"--input_file {args.input_file}: has no text")
        texts = ["".join(item.texts) for item in inputs]
        whole = source_ids(tokenizer, texts)
        ids = [cut_source(tokenizer, one, most) for one in whole]
        state = PartialState(cpu=args.use_cpu or not has_accelerator())
        if is_first_process():
            rows = {"checkpoint": folder, "embedding": embedder.described()}
            rows |= {"inputs": f"{len(texts):,} of {args.input_file}", "written to": args.output_file}
            start_summary(rows, title="prediction")
        print_preview(tokenizer, [[Sample("first input", ids[0], len(whole[0]))]])
        model = load_encoder(folder).to(state.device).eval()
        fit_vocabulary(model, tokenizer)
        found = embedded(model, embedder, ids, args.batch_size, args.bf16, state)
        check_finite(folder, found)
        if state.is_main_process:
            with told_if_full(f"--output_file {args.output_file}", "Free some space, and run the command again."):
                write_embeddings(output, found, [item.row for item in inputs])
            longer = sum(len(one) > most for one in whole)
            told = {"embeddings": f"{len(found):,} of {found.shape[1]:,} numbers in {args.output_file}"}
            told |= {"cut": f"{longer:,} texts at {most:,} tokens (--max_source_length)"} if longer else {}
            end_summary(told)
        finish_process_group()
        return {"inputs": len(texts), "answered": len(texts)}


def check_output(args: Any) -> Path:
    """--output_file. UserError unless embeddings can be written there."""
    output = Path(args.output_file)
    if output.suffix not in SUFFIXES:
        raise UserError(
            f"--output_file {output}: embeddings are written as .npy (an array) or .parquet (with the rows' columns). "
            "Name such a file"
        )
    if output.is_dir() or output.exists() and not args.overwrite_output_file:
        raise UserError(f"--output_file {output}: is there. Name another one, or give --overwrite_output_file")
    return output


def encoder_of(args: Any) -> Encoder:
    """What a Front asks. Texts are cut at the folder's longest, as by sentence-transformers. args: the flags of
    predict_t5.py."""
    folder, device = args.model_name_or_path, PartialState(cpu=args.use_cpu or not has_accelerator()).device
    embedder, (entry, _) = embedder_of(folder), recorded_task(folder, None)
    if args.source_prefix is not None:
        entry = entry | {"prefix": prefix_of(args.source_prefix)}
    most = max(entry["max_source_length"], entry["max_target_length"])
    tokenizer, model = answering_tokenizer(folder, args.tokenizer_name), load_encoder(folder).to(device).eval()
    fit_vocabulary(model, tokenizer)
    embed = functools.partial(embedder.embed_texts, model)
    return encoder_that(embed, args, device, tokenizer, most, source_prefix(entry), embedder.described())


def encoder_that(
    embed: Embed, args: Any, device: torch.device, tokenizer: Any, most: int, prompt: str, described: str
) -> Encoder:
    """The Encoder that embeds texts so. most: tokens of a text, unless a flag says it. described: for the plan."""
    most = args.max_source_length or most

    def read(given: str | dict) -> tuple[list[int], int, None]:
        (text,) = [given] if isinstance(given, str) else given.values()
        (whole,) = source_ids(tokenizer, [text])
        return cut_source(tokenizer, whole, most), len(whole), None

    def answer(inputs: list[tuple[list[int], int, Any]]) -> list[dict]:
        rows = [ids for ids, *_ in inputs]
        return [{"embedding": one} for one in of_batch(embed, rows, tokenizer.pad_token_id, device, args.bf16)]

    check_finite(args.model_name_or_path, answer([read("")])[0]["embedding"])
    about = {"checkpoint": args.model_name_or_path, "embedding": described}
    return Encoder("embedding", ["text"], None, prompt, most, about, read, answer)


def check_finite(folder: str, found: np.ndarray) -> None:
    """UserError unless the embeddings of a folder's model are numbers."""
    if not np.isfinite(found).all():
        raise UserError(
            f"--model_name_or_path {folder}: gives embeddings that are not finite. Take an earlier checkpoint"
        )


@torch.no_grad()
def of_batch(embed: Embed, ids: list[list[int]], padding: int, device: torch.device, bf16: bool) -> np.ndarray:
    """The embeddings [B, D] of a batch's texts, in float32. ids: of their tokens."""
    longest = max(map(len, ids))
    rows = torch.tensor([one + [padding] * (longest - len(one)) for one in ids], device=device)
    mask = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in ids], device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        return embed(rows, mask).cpu().numpy()


def embedded(
    model: Any, embedder: Embedder, ids: list[list[int]], size: int, bf16: bool, state: PartialState
) -> np.ndarray:
    """The embeddings [N, D] of N texts in their order, in float32. ids: of their tokens. size: texts of a batch. Texts
    of similar length are read together; each process reads its share of the batches."""

    def answered(numbers: list[int]) -> np.ndarray:
        rows, embed = [ids[number] for number in numbers], functools.partial(embedder.embed_texts, model)
        return of_batch(embed, rows, model.config.pad_token_id, state.device, bf16)

    return np.stack(by_batches([*map(len, ids)], size, state, answered, shows=state.is_main_process))


def write_embeddings(path: Path, found: np.ndarray, rows: list[dict]) -> None:
    """Writes embeddings [N, D] as an array, or beside the columns of their rows, and renames the file into place."""
    aside = path.with_name(f".{path.name}.part")
    if path.suffix == ".npy":
        with aside.open("wb") as file:
            np.save(file, found)
    else:
        if any(COLUMN in row for row in rows):
            raise UserError(f"--input_file: a row has a column {COLUMN}, under which its embedding would be written")
        try:
            table = pyarrow.Table.from_pylist(rows)
        except pyarrow.ArrowInvalid as error:
            raise UserError(
                f"--output_file {path}: the rows have no common types ({error}). Name a .npy file"
            ) from None
        width = found.shape[1]
        column = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(found.ravel()), width)
        parquet.write_table(table.append_column(COLUMN, column), aside)
    patiently(functools.partial(aside.replace, path))
