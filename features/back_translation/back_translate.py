r"""Make pairs of text from one side: a trained model translates it back, or a teacher answers it.

    python -m features.back_translation.back_translate --text_file news.en --model_name_or_path out/en_de \
        --real_file train.jsonl --real_weight 2 --source_column de --target_column en --output_file mixed.jsonl \
        -- --num_beams 4 --bf16
    python -m features.back_translation.back_translate --text_file more.de --model_name_or_path out/large_de_en \
        --made target --source_column de --target_column en --output_file distilled.jsonl -- --num_beams 4
    python fine_tune_t5.py --train_file mixed.jsonl --source_column de --target_column en --validation_file dev.jsonl

What stands after -- are flags of predict_t5.py, which answers the text into OUTPUT_FILE.answers.jsonl, and continues
there when the same command is given again. What the model wrote becomes the source, behind a tag (tagged
back-translation, Caswell et al. 2019, arXiv 1906.06442), or with --made target the target (sequence-level distillation,
Kim and Rush 2016, arXiv 1606.07947). Pairs that a filter drops are counted, in OUTPUT_FILE.counts.json too. Each made
pair says in `made_by` from which model and weights it is.
"""

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

if not __package__:  # started by its path: Python then looks beside this file alone for modules
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from foundry.common.command_line import exit_on_user_error, parse_arguments
from foundry.common.errors import UserError
from foundry.common.flags import option, refuse
from foundry.common.machine import run_command, run_script
from foundry.common.paths import check_output_file
from foundry.common.ranks import world_size
from foundry.common.reports import PROJECT, end_summary, plain_json, read_json, write_aside, write_json
from foundry.common.words import listed

MADE_BY = "made_by"  # the column that says which model wrote a side of the pair
TAG = "<BT>"
WITH_SCORES = "log-probabilities need several answers: add -- --num_beams 4 --num_return_sequences 2"
ANSWERS, COUNTS = ".answers.jsonl", ".counts.json"  # behind the name of the output


@dataclass
class PairArguments:
    """What is made into pairs, by which model, and what is dropped."""

    _argument_group_name = "pairs"

    text_file: str | None = option(None, "Text of one side: lines, or rows with --text_column.")
    text_column: str | None = option(None, "Column of --text_file with the text, if it has rows.")
    model_name_or_path: str | None = option(None, "Folder or Hub name of the model that writes the other side.")
    made: str = option("source", "Which side of a pair the model writes.", choices=("source", "target"))
    tag: str = option(TAG, "Of --made source: stands before each source that the model wrote; none for no tag.")
    source_column: str = option("source", "Column of the sources in --output_file and --real_file.")
    target_column: str = option("target", "Column of the targets in --output_file and --real_file.")
    output_file: str | None = option(None, "Pairs as JSON lines: the real ones first.")
    real_file: str | None = option(None, "Real pairs: .jsonl, .json, .csv, .tsv or .parquet, with both columns.")
    real_weight: float = option(1.0, "How often a real pair stands in --output_file; a part of one is drawn.", above=0)
    most_length_ratio: float = option(
        3.0,
        "Pairs are dropped whose longer side has more than so many times the characters of the other; a Chinese "
        "character counts as 3, kana and Hangul as 2.",
        at_least=1,
    )
    least_score: float | None = option(
        None,
        "Pairs are dropped of whose tokens the mean log-probability is below; needs -- --num_return_sequences.",
        at_most=0,
    )
    seed: int = option(42, "Of the draw by --real_weight.", at_least=0)


def check_pairs(args: PairArguments) -> None:
    """UserError for what cannot work, before a model is read."""
    for name in ("text_file", "model_name_or_path", "output_file"):
        if getattr(args, name) is None:
            raise UserError(f"--{name}: is needed; --help shows an example")
    if args.made == "target":
        refuse(args, "tag", "stands before sources that a model wrote, and with --made target they are real")
    if args.source_column == args.target_column:
        raise UserError(f"--target_column {args.target_column}: is --source_column too. Name two columns")
    if taken := {args.source_column, args.target_column} & {MADE_BY}:
        raise UserError(f"--source_column, --target_column: {taken.pop()} is the column that names the model")
    if args.real_file is None:
        refuse(args, "real_weight", "is how often a real pair stands in --output_file: name them with --real_file")
    for name in ("text_file", "real_file"):
        file = getattr(args, name)
        if file is not None and Path(file).absolute() == Path(args.output_file).absolute():
            raise UserError(f"--output_file {args.output_file}: is --{name} too. Name another one")
    check_output_file("--output_file", args.output_file)
    if Path(args.output_file).exists() and not Path(f"{args.output_file}{COUNTS}").exists():
        raise UserError(f"--output_file {args.output_file}: is no file of this command. Name another one")
    if world_size() > 1:
        raise UserError(
            f"one process makes pairs: let the launcher start predict_t5.py --output_file {args.output_file}{ANSWERS}, "
            "then this command, with python"
        )


def check_columns(args: PairArguments) -> None:
    """UserError if --text_file or --real_file has not the columns that are named, before a model answers."""
    from foundry.corpora.columns import MISSING, value_of
    from foundry.corpora.files import check_file, is_plain_text
    from foundry.corpora.reading import read_rows
    from tasks.rows import no_column

    text_file = Path(args.text_file)
    check_file("--text_file", text_file)
    if is_plain_text(text_file):
        if args.text_column:
            raise UserError(f"--text_column {args.text_column}: --text_file {text_file} has lines, and no columns")
    else:
        row = next(read_rows(text_file), {})
        if args.text_column is None:
            raise UserError(f"--text_file {text_file}: has rows. Name a column with --text_column: {listed(row)}")
        if value_of(row, args.text_column) is MISSING:
            raise no_column(f"{text_file}, row 1", args.text_column, row, "which --text_column names")
    if args.real_file is None:
        return
    check_file("--real_file", Path(args.real_file))
    for number, row in enumerate(read_rows(Path(args.real_file)), start=1):
        place = f"--real_file {args.real_file}, row {number}"
        if MADE_BY in row:
            raise UserError(f"{place}: has a column {MADE_BY}, so not all are real")
        for flag in ("source_column", "target_column"):
            column = getattr(args, flag)
            if value_of(row, column) is MISSING:
                raise no_column(place, column, row, f"which --{flag} names")


def predict(args: PairArguments, answers: Path, words: list[str]) -> None:
    """Has predict_t5.py answer the text. SystemExit with its exit code if it fails, after it has said why."""
    own = {"model_name_or_path": args.model_name_or_path, "input_file": args.text_file, "output_file": answers}
    if args.text_column:
        own["source_column"] = args.text_column
    for word in words:
        if word.removeprefix("--").split("=")[0].replace("-", "_") in own:
            raise UserError(f"{word}: give it before --, or leave it out: predict_t5.py gets it from this command")
    if args.least_score is not None and "num_return_sequences" not in "".join(words).replace("-", "_"):
        raise UserError(f"--least_score {args.least_score}: {WITH_SCORES}")
    command = [sys.executable, str(PROJECT / "predict_t5.py"), *words]
    command += [part for name, value in own.items() for part in (f"--{name}", str(value))]
    if code := run_command(command):
        raise SystemExit(code)


# ---------------------------------------------------------------- pairs
# Article 1 of the Universal Declaration of Human Rights has 170 characters in English, 43 in Chinese, 85 in Japanese
# and 87 in Korean.
HAN = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
SYLLABLES = re.compile("[\u3041-\u30ff\uac00-\ud7a3]")


def characters(text: str) -> int:
    """How many characters of an alphabet a text is about as long as: a Chinese one counts as 3, a syllable of kana or
    Hangul as 2."""
    return len(text) + 2 * len(HAN.findall(text)) + len(SYLLABLES.findall(text))


class Pairs:
    """The pairs of a file of answers, and in `dropped` why others are none."""

    def __init__(self, args: PairArguments, answers: Path, made_by: str):
        self.args, self.answers, self.made_by = args, answers, made_by
        self.made, self.real, self.dropped = 0, 0, Counter()
        self.tokenizer = None
        if args.least_score is not None:
            from foundry.corpora.tokenizers import load_tokenizer

            self.tokenizer = load_tokenizer(args.model_name_or_path, "--model_name_or_path")

    def made_pairs(self) -> Iterator[dict]:
        """Those that a model made one side of."""
        from foundry.corpora.columns import value_of
        from foundry.corpora.reading import read_rows
        from tasks.row_texts import joined_text

        args, column = self.args, self.args.text_column or "source"
        for number, row in enumerate(read_rows(self.answers), start=1):
            text, written = joined_text(value_of(row, column)).strip(), row["prediction"].strip()
            if reason := self.reason(text, written, row, f"{self.answers}, line {number}"):
                self.dropped[reason] += 1
                continue
            self.made += 1
            source, target = (written, text) if args.made == "source" else (text, written)
            if args.made == "source" and args.tag != "none":
                source = f"{args.tag} {source}"
            yield {args.source_column: source, args.target_column: target, MADE_BY: self.made_by}

    def reason(self, text: str, written: str, row: dict, place: str) -> str | None:
        """Why a text and what the model wrote are no pair; None if they are one."""
        if not text or not written:
            return "empty"
        if text == written:
            return "identical"
        least, most = sorted((characters(text), characters(written)))
        if most > self.args.most_length_ratio * least:
            return "length ratio"
        if self.tokenizer is not None:
            from foundry.corpora.tokenizers import encode_targets

            if "n_best" not in row:
                raise UserError(f"--least_score {self.args.least_score}: {place} has no n_best; {WITH_SCORES}")
            (tokens,) = encode_targets(self.tokenizer, [written])
            nats = next(one["log_probability"] for one in row["n_best"] if one["prediction"] == row["prediction"])
            return "score" if nats / len(tokens) < self.args.least_score else None
        return None

    def real_pairs(self) -> Iterator[dict]:
        """The real ones, each as often as --real_weight says."""
        from foundry.corpora.columns import value_of
        from foundry.corpora.reading import read_rows

        if self.args.real_file is None:
            return
        draw, weight = random.Random(self.args.seed), self.args.real_weight
        columns = [self.args.source_column, self.args.target_column]
        for row in read_rows(Path(self.args.real_file)):
            for _ in range(int(weight) + (draw.random() < weight % 1)):
                self.real += 1
                yield {name: value_of(row, name) for name in columns}

    def write(self, path: Path) -> None:
        """Writes the real pairs and the made ones, whole or not at all."""

        def lines(aside: Path) -> None:
            with aside.open("w", encoding="utf-8") as file:
                for pairs in (self.real_pairs(), self.made_pairs()):
                    file.writelines(json.dumps(plain_json(pair), ensure_ascii=False) + "\n" for pair in pairs)

        write_aside(path, lines)


@exit_on_user_error()
def main(argv: list[str] | None = None) -> dict:
    """Runs the script; returns the content of OUTPUT_FILE.counts.json."""
    argv = sys.argv[1:] if argv is None else list(map(str, argv))
    place = argv.index("--") if "--" in argv else len(argv)
    (args,) = parse_arguments([PairArguments], argv[:place], about=__doc__)
    check_pairs(args)
    # After the flags were read: --help and mistakes need no torch.
    check_columns(args)
    answers = Path(f"{args.output_file}{ANSWERS}")
    predict(args, answers, argv[place + 1 :])
    settings = read_json(answers.with_name(f"{answers.name}.settings.json"))
    pairs = Pairs(args, answers, f"{args.model_name_or_path} {settings['weights']}")
    pairs.write(Path(args.output_file))
    counts = {"made": pairs.made, "dropped": dict(pairs.dropped), "real": pairs.real, MADE_BY: pairs.made_by}
    write_json(f"{args.output_file}{COUNTS}", counts | {"flags": asdict(args), "search": settings})
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in pairs.dropped.items())
    rows = {"made": f"{pairs.made:,} pairs", "dropped": dropped or "none"}
    rows["real"] = f"{pairs.real:,} pairs" if args.real_file else None
    end_summary(rows | {"written to": args.output_file}, title="pairs")
    return counts


if __name__ == "__main__":
    run_script(main)
