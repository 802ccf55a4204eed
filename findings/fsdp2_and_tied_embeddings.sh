#!/bin/sh
# Expected: fully_shard of encoder, decoder and model, one after the other, as for other models.
# Seen: the embedding that the four parts of a tied T5 share is refused at the second of them, since it belongs to the
#   first one's group already. Blocks and then the model work, and the embedding stays one tensor.
# Matters for: who shards a T5 by hand: wrap the blocks, and leave stacks and head to the model's group.
# Versions: torch 2.13.0, transformers 5.23.0. November 2026.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
packages="torch==2.13.0 transformers==5.23.0"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $packages
echo "versions: $packages"
cat > shard.py <<'END'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import T5Config, T5ForConditionalGeneration

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (1,))
shape = dict(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4, decoder_start_token_id=0)


def after_a_step(parts):
    model = T5ForConditionalGeneration(T5Config(**shape))
    for part in parts(model):
        fully_shard(part, mesh=mesh)
    optimizer, ids = torch.optim.SGD(model.parameters(), lr=1.0), torch.tensor([[5, 6, 1]])
    try:
        model(input_ids=ids, labels=ids).loss.backward()
    except ValueError as error:
        return f"ValueError: {error}"[:90]
    optimizer.step()
    tables = [model.shared, model.encoder.embed_tokens, model.decoder.embed_tokens, model.lm_head]
    return "one tensor" if len({id(table.weight) for table in tables}) == 1 else "several tensors"


stacks = after_a_step(lambda model: [model.encoder, model.decoder, model])
blocks = after_a_step(lambda model: [*model.encoder.block, *model.decoder.block, model])
print("encoder, decoder, model:", stacks)
print("blocks, model:", blocks)
assert stacks.startswith("ValueError") and "shared" in stacks and blocks == "one tensor"
dist.destroy_process_group()
END
venv/bin/torchrun --standalone --nproc_per_node 1 shard.py
