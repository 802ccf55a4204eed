r"""What pre-training gives a head on the encoder: tables of entities, residues and embeddings over several seeds.

    python -m studies.heads_study --output_dir out/heads --seeds 0,1,2 \
        --entities_file ronec/valid.json ronec/test.json --text_file 'novels/*.txt' --train_source train.en \
        --train_target train.de --dev_source val.en --dev_target val.de --test_source test.en --test_target test.de

Each part trains a tokenizer, pre-trains on the text of its training rows (and --text_file for entities), and trains
the head with each seed: from scratch and from the pre-trained encoder. Parts without files are left out.

- entities: the sentences are shuffled with seed 0; the last --test_sentences are the test, those before them the
  development. A third row has the pre-trained T5 write the entities as text ("PERSON: Ana; GPE: Cluj").
- residues: `python -m studies.residues` makes the sequences, and the accuracy that is possible.
- embeddings: text files with a sentence on each line, and their translations.

A step that is finished is not repeated, one that was stopped goes on, so the same command resumes. All scores are
computed from the answers of predict_t5.py. Writes study.json (scores of each seed, commands) and table.md.
"""

import json
import random
import unicodedata
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foundry.common.command_line import exit_on_user_error, parse_arguments
from foundry.common.digests import contents_digest
from foundry.common.errors import UserError
from foundry.common.flags import option
from foundry.common.processes import run_script, say
from foundry.common.reports import markdown_table, read_json, write_json
from foundry.common.words import comma_words
from foundry.common.yaml_files import read_yaml
from studies.study_steps import RECIPES, Steps, lines_of, seeds_of, write_text
from tools.seed_scores import mean_and_deviation

PAIRS = ("train_source", "train_target", "dev_source", "dev_target", "test_source", "test_target")
SCRATCH, TUNED, AS_TEXT = "from scratch", "pre-trained here", "pre-trained here, as text"
NOTHING = "none"  # the target text of a sentence without entities
AT = 10  # places of a ranking that count


@dataclass
class StudyArguments:
    """The data, and how much is done with it."""

    _argument_group_name = "study"

    output_dir: str = option("out/heads", "Folder of all runs and of the tables.")
    parts: str | None = option(None, "Those to do, such as residues,entities. Not set: all whose files are named.")
    entities_file: list[str] | None = option(None, "Sentences whose words have tags: JSON, JSON lines or parquet.")
    test_sentences: int = option(600, "Sentences that are tagged for the table.", at_least=1)
    dev_sentences: int = option(330, "Sentences on which trainings are evaluated.", at_least=1)
    text_file: list[str] | None = option(None, "Further text of their language, for tokenizer and pre-training.")
    train_source: str | None = option(None, "Training sentences of embeddings, a line each.")
    train_target: str | None = option(None, "Their translations.")
    dev_source: str | None = option(None, "Sentences on which trainings are evaluated.")
    dev_target: str | None = option(None, "Their translations.")
    test_source: str | None = option(None, "Sentences that look for their translations, for the table.")
    test_target: str | None = option(None, "Their translations.")
    labelled: int = option(200, "Sequences with labels, of residues.", at_least=1)
    unlabelled: int = option(10_000, "Sequences without labels, for the pre-training.", at_least=1)
    seeds: str = option("0,1,2", "Seeds of the heads, separated by commas; the first is that of the pre-training.")
    vocab_size: int = option(4000, "Size of the tokenizers of words, 100 sentinels included.", at_least=300)
    pre_train_flags: str = option("", "Further flags of all pre-trainings, as one word behind =.")
    fine_tune_flags: str = option("", "Further flags of all fine-tunings, likewise.")


class Part:
    """A table: the folder of its data and runs, and the steps that all parts have."""

    name: str
    recipe: str
    text = "text.txt"  # in the folder, for tokenizer and pre-training
    columns: tuple[str, ...] = ()  # flags that name those of the rows
    systems: tuple[str, ...] = (SCRATCH, TUNED)

    def __init__(self, args: StudyArguments, steps: Steps):
        self.args, self.steps, self.folder = args, steps, (steps.folder / self.name).resolve()
        self.seeds = seeds_of(args.seeds)
        self.shape = ["--config_name", read_yaml(RECIPES / "encoder_pre_train.yaml")["config_name"]]

    def pre_trained(self, texts: list[str], *vocabulary: object) -> None:
        """Trains the tokenizer and the T5 from which heads start."""
        tokenizer, words = self.folder / "tokenizer", ["--train_file", self.folder / self.text, *texts]
        self.steps.run(f"{self.name} tokenizer", "create_tokenizer.py", *words, *vocabulary, "--output_dir", tokenizer)
        words = [RECIPES / "encoder_pre_train.yaml", *words, "--tokenizer_name", tokenizer]
        words += ["--seed", self.seeds[0], *self.args.pre_train_flags.split()]
        self.steps.train(f"{self.name} pre_trained", "pre_train_t5.py", self.folder / "pre_trained", *words)

    def trained(self, system: str, seed: str, recipe: str = "", rows: str = "") -> Path:
        """The folder of a fine-tuning. rows: a suffix of the names of the training and development rows."""
        folder = self.folder / f"{system.replace(',', '').replace(' ', '_')}_{seed}"
        begin = ["--tokenizer_name", self.folder / "tokenizer", *self.shape]
        if system != SCRATCH:
            begin = ["--model_name_or_path", self.folder / "pre_trained"]
        words = [RECIPES / (recipe or self.recipe), *begin, "--train_file", self.folder / f"train{rows}.jsonl"]
        words += ["--validation_file", self.folder / f"dev{rows}.jsonl", *self.columns, "--seed", seed]
        words += self.args.fine_tune_flags.split()
        self.steps.train(f"{self.name} {system} {seed}", "fine_tune_t5.py", folder, *words)
        return folder

    def answered(self, model: Path, inputs: Path, suffix: str, *more: object) -> Path:
        """The file of a model's answers."""
        answers = model.with_name(f"{model.name}.{inputs.stem}{suffix}")
        words = ["--model_name_or_path", model, "--input_file", inputs, "--output_file", answers, *more]
        self.steps.run(f"{self.name} {answers.name}", "predict_t5.py", *words)
        return answers

    def prepare(self) -> None:
        """Writes the data, and pre-trains."""
        raise NotImplementedError

    def scored(self, system: str, seed: str) -> dict[str, float]:
        """Trains, answers the test rows, and returns the metrics of the table."""
        raise NotImplementedError

    def rows(self) -> dict[str, list[dict]]:
        """{row of the table: the scores of each seed}."""
        self.prepare()
        return {
            system: [{"seed": int(seed)} | self.scored(system, seed) for seed in self.seeds] for system in self.systems
        }

    def write_rows(self, name: str, rows: list[dict]) -> None:
        text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
        write_text(self.folder / f"{name}.jsonl", text)

    def check_data(self, *files: str) -> None:
        """UserError if the folder holds a study of other data."""
        digests = [contents_digest([self.folder / name]) for name in files]
        if not self.steps.finished(f"{self.name} data", digests):
            self.steps.finish(f"{self.name} data", digests, 0)


# ---------------------------------------------------------------- entities
def entity_texts(words: list[str], tags: list[str]) -> list[tuple[str, str]]:
    """[(label, text)] in the order of the sentence."""
    from features.encoder_heads.tag_schemes import Scheme

    return [(label, " ".join(words[first : last + 1])) for label, first, last in Scheme("IOB2").entities(tags)]


def written_entities(found: list[tuple[str, str]]) -> str:
    """[("PERSON", "Ana"), ("GPE", "Cluj")] -> "PERSON: Ana; GPE: Cluj"; [] -> "none"."""
    return "; ".join(f"{label}: {text}" for label, text in found) or NOTHING


def read_entities(text: str) -> list[tuple[str, str]]:
    """Undoes `written_entities`; what is not written so is left out."""
    parts = [part.partition(": ") for part in text.split("; ")]
    return [(label.strip(), words.strip()) for label, colon, words in parts if colon and label.strip()]


def f1_of_texts(found: list[list[tuple[str, str]]], wanted: list[list[tuple[str, str]]]) -> float:
    """F1 of entities that are the same by label and text, wherever they stand in their sentence; in NFKC, which the
    tokenizer writes."""
    same = total = 0
    for one, other in zip(found, wanted, strict=True):
        counts = [
            Counter((label, unicodedata.normalize("NFKC", text)) for label, text in side) for side in (one, other)
        ]
        same += (counts[0] & counts[1]).total()
        total += counts[0].total() + counts[1].total()
    return 2 * same / max(total, 1)


def tags_of_answer(words: list[str], spans: list[dict]) -> list[str]:
    """The tags of words that predict_t5.py's spans give, whose places are those in the words joined by spaces."""
    starts = np.cumsum([0, *(len(word) + 1 for word in words)])[:-1]
    tags = ["O"] * len(words)
    for span in spans:
        inside = np.flatnonzero((starts >= span["start"]) & (starts < span["end"]))
        for number in inside:
            tags[number] = f"{'B' if number == inside[0] else 'I'}-{span['label']}"
    return tags


class Entities(Part):
    name, recipe = "entities", "entities.yaml"
    systems = (SCRATCH, TUNED, AS_TEXT)

    def prepare(self) -> None:
        from features.encoder_heads.tagged_texts import form_of
        from foundry.corpora.files import expand_files
        from foundry.corpora.reading import read_rows

        rows = []
        for path in expand_files("--entities_file", self.args.entities_file or []):
            records = list(read_rows(path))
            words, tags = form_of(records[0], None, False, True, str(path)).columns
            rows += [{"words": record[words], "tags": record[tags]} for record in records]
        random.Random(0).shuffle(rows)
        ends = len(rows) - self.args.test_sentences - self.args.dev_sentences, len(rows) - self.args.test_sentences
        if ends[0] < 1:
            raise UserError(f"--entities_file: has {len(rows):,} sentences, of which none is left for the training")
        splits = {"train": rows[: ends[0]], "dev": rows[ends[0] : ends[1]], "test": rows[ends[1] :]}
        for name, part in splits.items():
            self.write_rows(name, part)
            texts = [entity_texts(**row) for row in part]
            pairs = [
                {"source": " ".join(row["words"]), "target": written_entities(text)}
                for row, text in zip(part, texts, strict=True)
            ]
            self.write_rows(f"{name}_text", pairs)
        write_text(self.folder / "text.txt", "".join(f"{' '.join(row['words'])}\n" for row in splits["train"]))
        self.check_data("train.jsonl", "dev.jsonl", "test.jsonl")
        texts = [str(Path(text).resolve()) for text in self.args.text_file or []]
        self.pre_trained(texts, "--vocab_size", self.args.vocab_size)

    def scored(self, system: str, seed: str) -> dict[str, float]:
        from seqeval.metrics import f1_score

        rows = list(map(json.loads, lines_of(self.folder / "test.jsonl")))
        wanted = [entity_texts(**row) for row in rows]
        if system == AS_TEXT:
            model = self.trained(system, seed, "entities_as_text.yaml", "_text")
            answers = self.answered(model, self.folder / "test_text.jsonl", ".jsonl", "--num_beams", 1)
            found = [read_entities(json.loads(line)["prediction"]) for line in lines_of(answers)]
            return {"f1_of_texts": f1_of_texts(found, wanted)}
        answers = self.answered(self.trained(system, seed), self.folder / "test.jsonl", ".jsonl")
        spans = [json.loads(line)["prediction"] for line in lines_of(answers)]
        tags = [tags_of_answer(row["words"], one) for row, one in zip(rows, spans, strict=True)]
        found = [entity_texts(row["words"], one) for row, one in zip(rows, tags, strict=True)]
        return {"f1": float(f1_score([row["tags"] for row in rows], tags)), "f1_of_texts": f1_of_texts(found, wanted)}


# ---------------------------------------------------------------- residues
class Residues(Part):
    name, recipe, text = "residues", "residues.yaml", "unlabelled.txt"

    def prepare(self) -> None:
        words = ["--labelled", self.args.labelled, "--unlabelled", self.args.unlabelled, "--output_dir", self.folder]
        self.steps.run("residues data", "studies/residues.py", *words)
        # 20 letters need few tokens: without bytes no tokenizer is as small as the text.
        self.pre_trained([], "--vocab_size", 400, "--byte_fallback", "true")

    def scored(self, system: str, seed: str) -> dict[str, float]:
        answers = self.answered(self.trained(system, seed), self.folder / "test.jsonl", ".jsonl")
        rows = list(map(json.loads, lines_of(answers)))
        same = [one == other for row in rows for one, other in zip(row["prediction"], row["tags"], strict=True)]
        return {"accuracy": sum(same) / len(same)}

    def rows(self) -> dict[str, list[dict]]:
        known = {"each letter alone, with the true probabilities": "letter_alone", "the best possible": "ceiling"}
        found, bounds = super().rows(), read_json(self.folder / "residues.json")
        return found | {row: [{"accuracy": bounds[name]}] for row, name in known.items()}


# ---------------------------------------------------------------- embeddings
def ranking(sources: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """MRR and recall at AT of the target of each source, among all targets by cosine. sources, targets [N, D]."""
    one, other = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in (sources, targets))
    likeness = one @ other.T  # [N, N]
    places = 1 + (likeness > likeness.diagonal()[:, None]).sum(1)
    return {
        f"mrr_at_{AT}": float(np.where(places <= AT, 1 / places, 0).mean()),
        f"recall_at_{AT}": float((places <= AT).mean()),
    }


class Embeddings(Part):
    name, recipe = "embeddings", "sentence_embeddings.yaml"
    columns = ("--source_column", "source", "--target_column", "target")

    def prepare(self) -> None:
        from foundry.corpora.files import check_file

        for name in PAIRS:
            if getattr(self.args, name) is None:
                raise UserError(f"--{name}: name the file; --help shows an example")
            check_file(f"--{name}", Path(getattr(self.args, name)))
        sides = {name: lines_of(Path(getattr(self.args, name))) for name in PAIRS}
        for source, target in zip(PAIRS[::2], PAIRS[1::2], strict=True):
            if len(sides[source]) != len(sides[target]) or not sides[source]:
                raise UserError(
                    f"--{source} {getattr(self.args, source)}: has {len(sides[source]):,} lines, and --{target} "
                    f"{getattr(self.args, target)} {len(sides[target]):,}: give two sides of the same sentences"
                )
            name = source.removesuffix("_source")
            pairs = zip(sides[source], sides[target], strict=True)
            self.write_rows(name, [{"source": one, "target": other} for one, other in pairs])
        text = [*sides["train_source"], *sides["train_target"]]
        write_text(self.folder / "text.txt", "".join(f"{line}\n" for line in text))
        self.write_rows("test_texts", [{"text": line} for line in [*sides["test_source"], *sides["test_target"]]])
        self.check_data("train.jsonl", "dev.jsonl", "test.jsonl")
        self.pre_trained([], "--vocab_size", self.args.vocab_size)

    def scored(self, system: str, seed: str) -> dict[str, float]:
        texts = self.folder / "test_texts.jsonl"
        found = np.load(self.answered(self.trained(system, seed), texts, ".npy", "--source_column", "text"))
        return ranking(*np.split(found, 2))


PARTS = {part.name: part for part in (Residues, Entities, Embeddings)}


# ---------------------------------------------------------------- the tables
def table_of(rows: dict[str, list[dict]]) -> str:
    """Means and deviations over the seeds."""
    metrics = list(dict.fromkeys(name for values in rows.values() for row in values for name in row if name != "seed"))
    cells = [
        [row, *(mean_and_deviation([value.get(metric) for value in values], "{:.3f}") for metric in metrics)]
        for row, values in rows.items()
    ]
    return markdown_table(["", *metrics], cells)


@exit_on_user_error()
def main(argv: list[str] | None = None) -> str:
    """Runs the study; returns the tables."""
    (args,) = parse_arguments([StudyArguments], argv, about=__doc__)
    seeds_of(args.seeds)
    steps = Steps(Path(args.output_dir))
    named = {"residues": True, "entities": args.entities_file, "embeddings": any(getattr(args, name) for name in PAIRS)}
    parts = [part for part in named if named[part]] if args.parts is None else comma_words(args.parts)
    if not parts or not {*parts} <= {*named}:
        raise UserError(f"--parts {args.parts}: name some of {', '.join(named)}")
    record: dict = {}
    for part in parts:
        record[part] = PARTS[part](args, steps).rows()
        write_json(steps.folder / "study.json", {"rows": record, "steps": steps.done})
    tables = "\n".join(f"{name}\n\n{table_of(rows)}\n" for name, rows in record.items())
    write_text(steps.folder / "table.md", tables)
    say(*tables.split("\n"))
    return tables


if __name__ == "__main__":
    run_script(main)
