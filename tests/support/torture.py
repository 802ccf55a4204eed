"""Kills real runs at random moments, resumes them, and compares what they end with to the same run never stopped.

    python tests/support/torture.py --kills 200 --output results/torture.json      (make torture)

Every other kill is aimed at a moment in which a checkpoint is being written. Equal means: the same bytes in
model.safetensors and the same numbers in metrics.jsonl, all_results.json and the closing trainer_state.json, apart from
times. Each run is a process forked from this one, which has imported everything: hundreds of starts cost seconds each
otherwise. (Tests import this module; pytest does not collect it.)
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: forked processes must not share a thread pool
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from warm_python import preload, warm_python

import fine_tune_t5
import pre_train_t5
from common.checkpoint_folders import newest_whole_checkpoint
from common.reports import read_metrics
from training.checkpoints import SAVING

preload("wandb")  # whose folders a fork leaves as they are: it ends by os._exit
SCRIPTS = {"pre_train": pre_train_t5.main, "fine_tune": fine_tune_t5.main, "mixture": fine_tune_t5.main}
# Figures of the machine, and of the stretch between two logs, which a resumed run begins anew.
TIMES = ("seconds", "runtime", "per_second", "mfu", "peak_memory_gib", "preparation_time", "seconds_left")
TIMES += ("padding_share",)


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
    fine_tune += f"--num_train_epochs 4 --per_device_train_batch_size 16 --eval_strategy epoch {common}"
    mixture = fine_tune.replace("--dataset_name cola", "--dataset_name cola,sst2 --mixing equal")
    streaming = f"--streaming true --shuffle_buffer_size 64 --save_steps 2 --tokenizer_name {folder}/tokenizer "
    pre_train_stream = changed(pre_train.split(), *streaming.split())
    del pre_train_stream[(place := pre_train_stream.index("--vocab_size")) : place + 2]
    fine_tune_stream = f"--benchmark text --dataset_name restore_diacritics --train_file {folder}/text.txt {streaming} "
    fine_tune_stream += "--max_piece_length 20 --max_target_length 16 --max_eval_samples 16 --max_steps 31 "
    fine_tune_stream += "--warmup_steps 0.125 --per_device_train_batch_size 8 --gradient_accumulation_steps 2 "
    fine_tune_stream += f"--eval_strategy steps --eval_steps 10 --save_strategy steps --save_total_limit 2 {common} "
    fine_tune_stream += "--load_best_model_at_end false"
    streams = {"pre_train_stream": pre_train_stream, "fine_tune_stream": fine_tune_stream.split()}
    return {"pre_train": pre_train.split(), "fine_tune": fine_tune.split(), "mixture": mixture.split()} | streams


def changed(argv: list[str], *flags: str) -> list[str]:
    """`argv` with flags added; a flag that stands in it already gets the new value."""
    argv = list(argv)
    for name in (flag for flag in flags if flag.startswith("--") and flag in argv):
        del argv[argv.index(name) : argv.index(name) + 2]
    return [*argv, *flags]


def start(script: str, argv: list[str], log: Path) -> int:
    """Forks a process that runs main(argv) with its output in `log`; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = sys.stderr = os.fdopen(descriptor, "w", buffering=1)  # also where a test runner replaced them
        SCRIPTS[script.removesuffix("_stream")](argv)
        sys.stdout.flush()
        os._exit(0)
    except SystemExit as exit_:
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
    """What must be equal at the end of two runs."""
    results = json.loads((output_dir / "all_results.json").read_text())
    state = json.loads((output_dir / "trainer_state.json").read_text())
    return {
        "weights": (output_dir / "model.safetensors").read_bytes(),
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


def kill_once(script: str, argv: list[str], output_dir: Path, log: Path, seconds: float, aimed: bool,
              chooser: random.Random, number: int = signal.SIGKILL) -> tuple[int, bool]:  # fmt: skip
    """Starts or resumes the run and sends it `number` at a random moment. (exit code, was a checkpoint being written).

    seconds: within which a kill that is not aimed falls; an aimed one waits for a checkpoint that is being written.
    """
    going_on = ["--resume_from_checkpoint"] if newest_whole_checkpoint(output_dir) else ["--overwrite_output_dir"]
    pid = start(script, [*argv, "--output_dir", str(output_dir), *going_on], log)
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
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    return exit_code(pid), writing


def torture(folder: Path, script: str, kills: int, seed: int, show=print, flags: tuple[str, ...] = ()) -> dict:
    """Kills runs of a script until `kills` have been survived. Raises AssertionError where a run ends differently.

    flags: more flags of the script. Returns {"kills", "kills_while_saving", "runs_compared", "seconds_uninterrupted"}.
    """
    argv, log = changed(material_of(folder)[script], *flags), folder / f"{script}.log"
    began = time.monotonic()
    code = exit_code(
        start(script, [*argv, "--output_dir", str(folder / f"{script}_whole"), "--overwrite_output_dir"], log)
    )
    assert code == 0, f"{script} ended with {code}:\n{log.read_text()[-2000:]}"
    seconds, expected = time.monotonic() - began, outcome(folder / f"{script}_whole")
    chooser = random.Random(seed)
    counts = {"kills": 0, "kills_while_saving": 0, "runs_compared": 0, "seconds_uninterrupted": round(seconds, 2)}
    output_dir = folder / f"{script}_killed"
    shutil.rmtree(output_dir, ignore_errors=True)
    while counts["kills"] < kills or counts["runs_compared"] == 0:
        if counts["kills"] >= kills:  # let the last one finish
            going_on = "--resume_from_checkpoint" if newest_whole_checkpoint(output_dir) else "--overwrite_output_dir"
            code = exit_code(start(script, [*argv, "--output_dir", str(output_dir), going_on], log))
        else:
            aimed = counts["kills"] % 2 == 1
            code, writing = kill_once(script, argv, output_dir, log, seconds, aimed, chooser)
            counts["kills_while_saving"] += code == -signal.SIGKILL and writing
        assert code in (0, -signal.SIGKILL), f"{script} ended with {code}:\n{log.read_text()[-2000:]}"
        counts["kills"] += code == -signal.SIGKILL
        if code == 0:
            found = outcome(output_dir)
            for name in expected:
                assert found[name] == expected[name], f"{name} differs after {counts['kills']} kills; see {log}"
            counts["runs_compared"] += 1
            shutil.rmtree(output_dir)
        show(f"{script}: {counts['kills']} of {kills} kills survived, {counts['runs_compared']} runs equal")
    return counts


def material_of(folder: Path) -> dict[str, list[str]]:
    """`material`, made once per folder."""
    if not (folder / "commands.json").is_file():
        commands = material(folder)
        first = changed(commands["pre_train"], "--output_dir", str(folder / "prepared"), "--max_steps", "1")
        # Not a fork of this process: sentencepiece, once used in it, would crash there.
        subprocess.run([warm_python(), pre_train_t5.__file__, *first], check=True, capture_output=True)
        (folder / "tokenizer").mkdir()
        for path in (folder / "prepared").glob("*token*"):
            shutil.copy(path, folder / "tokenizer")
        (folder / "commands.json").write_text(json.dumps(commands))
    return json.loads((folder / "commands.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="SIGKILLs in all, shared out among the scripts")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the moments")
    parser.add_argument("--output", type=Path, help="JSON file for the counts")
    options = parser.parse_args()
    print(f"seed {options.seed}")
    record = {"seed": options.seed}
    with tempfile.TemporaryDirectory(prefix="t5_torture_") as folder:
        for script in (commands := material_of(Path(folder))):
            record[script] = torture(Path(folder), script, -(-options.kills // len(commands)), options.seed)
            print(json.dumps({script: record[script]}))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
