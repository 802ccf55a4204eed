"""The kind of features that export other weights than those of one checkpoint."""

from typing import TYPE_CHECKING

from foundry.features import Feature

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ExportedWeights(Feature):
    """Which weights an export has: by the core those of the checkpoint that --model_name_or_path names."""

    def named(self, name: str) -> str:
        """The run, checkpoint or Hub name beside whose weights the tokenizer and the records lie. name: that of
        --model_name_or_path."""
        return name

    def model(self, checkpoint: str) -> "PreTrainedModel":
        """The model with these weights, in float32. checkpoint: the one that `named` leads to."""
        from foundry.model_t5 import load_model

        return load_model(checkpoint)

    def told(self, record: dict) -> dict:
        """What the card may say of them. record: of `read_run` (publishing/records.py), of their run."""
        return record
