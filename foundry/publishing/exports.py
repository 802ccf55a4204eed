"""`Format`, a format of exports; and the comparison of an exported model with PyTorch on real texts.

`compare_outputs`: an encoder, or an encoder with a head, has PyTorch's output within a tolerance.
`compare`: an engine must write PyTorch's greedy tokens, and give them the same log-probabilities within a tolerance.
Its text may leave PyTorch's at a near tie, with a token whose log-probability under PyTorch is at most twice the
tolerance below the best.
"""

import copy
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import (
    MODEL_FOR_TEXT_ENCODING_MAPPING,
    GenerationConfig,
    LongT5Config,
    LongT5EncoderModel,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from foundry.common.errors import UserError
from foundry.corpora.sentinels import source_ids
from foundry.publishing.file_names import COMPARISON, POOLING, check_modules, named_files

NEW_TOKENS = 32  # generated greedily for each text
LONGEST_SOURCE = 512  # tokens of a text that are compared


@dataclass
class Answers:
    """What an engine writes for each text. tokens: its greedy tokens [T], EOS included. log_probs, in nats, at each
    position of PyTorch's greedy tokens: of the whole vocabulary [T, V], or of PyTorch's tokens alone [T]."""

    tokens: list[list[int]]
    log_probs: list[np.ndarray]


@dataclass
class Original:
    """The model to export, and what its exports are compared with. sources: token ids of the texts. answers: PyTorch's
    own. num_beams: those of the task's evaluation, None for those in generation_config.json. folder: of the checkpoint,
    whose files say how a text is embedded (`copy_pooling`)."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sources: list[list[int]]
    answers: Answers | None = None
    num_beams: int | None = None
    folder: Path = Path()


class Format(NamedTuple):
    """An entry of FORMATS (features/__init__.py).

    write: writes the format of this name into a new folder and loads it again; returns (its comparison with PyTorch,
    one line about it). UserError if they differ. check: UserError that says what is missing, if the format of this name
    cannot hold a model of this configuration; it is called before a weight is read. files: patterns of all files that
    it writes into its folder: they are what an upload publishes.
    """

    write: Callable[[str, Original, Path], tuple[dict, str]]
    check: Callable[[PreTrainedConfig, str], None]
    files: tuple[str, ...]


# What config.json says that a folder holds, by the end of its class's name; a T5 has an encoder and a decoder.
PARTS = {"EncoderModel": "an encoder alone", "Encoder": "an encoder alone", "ForTokenClassification": "a head"}


def lone_part(config: PreTrainedConfig) -> str | None:
    """ "an encoder alone" or "a head" on an encoder; None: a whole model."""
    for ending, part in PARTS.items():
        if config.architectures and config.architectures[0].endswith(ending):
            return part
    return None


def refuse_part(config: PreTrainedConfig, kind: str, encoder: str | None = None, head: str | None = None) -> None:
    """UserError for what the format `kind` cannot hold. encoder, head: what to give in its place for an encoder alone,
    and for one with a head; None: it holds them."""
    part = lone_part(config)
    instead = {"an encoder alone": encoder, "a head": head, None: None}[part]
    if instead:
        raise UserError(f"--formats {kind}: has no place for {part}, which --model_name_or_path has: give {instead}")


def copy_pooling(original: Original, folder: Path) -> bool:
    """Copies the files by which sentence-transformers embeds texts, if the checkpoint has them; links are left out.
    Whether there are any."""
    if (original.folder / "modules.json").is_file():
        check_modules(original.folder)
    files = named_files(original.folder, POOLING)
    for name, file in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(file, folder / name)
    return bool(files)


def export_of(folder: Path) -> Path:
    """The Hugging Face folder of an export, if `folder` is one of its other formats; else `folder`."""
    is_inside = (folder / COMPARISON).is_file() and (folder.parent / "config.json").is_file()
    return folder.parent if is_inside else folder


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Source ids with EOS, cut at LONGEST_SOURCE."""
    return source_ids(tokenizer, texts, LONGEST_SOURCE)


def encoder_alone(model: PreTrainedModel) -> PreTrainedModel:
    """The encoder as the class that transformers has for it (T5EncoderModel), with the model's own tensors. That of a
    T5Gemma 2 is a model already, and so is a model without a decoder."""
    classes = {**MODEL_FOR_TEXT_ENCODING_MAPPING, LongT5Config: LongT5EncoderModel}  # which the mapping lacks
    if not model.can_generate():
        return model
    if type(model.config) not in classes:
        return model.get_encoder()
    config = copy.deepcopy(model.config)
    config.is_encoder_decoder = False
    with torch.device("meta"):
        encoder = classes[type(config)](config)
    if hasattr(encoder, "shared"):
        encoder.shared = model.shared
    encoder.encoder = model.get_encoder()
    return encoder


@torch.no_grad()
def encoder_outputs(model: PreTrainedModel, sources: list[list[int]]) -> list[np.ndarray]:
    """What an encoder computes for each text, that of an encoder-decoder too: states [S, D], or the logits [S, C] of a
    head."""
    if model.can_generate():
        model = model.get_encoder()
    outputs = []
    for ids in sources:
        output = model(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)))
        outputs.append(output[0][0].numpy())
    return outputs


def compare_outputs(kind: str, wanted: list[np.ndarray], found: list[np.ndarray], tolerance: float) -> dict:
    """{"texts", "largest_difference", "tolerance"} of a format's outputs (`found`) beside PyTorch's. tolerance: the
    largest difference of any number. UserError if they differ by more."""
    largest = max(float(np.abs(one - other).max()) for one, other in zip(wanted, found, strict=True))
    said = within(kind, largest, tolerance, f"the encoder's output is up to {largest:.3g} off")
    return dict(texts=len(wanted)) | said


def pytorch_tokens(model: PreTrainedModel, sources: list[list[int]], search: dict | None = None) -> list[list[int]]:
    """Tokens that the model generates for each text, EOS included: greedily, or with these settings of `generate`."""
    special = {name: getattr(model.config, name) for name in ("decoder_start_token_id", "pad_token_id", "eos_token_id")}
    plain = GenerationConfig(max_length=NEW_TOKENS + 1, **special, **(search or {}))
    own, model.generation_config = model.generation_config, plain  # its own may forbid repetitions
    tokens = []
    for source in sources:
        ids = torch.tensor([source], device=model.device)
        tokens.append(model.generate(input_ids=ids, attention_mask=torch.ones_like(ids))[0, 1:].tolist())
    model.generation_config = own
    return tokens


@torch.no_grad()
def pytorch_answers(model: PreTrainedModel, sources: list[list[int]], wanted: Answers | None = None) -> Answers:
    """The model's greedy tokens, and its log-probabilities [T, V] along them or, if `wanted` is given, along the tokens
    of `wanted`."""
    tokens, log_probs = pytorch_tokens(model, sources), []
    for source, written in zip(sources, wanted.tokens if wanted else tokens, strict=True):
        ids = torch.tensor([source], device=model.device)
        inputs = torch.tensor([[model.config.decoder_start_token_id, *written[:-1]]], device=model.device)
        logits = model(input_ids=ids, decoder_input_ids=inputs).logits[0].float()
        log_probs.append(logits.log_softmax(-1).cpu().numpy())
    return Answers(tokens, log_probs)


def compare(kind: str, wanted: Answers, found: Answers, tolerance: float) -> dict:
    """{"texts", "same_tokens", "near_ties", "largest_difference", "tolerance"}: an engine's answers (`found`) beside
    PyTorch's (`wanted`). tolerance: the largest difference of a token's log-probability, in nats. UserError if they
    differ by more."""
    same, ties, largest = 0, 0, 0.0
    for number, (tokens, others) in enumerate(zip(wanted.tokens, found.tokens, strict=True)):
        everything, theirs = wanted.log_probs[number], found.log_probs[number]
        along = (np.arange(len(tokens)), tokens)
        if theirs.ndim == 2:
            theirs = theirs[along]
        largest = float(np.abs(theirs - everything[along]).max(initial=largest))
        if others == tokens:
            same += 1
            continue
        others = [*others, *[-1] * len(tokens)]  # -1: has ended
        place = 0
        while place < len(tokens) - 1 and others[place] == tokens[place]:
            place += 1
        gap = np.inf
        if others[place] >= 0:
            gap = everything[place].max() - everything[place][others[place]]
        if not gap <= 2 * tolerance:
            raise UserError(
                f"{kind}: text {number + 1} is answered with other tokens than PyTorch's from token "
                f"{place + 1} on (PyTorch prefers its own by {gap:.3g} nats): not written"
            )
        ties += 1
    found = within(kind, largest, tolerance, f"log-probabilities are up to {largest:.3g} nats off PyTorch's")
    return dict(texts=len(wanted.tokens), same_tokens=same, near_ties=ties) | found


def within(kind: str, largest: float, tolerance: float, shown: str) -> dict[str, float]:
    """{"largest_difference", "tolerance"}; UserError if the difference is larger, or nan."""
    if not largest <= tolerance:
        raise UserError(f"{kind}: {shown}, {tolerance:g} are allowed: not written")
    return dict(largest_difference=largest, tolerance=tolerance)


def described_comparison(result: dict, more: str = "") -> str:
    """One line about an engine's comparison with PyTorch. more: what follows the number of equal texts."""
    line = f"{result['same_tokens']} of {result['texts']} texts with PyTorch's tokens"
    if result["near_ties"]:
        line += f", {result['near_ties']} with others after a near tie"
    return f"{line}{more}; log-probabilities {described_within(result)}"


def described_within(result: dict) -> str:
    """The result of `within` in words."""
    return f"within {result['largest_difference']:.2g} (allowed {result['tolerance']:g})"


def shown_search(search: dict) -> str:
    """Arguments as in a Python call: {"beam_size": 4, "patience": 2} -> "beam_size=4, patience=2"."""
    return ", ".join(f"{name}={value}" for name, value in search.items())
