"""A student made from a checkpoint by leaving layers out: those that stay are evenly spaced.

    leave_out_layers(model, {"num_layers": 6, "num_decoder_layers": 2})

As Shleifer and Rush 2020 (arXiv 2010.13002) begin a short student, which is trained further. A short decoder is what
makes generation fast: it runs for every token that is written, the encoder once.
"""

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from common.errors import UserError
from modeling.families import family_of, stacks

COUNTS = ("num_layers", "num_decoder_layers")  # keys of --config_overrides: layers of the encoder, of the decoder


def evenly_spaced(layers: int, count: int) -> list[int]:
    """Numbers of `count` of so many layers, the first and the last among them: 12, 4 -> [0, 4, 7, 11]; 12, 1 -> [0].
    T5's bias of relative positions is in the first layer, for all of them."""
    return np.linspace(0, layers - 1, count).round().astype(int).tolist()


def leave_out_layers(model: PreTrainedModel, overrides: dict) -> None:
    """Keeps as many layers of encoder and decoder as `overrides` says, if it does, and tells in `model.kept_layers`
    which. UserError for any other key, and for more layers than there are."""
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
            for module in layer.modules():  # the place of its keys and values in the cache of `generate`
                if hasattr(module, "layer_idx"):
                    module.layer_idx = place
        of_model = family_of(model.config).configs(model.config)[COUNTS.index(key)]
        for config in (of_model, stack.config):  # T5's stacks have copies of the model's, with one count
            setattr(config, key if config is model.config else "num_hidden_layers", value)
            if len(getattr(config, "layer_types", None) or ()) == len(layers):  # T5Gemma's
                config.layer_types = [config.layer_types[number] for number in kept]
        part = "encoder" if key == COUNTS[0] else "decoder"
        told.append(f"{part} {', '.join(str(number + 1) for number in kept)} of {len(layers)}")
    model.kept_layers = "; ".join(told) or None
