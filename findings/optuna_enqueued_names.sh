#!/bin/sh
# Expected: enqueue_trial with a name that the objective never asks for is refused, or at least warned of.
# Seen: nothing is said: the trial runs with drawn values in its place, and bears the enqueued ones as an attribute.
#   A known value outside of the range is warned of, and used.
# Matters for: who begins a search from known good values, written as the flags are called and not as the objective
#   calls them: the search starts without them.
# Versions: optuna 5.0.0. 2026-11-28.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
packages="optuna==5.0.0"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $packages
echo "versions: $packages"
venv/bin/python -W always - <<'END'
import warnings

import optuna

optuna.logging.set_verbosity(optuna.logging.WARNING)
warnings.simplefilter("always")
study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
with warnings.catch_warnings(record=True) as said:
    study.enqueue_trial({"learning_rate": 0.005})
    study.optimize(lambda trial: trial.suggest_float("lr", 1e-5, 1e-2), n_trials=1)
    about_the_name = len(said)
    study.enqueue_trial({"lr": 5.0})
    study.optimize(lambda trial: trial.suggest_float("lr", 1e-5, 1e-2), n_trials=1)
    about_the_range = len(said) - about_the_name
print("enqueued learning_rate 0.005, ran with", study.trials[0].params, "; warnings:", about_the_name)
print("enqueued lr 5.0 of at most 0.01, ran with", study.trials[1].params, "; warnings:", about_the_range)
assert study.trials[0].params["lr"] != 0.005 and about_the_name == 0
assert study.trials[1].params["lr"] == 5.0 and about_the_range > 0
END
