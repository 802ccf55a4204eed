r"""Sequences of amino acids whose labels are known, and the accuracy that no reader of them can exceed.

    python -m tools.residues --output_dir out/residues --labelled 200 --unlabelled 20000

A hidden Markov model walks through states of helix (H), strand (E) and coil (C), and each state emits a letter by its
own probabilities. A helix repeats four states and a strand two, as their sides face water or the protein in turn. So a
label needs the letters around it, and the best guess of each is known: the label with the largest posterior
probability, by the forward-backward algorithm (Rabiner 1989).

Writes train.jsonl, dev.jsonl and test.jsonl, rows {"sequence": "MKT", "tags": "HHE"}, and unlabelled.txt, a sequence
on a line with a space between its letters, as --head tokens with --characters reads them. residues.json holds the
ceiling on test.jsonl.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from foundry.common.command_line import exit_on_user_error, parse_arguments
from foundry.common.flags import option
from foundry.common.processes import run_script, say
from foundry.common.reports import write_aside, write_json

LETTERS = "ACDEFGHIKLMNPQRSTVWY"
LABELS = "HEC"
LABEL_OF_STATE = np.array([0, 0, 0, 0, 1, 1, 2])  # four states of a helix, two of a strand, one of coil
LENGTHS = (40, 80)  # letters of a sequence
MODEL_SEED = 0  # the probabilities are the same whatever --seed is
CONCENTRATION = 0.6  # of the Dirichlet distribution of a state's letters: less makes the states easier to tell apart
STAYS = (0.9, 0.85, 0.85)  # a label's probability to go on: 10, 6.7 and 6.7 letters on average


class Model(NamedTuple):
    """A hidden Markov model: probabilities of the first state [K], of the next one [K, K], of a letter [K, 20]."""

    first: np.ndarray
    following: np.ndarray
    letters: np.ndarray


def model() -> Model:
    """The model of all sequences: a label begins in any of its states, and goes through them in turn."""
    generator, states = np.random.default_rng(MODEL_SEED), len(LABEL_OF_STATE)
    begins = np.array([1 / (label == LABEL_OF_STATE).sum() for label in LABEL_OF_STATE])
    following = np.zeros((states, states))
    for state, label in enumerate(LABEL_OF_STATE):
        own = np.flatnonzero(label == LABEL_OF_STATE)
        following[state, own[(state - own[0] + 1) % len(own)]] = STAYS[label]
        others = label != LABEL_OF_STATE
        following[state, others] = (1 - STAYS[label]) / (len(LABELS) - 1) * begins[others]
    letters = generator.dirichlet(np.full(len(LETTERS), CONCENTRATION), states)
    return Model(begins / len(LABELS), following, letters)


def drawn_sequence(of: Model, generator: np.random.Generator) -> tuple[str, str]:
    """(letters, labels) of one sequence."""
    length = generator.integers(LENGTHS[0], LENGTHS[1] + 1)
    states = [generator.choice(len(of.first), p=of.first)]
    while len(states) < length:
        states.append(generator.choice(len(of.first), p=of.following[states[-1]]))
    letters = "".join(LETTERS[generator.choice(len(LETTERS), p=of.letters[state])] for state in states)
    return letters, "".join(LABELS[label] for label in LABEL_OF_STATE[states])


def posterior(of: Model, sequence: str) -> np.ndarray:
    """[L, 3], float64: the probability of each label at each letter, given the whole sequence (forward-backward)."""
    emitted = of.letters[:, [LETTERS.index(letter) for letter in sequence]].T  # [L, K]
    forward, backward = np.empty_like(emitted), np.ones_like(emitted)
    forward[0] = of.first * emitted[0]
    forward[0] /= forward[0].sum()
    for place in range(1, len(sequence)):
        forward[place] = forward[place - 1] @ of.following * emitted[place]
        forward[place] /= forward[place].sum()
    for place in range(len(sequence) - 2, -1, -1):
        backward[place] = of.following @ (emitted[place + 1] * backward[place + 1])
        backward[place] /= backward[place].sum()
    states = forward * backward
    states /= states.sum(1, keepdims=True)
    return states @ (LABEL_OF_STATE[:, None] == np.arange(len(LABELS)))


def accuracies(of: Model, rows: list[tuple[str, str]]) -> dict[str, float]:
    """Shares of the labels of `rows` that are found: "ceiling" by the whole sequence; "letter_alone" by each letter
    without its neighbours; "commonest" by the label that is the most frequent."""
    stationary = np.linalg.matrix_power(of.following, 10_000)[0]
    by_letter = (stationary[:, None] * of.letters).T @ (LABEL_OF_STATE[:, None] == np.arange(len(LABELS)))  # [20, 3]
    labels = np.array([LABELS.index(label) for _, tags in rows for label in tags])
    whole = np.concatenate([posterior(of, sequence).argmax(1) for sequence, _ in rows])
    alone = np.concatenate([by_letter[[LETTERS.index(letter) for letter in row]].argmax(1) for row, _ in rows])
    guesses = {"ceiling": whole, "letter_alone": alone, "commonest": np.bincount(labels).argmax()}
    return {name: float((guess == labels).mean()) for name, guess in guesses.items()}


def write_text(path: Path, text: str) -> None:
    write_aside(path, lambda aside: aside.write_text(text, encoding="utf-8"))


@dataclass
class ResiduesArguments:
    """How many sequences are made."""

    _argument_group_name = "residues"

    output_dir: str = option("out/residues", "Folder of the files.")
    labelled: int = option(200, "Sequences of train.jsonl.", at_least=1)
    unlabelled: int = option(20_000, "Sequences of unlabelled.txt.", at_least=1)
    evaluated: int = option(500, "Sequences of dev.jsonl, and of test.jsonl.", at_least=1)
    seed: int = option(0, "Seed of the sequences.", at_least=0)


@exit_on_user_error()
def main(argv: list[str] | None = None) -> dict[str, float]:
    """Writes the files; returns the accuracies that are known of test.jsonl."""
    (args,) = parse_arguments([ResiduesArguments], argv, about=__doc__)
    folder, of, generator = Path(args.output_dir), model(), np.random.default_rng([args.seed, 1])
    sizes = {"train": args.labelled, "dev": args.evaluated, "test": args.evaluated}
    splits = {name: [drawn_sequence(of, generator) for _ in range(size)] for name, size in sizes.items()}
    for name, rows in splits.items():
        lines = (json.dumps({"sequence": sequence, "tags": tags}) for sequence, tags in rows)
        write_text(folder / f"{name}.jsonl", "".join(f"{line}\n" for line in lines))
    texts = (" ".join(drawn_sequence(of, generator)[0]) for _ in range(args.unlabelled))
    write_text(folder / "unlabelled.txt", "".join(f"{text}\n" for text in texts))
    found = accuracies(of, splits["test"])
    write_json(folder / "residues.json", found | {"seed": args.seed, **sizes, "unlabelled": args.unlabelled})
    say(*(f"{name.replace('_', ' ')}: {value:.4f}" for name, value in found.items()))
    return found


if __name__ == "__main__":
    run_script(main)
