#!/bin/sh
# Expected: after Trainer.hyperparameter_search the trainer has its own arguments again, or those of the best trial.
# Seen: it has those of the last trial, which may be the worst: train() then trains with them, without a word.
# Matters for: who searches a rate and goes on with trainer.train(): set the values of best_run first.
# Versions: transformers 5.23.0, accelerate 1.15.0, optuna 5.0.0, torch 2.13.0. 2026-11-28.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
packages="torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 optuna==5.0.0"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $packages
echo "versions: $packages"
cat > seen.py <<'END'
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

SHAPE = dict(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4, decoder_start_token_id=0)

ROWS = [{"input_ids": torch.tensor([5, 6, 7, 1]), "labels": torch.tensor([8, 9, 1])}] * 8
RATES = [1e-2, 1e-3, 1e-7]
args = Seq2SeqTrainingArguments("out", learning_rate=5e-4, num_train_epochs=3, report_to="none", disable_tqdm=True,
                                use_cpu=True, save_strategy="no")
trainer = Seq2SeqTrainer(
    args=args,
    model_init=lambda: T5ForConditionalGeneration(T5Config(dropout_rate=0.0, **SHAPE)),
    train_dataset=ROWS,
    eval_dataset=ROWS,
)
best = trainer.hyperparameter_search(
    hp_space=lambda trial: {"learning_rate": RATES[trial.number]}, n_trials=3, direction="minimize", backend="optuna"
)
after = trainer.args.learning_rate
print("rate before", 5e-4, "; of the trials", RATES, "; best trial", best.run_id, "; rate after", after)
assert best.run_id == "0" and after == RATES[-1]
END
venv/bin/python seen.py 2> log | grep -v "^{" || { tail log; exit 1; }
