"""Export any checkpoint as a clean Hugging Face folder, and for other libraries.

    python export_checkpoint.py --model_name_or_path out/fine_tune_t5 --output_dir out/export
    python export_checkpoint.py --model_name_or_path out/pre_train_t5/checkpoint-2000 --dtype bfloat16
    python export_checkpoint.py --model_name_or_path google/flan-t5-small --samples_file my_texts.txt

Reads the checkpoints of our runs under any launcher, and LoRA's matrices, which it merges. Each format is loaded again
and compared with PyTorch on real texts before it is kept: greedy tokens must be equal, and log-probabilities equal
within a tolerance, which is printed. The folder appears when it is complete. A model of 1M parameters takes 20 s of one
core in all formats but ONNX, which takes longer.
"""

from foundry.common.command_line import answer_early

if __name__ == "__main__":
    answer_early(__doc__)


import copy
import dataclasses
import itertools
import json
import shutil
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from constants import PRE_TRAINED, TASK_RECORD
from features import FORMATS
from foundry.arguments.task import OWN, task_arguments
from foundry.common.by_name import resolve
from foundry.common.command_line import exit_on_user_error, parse_arguments
from foundry.common.errors import UserError
from foundry.common.flags import Flags, option
from foundry.common.machine import prepare_process, run_script
from foundry.common.paths import check_output_dir
from foundry.common.reports import (
    end_summary,
    human_bytes,
    human_count,
    lines_until,
    read_json,
    start_summary,
    write_json,
)
from foundry.common.terminal import print_once
from foundry.common.whole_folders import made_aside, newest_whole_checkpoint
from foundry.corpora.files import check_file, is_plain_text
from foundry.corpora.reading import read_rows, read_text_documents
from foundry.corpora.sentinels import source_ids
from foundry.corpora.tokenizers import answering_tokenizer, has_tokenizer, load_tokenizer, save_tokenizer
from foundry.features import Features, features_of
from foundry.model_t5 import check_room, count_parameters, fit_vocabulary, load_model
from foundry.modeling.decoding_layers import DECODERS
from foundry.modeling.families import outgrows_cache
from foundry.modeling.generation_settings import drop_idle_search
from foundry.modeling.int8 import int8_state
from foundry.modeling.layers import fuse_activation
from foundry.modeling.loading import WEIGHTS, load_config, way_to_weights
from foundry.modeling.weights import adapters, model_source
from foundry.publishing.exports import (
    Original,
    compare,
    compare_outputs,
    copy_pooling,
    described_comparison,
    described_within,
    encode,
    encoder_outputs,
    lone_part,
    pytorch_answers,
)
from foundry.publishing.file_names import COMPARISON, named_files
from foundry.publishing.records import read_run_folder, task_of_run
from foundry.publishing.uploader import Uploader
from foundry.report.preview import KEPT_TOKENS, Sample
from tasks.named import first_entry, task_names
from tasks.row_texts import joined_text, source_text
from tasks.rows import load_rows
from tasks.task_records import read_record

INT8 = "int8"
# Files that load_model reads; it merges those of adapters.
READ_WEIGHTS = WEIGHTS + tuple(adapter.weights for adapter in adapters())
FEATURES = features_of("export_checkpoint")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, INT8: torch.float32}  # of what is not a matrix
# Texts for the comparison if neither --samples_file nor its run names one.
TEXTS = (
    "The city lies <extra_id_0> the river, and its oldest bridge was built <extra_id_1> the twelfth century.",
    "In mathematics, a group is a set <extra_id_0> an operation that combines any two <extra_id_1> elements.",
    "She opened the door, looked <extra_id_0> and said that nobody had been there since <extra_id_1>.",
    "Le musée est ouvert tous les jours <extra_id_0> dix heures à <extra_id_1>.",
    "Der Zug nach <extra_id_0> fährt heute von Gleis 7 ab 🚆, etwa <extra_id_1> Minuten später.",
    "Приложение <extra_id_0> на русском языке.",
    "summarize: The committee met on Tuesday. It discussed the budget, and postponed the vote to the next week.",
    "A short one <extra_id_0>.",
)


@dataclasses.dataclass
class ExportArguments:
    """What is exported, where to, and how."""

    _argument_group_name = "export"

    model_name_or_path: str = option(PRE_TRAINED, "Run, checkpoint or Hub name.")
    tokenizer_name: str | None = option(None, "Tokenizer. Not set: the checkpoint's own, or that of the folder above.")
    output_dir: str = option("out/export", "Folder to write. Must be empty or overwritten.")
    overwrite_output_dir: bool = option(False, "Replace what --output_dir holds, once the new export is complete.")
    formats: list[str] = option(
        ["huggingface"],
        "Formats to write; the others into folders inside huggingface's.",
        choices=("huggingface", *FORMATS),
    )
    dtype: str = option(
        "float32", "Type of the weights in the Hugging Face folder; int8: of matrices.", choices=tuple(DTYPES)
    )
    samples_file: str | None = option(None, "File of these texts: lines, or rows with `source` (predictions.jsonl).")
    num_samples: int = option(8, "Texts to compare on.", at_least=1)


DATACLASSES = [ExportArguments, *FEATURES]


def check_export(args: ExportArguments) -> None:
    """UserError for what cannot work, before any weight is read."""
    if args.samples_file:
        check_file("--samples_file", Path(args.samples_file))
    check_output_dir(args.output_dir, args.overwrite_output_dir, [args.model_name_or_path])


def find_checkpoint(name: str) -> str:
    """The folder or Hub name that holds weights: `name`, or the newest whole checkpoint-N of an unfinished run."""
    folder = Path(name)
    if not folder.is_dir() or any((folder / file).is_file() for file in READ_WEIGHTS):
        return name
    if newest := newest_whole_checkpoint(folder):
        print_once(f"{name}: the run has not ended; taking its newest whole checkpoint, {newest}")
        return str(newest)
    raise UserError(
        f"--model_name_or_path {name}: no weights there, and no whole checkpoint-*; {way_to_weights(folder)}"
    )


def find_tokenizer(args: ExportArguments, checkpoint: str) -> PreTrainedTokenizerBase:
    """The one in the checkpoint's folder or the folder above, or else the one that was named. UserError if they have
    other pieces."""
    folder = Path(checkpoint)
    places = [place for place in (folder, folder.parent) if has_tokenizer(place)]
    if folder.is_dir() and not places and not args.tokenizer_name:
        raise UserError(f"no tokenizer in {folder} or above it: name one with --tokenizer_name")
    return answering_tokenizer(str(places[0]) if places else checkpoint, args.tokenizer_name)


def texts_to_compare(args: ExportArguments, run: dict, tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], str]:
    """(source texts, where they are from): --samples_file, the held-out rows of the run's task, or TEXTS. The rows of
    files that run.json names count only if it shows the first of them: a downloaded folder may name any file."""
    if args.samples_file:
        path = Path(args.samples_file)
        if is_plain_text(path):
            sources = iter(filter(None, read_text_documents(path)))
        else:
            sources = (joined_text(row["source"]) for row in read_rows(path, ["source"]))
        found = list(itertools.islice(sources, args.num_samples))
        if not found:
            raise UserError(f"--samples_file {path}: holds no text")
        return found, path.name
    names = task_of_run(run)
    if names and (entry := first_entry(run["arguments"])):
        name, task_args, split = task_names(*names)[0], task_arguments(run["arguments"]), entry.eval_splits[0]
        try:
            if names[1] == OWN and entry.hub:
                raise UserError(f"{entry.hub[0]} of run.json is not fetched")
            rows = load_rows(name, entry, task_args, split)[: args.num_samples]
            texts = [source_text(entry, row) for row in rows]
            if not is_shown(texts[0], run, tokenizer, task_args.max_source_length or entry.max_source_length):
                raise UserError("run.json does not show the first of them, so they may be other files' of this machine")
            return texts, f"{len(rows)} {split} rows of {names[0]}/{name}"
        except (ValueError, OSError, LookupError) as error:
            print_once(f"the rows of {names[0]}/{name} are not used ({error}): others can be named with --samples_file")
    return list(TEXTS[: args.num_samples]), "built-in sentences"


def is_shown(text: str, run: dict, tokenizer: PreTrainedTokenizerBase, longest: int) -> bool:
    """Whether run.json shows this source, cut at `longest` tokens, among the rows that its run read."""
    (ids,), (uncut,) = source_ids(tokenizer, [text], longest), source_ids(tokenizer, [text])
    shown = Sample("", ids, len(uncut)).text(tokenizer, KEPT_TOKENS)
    return f'"text": {json.dumps(shown)}' in json.dumps(run.get("read"))


def write_hugging_face(original: Original, folder: Path, kind: str) -> PreTrainedModel:
    """Saves model and tokenizer into `folder`; returns the model loaded from there. UserError unless every tensor
    has the bits of the checkpoint, rounded to the type of --dtype, `kind`."""
    model, dtype, state, form = original.model, DTYPES[kind], None, None
    if kind == INT8:
        state, form = int8_state(model)
    wanted = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    for parameter in model.parameters():  # buffers stay: T5Gemma's frequencies would remain rounded
        parameter.data = parameter.data.to(dtype)
    search, model.generation_config = model.generation_config, copy.deepcopy(model.generation_config)
    drop_idle_search(model)
    model.save_pretrained(folder, state_dict=state)
    if form:
        write_json(folder / "config.json", read_json(folder / "config.json") | {"quantization_config": form})
    model.generation_config = search  # other formats are compared with the task's beams too
    save_tokenizer(original.tokenizer, folder)
    copy_pooling(original, folder)
    if model.can_generate():
        again = load_model(str(folder)).eval()
    else:
        again = type(model).from_pretrained(folder, dtype=torch.float32).eval()
        fuse_activation(again)
    found = again.state_dict()
    if lost := sorted(wanted.keys() - found.keys()):
        raise UserError(f"huggingface: the saved model lacks {', '.join(lost[:3])}: not written")
    different = [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor.float())]
    if different:
        raise UserError(f"huggingface: {different[0]} is not what the checkpoint holds (is it finite?): not written")
    model.float()
    return again


def export_model(
    args: ExportArguments, folder: Path, original: Original, texts: list[str]
) -> tuple[dict[str, dict], dict[str, str]]:
    """({format: its comparison}, {format: one line about it}), after writing all formats into `folder`. UserError if
    one differs from PyTorch."""
    again = write_hugging_face(original, folder, args.dtype)
    if encode(load_tokenizer(str(folder)), texts) != original.sources:
        raise UserError("huggingface: the tokenizer gives other ids when it is loaded again: not written")
    model, sources = original.model, original.sources  # with weights as rounded to --dtype
    if model.can_generate():
        wanted = original.answers = pytorch_answers(model, sources)
        found = {"huggingface": compare("huggingface", wanted, pytorch_answers(again, sources, wanted), 0.0)}
        lines = {"huggingface": described_comparison(found["huggingface"])}
    else:
        wanted, written = encoder_outputs(model, sources), encoder_outputs(again, sources)
        found = {"huggingface": compare_outputs("huggingface", wanted, written, 0.0)}
        lines = {"huggingface": f"{described_within(found['huggingface'])} of PyTorch's in {len(sources)} texts"}
    if args.dtype == INT8:
        found["huggingface"]["weights"] = INT8  # the card says how transformers reads them
    del again
    for kind in [kind for kind in FORMATS if kind in args.formats]:
        print_once(f"writing and comparing {kind}")
        export_format = resolve(FORMATS[kind])
        found[kind], lines[kind] = export_format.write(kind, original, folder / kind)
        written = {path for path in (folder / kind).rglob("*") if path.is_file()}
        unnamed = written - {*named_files(folder / kind, export_format.files).values()}
        assert not unnamed, f"{kind}: its Format does not name {sorted(unnamed)}, so no upload would publish them"
        write_json(folder / kind / COMPARISON, found[kind])
    return found, lines


@exit_on_user_error()
def main(argv: list[str] | None = None) -> dict[str, dict]:
    """Runs the script; returns {format: its comparison with PyTorch}."""
    args, *groups = parse_arguments(DATACLASSES, argv, about=__doc__)
    features = Features(groups)
    check_export(args)
    args = dataclasses.replace(args, **features.decide(Flags(args, *groups)))
    checkpoint = find_checkpoint(args.model_name_or_path)
    folders = (Path(checkpoint), Path(checkpoint).parent)
    run = next((folder for folder in folders if (folder / "run.json").is_file()), folders[0])
    tokenizer, record = find_tokenizer(args, checkpoint), read_run_folder(run)
    step = read_json(folders[0] / "trainer_state.json").get("global_step")
    if run != folders[0] and step is not None:  # a checkpoint-N has other results than its run
        record |= {"results": {}, "metrics": lines_until(record["metrics"], step)}
    texts, texts_from = texts_to_compare(args, record["run"], tokenizer)
    config, others = load_config(checkpoint, "--model_name_or_path"), [kind for kind in FORMATS if kind in args.formats]
    for kind in others:
        resolve(FORMATS[kind]).check(config, kind)
    if args.dtype == INT8 and (lone_part(config) or config.model_type not in DECODERS):
        of_model = lone_part(config) or f"{config.model_type} models"
        raise UserError(f"--dtype {INT8}: not for {of_model}, whose answers need --dtype bfloat16 or float32")
    check_room(config, f"--model_name_or_path {checkpoint}")
    model = (model_source(features).loaded(checkpoint, None) or load_model(checkpoint)).eval()
    fit_vocabulary(model, tokenizer)
    record["run"]["parameters"] = count_parameters(model)  # the run's own count has LoRA's matrices too
    weights = count_parameters(model)
    plan = {"checkpoint": checkpoint, "model": f"{human_count(weights)} parameters"}
    plan["memory"] = (
        f"about {human_bytes(8 * weights)} of the machine's: two models in float32, before and after export"
    )
    plan["compared on"] = f"{len(texts)} texts: {texts_from}"
    for feature in features:
        plan |= feature.plan(args, model)
        record |= feature.record()
    start_summary(plan, title="export")
    with made_aside(Path(args.output_dir), args.overwrite_output_dir) as folder:
        beams = read_record(checkpoint).get("generation_num_beams")
        original = Original(model, tokenizer, encode(tokenizer, texts), num_beams=beams, folder=folders[0])
        found, rows = export_model(args, folder, original, texts)
        for file in (Path(checkpoint) / TASK_RECORD, run / "loss.png"):  # task.json: evaluate_t5.py repeats numbers
            if file.is_symlink():  # of a downloaded run: it may lead to any file of this machine
                print_once(f"{file} is a link, and links are not exported")
            elif file.is_file():
                shutil.copy(file, folder / file.name)
        for uploader in features.of(Uploader):
            uploader.complete(folder, Path(args.output_dir), record, model, found)
    if outgrows_cache(config) and not lone_part(config):
        rows["transformers"] = "generates with use_cache=False alone: the decoder has more layers than the encoder"
    if args.dtype == INT8:
        rows[INT8] = "for answers with --int8; without it every script reads it as float32"
    rows["written to"] = args.output_dir
    for uploader in features.of(Uploader):
        rows |= uploader.exported(Path(args.output_dir), others)
    end_summary(rows, title="exported")
    return found


if __name__ == "__main__":
    prepare_process()
    run_script(main)
