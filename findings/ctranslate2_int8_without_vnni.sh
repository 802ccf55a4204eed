#!/bin/sh
# One expects: a CTranslate2 model converted to int8 gives nearly the same probabilities on every CPU that runs int8.
# Seen: on an x86 CPU without VNNI (AVX512-VNNI or AVX-VNNI: many laptops and servers that are still in use) its products
#   of int8 add two numbers in 16 bits first, and large ones are cut off. Nothing is reported, and
#   get_supported_compute_types lists int8. A T5 with ordinary random weights is then several times as far from float32
#   as rounding explains, and one whose weights have all the same size, whose numbers are the largest that int8 has, some
#   fifty times. The same folder loaded with compute_type="float32" is near: it is the sums, not the rounded weights.
# For whom: everybody who converts with quantization="int8" on one machine and answers, or measures quality, on another.
# Versions: ctranslate2 4.8.5, transformers 5.24.0, torch 2.13.0, numpy 2.4.6, on Linux, x86-64. 2026-11-29.
#   The instruction set is limited to AVX2 by ONEDNN_MAX_CPU_ISA, so that any such CPU shows it.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
export ONEDNN_MAX_CPU_ISA=AVX2 CT2_FORCE_CPU_ISA=AVX2
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile ctranslate2==4.8.5 torch==2.13.0 \
  transformers==5.24.0 numpy==2.4.6
cat > run.py <<'END'
import ctranslate2
import torch
import transformers
from ctranslate2.converters import TransformersConverter
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

transformers.utils.logging.disable_progress_bar()
print("ctranslate2", ctranslate2.__version__, "transformers", transformers.__version__, "torch", torch.__version__)
words = ["<pad>", "</s>", "<unk>", *(f"w{number}" for number in range(509))]
source, target = [f"w{number}" for number in range(5, 45)] + ["</s>"], [f"w{number}" for number in range(100, 110)]
shape = dict(vocab_size=len(words), d_model=256, d_kv=32, d_ff=512, num_layers=2, num_heads=8)
backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def made(of_one_size: bool) -> T5ForConditionalGeneration:
    """A T5 with random weights; of one size: each matrix has one number and its negative."""
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, tie_word_embeddings=False, **shape))
    for module in model.modules():
        if of_one_size and isinstance(module, torch.nn.Linear):
            module.weight.data = module.weight.data.sign() * module.weight.data.std()
    return model.eval()


def log_probs(folder: str, compute_type: str) -> torch.Tensor:
    translator = ctranslate2.Translator(folder, compute_type=compute_type)
    return torch.tensor(translator.score_batch([source], [target])[0].log_probs)


def steps(rows: torch.Tensor) -> torch.Tensor:
    """Each row rounded to 127 steps on both sides of zero."""
    size = rows.abs().amax(-1, keepdim=True) / 127
    return (rows / size).round() * size


@torch.no_grad()
def off_by_rounding(model: T5ForConditionalGeneration) -> float:
    """How far log-probabilities are off if weights and inputs of all products are rounded, and sums are exact."""
    ids, answer = ([[words.index(word) for word in text]] for text in (source, ["<pad>", *target]))
    given = dict(input_ids=torch.tensor(ids), decoder_input_ids=torch.tensor(answer))
    model.lm_head.weight /= 16  # as CTranslate2's converter has it: by the root of the width
    whole = model(**given).logits.log_softmax(-1)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = steps(module.weight.data)
            module.register_forward_pre_hook(lambda _, inputs: (steps(inputs[0]),))
    own = torch.tensor(answer)[:, 1:, None]
    return (model(**given).logits.log_softmax(-1) - whole)[:, :-1].gather(-1, own).abs().max().item()


ratios = []
for of_one_size in (False, True):
    made(of_one_size).save_pretrained("model")
    tokenizer.save_pretrained("model")
    for quantization in ("float32", "int8"):
        TransformersConverter("model").convert(quantization, quantization=quantization, force=True)
    whole = log_probs("float32", "float32")
    by_int8 = (log_probs("int8", "int8") - whole).abs().max().item()
    by_float32 = (log_probs("int8", "float32") - whole).abs().max().item()
    by_rounding = off_by_rounding(made(of_one_size))
    ratios.append(by_int8 / by_rounding)
    print(
        f"weights {'of one size' if of_one_size else 'as they come'}: log-probabilities of the int8 folder are up to "
        f"{by_int8:.3f} nats off float32's, {by_float32:.3f} if computed in float32; rounding with exact sums, by "
        f"PyTorch, {by_rounding:.3f}: {ratios[-1]:.0f} times as far"
    )
print("int8 is among", sorted(ctranslate2.get_supported_compute_types("cpu")))
if not (ratios[0] > 2.5 and ratios[1] > 30):
    raise SystemExit("not seen any more: int8 is as near to float32 as rounding explains")
END
venv/bin/python run.py
