"""Win rates: ties count half, log-probabilities count if both sides have them, rows must be the same."""

import json
from types import SimpleNamespace
from unittest import mock

from absl.testing import absltest

import evaluate_t5
from features.win_rates import WinRates
from features.win_rates.rates import read_others, win_rates
from foundry.common.errors import UserError
from foundry.features import Features
from tasks.entry import TaskEntry


class WinRatesTest(absltest.TestCase):
    def test_win_rates(self):
        entry = TaskEntry(target_type="text", metrics=["exact_match"])
        rows = [dict(task="pairs", split="validation", index=n, source="a", target="b") for n in range(4)]
        sides = []
        for answers, margins in (("bbcb", [1, 2, 3, 4]), ("cbbc", [0, 3, 3, -4])):
            more = [dict(prediction=a, chosen_log_probability=float(m)) for a, m in zip(answers, margins, strict=True)]
            both = zip(rows, more, strict=True)
            sides.append([row | one | {"rejected_log_probability": 0.0} for row, one in both])
        self.assertEqual(
            win_rates(entry, *sides), {"win_rate_exact_match": 2.5 / 4, "win_rate_log_probability": 2.5 / 4}
        )
        path = self.folder / "predictions.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in sides[1]))
        self.assertEqual(read_others(str(path), sides[0]), sides[1])
        with self.assertRaisesRegex(UserError, "Evaluate both checkpoints on the same rows"):
            read_others(str(path), [sides[0][0] | {"target": "c"}])

    def test_an_evaluation_has_them_beside_its_metrics(self):
        row = dict(task="pairs", split="validation", index=0, source="a", target="b", prediction="b")
        path = self.folder / "predictions.jsonl"
        path.write_text(json.dumps(row | {"prediction": "c"}) + "\n")
        entry = TaskEntry(target_type="text", metrics=["exact_match"])
        task = SimpleNamespace(entry=entry, prefix=lambda split: f"eval_{split}")
        job = SimpleNamespace(task=task, splits=["validation"])
        self.enterContext(mock.patch.object(evaluate_t5, "predict_split", return_value=([], {"eval_loss": 0.5})))
        self.enterContext(mock.patch.object(evaluate_t5, "write_predictions", return_value=[row]))
        rates = {"eval_validation_win_rate_exact_match": 1.0}
        for against, more in ((str(path), rates), (None, {})):
            trainer = SimpleNamespace(args=SimpleNamespace(features=Features([WinRates(against=against)])))
            self.assertEqual(evaluate_t5.answer(job, trainer), {"eval_loss": 0.5} | more)
