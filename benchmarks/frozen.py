"""LoRA on a checkpoint whose frozen weights have each of FORMS: loss, bytes of all weights, seconds of a step.

With every form the same LoRA matrices are trained from the same start on the same batch under bfloat16 autocast. The
forms are timed in turn, a step each.
"""

from argparse import Namespace

import torch

from benchmarks import measure
from common.errors import UserError
from corpora.tokenizers import load_tokenizer
from data_collator_t5 import T5DataCollator
from model_t5 import is_local_model, load_model
from modeling.frozen import FORMS, freeze, weight_bytes
from modeling.loss import compute_loss_in_forward
from modeling.low_rank import add_low_rank

RANK, TEXT = 16, "The river runs through the old city, and its bridges were built of stone by order of the king. "


def measure_frozen(args: Namespace) -> dict:
    """{"rows": for each form its losses, bytes and seconds of a step, "text": the same for reading}."""
    if not is_local_model(args.model):
        raise UserError(f"--model {args.model}: give the folder of a checkpoint, such as out/demo/pre_train_t5")
    tokenizer = load_tokenizer(args.model)
    collator = T5DataCollator(tokenizer, args.source_length)
    ids = tokenizer(TEXT * args.source_length)["input_ids"][: collator.tokens_length]
    torch.manual_seed(0)
    inputs = {n: t.to(args.device) for n, t in collator([{"input_ids": ids}] * args.batch).items()}
    rows, runs = {}, {}
    for form in FORMS:
        step, weights = _step(args, form, inputs)
        rows[form] = {"name": form, "bytes": weights, "losses": []}
        runs[form] = measure.timed(lambda step=step, losses=rows[form]["losses"]: losses.append(step()))
    measure.interleaved(rows, runs, args.rounds, warm_up=1)
    for row in rows.values():
        row["seconds_per_step"] = sorted(row["seconds"])[len(row["seconds"]) // 2]
        row["loss"] = row["losses"][-1]
    lines = [
        f"{r['name']:10} loss {r['loss']:.4f}  {r['bytes']:,} bytes  {r['seconds_per_step']:.3f} s"
        for r in rows.values()
    ]
    return {"rows": list(rows.values()), "text": "\n".join(lines)}


def _step(args: Namespace, form: str, inputs: dict):
    model = load_model(args.model, as_saved=form != "float32")
    torch.manual_seed(0)
    add_low_rank(model, RANK, args.model)
    if form != "float32":
        freeze(model, form, args.device)
    compute_loss_in_forward(model.to(args.device).eval())
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)

    def step() -> float:
        with torch.autocast(args.device.type, torch.bfloat16):
            loss = model(**inputs)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step, weight_bytes(model, form)
