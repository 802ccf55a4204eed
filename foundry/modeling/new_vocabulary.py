"""Switches a model to another tokenizer: tokens of both keep their embeddings, new ones start at the old mean."""

import functools

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from constants import VOCAB_SIZE_MULTIPLE
from data_collator_t5 import SENTINEL_NAME, find_sentinel_ids, is_byte_level, vocabulary_size
from foundry.common.errors import UserError
from foundry.corpora.own_ids import ids_offset
from foundry.modeling.families import family_of, output_head, stacks


def embedding_rows(tokens: int) -> int:
    """Rows of an embedding for this number of tokens, rounded up to a multiple of VOCAB_SIZE_MULTIPLE."""
    return -(-tokens // VOCAB_SIZE_MULTIPLE) * VOCAB_SIZE_MULTIPLE


def matching_ids(old: PreTrainedTokenizerBase, new: PreTrainedTokenizerBase) -> dict[int, int]:
    """{id in the new tokenizer: id in the old one} of tokens that both have: equal texts, sentinels of equal number,
    special tokens of the same role.

    {"▁the": 5, "▁<extra_id_0>": 99} and {"▁the": 7, "<extra_id_0>": 199, "▁il": 8} -> {7: 5, 199: 99}
    """
    before, after = old.get_vocab(), new.get_vocab()
    all_letters = _writes_bytes(old) == _writes_bytes(new)
    shared = {piece for piece in before.keys() & after.keys() if all_letters or piece.isascii()}
    pairs = {after[piece]: before[piece] for piece in shared if not SENTINEL_NAME.fullmatch(piece)}
    for role in ("pad_token_id", "eos_token_id", "unk_token_id", "bos_token_id"):  # by their role, not by their text
        if getattr(old, role) is not None and getattr(new, role) is not None:
            pairs[getattr(new, role)] = getattr(old, role)
    sentinels = (find_sentinel_ids(tokenizer, required=False).tolist() for tokenizer in (new, old))
    return pairs | dict(zip(*sentinels, strict=False))


def _writes_bytes(tokenizer: PreTrainedTokenizerBase) -> str:
    """How its tokens write letters beyond ASCII: "" if as themselves. ByT5 and byte-level BPE write each byte as one
    character, which may look like another letter."""
    if is_byte_level(tokenizer):
        return "ByT5"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return "ByteLevel" if backend is not None and "ByteLevel" in str(backend.decoder) else ""


def same_vocabulary(old: PreTrainedTokenizerBase, new: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers give the same tokens the same ids."""
    return old.get_vocab() == new.get_vocab()


@torch.no_grad()
def change_vocabulary(
    model: PreTrainedModel, old: PreTrainedTokenizerBase, new: PreTrainedTokenizerBase
) -> dict[str, int]:
    """Switches `model` from the tokenizer `old` to `new`; returns {"kept": tokens, "new": tokens}.

    In embedding and output head, tied or not, a token that `old` has too keeps its row; every other row (also those
    that round the vocabulary up) is the mean of the rows of `old`. ValueError if the model has no rows for some tokens
    of `old`, or if its decoder begins with a token that `new` does not have.
    """
    rows = model.get_input_embeddings().num_embeddings
    if new.bos_token_id is None and model.config.decoder_start_token_id == old.bos_token_id:
        raise UserError(
            f"--tokenizer_name: a {type(new).__name__} without bos_token, with which the decoder of this "
            f"{model.config.model_type} model begins"
        )
    last = vocabulary_size(old) - 1
    if last >= rows:
        raise UserError(f"the checkpoint's own tokenizer has ids up to {last} and the model only {rows} rows")
    pairs = matching_ids(old, new)
    size = embedding_rows(vocabulary_size(new))
    of_old = sorted(set(old.get_vocab().values()))

    @functools.cache  # modules that share a weight share the new one
    def replanted(weight: torch.nn.Parameter) -> torch.nn.Parameter:
        """[rows, d_model] -> [size, d_model]."""
        grown = weight[of_old].double().mean(0).to(weight.dtype).repeat(size, 1)
        grown[list(pairs)] = weight[list(pairs.values())]
        return torch.nn.Parameter(grown, weight.requires_grad)

    head = output_head(model)
    for module in {model.get_input_embeddings(), *(stack.embed_tokens for stack in stacks(model)), head} - {None}:
        module.weight = replanted(module.weight)
        setattr(module, "out_features" if module is head else "num_embeddings", size)
        if getattr(module, "padding_idx", None) is not None:
            module.padding_idx = new.pad_token_id
    starts = {old.pad_token_id: new.pad_token_id, old.bos_token_id: new.bos_token_id}
    start = starts.get(model.config.decoder_start_token_id, model.config.decoder_start_token_id)
    parts = (*family_of(model.config).configs(model.config), *(stack.config for stack in stacks(model)))
    for config in (model.config, *parts, model.generation_config):
        if hasattr(config, "vocab_size"):
            config.vocab_size = size
        config.pad_token_id, config.eos_token_id = new.pad_token_id, new.eos_token_id
        if getattr(config, "bos_token_id", None) is not None and new.bos_token_id is not None:
            config.bos_token_id = new.bos_token_id
        config.decoder_start_token_id = start
    of_new = dict(sentinel_ids=find_sentinel_ids(new, required=False).tolist(), input_ids_offset=ids_offset(new))
    for name, value in of_new.items():  # replaces what config.json says about the old tokenizer
        if getattr(model.config, name, value) != value:
            delattr(model.config, name)
    return {"kept": len(pairs), "new": len(new) - len(pairs)}
