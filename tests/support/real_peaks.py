"""Compares the memory plan's count of a step with the peak of a real process that makes it (VmHWM).

    python tests/support/real_peaks.py --output out/peaks.json          # all CASES: some minutes
    python tests/support/real_peaks.py --only longt5_local lora_checkpointing

Each case is a forked process that makes two optimizer steps with real numbers. Small blocks of memory come from the
system one by one there, as the allocator would otherwise keep some that are free. (make torture runs some cases.)
"""

import argparse
import ctypes
import json
import os
import re
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import zoo
from transformers import AutoConfig, PreTrainedModel

from features.lora.frozen import freeze
from features.lora.low_rank import add_low_rank
from foundry.arguments.training import FineTuningArguments
from foundry.model_t5 import create_model, set_dropout, train_only
from foundry.runs.counted import Batch, CountedAs, loss_of, optimizer_of, pass_peaks, prepare, update_bytes

WIDE = dict(d_model=384, d_kv=64, num_heads=6, d_ff=1024, num_layers=4, num_decoder_layers=4)
GEMMA = dict(hidden_size=384, head_dim=64, num_attention_heads=6, intermediate_size=1024)
WORDS = 16_384
MMAP_THRESHOLD = -3  # of mallopt


class Case(NamedTuple):
    """A step. family: of the zoo; weight_format: of frozen weights beside LoRA's; train_only: the flag's value."""

    family: str
    flags: dict
    attention: str | None = None
    dropout: float = 0.1
    batch: Batch = Batch(8, 256, 64, masked=True)
    lora: bool = False
    weight_format: str = "float32"
    train_only: str | None = None


_LONG = Batch(2, 768, 64, masked=True)
_PLAIN, _AGAIN = dict(recompute=False), dict(activation_checkpointing=True)
CASES = {
    "less_eager": Case("t5_v1_1", {}, "eager"),
    "less_sdpa": Case("t5_v1_1", {}, "sdpa"),
    "plain_eager": Case("t5_v1_1", _PLAIN, "eager"),
    "plain_sdpa_dropout": Case("t5_v1_1", _PLAIN, "sdpa"),
    "plain_sdpa": Case("t5_v1_1", _PLAIN, "sdpa", dropout=0.0),
    "bf16": Case("t5_v1_1", dict(bf16=True), "eager"),
    "bf16_plain": Case("t5_v1_1", dict(bf16=True) | _PLAIN, "sdpa"),
    "bf16_residual": Case("t5_v1_1", dict(bf16=True, bf16_residual=True), "eager"),
    "checkpointing": Case("t5_v1_1", _AGAIN, "eager"),
    "checkpointing_plain_bf16": Case("t5_v1_1", dict(bf16=True) | _AGAIN | _PLAIN, "eager"),
    "chunks": Case("t5_v1_1", dict(loss_chunk_size=128, z_loss=1e-4), "eager"),
    "tied_long": Case("t5_v1_0", {}, "eager", batch=Batch(2, 1024, 64)),
    "mt5_muon": Case("mt5", dict(optim="muon"), "eager"),
    "umt5_adafactor": Case("umt5", dict(optim="adafactor", bf16=True), "sdpa"),
    "longt5_local": Case("longt5_local", {}, batch=_LONG),
    "longt5_tglobal": Case("longt5_tglobal", {}, batch=_LONG),
    "longt5_local_plain_bf16": Case("longt5_local", dict(bf16=True) | _PLAIN, batch=_LONG),
    "t5gemma": Case("t5gemma", {}, "eager", dropout=0.0),
    "t5gemma_bf16": Case("t5gemma", dict(bf16=True), "eager"),
    "lora": Case("flan_t5", {}, "eager", lora=True),
    "lora_checkpointing": Case("flan_t5", dict(bf16=True) | _AGAIN, "eager", lora=True),
    "lora_int8": Case("flan_t5", dict(bf16=True), "eager", lora=True, weight_format="int8"),
    "packed": Case("t5_v1_1", {}, "sdpa", batch=Batch(8, 256, 64, packed=True)),
    "frozen": Case("t5_v1_1", {}, "eager", train_only="decoder|lm_head"),
}


def new_model(case: Case, device: str = "cpu", sizes: dict | None = None) -> PreTrainedModel:
    """The model of a case, before `prepare`. sizes: not set, the zoo's."""
    values = zoo.config_of(case.family, WORDS if sizes == WIDE else 640)
    if case.family in zoo.GEMMA:
        for part in (values["encoder"].get("text_config", values["encoder"]), values["decoder"]):
            layers = (sizes or {}).get("num_layers", 2)
            kinds = (part["layer_types"] * layers)[:layers]
            part.update({"num_hidden_layers": layers, "layer_types": kinds} | (GEMMA if sizes == WIDE else {}))
    else:
        values |= sizes or {}
    if "longt5" in case.family and sizes == WIDE:
        values |= dict(local_radius=63, global_block_size=16)
    with torch.device(device):
        model = create_model(AutoConfig.for_model(**values), case.attention)
    set_dropout(model, case.dropout)
    if case.lora:
        add_low_rank(model, 8, "base")
    if case.weight_format != "float32":
        freeze(model, case.weight_format, device, case.flags.get("bf16", False))
    if case.train_only:
        train_only(model, case.train_only)
    return model


def arguments(case: Case) -> FineTuningArguments:
    flags = dict(output_dir="never_written", report_to="none", use_cpu=True, dry_run=True, optim="adamw_torch")
    args = FineTuningArguments(**flags | case.flags)
    return args.replaced(optim=case.flags.get("optim", "adamw_rms_scaled"), learning_rate=1e-3)


def counted(case: Case) -> int:
    """Bytes at the peak of a step of the case, on top of its weights, as the plan counts them."""
    model, args, how = new_model(case, "meta", WIDE), arguments(case), CountedAs(case.attention)
    of_update, states = update_bytes(model, args, how)
    return max(of_update, states + max(pass_peaks(model, args, case.batch, how).values()))


def resident(name: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at its peak."""
    return 1024 * int(re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[1])


def measured(case: Case) -> int:
    """The same of this process, which makes two steps."""
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 2**16)
    args, model = arguments(case), new_model(case, sizes=WIDE)
    prepare(model, args, CountedAs(case.attention))
    optimizer = optimizer_of(args, model)
    # Without what does not grow with the model: the libraries' code, and oneDNN's kernels for each shape of a product.
    loss_of(model, case.batch.tensors("cpu"), args, "cpu").backward()
    optimizer.zero_grad()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = resident("VmRSS")
    for _ in range(2):
        loss_of(model, case.batch.tensors("cpu"), args, "cpu").backward()
        optimizer.step()
        optimizer.zero_grad()
    return resident("VmHWM") - before


def in_a_process(function, *args) -> int:
    """What the function returns in a forked process."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        try:
            os.write(writing, str(function(*args)).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        found = file.read()
    os.waitpid(pid, 0)
    return int(found)


def compare(names: list[str]) -> dict[str, dict]:
    """{case: {"counted", "real" in bytes, "off": by which share the count is above}}."""
    rows = {}
    for name in names:
        real, plan = in_a_process(measured, CASES[name]), counted(CASES[name])
        rows[name] = {"counted": plan, "real": real, "off": round(plan / real - 1, 4)}
        sizes = f"counted {plan / 2**20:7.1f} MiB, real {real / 2**20:7.1f} MiB"
        print(f"{name:28} {sizes}, {plan / real - 1:+.1%}", flush=True)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = compare(options.only)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(found, indent=1))
