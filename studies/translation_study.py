r"""A translation system from nothing, scored after every step: one table of chrF and BLEU over several seeds.

    python -m studies.translation_study --output_dir out/translation --seeds 0,1,2 \
        --train_source train.de --train_target train.en --dev_source val.de --dev_target val.en \
        --test_source test.de --test_target test.en --most_pairs 10000

Text files have a sentence on each line. Of the training lines behind the first --most_pairs only the target side is
used. The steps: a tokenizer of both languages; training on the pairs alone; pre-training on both languages, and
fine-tuning in both directions from there; back-translation of the lines that have no other side; the mean of the last
checkpoints; and the search of answers: greedy, beams, the answer most like the others (MBR), a noisy channel.
recipes/translation_pre_train.yaml and translation_fine_tune.yaml have the flags of all trainings.

A step that is finished is not repeated, one that was stopped goes on, so the same command resumes. Writes table.md,
study.json (scores, signatures, seconds of each step, of a stopped one since it went on) and, for each row, the answers
as text, from which the command sacrebleu computes the same scores.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from foundry.common.command_line import exit_on_user_error, parse_arguments
from foundry.common.digests import contents_digest
from foundry.common.errors import UserError
from foundry.common.flags import option
from foundry.common.processes import run_script, say
from foundry.common.reports import PROJECT, markdown_table, write_json
from foundry.common.yaml_files import read_yaml
from studies.study_steps import RECIPES, Steps, lines_of, seeds_of, write_text
from tools.seed_scores import mean_and_deviation

DATA = ("train_source", "train_target", "dev_source", "dev_target", "test_source", "test_target")
METRICS = {"chrF": "CHRF", "BLEU": "BLEU"}  # {column of the table: class of sacrebleu}
TAG = "<BT>"  # a token of its own, as in Caswell et al. 2019


@dataclass
class StudyArguments:
    """The data, and how much is done with it."""

    _argument_group_name = "study"

    output_dir: str = option("out/translation", "Folder of all runs and of the table.")
    train_source: str | None = option(None, "Training sentences, a line each.")
    train_target: str | None = option(None, "Their translations.")
    dev_source: str | None = option(None, "Sentences on which trainings are evaluated.")
    dev_target: str | None = option(None, "Their translations.")
    test_source: str | None = option(None, "Sentences that are translated for the table.")
    test_target: str | None = option(None, "Their translations.")
    most_pairs: int = option(10_000, "Training pairs; of further lines only the target side is used.", at_least=1)
    text_file: list[str] | None = option(None, "Further text of both languages, for tokenizer and pre-training.")
    seeds: str = option("0,1,2", "Seeds of all trainings, separated by commas.")
    vocab_size: int = option(4000, "Size of the tokenizer, 100 sentinels included.", at_least=300)
    average_last: int = option(5, "Checkpoints whose mean is taken.", at_least=2)
    num_beams: int = option(5, "Beams of answers and of back-translation.", at_least=2)
    num_drawn: int = option(16, "Answers drawn to each sentence, of which one is chosen.", at_least=2)
    pre_train_flags: str = option("", "Further flags of the pre-training, as one word behind =.")
    fine_tune_flags: str = option("", "Further flags of all fine-tunings, likewise.")
    predict_flags: str = option("", "Further flags of all answers, likewise.")


FLAGS = [StudyArguments]


# ---------------------------------------------------------------- data
def write_data(args: StudyArguments, folder: Path) -> dict[str, int]:
    """Writes pairs.jsonl, dev.jsonl, text.txt of both languages, and one_side.txt, the targets whose sources are not
    used; returns how many lines these have. UserError for sides of other lengths."""
    from foundry.corpora.files import check_file

    for name in DATA:
        if getattr(args, name) is None:
            raise UserError(f"--{name}: name the file; --help shows an example")
        check_file(f"--{name}", Path(getattr(args, name)))
    sides = {name: lines_of(Path(getattr(args, name))) for name in DATA}
    for source, target in zip(DATA[::2], DATA[1::2], strict=True):
        if len(sides[source]) != len(sides[target]) or not sides[source]:
            raise UserError(
                f"--{source} {getattr(args, source)}: has {len(sides[source]):,} lines, and --{target} "
                f"{getattr(args, target)} {len(sides[target]):,}: give two sides of the same sentences"
            )
    used = {"pairs": (sides["train_source"][: args.most_pairs], sides["train_target"][: args.most_pairs])}
    used["dev"] = (sides["dev_source"], sides["dev_target"])
    for name, (sources, targets) in used.items():
        rows = ({"source": one, "target": other} for one, other in zip(sources, targets, strict=True))
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows if all(map(str.strip, row.values())))
        write_text(folder / f"{name}.jsonl", lines)
    further = sides["train_target"][args.most_pairs :]
    text = [*used["pairs"][0], *sides["train_target"]]
    for name, lines in (("one_side", further), ("text", text)):
        write_text(folder / f"{name}.txt", "".join(f"{line}\n" for line in lines))
    return {"pairs": len(used["pairs"][0]), "dev": len(sides["dev_source"]), "one_side": len(further)}


# ---------------------------------------------------------------- steps
def shape() -> list[str]:
    """The flags of the pre-training's recipe that give a model its shape."""
    return ["--config_name", read_yaml(RECIPES / "translation_pre_train.yaml")["config_name"]]


class System:
    """The steps of one seed. `rows` has {name of a row of the table: (its file of answers, the steps before them that
    no row above has)}."""

    def __init__(self, args: StudyArguments, steps: Steps, seed: str):
        self.args, self.steps, self.seed = args, steps, seed
        self.rows: dict[str, tuple[Path, list[str]]] = {}
        self.added: list[str] = []
        self.data, self.folder = steps.folder / "data", steps.folder / f"seed_{seed}"

    def name_of(self, step: str) -> str:
        """The name of a step of this seed, which the next row of the table counts."""
        self.added.append(f"{step} {self.seed}")
        return self.added[-1]

    def trained(self, name: str, start: Path | None, pairs: Path, back: bool = False) -> Path:
        """The folder of a fine-tuning: from `start`, or from scratch; `back`: from target to source."""
        folder, columns = self.folder / name, ("target", "source") if back else ("source", "target")
        begin = ["--model_name_or_path", start] if start else ["--tokenizer_name", self.steps.folder / "tokenizer"]
        begin += [] if start else shape()
        words = [RECIPES / "translation_fine_tune.yaml", *begin, "--train_file", pairs]
        words += ["--validation_file", self.data / "dev.jsonl", "--source_column", columns[0]]
        words += ["--target_column", columns[1], "--save_total_limit", self.args.average_last, "--seed", self.seed]
        words += self.args.fine_tune_flags.split()
        self.steps.train(self.name_of(name), "fine_tune_t5.py", folder, *words)
        return folder

    def answered(self, row: str, name: str, model: Path, *search: object) -> None:
        """Translates the test sentences: a row of the table."""
        answers = self.folder / f"{name}.jsonl"
        words = ["--model_name_or_path", model, "--input_file", self.args.test_source, "--output_file", answers]
        words += ["--seed", self.seed, *search, *self.args.predict_flags.split()]
        self.steps.run(f"{name} {self.seed}", "predict_t5.py", *words)
        self.rows[row], self.added = (answers, self.added), []

    def run(self, has_one_side: bool) -> None:
        """All steps. Those of a feature whose folder is not there are left out, which a line says."""
        args, pairs, greedy = self.args, self.data / "pairs.jsonl", ["--num_beams", 1]
        self.answered("the pairs alone", "scratch_greedy", self.trained("scratch", None, pairs), *greedy)
        start = self.folder / "pre_trained"
        words = [RECIPES / "translation_pre_train.yaml", "--train_file", self.data / "text.txt"]
        words += [*(args.text_file or []), "--tokenizer_name", self.steps.folder / "tokenizer"]
        words += ["--seed", self.seed, *args.pre_train_flags.split()]
        self.steps.train(self.name_of("pre_trained"), "pre_train_t5.py", start, *words)
        model = self.trained("tuned", start, pairs)
        self.answered("after pre-training on both languages", "tuned_greedy", model, *greedy)
        back = self.trained("back", start, pairs, back=True)
        if has_one_side:
            mixed = self.folder / "mixed.jsonl"
            words = ["--text_file", self.data / "one_side.txt", "--model_name_or_path", back, "--output_file", mixed]
            words += ["--real_file", pairs, "--tag", TAG, "--", "--num_beams", args.num_beams]
            words += args.predict_flags.split()
            self.steps.run(self.name_of("mixed"), "features/back_translation/back_translate.py", *words)
            model = self.trained("back_translated", start, mixed)
            self.answered("and back-translation", "back_translated_greedy", model, *greedy)
        if self.has("averages"):
            mean, run = self.folder / "averaged", model
            words = ["--average_last", args.average_last, "--model_name_or_path", run, "--output_dir", mean]
            self.steps.run(self.name_of("averaged"), "export_checkpoint.py", *words)
            model = mean
            self.answered(f"and the mean of {args.average_last} checkpoints", "averaged_greedy", model, *greedy)
        beams = ["--num_beams", args.num_beams]
        self.answered(f"and {args.num_beams} beams", "beams", model, *beams)
        if self.has("rerank"):
            drawn = ["--do_sample", "--top_p", 0.9, "--num_return_sequences", args.num_drawn, "--rerank", "mbr"]
            self.answered(f"instead, MBR of {args.num_drawn} drawn", "mbr", model, *drawn)
            channel = [*beams, "--num_return_sequences", args.num_beams, "--rerank", "score", "--rerank_model", back]
            self.answered(f"instead, noisy channel of {args.num_beams} beams", "channel", model, *channel)

    def has(self, feature: str) -> bool:
        if there := (PROJECT / "features" / feature).is_dir():
            return there
        say(f"left out: features/{feature} is not there")
        return False


# ---------------------------------------------------------------- the table
def scores_of(answers: Path, reference: Path) -> dict:
    """{metric: score} of a file of answers, which is written as text beside it."""
    import sacrebleu.metrics

    with answers.open(encoding="utf-8") as file:
        texts = [json.loads(line)["prediction"] for line in file]
    write_text(answers.with_suffix(".txt"), "".join(f"{text}\n" for text in texts))
    scorers = {name: getattr(sacrebleu.metrics, kind)() for name, kind in METRICS.items()}
    found = {name: scorer.corpus_score(texts, [lines_of(reference)]).score for name, scorer in scorers.items()}
    signatures = {name: str(scorer.get_signature()) for name, scorer in scorers.items()}
    return found | {"signatures": signatures, "answers": str(answers.with_suffix(".txt"))}


def written_table(systems: list[System], reference: Path, steps: Steps) -> str:
    """The table of all rows, with means and deviations over the seeds; study.json and table.md hold it too."""
    record: dict = {"steps": steps.done, "rows": {}}
    for row in systems[0].rows:
        record["rows"][row] = [{"seed": one.seed} | scores_of(one.rows[row][0], reference) for one in systems]
    cells = []
    for row, values in record["rows"].items():
        answering = [[f"{one.rows[row][0].stem} {one.seed}"] for one in systems]
        training = [one.rows[row][1] for one in systems]
        scores = [mean_and_deviation([value[metric] for value in values], "{:.1f}") for metric in METRICS]
        seconds = [
            [sum(steps.done[name]["seconds"] for name in names) for names in kind] for kind in (training, answering)
        ]
        cells.append([row, *scores, *(mean_and_deviation(kind, "{:.0f}") for kind in seconds)])
    table = markdown_table(["", *METRICS, "seconds of training", "seconds of answering"], cells)
    write_json(steps.folder / "study.json", record)
    write_text(steps.folder / "table.md", f"{table}\n")
    return table


@exit_on_user_error()
def main(argv: list[str] | None = None) -> str:
    """Runs the study; returns the table."""
    (args,) = parse_arguments(FLAGS, argv, about=__doc__)
    seeds, folder = seeds_of(args.seeds), Path(args.output_dir)
    steps = Steps(folder)
    counts = write_data(args, folder / "data")
    digests = [contents_digest([folder / "data" / name]) for name in ("pairs.jsonl", "dev.jsonl", "text.txt")]
    if not steps.finished("data", digests):
        steps.finish("data", digests, 0)
    say(f"{counts['pairs']:,} pairs, {counts['one_side']:,} sentences of one side, {counts['dev']:,} of development")
    plain, tokenizer = folder / "plain_tokenizer", folder / "tokenizer"
    text = ["--train_file", folder / "data" / "text.txt", *(args.text_file or [])]
    steps.run("plain_tokenizer", "create_tokenizer.py", *text, "--vocab_size", args.vocab_size, "--output_dir", plain)
    words = ["--from_tokenizer", plain, "--add_tokens", TAG, "--output_dir", tokenizer]
    steps.run("tokenizer", "create_tokenizer.py", *words)
    systems = [System(args, steps, seed) for seed in seeds]
    for system in systems:
        system.run(has_one_side=counts["one_side"] > 0)
    table = written_table(systems, Path(args.test_target), steps)
    say(*table.split("\n"))
    return table


if __name__ == "__main__":
    run_script(main)
