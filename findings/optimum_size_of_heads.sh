#!/bin/sh
# Expected: Optimum exports any T5 with its cache, and its own ORTModelForSeq2SeqLM answers from the file.
# Seen: where heads x d_kv is not d_model, as in T5 v1.1 small, Flan small and mT5 small (6 x 64 and 512), its first,
#   empty cache has d_model / heads as the size of a key, and ONNX Runtime refuses it. 8 x 64 and 512 works.
# Matters for: who answers with a small T5 by Optimum.
# Versions: optimum-onnx 0.1.0, transformers 4.57.6, onnxruntime 1.32.0, torch 2.13.0. November 2026.
. "$(dirname "$0")/_common.sh"
packages torch==2.13.0 optimum-onnx==0.1.0 transformers==4.57.6 onnxruntime==1.32.0 onnx==1.23.2
venv/bin/python - <<'END'
import torch
from optimum.onnxruntime import ORTModelForSeq2SeqLM
from transformers import T5Config, T5ForConditionalGeneration

found = {}
for heads in (4, 3):
    torch.manual_seed(0)
    shape = dict(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=heads, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(T5Config(**shape)).eval()
    model.save_pretrained(f"heads_{heads}")
    ids = torch.tensor([[5, 6, 7, 1]])
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
    wanted = model.generate(ids, **options).tolist()
    exported = ORTModelForSeq2SeqLM.from_pretrained(f"heads_{heads}", export=True)
    try:
        found[heads] = "same answer" if exported.generate(ids, **options).tolist() == wanted else "another answer"
    except Exception as error:
        found[heads] = str(error)[:160]
    print(f"{heads} heads of 4 in a width of 16:", found[heads])
assert found[4] == "same answer" and "nvalid" in found[3]
END
