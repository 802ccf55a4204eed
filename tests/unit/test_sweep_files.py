"""tools/search/sweep_files.py: what is drawn from a sweep file, what hyperband stops; W&B's words are the reference.

Commands, and all that is refused, are tested through the script in test_sweep_t5.py.
"""

import math
import tempfile
from pathlib import Path

import numpy as np
import optuna
import yaml
from absl.testing import parameterized
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from scipy import stats

from foundry.common.errors import UserError
from tools.search.sweep_files import Sweep, brackets, is_hopeless, read_sweep
from tools.search.trials import take_trial


class DistributionTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        optuna.logging.set_verbosity(optuna.logging.WARNING)

    def read(self, method: str, parameters: dict) -> Sweep:
        """A sweep file of these parameters, read."""
        sweep = dict(program=__file__, method=method, metric={"name": "x", "goal": "maximize"}, parameters=parameters)
        path = Path(self.enterContext(tempfile.TemporaryDirectory())) / "sweep.yaml"
        path.write_text(yaml.safe_dump(sweep, sort_keys=False))
        return read_sweep(str(path))

    # W&B's definitions (docs.wandb.ai, sweep configuration options) in Optuna's words.
    @parameterized.parameters(
        (dict(min=-1.0, max=3.0), FloatDistribution(-1, 3)),
        (dict(min=2, max=5), IntDistribution(2, 5)),
        (dict(min=2, max=5.0), FloatDistribution(2, 5)),
        (dict(distribution="log_uniform", min=-3, max=1), FloatDistribution(math.exp(-3), math.e, log=True)),
        (dict(distribution="log_uniform_values", min=1e-4, max=0.1), FloatDistribution(1e-4, 0.1, log=True)),
        (dict(distribution="q_uniform", min=0, max=10, q=2), IntDistribution(0, 10, step=2)),
        (dict(distribution="q_uniform", min=0.0, max=1.0, q=0.1), FloatDistribution(0, 1, step=0.1)),
        (dict(distribution="q_uniform", min=0, max=9), IntDistribution(0, 9)),
        (dict(values=[1, None, "a"]), CategoricalDistribution([1, None, "a"])),
        (dict(values=[[1, 2], "a"]), CategoricalDistribution(["[1, 2]", "a"])),
    )
    def test_definition(self, spec, expected):
        self.assertEqual(self.read("random", {"x": spec}).distributions, {"x": expected})

    def test_one_value_is_not_searched(self):
        sweep = self.read("random", {"x": {"value": None}, "y": {"values": [[1, "a"]]}, "z": {"value": 3}})
        self.assertEqual((sweep.fixed, sweep.distributions), ({"x": None, "y": [1, "a"], "z": 3}, {}))

    def grow(self, sweep: Sweep, count: int, seed: int, score) -> list[dict]:
        """The searched values of `count` trials, each judged by `score` before the next is taken."""
        study, drawn = optuna.create_study(direction=sweep.goal), []
        for _ in range(count):
            trial, _ = take_trial(study, sweep, seed)
            drawn.append(trial.params)
            study.tell(trial, score(trial.params))
        return drawn

    @parameterized.parameters("random", "bayes")
    def test_statistics_of_proposals(self, method):
        """For bayes the first trials of many studies, before there are results."""
        kinds = {
            "lr": dict(distribution="log_uniform_values", min=1e-4, max=1e-2),
            "size": dict(min=1, max=4),
            "kind": dict(values=["a", "b", "c"]),
        }
        sweep = self.read(method=method, parameters=kinds)
        drawn = [self.grow(sweep, 1, seed, lambda _: 0.0)[0] for seed in range(300)]
        logs = [math.log10(values["lr"]) for values in drawn]
        self.assertGreater(stats.kstest(logs, stats.uniform(-4, 2).cdf).pvalue, 1e-3)
        for name, options in (("size", [1, 2, 3, 4]), ("kind", ["a", "b", "c"])):
            counts = [[values[name] for values in drawn].count(option) for option in options]
            self.assertEqual(sum(counts), 300)
            self.assertGreater(stats.chisquare(counts).pvalue, 1e-3, (name, counts))

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
            late[method] = np.mean([[score(values) for values in run[15:]] for run in runs])
        self.assertGreater(late["bayes"], late["random"] + 1)

    def test_seeds(self):
        sweep = self.read(method="random", parameters={"x": dict(min=0.0, max=1.0)})
        first, other = ([values["x"] for values in self.grow(sweep, 5, seed, lambda v: v["x"])] for seed in (0, 1))
        self.assertEqual(first, [values["x"] for values in self.grow(sweep, 5, 0, lambda v: v["x"])])
        self.assertLen(set(first + other), 10)


class HostileTest(parameterized.TestCase):
    @parameterized.parameters(
        ("learning_rate", "{min: .nan, max: 1}", "learning_rate, min: nan must be a finite number"),
        ("learning_rate", "{min: 1, max: .inf}", "learning_rate, max: inf must be a finite number"),
        ("learning_rate", "{min: 0, max: 1, q: 1.0e-300, distribution: q_uniform}", "learning_rate .q_uniform"),
        ("run_cap", "x", "run_cap: 'x' must be a finite number"),
        ("run_cap", "[1]", "run_cap: .1. must be a finite number"),
        ("metric", "{name: a, goal: minimize, target: x}", "target: 'x' must be a finite number"),
        ("early_terminate", "5", "early_terminate: 5 must be a mapping"),
        ("early_terminate", "{type: hyperband, min_iter: x}", "early_terminate, min_iter: 'x' must be a finite number"),
        ("early_terminate", "{type: hyperband, max_iter: 27, s: 2, eta: 1}", "eta 1: must be above 1"),
        ("early_terminate", "{type: hyperband, max_iter: 1000000000, s: 1000000000}", "s 1000000000: must be a whole"),
        ("project", "&a [*a]", "not valid YAML: the alias"),
    )
    def test_one_line(self, key, value, message):
        parts = {"program": "fine_tune_t5.py", "method": "random", "metric": "{name: eval/loss, goal: minimize}"}
        rates = value if key == "learning_rate" else "{min: 0.1, max: 0.2}"
        parts |= {"parameters": f"{{learning_rate: {rates}}}"} | ({} if key == "learning_rate" else {key: value})
        path = Path(self.enterContext(tempfile.TemporaryDirectory())) / "sweep.yaml"
        path.write_text("".join(f"{name}: {text}\n" for name, text in parts.items()))
        with self.assertRaisesRegex(UserError, message):
            read_sweep(str(path))


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
