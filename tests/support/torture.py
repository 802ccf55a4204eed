"""Kills real runs at random moments, resumes them, and compares their results with the same run without a stop.

    python tests/support/torture.py --kills 300 --output results/torture.json      (make torture)
    python tests/support/torture.py --kills 30 --only torchrun zero3 full_disks
    python tests/support/torture.py --kills 60 --only told_pre_train told_fine_tune told_mixture told_early_stopping

Every other kill aims at a moment in which a checkpoint is being written. Equal means: the same bytes in
model.safetensors (LoRA: adapter_model.safetensors) and the same numbers in metrics.jsonl, all_results.json and the last
trainer_state.json, apart from times. Each run of one process is forked from this one, which has imported everything:
otherwise each of hundreds of starts takes seconds. Of a run of two ranks all processes are killed at once, as when a
node is lost. A run that is told gets SIGTERM first, and its evaluations may last longer than the ten seconds that it
has until SIGKILL.

Runs are also told to stop at each place of STOPS, such as within an evaluation, and what the stop left out is made up
for. Then the disk becomes full at each of the files that a run writes, each file of a checkpoint is damaged, and wrong
flags and files are drawn (test_fuzz.py), and peaks of memory compared (real_peaks.py). The JSON counts the cases, those
that ended as promised, and what else came.
(Tests import this module; pytest does not collect it.)
"""

import argparse
import contextlib
import errno
import functools
import json
import os
import platform
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: forked processes must not share a thread pool
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from warm_python import OURS, preload, warm_python

import fine_tune_t5
import pre_train_t5
from constants import PREEMPTED_EXIT_CODE
from foundry import trainer_t5
from foundry.common.reports import read_metrics
from foundry.common.whole_folders import SAVING, checkpoints_of, damage, newest_whole_checkpoint
from foundry.training.preemption import PreemptionCallback

ROOT, BIN = Path(__file__).resolve().parents[2], Path(sys.executable).parent
preload(*OURS.split(), "wandb")  # its folders outlive a fork, which ends by os._exit
SCRIPTS = {"pre_train": pre_train_t5.main, "fine_tune": fine_tune_t5.main, "mixture": fine_tune_t5.main}
SCRIPTS |= {"preferences": fine_tune_t5.main, "rewards": fine_tune_t5.main}
ANSWERS = 300  # random searches
PEAKS = "longt5_local plain_sdpa_dropout lora_checkpointing t5gemma_bf16".split()  # cases of real_peaks.py
PEAKS_OFF = 0.08
# Figures of the machine, and of the time between two logs, which a resumed run starts again.
TIMES = ("seconds", "runtime", "per_second", "mfu", "peak_memory_gib", "preparation_time", "seconds_left")
TIMES += ("padding_share",)
TIMES += ("total_flos",)  # under ZeRO-3, whose weights are in pieces, a resumed run counts other operations


class Kind(NamedTuple):
    """A run that is killed: a key of `material`, more flags, where {folder} is that of `material`, and the launcher of
    its two ranks. is_told: by SIGTERM, before it is killed."""

    script: str
    flags: str = ""
    launcher: str | None = None
    is_told: bool = False


# Too high a rate, so that the best evaluation is an early one.
_STOPS = (
    "--learning_rate 0.3 --lr_scheduler_type constant --warmup_steps 0 --eval_steps 2 --load_best_model_at_end true "
)
_STOPS += "--metric_for_best_model loss --early_stopping_patience 3 --save_total_limit 9"
_TWO = "--per_device_train_batch_size 2"
KINDS = {name: Kind(name) for name in "pre_train fine_tune mixture fine_tune_stream preferences rewards".split()}
KINDS |= {"early_stopping": Kind("pre_train", _STOPS), "stream_spans": Kind("pre_train_stream")}
KINDS |= {f"stream_{name}": Kind("pre_train_stream", f"--objective {name}") for name in ("prefix_lm", "ul2")}
KINDS |= {
    "stream_documents": Kind("pre_train_stream", "--packing documents"),
    "ul2": Kind("pre_train", "--objective ul2"),
}
KINDS |= {"muon": Kind("pre_train", "--optim muon"), "packed": Kind("fine_tune", "--packing true")}
KINDS |= {
    "lora": Kind("preferences", "--lora_rank 4"),
    "lora_int8": Kind("preferences", "--lora_rank 4 --load_in_8bit true"),
}
KINDS |= {name: Kind("pre_train", _TWO, name) for name in ("accelerate", "torchrun", "deepspeed")}
KINDS |= {"fine_tune_torchrun": Kind("fine_tune", "--per_device_train_batch_size 8", "torchrun")}
KINDS |= {
    f"zero{n}": Kind("pre_train", f"{_TWO} --deepspeed {ROOT}/zero_stage{n}_config.json", "deepspeed") for n in (2, 3)
}
_TEACHER = "--teacher {folder}/prepared"
KINDS |= {"taught_pre_train": Kind("pre_train_stream", _TEACHER), "taught_fine_tune": Kind("fine_tune", _TEACHER)}
KINDS["taught_on_policy"] = Kind("fine_tune", f"{_TEACHER} --on_policy_share 0.5")
KINDS["taught_once"] = Kind("fine_tune", f"{_TEACHER} --teacher_top_k 5")
_BATCHES = "--per_device_eval_batch_size 8"
KINDS |= {f"told_{name}": Kind(name, _BATCHES, is_told=True) for name in ("pre_train", "fine_tune", "mixture")}
KINDS["told_early_stopping"] = Kind("pre_train", f"{_STOPS} {_BATCHES}", is_told=True)


class Stop(NamedTuple):
    """A run that SIGTERM stops at the end of a step or, if `batch` is set, in this batch of the evaluation after it."""

    script: str
    step: int
    flags: str = ""
    batch: int = 0


_BY_STEPS = "--save_strategy steps --save_steps 7 --load_best_model_at_end false"  # evaluated at the end of an epoch
_PAIRS = "--per_device_eval_batch_size 2"
# 97 rows in batches of 16: epochs of fine-tuning have 7 steps, each with an evaluation at its end.
STOPS = {
    "within_an_epoch": Stop("fine_tune", 10),
    "end_of_an_epoch": Stop("fine_tune", 14),
    "within_an_epoch_saved_by_steps": Stop("fine_tune", 10, _BY_STEPS),
    "end_of_an_epoch_saved_by_steps": Stop("fine_tune", 14, _BY_STEPS),
    "logged_by_epochs": Stop("fine_tune", 10, "--logging_strategy epoch"),
    "evaluated_by_steps": Stop("pre_train", 7, "--max_steps 9"),
    "saved_if_best": Stop("fine_tune", 7, "--save_strategy best"),
    "patience": Stop("pre_train", 6, _STOPS),
    "not_saved_there": Stop("pre_train", 7, f"{_STOPS} --save_steps 14".replace("--eval_steps 2", "--eval_steps 7")),
    "in_an_evaluation_by_steps": Stop("pre_train", 7, f"--max_steps 9 {_PAIRS}", 2),
    "in_an_evaluation_by_epochs": Stop("fine_tune", 14, _PAIRS, 2),
    "in_the_last_evaluation": Stop("pre_train", 14, f"--max_steps 14 {_PAIRS}", 2),
    "in_the_second_evaluation": Stop("mixture", 9, _PAIRS, 25),
    "in_an_evaluation_with_patience": Stop("pre_train", 6, f"{_STOPS} {_PAIRS}", 2),
}


def material(folder: Path) -> dict[str, list[str]]:
    """Writes a small text and a task below `folder`; {script: its command line without --output_dir}."""
    chooser = random.Random(7)
    words = ["".join(chooser.choices("aeiouăbcdlmnrșt", k=chooser.randint(2, 7))) for _ in range(300)]
    lines = [" ".join(chooser.choices(words, k=chooser.randint(20, 60))) for _ in range(500)]
    (folder / "text.txt").write_text("\n".join(lines) + "\n")
    (folder / "CoLA").mkdir()
    for name, number in (("train", 97), ("dev", 40)):  # 97: the last batch of an epoch is not full
        rows = [f"x\t{i % 2}\t\t{chooser.choice(lines)[: 60 + 30 * (i % 2)]}" for i in range(number)]
        (folder / "CoLA" / f"{name}.tsv").write_text("\n".join(rows) + "\n")
    (folder / "SST-2").mkdir()
    for name, number in (("train", 40), ("dev", 20)):
        rows = [f"{chooser.choice(lines)[:50]}\t{i % 2}" for i in range(number)]
        (folder / "SST-2" / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    shape = "d_model=32,d_kv=8,d_ff=48,num_heads=4,num_layers=1,num_decoder_layers=1"
    common = f"--report_to none --disable_tqdm true --data_cache_dir {folder}/cache --config_name tiny "
    common += f"--config_overrides {shape} --dropout_rate 0.1 --logging_steps 3"
    pre_train = f"--train_file {folder}/text.txt --vocab_size 300 --input_seq_length 32 --max_steps 31 "
    pre_train += "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --warmup_steps 0.125 --save_steps 2 "
    pre_train += f"--eval_steps 7 --max_eval_samples 32 {common}"
    fine_tune = f"--benchmark glue --dataset_name cola --data_dir {folder} --tokenizer_name {folder}/tokenizer "
    fine_tune += f"--num_train_epochs 3 --per_device_train_batch_size 16 --eval_strategy epoch {common}"
    mixture = fine_tune.replace("--dataset_name cola", "--dataset_name cola,sst2 --mixing equal --most_unknown 1")
    streaming = f"--streaming true --shuffle_buffer_size 64 --save_steps 2 --tokenizer_name {folder}/tokenizer "
    pre_train_stream = changed(pre_train.split(), *streaming.split())
    del pre_train_stream[(place := pre_train_stream.index("--vocab_size")) : place + 2]
    fine_tune_stream = f"--benchmark text --dataset_name restore_diacritics --train_file {folder}/text.txt {streaming} "
    fine_tune_stream += "--max_piece_length 20 --max_target_length 16 --max_eval_samples 16 --max_steps 31 "
    fine_tune_stream += "--warmup_steps 0.125 --per_device_train_batch_size 8 --gradient_accumulation_steps 2 "
    fine_tune_stream += f"--eval_strategy steps --eval_steps 10 --save_strategy steps --save_total_limit 2 {common} "
    fine_tune_stream += "--load_best_model_at_end false"
    labelled = [{"text": line[:60], "good": line[60:75], "bad": line[75:100], "label": True} for line in lines[:97]]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labelled))
    columns = "--source_column text --target_column good"
    preferences = f"--train_file {folder}/pairs.jsonl --model_name_or_path {folder}/prepared {columns} "
    preferences += "--rejected_column bad --preference dpo --max_target_length 16 --num_train_epochs 2 "
    preferences += "--validation_split_percentage 20 --per_device_train_batch_size 8 --gradient_accumulation_steps 2 "
    preferences += f"--save_strategy steps --save_steps 2 --eval_strategy steps --eval_steps 2 {common}"
    preferences = preferences.replace("--config_name tiny ", "").replace(f"--config_overrides {shape} ", "")
    preferences = preferences.replace("--dropout_rate 0.1 ", "")
    rewards = preferences.replace("--rejected_column bad --preference dpo", "--reward length,sentence_chrf")
    rewards = rewards.replace("/prepared", "/start") + " --reward_method grpo --reward_updates 3 --reward_kl 0.1"
    streams = {"pre_train_stream": pre_train_stream, "fine_tune_stream": fine_tune_stream.split()}
    return (
        {"pre_train": pre_train.split(), "fine_tune": fine_tune.split(), "mixture": mixture.split()}
        | streams
        | {"preferences": preferences.split(), "rewards": rewards.split()}
    )


def changed(argv: list[str], *flags: str) -> list[str]:
    """`argv` with flags added; a flag that stands in it already gets the new value."""
    argv = list(argv)
    for name in (flag for flag in flags if flag.startswith("--") and flag in argv):
        del argv[argv.index(name) : argv.index(name) + 2]
    return [*argv, *flags]


def launcher_command(name: str, python: str | None = None) -> list[str]:
    """The words that start two ranks on this machine, up to the script; python: not set, a warm one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    words = {
        "accelerate": "accelerate launch --multi_gpu --num_processes 2 --main_process_port",
        "torchrun": "torchrun --nproc_per_node 2 --master_port",
        "deepspeed": "deepspeed --num_accelerators 2 --master_port",
    }[name].split()
    return [python or warm_python(), str(BIN / words[0]), *words[1:], port]


def file_of(script: str) -> str:
    """The file of a key of SCRIPTS."""
    return Path(sys.modules[SCRIPTS[script.removesuffix("_stream")].__module__].__file__).name


def start(
    script: str, argv: list[str], log: Path, launcher: str | None = None, prepare: Callable[[], None] | None = None
) -> int:
    """Forks a process that runs main(argv), or the launcher with two ranks of it, with its output in `log`; returns its
    id. prepare: called in that process before."""
    words = [*launcher_command(launcher), str(ROOT / file_of(script)), *argv] if launcher else []
    pid = os.fork()
    if pid:
        return pid
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        if launcher:
            os.setsid()
            path = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
            os.execvpe(words[0], words, os.environ | path)
        if prepare:
            prepare()
        sys.stdout = sys.stderr = os.fdopen(descriptor, "w", buffering=1)  # also where a test runner replaced them
        SCRIPTS[script.removesuffix("_stream")](argv)
        sys.stdout.flush()
        os._exit(0)
    except SystemExit as exit_:
        if isinstance(exit_.code, str):
            print(exit_.code)
        sys.stdout.flush()
        os._exit(exit_.code if isinstance(exit_.code, int) else 1)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def without_times(record: dict) -> dict:
    return {key: value for key, value in record.items() if not key.endswith(TIMES)}


def outcome(output_dir: Path) -> dict:
    """The results of a run that must equal those of another."""
    results = json.loads((output_dir / "all_results.json").read_text())
    state = json.loads((output_dir / "trainer_state.json").read_text())
    return {
        "weights": [file.read_bytes() for file in sorted(output_dir.glob("*model.safetensors"))],
        "metrics": [without_times(line) for line in read_metrics(output_dir / "metrics.jsonl")],
        "results": without_times(results),
        "log_history": [without_times(line) for line in state["log_history"]],
        "steps": state["global_step"],
    }


def is_being_written(saving: Path) -> bool:
    """Whether a checkpoint lies aside; the folder may vanish while we look."""
    try:
        return any(saving.iterdir())
    except FileNotFoundError:
        return False


def going_on(output_dir: Path) -> list[str]:
    """The flag with which the same command resumes in a folder, or starts again."""
    return ["--resume_from_checkpoint"] if newest_whole_checkpoint(output_dir) else ["--overwrite_output_dir"]


def processes_of(log: Path) -> list[int]:
    """The living processes that write into a log: a launcher, its ranks, their data workers."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "fd" / "1").readlink() == log:
                found.append(int(process.name))
    return found


def slow_evaluations() -> None:
    """Makes the evaluations of this process last longer than ten seconds: four for a batch."""
    plain = trainer_t5.T5Trainer.prediction_step

    def slow(trainer, *args, **kwargs):
        time.sleep(4)
        return plain(trainer, *args, **kwargs)

    trainer_t5.T5Trainer.prediction_step = slow


def stop_once(script: str, argv: list[str], output_dir: Path, log: Path, seconds: float, chooser: random.Random) -> int:
    """Starts or resumes a run, sends SIGTERM at a random moment and, at another within ten seconds, SIGKILL, as SLURM
    does. The evaluations of every other run, by chance, last longer than that. (exit code)."""
    slow = chooser.random() < 0.5
    words = [*argv, "--output_dir", str(output_dir), *going_on(output_dir)]
    pid = start(script, words, log, prepare=slow_evaluations if slow else None)
    moments = [chooser.uniform(0.02, 6 if slow else seconds), chooser.uniform(0, chooser.choice([0.5, 10]))]
    for number, moment in zip((signal.SIGTERM, signal.SIGKILL), moments, strict=True):
        deadline = time.monotonic() + moment
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and time.monotonic() < deadline:
            time.sleep(0.002)
        os.kill(pid, number)
    return exit_code(pid)


def kill_once(
    script: str,
    argv: list[str],
    output_dir: Path,
    log: Path,
    seconds: float,
    aimed: bool,
    chooser: random.Random,
    launcher: str | None = None,
) -> tuple[int, bool]:
    """Starts or resumes the run and kills it at a random moment. (exit code, was a checkpoint being written).

    seconds: within which a kill that is not aimed falls; an aimed one waits for a checkpoint that is being written.
    """
    pid = start(script, [*argv, "--output_dir", str(output_dir), *going_on(output_dir)], log, launcher)
    deadline, writing = time.monotonic() + chooser.uniform(0.02, seconds), False
    saves_to_pass = chooser.randint(0, 4)
    saving = output_dir / SAVING
    seen = False
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        writing = is_being_written(saving)
        if aimed and writing and not seen:
            if saves_to_pass == 0:
                time.sleep(chooser.uniform(0, 0.01))
                break
            saves_to_pass -= 1
        if not aimed and time.monotonic() > deadline:
            break
        seen = writing
        time.sleep(0.0005)
    os.kill(pid, signal.SIGKILL)  # the id is not reused before we have waited for it
    code = exit_code(pid)
    while launcher and code < 0 and (others := processes_of(log)):
        for process in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    return code, writing


def torture(folder: Path, name: str, kills: int, seed: int, show=print, flags: tuple[str, ...] = ()) -> dict:
    """Kills runs of a kind until they have survived `kills`. Raises AssertionError if a run ends differently.

    flags: more flags of the script. Returns {"kills", "kills_while_saving", "runs_compared", "seconds_uninterrupted"}.
    """
    kind = KINDS.get(name) or Kind(name)
    script, launcher = kind.script, kind.launcher
    more = kind.flags.format(folder=folder).split()
    argv, log = changed(material_of(folder)[script], *more, *flags), folder / f"{name}.log"
    began = time.monotonic()
    whole = ["--output_dir", str(folder / f"{name}_whole"), "--overwrite_output_dir"]
    code = exit_code(start(script, [*argv, *whole], log, launcher))
    assert code == 0, f"{name} ended with {code}:\n{log.read_text()[-2000:]}"
    seconds, expected = time.monotonic() - began, outcome(folder / f"{name}_whole")
    chooser = random.Random(seed)
    counts = {"kills": 0, "kills_while_saving": 0, "runs_compared": 0, "seconds_uninterrupted": round(seconds, 2)}
    output_dir = folder / f"{name}_killed"
    shutil.rmtree(output_dir, ignore_errors=True)
    while counts["kills"] < kills or counts["runs_compared"] == 0:
        if counts["kills"] >= kills:  # lets the last run finish
            code = exit_code(
                start(script, [*argv, "--output_dir", str(output_dir), *going_on(output_dir)], log, launcher)
            )
        elif kind.is_told:
            code = stop_once(script, argv, output_dir, log, seconds, chooser)
        else:
            aimed = counts["kills"] % 2 == 1
            code, writing = kill_once(script, argv, output_dir, log, seconds, aimed, chooser, launcher)
            counts["kills_while_saving"] += code == -signal.SIGKILL and writing
        expected_codes = (0, -signal.SIGKILL, -signal.SIGTERM, PREEMPTED_EXIT_CODE)[: 4 if kind.is_told else 2]
        assert code in expected_codes, f"{name} ended with {code}:\n{log.read_text()[-2000:]}"
        counts["kills"] += code != 0
        if code == 0:
            found = outcome(output_dir)
            for what in expected:
                assert found[what] == expected[what], f"{what} differs after {counts['kills']} kills; see {log}"
            counts["runs_compared"] += 1
            shutil.rmtree(output_dir)
        show(f"{name}: {counts['kills']} of {kills} kills survived, {counts['runs_compared']} runs equal")
    return counts


@contextlib.contextmanager
def told_at(stop: Stop) -> Iterator[None]:
    """Runs started within get SIGTERM where `stop` says."""
    end_of_step, prediction_step = PreemptionCallback.on_step_end, trainer_t5.T5Trainer.prediction_step
    batches = []

    def at_step(callback, args, state, control, **kwargs):
        callback._received = signal.SIGTERM if state.global_step == stop.step and not stop.batch else None
        end_of_step(callback, args, state, control, **kwargs)

    def at_batch(trainer, *args, **kwargs):
        if stop.batch and trainer.state.global_step == stop.step and trainer.is_in_train:
            batches.append(stop.step)
            trainer.preemption._received = signal.SIGTERM if len(batches) == stop.batch else None
        return prediction_step(trainer, *args, **kwargs)

    with (
        mock.patch.object(PreemptionCallback, "on_step_end", at_step),
        mock.patch.object(trainer_t5.T5Trainer, "prediction_step", at_batch),
    ):
        yield


@contextlib.contextmanager
def killed_at(step: int) -> Iterator[None]:
    """Runs started within end at once when a step begins, with exit code 9."""
    training_step = trainer_t5.T5Trainer.training_step

    def killed(trainer, *args, **kwargs):
        if trainer.state.global_step == step:
            os._exit(9)
        return training_step(trainer, *args, **kwargs)

    with mock.patch.object(trainer_t5.T5Trainer, "training_step", killed):
        yield


def stopped(folder: Path, name: str, seed: int = 0, show=print) -> dict:  # noqa: ARG001 (nothing is drawn)
    """A run of STOPS is stopped, resumed and compared with the whole one; what the stop left out is made up for once.

    A stop in an evaluation comes twice, and then a kill when the evaluation is written but no checkpoint.
    AssertionError if a run ends differently. {"stops"}.
    """
    stop = STOPS[name]
    argv, log = changed(material_of(folder)[stop.script], *stop.flags.split()), folder / f"stop_{name}.log"

    def run(code: int, out: str, *flags: str) -> None:
        found = exit_code(start(stop.script, [*argv, "--output_dir", str(folder / out), *flags], log))
        assert found == code, f"{name} ended with {found}, not {code}:\n{log.read_text()[-2000:]}"

    shared = next(one for one, other in STOPS.items() if (other.script, other.flags) == (stop.script, stop.flags))
    whole = f"whole_of_{shared}"
    if not (folder / whole / "all_results.json").is_file():
        run(0, whole)
    expected, out = outcome(folder / whole), f"stopped_{name}"
    with told_at(stop):
        run(PREEMPTED_EXIT_CODE, out)
        if stop.batch:
            run(PREEMPTED_EXIT_CODE, out, "--resume_from_checkpoint")
    said = f"after step {stop.step} of"
    assert log.read_text().count(said) == 1 + bool(stop.batch), f"{name}: not {said!r}: {log.read_text()[-2000:]}"
    evaluated = [line["step"] for line in read_metrics(folder / out / "metrics.jsonl") if "eval_loss" in line]
    assert stop.step not in evaluated, f"{name}: the evaluation of step {stop.step} was not to be made"
    if stop.batch:
        assert "in its evaluation" in log.read_text(), log.read_text()[-2000:]
        if expected["steps"] > stop.step:
            with killed_at(stop.step):
                run(9, out, "--resume_from_checkpoint")
    for _ in ("resumed", "resumed when it was finished"):
        run(0, out, "--resume_from_checkpoint")
        found = outcome(folder / out)
        for what in expected:
            assert found[what] == expected[what], f"{name}: {what} differs; see {log}"
    show(f"{name}: equal")
    return {"stops": 1 + bool(stop.batch)}


def material_of(folder: Path) -> dict[str, list[str]]:
    """`material`, made once per folder."""
    if not (folder / "commands.json").is_file():
        commands = material(folder)
        first = changed(commands["pre_train"], "--output_dir", str(folder / "prepared"), "--max_steps", "1")
        # Not a fork of this process: sentencepiece, once used in it, would crash there.
        subprocess.run([warm_python(), pre_train_t5.__file__, *first], check=True, capture_output=True)
        left_out = shutil.ignore_patterns("run.json", "checkpoint-*")  # rewards refuse what our pre-training wrote
        shutil.copytree(folder / "prepared", folder / "start", ignore=left_out)
        (folder / "tokenizer").mkdir()
        for path in (folder / "prepared").glob("*token*"):
            shutil.copy(path, folder / "tokenizer")
        (folder / "commands.json").write_text(json.dumps(commands))
    return json.loads((folder / "commands.json").read_text())


# ---------------------------------------------------------------- disks and damage
def small(folder: Path, script: str, last: int) -> list[str]:
    """The command of a run of `last` steps that writes a checkpoint at every other one."""
    steps = f"--max_steps {last} --save_strategy steps --save_steps 2 --eval_strategy steps --eval_steps 2"
    argv = changed(material_of(folder)[script], *steps.split(), "--save_total_limit", "9", "--num_train_epochs", "1")
    return argv[:-2]  # --max_steps decides


def full_from(number: int, below: Path, counted: Path) -> None:
    """From here on the disk of a folder is full for the file number `number` that this process writes there, and for
    all later ones; 0: never. counted: a file that holds their number so far."""
    import safetensors.torch
    import torch

    count = 0

    def hook(event, args):
        nonlocal count
        path, mode, flags = (*args, None, None, None)[:3] if event == "open" else (None, None, None)
        writes = any(letter in (mode or "") for letter in "wax+") or (mode is None and (flags or 0) & os.O_ACCMODE)
        if isinstance(path, str | bytes) and writes and os.fsdecode(path).startswith(f"{below}{os.sep}"):
            if Path(os.fsdecode(path)).name == ".lock":
                return
            count += 1
            counted.write_text(str(count))
            if number and count >= number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def told(act, place: int):
        @functools.wraps(act)
        def write(*args, **kwargs):  # which Python does not see: it writes in another language
            target = args[place] if len(args) > place else kwargs.get("filename", kwargs.get("f"))
            if isinstance(target, str | os.PathLike):
                sys.audit("open", os.fspath(target), "w", 0)
            return act(*args, **kwargs)

        return write

    sys.addaudithook(hook)
    torch.save, safetensors.torch.serialize_file = told(torch.save, 1), told(safetensors.torch.serialize_file, 1)


def full_disks(folder: Path, script: str, seed: int, show=print) -> dict:  # noqa: ARG001 (nothing is drawn)
    """The disk is full from each of the files on that a run writes; then there is room, and the same command goes on.

    As promised: exit code 0, or 1 or 2 and a line about the room; no half checkpoint; the resumed run ends equal.
    """
    argv, log, counted = small(folder, script, 3), folder / f"full_{script}.log", folder / f"count_{script}"

    def run(out: Path, number: int, *flags: str) -> tuple[int, str]:
        prepare = functools.partial(full_from, number, out, counted)
        size = log.stat().st_size if log.exists() else 0
        code = exit_code(start(script, [*argv, "--output_dir", str(out), *flags], log, prepare=prepare))
        return code, log.read_bytes()[size:].decode(errors="replace")

    code, text = run(folder / f"{script}_disk_whole", 0)
    assert code == 0, text[-2000:]
    expected, files = outcome(folder / f"{script}_disk_whole"), int(counted.read_text())
    wrong = []
    for number in range(1, files + 1):
        out = folder / f"{script}_disk"
        shutil.rmtree(out, ignore_errors=True)
        code, text = run(out, number)
        problem = None
        if code not in (0, 1, 2) or "Traceback" in text:
            problem = f"exit code {code}: {text[-600:]}"
        elif code and not re.search("No space left|no room", text):
            problem = f"exit code {code} without a word of the room: {text[-300:]}"
        elif broken := [str(path) for path in checkpoints_of(out) if damage(path)]:
            problem = f"damaged {broken}"
        else:
            code, text = run(out, 0, *(going_on(out) if out.exists() else []))
            same = code == 0 and outcome(out)["weights"] == expected["weights"]
            problem = None if same else f"resumed: exit code {code}: {text[-300:]}"
        wrong += [f"file {number}: {problem}"] if problem else []
        show(f"full disk, {script}: file {number} of {files}{': ' + problem if problem else ''}")
    return {"full_disks": files, "as_promised": files - len(wrong), "others": wrong}


def damaged(folder: Path, script: str, seed: int, show=print) -> dict:
    """Each file of a checkpoint is cut, changed, emptied or deleted. As promised: the run names it, takes the one
    before, and ends equal."""
    argv, log, chooser = small(folder, script, 4), folder / f"damaged_{script}.log", random.Random(seed)
    whole, out = folder / f"{script}_damage_whole", folder / f"{script}_damage"
    code = exit_code(start(script, [*argv, "--output_dir", str(whole)], log))
    assert code == 0, log.read_text()[-2000:]
    expected, last = outcome(whole), checkpoints_of(whole)[-1]
    files, wrong = sorted(path for path in last.rglob("*") if path.is_file()), []
    for path in files:
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(whole, out)
        victim = out / path.relative_to(whole)
        data = bytearray(victim.read_bytes())
        how = chooser.choice(["cut", "changed", "emptied", "deleted"] if data else ["deleted"])
        if how == "changed":
            data[chooser.randrange(len(data))] ^= 1 << chooser.randrange(8)
        victim.write_bytes({"cut": data[: len(data) // 2], "changed": data}.get(how, b""))
        if how == "deleted":
            victim.unlink()
        size = log.stat().st_size
        code = exit_code(start(script, [*argv, "--output_dir", str(out), "--resume_from_checkpoint"], log))
        text = log.read_bytes()[size:].decode(errors="replace")
        good = code == 0 and last.name in text and outcome(out)["weights"] == expected["weights"]
        wrong += [] if good else [f"{path.name} {how}: exit code {code}: {text[-400:]}"]
        show(f"damaged, {script}: {path.name} {how}{'' if good else ': NOT as promised'}")
    return {"damaged_checkpoints": len(files), "as_promised": len(files) - len(wrong), "others": wrong}


def bad_inputs(seed: int, cases: int) -> dict:
    """Wrong flags, shapes and files (test_fuzz.py), `cases` of flags and of files each."""
    environment = os.environ | {"T5_FUZZ_SEED": str(seed), "T5_FUZZ_CASES": str(cases)}
    names = "test_flags or test_shapes or test_mutations"
    command = [sys.executable, "-m", "pytest", "-q", "-k", names, str(ROOT / "tests" / "slow" / "test_fuzz.py")]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    wrong = [
        line for line in done.stdout.splitlines() if re.match(r"E +(AssertionError: .*)?(case \d+|\w+=.*): ", line)
    ]
    drawn = 2 * cases + cases // 2
    return {"bad_inputs": drawn, "as_promised": drawn - len(wrong) if done.returncode in (0, 1) else 0, "others": wrong}


def same_answers(folder: Path, seed: int, show=print) -> dict:  # noqa: ARG001 (it makes its own models)
    """Random models and searches (test_decoding.py): the loop of our own must find the answers of `generate`."""
    environment = os.environ | {"T5_FUZZ_SEED": str(seed), "T5_FUZZ_CASES": str(ANSWERS)}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-k", "RandomSearches"]
    command.append(str(ROOT / "tests" / "unit" / "test_decoding.py"))
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    wrong = re.findall(r"case \d+: .*", done.stdout)[:1]
    return {"searches": ANSWERS, "failed": done.stdout[-3000:] if done.returncode else "", "others": wrong}


def real_peaks(folder: Path, seed: int = 0, show=print) -> dict:  # noqa: ARG001 (nothing is drawn)
    """Peaks of real processes are within PEAKS_OFF of the memory plan's counts. {"peaks"}."""
    from real_peaks import compare

    found = compare(PEAKS)
    assert all(abs(row["off"]) <= PEAKS_OFF for row in found.values()), found
    return {"peaks": len(found)}


def main() -> None:
    others = {
        f"{name}_{script}": functools.partial(act, script=script)
        for name, act in (("full_disks", full_disks), ("damaged", damaged))
        for script in ("pre_train", "fine_tune")
    }
    others["real_peaks"] = real_peaks
    others |= {f"stop_{name}": functools.partial(stopped, name=name) for name in STOPS}
    others["same_answers"] = same_answers
    names = [*KINDS, *others, "bad_inputs"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300, help="SIGKILLs in all, shared out among the kinds of runs")
    parser.add_argument("--inputs", type=int, default=500, help="wrong flags, and as many wrong files")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the moments")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", default=names, help=", ".join(names))
    parser.add_argument("--output", type=Path, help="JSON file for the counts")
    options = parser.parse_args()
    print(f"seed {options.seed}")
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {platform.system()}"
    record = {"commit": commit.strip(), "machine": machine, "seed": options.seed}
    kinds = [name for name in KINDS if name in options.only]
    with tempfile.TemporaryDirectory(prefix="t5_torture_") as place:
        folder = Path(place)
        for name in options.only:
            began = time.monotonic()
            try:
                if name in kinds:
                    record[name] = torture(folder, name, -(-options.kills // len(kinds)), options.seed)
                elif name in others:
                    record[name] = others[name](folder, seed=options.seed)
                else:
                    record[name] = bad_inputs(options.seed, options.inputs)
            except AssertionError as error:
                record[name] = {"failed": str(error)[-3000:]}
            record[name]["seconds"] = round(time.monotonic() - began)
            print(json.dumps({name: record[name]}), flush=True)
            if options.output:
                options.output.parent.mkdir(parents=True, exist_ok=True)
                options.output.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(
        any(result.get("failed") or result.get("others") for result in record.values() if isinstance(result, dict))
    )


if __name__ == "__main__":
    main()
