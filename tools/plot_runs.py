"""Compares runs: prints a table of their results and draws their curves into one picture.

    python -m tools.plot_runs out/a out/b
    python -m tools.plot_runs out/a out/b --x tokens --metric bits_per_byte,learning_rate,sequences_per_second
    python -m tools.plot_runs adam=out/adam_1,out/adam_2,out/adam_3 lion=out/lion_1,out/lion_2 --metric eval_accuracy

A run is the --output_dir of a training script, during training or afterwards; `label=folder,folder,...` puts several
seeds together. Takes seconds, and needs no GPU. The table:

    run   n  steps  train loss     eval loss      accuracy         time
    adam  3  2,000  2.314 ± 0.012  2.402 ± 0.009  0.8133 ± 0.0042  7 min 05 s

train loss: the last one logged. eval loss and the metric: from all_results.json, which holds the evaluation after
training (of the best checkpoint with --load_best_model_at_end), else the last one logged. time: of the run so far,
evaluations and earlier parts of a resumed run included. Several seeds: mean ± standard deviation (n - 1).
The picture, runs.png unless --output says otherwise, shows training loss (light), evaluation loss, and each metric in a
panel of its own.
"""

import argparse
import sys
from numbers import Real
from pathlib import Path

if not __package__:  # started by its path: Python then looks beside this file alone for modules
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from foundry.common.curves import check_picture, draw_curves, eval_loss_key, eval_metrics
from foundry.common.errors import UserError
from foundry.common.help import introduction
from foundry.common.machine import run_script
from foundry.common.reports import aligned_cells, human_time, read_json, read_metrics, with_floats
from foundry.common.terminal import say
from foundry.common.words import mean_and_deviation
from foundry.training.rows_read import tokens_at

MOST_STEPS = 10**12  # a picture's axis has no room for more
MOST_VALUE = 1e30


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The flags. SystemExit, with argparse's message, if they are wrong."""
    options = dict(description=introduction(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser = argparse.ArgumentParser("plot_runs.py", **options)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a folder, or label=folder,folder,... for several seeds")
    parser.add_argument("--output", type=Path, default=Path("runs.png"), help="picture: .png, .pdf, .svg (runs.png)")
    parser.add_argument("--x", choices=("steps", "tokens", "seconds"), default="steps", help="horizontal axis")
    metric = "such as accuracy, or accuracy,f1,learning_rate for a panel each; default: the first evaluation metric"
    parser.add_argument("--metric", help=metric)
    parser.add_argument("--labels", help="names of the runs, separated by commas, instead of their folders' names")
    return parser.parse_args(argv)


def group_folders(runs: list[str], labels: str | None) -> dict[str, list[Path]]:
    """["a=out/1,out/2", "out/b"] -> {"a": [out/1, out/2], "b": [out/b]}. UserError for a label that comes twice
    or is empty, and for a folder that comes twice under one."""
    names, folders = [], []
    for run in runs:
        label, equals, paths = run.partition("=")
        group = [Path(path) for path in paths.split(",") if path]
        if not equals or Path(run).is_dir():  # a folder may have "=" in its name: out/lr=0.1
            label, group = Path(run).resolve().name, [Path(run)]
        if not group or not label:
            raise UserError(f"{run!r} should be a folder or label=folder,folder,...")
        if len({path.resolve() for path in group}) < len(group):
            raise UserError(f"{run!r} names a folder twice, which would count as two seeds")
        names.append(label)
        folders.append(group)
    if labels is not None:
        names = [name.strip() for name in labels.split(",")]
        if not all(names):
            raise UserError(f"--labels {labels!r}: a name is missing next to a comma")
        if len(names) != len(runs):
            raise UserError(f"--labels {labels} has {len(names)} names for {len(runs)} runs")
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"the label {name!r} stands for {names.count(name)} runs: name them with --labels")
    return dict(zip(names, folders, strict=True))


def read_folder(folder: Path, x: str) -> dict:
    """{"lines": those of a run's metrics.jsonl, with "tokens" if that is `x`, "results": content of all_results.json}.
    UserError if the folder is not that of a training run."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder. Name the --output_dir of a training run")
    if not (folder / "metrics.jsonl").is_file():
        raise UserError(f"{folder} has no metrics.jsonl: is it the --output_dir of a training run?")
    lines = read_metrics(folder / "metrics.jsonl")
    if not lines:
        raise UserError(f"{folder / 'metrics.jsonl'} is empty: the run has logged nothing yet")
    if not all(isinstance(line.get("step"), int) and 0 <= line["step"] <= MOST_STEPS for line in lines):
        raise UserError(f"{folder / 'metrics.jsonl'} has a line without a step: is it of a training run?")
    if x == "tokens":
        run = read_json(folder / "run.json")
        tokens_per_step = run.get("tokens_per_step")
        if not isinstance(tokens_per_step, int) or not 0 < tokens_per_step <= MOST_STEPS:
            raise UserError(f"--x tokens needs tokens_per_step, which {folder / 'run.json'} does not have")
        tokens = tokens_at(run)
        lines = [line | {"tokens": tokens(line["step"])} for line in lines]
    lines = [{key: value for key, value in line.items() if not _is_beyond(value)} for line in lines]
    return {"lines": lines, "results": with_floats(read_json(folder / "all_results.json"))}


def _is_beyond(value: object) -> bool:
    """Whether a value is a number that no axis has room for."""
    return isinstance(value, Real) and abs(value) > MOST_VALUE


def choose_metrics(wanted: str | None, runs: list[dict]) -> list[str]:
    """The keys of the metrics to show: those in `wanted`, "accuracy,eval_f1" with or without "eval_", or if it is None
    the first metric of an evaluation. UserError for an unknown name, with a list, and for an empty one."""
    lines = [line for run in runs for line in [*run["lines"], run["results"]]]
    metrics = eval_metrics(lines)
    if wanted is None:
        return metrics[:1]
    present = {key for line in lines for key, value in line.items() if isinstance(value, Real)}
    found = {}  # a dict keeps the order, and each key once
    for metric in map(str.strip, wanted.split(",")):
        if not metric:
            raise UserError(f"--metric {wanted!r}: a name is missing next to a comma")
        key = metric if metric in present else f"eval_{metric}"
        if key not in present:
            known = [*metrics, *sorted(present - {"step", "epoch", "seconds", *metrics})]
            raise UserError(f"--metric {metric} is in none of the runs, which have: {', '.join(known)}")
        found[key] = None
    losses = {"loss", *(eval_loss_key(run["lines"]) for run in runs)}  # always drawn
    return [key for key in found if key not in losses]


def last(run: dict, key: str) -> float | None:
    """A run's value of `key`: that in all_results.json, else the last one logged, else None."""
    values = [line[key] for line in [*run["lines"], run["results"]] if isinstance(line.get(key), Real)]
    return values[-1] if values else None


def runs_table(groups: dict[str, list[dict]], metrics: list[str]) -> str:
    """A heading and an aligned line for each label; the head of this file says what the columns mean."""
    shown = [metric.removeprefix("eval_") for metric in metrics]
    rows = [["run", "n", "steps", "train loss", "eval loss", *shown, "time"]]
    for label, runs in groups.items():
        steps = sorted({max(line["step"] for line in run["lines"]) for run in runs})
        seconds = [max([0, *(line["seconds"] for line in run["lines"] if line.get("seconds", 0) > 0)]) for run in runs]
        row = [label, str(len(runs)), "-".join(f"{step:,}" for step in steps[:: max(1, len(steps) - 1)])]
        row.append(mean_and_deviation([last(run, "loss") for run in runs], "{:.3f}"))
        row.append(mean_and_deviation([last(run, eval_loss_key(run["lines"])) for run in runs], "{:.3f}"))
        for metric in metrics:
            number_format = "{:.4f}" if metric.startswith("eval_") else "{:.4g}"
            row.append(mean_and_deviation([last(run, metric) for run in runs], number_format))
        rows.append([*row, human_time(sum(seconds) / len(seconds))])
    return aligned_cells(rows)


def main(argv: list[str] | None = None) -> None:
    """Runs the script. SystemExit(2) after one line about what is wrong with the flags or the folders."""
    args = parse(argv)
    try:
        check_picture("--output", args.output)
        folders = group_folders(args.runs, args.labels)
        groups = {label: [read_folder(folder, args.x) for folder in paths] for label, paths in folders.items()}
        metrics = choose_metrics(args.metric, [run for runs in groups.values() for run in runs])
        say(*runs_table(groups, metrics).split("\n"))
        curves = {label: [run["lines"] for run in runs] for label, runs in groups.items()}
        draw_curves(curves, args.output, x="step" if args.x == "steps" else args.x, metrics=metrics)
    except (UserError, OSError) as error:  # exit_on_user_error's module takes a second to import
        say(f"plot_runs.py: error: {error}", stream=sys.stderr)
        raise SystemExit(2) from None
    say(f"wrote {args.output}")


if __name__ == "__main__":
    run_script(main)
