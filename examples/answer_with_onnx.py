"""Answers lines with a folder of export_checkpoint.py --formats onnx: greedily, without PyTorch or transformers.

    python examples/answer_with_onnx.py out/export/onnx < texts.txt > answers.jsonl

Needs onnxruntime and tokenizers. Reads a text as it stands: put the task's prefix before it, if it has one. Writes the
same lines as predict_t5.py.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

folder = Path(sys.argv[1])
tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))  # adds </s> too
settings = json.loads((folder / "generation_config.json").read_text())
encoder = onnxruntime.InferenceSession(folder / "onnx" / "encoder_model.onnx")
decoder = onnxruntime.InferenceSession(folder / "onnx" / "decoder_model_merged.onnx")

for line in sys.stdin:
    source = line.rstrip("\n")
    ids = np.array([tokenizer.encode(source).ids])
    mask = np.ones_like(ids)
    (states,) = encoder.run(None, {"input_ids": ids, "attention_mask": mask})
    inputs = {"encoder_attention_mask": mask, "encoder_hidden_states": states}
    for entry in decoder.get_inputs():
        if entry.name.startswith("past_key_values"):  # an empty cache
            inputs[entry.name] = np.zeros((1, entry.shape[1], 0, entry.shape[3]), np.float32)
    answer = [settings["decoder_start_token_id"]]
    while len(answer) < settings.get("max_length", 129) and answer[-1] != settings["eos_token_id"]:
        logits, *cache = decoder.run(None, inputs | {"input_ids": np.array([answer[-1:]])})
        names = [entry.name.replace("present", "past_key_values") for entry in decoder.get_outputs()[1:]]
        inputs |= dict(zip(names, cache, strict=True))
        answer.append(int(logits[0, -1].argmax()))
    prediction = tokenizer.decode(answer)  # leaves <pad> and </s> out
    print(json.dumps({"source": source, "prediction": prediction}, ensure_ascii=False))
