"""Averaged checkpoints: an export of the mean of several checkpoints' weights.

    python export_checkpoint.py --average out/de_en/checkpoint-* --output_dir out/averaged
    python export_checkpoint.py --average_last 5 --model_name_or_path out/de_en --output_dir out/averaged

Vaswani et al. 2017 (arXiv 1706.03762) average the last 5 to 20 checkpoints of a translation model; the final models of
several fine-tunings of one checkpoint may be averaged too (Wortsman et al. 2022, arXiv 2203.05482).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from foundry.common.errors import UserError
from foundry.common.flags import Flags, Rules, option
from foundry.common.paths import check_output_dir
from foundry.features import Feature
from foundry.modeling.weights import ModelSource


@dataclass
class Averages(Feature):
    """The flags of averages."""

    _argument_group_name = "export"
    rules: ClassVar[Rules] = (
        ("average", lambda flags: flags.average and flags.average_last, "not with --average_last: give one of them"),
    )

    average: list[str] | None = option(
        None, "Checkpoints, such as out/run/checkpoint-*, of whose weights to take the mean."
    )
    average_last: int | None = option(None, "Take the mean of the run's last N whole checkpoints.", at_least=2)

    def is_on(self) -> bool:
        return bool(self.average or self.average_last)

    def of_run(self) -> "AveragedModel":
        return AveragedModel(self)


class AveragedModel(ModelSource):
    """Exports the mean of the weights of `folders`, which `decide` finds."""

    def __init__(self, flags: Averages):
        self.flags, self.folders = flags, list[Path]()

    def is_on(self) -> bool:
        return self.flags.is_on()

    def decide(self, flags: Flags) -> dict[str, Any]:
        """The newest of the checkpoints, beside whose weights the tokenizer and the records lie. UserError, before any
        weight is read, unless they can be averaged: two or more whole folders with the same tensors and the same
        tokenizer."""
        from features.averages.mean import check_same_tensors, last_checkpoints, named_checkpoints

        if self.flags.average:
            self.folders = named_checkpoints(self.flags.average)
            default = type(flags.groups[0]).model_name_or_path
            if flags.model_name_or_path != default:
                raise UserError(
                    f"--model_name_or_path {flags.model_name_or_path}: --average names the weights: give one"
                )
        else:
            self.folders = last_checkpoints(Path(flags.model_name_or_path), self.flags.average_last)
        check_output_dir(flags.output_dir, flags.overwrite_output_dir, map(str, self.folders))
        check_same_tensors(self.folders)
        return {"model_name_or_path": str(self.folders[-1])}

    def loaded(self, name_or_path: str, attention: str | None) -> Any:
        from features.averages.mean import mean_model
        from features.encoder_heads import Exported
        from foundry.model_t5 import load_model

        def read(folder: str) -> Any:
            """Of an encoder, with a head or alone, what its own export reads."""
            return Exported().loaded(folder, attention) or load_model(folder)

        return mean_model(self.folders, read)

    def plan(self, args: Any, model: Any) -> dict[str, str | None]:
        return {"weights": f"the mean of {len(self.folders)} checkpoints: {', '.join(self._names())}"}

    def record(self) -> dict[str, Any]:
        """What a card says of them; the results of the run are those of other weights."""
        return {"averaged": self._names(), "results": {}}

    def _names(self) -> list[str]:
        names = [path.name for path in self.folders]
        if len({*names}) < len(names):
            names = [f"{path.parent.name}/{path.name}" for path in self.folders]
        return names
