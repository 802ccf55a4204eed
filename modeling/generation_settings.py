"""A checkpoint's settings of `generate` (generation_config.json): completed, adapted to a task, or dropped."""

from transformers import GenerationConfig, PreTrainedModel

from common.processes import print_once

# Settings that `generate` no longer supports, or not alone, or whose result depends on the machine's speed.
_NOT_FOLLOWED = (
    "num_beam_groups diversity_penalty penalty_alpha constraints force_words_ids dola_layers guidance_scale "
    "stop_strings assistant_early_exit return_dict_in_generate max_time"
).split()


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


def set_generation_length(model: PreTrainedModel, tokens: int) -> None:
    """Lets generate() write at most this number of tokens."""
    model.generation_config.max_length = tokens + 1  # it counts the decoder's start token too
    model.generation_config.max_new_tokens = None  # of an older checkpoint: it would count instead


def forget_search(model: PreTrainedModel, greedy: bool) -> None:
    """Takes out of the generation settings what belongs to answers that are no longer trained: their least length, and
    that they are drawn. greedy: beams, penalties and forbidden repetitions too, with which labels are not scored."""
    own = model.generation_config
    if greedy:
        kept = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "max_length")
        model.generation_config = own = GenerationConfig(**{name: getattr(own, name) for name in kept})
    own.update(min_length=None, min_new_tokens=None, do_sample=None, num_return_sequences=None)
    drop_idle_search(model)


def drop_idle_search(model: PreTrainedModel) -> None:
    """Takes out generation settings without effect, such as early_stopping without beams: with them transformers saves
    no file that was changed."""
    own, idle = model.generation_config, []
    if not own.do_sample:
        idle += "temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff".split()
    if (own.num_beams or 1) == 1:
        idle += ["early_stopping", "length_penalty"]
    own.update(**dict.fromkeys(idle))
