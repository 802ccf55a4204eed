#!/bin/sh
# One expects: SentenceTransformer(folder, backend="openvino") embeds as backend="torch" does, also where the folder
#   holds a T5 encoder (sentence-t5, gtr-t5, or one's own): the class for torch is T5EncoderModel, and so it is there.
# Seen: other vectors, and other ones each time that the folder is loaded. optimum-intel takes the class "AutoModel",
#   which for every T5 is the whole model: its decoder's weights are missing in the folder, so they are drawn anew, and
#   the vector is the mean of that random decoder's states. Transformers' note on missing weights, if it is shown, is
#   all that is said; a folder that is saved and published so keeps the vectors of its random decoder for good.
# For whom: searches over T5 embeddings that are made faster by OpenVINO: nothing fails, and what is found is chance.
# Versions: sentence-transformers 6.2.0, optimum-intel 2.2.0, optimum 2.3.0, openvino 2026.4.1, transformers 5.5.4
#   (optimum-intel has none newer than 5.5), torch 2.13.0. 2026-11-29.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore OMP_NUM_THREADS=1
"${PYTHON:-python3}" -m venv venv
pip="venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile"
$pip torch==2.13.0 sentence-transformers==6.2.0 transformers==5.5.4 openvino==2026.4.1 nncf==3.4.0 requests==2.34.2
$pip --no-deps optimum-intel==2.2.0 optimum==2.3.0 openvino-tokenizers==2026.4.1.0 # without torchvision
cat > finding.py <<'END'
from importlib.metadata import version

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

words = ["<pad>", "</s>", "<unk>", *(f"w{number}" for number in range(29))]
torch.manual_seed(0)
sizes = dict(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
encoder = T5EncoderModel(T5Config(vocab_size=len(words), **sizes)).eval()
for parameter in encoder.parameters():
    if parameter.ndim > 1:
        torch.nn.init.normal_(parameter, std=0.5)
encoder.save_pretrained("encoder")
backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.Whitespace()
backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
special = dict(pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=64, **special).save_pretrained("encoder")
reader = Transformer("encoder")
SentenceTransformer(modules=[reader, Pooling(32, "mean")], device="cpu").save("folder")

texts = [" ".join(f"w{(7 * row + 3 * place) % 29}" for place in range(5 + row)) for row in range(6)]


def vectors(backend):
    exact = {"ov_config": {"INFERENCE_PRECISION_HINT": "f32"}} if backend == "openvino" else {}
    return SentenceTransformer("folder", backend=backend, device="cpu", model_kwargs=exact).encode(texts)


def cosines(one, other):
    return (one * other).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)


wanted = vectors("torch")
with torch.no_grad():
    states = encoder(**reader.tokenizer(texts[:1], return_tensors="pt")).last_hidden_state[0]
assert np.allclose(states.mean(0).numpy(), wanted[0], atol=1e-4)
first, second = vectors("openvino"), vectors("openvino")
print({name: version(name) for name in ("sentence-transformers", "optimum-intel", "openvino", "transformers", "torch")})
print("cosines to torch's vectors, loaded once ", cosines(first, wanted).round(3))
print("cosines to torch's vectors, loaded again", cosines(second, wanted).round(3))
print("cosines of the two                      ", cosines(first, second).round(3))
assert cosines(first, wanted).max() < 0.95 and cosines(second, wanted).max() < 0.95
assert cosines(first, second).min() < 0.95
END
venv/bin/python finding.py
echo "holds: the vectors are a random decoder's"
