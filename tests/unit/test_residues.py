"""The labels of made sequences follow their model, and the accuracy that is called possible is that of all paths."""

import itertools
import json

import numpy as np
from absl.testing import parameterized
from helpers import run_main

from tools import residues


class ResiduesTest(parameterized.TestCase):
    def test_probabilities(self):
        of = residues.model()
        for rows in (of.first[None], of.following, of.letters):
            np.testing.assert_allclose(rows.sum(1), 1)
        starts = [[of.first[label == residues.LABEL_OF_STATE].sum() for label in range(3)]]
        np.testing.assert_allclose(starts, np.full((1, 3), 1 / 3))
        for label, stays in enumerate(residues.STAYS):
            own = label == residues.LABEL_OF_STATE
            np.testing.assert_allclose(of.following[np.ix_(own, own)].sum(1), stays)

    @parameterized.parameters("M", "AC", "KLV", "WYAC")
    def test_the_posterior_is_that_of_all_paths(self, sequence):
        of, found = residues.model(), np.zeros((len(sequence), 3))
        for path in itertools.product(range(len(of.first)), repeat=len(sequence)):
            likely = of.first[path[0]]
            for one, other in itertools.pairwise(path):
                likely *= of.following[one, other]
            for state, letter in zip(path, sequence, strict=True):
                likely *= of.letters[state, residues.LETTERS.index(letter)]
            for place, state in enumerate(path):
                found[place, residues.LABEL_OF_STATE[state]] += likely
        np.testing.assert_allclose(residues.posterior(of, sequence), found / found.sum(1, keepdims=True))

    def test_the_ceiling_is_what_the_posterior_expects_of_itself(self):
        of, generator = residues.model(), np.random.default_rng(5)
        rows = [residues.drawn_sequence(of, generator) for _ in range(300)]
        expected = [residues.posterior(of, sequence).max(1) for sequence, _ in rows]
        hits = [np.array([residues.LABELS[n] for n in residues.posterior(of, s).argmax(1)]) == list(t) for s, t in rows]
        found = residues.accuracies(of, rows)
        self.assertAlmostEqual(found["ceiling"], np.concatenate(hits).mean())
        of_rows = [hit.mean() - expect.mean() for hit, expect in zip(hits, expected, strict=True)]
        self.assertLess(abs(np.mean(of_rows)), 4 * np.std(of_rows) / len(of_rows) ** 0.5)
        self.assertGreater(found["ceiling"], found["letter_alone"] + 0.1)
        self.assertGreater(found["letter_alone"], found["commonest"])

    def test_files(self):
        words = "--labelled 3 --unlabelled 4 --evaluated 5".split()
        found, printed, _ = run_main(residues.main, "--output_dir", self.folder / "a", *words)
        self.assertIn(f"ceiling: {found['ceiling']:.4f}", printed)
        run_main(residues.main, "--output_dir", self.folder / "b", *words)
        run_main(residues.main, "--output_dir", self.folder / "c", *words, "--seed", 1)
        for name, size in (("train", 3), ("dev", 5), ("test", 5)):
            text, same, other = ((self.folder / run / f"{name}.jsonl").read_text() for run in "abc")
            self.assertEqual(text, same)
            self.assertNotEqual(text, other)
            rows = [json.loads(line) for line in text.splitlines()]
            self.assertLen(rows, size)
            for row in rows:
                self.assertEqual(len(row["sequence"]), len(row["tags"]))
                self.assertContainsSubset(row["tags"], "HEC")
                self.assertBetween(len(row["tags"]), *residues.LENGTHS)
        lines = (self.folder / "a" / "unlabelled.txt").read_text().splitlines()
        self.assertLen(lines, 4)
        self.assertContainsSubset(lines[0].split(" "), residues.LETTERS)
