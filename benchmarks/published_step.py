"""A training step of a peer's published model and optimizer, in an environment of its own (make peers).

    PYTHONPATH=out/peers python -m benchmarks.published_step nanot5 /path/to/nanoT5 --output nanot5.json

benchmarks/step.py starts it where --nanot5 or --fat5 names a checkout. Imports nothing of this project, since those
models need transformers 4.
"""

import argparse
import importlib
import json
import sys
import time
import types
from pathlib import Path

import torch

UNTIED = dict(tie_word_embeddings=False, decoder_start_token_id=0)  # as T5 v1.1 is


def nanot5(folder: str, shape: dict, device: str):  # noqa: ARG001
    """(model, optimizer) of nanoT5, as its configs/default.yaml has them."""
    sys.path.insert(0, folder)
    package = types.ModuleType("nanoT5.utils")  # without its __init__, which imports data sets and metrics
    package.__path__ = [str(Path(folder, "nanoT5", "utils"))]
    sys.modules["nanoT5.utils"] = package
    config = importlib.import_module("transformers").T5Config(**shape, **UNTIED, dropout_rate=0.0)
    config.is_bf16 = False
    model = importlib.import_module("nanoT5.utils.t5_model").MyT5(config)
    return model, importlib.import_module("nanoT5.utils.copied_utils").AdamWScale(model.parameters(), lr=1e-5)


def fat5(folder: str, shape: dict, device: str):
    """(model, optimizer) of FAT5, as its configs/flan/fat5-flan-base.yaml has them; on a CPU without Triton."""
    sys.path.insert(0, folder)
    config = importlib.import_module("src.model.configuration_flash_t5").FlashT5Config(
        **shape, **UNTIED, dropout_rate=0.0, use_glu_mlp=True, label_smoothing=0.1, z_loss=1e-4,
        attention_type="triton" if device == "cuda" else "ref", attention_scale=1.0, pad_token_id=0,
        max_sequence_length=1024,
    )  # fmt: skip
    model = importlib.import_module("src.model.modeling_flash_t5").FlashT5ForConditionalGeneration(config)
    optimizer = importlib.import_module("src.utils.adamw_scaled").AdamWScale
    return model, optimizer(model.parameters(), lr=1e-5, foreach=True)


def train(make, args: argparse.Namespace) -> dict:
    """{"seconds": of a step in every round, ...}; the batch is halved where memory is short."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    shape = json.loads(args.shape)
    model, optimizer = make(args.checkout, shape, args.device)
    model.to(args.device).train()
    forward = torch.compile(model) if args.compile else model
    vocabulary = shape["vocab_size"]
    source = torch.randint(3, vocabulary - 110, (args.batch, args.source_length), device=args.device)
    target = torch.randint(3, vocabulary - 110, (args.batch, args.target_length), device=args.device)

    def steps(count: int) -> float:
        for _ in range(count):
            with torch.autocast(args.device, torch.bfloat16, enabled=args.bf16):
                loss = forward(input_ids=source, labels=target).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()  # which waits for the GPU

    start = time.perf_counter()
    found = {"batch": args.batch, "first_loss": steps(1), "first_step_seconds": time.perf_counter() - start}
    steps(3)
    found["seconds"] = []
    for _ in range(args.rounds):
        start = time.perf_counter()
        steps(args.steps)
        found["seconds"].append((time.perf_counter() - start) / args.steps)
    if args.device == "cuda":
        found["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("peer", choices=("nanot5", "fat5"))
    parser.add_argument("checkout")
    parser.add_argument("--shape", help="JSON of T5Config's fields.")
    parser.add_argument("--output", required=True)
    parser.add_argument("--device", default="cuda")
    for name, default in dict(batch=128, source_length=512, target_length=114, steps=4, rounds=5).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("bf16", "compile"):
        parser.add_argument(f"--{name}", action="store_true")
    args = parser.parse_args()
    while True:
        try:
            found = train({"nanot5": nanot5, "fat5": fat5}[args.peer], args)
            break
        except torch.OutOfMemoryError:
            if args.batch == 1:
                raise
            args.batch //= 2
    found["versions"] = {
        "torch": torch.__version__,
        "transformers": importlib.import_module("transformers").__version__,
    }
    Path(args.output).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
