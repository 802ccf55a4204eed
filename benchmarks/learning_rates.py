"""How the best learning rate of each optimizer depends on the size of the model.

    python -m benchmarks.learning_rates --output results/learning_rates.json
    python -m benchmarks.learning_rates --shapes mini --settings muon:8e-2 --seeds 1    # one rate more at one shape

pre_train_t5.py runs for every shape, OPTIMIZER:RATE and seed, all on the same number of tokens. A run that is complete
in `--folder`, or recorded in the file `--output`, is not repeated but reported with the others: a study can be stopped,
resumed elsewhere and extended. Prints a table, writes it as JSON, and draws the held-out loss over the rate, one panel
a shape.
"""

import itertools
import math
import re
import shlex
import statistics
from operator import itemgetter
from pathlib import Path

import numpy as np

from benchmarks.measure import table
from benchmarks.settings import RESULTS, SETTINGS, finish, parse, run
from common.command_line import exit_on_user_error
from common.curves import COLOURS, new_figure, save_figure
from common.reports import human_count, mean_and_deviation, read_json

WIDTHS = ("tiny", "tiny:d_model=224,d_kv=32,num_heads=7,d_ff=544,num_layers=3,num_decoder_layers=3", "mini")
RATES = [f"{optimizer}:{rate}" for rate in ("2e-2", "4e-2", "8e-2") for optimizer in ("adamw_rms_scaled", "muon")]
IDENTITY = itemgetter("shape", "optimizer", "rate", "seed")  # of a run
PRE_TRAIN_ARGS = (
    "recipes/pre_train_installed_docs.yaml --per_device_train_batch_size 32 --max_steps 400 --eval_steps 50 "
    "--save_steps 400 --num_samples 0 --bf16 --use_cpu --disable_tqdm"
)
_SHAPES = dict(nargs="+", default=WIDTHS, metavar="NAME[:OVERRIDES]", help="--config_name, --config_overrides of each.")
FLAGS = {"shapes": _SHAPES, "settings": dict(default=RATES, **SETTINGS)}


def best_rate(losses: dict[float, float]) -> float | None:
    """The rate at the lowest point of the parabola through the lowest loss and its neighbours, over the rate's
    logarithm: {0.01: 3, 0.02: 1, 0.04: 3} -> 0.02. None where the lowest loss is that of the first or last rate."""
    rates = sorted(losses)
    place = min(range(len(rates)), key=lambda number: losses[rates[number]])
    if place in (0, len(rates) - 1):
        return None
    near = rates[place - 1 : place + 2]
    a, b, _ = np.polyfit(np.log(near), [losses[rate] for rate in near], 2)
    return math.exp(-b / (2 * a))


def found_runs(folder: Path, earlier: list[dict]) -> list[dict]:
    """{"shape", "parameters", "optimizer", "rate", "seed", "tokens", "loss", "seconds"} of every complete run below
    `folder`, and of the `earlier` ones, smaller models and lower rates first."""
    runs = {IDENTITY(one): one for one in earlier}
    for path in folder.glob(f"*/*/{RESULTS}"):
        record, results = read_json(path.with_name("run.json")), read_json(path)
        given = record["arguments"]
        one = dict(shape=path.parts[-3], parameters=record["parameters"], optimizer=given["optim"])
        one |= dict(rate=given["learning_rate"], seed=given["seed"], tokens=results["train_tokens"])
        one |= dict(loss=results["eval_loss"], seconds=results["train_runtime"])
        runs[IDENTITY(one)] = one
    return sorted(runs.values(), key=itemgetter("parameters", "optimizer", "rate", "seed"))


def report(runs: list[dict]) -> list[dict]:
    """A row for each size, optimizer and rate: mean and deviation of the losses; `best` in the row of the lowest."""
    rows = []
    for (size, optimizer), group in itertools.groupby(runs, itemgetter("parameters", "optimizer")):
        by_rate = {rate: [one["loss"] for one in same] for rate, same in itertools.groupby(group, itemgetter("rate"))}
        means = {rate: statistics.mean(losses) for rate, losses in by_rate.items()}
        lowest, vertex = min(means, key=means.get), best_rate(means)
        best = f"lowest; parabola's {vertex:.3g}" if vertex else "lowest; at the edge of what was tried"
        for rate, losses in by_rate.items():
            row = dict(parameters=human_count(size), optimizer=optimizer, rate=rate, runs=len(losses), losses=losses)
            row["held_out_loss"] = mean_and_deviation(losses, "{:.3f}")
            rows.append(row | {"best": best if rate == lowest else ""})
    return rows


def draw(rows: list[dict], path: Path) -> None:
    """Held-out loss over the learning rate, a panel for each size, a line for each optimizer, a dot for each run."""
    sizes, names = (list(dict.fromkeys(row[key] for row in rows)) for key in ("parameters", "optimizer"))
    figure, panels = new_figure(4 * len(sizes), 3.6, columns=len(sizes))
    for axes, size in zip(panels, sizes, strict=True):
        for name, colour in zip(names, COLOURS, strict=False):
            same = [row for row in rows if (row["parameters"], row["optimizer"]) == (size, name)]
            axes.plot([r["rate"] for r in same], [statistics.mean(r["losses"]) for r in same], color=colour, label=name)
            points = [(row["rate"], loss) for row in same for loss in row["losses"]]
            axes.plot(*zip(*points, strict=True), "o", color=colour, markersize=4)
        axes.set(title=f"{size} parameters", xscale="log", xlabel="peak learning rate")
    panels[0].set_ylabel("held-out loss, nats per token")
    panels[0].legend()
    save_figure(figure, path)


@exit_on_user_error()
def main(argv: list[str] | None = None) -> dict:
    """Runs what is missing, reports on all; returns what it writes."""
    args = parse("learning_rates", __doc__, FLAGS, PRE_TRAIN_ARGS, argv)
    earlier = read_json(args.output).get("runs", [])
    for seed, shape, one in itertools.product(args.seeds, args.shapes, args.settings):
        name, _, overrides = shape.partition(":")
        words = [*shlex.split(args.pre_train_args), "--config_name", name]
        words += ["--config_overrides", overrides] if overrides else []
        label = re.sub("[:,]", "_", shape).replace("=", "")
        optimizer, rate = one.split(":")
        if (label, optimizer, float(rate), seed) not in map(IDENTITY, earlier):
            folder = args.folder / label / f"pre_train_{optimizer}_{rate}_{seed}"
            run("pre_train_t5.py", one, seed, folder, words)
    runs = found_runs(args.folder, earlier)
    tokens = sorted({one["tokens"] for one in runs})
    if len(tokens) != 1:
        raise ValueError(f"--folder {args.folder}: its runs had {tokens} tokens, and only equals can be compared")
    rows = report(runs)
    columns = "parameters optimizer rate runs held_out_loss best"
    print(f"\n{human_count(tokens[0])} tokens each\n{table(rows, columns)}")
    draw(rows, args.picture)
    return finish(args, {"pre_train_args": args.pre_train_args, "rows": rows, "runs": runs})


if __name__ == "__main__":
    main()
