"""The Hugging Face Hub: uploads of trainings and exports, only if a flag asks for them, and the model's card.

    python pre_train_t5.py --train_file my_text.txt --push_to_hub --hub_model_id me/my-t5
    python export_checkpoint.py --model_name_or_path out/fine_tune_t5 --push_to_hub me/my-t5

uploads.py says what is published, names.py what is a path of this machine; model_cards.py fills model_card.md.j2.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from foundry.common.errors import UserError
from foundry.common.flags import Flags, Rules, option
from foundry.features import Feature
from foundry.publishing.uploader import Uploader


@dataclass
class RunHub(Feature):
    """The flags of uploads of a training, beside transformers' own --push_to_hub."""

    _argument_group_name = "run"
    _usual = ""
    rules: ClassVar[Rules] = tuple(
        (name, lambda flags: not flags.push_to_hub, "nothing is uploaded without --push_to_hub: give both")
        for name in ("hub_model_id", "hub_predictions")
    )

    hub_predictions: bool = option(False, "With --push_to_hub: also upload held-out texts, of samples and predictions.")

    def of_run(self) -> "RunPublication":
        return RunPublication(self)


class RunPublication(Uploader):
    """Uploads a training's checkpoints and its finished model. local: flags that name a path, found by `decide`."""

    def __init__(self, flags: RunHub):
        self.flags, self.local = flags, list[str]()

    def decide(self, flags: Flags) -> dict[str, Any]:
        """UserError for a name that no repository can have."""
        from features.hub.names import check_repository_name, local_flags
        from features.hub.uploads import repository_of

        if flags.push_to_hub:
            check_repository_name("--hub_model_id", repository_of(flags))
        self.local = local_flags(flags)
        return {}

    def record(self) -> dict[str, Any]:
        """The flags that name a path of this machine: a card of another place leaves them out."""
        return {"local": self.local}

    def plan(self, args: Any, model: Any) -> dict[str, str | None]:
        from features.hub.uploads import described_run

        return {"upload": described_run(args, self.flags.hub_predictions) if args.push_to_hub else None}

    def uploads(self, args: Any) -> Any:
        from features.hub.uploads import RunUploads

        if not args.push_to_hub or args.process_index or args.dry_run:
            return None
        return RunUploads(args, self.flags.hub_predictions)


@dataclass
class ExportHub(Uploader):
    """Writes the card of an export, and uploads it."""

    _argument_group_name = "export"

    license: str | None = option(None, "Licence for the model card, such as apache-2.0.")
    language: list[str] | None = option(None, "Languages for the model card, such as en it.")
    push_to_hub: str | None = option(None, "Upload the folder to this model repository, such as me/my-t5.")
    hub_private: bool = option(False, "Make the repository private when it is created.")

    def decide(self, flags: Flags) -> dict[str, Any]:
        """UserError for a name that no repository can have."""
        from features.hub.names import check_repository_name

        if self.push_to_hub:
            check_repository_name("--push_to_hub", self.push_to_hub)
        return {}

    def plan(self, args: Any, model: Any) -> dict[str, str | None]:
        from features.hub.uploads import described_upload

        return {"upload": self.push_to_hub and described_upload(self.push_to_hub)}

    def complete(self, folder: Path, output_dir: Path, record: dict, model: Any, found: dict[str, dict]) -> None:
        from features.hub.model_cards import model_card

        name, language = self.push_to_hub or output_dir.name, self.language
        given = dict(license=self.license, language=language[0] if language and len(language) == 1 else language)
        has = [(folder / file).is_file() for file in ("loss.png", "modules.json")]
        card = model_card(name, record, model, found, *has, **given)
        (folder / "README.md").write_text(card, encoding="utf-8")

    def exported(self, output_dir: Path, formats: Any) -> dict[str, str | None]:
        from features.hub.uploads import published, upload

        if not self.push_to_hub:
            return {}
        files, private = published(output_dir, formats), self.hub_private or None
        try:
            return {"uploaded to": upload(output_dir, files, self.push_to_hub, private, "Model and card")}
        except UserError as error:
            raise UserError(f"{error}; --overwrite_output_dir lets the same command try again") from None
