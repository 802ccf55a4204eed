#!/bin/sh
# Expected: EarlyStoppingCallback(early_stopping_threshold=0.5) waits for a gain of 0.5 over the value at which patience
#   began anew, as min_delta of Keras and of Lightning does: a rise of 0.3 at each evaluation goes on, as two make 0.6.
# Seen: each gain is measured from the best value so far, which Trainer moves with every small one: a metric that rises
#   by 0.3 at each evaluation is stopped as if it stood still.
# Matters for: who stops by a generated metric with a threshold against noise: a slow, steady rise ends early.
# Versions: transformers 5.23.0, accelerate 1.15.0, torch 2.13.0. 2026-11-28.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
packages="torch==2.13.0 transformers==5.23.0 accelerate==1.15.0"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $packages
echo "versions: $packages"
cat > seen.py <<'END'
from transformers import EarlyStoppingCallback
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

SHAPE = dict(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4, decoder_start_token_id=0)

ROWS = [{"input_ids": torch.tensor([5, 6, 7, 1]), "labels": torch.tensor([8, 9, 1])}] * 8


def evaluations(gain, threshold):
    values = iter([10 + gain * number for number in range(8)])
    flags = dict(eval_strategy="epoch", save_strategy="epoch", num_train_epochs=8, load_best_model_at_end=True)
    flags |= dict(metric_for_best_model="bleu", greater_is_better=True, save_total_limit=1)
    args = Seq2SeqTrainingArguments("out", report_to="none", disable_tqdm=True, use_cpu=True, **flags)
    trainer = Seq2SeqTrainer(
        T5ForConditionalGeneration(T5Config(**SHAPE)),
        args,
        train_dataset=ROWS,
        eval_dataset=ROWS,
        compute_metrics=lambda _: {"bleu": next(values)},
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=threshold)],
    )
    trainer.train()
    return trainer.state.global_step


found = {f"gain {gain}, threshold {threshold}": evaluations(gain, threshold)
         for gain, threshold in ((0.6, 0.5), (0.3, 0.0), (0.3, 0.5))}
print("evaluations of 8 until the end, patience 2:", found)
assert list(found.values()) == [8, 8, 3]
END
venv/bin/python seen.py 2> log | grep -v "^{" || { tail log; exit 1; }
