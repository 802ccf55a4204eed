"""The teacher: checked against the student before weights are read, loaded for inference, described and counted."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from features.distillation.divergence import CACHED, LIVE, Divergence
from foundry.common.errors import UserError
from foundry.corpora.tokenizers import load_tokenizer
from foundry.model_t5 import check_room, load_model, named_config, weights_digest
from foundry.modeling.families import output_head, refuse_lacking, shape_of
from foundry.modeling.loss import CHUNK, LossTerm, compute_loss_in_forward, head_inputs
from foundry.modeling.segment_masks import enable_packing
from foundry.runs.memory import find_gpu

if TYPE_CHECKING:
    from features.distillation import Distillation


def teacher_config(name: str) -> PreTrainedConfig:
    """The configuration of --teacher."""
    return named_config(name, "--teacher")


def check_teacher(
    how: "Distillation", config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None, packed: object = None
) -> None:
    """UserError if --teacher cannot teach a model of this configuration and tokenizer, before any weight is read.
    tokenizer: None where it is still to be trained. packed: whether rows hold several examples."""
    theirs, shown = teacher_config(how.teacher), f"--teacher {how.teacher}"
    if tokenizer is None:
        raise UserError(f"{shown}: reads the tokens of its own tokenizer: add --tokenizer_name {how.teacher}")
    own, given = (each.get_vocab() for each in (load_tokenizer(how.teacher, "--teacher"), tokenizer))
    if own != given:
        other = sum(given.get(token) != number for token, number in own.items())
        raise UserError(
            f"{shown}: {other:,} of its {len(own):,} tokens have other ids in the student's tokenizer ({len(given):,}),"
            " and distributions are compared token by token. Give the student the teacher's with --tokenizer_name, or "
            "let the teacher write answers with predict_t5.py and train on those (recipes/distil_answers.yaml)"
        )
    rows, student = shape_of(theirs).vocabulary, shape_of(config).vocabulary
    if rows != student:
        raise UserError(f"{shown}: has {rows:,} rows of embeddings, and the student {student:,}: name another teacher")
    if packed:
        refuse_lacking(theirs, "packing", shown)
    if (top_k := how.teacher_top_k) >= rows:
        raise UserError(f"--teacher_top_k {top_k}: the teacher has {rows:,} tokens. Give fewer, or 0 for all")
    check_room(theirs, shown)


def load_teacher(name: str, args: Any) -> PreTrainedModel:
    """The model of --teacher on the run's device, for inference: frozen, without dropout, in bfloat16 on a GPU that has
    it, and whole also where the student is sharded. Its `contents` is a hash of its weights. args: training flags."""
    unset_hf_deepspeed_config()  # with it transformers would shard the teacher too
    try:
        model = load_model(name, flag="--teacher")
    finally:
        if (config := getattr(args, "hf_deepspeed_config", None)) is not None:
            set_hf_deepspeed_config(config)
    model.contents = weights_digest(model)
    enable_packing(model)
    compute_loss_in_forward(model, chunk=CHUNK)  # lets a batch hold the input of its head instead of its logits
    low = args.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return model.eval().requires_grad_(False).to(args.device, torch.bfloat16 if low else None)


def loss_term(how: Divergence, teacher: PreTrainedModel | None) -> LossTerm:
    """The term of the loss. teacher: None if it ran before and is cached."""
    if teacher is None:
        return LossTerm(how, how.weight, 1 - how.weight, CACHED, logged="distillation_loss")
    return LossTerm(how, how.weight, 1 - how.weight, LIVE, _read_by(teacher), "distillation_loss")


def _read_by(teacher: PreTrainedModel) -> Callable[[dict], dict]:
    """The function from the inputs of a batch to its tensors LIVE: what the teacher's head reads, and the head's
    matrix. The teacher is neither compiled nor a submodule of the model."""

    def read(inputs: dict) -> dict:
        with torch.no_grad(), torch.autocast(teacher.device.type, enabled=False):
            states = head_inputs(teacher, inputs | {"use_cache": False})
        return dict(zip(LIVE, (states, output_head(teacher).weight), strict=True))

    return read


def teacher_bytes(how: "Distillation", args: Any) -> int:
    """Bytes of the weights of --teacher, whole in each process."""
    shape, gpu = shape_of(teacher_config(how.teacher)), find_gpu(args)
    return (2 if gpu and gpu.is_recent else 4) * (shape.layer_weights + shape.embedding_weights)


def described_teacher(how: "Distillation", args: Any) -> str:
    """ "google/flan-t5-xl (t5, d_model 2048, 24 + 24 layers), run at every step; 0.5 of the loss is KL(teacher ||
    student) ..." """
    config, beta = teacher_config(how.teacher), how.distillation_beta
    kinds = {0: "KL(teacher || student)", 1: "KL(student || teacher)"}
    kind = kinds.get(beta, f"the Jensen-Shannon divergence of beta {beta:g}")
    runs = "run at every step"
    if how.teacher_top_k:
        runs = f"run once for each row, its {how.teacher_top_k} likeliest tokens cached"
    return (
        f"{how.teacher} ({config.model_type}, {shape_of(config).described}), {runs}; {how.distillation_weight:g} of "
        f"the loss is {kind} at temperature {how.distillation_temperature:g}, {args.loss_chunk_size or CHUNK:,} "
        "target tokens at a time"
    )
