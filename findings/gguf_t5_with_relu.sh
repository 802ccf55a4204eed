#!/bin/sh
# One expects: T5EncoderModel.from_pretrained(folder, gguf_file="model.gguf") of a T5 v1.1 or Flan-T5 gives the states of
#   the model from which the file was made, as llama.cpp does, which takes GELU where a layer has a gate.
# Seen: it takes ReLU. The file has no key for the activation; transformers sets is_gated_act, and leaves T5Config's own
#   "relu". All weights are found, nothing is missing and nothing is said.
# For whom: quantised T5 encoders of diffusion models (T5 v1.1 XXL) and Flan-T5 as GGUF in transformers and what builds
#   on it: the states are others, and nothing fails. After loading, give each layer's act (DenseReluDense) the value
#   ACT2FN["gelu_new"].
# Versions: transformers 5.24.0, accelerate 1.15.0, torch 2.13.0, gguf 0.19.0, numpy 2.4.6. 2026-11-29.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore OMP_NUM_THREADS=1
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile torch==2.13.0 transformers==5.24.0 \
  accelerate==1.15.0 gguf==0.19.0 numpy==2.4.6
cat > finding.py <<'END'
from importlib.metadata import version

import gguf
import torch
from transformers import T5Config, T5EncoderModel
from transformers.activations import ACT2FN

width, words = 64, ["<pad>", "</s>", "<unk>", *(f"▁w{number}" for number in range(61))]
torch.manual_seed(0)
sizes = dict(d_model=width, d_kv=16, d_ff=96, num_layers=3, num_heads=4)
config = T5Config(vocab_size=len(words), feed_forward_proj="gated-gelu", **sizes)
model = T5EncoderModel(config).eval()
for parameter in model.parameters():
    if parameter.ndim > 1:
        torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

file = gguf.GGUFWriter("model.gguf", "t5encoder")
file.add_context_length(512)
file.add_embedding_length(width)
file.add_feed_forward_length(config.d_ff)
file.add_block_count(config.num_layers)
file.add_head_count(config.num_heads)
file.add_key_length(config.d_kv)
file.add_value_length(config.d_kv)
file.add_layer_norm_eps(config.layer_norm_epsilon)
file.add_layer_norm_rms_eps(config.layer_norm_epsilon)
file.add_relative_attn_buckets_count(config.relative_attention_num_buckets)
file.add_tokenizer_model("t5")
file.add_tokenizer_pre("default")
file.add_token_list(words)
file.add_token_scores([0.0, 0.0, 0.0, *(-1.0 for _ in words[3:])])
file.add_token_types([3, 3, 2, *(1 for _ in words[3:])])
file.add_eos_token_id(1)
file.add_pad_token_id(0)
file.add_unk_token_id(2)
names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5ENCODER, config.num_layers)
tensors = {"token_embd.weight": model.shared.weight}
for name, tensor in model.encoder.named_parameters(prefix="encoder"):
    if tensor is not model.shared.weight:
        tensors[names.get_name(name, try_suffixes=(".weight",))] = tensor
for name, tensor in tensors.items():
    file.add_tensor(name, tensor.detach().numpy())
file.write_header_to_file()
file.write_kv_data_to_file()
file.write_tensors_to_file()
file.close()

loaded, told = T5EncoderModel.from_pretrained(".", gguf_file="model.gguf", output_loading_info=True)
loaded.eval()
ids = torch.tensor([[5, 9, 30, 44, 17, 1]])
layers = [block.layer[-1].DenseReluDense for block in loaded.encoder.block]


def difference(one, other):
    with torch.no_grad():
        return (one(ids).last_hidden_state - other(ids).last_hidden_state).abs().max().item()


print({name: version(name) for name in ("transformers", "gguf", "torch")})
print("missing or left over:", sorted(told["missing_keys"]), sorted(told["unexpected_keys"]))
print("activation: of the model", config.dense_act_fn, "| loaded", loaded.config.dense_act_fn)
wrong = difference(loaded, model)
for layer in layers:
    layer.act = ACT2FN["gelu_new"]
right = difference(loaded, model)
print(f"largest difference of the states: as loaded {wrong:.4f}, with GELU put into its layers {right:.7f}")
assert not told["missing_keys"] and not told["unexpected_keys"] and loaded.config.dense_act_fn == "relu"
assert wrong > 0.1 and right < 1e-4
END
venv/bin/python finding.py
echo "holds: a T5 v1.1 from a GGUF file is computed with ReLU"
