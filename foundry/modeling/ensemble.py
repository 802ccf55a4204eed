"""Several models that answer as one: the probability of each next token is the mean of theirs.

    model = ensemble([load_model("out/seed_1"), load_model("out/seed_2")])   # the first one, which holds the other
    model(**batch).logits                                                    # log of the mean of their probabilities
    members(model)                                                           # both

What changes logits comes behind the mean: temperature, top-k and top-p, and the rules of generation_config.json. The
models may have other sizes, and one vocabulary. Of one model nothing changes.

Legend of shapes: B rows, S source tokens, W width of a model, V vocabulary.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from foundry.common.errors import UserError

_OF_THE_FILE = ("transformers_version", "_from_model_config")  # what generation_config.json says of itself


def log_of_mean(logits: Iterable[torch.Tensor]) -> torch.Tensor:
    """log(mean(softmax)) [..., V], in float32, of the logits [..., V] of each model."""
    total, count = None, 0
    for one in logits:
        count += 1
        log_p = one.log_softmax(-1, dtype=torch.float32)
        total = log_p if total is None else torch.logaddexp(total, log_p)
    return total - math.log(count)


def members(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The models of an ensemble; of any other model itself."""
    return [model, *getattr(model, "others", ())]


def ensemble(models: Sequence[PreTrainedModel]) -> PreTrainedModel:
    """The first of the models. Its forward pass now asks them all, gives `log_of_mean` as logits, and puts the outputs
    of their encoders [B, S, W] side by side. Of one model it is that model, unchanged. UserError if settings of
    generation_config.json differ: then the answers would depend on the models' order."""
    first, *others = models
    if not others:
        return first
    for other in others:
        _check_settings(first, other)
    first.others = torch.nn.ModuleList(others)
    first.forward = functools.wraps(first.forward)(functools.partial(_forward, first.forward, others))
    return first


def _forward(own: Callable, others: Sequence[PreTrainedModel], *args: object, **kwargs: object) -> ModelOutput:
    output = own(*args, **kwargs)
    encoded = [output.encoder_last_hidden_state]

    def logits() -> Iterator[torch.Tensor]:  # one model after the other: all would take much memory
        yield output.logits
        for model in others:
            found = model(*args, **kwargs)
            encoded.append(found.encoder_last_hidden_state)
            yield found.logits

    mean = log_of_mean(logits())
    return type(output)(logits=mean, encoder_last_hidden_state=torch.cat(encoded, dim=-1))


def _check_settings(first: PreTrainedModel, other: PreTrainedModel) -> None:
    settings, others = (model.generation_config.to_diff_dict() for model in (first, other))
    for name in sorted((settings.keys() | others.keys()) - {*_OF_THE_FILE}):
        if settings.get(name) != others.get(name):
            raise different(first.name_or_path, other.name_or_path, name, settings.get(name), others.get(name))


def different(first: str, other: str, what: str, value: object, other_value: object) -> UserError:
    """The error that two models cannot be in one ensemble, since the second has another value. first, other: their
    folders."""
    return UserError(
        f"--model_name_or_path {first} {other}: models of an ensemble have the same {what}, and these have "
        f"{value!r:.80} and {other_value!r:.80}"
    )
