"""The objectives by name: what `--objective` and `--packing` choose."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from arguments.text import PreTrainingDataArguments
from corpora.own_ids import ids_offset
from data_collator_t5 import compute_input_and_target_lengths, find_sentinel_ids, is_byte_level
from modeling.segment_masks import enable_packing
from objectives.denoisers import DenoiserMixture, denoisers_of, mean_targets
from objectives.documents import DocumentSpans
from objectives.objective import Objective
from objectives.spans import SpanCorruption

SPANS = {"chunks": SpanCorruption, "documents": DocumentSpans}  # --objective span_corruption by --packing


def get_objective(
    args: PreTrainingDataArguments, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> Objective:
    """The objective that the flags name, for this tokenizer. Changes the model for it.

    The model gets segment masks if rows hold several examples. For readers of the checkpoint its configuration gets the
    offset of ready-made ids, and with such ids or ByT5's bytes the ids of the sentinels. UserError for impossible
    lengths, densities and vocabularies.
    """
    start, config = model.config.decoder_start_token_id, model.config
    if args.objective == "span_corruption":
        spans = args.noise_density, args.mean_noise_span_length
        objective = SPANS[args.packing](tokenizer, args.input_seq_length, *spans, start)
    else:
        objective = DenoiserMixture(tokenizer, args.objective, args.input_seq_length, start)
    if objective.packs_examples:
        enable_packing(model)
    if ids_offset(tokenizer):
        config.input_ids_offset = ids_offset(tokenizer)
    if ids_offset(tokenizer) or is_byte_level(tokenizer):  # tokens are ids or bytes, and no text has an <extra_id_N>
        config.sentinel_ids = find_sentinel_ids(tokenizer).tolist()
    return objective


def lengths_of(args: PreTrainingDataArguments) -> tuple[int, int]:
    """(S, T): input and target length in tokens of the rows of the objective that the flags name."""
    if args.objective == "span_corruption":
        spans = args.noise_density, args.mean_noise_span_length
        return args.input_seq_length, compute_input_and_target_lengths(args.input_seq_length, *spans)[1]
    denoisers, weights = zip(*denoisers_of(args.objective).values(), strict=True)
    return args.input_seq_length, round(mean_targets(denoisers, weights, args.input_seq_length))


def packed_flag(args: PreTrainingDataArguments) -> str | None:
    """The flag and value, as text, that put several examples into a row; None if no flag does."""
    if args.packing == "documents":
        return f"--packing {args.packing}"
    return f"--objective {args.objective}" if args.objective != "span_corruption" else None
