r"""Does learning from a reward do more than as many further steps on the targets? Several seeds, the rates searched.

    python -m studies.rewards_study out/study --reward rougeL --test_file test.jsonl \
        --start_flags "--model_name_or_path out/pre_train_t5 --learning_rate 1e-2" -- \
        --train_file train.jsonl --validation_file dev.jsonl --source_column text --target_column summary \
        --metrics rougeL,exact_match --per_device_train_batch_size 32

What stands after -- are flags of fine_tune_t5.py for all runs. Each seed trains a start on the targets. From there two
ways go on for the same number of steps: on the targets, and by the reward. The first seed tries all rates for both, and
the best one on the validation rows is taken for all seeds. The test rows are evaluated last, with the start beside. A
run that is finished is not repeated, so the same command goes on where it was stopped.

Writes study.json: rates, and for each way and metric the values of all seeds, their mean and deviation.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from foundry.common.processes import run_command, run_script, say
from foundry.common.reports import PROJECT, write_json
from foundry.common.words import comma_words

WAYS = ("targets", "reward")
_QUIET = ["--report_to", "none", "--disable_tqdm", "true", "--overwrite_output_dir"]
_NO_EVALUATION = ["--eval_strategy", "no", "--save_strategy", "no", "--load_best_model_at_end", "false"]


def run(script: str, out: Path, words: list[str]) -> dict[str, float]:
    """The content of all_results.json of a run of a script, which is made unless it is there. SystemExit if it
    fails."""
    results = out / "all_results.json"
    if not results.is_file():
        say(f"{out.name}: {script} {' '.join(words)}")
        command = [sys.executable, str(PROJECT / script), *words, "--output_dir", str(out), *_QUIET]
        if run_command(command):
            raise SystemExit(f"{out}: failed")
    return json.loads(results.read_text(encoding="utf-8"))


def study(args: argparse.Namespace, words: list[str]) -> dict:
    """The content of study.json. words: flags of all runs."""
    folder, seeds, rates = args.folder, comma_words(args.seeds), comma_words(args.rates)

    def trained(out: Path, seed: str, steps: int, more: list[str]) -> Path:
        run("fine_tune_t5.py", out, [*words, "--seed", seed, "--max_steps", str(steps), *_NO_EVALUATION, *more])
        return out

    def went_on(way: str, seed: str, rate: str) -> Path:
        more = ["--model_name_or_path", str(folder / f"start_{seed}"), "--learning_rate", rate]
        more += ["--reward", args.reward, *args.reward_flags.split()] if way == "reward" else []
        return trained(folder / f"{way}_{rate}_{seed}", seed, args.steps, more)

    def evaluated(out: Path, rows: str, more: list[str]) -> dict[str, float]:
        return run("evaluate_t5.py", folder / f"{rows}_{out.name}", ["--model_name_or_path", str(out), *more])

    starts = {
        seed: trained(folder / f"start_{seed}", seed, args.start_steps, args.start_flags.split()) for seed in seeds
    }
    key, searched = f"eval_{args.metric}", {}
    for way in WAYS:
        searched[way] = {rate: evaluated(went_on(way, seeds[0], rate), "dev", [])[key] for rate in rates}
    best = {way: max(rates, key=searched[way].get) for way in WAYS}
    record: dict = {"rates": best, "searched": searched}
    test = ["--validation_file", str(Path(args.test_file).absolute())]
    for way in ("start", *WAYS):
        outs = [starts[seed] if way == "start" else went_on(way, seed, best[way]) for seed in seeds]
        tested = [evaluated(out, "test", test) for out in outs]
        record[way] = {
            name: dict(values=values, mean=statistics.mean(values), deviation=statistics.stdev(values))
            for name in tested[0]
            if name.startswith("eval_") and not name.endswith(("runtime", "per_second", "preparation_time"))
            for values in [[one[name] for one in tested]]
            if not isinstance(values[0], str)  # a signature
        }
    return record


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    place = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="where runs and study.json are written")
    parser.add_argument("--reward", required=True, help="as of fine_tune_t5.py")
    parser.add_argument("--reward_flags", default="", help="further flags of the way by the reward, in one word")
    parser.add_argument("--metric", default="rougeL", help="the metric that chooses a rate")
    parser.add_argument("--test_file", required=True, help="rows that are evaluated last")
    parser.add_argument("--seeds", default="0,1,2", help="at least two")
    parser.add_argument("--rates", default="1e-3,3e-4,1e-4,3e-5", help="learning rates that both ways try")
    parser.add_argument("--start_flags", required=True, help="flags of the starts alone, in one word")
    parser.add_argument("--start_steps", type=int, default=500, help="steps of the starts")
    parser.add_argument("--steps", type=int, default=200, help="steps of both ways from there")
    args = parser.parse_args(argv[:place])
    record = study(args, argv[place + 1 :])
    write_json(args.folder / "study.json", record)
    say(*json.dumps(record, indent=1).split("\n"))


if __name__ == "__main__":
    run_script(main)
