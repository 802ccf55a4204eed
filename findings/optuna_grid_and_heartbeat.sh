#!/bin/sh
# Expected: a grid search runs each point to its end, also the one whose agent was killed, and Optuna's heartbeat, made
#   for agents that are killed, does no harm to that.
# Seen: without a heartbeat another agent runs that point again, last of all. With one, its trial becomes FAIL, which
#   GridSampler takes for done: the search ends by itself, without that point and without a word. The storage's
#   heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback() brings the point back.
# Matters for: who searches a grid on machines that are taken away: the point that is missing may be the best one.
# Versions: optuna 5.0.0. 2026-11-29.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export PYTHONWARNINGS=ignore OMP_NUM_THREADS=1
packages="optuna==5.0.0"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $packages
echo "versions: $packages"
cat > agent.py <<'END'
import os
import signal
import sys
import time

import optuna
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback

optuna.logging.set_verbosity(optuna.logging.WARNING)
RATES = [1e-5, 1e-4, 1e-3, 1e-2]
STORAGES = {
    "no heartbeat": {},
    "heartbeat": {"heartbeat_interval": 1, "grace_period": 2},
    "heartbeat and retries": {
        "heartbeat_interval": 1,
        "grace_period": 2,
        "heartbeat_stale_trial_callback": RetryHeartbeatStaleTrialCallback(),
    },
}
storage, is_killed = sys.argv[1], len(sys.argv) > 2


def objective(trial):
    rate = trial.suggest_float("lr", 1e-6, 1.0)
    if is_killed and trial.number == 1:
        time.sleep(2.5)
        os.kill(os.getpid(), signal.SIGKILL)
    return rate


study = optuna.create_study(
    storage=RDBStorage(f"sqlite:///{storage.replace(' ', '_')}.db", **STORAGES[storage]),
    sampler=optuna.samplers.GridSampler({"lr": RATES}, seed=0),
    study_name="grid",
    load_if_exists=True,
)
study.optimize(objective)  # ends by itself, when the grid is done
done = {trial.params["lr"] for trial in study.trials if trial.state.name == "COMPLETE"}
states = " ".join(trial.state.name for trial in study.trials)
print(f"{storage}: {len(done)} of {len(RATES)} points have a value; trials: {states}")
assert done <= set(RATES)
assert len(done) == (3 if storage == "heartbeat" else 4)
END
for storage in "no heartbeat" "heartbeat" "heartbeat and retries"; do
  code=0
  venv/bin/python agent.py "$storage" killed 2> log || code=$?
  test "$code" = 137 || { cat log; echo "the first agent ended with $code, not by its signal"; exit 1; }
  sleep 5  # longer than the grace period
  venv/bin/python agent.py "$storage"
done
