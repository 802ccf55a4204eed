"""GLUE's table from finished runs, and the file that its server takes.

    python -m tools.report_glue out/sweeps/glue_table/*           # folders of runs, whose run.json says task and seed
    python -m tools.report_glue out/a out/b --output_dir out/ab   # of any folders
    python -m tools.report_glue --predictions out/predict_all     # of an evaluation with --do_predict: submission.zip

`python -m tools.sweep_t5 sweeps/glue_table_sweep.yaml`, or `wandb sweep`, trains each task with three seeds. Writes
into --output_dir glue.md, glue.json (every number, seed and folder) and best/<task>, links to each task's best seed.
The numbers are those of the development sets, on which each run also chose its best epoch, x 100, as mean and standard
deviation (n - 1) over seeds. A task's score is the mean of its metrics as GLUE defines it: Matthews alone for CoLA,
both sets of MNLI. The average of the tasks is given with WNLI, as GLUE's server has it, and without it, as in BERT's
paper: WNLI's development sentences contradict its training set, and T5 does not train on it either.
"""

import argparse
import itertools
import json
import statistics
import sys
import zipfile
from pathlib import Path

if not __package__:  # started by its path: Python then looks beside this file alone for modules
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from constants import DATASET_VALS
from foundry.common.command_line import exit_on_user_error
from foundry.common.errors import UserError
from foundry.common.help import introduction
from foundry.common.machine import run_script
from foundry.common.paths import check_folder, refuse_links
from foundry.common.reports import end_summary, first_line, read_json, write_aside, write_json
from foundry.common.terminal import say
from foundry.common.words import mean_and_deviation
from tasks.named import find_entry
from tasks.row_texts import value_of_text

GLUE = {name: find_entry("glue", name) for name in DATASET_VALS["glue"]}
TASKS = [name for name, entry in GLUE.items() if not entry.train_with]
UNSCORED = {("cola", "accuracy")}  # shown, but left out of GLUE's score
WANTED_AS_WORDS = ("mnli", "ax", "qnli", "rte")  # the server takes the label's words; the other classes as 0 and 1
SHORT = {"matthews_correlation": "Matthews", "pearson": "Pearson", "spearman": "Spearman", "f1": "F1"}
GONE = "is gone: sweeps/glue_table_sweep.yaml trains the runs (commit 5a850dc7 was the last whose report did)"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The flags. SystemExit, with argparse's message, if they are wrong."""
    parser = argparse.ArgumentParser(
        "report_glue.py", description=introduction(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="a finished run's folder")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("out/glue_report"), help="of the table (out/glue_report)"
    )
    parser.add_argument("--predictions", type=Path, help="folder of evaluate_t5.py --task glue/all --do_predict")
    args, others = parser.parse_known_args(argv)
    if others:
        raise UserError(f"{others[0]}: {GONE}" if others[0].startswith("--") else f"{others[0]}: no such flag")
    if bool(args.runs) == bool(args.predictions):
        parser.error("name the folders of runs, or --predictions")
    return args


# ---------------------------------------------------------------- numbers
def runs_by_task(folders: list[Path]) -> dict[str, dict[int, Path]]:
    """{task: {seed: folder of its run}}, tasks in GLUE's order. UserError for a folder of something else, and for two
    runs of one task and seed."""
    found: dict[str, dict[int, Path]] = {name: {} for name in TASKS}
    for folder in folders:
        if not folder.is_dir():
            continue  # a log beside the folders
        flags = read_json(folder / "run.json").get("arguments", {})
        task, seed = flags.get("dataset_name"), flags.get("seed")
        if flags.get("benchmark") != "glue" or task not in found or not read_json(folder / "all_results.json"):
            raise UserError(f"{folder}: is no finished run of one of GLUE's tasks ({', '.join(TASKS)})")
        if seed in found[task]:
            raise UserError(f"{folder}: {found[task][seed]} is {task} with seed {seed} too; name one of them")
        found[task][seed] = folder
    return {task: runs for task, runs in found.items() if runs}


def metric_keys(name: str) -> dict[str, str]:
    """{name in the table: key in all_results.json}: mrpc -> {"F1": "eval_f1", "accuracy": "eval_accuracy"}."""
    keys, splits = {}, GLUE[name].eval_splits
    for metric, split in itertools.product(GLUE[name].metrics, splits):
        label = f", {split.removeprefix('validation_')}" if len(splits) > 1 else ""
        keys[SHORT.get(metric, metric) + label] = f"eval_{split}_{metric}" if len(splits) > 1 else f"eval_{metric}"
    return keys


def title(name: str) -> str:
    """GLUE's own name of a task: "cola" -> "CoLA", "mnli" -> "MNLI"."""
    file = GLUE[name].submission_file
    return file.removesuffix(".tsv") if isinstance(file, str) else name.upper()


def summed_up(values: dict[int, float]) -> dict:
    """{seed: value} -> its mean and standard deviation (n - 1, None for one seed), with the values."""
    deviation = statistics.stdev(values.values()) if len(values) > 1 else None
    return {"mean": statistics.fmean(values.values()), "deviation": deviation, "seeds": values}


def numbers_of_task(name: str, runs: dict[int, Path]) -> dict:
    """{"score", "metrics": summaries, "training_rows", "folders": {seed: folder}} of a task's runs."""
    results = {seed: read_json(folder / "all_results.json") for seed, folder in runs.items()}
    metrics = {}
    for metric, key in metric_keys(name).items():
        metrics[metric] = summed_up({seed: 100 * numbers[key] for seed, numbers in results.items()})
    scored = [values["seeds"] for metric, values in metrics.items() if (name, metric) not in UNSCORED]
    score = {seed: statistics.fmean(values[seed] for values in scored) for seed in runs}
    record = read_json(next(iter(runs.values())) / "run.json")
    rows, limit = record["examples"].get("train"), record["arguments"]["max_train_samples"]  # rows: None if streamed
    folders = {seed: str(folder) for seed, folder in runs.items()}
    training_rows = rows and min(int(rows), int(limit or rows))
    return dict(score=summed_up(score), metrics=metrics, training_rows=training_rows, folders=folders)


def average(tasks: dict[str, dict]) -> dict | None:
    """The mean score of the tasks, over the seeds that all tasks have; None without such a seed."""
    scores = [task["score"]["seeds"] for task in tasks.values()]
    seeds = sorted(set.intersection(*map(set, scores))) if scores else []
    means = {seed: statistics.fmean(score[seed] for score in scores) for seed in seeds}
    return {"tasks": list(tasks)} | summed_up(means) if means else None


def gather(folders: list[Path]) -> dict:
    """The content of glue.json: the numbers of each task, and the averages. UserError for a folder without them."""
    try:
        tasks = {name: numbers_of_task(name, runs) for name, runs in runs_by_task(folders).items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # files of somebody else, or cut
        raise UserError(
            f"{folders[0]} and the others: an all_results.json or run.json is no run's of GLUE "
            f"({type(error).__name__}: {first_line(error)})"
        ) from None
    without = {name: task for name, task in tasks.items() if name != "wnli"}
    averages = {"with WNLI": average(tasks) if "wnli" in tasks else None, "without WNLI": average(without)}
    return {"tasks": tasks, "averages": {label: numbers for label, numbers in averages.items() if numbers}}


def shown(summary: dict) -> str:
    """{"seeds": {1: 51.8, 2: 52.8}, ...} -> "52.3 ± 0.7"."""
    return mean_and_deviation([*summary["seeds"].values()], "{:.1f}")


def table(report: dict) -> str:
    """The table in markdown. A task with fewer seeds than others says how many it has."""
    most = max((len(task["score"]["seeds"]) for task in report["tasks"].values()), default=0)
    head = f"GLUE, development sets; mean ± deviation over {most} seeds"
    lines = [head, "", "| task | training rows | metrics | score |", "|---|---:|---|---:|"]
    for name, task in report["tasks"].items():
        metrics = "; ".join(f"{metric} {shown(values)}" for metric, values in task["metrics"].items())
        seeds, rows = len(task["score"]["seeds"]), task["training_rows"]
        note = f" ({seeds} of {most} seeds)" if seeds < most else ""
        lines.append(f"| {title(name)} | {f'{rows:,}' if rows else ''} | {metrics} | {shown(task['score'])}{note} |")
    for label, numbers in report["averages"].items():
        of_all = len(TASKS) - (label == "without WNLI")
        which = f"all {of_all}" if len(numbers["tasks"]) == of_all else f"{len(numbers['tasks'])} of {of_all}"
        lines.append(f"| **average** of {which} tasks {label} | | | **{shown(numbers)}** |")
    return "\n".join(lines) + "\n"


def link_best(tasks: dict[str, dict], folder: Path) -> None:
    """Makes best/<task>, a link to the run with the best first metric, which chose its checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, task in tasks.items():
        first = next(iter(task["metrics"].values()))["seeds"]
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(Path(task["folders"][max(first, key=first.get)]).resolve())


# ---------------------------------------------------------------- submission
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
    entry = GLUE[name]
    files = entry.submission_file
    return files if isinstance(files, dict) else dict.fromkeys(entry.test_splits, str(files))


def submitted(name: str, answer: str) -> str | int:
    """An answer as the server takes it. One that is no label is the first class, one that is no number 0; STS-B's scale
    ends at 5."""
    entry = GLUE[name]
    value = value_of_text(entry, answer) or 0
    if entry.target_type == "number":
        return f"{min(max(value, 0.0), 5.0):.3f}"
    return entry.labels[value] if name in WANTED_AS_WORDS else int(value)


# ---------------------------------------------------------------- the script
def report_predictions(folder: Path) -> None:
    """Writes submission.zip and says what it lacks."""
    missing = write_submission(folder)
    lacks = f"no answers for {', '.join(missing)}: the server takes whole submissions only" if missing else None
    next_step = None if missing else "upload it at https://gluebenchmark.com/submit"
    end_summary({"written to": f"{folder}: submission.zip", "lacks": lacks, "next": next_step})


def report_runs(folders: list[Path], output_dir: Path) -> dict:
    """Writes table, numbers and links; returns the content of glue.json."""
    check_folder("--output_dir", str(output_dir))
    refuse_links(output_dir, ["best"])
    report = gather(folders)
    if not report["tasks"]:
        raise UserError("no RUN is a folder: name the --output_dir of finished runs")
    output_dir.mkdir(parents=True, exist_ok=True)
    write_json(output_dir / "glue.json", report)
    markdown = table(report)
    write_aside(output_dir / "glue.md", lambda aside: aside.write_text(markdown, encoding="utf-8"))
    link_best(report["tasks"], output_dir / "best")
    say(*markdown.split("\n"))
    answer = "python evaluate_t5.py --task glue/all --do_predict --model_name_or_path"
    end_summary({"written to": f"{output_dir}: glue.md, glue.json", "next": f"{answer} '{output_dir}/best/{{task}}'"})
    return report


@exit_on_user_error()
def main(argv: list[str] | None = None) -> dict:
    """Runs the script; returns what it writes to glue.json."""
    args = parse(argv)
    if args.predictions:
        report_predictions(args.predictions)
        return {}
    return report_runs(args.runs, args.output_dir)


if __name__ == "__main__":
    run_script(main)
