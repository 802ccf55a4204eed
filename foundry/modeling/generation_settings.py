"""The settings of `generate` that a checkpoint brings (generation_config.json): which apply, and which are removed."""

import contextlib
import copy
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, T5Config, T5ForConditionalGeneration

from constants import CODE_ENTRIES
from foundry.common.errors import UserError
from foundry.common.reports import first_line
from foundry.common.terminal import print_once

MOST_BEAMS = 1000
# Settings that are removed: `generate` no longer supports them, or only with others, or they depend on the machine's
# speed.
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
    "cache_implementation",
    "cache_config",
    "prompt_lookup_num_tokens",
    "token_healing",
    "is_assistant",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
)
# Settings that `generate` is not tried with, unless they have an odd value.
_USUAL = ("decoder_start_token_id", "eos_token_id", "pad_token_id", "bos_token_id", "max_length", "max_new_tokens")
_USUAL += ("num_beams", "num_return_sequences", "do_sample", "use_cache", "transformers_version")
_USUAL += ("_from_model_config",)
# Settings that forbid, force or weigh single tokens. They suit the task that the checkpoint was trained for.
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
# {setting: its neutral value} of the other settings that decide which text `generate` returns.
NEUTRAL = {
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
    """Sets the tokens that `generate` begins and ends with, if missing, and removes unsupported settings, of which a
    printed line tells."""
    own, start = model.generation_config, model.config.decoder_start_token_id
    if own.decoder_start_token_id not in (None, start):  # the model trains with that of its config.json
        other = f"generation_config.json: decoder_start_token_id {own.decoder_start_token_id}"
        print_once(f"{other} is ignored: answers begin as in training, with config.json's, {start}")
    own.decoder_start_token_id = start
    for name in ("eos_token_id", "pad_token_id"):  # without EOS no answer would end
        if getattr(own, name) is None:
            setattr(own, name, getattr(model.config, name))
    for name in _NOT_FOLLOWED:
        if not name.startswith("output_") and getattr(own, name, None) not in (None, False, 0, 1):
            print_once(f"generation_config.json: {name} {getattr(own, name)} is ignored")
        setattr(own, name, None)
    for name in CODE_ENTRIES:
        vars(own).pop(name, None)
    _check(own, model.get_input_embeddings().num_embeddings)


def _check(own: GenerationConfig, vocabulary: int) -> None:
    """UserError for settings by which `generate` would end in a traceback, or take all memory."""
    for name in ("num_beams", "num_return_sequences"):
        value = getattr(own, name)
        if not (value is None or isinstance(value, int) and 1 <= value <= MOST_BEAMS):
            raise UserError(f"generation_config.json: {name} {value!r:.80}: must be 1 to {MOST_BEAMS:,}")
    for name in (*TOKEN_RULES, "eos_token_id", "pad_token_id", "bos_token_id"):
        value = getattr(own, name, None)
        if strange := [number for number in _tokens(value) if not (isinstance(number, int) and number < vocabulary)]:
            raise UserError(f"generation_config.json: {name} has {strange[0]!r:.80}, which is no token of the model")
    odd = {n: value for n, value in own.to_diff_dict().items() if n not in _USUAL or not isinstance(value, int | str)}
    if odd:
        _try(own, vocabulary, odd)


def _try(own: GenerationConfig, vocabulary: int, odd: dict) -> None:
    """UserError, which names the `odd` settings, if a small model cannot generate two tokens with all of its own."""
    shape = dict(vocab_size=vocabulary, d_model=8, d_kv=8, d_ff=8, num_layers=1, num_heads=1)
    search = {name: min(getattr(own, name) or 1, 2) for name in ("num_beams", "num_return_sequences")}
    settings = copy.deepcopy(own)
    settings.update(**search, max_length=None, max_new_tokens=2)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        try:
            T5ForConditionalGeneration(T5Config(**shape)).eval().generate(torch.tensor([[0, 0]]), settings)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
            names = ", ".join(f"{name} {value!r:.80}" for name, value in odd.items())
            raise UserError(
                f"generation_config.json: {names}: cannot be generated with ({first_line(error)})"
            ) from None


def _tokens(value: Any) -> list:
    """The tokens in a rule for tokens: 3 -> [3], [[3, 4]] -> [3, 4], [[[3, 4], -1.5]] (a bias) -> [3, 4]."""
    if isinstance(value, list | tuple):
        return [token for item in value for token in _tokens(item)]
    if isinstance(value, dict):
        return [token for item in value for token in _tokens(item)]
    return [] if value is None or isinstance(value, float) or hasattr(value, "to_dict") else [value]


def deciding_settings(own: GenerationConfig) -> dict:
    """{name: value} of the settings that decide which texts `generate` returns, without those at their neutral
    value."""
    names = [*NEUTRAL, *TOKEN_RULES, *(_SAMPLING if own.do_sample else ())]
    values = {name: getattr(own, name, None) for name in names}
    return {name: value for name, value in values.items() if value not in (None, [], NEUTRAL.get(name))}


def described_search(settings: dict, given: dict) -> str:
    """For the plan: {"num_beams": 2, "min_length": 9}, {"max_new_tokens": 6} -> "num_beams 2, min_length 9,
    max_new_tokens 6". settings: what `deciding_settings` returns; given: what flags say beside it."""
    kind = [] if "num_beams" in settings or given.get("do_sample") else ["greedy"]
    return ", ".join(kind + [f"{name} {value}" for name, value in (settings | given).items()])


def own_limit(folder: str) -> tuple[int, str] | None:
    """(tokens of an answer, the setting that says so) of the generation_config.json in a folder or under a Hub name;
    None if it says nothing. UserError for a value that is no such number."""
    own = GenerationConfig()
    with contextlib.suppress(OSError):  # there is none
        own = GenerationConfig.from_pretrained(folder)
    for name, start in (("max_new_tokens", 0), ("max_length", 1)):  # max_length counts the decoder's start token too
        if (value := getattr(own, name)) is not None:
            if not (isinstance(value, int) and value > start):
                raise UserError(f"generation_config.json: {name} {value!r:.80}: must be a whole number above {start}")
            return value - start, f"generation_config.json's {name} {value:,}"
    return None


def set_generation_length(model: PreTrainedModel, tokens: int) -> None:
    """Lets generate() write at most this number of tokens."""
    model.generation_config.max_length = tokens + 1  # it counts the decoder's start token too
    model.generation_config.max_new_tokens = None  # some older checkpoints set it, and it overrides max_length


def forget_search(model: PreTrainedModel, greedy: bool) -> None:
    """Removes the generation settings that suited the checkpoint's earlier task and not the new one: least length,
    rules for single tokens, sampling. greedy: also beams, penalties and forbidden repetitions, which scoring of class
    labels does not follow."""
    own = model.generation_config
    if greedy:
        kept = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "max_length")
        model.generation_config = own = GenerationConfig(**{name: getattr(own, name) for name in kept})
    forgotten = ("min_length", "min_new_tokens", "do_sample", "num_return_sequences", *TOKEN_RULES)
    own.update(**dict.fromkeys(forgotten))
    drop_idle_search(model)


def drop_idle_search(model: PreTrainedModel) -> None:
    """Removes generation settings that have no effect, such as early_stopping without beams: transformers refuses to
    save a changed file that has them."""
    own = model.generation_config
    idle = () if own.do_sample else _SAMPLING
    if (own.num_beams or 1) == 1:
        idle += ("early_stopping", "length_penalty")
    own.update(**dict.fromkeys(idle))
