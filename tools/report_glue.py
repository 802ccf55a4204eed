"""GLUE from one checkpoint: fine-tunes every task with several seeds and writes the usual table of results.

    python -m tools.report_glue --model_name_or_path google/t5-v1_1-base
    python -m tools.report_glue --model_name_or_path out/pre_train --data_dir glue --tasks cola sst2 rte --seeds 1 2 3
    python -m tools.report_glue --model_name_or_path out/base --data_dir glue -- --num_train_epochs 3 --optim adafactor
    python -m tools.report_glue --predictions out/predict_all     # of evaluate_t5.py --task glue/all --do_predict

Flags after -- go to fine_tune_t5.py unchanged (a recipe comes first). The runs follow one after the other, each with a
log next to its folder. The same command resumes: finished runs are not repeated, an unfinished one resumes from its
newest checkpoint. Cost: the sum of the runs (--dry_run prints their commands).

Writes into --output_dir, again after each run: glue.md and glue.csv (the table), glue.json (every number, seed and
command) and glue.png; at the end best/<task> (each task's best seed) and, of the answers of evaluate_t5.py,
submission/submission.zip for GLUE's server. With --predictions it only writes submission.zip of answers that are there.
The numbers are those of the development sets, on which each run also chose its best epoch,
x 100, as mean and standard deviation (n - 1) over seeds. A task's score is the mean of its metrics as GLUE defines it:
Matthews alone for CoLA, both sets of MNLI. The average of the tasks is given with WNLI, as GLUE's server has it, and
without it, as in BERT's paper: WNLI's development sentences contradict its training set, and T5 does not train on it
either.
"""

import csv
import dataclasses
import itertools
import json
import shlex
import statistics
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, STDOUT

if not __package__:  # started by its path: Python then looks beside this file alone for modules
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from constants import DATASET_VALS, PREEMPTED_EXIT_CODE
from foundry.arguments.model import ModelArguments
from foundry.arguments.task import TaskArguments, check_tasks
from foundry.arguments.training import FineTuningArguments
from foundry.common.command_line import exit_on_user_error, parse_arguments
from foundry.common.errors import UserError
from foundry.common.flags import option, refuse
from foundry.common.paths import check_folder, is_free, refuse_links
from foundry.common.processes import one_line, run_command, run_script, say
from foundry.common.reports import end_summary, first_line, read_json, start_summary, write_aside, write_json
from foundry.common.secrets import without_secrets
from foundry.common.whole_folders import newest_whole_checkpoint
from tasks.registry import eval_splits, test_splits, value_of_text
from tasks.rows import load_rows
from tools.seed_scores import draw_scores, mean_and_deviation

HERE = Path(__file__).resolve().parents[1]
GLUE = DATASET_VALS["glue"]
TASKS = [name for name, task in GLUE.items() if "train_with" not in task]
# Flags of fine_tune_t5.py that the report sets.
OURS = (
    "task",
    "benchmark",
    "dataset_name",
    "seed",
    "output_dir",
    "overwrite_output_dir",
    "resume_from_checkpoint",
    "model_name_or_path",
    "data_dir",
    "train_file",
    "validation_file",
    "metric_for_best_model",
)
UNSCORED = {("cola", "accuracy")}  # shown, but left out of GLUE's score
WANTED_AS_WORDS = ("mnli", "ax", "qnli", "rte")  # the server takes the label's words; the other classes as 0 and 1
SHORT = {"matthews_correlation": "Matthews", "pearson": "Pearson", "spearman": "Spearman", "f1": "F1"}


@dataclass
class ReportArguments:
    """What is reported."""

    _argument_group_name = "report (flags of fine_tune_t5.py follow after --)"

    model_name_or_path: str | None = option(None, "Checkpoint that all runs start from: a folder or a Hub name.")
    tasks: list[str] = option(TASKS, "Tasks of GLUE. AX is answered by the best model of mnli.", choices=TASKS)
    seeds: list[int] = option([1, 2, 3], "One run for each task and seed.", at_least=0)
    data_dir: str | None = option(None, "Folder with GLUE's own files. Not set: the Hub.")
    output_dir: str = option("out/glue_report", "Folder of runs, table and submission.")
    submission: bool = option(True, "Predict the test sets with each task's best seed.")
    report_only: bool = option(False, "Only write the table of the finished runs.")
    predictions: str | None = option(
        None, "Only write submission.zip into this folder of evaluate_t5.py --task glue/all --do_predict."
    )
    dry_run: bool = option(False, "Print the commands and run nothing.")


@dataclass
class GlueRun:
    """One task with one seed. Next to its folder are <folder>.json, which holds its flags, and <folder>.log."""

    task: str
    seed: int
    folder: Path
    flags: list[str]

    @property
    def shown_flags(self) -> list[str]:
        """The flags as files and the screen may show them."""
        return without_secrets(self.flags)

    def results(self) -> dict:
        """all_results.json of the finished run, else {}."""
        return read_json(self.folder / "all_results.json")


# ---------------------------------------------------------------- flags
def parse_report(argv: list[str] | None) -> tuple[ReportArguments, list[str], TaskArguments]:
    """The report's flags, those of fine_tune_t5.py unchanged, and the flags of the data among them; all checked."""
    argv = list(sys.argv[1:] if argv is None else argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    (args,) = parse_arguments([ReportArguments], argv[:cut], about=__doc__)
    more = argv[cut + 1 :]
    if args.predictions:
        refuse(
            args,
            "model_name_or_path data_dir report_only dry_run",
            "has no effect with --predictions, which trains nothing",
        )
        return args, more, TaskArguments()
    names = [word.removeprefix("--").split("=")[0].replace("-", "_") for word in more if word.startswith("--")]
    for name in names:
        if name in OURS:
            hint = f"; give --{name} before the --" if hasattr(args, name) else ""
            raise UserError(f"-- --{name}: the report sets it for each run{hint}")
    if not args.model_name_or_path and "config_name" not in names:
        raise UserError(
            "--model_name_or_path: the checkpoint to start from is missing (-- --config_name: from scratch)"
        )
    for flag, values in (("tasks", args.tasks), ("seeds", args.seeds)):
        if len(set(values)) < len(values):
            raise UserError(f"--{flag} {' '.join(map(str, values))}: one of them occurs twice")
    check_folder("--output_dir", args.output_dir)
    groups = [ModelArguments, TaskArguments, FineTuningArguments]
    _, task_args, training_args = parse_arguments(groups, run_flags(args, more, "cola", 0, Path("x")))
    for name in ("dry_run", "assume_gpu"):
        if getattr(training_args, name):
            hint = "; give --dry_run before the --" if name == "dry_run" else ""
            raise UserError(f"-- --{name}: such a run trains no model, and the report has no numbers of it{hint}")
    if training_args.eval_strategy == "no":
        raise UserError("-- --eval_strategy no: the report is made of the evaluations. Leave it out")
    return args, more, task_args


def run_flags(args: ReportArguments, more: list[str], task: str, seed: int, folder: Path) -> list[str]:
    """The command line of one run of fine_tune_t5.py."""
    recipe = more[:1] if more and not more[0].startswith("-") else []
    flags = ["--benchmark", "glue", "--dataset_name", task, "--seed", str(seed), "--output_dir", str(folder)]
    for name in ("model_name_or_path", "data_dir"):
        if getattr(args, name):
            flags += [f"--{name}", getattr(args, name)]
    quiet = [] if any(word.startswith("--report_to") for word in more) else ["--report_to", "none"]
    return [*recipe, *flags, *more[len(recipe) :], *quiet]


def planned_runs(args: ReportArguments, more: list[str]) -> list[GlueRun]:
    """All runs, seed after seed, so that the table is complete early. UserError if one was made with other flags, or
    if what is written leads out of --output_dir."""
    runs = []
    refuse_links(Path(args.output_dir), ("best", "submission", *args.tasks))
    for seed, task in itertools.product(args.seeds, args.tasks):
        folder = Path(args.output_dir) / task / f"seed_{seed}"
        refuse_links(folder.parent, (folder.name, f"{folder.name}.log"))
        run = GlueRun(task, seed, folder, run_flags(args, more, task, seed, folder))
        record = folder.with_suffix(".json")
        begun = record.is_file() and (run.results() or newest_whole_checkpoint(folder, with_optimizer=True))
        if begun and read_json(record).get("flags") != run.shown_flags:
            raise UserError(
                f"--output_dir {args.output_dir}: {record} was made with other flags; name another "
                "folder, or delete this one"
            )
        runs.append(run)
    return runs


def check_data(args: ReportArguments, task_args: TaskArguments) -> None:
    """Reads all rows once, so that a broken file is reported before hours of training."""
    for name in args.tasks:
        of_task = dataclasses.replace(task_args, dataset_name=name)
        (task,) = check_tasks(of_task).values()
        for split in ("train", *eval_splits(task)):
            load_rows(name, task, of_task, split)


# ---------------------------------------------------------------- runs
def execute(command: list[str], log: Path) -> int:
    """The exit code of a command, whose output is added to `log`. If the report is killed, the command gets SIGTERM, at
    which a training run saves a checkpoint and ends."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as stream:
        return run_command(command, stdin=DEVNULL, stdout=stream, stderr=STDOUT)


def last_line(log: Path) -> str:
    """The last line of a log that is not blank."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return one_line(lines[-1].strip()) if lines else "no output"


def train(run: GlueRun) -> None:
    """Begins or resumes a run; SystemExit with 75 if a signal stopped it, with 1 if it failed."""
    flags, log = list(run.flags), run.folder.with_suffix(".log")
    if checkpoint := newest_whole_checkpoint(run.folder, with_optimizer=True):
        flags += ["--resume_from_checkpoint", str(checkpoint)]
    elif not is_free(run.folder):
        flags.append("--overwrite_output_dir")
    write_json(run.folder.with_suffix(".json"), {"flags": run.shown_flags})
    code = execute([sys.executable, str(HERE / "fine_tune_t5.py"), *flags], log)
    if code == PREEMPTED_EXIT_CODE:
        say(f"{run.task}, seed {run.seed}: a signal or a time limit stopped it; the same command resumes")
        raise SystemExit(code)
    if code or not run.results():
        raise SystemExit(f"{run.task}, seed {run.seed}: fine_tune_t5.py ended with {code}: {last_line(log)} ({log})")


# ---------------------------------------------------------------- numbers
def metric_keys(name: str) -> dict[str, str]:
    """{name in the table: key in all_results.json}: mrpc -> {"F1": "eval_f1", "accuracy": "eval_accuracy"}."""
    keys, splits = {}, eval_splits(GLUE[name])
    for metric, split in itertools.product(GLUE[name]["metrics"], splits):
        label = f", {split.removeprefix('validation_')}" if len(splits) > 1 else ""
        keys[SHORT.get(metric, metric) + label] = f"eval_{split}_{metric}" if len(splits) > 1 else f"eval_{metric}"
    return keys


def title(name: str) -> str:
    """GLUE's own name of a task: "cola" -> "CoLA", "mnli" -> "MNLI"."""
    file = GLUE[name]["submission_file"]
    return file.removesuffix(".tsv") if isinstance(file, str) else name.upper()


def summed_up(values: dict[int, float]) -> dict:
    """{seed: value} -> its mean and standard deviation (n - 1, None for one seed), with the values."""
    deviation = statistics.stdev(values.values()) if len(values) > 1 else None
    return {"mean": statistics.fmean(values.values()), "deviation": deviation, "seeds": values}


def numbers_of_task(name: str, done: list[GlueRun]) -> dict:
    """Metrics, score, training rows, flags and times of a task's finished runs."""
    results = {run.seed: run.results() for run in done}
    metrics = {
        metric: summed_up({seed: 100 * numbers[key] for seed, numbers in results.items()})
        for metric, key in metric_keys(name).items()
    }
    scored = [values["seeds"] for metric, values in metrics.items() if (name, metric) not in UNSCORED]
    record = read_json(done[0].folder / "run.json")
    rows, limit = record["examples"].get("train"), record["arguments"]["max_train_samples"]  # rows: None if streamed
    return {
        "score": summed_up({seed: statistics.fmean(values[seed] for values in scored) for seed in results}),
        "metrics": metrics,
        "training_rows": rows and min(int(rows), int(limit or rows)),
        "runs": {run.seed: {"flags": run.shown_flags, "seconds": results[run.seed]["train_runtime"]} for run in done},
    }


def average(tasks: dict[str, dict]) -> dict | None:
    """The mean score of the tasks, over the seeds that all tasks have; None without such a seed."""
    scores = [task["score"]["seeds"] for task in tasks.values()]
    seeds = sorted(set.intersection(*map(set, scores))) if scores else []
    means = {seed: statistics.fmean(score[seed] for score in scores) for seed in seeds}
    return {"tasks": list(tasks)} | summed_up(means) if means else None


def gather(args: ReportArguments, runs: list[GlueRun]) -> dict:
    """The content of glue.json: the numbers of each task, the averages, and their origin."""
    finished = [run for run in runs if run.results()]
    done = {name: [run for run in finished if run.task == name] for name in args.tasks}
    try:
        tasks = {name: numbers_of_task(name, of_task) for name, of_task in done.items() if of_task}
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # files of somebody else, or cut
        raise UserError(
            f"--output_dir {args.output_dir}: an all_results.json or run.json there is no run's of this report "
            f"({type(error).__name__}: {first_line(error)})"
        ) from None
    without = {name: task for name, task in tasks.items() if name != "wnli"}
    averages = {"with WNLI": average(tasks) if "wnli" in tasks else None, "without WNLI": average(without)}
    record = read_json(done[next(iter(tasks))][0].folder / "run.json") if tasks else {}
    return {
        "model": args.model_name_or_path,
        "tasks": tasks,
        "averages": {label: numbers for label, numbers in averages.items() if numbers},
        **{name: record.get(name) for name in ("parameters", "versions", "git", "hardware")},
    }


def shown(summary: dict) -> str:
    """{"seeds": {1: 51.8, 2: 52.8}, ...} -> "52.3 ± 0.7"."""
    return mean_and_deviation([*summary["seeds"].values()], "{:.1f}")


def table(report: dict, seeds: list[int]) -> str:
    """The table in markdown."""
    origin = report["model"] or "scratch"
    head = f"GLUE, development sets, from {origin}; mean ± deviation over seeds {', '.join(map(str, seeds))}"
    lines = [head, "", "| task | training rows | metrics | score |", "|---|---:|---|---:|"]
    for name, task in report["tasks"].items():
        metrics = "; ".join(f"{metric} {shown(values)}" for metric, values in task["metrics"].items())
        missing = len(seeds) - len(task["score"]["seeds"])
        note = f" ({missing} of {len(seeds)} seeds to come)" if missing else ""
        rows = task["training_rows"]
        lines.append(f"| {title(name)} | {f'{rows:,}' if rows else ''} | {metrics} | {shown(task['score'])}{note} |")
    for label, numbers in report["averages"].items():
        whole = len(TASKS) - (label == "without WNLI")
        which = f"all {whole}" if len(numbers["tasks"]) == whole else f"{len(numbers['tasks'])} of {whole}"
        lines.append(f"| **average** of {which} tasks {label} | | | **{shown(numbers)}** |")
    return "\n".join(lines) + "\n"


def write_csv(report: dict, path: Path) -> None:
    """Writes a row for each metric of a task, for its score and for the averages: task, metric, mean, deviation and
    number of seeds."""
    rows = [["task", "metric", "mean", "deviation", "seeds"]]
    for name, task in report["tasks"].items():
        for metric, values in (task["metrics"] | {"score": task["score"]}).items():
            rows.append([title(name), metric, values["mean"], values["deviation"], len(values["seeds"])])
    for label, values in report["averages"].items():
        rows.append([f"average {label}", "score", values["mean"], values["deviation"], len(values["seeds"])])
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def write_report(args: ReportArguments, runs: list[GlueRun]) -> dict:
    """Writes glue.json, glue.md, glue.csv and glue.png of the finished runs; returns the first's content."""
    report, folder = gather(args, runs), Path(args.output_dir)
    if report["tasks"]:
        write_json(folder / "glue.json", report)
        markdown = table(report, args.seeds)
        write_aside(folder / "glue.md", lambda aside: aside.write_text(markdown, encoding="utf-8"))
        write_aside(folder / "glue.csv", lambda aside: write_csv(report, aside))
        rows = {title(name): task["score"] for name, task in report["tasks"].items()}
        rows |= {f"average {label}": numbers for label, numbers in report["averages"].items()}
        scores = {name: (shown(score), list(score["seeds"].values())) for name, score in rows.items()}
        draw_scores(scores, folder / "glue.png", "score on the development set")
    return report


# ---------------------------------------------------------------- submission
def submit(args: ReportArguments, report: dict) -> str:
    """Predicts the test sets with the best seed of each task; returns a line about the result."""
    best = Path(args.output_dir) / "best"
    best.mkdir(parents=True, exist_ok=True)
    for name, task in report["tasks"].items():
        first = next(iter(task["metrics"].values()))["seeds"]  # the metric that chose the run's checkpoint
        link = best / name
        link.unlink(missing_ok=True)
        link.symlink_to(Path("..") / name / f"seed_{max(first, key=first.get)}")
    folder, log = Path(args.output_dir) / "submission", Path(args.output_dir) / "submission.log"
    command = [sys.executable, str(HERE / "evaluate_t5.py"), "--benchmark", "glue", "--dataset_name", "all"]
    command += ["--do_predict", "--allow_missing", "--model_name_or_path", str(best / "{task}")]
    command += ["--output_dir", str(folder), "--overwrite_output_dir"]
    command += ["--data_dir", args.data_dir] if args.data_dir else []
    log.unlink(missing_ok=True)  # an earlier submission may have been partial
    code = execute(command, log)
    if code:
        return f"none: evaluate_t5.py ended with {code}: {last_line(log)} ({log})"
    whole = f"in part, see {log}" if write_submission(folder) else "whole"
    return f"{folder / 'submission.zip'} ({whole})"


def write_submission(folder: Path) -> list[str]:
    """Writes submission.zip of the answers in the predictions.jsonl of evaluate_t5.py --do_predict; returns the files
    that the server wants too and for which there are no answers. UserError if these are not the answers to GLUE."""
    answers: dict[str, list[str]] = {}  # {file of the zip: its lines}
    path = folder / "predictions.jsonl"
    try:
        with path.open(encoding="utf-8") as file:
            for record in map(json.loads, file):
                name = record["task"]
                lines = answers.setdefault(submission_files(name)[record["split"]], [])
                lines.append(f"{len(lines)}\t{submitted(name, record['prediction'])}\n")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--predictions {folder}: {path.name} is not what evaluate_t5.py --task glue/all --do_predict writes "
            f"({type(error).__name__}: {first_line(error)})"
        ) from None

    def write(aside: Path) -> None:
        with zipfile.ZipFile(aside, "w", zipfile.ZIP_DEFLATED) as archive:
            for file, lines in answers.items():
                archive.writestr(file, "".join(["index\tprediction\n", *lines]))

    write_aside(folder / "submission.zip", write)
    wanted = [file for name in GLUE for file in submission_files(name).values()]
    return [file for file in wanted if file not in answers]


def submission_files(name: str) -> dict[str, str]:
    """{test split: file of the zip}: rte -> {"test": "RTE.tsv"}."""
    files = GLUE[name]["submission_file"]
    return files if isinstance(files, dict) else dict.fromkeys(test_splits(GLUE[name]), files)


def submitted(name: str, answer: str) -> str | int:
    """An answer as the server takes it. One that is no label is the first class, one that is no number 0; STS-B's scale
    ends at 5."""
    entry = GLUE[name]
    value = value_of_text(entry, answer) or 0
    if entry["target_type"] == "number":
        return f"{min(max(value, 0.0), 5.0):.3f}"
    return entry["labels"][value] if name in WANTED_AS_WORDS else int(value)


# ---------------------------------------------------------------- the script
@exit_on_user_error()
def main(argv: list[str] | None = None) -> dict:
    """Runs the script; returns what it writes to glue.json."""
    args, more, task_args = parse_report(argv)
    if args.predictions:
        missing = write_submission(Path(args.predictions))
        lacks = f"no answers for {', '.join(missing)}: the server takes whole submissions only" if missing else None
        next_step = None if missing else "upload it at https://gluebenchmark.com/submit"
        end_summary({"written to": f"{args.predictions}: submission.zip", "lacks": lacks, "next": next_step})
        return {}
    runs = planned_runs(args, more)
    if args.dry_run:
        for run in runs:
            say(shlex.join(["python", "fine_tune_t5.py", *run.shown_flags]))
        return {}
    done = sum(bool(run.results()) for run in runs)
    if not args.report_only and done < len(runs):
        check_data(args, task_args)
    counts = f"{len(runs)} ({len(args.tasks)} tasks x {len(args.seeds)} seeds), {done} of them finished"
    rows = {
        "checkpoint": args.model_name_or_path or "scratch",
        "runs": counts,
        "flags": shlex.join(without_secrets(more)) or None,
    }
    start_summary(rows | {"folder": args.output_dir}, "GLUE")
    for number, run in enumerate(runs, start=1):
        if not run.results() and not args.report_only:
            say(f"run {number} of {len(runs)}: {run.task}, seed {run.seed}")
            train(run)
            write_report(args, runs)
    report = write_report(args, runs)
    if not report["tasks"]:
        say("no run is finished yet: there is nothing to report")
        return report
    say(*table(report, args.seeds).split("\n"))
    submission = submit(args, report) if args.submission and not args.report_only else None
    written = f"{args.output_dir}: glue.md, glue.csv, glue.json, glue.png"
    end_summary({"written to": written, "submission": submission})
    return report


if __name__ == "__main__":
    run_script(main)
