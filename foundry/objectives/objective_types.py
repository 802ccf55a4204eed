"""The objectives by name: what `--objective` and `--packing` choose."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data_collator_t5 import find_sentinel_ids, is_byte_level
from features import DENOISER_MIXTURE, PACKINGS
from foundry.arguments.text import CHUNKS, PreTrainingDataArguments
from foundry.common.by_name import resolve
from foundry.corpora.own_ids import ids_offset
from foundry.modeling.segment_masks import enable_packing
from foundry.objectives.objective import Objective
from foundry.objectives.spans import SpanCorruption


def objective_type(args: PreTrainingDataArguments) -> type[Objective]:
    """The class of the objective that the flags name."""
    if args.objective != "span_corruption":
        return resolve(DENOISER_MIXTURE)
    return SpanCorruption if args.packing == CHUNKS else resolve(PACKINGS[args.packing])


def get_objective(
    args: PreTrainingDataArguments, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> Objective:
    """The objective that the flags name, for this tokenizer. Changes the model for it.

    The model gets segment masks if rows hold several examples. For readers of the checkpoint its configuration gets the
    offset of ready-made ids, and with such ids or ByT5's bytes the ids of the sentinels. UserError for impossible
    lengths, densities and vocabularies.
    """
    start, config = model.config.decoder_start_token_id, model.config
    objective = objective_type(args).of(args, tokenizer, start)
    if objective.packs_examples:
        enable_packing(model)
    if ids_offset(tokenizer):
        config.input_ids_offset = ids_offset(tokenizer)
    if ids_offset(tokenizer) or is_byte_level(tokenizer):  # tokens are ids or bytes, and no text has an <extra_id_N>
        config.sentinel_ids = find_sentinel_ids(tokenizer).tolist()
    return objective


def packed_flag(args: PreTrainingDataArguments) -> str | None:
    """The flag and value, as text, that put several examples into a row; None if no flag does."""
    if not objective_type(args).packs_examples:
        return None
    return f"--packing {args.packing}" if args.packing != CHUNKS else f"--objective {args.objective}"
