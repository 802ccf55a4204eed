"""A training step with a peer's published model and optimizer, in an environment of its own (make peers).

    PYTHONPATH=out/peers python -m benchmarks.published_step '{"peer": "nanot5", "checkout": "nanoT5", ...}' found.json

benchmarks/step.py starts this if --nanot5 or --fat5 names a checkout. It imports nothing of this project but the count
of bytes, since the peers' models need transformers 4.
"""

import importlib
import json
import sys
import time
import types
from pathlib import Path

import torch

from benchmarks.kept import kept_bytes

UNTIED = dict(tie_word_embeddings=False, decoder_start_token_id=0)  # as in T5 v1.1


def nanot5(folder: str, shape: dict, device: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
    """(model, optimizer) of nanoT5, as its configs/default.yaml has them."""
    sys.path.insert(0, folder)
    package = types.ModuleType("nanoT5.utils")  # without its __init__, which imports data sets and metrics
    package.__path__ = [str(Path(folder, "nanoT5", "utils"))]
    sys.modules["nanoT5.utils"] = package
    config = importlib.import_module("transformers").T5Config(**shape, **UNTIED, dropout_rate=0.0)
    config.is_bf16 = False
    model = importlib.import_module("nanoT5.utils.t5_model").MyT5(config)
    return model, importlib.import_module("nanoT5.utils.copied_utils").AdamWScale(model.parameters(), lr=1e-5)


def fat5(folder: str, shape: dict, device: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """(model, optimizer) of FAT5. The model is that of its configs/flan/fat5-flan-base.yaml, on a CPU without Triton.
    The optimizer is that of its scripts, which ignore this file's `optim`, with foreach as in its examples/fat5-fr."""
    sys.path.insert(0, folder)
    config = importlib.import_module("src.model.configuration_flash_t5").FlashT5Config(
        **shape,
        **UNTIED,
        dropout_rate=0.0,
        use_glu_mlp=True,
        label_smoothing=0.1,
        z_loss=1e-4,
        attention_type="triton" if device == "cuda" else "ref",
        attention_scale=1.0,
        pad_token_id=0,
        max_sequence_length=1024,
    )
    model = importlib.import_module("src.model.modeling_flash_t5").FlashT5ForConditionalGeneration(config)
    optimizer = importlib.import_module("src.utils.adamw_scaled").AdamWScale
    return model, optimizer(model.parameters(), lr=1e-5, foreach=True)


def train_peer(setting: dict) -> dict:
    """{"batch", "seconds": seconds of a step in each round, ...}. setting: what benchmarks/step.py passes."""
    device, shape, batch = setting["device"], setting["shape"], setting["batch"]
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model, optimizer = {"nanot5": nanot5, "fat5": fat5}[setting["peer"]](setting["checkout"], shape, device)
    model.to(device).train()
    forward = torch.compile(model) if setting["compile"] else model
    source, target = (
        torch.randint(3, shape["vocab_size"] - 110, (batch, setting[length]), device=device)
        for length in ("source_length", "target_length")
    )

    def loss() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=setting["bf16"]):
            return forward(input_ids=source, labels=target).loss

    versions = {name: importlib.import_module(name).__version__ for name in ("torch", "transformers")}
    if setting["kept_at"] is not None:
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = setting["kept_at"]
            elif hasattr(module, "relative_attention_num_buckets"):
                module.dropout = setting["kept_at"]
        kept = kept_bytes(loss, model.parameters())
        sizes = dict(kept_mib=kept.activations / 2**20, weight_copies_mib=kept.weight_copies / 2**20)
        return sizes | {"versions": versions}

    def steps(count: int) -> float:
        """Seconds of a step."""
        start = time.perf_counter()
        for _ in range(count):
            last = loss()
            last.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        last.item()  # waits for the GPU
        return (time.perf_counter() - start) / count

    steps(4)  # compiles
    found: dict = {"batch": batch, "seconds": [steps(setting["steps"]) for _ in range(setting["rounds"])]}
    if device == "cuda":
        found["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found | {"versions": versions}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(train_peer(json.loads(sys.argv[1]))), encoding="utf-8")
