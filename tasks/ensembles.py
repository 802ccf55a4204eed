"""Which models may answer together as an ensemble: what they read and write must be the same tokens.

check_ensemble(["out/seed_1", "out/seed_2"], None, ())     # UserError: ... have the same piece 7 of the tokenizer ...
"""

from collections.abc import Collection, Sequence
from typing import Any

from foundry.common.errors import UserError
from foundry.corpora.tokenizers import answering_tokenizer, tokenizer_fingerprint
from foundry.model_t5 import named_config
from foundry.modeling.decoding_layers import DECODERS
from foundry.modeling.ensemble import different
from foundry.modeling.families import family_of
from tasks.task_records import recorded_reading

PIECES = "pieces of the tokenizer"


def check_ensemble(names: Sequence[str], tokenizer_name: str | None, given: Collection[str]) -> None:
    """UserError, before a weight is read, unless the models of these folders or Hub names can answer together; their
    sizes and weights may differ. tokenizer_name: the flag. given: names of flags that stand in for what task.json says.
    One model always can."""
    first, *others = names
    if not others:
        return
    wanted = _in_common(first, tokenizer_name, given)
    for other in others:
        found = _in_common(other, tokenizer_name, given)
        for what in wanted | found:
            if wanted.get(what) != found.get(what):
                raise different(first, other, *_difference(what, wanted.get(what), found.get(what)))


def described_models(names: Sequence[str]) -> str:
    """For the plan: "out/one", or "out/one + out/two (the mean of 2 models' probabilities)"."""
    mean = f" (the mean of {len(names)} models' probabilities)" if len(names) > 1 else ""
    return " + ".join(names) + mean


def _difference(what: str, value: Any, other: Any) -> tuple[str, Any, Any]:
    """Of two vocabularies their first piece that differs, else what is given."""
    if what != PIECES:
        return what, value, other
    number = min(number for number in value | other if value.get(number) != other.get(number))
    return f"piece {number:,} of the tokenizer", value.get(number), other.get(number)


def _in_common(name: str, tokenizer_name: str | None, given: Collection[str]) -> dict[str, Any]:
    """{what the models of an ensemble have in common: its value}."""
    config = named_config(name)
    if config.model_type not in DECODERS:
        raise UserError(
            f"--model_name_or_path {name}: a {config.model_type} model can be in no ensemble: name models of "
            f"{', '.join(DECODERS)}"
        )
    tokenizer = answering_tokenizer(name, tokenizer_name)
    found = {token: getattr(config, token) for token in ("vocab_size", "pad_token_id", "eos_token_id")}
    found["decoder_start_token_id"] = family_of(config).start_token(config)
    found[PIECES] = {number: piece for piece, number in tokenizer.get_vocab().items()}
    found["rules of the tokenizer"] = tokenizer_fingerprint(tokenizer)[:8]
    for flag, value in recorded_reading(name).items():
        if flag not in given:
            found[f"{flag} in task.json"] = value
    return found
