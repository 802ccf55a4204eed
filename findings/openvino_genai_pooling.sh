#!/bin/sh
# One expects: OpenVINO GenAI's TextEmbeddingPipeline makes a text's vector as the folder's own files say: this folder
#   has sentence-transformers' modules.json and 1_Pooling/config.json, with the mean of all tokens, not normalised.
# Seen: it reads neither. Without a word the vector is the first token's, normalised; pooling_type MEAN and
#   normalize False of its Config must be said by the caller.
# For whom: encoders whose vector is a mean, as T5's are: a search over such vectors works badly and nothing fails.
# Versions: openvino-genai 2026.4.1.0, openvino and openvino-tokenizers 2026.4.1. 2026-11-28.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore OMP_NUM_THREADS=1
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile openvino==2026.4.1 \
  openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0 transformers==4.57.6
cat > finding.py <<'END'
import json
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
import openvino_tokenizers
from openvino import opset13 as op
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

folder = Path("encoder")
(folder / "1_Pooling").mkdir(parents=True)
words = {"[PAD]": 0, "[UNK]": 1, "a": 2, "b": 3, "c": 4, "[SEP]": 5}
backend = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
backend.pre_tokenizer = pre_tokenizers.Whitespace()
backend.post_processor = processors.TemplateProcessing(single="$A [SEP]", special_tokens=[("[SEP]", 5)])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32)
openvino.save_model(openvino_tokenizers.convert_tokenizer(tokenizer), folder / "openvino_tokenizer.xml")

# The encoder: each token's state is its row of a table.
table = np.random.default_rng(0).normal(size=(len(words), 4)).astype(np.float32)
ids = op.parameter([-1, -1], np.int64, name="input_ids")
mask = op.parameter([-1, -1], np.int64, name="attention_mask")
for node in (ids, mask):
    node.output(0).get_tensor().set_names({node.get_friendly_name()})
zeros = op.multiply(op.unsqueeze(op.convert(mask, "f32"), op.constant([2])), op.constant(np.float32(0)))
states = op.add(op.gather(op.constant(table), ids, op.constant(0)), zeros)
states.output(0).get_tensor().set_names({"last_hidden_state"})
openvino.save_model(openvino.Model([states], [ids, mask]), folder / "openvino_model.xml", compress_to_fp16=False)
files = {
    "config.json": {"model_type": "t5", "max_position_embeddings": 32},
    "1_Pooling/config.json": {
        "word_embedding_dimension": 4,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
    },
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ],
}
for name, content in files.items():
    (folder / name).write_text(json.dumps(content))

pipeline = openvino_genai.TextEmbeddingPipeline(folder, "CPU")
(found,) = np.array(pipeline.embed_documents(["a b c"]))
config = openvino_genai.TextEmbeddingPipeline.Config()
config.pooling_type, config.normalize = openvino_genai.TextEmbeddingPipeline.PoolingType.MEAN, False
(asked,) = np.array(openvino_genai.TextEmbeddingPipeline(folder, "CPU", config).embed_documents(["a b c"]))
rows = table[[2, 3, 4, 5]]  # a b c [SEP]
mean, first = rows.mean(0), rows[0] / np.linalg.norm(rows[0])
print("openvino-genai", openvino_genai.__version__)
print("mean of the tokens, as 1_Pooling says", mean)
print("first token, normalised              ", first)
print("TextEmbeddingPipeline as it comes    ", found)
print("TextEmbeddingPipeline, MEAN asked for", asked)
assert np.allclose(found, first, atol=0.02) and not np.allclose(found, mean, atol=0.1)
assert np.allclose(asked, mean, atol=0.02)
END
venv/bin/python finding.py
echo "holds: the pooling that the folder names is not read"
