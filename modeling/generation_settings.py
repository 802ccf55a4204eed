"""A checkpoint's settings of `generate` (generation_config.json): completed, named, adapted to a task, or dropped."""

from transformers import GenerationConfig, PreTrainedModel

from common.processes import print_once
from constants import CODE_ENTRIES

# Settings that `generate` no longer supports, or not alone, or whose result depends on the machine's speed.
_NOT_FOLLOWED = (
    "num_beam_groups",
    "diversity_penalty",
    "penalty_alpha",
    "constraints",
    "force_words_ids",
    "dola_layers",
    "guidance_scale",
    "stop_strings",
    "assistant_early_exit",
    "return_dict_in_generate",
    "max_time",
)
# Settings that forbid, force or weigh single tokens, as the targets of the checkpoint's own training wanted it.
TOKEN_RULES = (
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "sequence_bias",
    "exponential_decay_length_penalty",
    "watermarking_config",
)
# The other settings that decide which text is found, each with the value that changes nothing.
_SEARCH = {
    "num_beams": 1,
    "length_penalty": 1.0,
    "early_stopping": False,
    "min_length": 0,
    "min_new_tokens": 0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
}
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")


def complete(model: PreTrainedModel) -> None:
    """Sets the tokens that `generate` begins and ends with, and drops unsupported settings, with a printed line."""
    own = model.generation_config
    own.decoder_start_token_id = model.config.decoder_start_token_id
    for name in ("eos_token_id", "pad_token_id"):  # without EOS no answer would end
        if getattr(own, name) is None:
            setattr(own, name, getattr(model.config, name))
    for name in _NOT_FOLLOWED:
        if getattr(own, name, None) not in (None, False, 0, 1):
            print_once(f"generation_config.json: {name} {getattr(own, name)} is ignored")
        setattr(own, name, None)
    for name in CODE_ENTRIES:
        vars(own).pop(name, None)


def deciding_settings(own: GenerationConfig) -> dict:
    """{name: value} of the settings that decide which texts are found, without those that have no effect."""
    names = [*_SEARCH, *TOKEN_RULES, *(_SAMPLING if own.do_sample else ())]
    values = {name: getattr(own, name, None) for name in names}
    return {name: value for name, value in values.items() if value not in (None, [], _SEARCH.get(name))}


def set_generation_length(model: PreTrainedModel, tokens: int) -> None:
    """Lets generate() write at most this number of tokens."""
    model.generation_config.max_length = tokens + 1  # it counts the decoder's start token too
    model.generation_config.max_new_tokens = None  # an older checkpoint has it, and it would count instead


def forget_search(model: PreTrainedModel, greedy: bool) -> None:
    """Takes out of the generation settings what belongs to answers that are no longer trained: their least length, the
    tokens that they had to have or must not have, and that they are drawn. greedy: beams, penalties and forbidden
    repetitions too, with which labels are not scored."""
    own = model.generation_config
    if greedy:
        kept = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "max_length")
        model.generation_config = own = GenerationConfig(**{name: getattr(own, name) for name in kept})
    forgotten = ("min_length", "min_new_tokens", "do_sample", "num_return_sequences", *TOKEN_RULES)
    own.update(**dict.fromkeys(forgotten))
    drop_idle_search(model)


def drop_idle_search(model: PreTrainedModel) -> None:
    """Takes out generation settings without effect, such as early_stopping without beams: with them transformers saves
    no file that was changed."""
    own = model.generation_config
    idle = () if own.do_sample else _SAMPLING
    if (own.num_beams or 1) == 1:
        idle += ("early_stopping", "length_penalty")
    own.update(**dict.fromkeys(idle))
