"""COMET (Rei et al. 2020, arXiv 2009.09025): an evaluation of texts is scored by unbabel-comet's own command too.

    python -m venv comet_env && comet_env/bin/pip install -r requirements/comet.txt
    python evaluate_t5.py --model_name_or_path out/de_en --comet_model wmt22-comet-da/checkpoints/model.ckpt \
        --comet_command comet_env/bin/comet-score

unbabel-comet needs an older transformers than this project, so it lives in an environment of its own.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from foundry.common.errors import UserError
from foundry.common.flags import Flags, Rules, option
from foundry.common.processes import is_first_process
from tasks.metrics.comparison import Comparison


@dataclass
class Comet(Comparison):
    """Scores an evaluation by comet-score, with a checkpoint of this machine."""

    _argument_group_name = "evaluation"
    _usual = ""
    switch: ClassVar = "comet_model"
    rules: ClassVar[Rules] = (
        ("comet_model", lambda flags: flags.comet_model and flags.do_predict, "not with --do_predict: needs targets"),
        ("comet_command", lambda flags: not flags.comet_model, "nothing runs it without --comet_model: give both"),
    )

    comet_model: str | None = option(None, "COMET checkpoint, FOLDER/checkpoints/model.ckpt: adds comet to text tasks.")
    comet_command: str = option("comet-score", "unbabel-comet's program, as in comet_env/bin/comet-score.")

    def decide(self, flags: Flags) -> dict[str, Any]:
        """UserError, before any work, if the program or its model is missing, or fails on a first row."""
        from features.comet.comet_command import comet_score

        model = Path(self.comet_model)
        if model.suffix != ".ckpt" or not all(
            map(Path.is_file, (model, model.absolute().parent.parent / "hparams.yaml"))
        ):
            raise UserError(
                f"--comet_model {model}: must be a checkpoint as published, FOLDER/checkpoints/model.ckpt with "
                "FOLDER/hparams.yaml (such as Unbabel/wmt22-comet-da, downloaded)"
            )
        if is_first_process():
            comet_score(self.comet_command, model, [("Hallo.", "Hello.", "Hello.")])
        return {}

    def compared(self, entry: dict, records: list[dict]) -> dict[str, float]:
        from features.comet.comet_command import comet_score, triples

        if entry["target_type"] != "text":
            return {}
        return {"comet": comet_score(self.comet_command, Path(self.comet_model), triples(entry, records))}
