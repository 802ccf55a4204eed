"""Choose again among the answers of a file that `predict_t5.py --num_return_sequences` has written.

    python -m features.rerank.rerank_answers --answers_file answers.jsonl --output_file chosen.jsonl --rerank mbr
    python -m features.rerank.rerank_answers --answers_file answers.jsonl --output_file chosen.jsonl --rerank score \
        --rerank_model out/german_to_english

Each line of the output is the line of the file with the chosen text as its `prediction`, and `n_best` in the new
order, with the number by which it was chosen, as in a run that chooses while it predicts. --rerank mbr needs no model.
The same command resumes a stopped run.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

if not __package__:  # started by its path: Python then looks beside this file alone for modules
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from features.rerank import RULES, Rerank, in_order
from foundry.common.command_line import exit_on_user_error, parse_arguments
from foundry.common.digests import contents_digest
from foundry.common.errors import UserError
from foundry.common.flags import Flags, check_rules, option
from foundry.common.machine import run_script
from foundry.common.paths import check_output_file
from foundry.common.reports import end_summary, start_summary
from foundry.common.whole_folders import told_if_full

LINES = 32  # that are written together


@dataclass
class AnswersArguments:
    """What is read, and where the result is written."""

    _argument_group_name = "answers"

    answers_file: str | None = option(None, "JSON lines with n_best, as predict_t5.py writes them.")
    output_file: str | None = option(None, "The same lines, chosen again. Not set: <answers_file>.chosen.jsonl.")
    overwrite_output_file: bool = option(False, "Start again instead of resuming --output_file.")
    source_column: str = option("source", "Of --rerank score: the column with the source.")
    batch_size: int = option(32, "Of --rerank score: answers that the second model reads at a time.", at_least=1)
    use_cpu: bool = option(False, "Use the CPU even if there is a GPU.")


FLAGS = [AnswersArguments, Rerank]


def n_best_of(row: dict, place: str, source_column: str | None) -> list[dict]:
    """The n_best of a line. UserError unless its answers have texts and log-probabilities, and the line its source."""
    found = row.get("n_best")
    types = {"prediction": str, "log_probability": int | float}
    if not isinstance(found, list) or not all(
        isinstance(one, dict) and isinstance(one.get(name), kind) for one in found for name, kind in types.items()
    ):
        raise UserError(f"{place}: has no n_best with texts and log-probabilities: predict with --num_return_sequences")
    if source_column and not isinstance(row.get(source_column), str):
        raise UserError(f"--source_column {source_column}: {place} has no text there; the columns are {', '.join(row)}")
    return found


def chosen_again(rows: list[dict], score: Callable, source_column: str) -> Iterator[dict]:
    """The rows with their n_best in the new order; a row without answers stays. score: as of `Rerank.scorer`."""
    for row in rows:
        found = row["n_best"]
        if len(found) > 1:
            texts = [[one["prediction"] for one in found]]
            nats = [[one["log_probability"] for one in found]]
            (numbers,) = score([row.get(source_column)], texts, nats)
            pairs = in_order(list(zip(found, numbers, strict=True)), lambda pair: pair[1])
            found = [{name: one[name] for name in ("prediction", "log_probability")} | more for one, more in pairs]
        yield row | ({"prediction": found[0]["prediction"], "n_best": found} if found else {})


@exit_on_user_error()
def main(argv: list[str] | None = None) -> dict[str, int]:
    """Runs the script; returns {"lines": how many there are, "changed": of how many of this run the answer changed}."""
    args, rerank = parse_arguments(FLAGS, argv, about=__doc__)
    if args.answers_file is None:
        raise UserError("--answers_file: name the answers to choose among")
    if rerank.rerank is None:
        raise UserError("--rerank: say how to choose, mbr or score")
    check_rules(Flags(args, rerank), RULES)
    args.output_file = args.output_file or f"{args.answers_file}.chosen.jsonl"
    if Path(args.output_file).absolute() == Path(args.answers_file).absolute():
        raise UserError(f"--output_file {args.output_file}: is the file of answers. Name another one")
    check_output_file("--output_file", args.output_file)
    # After the flags were read: --help and mistakes need no torch.
    from accelerate import PartialState

    from foundry.common.machine import has_accelerator
    from foundry.corpora.files import check_file
    from foundry.corpora.reading import read_rows
    from tasks.predictions import AnswerFile

    check_file("--answers_file", Path(args.answers_file))
    rerank.decide(Flags(args, rerank))
    column = args.source_column if rerank.rerank == "score" else None
    lines = 0
    for lines, row in enumerate(read_rows(Path(args.answers_file)), start=1):
        n_best_of(row, f"--answers_file {args.answers_file}, line {lines}", column)
    settings = {field.name: getattr(rerank, field.name) for field in fields(rerank)} | rerank.record()
    settings |= {"source_column": column, "answers": contents_digest([Path(args.answers_file)])}
    with told_if_full(f"--output_file {args.output_file}", "Free some space: then the same command resumes."):
        output = AnswerFile(Path(args.output_file), settings, args.overwrite_output_file)
    rows = {"answers": f"{lines:,} lines of {args.answers_file}", **rerank.plan(args, None)}
    rows |= {"continued": f"{output.done:,} were chosen before" if output.done else None}
    start_summary(rows | {"written to": args.output_file}, title="choosing again")
    if output.done < lines:
        score = rerank.scorer(PartialState(cpu=args.use_cpu or not has_accelerator()).device, args.batch_size)
    changed, left = 0, itertools.islice(read_rows(Path(args.answers_file)), output.done, None)
    while part := list(itertools.islice(left, LINES)):
        chosen = list(chosen_again(part, score, args.source_column))
        changed += sum(one["prediction"] != row["prediction"] for one, row in zip(chosen, part, strict=True))
        with told_if_full(f"--output_file {args.output_file}", "Free some space: then the same command resumes."):
            output.append(chosen)
    end_summary({"answers": f"{changed:,} of {lines - output.done:,} are others than before"})
    return {"lines": lines, "changed": changed}


if __name__ == "__main__":
    run_script(main)
