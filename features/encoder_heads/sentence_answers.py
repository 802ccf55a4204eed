"""Embeds texts by a folder of sentence-transformers that has no task.json, for a server or a page.

export_checkpoint.py --formats sentence_transformers writes such folders, which are known by their modules.json.
"""

from pathlib import Path

import torch

from constants import TASK_RECORD
from features.encoder_heads.embedding_answers import Embed, EmbeddingReader
from features.encoder_heads.encoder_answers import EncoderAnswers
from features.encoder_heads.head_models import load_encoder
from foundry.common.errors import UserError
from foundry.publishing.file_names import check_modules
from foundry.publishing.sentence_folder import longest_of_folder
from tasks.entry import TaskEntry
from tasks.model_folders import named_models

LONGEST = 512  # tokens of a text, where the folder does not say
NO_LIMIT = 2**20  # tokens: by so many a tokenizer says that it has none


class SentenceReader(EmbeddingReader):
    """Texts for a Frontend alone, as the folder's modules embed them."""

    def understand(self) -> None:
        """UserError for the texts of a file, and for a folder that cannot be loaded whole."""
        from sentence_transformers import SentenceTransformer  # which embedder.py has found, or asked for

        args, folder = self.args, self.folder
        if args.input_file:
            raise UserError(
                f"--model_name_or_path {folder}: is a folder of sentence-transformers without a {TASK_RECORD}. "
                "SentenceTransformer(folder).encode embeds the texts of a file"
            )
        check_modules(Path(folder))
        longest_of_folder(Path(folder))  # refuses what is no length
        load_encoder(folder)  # refuses what is no encoder of a T5, and weights that are not all there
        try:
            self.modules = SentenceTransformer(folder, device=str(self.device), local_files_only=True)
        except Exception as error:  # of any kind, as its files may hold anything
            why = " ".join(f"{type(error).__name__} {error}".split())
            raise UserError(f"--model_name_or_path {folder}: sentence-transformers cannot load it: {why}") from None
        limit = self.modules.max_seq_length
        most = limit if limit and limit < NO_LIMIT else LONGEST
        self.most = args.max_source_length or most
        self.described = f"as sentence-transformers makes it, of texts of at most {most:,} tokens"
        prompt = self.modules.prompts.get("query") or "" if args.source_prefix is None else args.source_prefix
        self.entry = TaskEntry(prefix=prompt, inputs={"": "text"})

    def model(self) -> Embed:
        def embed(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.modules({"input_ids": ids, "attention_mask": mask})["sentence_embedding"].float()

        self.of_batch(embed, [self.read("")])
        return embed


class SentenceAnswers(EncoderAnswers):
    """What evaluate_t5.py and predict_t5.py do with such a folder."""

    reader, suffix = SentenceReader, ".npy"

    def evaluate(self, argv: list[str] | None, *_: object) -> dict:
        """UserError: nothing says by which pairs."""
        (name,) = named_models(argv)
        raise UserError(f"--model_name_or_path {name}: has no {TASK_RECORD} that says what is evaluated")
