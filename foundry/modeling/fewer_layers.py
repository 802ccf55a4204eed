"""A smaller model, such as the student of a distillation, made from a checkpoint by keeping evenly spaced layers.

    leave_out_layers(model, {"num_layers": 6, "num_decoder_layers": 2})

Shleifer and Rush 2020 (arXiv 2010.13002) start their students like this and train them further. Generation gains most
from a short decoder: the decoder runs once for every token that is written, the encoder once for a text.
"""

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from foundry.common.errors import UserError
from foundry.modeling.families import family_of, stacks

COUNTS = ("num_layers", "num_decoder_layers")  # keys of --config_overrides: layers of the encoder, of the decoder


def evenly_spaced(layers: int, count: int) -> list[int]:
    """The numbers of `count` layers out of `layers`, with the first and the last: 12, 4 -> [0, 4, 7, 11]; 12, 1 -> [0].

    The first one always stays: it holds T5's relative position bias for all layers.
    """
    return np.linspace(0, layers - 1, count).round().astype(int).tolist()


def leave_out_layers(model: PreTrainedModel, overrides: dict) -> None:
    """Leaves as many layers in encoder and decoder as `overrides` says, by the keys COUNTS, and says in
    `model.kept_layers` which. UserError for any other key, and for a number of layers that cannot be."""
    told, parts = [], dict(zip(COUNTS, stacks(model), strict=True))
    for key, value in overrides.items():
        if key not in parts:
            raise UserError(
                f"--config_overrides {key}={value}: is for a new model. Of a checkpoint layers can be left out, with "
                f"{' and '.join(COUNTS)}"
            )
        stack = parts[key]
        name = next(name for name in ("block", "layers") if hasattr(stack, name))
        layers = getattr(stack, name)
        if not isinstance(value, int) or value > len(layers):
            raise UserError(
                f"--config_overrides {key}={value}: must be a whole number of at most {len(layers)}, the layers of the "
                "checkpoint, which can only be left out"
            )
        kept = evenly_spaced(len(layers), value)
        setattr(stack, name, nn.ModuleList(layers[number] for number in kept))
        for place, layer in enumerate(getattr(stack, name)):
            for module in layer.modules():  # layer_idx: where `generate` caches the layer's keys and values
                if hasattr(module, "layer_idx"):
                    module.layer_idx = place
        of_model = family_of(model.config).configs(model.config)[COUNTS.index(key)]
        for config in (of_model, stack.config):  # T5's stacks have copies, in which num_hidden_layers is their own
            setattr(config, key if config is model.config else "num_hidden_layers", value)
            if len(getattr(config, "layer_types", None) or ()) == len(layers):  # in T5Gemma: with or without a window
                config.layer_types = [config.layer_types[number] for number in kept]
        part = "encoder" if key == COUNTS[0] else "decoder"
        told.append(f"{part} {', '.join(str(number + 1) for number in kept)} of {len(layers)}")
    model.kept_layers = "; ".join(told) or None
