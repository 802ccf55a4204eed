"""Checkpoints that are whole or do not exist: writing, checking and finding them, and what resuming needs.

    _saving/checkpoint-40/   a checkpoint while it is being written
    checkpoint-40/           the same after manifest and fsync: it appears by one rename

A process killed at any moment leaves either no checkpoint-40 or a whole one. If a disk damages it afterwards, the
manifest (common/whole_folders.py) shows that when a run resumes: the damaged checkpoint is named and skipped.
"""

import contextlib
import dataclasses
import json
import os
import pickle
import random
import socket
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object
from transformers import PretrainedConfig
from transformers.trainer_callback import TrainerState
from transformers.trainer_pt_utils import safe_globals

from constants import TASK_RECORD
from foundry.arguments.text import CORRUPTION_FLAGS
from foundry.arguments.training import T5TrainingArguments, global_batch_size, warmup_of
from foundry.common.errors import UserError
from foundry.common.paths import LOCK, NOT_RESUMED, RESUME_NEWEST, check_folder, is_free, refuse_links
from foundry.common.ranks import check_alike, is_first_process
from foundry.common.reports import code_of_pickle, first_line, is_of, read_json, record_json
from foundry.common.secrets import is_secret
from foundry.common.terminal import print_once
from foundry.common.whole_folders import (
    MANIFEST,
    SAVING,
    TEXTS,
    checkpoint_step,
    checkpoints_of,
    damage,
    discard,
    newest_whole_checkpoint,
)
from foundry.corpora.trained_text import DECIDES_PART, NO_EARLIER, TRAINED_TEXT
from foundry.features import Feature, Features
from foundry.training.output_lock import lock_output_dir, unlock_output_dir
from foundry.training.rows_read import SAVED_AS as ROWS_READ
from foundry.training.rows_read import RowsRead

GIVEN_UP = "_given_up-"  # how a checkpoint is renamed if the run resumes from an earlier one
RUN_FILES = (
    "metrics.jsonl",
    "all_results.json",
    "run.json",
    "loss.png",
    "predictions.jsonl",
    "trackers.json",
    "samples.md",
    "README.md",
    TRAINED_TEXT,
)
LOG_FOLDERS = ("tensorboard", "wandb")  # of trackers


# ---------------------------------------------------------------- deleting
def rotate(newest: Path, keep: int | None, best: str | None) -> None:
    """Deletes the oldest checkpoints until `keep` are left (None or 0: deletes none). The one just written, `newest`,
    and the best one always stay."""
    checkpoints = checkpoints_of(newest.parent)
    earlier = [c for c in checkpoints if c != newest and (not best or c != Path(best))]
    surplus = max(0, len(checkpoints) - keep) if keep else 0
    for checkpoint in earlier[:surplus]:
        discard(checkpoint)


# ---------------------------------------------------------------- resuming
def prepare_output_dir(args: T5TrainingArguments) -> str | None:
    """The checkpoint to resume from, or None. UserError unless `--output_dir` is empty, resumed or overwritten, and
    the checkpoint is whole and readable.

    A job that SLURM, torchrun or a W&B sweep restarted resumes from its newest whole checkpoint; if there is none yet,
    from the one that `--resume_from_checkpoint` names, or from step 0. Rank 0 decides for all, and locks the folder if
    it exists. Nothing is deleted yet: see `old_files`.
    """
    checkpoint = wrong = probe = None
    if is_first_process():
        try:
            check_folder("--output_dir", args.output_dir)
            lock_output_dir(args)
            checkpoint = _checkpoint_to_resume(args)
            check_saved_state(args, checkpoint)
            added_to = LOG_FOLDERS
            if checkpoint:
                added_to += RUN_FILES
            refuse_links(Path(args.output_dir), added_to, " (curves elsewhere: TENSORBOARD_LOGGING_DIR, WANDB_DIR)")
            probe = _probe(args)
        except (ValueError, OSError) as error:
            unlock_output_dir(args)
            wrong = str(error)
    checkpoint, wrong, name = broadcast_object_list([checkpoint, wrong, probe and Path(probe.name).name])
    if wrong is not None:
        raise UserError(wrong)
    if name:
        with probe or contextlib.nullcontext():  # closing it deletes the file, once all processes have looked for it
            _check_shared(Path(args.output_dir).absolute(), name)
    return checkpoint


def _probe(args: T5TrainingArguments) -> IO | None:
    """An empty file in --output_dir or, until that exists, in the nearest folder above it. The other processes look for
    it; closing it deletes it. None if no other process would save or read there."""
    if args.world_size == 1 or args.save_strategy == "no":
        return None
    folder = Path(args.output_dir).absolute()
    existing = next(place for place in (folder, *folder.parents) if place.is_dir())
    return tempfile.NamedTemporaryFile(prefix=".t5_shared_", dir=existing)


def _check_shared(folder: Path, name: str) -> None:
    """UserError in every process unless all of them see the file of `_probe` in the folder or above it. Each process
    saves its part of a checkpoint there, and reads the whole checkpoint to resume or to load the best model."""
    is_seen = any((place / name).exists() for place in (folder, *folder.parents))
    hosts = gather_object([None if is_seen else socket.gethostname()])
    if without := sorted(set(filter(None, hosts))):
        raise UserError(
            f"--output_dir {folder} on {', '.join(without)} is not the folder that the first process has: "
            "every process saves its part of a checkpoint there, so name a folder on a disk that all "
            "nodes share (without one: --save_strategy no)"
        )


def _checkpoint_to_resume(args: T5TrainingArguments) -> str | None:
    folder, checkpoint = Path(args.output_dir), args.resume_from_checkpoint
    if is_restart(folder):  # by the command of its first start: a checkpoint saved since then takes precedence
        newest = newest_whole_checkpoint(folder)
        if newest is not None:
            print_once(f"restarted: resuming from {newest}")
            return str(newest)
        if checkpoint in NOT_RESUMED:
            print_once("restarted: no checkpoint yet, from step 0")
            return None
    if checkpoint not in NOT_RESUMED:
        if checkpoint in (RESUME_NEWEST, "true", "True"):
            checkpoint = newest_whole_checkpoint(folder)
            if checkpoint is None:
                raise UserError(f"--resume_from_checkpoint: there is no whole checkpoint-* folder in {folder}")
        elif not Path(checkpoint).is_dir():
            raise UserError(f"--resume_from_checkpoint {checkpoint}: no such folder")
        elif reason := damage(Path(checkpoint)):
            raise UserError(f"--resume_from_checkpoint {checkpoint}: not a whole checkpoint: {reason}")
        return str(checkpoint)
    if not is_free(folder, [LOCK]) and not args.overwrite_output_dir:
        raise UserError(
            f"--output_dir {folder} is not empty: resume with --resume_from_checkpoint, start again with "
            "--overwrite_output_dir, or name another folder"
        )
    return None


def check_saved_state(args: T5TrainingArguments, checkpoint: str | None) -> None:
    """UserError unless a checkpoint holds the states of optimizer and schedule, and every file that a resume reads can
    be read without running code that the file contains."""
    if checkpoint is None:
        return
    folder = Path(checkpoint)
    if not (folder / MANIFEST).is_file():
        print_once(f"{folder} has no {MANIFEST}: whether its files are whole cannot be checked")
    missing = [name for name in ("optimizer.pt", "scheduler.pt") if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"--resume_from_checkpoint {checkpoint}: it has no {' and no '.join(missing)} (saved with "
            "--save_only_model?), without which optimizer and schedule would restart: take only the weights with "
            f"--model_name_or_path {checkpoint}"
        )
    for pattern, read in _READERS.items():
        for path in sorted(folder.glob(pattern)):
            _check_readable(path, read, f"take only the weights with --model_name_or_path {checkpoint}")
    if "nvme" in str(args.deepspeed and args.hf_deepspeed_config.get_value("zero_optimization.offload_optimizer")):
        raise UserError(
            f"--deepspeed {args.deepspeed}: a run with offload_optimizer to nvme cannot resume, since saved states "
            "cannot be put there: make it cpu"
        )


def _check_readable(path: Path, read: Callable[[Path], object], advice: str) -> None:
    """UserError if a checkpoint's file cannot be read, or if reading it would run code, which a pickle can contain.
    transformers refuses the latter too, but with a traceback."""
    try:
        read(path)
    except Exception as error:  # damaged bytes can make a reader raise anything
        if (problem := code_of_pickle(error)) is None:
            problem = "it is damaged"
            if not isinstance(error, pickle.UnpicklingError):  # torch's message would advise weights_only=False
                problem += f" ({type(error).__name__}: {first_line(error)})"
        raise UserError(f"--resume_from_checkpoint {path}: {problem}; {advice}") from None


def _tensors(path: Path) -> Any:
    """The content of a file of torch.save. Raises an error if it holds more than tensors, plain values and random
    states."""
    with safe_globals():
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))


def _optimizer(path: Path) -> None:
    state = _tensors(path)
    _ = state["state"].keys(), [group["lr"] for group in state["param_groups"]]


def _random_numbers(path: Path) -> None:
    state = _tensors(path)
    random.Random().setstate(state["python"])
    np.random.RandomState().set_state(state["numpy"])
    torch.Generator().set_state(state["cpu"])


def _losses(path: Path) -> None:
    state = read_json(path)
    _ = float(state["running_loss"]), float(state["total_loss"]), int(state["last_logged_step"])
    _ = state["pending_evaluation"] is None or state["pending_evaluation"]["save_was_due"]
    _ = [int(count) for count in RowsRead(**state.get(ROWS_READ, {})).record().values()]


# {file that a resume reads: function that raises an error if it is unreadable}
_READERS: dict[str, Callable[[Path], object]] = {
    "trainer_state.json": TrainerState.load_from_json,
    "loss_state_*.json": _losses,
    f"{TEXTS}/*.json": read_json,
    "optimizer.pt": _optimizer,
    "scheduler.pt": lambda path: _tensors(path).keys(),
    "rng_state*.pth": _random_numbers,
    "pytorch_model*.bin": _tensors,
}


def check_same_features(checkpoint: str | None, features: Features) -> None:
    """UserError if a feature of a resumed run is not as it was in the checkpoint's run."""
    if run := run_of(checkpoint):
        for feature in features.all:
            feature.check_resumed(checkpoint, run)


def old_files(args: T5TrainingArguments, checkpoint: str | None) -> list[Path]:
    """The existing files and folders that this run deletes: the half-written checkpoint of a killed run and, unless
    this run resumes, all files of an earlier run. [] on ranks other than 0 and for a `--dry_run`."""
    if args.dry_run or not is_first_process():
        return []
    folder = Path(args.output_dir)
    paths = [folder / SAVING]
    if checkpoint is None:
        paths += [*folder.glob("checkpoint-*"), *folder.glob(f"{GIVEN_UP}*")]
        paths += (folder / name for name in (*RUN_FILES, TASK_RECORD))
        paths += (folder / "tensorboard").rglob("*.tfevents.*")  # otherwise both runs' curves are drawn as one
    return [path for path in paths if path.exists() or path.is_symlink()]


def give_up_later(output_dir: Path, checkpoint: str) -> None:
    """Renames the checkpoints later than the one from which a run resumes: damaged ones or, if the user named an
    earlier checkpoint, whole ones too. Otherwise the next resume would start from them."""
    resumed, step = Path(checkpoint).resolve(), read_json(Path(checkpoint) / "trainer_state.json")["global_step"]
    for later in checkpoints_of(output_dir):
        if checkpoint_step(later) >= step and later.resolve() != resumed:
            number = 1
            while (kept := _given_up(later, number)).exists():
                number += 1
            print_once(f"{later} is now called {kept.name}: the run resumes before it")
            later.rename(kept)


def _given_up(checkpoint: Path, number: int) -> Path:
    place = f"{number}-" if number > 1 else ""
    return checkpoint.with_name(f"{GIVEN_UP}{place}{checkpoint.name}")


# Fields of config.json that decide the shapes of the weights, and what the weights mean.
_SHAPE = (
    "model_type",
    "d_model",
    "d_kv",
    "d_ff",
    "num_heads",
    "num_layers",
    "num_decoder_layers",
    "vocab_size",
    "feed_forward_proj",
    "relative_attention_num_buckets",
    "relative_attention_max_distance",
    "tie_word_embeddings",
    "hidden_size",
    "head_dim",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "layer_types",
    "sliding_window",
)
# Flags that decide which tensors the optimizer's state is for, which examples come next, how they are corrupted, and
# what their loss is.
_DECISIVE = (
    "optim",
    "train_only",
    "seed",
    "data_seed",
    *CORRUPTION_FLAGS,
    "mixing",
    "mixing_cap",
    "mixing_temperature",
    "train_sampling_strategy",
)
# Flags that may differ between nodes: paths, and settings that change no result.
_OF_A_NODE = (
    "local_rank",
    "output_dir",
    "overwrite_output_dir",
    "overwrite_cache",
    "resume_from_checkpoint",
    "report_to",
    "disable_tqdm",
    "dataloader_num_workers",
    "preprocessing_num_workers",
)


# Flags that may change in a resumed run, whose later steps then are others. (`restore_schedule` compares the rate and
# the weight decay.)
_CHANGES_LATER_STEPS = (
    "final_learning_rate_factor",
    "warmup_start_factor",
    "z_loss",
    "label_smoothing_factor",
    "max_grad_norm",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "bf16",
)


def check_same_flags(*groups: object) -> None:
    """UserError in every process unless all were started with the same flags. Values that are paths may differ between
    nodes. groups: the parsed dataclasses."""
    values = _values_of(groups)
    given: list[str] = []
    for group in groups:
        if isinstance(group, T5TrainingArguments):
            given += group.given
    compared = {}
    for name in sorted({*gather_object(given)} - {*_OF_A_NODE}):
        value = str(values.get(name))
        if not is_secret(name):
            compared[f"--{name}"] = "a file" if os.sep in value else value
    check_alike(compared, "start the run with the same flags on every node")


def _values_of(groups: Iterable[object]) -> dict[str, Any]:
    """{flag: value} of all these dataclasses."""
    values: dict[str, Any] = {}
    for group in groups:
        values |= vars(group)
    return values


def check_resumed(
    checkpoint: str | None, config: PretrainedConfig, fingerprints: dict[str, str], *groups: object
) -> None:
    """UserError unless all processes have the same data, and a run of this model, data and flags can resume from the
    checkpoint.

    config: the model's. fingerprints: hashes of data and tokenizer, by name. groups: the parsed dataclasses. Flags and
    data are compared only as far as the run.json beside the checkpoint records them.
    """
    check_alike({f"contents of {name}": found for name, found in fingerprints.items()}, "give all nodes the same files")
    if checkpoint is None:
        return
    for what, before, found in _compared(checkpoint, config, fingerprints, groups):
        if before != found:
            raise UserError(
                f"--resume_from_checkpoint {checkpoint}: {what}: {before} in its run, {found} now: resume "
                "with the flags and files of its run, or take only the weights with --model_name_or_path "
                f"{checkpoint}"
            )


def _compared(checkpoint: str, config: PretrainedConfig, fingerprints: dict[str, str], groups: tuple) -> list[tuple]:
    """(what, in the run of the checkpoint, now) of all that must be equal, as far as that run has recorded it."""
    run, now = run_of(checkpoint), _values_of(groups)
    flags, saved = run.get("arguments", {}), run.get("fingerprints", {})
    shapes, asked = _flat(_recorded(Path(checkpoint) / "config.json")), _flat(config.to_dict())
    decisive = _DECISIVE
    if "objective" in now:  # pre-training
        decisive += DECIDES_PART  # a task's fingerprint covers only its training rows
    for group in groups:
        if isinstance(group, Feature):
            decisive += tuple(group.decisive)
            defaults = {field.name: field.default for field in dataclasses.fields(group)}
            if flags:  # a run from before the feature had what is its default now
                flags = {name: defaults[name] for name in group.decisive if name in defaults} | flags
    compared = []
    for name in _SHAPE:
        for key in shapes:
            if key.rpartition(".")[2] == name:
                compared.append((f"the model's {key}", shapes[key], asked.get(key)))
    if saved:
        # Without a validation text, a part of the training text is held out.
        had, has = ("yes" if "validation" in found else "no" for found in (saved, fingerprints))
        compared.append(("a validation text of its own", had, has))
    if saved and "copies" in fingerprints:
        compared.append(("copies of held-out documents", saved.get("copies", "on one side"), fingerprints["copies"]))
    if saved and "earlier" in fingerprints:
        had, has = saved.get("earlier", NO_EARLIER), fingerprints["earlier"]
        compared.append(("what --model_name_or_path was trained on before", had, has))
    contents = [name for name in ("train", "tokenizer") if name in saved and name in fingerprints]
    if "train" in contents and saved["train"] != fingerprints["train"] and _knew_a_folder_by_its_name(run, now):
        contents.remove("train")
        print_once(
            f"{checkpoint}: its run knew {now['dataset_name']} by its name: whether it holds the same is not known"
        )
    compared += [(f"the contents of {name}", saved[name], fingerprints[name]) for name in contents]
    compared += [(f"--{name}", flags[name], now[name]) for name in decisive if name in flags and name in now]
    for folder, names in run.get("features", {}).items():  # one that has been deleted since has no flag now
        for name in names:
            if flags.get(name) is not None and name not in now:
                compared.append((f"--{name} of features/{folder}", flags[name], "no such flag"))
    return compared


def _knew_a_folder_by_its_name(run: dict, now: dict) -> bool:
    """Whether a pre-training read a local folder with --dataset_name, and is of a version that knew this by its name
    and its files' times: it did not know what earlier runs were trained on either."""
    name = now.get("dataset_name")
    is_same = "objective" in now and name and name == run.get("arguments", {}).get("dataset_name")
    return bool(is_same and Path(name).is_dir() and "earlier" not in run.get("fingerprints", {}))


def _flat(config: dict) -> dict:
    """{"a": 1, "encoder": {"a": 2}} -> {"a": 1, "encoder.a": 2}."""
    flat, nested = {}, {}
    for key, value in config.items():
        if not isinstance(value, dict):
            flat[key] = value
            continue
        for name, part in _flat(value).items():
            nested[f"{key}.{name}"] = part
    return flat | nested


# {what is read of the run.json beside a checkpoint: its type}
_RUN: dict[str, Any] = dict.fromkeys(("arguments", "fingerprints", "job"), dict)
_RUN |= {"features": dict[str, list], "sequences_per_step": int | None}


def run_of(checkpoint: str | None) -> dict:
    """The run.json beside a checkpoint; {} without a checkpoint, or where there is no such file."""
    return _run_in(Path(checkpoint).parent) if checkpoint else {}


def _run_in(folder: Path) -> dict:
    """The run.json of a folder as `_recorded`. UserError for a value of another type than a run writes."""
    path = folder / "run.json"
    run = _recorded(path)
    for name in _RUN.keys() & run.keys():
        if run[name] is not None and not is_of(run[name], _RUN[name]):
            raise UserError(f"{path}: {name} {run[name]!r:.60}: no run has written this")
    return {name: value for name, value in run.items() if value is not None}


def changed_schedule(checkpoint: str | None, args: T5TrainingArguments, steps: int, dropout: float) -> list[str]:
    """A line for each setting that a resumed run of `steps` steps changes: length, schedule and warm-up (another
    learning rate from here on), sequences per step, number of processes (other random numbers for dropout), and what
    loss and updates depend on. dropout: the model's."""
    if checkpoint is None:
        return []
    state, run = read_json(Path(checkpoint) / "trainer_state.json"), run_of(checkpoint)
    now = {"steps": steps, "schedule": str(args.lr_scheduler_type), "warm-up steps": warmup_of(vars(args), steps)}
    now |= {"sequences per step": global_batch_size(args), "processes": args.world_size}
    before = {"steps": state["max_steps"], "sequences per step": run.get("sequences_per_step")}
    before["processes"] = len(list(Path(checkpoint).glob("loss_state_*.json"))) or None
    if "lr_scheduler_type" in run.get("arguments", {}):
        before["schedule"] = run["arguments"]["lr_scheduler_type"]
        before["warm-up steps"] = warmup_of(run["arguments"], state["max_steps"])
    recorded = run.get("arguments", {})
    for name in _CHANGES_LATER_STEPS:
        now[f"--{name}"], before[f"--{name}"] = vars(args).get(name), recorded.get(name)
    now["dropout"], before["dropout"] = dropout, run.get("dropout", recorded.get("dropout_rate"))
    changed = [name for name, value in now.items() if before.get(name) not in (None, value)]
    return [f"{name}: {now[name]} from here on, {before[name]} before" for name in changed]


def _recorded(path: Path) -> dict:
    """The content of a JSON file; {} if it cannot be read, such as when the checkpoint was moved away from it."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}


def this_job() -> dict[str, str]:
    """Marks of this process's job that stay the same when SLURM, torchrun or a W&B sweep starts it again. run.json
    keeps them."""
    torchrun = os.environ.get("TORCHELASTIC_RUN_ID")
    if torchrun == "none":  # started without --rdzv-id
        import psutil

        began = psutil.Process(os.getppid()).create_time()
        torchrun = f"process {os.getppid()} on {socket.gethostname()}, since {began:.2f}"
    trial = os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None
    marks = {"slurm": os.environ.get("SLURM_JOB_ID"), "torchrun": torchrun, "wandb": trial}
    return {kind: mark for kind, mark in marks.items() if mark}


def is_restart(folder: Path) -> bool:
    """Whether this job was started before, and the run in its --output_dir is its own. An earlier run is another's: a
    job with `--overwrite_output_dir` may have been stopped before it replaced that."""
    counts = {"slurm": "SLURM_RESTART_COUNT", "torchrun": "TORCHELASTIC_RESTART_COUNT"}
    counts = {kind: os.environ.get(name, "0") for kind, name in counts.items()}
    restarted = [kind for kind, count in counts.items() if count.isdigit() and int(count) > 0]
    now, run = this_job(), _run_in(folder)
    if not run:
        return bool(restarted)
    own = run.get("job") or {}
    return any(own.get(kind) == now.get(kind) for kind in [*restarted, *({"wandb"} & now.keys())])


# ---------------------------------------------------------------- the loss that is being averaged
def save_loss_state(folder: Path, rank: int, state: dict, texts: dict | None = None) -> None:
    """Writes what Trainer does not save, so that a resumed run logs the same means: {"running_loss": this rank's sum of
    losses since the last log, "total_loss": sum up to that log, "last_logged_step", "pending_evaluation", and perhaps
    lists of sums, of callbacks of features}. texts: what holds texts of the data or token ids, for the folder
    TEXTS."""
    (folder / f"loss_state_{rank}.json").write_text(json.dumps(state) + "\n", encoding="utf-8")
    if texts:
        (folder / TEXTS).mkdir(exist_ok=True)
        (folder / TEXTS / f"{rank}.json").write_text(json.dumps(texts) + "\n", encoding="utf-8")


def load_loss_state(folder: Path, rank: int, num_ranks: int) -> dict | None:
    """What `save_loss_state` wrote for this rank; if the number of ranks has changed, the first rank's with the means
    of the sums over all ranks. None if nothing was saved."""
    states = [record_json(path) for path in sorted(folder.glob("loss_state_*.json"))]
    if not states:
        return None
    texts = read_json(folder / TEXTS / f"{rank}.json")
    if len(states) == num_ranks:
        return record_json(folder / f"loss_state_{rank}.json") | texts
    mean = {"running_loss": sum(state["running_loss"] for state in states) / len(states)}
    for name, value in states[0].items():
        if isinstance(value, list):
            mean[name] = np.mean([state[name] for state in states], axis=0).tolist()
    return states[0] | mean | texts
