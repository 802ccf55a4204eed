"""Which optimizer reaches a held-out loss with the fewest tokens, and how well its checkpoints can be fine-tuned.

    python -m benchmarks.optimizers --output results/optimizers.json
    python -m benchmarks.optimizers --pre_train adamw_rms_scaled:2e-2 muon:2e-2 --seeds 1 \\
        --pre_train_args "--train_file books/*.txt --config_name t5-v1_1-small --bf16 --max_steps 20000"

pre_train_t5.py runs for every OPTIMIZER:RATE of --pre_train and every seed, then fine_tune_t5.py for every one of
--fine_tune on each of those checkpoints and from scratch, with the commands that a user types. Complete runs are not
repeated, so a stopped study resumes. Prints two tables, writes them with all curves as JSON, and draws the curves. The
default recipes use the built-in corpus and need no data: on one core a pre-training takes five minutes, a fine-tuning
half a minute.
"""

import itertools
import shlex

from benchmarks.measure import table
from benchmarks.settings import RESULTS, SETTINGS, finish, parse, report_pre_training, run
from common.command_line import exit_on_user_error
from common.reports import mean_and_deviation, read_json

SCRATCH = "from scratch"
FLAGS = {
    "pre_train": dict(default=["adamw_rms_scaled:4e-2", "adafactor:2e-2", "muon:4e-2"], **SETTINGS),
    "fine_tune": dict(default=["adamw_rms_scaled:1e-2", "adamw_torch:1e-3"], **SETTINGS),
    "target_loss": dict(type=float, help="Not set: the highest final loss of all pre-trainings."),
    "fine_tune_args": dict(default="recipes/fine_tune_installed_docs.yaml", help="Flags and recipe."),
    "metric": dict(default="eval_accuracy", help="Metric by which the fine-tunings are compared."),
}


@exit_on_user_error()
def main(argv: list[str] | None = None) -> dict:
    """Runs the study; returns what it writes."""
    args = parse("optimizers", __doc__, FLAGS, "recipes/pre_train_installed_docs.yaml", argv)
    runs = {name: [] for name in args.pre_train}  # folders, in the order of the seeds
    for seed, (name, folders) in itertools.product(args.seeds, runs.items()):
        folders.append(args.folder / f"pre_train_{name.replace(':', '_')}_{seed}")
        run("pre_train_t5.py", name, seed, folders[-1], shlex.split(args.pre_train_args))
    record = report_pre_training(runs, args)
    scores = {name: {fine: [] for fine in args.fine_tune} for name in [*runs, SCRATCH]}
    shape = str(runs[args.pre_train[0]][0])  # all checkpoints have it, and the tokenizer
    for (place, seed), name, fine in itertools.product(enumerate(args.seeds), scores, args.fine_tune):
        start = ["--config_name", shape, "--tokenizer_name", shape]
        if name in runs:
            start = ["--model_name_or_path", str(runs[name][place])]
        label = f"fine_tune_{fine}_from_{name.removeprefix('from ')}_{seed}".replace(":", "_")
        run("fine_tune_t5.py", fine, seed, args.folder / label, [*shlex.split(args.fine_tune_args), *start])
        scores[name][fine].append(read_json(args.folder / label / RESULTS)[args.metric])
    shown = []
    for name, by_fine in scores.items():
        texts = {fine: mean_and_deviation(found, "{:.3f}") for fine, found in by_fine.items()}
        shown.append({"checkpoint": name} | texts)
    print(f"\nfine-tuning: {args.metric}\n{table(shown, ' '.join(shown[0]))}")
    return finish(args, record | {"metric": args.metric, "fine_tuning": scores})


if __name__ == "__main__":
    main()
