"""Checkpoints that are whole or do not exist: writing, checking and finding them, and what resuming needs.

    _saving/checkpoint-40/   a checkpoint while it is being written
    checkpoint-40/           the same after manifest and fsync: it appears by one rename

A process killed at any moment leaves either no checkpoint-40 or a whole one. If a disk damages it afterwards, the
manifest (common/manifests.py) shows that when a run resumes: the damaged checkpoint is named and skipped.
"""

import contextlib
import json
import os
import pickle
import pkgutil
import re
import shutil
import socket
import tempfile
import zipfile
from pathlib import Path
from typing import IO

import torch
from accelerate.utils import broadcast_object_list, gather_object
from transformers import PretrainedConfig

from arguments.training import T5TrainingArguments
from common.checkpoint_folders import checkpoints_of, damage, newest_whole_checkpoint
from common.command_line import RESUME_NEWEST, check_folder
from common.manifests import MANIFEST, fsync, write_manifest
from common.processes import check_alike, is_first_process, print_once
from common.reports import is_secret, read_json
from constants import TASK_RECORD
from training.output_lock import LOCK, lock_output_dir, unlock_output_dir

SAVING = "_saving"  # below --output_dir; the underscore keeps it out of what is pushed to the Hub
GIVEN_UP = "_given_up-"  # beginning of the name of a checkpoint that the run has resumed before
RUN_FILES = "metrics.jsonl all_results.json run.json loss.png predictions.jsonl trackers.json samples.md README.md"


# ---------------------------------------------------------------- writing
def publish(aside: Path, final: Path) -> None:
    """Makes the finished folder `aside` visible as `final`: manifest, fsync of every file, one rename.

    An earlier `final` is replaced; a crash in between leaves one of the two whole.
    """
    write_manifest(aside)
    if final.exists():
        discard(final)
    aside.rename(final)
    with contextlib.suppress(OSError):  # another program writes there
        aside.parent.rmdir()
    fsync(final.parent)


def discard(checkpoint: Path) -> None:
    """Deletes a checkpoint; a half-deleted one is never visible as a checkpoint."""
    grave = checkpoint.parent / SAVING / f"deleted-{checkpoint.name}"
    shutil.rmtree(grave, ignore_errors=True)
    grave.parent.mkdir(exist_ok=True)
    checkpoint.rename(grave)
    shutil.rmtree(grave, ignore_errors=True)
    with contextlib.suppress(OSError):
        grave.parent.rmdir()


def rotate(newest: Path, keep: int | None, best: str | None) -> None:
    """Deletes the oldest checkpoints until `keep` are left (None: keeps all). The one just written and the best always
    stay. Those of later steps, before which the run has resumed, are damaged or given up, and a next resume would take
    them for its newest: they are deleted, or where all are kept renamed."""
    checkpoints = checkpoints_of(newest.parent)
    place = checkpoints.index(newest)
    for later in checkpoints[place + 1 :]:
        kept = later.with_name(f"{GIVEN_UP}{later.name}")
        what = "deleted" if keep else f"now called {kept.name}"
        print_once(f"{later} is {what}: the run has resumed before it, and {newest.name} is now its newest")
        if keep:
            discard(later)
        else:
            shutil.rmtree(kept, ignore_errors=True)
            later.rename(kept)
    earlier = [c for c in checkpoints[:place] if not best or c != Path(best)]
    surplus = max(0, place + 1 - keep) if keep else 0
    for checkpoint in earlier[:surplus]:
        discard(checkpoint)


# ---------------------------------------------------------------- resuming
def prepare_output_dir(args: T5TrainingArguments) -> str | None:
    """The checkpoint to resume from, or None. ValueError unless `--output_dir` is empty, resumed or overwritten, and
    the checkpoint is complete.

    A job that SLURM or torchrun restarted resumes from its newest whole checkpoint, or starts from step 0 if there is
    none yet. Rank 0 decides for all, and locks the folder if it exists. Nothing is deleted yet: see `old_files`.
    """
    checkpoint = wrong = probe = None
    if is_first_process():
        try:
            check_folder("--output_dir", args.output_dir)
            lock_output_dir(args)
            checkpoint = _checkpoint_to_resume(args)
            check_saved_state(args, checkpoint)
            probe = _probe(args)
        except (ValueError, OSError) as error:
            unlock_output_dir(args)
            wrong = str(error)
    checkpoint, wrong, name = broadcast_object_list([checkpoint, wrong, probe and Path(probe.name).name])
    if wrong is not None:
        raise ValueError(wrong)
    if name:
        with probe or contextlib.nullcontext():  # which deletes the file when all have looked
            _check_shared(Path(args.output_dir).absolute(), name)
    return checkpoint


def _probe(args: T5TrainingArguments) -> IO | None:
    """An empty file in --output_dir, or where it will be made, for the other processes to find until it is closed;
    None where none of them would save or read there."""
    if args.world_size == 1 or args.save_strategy == "no":
        return None
    folder = Path(args.output_dir).absolute()
    there = next(place for place in (folder, *folder.parents) if place.is_dir())
    return tempfile.NamedTemporaryFile(prefix=".t5_shared_", dir=there)


def _check_shared(folder: Path, name: str) -> None:
    """ValueError, on every process, unless all find the file of `_probe` in the folder or above it. Each saves its part
    of a checkpoint there, and reads all of it to resume and to end with the best model."""
    found = any((place / name).exists() for place in (folder, *folder.parents))
    told = gather_object([None if found else socket.gethostname()])
    if blind := sorted({host for host in told if host}):
        raise ValueError(
            f"--output_dir {folder} on {', '.join(blind)} is not the folder that the first process has: "
            "every process saves its part of a checkpoint there, so name a folder on a disk that all "
            "nodes share (without one: --save_strategy no)"
        )


def _checkpoint_to_resume(args: T5TrainingArguments) -> str | None:
    folder = Path(args.output_dir)
    checkpoint = args.resume_from_checkpoint
    if checkpoint and checkpoint not in ("false", "False"):
        if checkpoint in (RESUME_NEWEST, "true", "True"):
            checkpoint = newest_whole_checkpoint(folder)
            if checkpoint is None:
                raise ValueError(f"--resume_from_checkpoint: there is no whole checkpoint-* folder in {folder}")
        elif not Path(checkpoint).is_dir():
            raise ValueError(f"--resume_from_checkpoint {checkpoint}: no such folder")
        elif reason := damage(Path(checkpoint)):
            raise ValueError(f"--resume_from_checkpoint {checkpoint}: not a whole checkpoint: {reason}")
        return str(checkpoint)
    if was_restarted():
        checkpoint = newest_whole_checkpoint(folder)
        print_once(f"restarted: {f'resuming from {checkpoint}' if checkpoint else 'no checkpoint yet, from step 0'}")
        return str(checkpoint) if checkpoint else None
    if folder.is_dir() and {path.name for path in folder.iterdir()} - {LOCK} and not args.overwrite_output_dir:
        raise ValueError(
            f"--output_dir {folder} is not empty: resume with --resume_from_checkpoint, start again with "
            "--overwrite_output_dir, or name another folder"
        )
    return None


def check_saved_state(args: T5TrainingArguments, checkpoint: str | None) -> None:
    """ValueError unless a checkpoint holds the states of optimizer and schedule, and reading them is safe."""
    if checkpoint is None:
        return
    flag, folder = "--resume_from_checkpoint", Path(checkpoint)
    if not (folder / MANIFEST).is_file():
        print_once(f"{folder} has no {MANIFEST}: its files cannot be checked")
    if args.deepspeed:
        saved_by = len(list(folder.glob("global_step*/*_optim_states.pt")))
        if saved_by not in (0, args.world_size):
            raise ValueError(
                f"{flag} {checkpoint}: saved by DeepSpeed on {saved_by} processes, and it resumes on as "
                f"many only, not on {args.world_size}: start {saved_by}, or take only the weights with "
                f"--model_name_or_path {checkpoint}"
            )
        if not args.trust_checkpoint:
            check_deepspeed_files(flag, folder)
    needed = ["global_step*"] if args.deepspeed else ["optimizer.*", "scheduler.pt"]
    missing = [name for name in needed if not any(folder.glob(name))]
    if missing:
        raise ValueError(
            f"{flag} {checkpoint}: it has no {' and no '.join(missing)} (saved with --save_only_model or "
            "another launcher?), without which optimizer and schedule would restart: take only "
            f"the weights with --model_name_or_path {checkpoint}"
        )


# Classes that DeepSpeed puts beside the tensors; they hold numbers.
_OF_DEEPSPEED = (
    "deepspeed.runtime.fp16.loss_scaler:LossScaler",
    "deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler",
    "deepspeed.runtime.zero.config:ZeroStageEnum",
    "deepspeed.utils.tensor_fragment:fragment_address",
)


def check_deepspeed_files(flag: str, folder: Path) -> None:
    """ValueError if DeepSpeed's files below a folder hold more than tensors and plain values: a pickle can run any code
    of its author. transformers and accelerate check their own files; DeepSpeed's engine does not."""
    harmless = list(map(pkgutil.resolve_name, _OF_DEEPSPEED))
    for path in sorted(folder.rglob("*.pt")):
        try:
            with torch.serialization.safe_globals(harmless):
                torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except pickle.UnpicklingError as error:
            called = re.search(r"(?:GLOBAL|function) (\S+)", str(error))
            raise ValueError(
                f"{flag} {path}: reading it would call {called[1] if called else 'something unknown'}, "
                "which can be any code of its author; give --trust_checkpoint if that is you, or someone "
                "you trust"
            ) from None


def check_optimizer_state(checkpoint: str | None, has_fsdp: bool) -> None:
    """ValueError unless a checkpoint's optimizer was saved as this run will read it. It is checked late, since
    accelerate decides whether FSDP2 is used."""
    name = "optimizer.bin" if has_fsdp else "optimizer.pt"
    if checkpoint and not (Path(checkpoint) / name).is_file():
        now, before = ("with", "without") if has_fsdp else ("without", "with")
        raise ValueError(
            f"--resume_from_checkpoint {checkpoint}: it has no {name}: saved {before} FSDP, it cannot be "
            f"resumed {now} it: take only the weights with --model_name_or_path {checkpoint}"
        )


def old_files(args: T5TrainingArguments, checkpoint: str | None) -> list[Path]:
    """The files and folders that this run replaces: those that a killed run left half-written and, unless the run
    resumes, all of an earlier run. [] on ranks other than 0 and for a `--dry_run`."""
    if args.dry_run or not is_first_process():
        return []
    folder = Path(args.output_dir)
    found = [folder / SAVING]
    if checkpoint is None:
        found += [*folder.glob("checkpoint-*"), *folder.glob(f"{GIVEN_UP}*")]
        found += (folder / name for name in (*RUN_FILES.split(), TASK_RECORD))
        found += (folder / "tensorboard").rglob("*.tfevents.*")  # a second run's curves would be drawn over the first
    return [path for path in found if path.exists()]


def delete(old: list[Path]) -> None:
    """Deletes what `old_files` found."""
    for path in old:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=path.name == SAVING)
        else:
            path.unlink(missing_ok=True)


# Fields of the configuration that decide the shapes of the weights, and what the weights mean.
_SHAPE = (
    "model_type d_model d_kv d_ff num_heads num_layers num_decoder_layers vocab_size feed_forward_proj "
    "relative_attention_num_buckets relative_attention_max_distance tie_word_embeddings "
    "hidden_size head_dim intermediate_size num_attention_heads num_key_value_heads num_hidden_layers layer_types "
    "sliding_window"
).split()
# Flags that decide what the optimizer's state belongs to, which examples follow, and how they are corrupted.
_DECISIVE = (
    "optim lora_rank train_only seed data_seed objective input_seq_length noise_density mean_noise_span_length packing "
    "eos_between_documents mixing mixing_cap mixing_temperature train_sampling_strategy length_buckets"
).split()
# Those that decide which part of a text is trained on: its fingerprint covers all of it, a task's its training rows.
_DECIDES_PART = (
    "text_column input_ids_column max_train_samples validation_split_percentage validation_split_count"
).split()
# Flags that may differ between nodes: where files are, and what only the first process does.
_OF_A_NODE = (
    "local_rank output_dir overwrite_output_dir overwrite_cache resume_from_checkpoint report_to disable_tqdm "
    "dataloader_num_workers preprocessing_num_workers"
).split()


def check_same_flags(*groups: object) -> None:
    """ValueError, on every process, unless all were started with the same flags. The path of a file may differ between
    nodes."""
    values = {name: value for group in groups for name, value in vars(group).items()}
    given = [name for group in groups for name in getattr(group, "given", ())]
    names = {*gather_object(given)} - {*_OF_A_NODE}
    shown = {f"--{name}": str(values.get(name)) for name in sorted(names) if not is_secret(name)}
    found = {name: "a file" if os.sep in value else value for name, value in shown.items()}
    check_alike(found, "start the run with the same flags on every node")


def check_resumed(
    checkpoint: str | None, config: PretrainedConfig, fingerprints: dict[str, str], *groups: object
) -> None:
    """ValueError unless all processes have the same data, and a run of this model, data and flags can resume from the
    checkpoint.

    config: of the model. fingerprints: of the data and the tokenizer. groups: the parsed dataclasses. Only what
    run.json beside the checkpoint records is compared.
    """
    check_alike({f"contents of {name}": found for name, found in fingerprints.items()}, "give all nodes the same files")
    if checkpoint is None:
        return
    run, now = run_of(checkpoint), {name: value for group in groups for name, value in vars(group).items()}
    shapes, asked = _flat(_recorded(Path(checkpoint) / "config.json")), _flat(config.to_dict())
    flags, saved = run.get("arguments", {}), run.get("fingerprints", {})
    if flags:
        flags = {"lora_rank": None, "train_only": None} | flags  # which earlier commits lack
    decisive = _DECISIVE + _DECIDES_PART * ("objective" in now)  # a flag of text
    if now.get("length_buckets"):  # each micro-batch is of one bucket
        decisive = [*decisive, "per_device_train_batch_size"]
    keys = [key for name in _SHAPE for key in shapes if key.rpartition(".")[2] == name]
    compared = [(f"the model's {key}", shapes[key], asked.get(key)) for key in keys]
    if saved:
        # Without a validation text a part of the training text is held out.
        had, has = ("yes" if "validation" in found else "no" for found in (saved, fingerprints))
        compared.append(("a validation text of its own", had, has))
    contents = [name for name in ("train", "tokenizer") if name in saved and name in fingerprints]
    compared += [(f"the contents of {name}", saved[name], fingerprints[name]) for name in contents]
    compared += [(f"--{name}", flags[name], now[name]) for name in decisive if name in flags and name in now]
    for what, before, found in compared:
        if before != found:
            raise ValueError(
                f"--resume_from_checkpoint {checkpoint}: {what}: {before} in its run, {found} now: resume "
                "with the flags and files of its run, or take only the weights with --model_name_or_path "
                f"{checkpoint}"
            )


def _flat(config: dict) -> dict:
    """{"a": 1, "encoder": {"a": 2}} -> {"a": 1, "encoder.a": 2}."""
    parts = {key: _flat(value) for key, value in config.items() if isinstance(value, dict)}
    nested = {f"{key}.{name}": value for key, part in parts.items() for name, value in part.items()}
    return {key: value for key, value in config.items() if key not in parts} | nested


def run_of(checkpoint: str | None) -> dict:
    """The run.json beside a checkpoint; {} without a checkpoint, or where there is no such file."""
    return _recorded(Path(checkpoint).parent / "run.json") if checkpoint else {}


def _recorded(path: Path) -> dict:
    """The content of a JSON file; {} if it cannot be read, as beside a checkpoint that was moved or made elsewhere."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}


def was_restarted() -> bool:
    """Whether SLURM requeued this job, or torchrun restarted its workers."""
    counts = (os.environ.get(name, "0") for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))
    return any(count.isdigit() and int(count) > 0 for count in counts)


# ---------------------------------------------------------------- the loss that is being averaged
def save_loss_state(folder: Path, rank: int, state: dict) -> None:
    """Writes the sums that Trainer does not save, so that a resumed run logs the same means: {"running_loss": sum of
    losses since the last log, "total_loss", "last_logged_step"}."""
    (folder / f"loss_state_{rank}.json").write_text(json.dumps(state) + "\n", encoding="utf-8")


def load_loss_state(folder: Path, rank: int, num_ranks: int) -> dict | None:
    """The state of this rank, or the mean over all if the number of ranks has changed. None if it was not saved."""
    states = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("loss_state_*.json"))]
    if not states:
        return None
    if len(states) == num_ranks:
        return json.loads((folder / f"loss_state_{rank}.json").read_text(encoding="utf-8"))
    running = sum(state["running_loss"] for state in states) / len(states)
    return states[0] | {"running_loss": running}
