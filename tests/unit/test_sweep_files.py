"""search/sweep_files.py: what is drawn from a sweep file, and what hyperband stops; W&B's words are the reference.

Commands, and all that is refused, are tested through the script in test_sweep_t5.py.
"""

import math
import re
import tempfile
from pathlib import Path

import numpy as np
import optuna
import yaml
from absl.testing import parameterized
from scipy import stats

from search.sweep_files import DISTRIBUTIONS, brackets, draw, is_hopeless, propose, read_sweep


def rounded(distribution, q: float):
    """The cdf of round(X / q) * q."""
    return lambda x: distribution.cdf(x + q / 2)


class DistributionTest(parameterized.TestCase):
    """W&B's definitions (docs.wandb.ai, sweep configuration options) in scipy's words."""

    def setUp(self):
        super().setUp()
        optuna.logging.set_verbosity(optuna.logging.WARNING)

    def read(self, method: str, parameters: dict) -> dict:
        """A sweep file of these parameters, read."""
        sweep = dict(program=__file__, method=method, metric={"name": "x", "goal": "maximize"}, parameters=parameters)
        path = Path(self.enterContext(tempfile.TemporaryDirectory())) / "sweep.yaml"
        path.write_text(yaml.safe_dump(sweep, sort_keys=False))
        return read_sweep(str(path))

    @parameterized.named_parameters(
        ("uniform", dict(min=-1.0, max=3.0), stats.uniform(-1, 4), float),
        ("int_uniform", dict(min=2, max=5), stats.randint(2, 6), int),
        ("log_uniform", dict(min=-3, max=1), stats.loguniform(math.exp(-3), math.exp(1)), float),
        ("log_uniform_values", dict(min=1e-4, max=0.1), stats.loguniform(1e-4, 0.1), float),
        ("inv_log_uniform", dict(min=-1, max=2), stats.loguniform(math.exp(-2), math.exp(1)), float),
        ("inv_log_uniform_values", dict(min=0.01, max=10), stats.loguniform(0.01, 10), float),
        ("normal", dict(mu=2, sigma=0.5), stats.norm(2, 0.5), float),
        ("normal_by_default", dict(distribution="normal"), stats.norm(0, 1), float),
        ("log_normal", dict(mu=1, sigma=0.5), stats.lognorm(s=0.5, scale=math.e), float),
        ("beta", dict(a=2, b=5), stats.beta(2, 5), float),
        ("q_uniform", dict(min=0, max=10, q=2), stats.uniform(0, 10), int),
        ("q_uniform_tenths", dict(distribution="q_uniform", min=0, max=1, q=0.1), stats.uniform(0, 1), float),
        ("q_by_default", dict(distribution="q_uniform", min=0, max=9), stats.uniform(0, 9), int),
        ("q_log_uniform", dict(min=0, max=4, q=3), stats.loguniform(1, math.exp(4)), int),
        ("q_log_uniform_values", dict(min=8, max=512, q=8), stats.loguniform(8, 512), int),
        ("q_normal", dict(mu=0, sigma=5, q=1), stats.norm(0, 5), int),
        ("q_log_normal", dict(mu=2, sigma=1, q=0.5), stats.lognorm(s=1, scale=math.exp(2)), float),
        ("q_beta", dict(a=2, b=2, q=0.25), stats.beta(2, 2), float),
    )
    def test_definition(self, numbers, reference, kind):
        name = self.id().rsplit("test_definition_", 1)[1]
        spec = {"distribution": name} | numbers
        parameters = self.read(method="random", parameters={"x": spec})["parameters"]
        count = 4001
        drawn = [draw(parameters["x"], (index + 0.5) / count) for index in range(count)]
        self.assertEqual({type(value) for value in drawn}, {kind})
        self.assertEqual(drawn, sorted(drawn))
        cdf = reference.cdf
        if spec["distribution"].startswith("q_"):
            q = spec.get("q", 1)
            cdf = rounded(reference, q)
            self.assertEqual(len(set(drawn)), len({round(value / q) for value in drawn}))  # no 0.30000000000000004
            np.testing.assert_allclose([value / q for value in drawn], [round(v / q) for v in drawn], rtol=1e-12)
        else:
            self.assertTrue(reference.support()[0] <= drawn[0] and drawn[-1] <= reference.support()[1])
        for value in sorted(set(drawn))[:: max(1, len(set(drawn)) // 50)]:
            share = sum(other <= value for other in drawn) / count
            self.assertAlmostEqual(share, cdf(value), delta=2 / count)

    @parameterized.parameters("random", "bayes")
    def test_statistics_of_proposals(self, method):
        """The path from a generator to a value; for bayes the first ten of many studies, before there are results."""
        kinds = {
            "lr": dict(distribution="log_uniform_values", min=1e-4, max=1e-2),
            "size": dict(min=1, max=4),
            "kind": dict(values=["a", "b", "c"]),
            "rare": dict(values=[True, False], probabilities=[0.2, 0.8]),
            "fixed": dict(value=None),
        }
        sweep = self.read(method=method, parameters=kinds)
        drawn = [propose([], sweep, seed)[0] for seed in range(400)]
        self.assertEqual(list(drawn[0]), list(kinds))
        logs = [math.log10(values["lr"]) for values in drawn]
        self.assertGreater(stats.kstest(logs, stats.uniform(-4, 2).cdf).pvalue, 1e-3)
        for name, chances in (("size", [0.25] * 4), ("kind", [1 / 3] * 3), ("rare", [0.2, 0.8])):
            found = [values[name] for values in drawn]
            options = [1, 2, 3, 4] if name == "size" else kinds[name]["values"]
            counts = [found.count(option) for option in options]
            self.assertEqual(sum(counts), 400)
            self.assertGreater(stats.chisquare(counts, 400 * np.array(chances)).pvalue, 1e-3, (name, counts))
        self.assertEqual({values["fixed"] for values in drawn}, {None})

    def grow(self, sweep: dict, count: int, seed: int, score) -> list[float]:
        """The values of `count` trials, each proposed from all before it, judged by `score`."""
        trials = []
        for _ in range(count):
            values, chosen, kinds = propose(trials, sweep, seed)
            value = score(values)
            trials.append(optuna.trial.create_trial(value=value, params=chosen, distributions=kinds))
        return [trial.value for trial in trials]

    def test_bayes_learns_and_random_does_not(self):
        parameters = {
            "lr": dict(distribution="log_uniform_values", min=1e-5, max=1.0),
            "kind": dict(values=["a", "b"]),
            "depth": dict(min=1, max=12),
        }

        def score(values):  # 0 at best
            return -(math.log10(values["lr"] / 1e-2) ** 2) - (values["kind"] == "b") - (values["depth"] - 9) ** 2 / 30

        late = {}
        for method in ("bayes", "random"):
            sweep = self.read(method=method, parameters=parameters)
            runs = [self.grow(sweep, 30, seed, score) for seed in range(5)]
            late[method] = np.mean([run[15:] for run in runs])
        self.assertGreater(late["bayes"], late["random"] + 1)

    def test_seeds(self):
        sweep = self.read(method="random", parameters={"x": dict(min=0.0, max=1.0)})
        first = self.grow(sweep, 5, 0, lambda values: values["x"])
        self.assertEqual(first, self.grow(sweep, 5, 0, lambda values: values["x"]))
        self.assertLen(set(first + self.grow(sweep, 5, 1, lambda values: values["x"])), 10)

    def test_every_distribution_is_tested(self):
        tested = re.findall(r'^        \("(\w+)",', Path(__file__).read_text(), flags=re.MULTILINE)
        self.assertContainsSubset(
            set(DISTRIBUTIONS) - {"constant", "categorical", "categorical_w_probabilities"}, tested
        )


class HyperbandTest(parameterized.TestCase):
    def test_brackets(self):
        """The examples of W&B's documentation."""
        self.assertEqual(brackets({"min_iter": 3, "eta": 3})[:4], [3, 9, 27, 81])
        self.assertEqual(brackets({"max_iter": 27, "s": 2, "eta": 3}), [3, 9])
        self.assertEqual(brackets({"max_iter": 5, "s": 4, "eta": 2}), [1, 2])
        self.assertLess(len(brackets({"min_iter": 3, "eta": 1e300})), 3)

    # Which runs sweeps 0.3.0's hyperband_stop_runs stops, all of them running. Bracket n is the n-th value.
    @parameterized.parameters(
        ({"max_iter": 5, "s": 2, "eta": 2}, [[10, 9], [10, 10], [10, 8, 8], [10, 7, 7], [10, 6, 6]], [0, 1], [0, 1]),
        ({"min_iter": 1, "eta": 2}, [[5, 2, 2], [5, 3, 3], [1, 4, 4]], [], [2]),
        ({"min_iter": 1, "eta": 3}, [[9], [1], [4]], [0], [0]),
        ({"min_iter": 3, "eta": 3}, [[9, 9], [1, 1], [4, 4]], [], []),  # before the first bracket
        ({"min_iter": 3, "eta": 3}, [[9, 9, 9], [1, 1, 1], [4, 4, 4]], [0], [0]),
    )
    def test_stops_the_runs_that_wandbs_sweeps_package_stops(self, stop, runs, loosely, strictly):
        for strict, expected in ((False, loosely), (True, strictly)):
            for sign in (1, -1):
                histories = [[sign * value for value in run] for run in runs]
                stopped = [is_hopeless(own, histories, stop | {"strict": strict}, sign) for own in histories]
                self.assertEqual(np.flatnonzero(stopped).tolist(), expected)
