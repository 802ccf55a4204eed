"""Embeds texts by a folder of sentence-transformers that has no task.json, for a server or a page.

export_checkpoint.py --formats sentence_transformers writes such folders, which are known by their modules.json.
"""

import functools
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from constants import TASK_RECORD
from features.encoder_heads.embedding_answers import SUFFIXES, encoder_that
from features.encoder_heads.encoders import load_encoder
from features.encoder_heads.head_answers import check_prediction
from foundry.common.command_line import parse_arguments
from foundry.common.errors import UserError
from foundry.common.processes import has_accelerator
from foundry.corpora.tokenizers import answering_tokenizer
from foundry.features import Features
from foundry.publishing.file_names import check_modules
from tasks.model_folders import Encoder, named_model

LONGEST = 512  # tokens of a text, where the folder does not say
NO_LIMIT = 2**20  # tokens: by so many a tokenizer says that it has none


class SentenceAnswers:
    """What evaluate_t5.py and predict_t5.py do with such a folder."""

    def evaluate(self, argv: list[str] | None, *_: Any) -> dict:
        """UserError: nothing says by which pairs."""
        raise UserError(f"--model_name_or_path {named_model(argv)}: has no {TASK_RECORD} that says what is evaluated")

    def predict(self, argv: list[str] | None, groups: list[type], about: str) -> dict:
        """{"inputs": 0, "answered": 0}, when the front ends. UserError without one."""
        args, search, *features = parse_arguments(groups, argv, about=about)
        for front in check_prediction(args, search, Features(features), SUFFIXES[0]):
            front.encode(args, functools.partial(encoder_of, args))
            return {"inputs": 0, "answered": 0}
        raise UserError(
            f"--model_name_or_path {args.model_name_or_path}: is a folder of sentence-transformers without a "
            f"{TASK_RECORD}. SentenceTransformer(folder).encode embeds the texts of a file"
        )


def encoder_of(args: Any) -> Encoder:
    """What a Front asks. args: the flags of predict_t5.py. UserError for a folder that cannot be loaded whole."""
    from sentence_transformers import SentenceTransformer  # which embedder.py has found, or asked for

    folder, device = args.model_name_or_path, PartialState(cpu=args.use_cpu or not has_accelerator()).device
    check_modules(Path(folder))
    load_encoder(folder)  # refuses what is no encoder of a T5, and weights that are not all there
    try:
        model = SentenceTransformer(folder, device=str(device), local_files_only=True)
    except Exception as error:  # of any kind, as its files may hold anything
        why = " ".join(f"{type(error).__name__} {error}".split())
        raise UserError(f"--model_name_or_path {folder}: sentence-transformers cannot load it: {why}") from None

    def embed(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model({"input_ids": ids, "attention_mask": mask})["sentence_embedding"].float()

    tokenizer, limit = answering_tokenizer(folder, args.tokenizer_name), model.max_seq_length
    most = limit if limit and limit < NO_LIMIT else LONGEST
    prompt = model.prompts.get("query") or "" if args.source_prefix is None else args.source_prefix
    described = f"as sentence-transformers makes it, of texts of at most {most:,} tokens"
    return encoder_that(embed, args, device, tokenizer, most, prompt, described)
