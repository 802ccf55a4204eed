r"""Make more pairs of few: the beginning of one pair and the end of another, cut where both have the same letters.

    python -m features.recombination.recombine_pairs --train_file words.tsv --source_column 0 --target_column 1 \
        --rows 8000 --output_file more.tsv
    python fine_tune_t5.py --train_file words.tsv more.tsv --source_column 0 --target_column 1 --validation_file dev.tsv

    abbia      a b b j a                        to  abbandono  a b b a n d o n o
    abbandono  a b b a n d o n o                    abbia      a b b j a            cut between "bb" and the rest

It is for targets that follow their sources from left to right, symbol by symbol, such as pronunciations and
transliterations: `--target_column` has symbols with spaces between. Which letters belong to which symbols is learnt
from the same pairs alone, by expectation maximisation (Ristad and Yianilos 1998, "Learning string-edit distance"; with
several letters at once: Jiampojamarn et al. 2007, N07-1047). Made words as training rows: Anastasopoulos and Neubig
2019, D19-1091, who draw letters at random; here both parts are real.
"""

import math
import random
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # started by its path: Python then looks beside this file alone for modules
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from foundry.common.command_line import exit_on_user_error, parse_arguments
from foundry.common.errors import UserError
from foundry.common.flags import option
from foundry.common.machine import run_script
from foundry.common.paths import check_folder
from foundry.common.reports import end_summary, write_aside
from foundry.common.words import listed

# How many letters and symbols a step of an alignment takes, and how likely each is before anything is learnt.
STEPS = {(1, 1): 1.0, (1, 0): 0.1, (2, 1): 0.1, (1, 2): 0.1, (3, 1): 0.02, (0, 1): 0.02, (2, 0): 0.01}
ROUNDS = 4  # of expectation maximisation
LEAST_COUNT = 1e-4  # steps that are expected less often in all pairs are forgotten
NEAR_DIAGONAL = 4.0  # in the first round a step is exp(-4 d) as likely at the distance d from the diagonal, 0 to 1
UNSEEN = 1e-9  # probability of a step that no round has kept, times that of STEPS
CONTEXTS = (4, 3, 2, 1)  # letters that must agree on each side of a cut: the next when one gives no more pairs
NEAR_AN_END = 3  # letters from a cut to each end of the word, which must agree as far as they are fewer
DRAWS = 20  # times the number of pairs that are wanted

Pair = tuple[str, tuple[str, ...]]  # letters, symbols
Chances = dict[tuple[str, tuple[str, ...]], float]


@dataclass
class RecombinationArguments:
    """Which pairs are cut, and how many are made."""

    _argument_group_name = "recombined pairs"

    train_file: list[str] | None = option(None, "Pairs: files, folders, globs, as for fine_tune_t5.py.")
    source_column: list[str] | None = option(None, "Column of the sources, as in fine_tune_t5.py.")
    target_column: list[str] | None = option(None, "Column of the targets: symbols with spaces between.")
    tsv_header: bool | None = option(None, "Whether line 1 of a .tsv names the columns. Not set: detected.")
    rows: int = option(8000, "Most pairs to make.", at_least=1)
    output_file: str | None = option(
        None, "The made pairs: a .tsv, with the names of the columns unless these are numbers."
    )
    seed: int = option(42, "Of the draw.", at_least=0)


def check_recombination(args: RecombinationArguments) -> None:
    """UserError for what cannot work, before a row is read."""
    for name in ("train_file", "source_column", "target_column", "output_file"):
        if getattr(args, name) is None:
            raise UserError(f"--{name}: is needed; --help shows an example")
    for name in ("source_column", "target_column"):
        if len(getattr(args, name)) > 1:
            raise UserError(f"--{name} {' '.join(getattr(args, name))}: name one column")
    output = Path(args.output_file)
    if output.suffix != ".tsv" or output.exists():
        raise UserError(f"--output_file {output}: name a new .tsv file")
    check_folder("--output_file", str(output.parent))


# ---------------------------------------------------------------- alignment
def learn_steps(pairs: Sequence[Pair]) -> Chances:
    """The probability of each step of an alignment, {(letters, symbols): probability}, by expectation maximisation."""
    chances: Chances = {}
    for _ in range(ROUNDS):
        counts: Counter = Counter()
        for letters, symbols in pairs:
            _count_steps(letters, symbols, chances, counts)
        kept = {step: count for step, count in counts.items() if count > LEAST_COUNT}
        total = sum(kept.values())
        chances = {step: count / total for step, count in kept.items()}
    return chances


def _chance(letters: str, symbols: tuple, i: int, j: int, step: tuple[int, int], chances: Chances) -> float:
    """How likely it is that the letters from i on and the symbols from j on begin with this step."""
    first = STEPS[step]
    if chances:
        return chances.get((letters[i : i + step[0]], symbols[j : j + step[1]]), UNSEEN * first)
    distance = abs((i + step[0] / 2) / len(letters) - (j + step[1] / 2) / len(symbols))
    return first * math.exp(-NEAR_DIAGONAL * distance)


def _count_steps(letters: str, symbols: tuple, chances: Chances, counts: Counter) -> None:
    """Adds to `counts` how often each step is expected in the alignments of a pair (forward-backward)."""
    n, m = len(letters), len(symbols)
    forward, backward = defaultdict(float), defaultdict(float)
    forward[0, 0] = backward[n, m] = 1.0
    edges = []
    for i in range(n + 1):
        for j in range(m + 1):
            for a, b in STEPS:
                if i + a <= n and j + b <= m and forward[i, j]:
                    chance = _chance(letters, symbols, i, j, (a, b), chances)
                    edges.append((i, j, a, b, chance))
                    forward[i + a, j + b] += forward[i, j] * chance
    for i, j, a, b, chance in reversed(edges):
        backward[i, j] += chance * backward[i + a, j + b]
    if not backward[0, 0]:  # too long for its other side
        return
    for i, j, a, b, chance in edges:
        expected = forward[i, j] * chance * backward[i + a, j + b] / backward[0, 0]
        counts[letters[i : i + a], symbols[j : j + b]] += expected


def likeliest_cuts(letters: str, symbols: tuple, chances: Chances) -> list[tuple[int, int]]:
    """The places between two steps of the likeliest alignment, as numbers of letters and of symbols before them; []
    if there is no alignment."""
    n, m = len(letters), len(symbols)
    best: dict[tuple[int, int], tuple[float, tuple[int, int] | None]] = {(0, 0): (0.0, None)}
    for i in range(n + 1):
        for j in range(m + 1):
            if (i, j) not in best:
                continue
            for a, b in STEPS:
                if i + a > n or j + b > m:
                    continue
                nats = best[i, j][0] + math.log(_chance(letters, symbols, i, j, (a, b), chances))
                if (i + a, j + b) not in best or nats > best[i + a, j + b][0]:
                    best[i + a, j + b] = nats, (i, j)
    cuts = []
    place = best[n, m][1] if (n, m) in best else None
    while place and place != (0, 0):
        cuts.append(place)
        place = best[place][1]
    return cuts[::-1]


# ---------------------------------------------------------------- pairs
def recombined(pairs: Sequence[Pair], rows: int, seed: int) -> list[Pair]:
    """At most so many pairs whose letters are in no pair yet. All letters are in Unicode's NFD, so that a syllable of
    Hangul can be cut too; no mark is cut off its letter."""
    chances = learn_steps(pairs)
    cuts = [likeliest_cuts(letters, symbols, chances) for letters, symbols in pairs]
    rng = random.Random(seed)
    known = {letters for letters, _ in pairs}
    made: list[Pair] = []
    for context in CONTEXTS:
        alike = defaultdict(list)  # {what must agree: [(pair, letters, symbols before the cut)]}
        for number, (letters, _) in enumerate(pairs):
            for i, j in cuts[number]:
                if 0 < i < len(letters) and not unicodedata.combining(letters[i]):
                    ends = min(i, NEAR_AN_END), min(len(letters) - i, NEAR_AN_END)
                    around = letters[max(0, i - context) : i], letters[i : i + context], ends
                    alike[around].append((number, i, j))
        shared = {around: places for around, places in alike.items() if len(places) > 1}
        if not shared:
            continue
        contexts, frequencies = list(shared), [len(places) for places in shared.values()]
        for around in rng.choices(contexts, frequencies, k=DRAWS * rows):
            if len(made) == rows:
                return made
            (first, i, j), (second, k, m) = rng.sample(shared[around], 2)
            letters = pairs[first][0][:i] + pairs[second][0][k:]
            if letters not in known:
                known.add(letters)
                made.append((letters, pairs[first][1][:j] + pairs[second][1][m:]))
    return made


def pairs_of(args: RecombinationArguments) -> tuple[list[Pair], list[str]]:
    """(the pairs of --train_file, numbers of the rows that are none, without letters or symbols)."""
    from tasks import row_texts
    from tasks.mixture import unsplit_task

    task = unsplit_task(args, ("train_file", "source_column", "target_column", "tsv_header"))
    pairs, left_out = [], []
    for number, row in enumerate(task.training_rows(), start=1):
        letters = unicodedata.normalize("NFD", row_texts.source_text(task.entry, row))
        symbols = tuple(row_texts.target_text(task.name, task.entry, row).split())
        if letters and symbols:
            pairs.append((letters, symbols))
        else:
            left_out.append(str(number))
    return pairs, left_out


@exit_on_user_error()
def main(argv: list[str] | None = None) -> int:
    """Runs the script; returns how many pairs it made."""
    (args,) = parse_arguments([RecombinationArguments], argv, about=__doc__)
    check_recombination(args)
    pairs, left_out = pairs_of(args)
    made = recombined(pairs, args.rows, args.seed)
    if not made:
        raise UserError(f"--train_file {' '.join(args.train_file)}: no two pairs have the same letters around a cut")
    columns = args.source_column + args.target_column
    lines = [] if all(column.isdecimal() for column in columns) else ["\t".join(columns)]
    for letters, symbols in made:
        lines.append(unicodedata.normalize("NFC", letters) + "\t" + " ".join(symbols))
    write_aside(Path(args.output_file), lambda path: path.write_text("\n".join(lines) + "\n", encoding="utf-8"))
    empty = f"{len(left_out):,} rows without letters or symbols: {listed(left_out)}" if left_out else None
    rows = {"pairs": f"{len(pairs):,}", "left out": empty, "made": f"{len(made):,} of at most {args.rows:,}"}
    first = [f"{letters}  {' '.join(symbols)}" for letters, symbols in made[:3]]
    end_summary(rows | {"such as": "; ".join(first), "written to": args.output_file}, title="recombined pairs")
    return len(made)


if __name__ == "__main__":
    run_script(main)
