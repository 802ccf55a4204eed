"""Fewer layers: of a checkpoint, --config_overrides num_layers=6,num_decoder_layers=2 keeps evenly spaced layers."""

from dataclasses import dataclass
from typing import Any

from foundry.modeling.weights import Overrides


@dataclass
class FewerLayers(Overrides):
    """Understands --config_overrides of a checkpoint. It has no flag of its own."""

    def is_on(self) -> bool:
        return True

    def change(self, model: Any, overrides: dict) -> None:
        from features.fewer_layers.left_out import leave_out_layers

        leave_out_layers(model, overrides)

    def plan(self, args: Any, model: Any) -> dict[str, str | None]:
        return {"layers kept": getattr(model, "kept_layers", None)}
