#!/bin/sh
# Expected: in 8 bits each row of a batch is quantised by itself, so a row's answer is that which it has alone.
# Seen: a column where any row of the batch has a value of 6 or more is computed in floating point for all rows. A row
#   has other logits beside such a row than beside one without; in float32 the two are equal to the bit. With
#   llm_int8_threshold=0 nothing is kept apart, and rows are independent.
# Matters for: servers that join requests in batches, and evaluations with several batch sizes: a score or a sure answer
#   of an 8-bit model depends on who asks at the same time.
# Versions: transformers 5.23.0, bitsandbytes 0.50.2, accelerate 1.15.0, torch 2.13.0, on a CPU. 2026-11-29.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
packages="torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 bitsandbytes==0.50.2"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $packages
echo "versions: $packages"
venv/bin/python - 2> log <<'END' || { cat log; exit 1; }
import torch
from transformers import BitsAndBytesConfig, T5Config, T5ForConditionalGeneration

torch.manual_seed(0)
shape = dict(vocab_size=128, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0)
model = T5ForConditionalGeneration(T5Config(**shape))
with torch.no_grad():  # token 9 has one large feature, as some tokens of trained models do
    model.shared.weight[9, 3] = 8 * model.shared.weight[9].norm()
model.save_pretrained("t5")
row, usual, with_outlier = [5, 6, 7, 8, 1], [15, 16, 17, 18, 1], [15, 16, 9, 18, 1]


def difference(model, other):
    """How far the first row's logits beside the other one are from those that it has alone, at most."""

    def logits(*rows):
        with torch.no_grad():
            decoded = torch.tensor([[0, 4, 5, 6]] * len(rows))
            return model(input_ids=torch.tensor(rows), decoder_input_ids=decoded).logits[0]

    return (logits(row, other) - logits(row)).abs().max().item()


kinds = {
    "float32": {},
    "8 bits": {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)},
    "8 bits, threshold 0": {"quantization_config": BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)},
}
found = {}
for kind, more in kinds.items():
    model = T5ForConditionalGeneration.from_pretrained("t5", **more).eval()
    found[kind] = difference(model, usual), difference(model, with_outlier)
    print(f"{kind}: a row's logits move by {found[kind][0]:.4f} beside a usual row, {found[kind][1]:.4f} beside one "
          "with an outlier")
assert max(found["float32"]) < 1e-4 and max(found["8 bits, threshold 0"]) < 1e-4
assert found["8 bits"][0] < 1e-4 and found["8 bits"][1] > 0.01
END
