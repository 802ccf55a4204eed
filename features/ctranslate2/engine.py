"""Writes a model for CTranslate2 and compares it with PyTorch; loads what was written, and answers with it.

If the checkpoint is decoded with beams, CTranslate2's beam search is compared too, by counting equal texts.
"""

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from constants import IGNORE_INDEX
from features.ctranslate2 import FORMATS
from foundry.common.errors import UserError
from foundry.common.processes import print_once
from foundry.modeling.generation_settings import deciding_settings
from foundry.publishing.exports import NEW_TOKENS, Answers, Original, compare, described, pytorch_tokens, shown_search
from tasks.answering import Engine, Plan, Watch, followed_settings, padded_answers

TOKENS = "shared_vocabulary.json"  # the list of its tokens, by id
# Largest difference of a token's log-probability from PyTorch's, in nats. int8 rounds every weight and activation.
TOLERANCES = dict(zip(FORMATS, (1e-3, 0.25), strict=True))
# CTranslate2's beam search ends when it has beams x patience finished texts: with a patience of 1 that is transformers'
# rule under early_stopping=True. Under False, its default, transformers searches on while the best unfinished text
# scores better than the worst finished one. 8 came nearest to that in our counts, and never found a worse text.
PATIENCE = 8
# Settings of `generate` that CTranslate2 has too. In a beam search it applies the first group before it normalises
# probabilities, transformers afterwards.
BEFORE_SOFTMAX = ("repetition_penalty", "no_repeat_ngram_size", "suppress_tokens", "bad_words_ids")
LIKE_TRANSFORMERS = ("num_beams", "length_penalty", "early_stopping", "min_length", "min_new_tokens")


def beam_search(model: PreTrainedModel, num_beams: int | None) -> dict | None:
    """The arguments of `generate` for a checkpoint's beam search; None if it is decoded greedily. num_beams: None for
    the number in its generation_config.json."""
    own = model.generation_config
    beams = num_beams or own.num_beams or 1
    penalty = 1.0 if own.length_penalty is None else own.length_penalty
    search = dict(num_beams=beams, length_penalty=penalty, early_stopping=own.early_stopping or False)
    return search if beams > 1 else None


def write_ctranslate2(original: Original, folder: Path, quantization: str | None) -> None:
    """Writes the model for CTranslate2 in float32, or with `quantization` "int8"."""
    from ctranslate2.converters import TransformersConverter

    class Converter(TransformersConverter):
        """CTranslate2's converter, given a copy of the loaded model, since it rounds to int8 in place. If it loaded the
        model itself, it would scale v1.1's output like v1.0's, because transformers 5 sets `tie_word_embeddings` for
        both."""

        def load_model(self, *_, **__):
            return copy.deepcopy(original.model)

        def load_tokenizer(self, *_, **__):
            return original.tokenizer

    with torch.no_grad():
        Converter(original.model.name_or_path).convert(str(folder), quantization=quantization)
    # The converter names rows beyond the tokenizer's tokens <extra_id_0> ... a second time; a name must have one id.
    names = json.loads((folder / TOKENS).read_text(encoding="utf-8"))
    tokens = len(original.tokenizer)
    names[tokens:] = [f"<unused_{number}>" for number in range(len(names) - tokens)]
    (folder / TOKENS).write_text(json.dumps(names, indent=1, ensure_ascii=False), encoding="utf-8")


def ctranslate2_search(search: dict | None) -> dict:
    """The arguments of CTranslate2's translate_batch for the search that `beam_search` describes; None: greedy."""
    if search is None:
        return {"beam_size": 1}
    patience = 1 if search["early_stopping"] is True else PATIENCE
    return {"beam_size": search["num_beams"], "length_penalty": search["length_penalty"], "patience": patience}


def ctranslate2_options(config: GenerationConfig, eos: int, count: int) -> dict:
    """The arguments of CTranslate2's translate_batch for the `count` answers that `generate` would find. eos: the token
    with which CTranslate2 ends a text. UserError that names a setting which CTranslate2 lacks."""
    settings = deciding_settings(config)
    lacking = {name: value for name, value in settings.items() if name not in BEFORE_SOFTMAX + LIKE_TRANSFORMERS}
    if config.eos_token_id not in (None, eos, [eos]):
        lacking["eos_token_id"] = config.eos_token_id
    if lacking:
        name, value = next(iter(lacking.items()))
        raise UserError(
            f"--backend ctranslate2: has nothing like {name} {value} of generation_config.json. Take --backend "
            "transformers, or delete it from that file if other answers will do"
        )
    beams, penalty = config.num_beams or 1, settings.get("length_penalty", 1.0)
    search = dict(num_beams=beams, length_penalty=penalty, early_stopping=config.early_stopping) if beams > 1 else None
    if search and (early := [name for name in settings if name in BEFORE_SOFTMAX]):
        print_once(
            f"CTranslate2 applies {' and '.join(early)} before it normalises the probabilities of its beams, "
            "transformers afterwards: some answers differ"
        )
    forbidden = [[token] for token in config.suppress_tokens or ()]
    forbidden += [words for words in config.bad_words_ids or () if words != [eos]]  # transformers skips [EOS] too
    return ctranslate2_search(search) | dict(
        num_hypotheses=count,
        max_decoding_length=config.max_new_tokens,
        min_decoding_length=config.min_new_tokens or max(0, (config.min_length or 0) - 1),  # it counts the start token
        repetition_penalty=config.repetition_penalty or 1.0,
        no_repeat_ngram_size=config.no_repeat_ngram_size or 0,
        suppress_sequences=forbidden,
    )


class CTranslate2Engine:
    """The folder of write_ctranslate2, loaded on the CPU, with token ids as inputs and outputs."""

    def __init__(self, folder: Path):
        import ctranslate2

        self.names = json.loads((folder / TOKENS).read_text(encoding="utf-8"))
        self.ids = {name: number for number, name in enumerate(self.names)}
        self.translator = ctranslate2.Translator(str(folder), device="cpu", compute_type="default")

    def _named(self, texts: list[list[int]]) -> list[list[str]]:
        return [[self.names[number] for number in text] for text in texts]

    def tokens(self, sources: list[list[int]], search: dict) -> list[list[int]]:
        """Token ids of every hypothesis, the best of each source first, EOS included. search: arguments of
        translate_batch, with ids in place of tokens."""
        options = dict(max_decoding_length=NEW_TOKENS, min_decoding_length=0, max_input_length=0) | search
        options |= dict(return_end_token=True, suppress_sequences=self._named(search.get("suppress_sequences", [])))
        results = self.translator.translate_batch(self._named(sources), **options)
        return [[self.ids[name] for name in names] for result in results for names in result.hypotheses]

    def log_probs(self, sources: list[list[int]], targets: list[list[int]], eos: int) -> list[list[float]]:
        """Log-probabilities [T] of the tokens of each target."""
        bodies = [target[:-1] if target[-1:] == [eos] else target for target in targets]  # score_batch adds the EOS
        scores = self.translator.score_batch(self._named(sources), self._named(bodies), max_input_length=0)
        return [scored.log_probs[: len(target)] for scored, target in zip(scores, targets, strict=True)]


def export(kind: str, original: Original, folder: Path) -> tuple[dict, str]:
    """Writes one of FORMATS into `folder` and loads it again; returns (its comparison with PyTorch, one line about it).

    If the checkpoint has a beam search, the comparison also holds "search", CTranslate2's arguments for that search,
    and "same_beams", the number of texts for which it finds the same answer as transformers.
    """
    model, sources, more = original.model, original.sources, ""
    write_ctranslate2(original, folder, "int8" if kind.endswith("int8") else None)
    engine = CTranslate2Engine(folder)
    log_probs = engine.log_probs(sources, original.answers.tokens, model.config.eos_token_id)
    found = Answers(engine.tokens(sources, ctranslate2_search(None)), list(map(np.array, log_probs)))
    result = compare(kind, original.answers, found, TOLERANCES[kind])
    if wanted := beam_search(model, original.num_beams):
        search = ctranslate2_search(wanted)
        pairs = zip(pytorch_tokens(model, sources, wanted), engine.tokens(sources, search), strict=True)
        result |= {"search": search, "same_beams": sum(one == other for one, other in pairs)}
        more = f", {result['same_beams']} with {shown_search(search)}"
    return result, described(result, more)


def engine_folder(name: str) -> Path:
    """The folder that CTranslate2 loads: the one named, or the only one in an export. UserError if there is none."""
    places = (TOKENS, f"*/{TOKENS}")
    found = sorted(file.parent for place in places for file in Path(name).glob(place))
    if len(found) != 1:
        raise UserError(
            f"--model_name_or_path {name}: --backend ctranslate2 needs a folder that export_checkpoint.py "
            f"--formats ctranslate2 wrote; found {', '.join(map(str, found)) or 'none'}"
        )
    return found[0]


def options_of(config: GenerationConfig, changes: dict, plan: Plan) -> dict:
    """`ctranslate2_options` of the settings, with `changes` in the place of some."""
    changed = copy.deepcopy(config)
    changed.update(**changes)
    count = changes.get("num_return_sequences", plan.count)
    return ctranslate2_options(changed, plan.tokenizer.eos_token_id, count)


def with_ctranslate2(plan: Plan, _: object) -> Engine:
    """The Engine of `--backend ctranslate2`, which searches as transformers does."""
    config = followed_settings(plan)
    options_of(config, {}, plan)  # a setting that CTranslate2 lacks is refused before the first answer
    engine, eos = CTranslate2Engine(engine_folder(plan.args.model_name_or_path)), plan.tokenizer.eos_token_id

    def write(
        sources: list[list[int]], watch: Watch | None = None, **changes: Any
    ) -> tuple[np.ndarray, list[float] | None]:
        options, scores = options_of(config, changes, plan), None
        if watch:
            options["callback"] = lambda step: watch(step.batch_id, step.token_id)
        ids, count = engine.tokens(sources, options), options["num_hypotheses"]
        if count > 1:
            repeated = [source for source in sources for _ in range(count)]
            scores = list(map(sum, engine.log_probs(repeated, ids, eos)))
        return padded_answers(ids), scores

    def score(source: list[int], texts: torch.Tensor) -> torch.Tensor:
        found = engine.log_probs([source] * len(texts), [text[text.ne(IGNORE_INDEX)].tolist() for text in texts], eos)
        return torch.tensor(list(itertools.zip_longest(*found, fillvalue=0.0)), dtype=torch.float64).T

    return Engine(write, score, deciding_settings(config), [eos])
