"""Writes a model for CTranslate2 and compares it with PyTorch; loads what was written, and answers with it.

If the checkpoint is decoded with beams, CTranslate2's beam search is compared too, by counting equal texts.
"""

import copy
import itertools
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from constants import IGNORE_INDEX
from data_collator_t5 import vocabulary_size
from foundry.common.errors import UserError
from foundry.common.machine import adds_int8_exactly, run_in_short_lived_thread
from foundry.common.reports import is_of, read_json
from foundry.common.terminal import print_once
from foundry.corpora.reading import as_list
from foundry.modeling.decoding import Answer, Source
from foundry.modeling.families import family_of, shape_of
from foundry.modeling.found_answers import Engine
from foundry.modeling.generation_settings import deciding_settings
from foundry.modeling.loading import load_config
from foundry.publishing.exports import (
    NEW_TOKENS,
    Answers,
    Format,
    Original,
    compare,
    described_comparison,
    pytorch_answers,
    pytorch_tokens,
    refuse_part,
    shown_search,
)
from foundry.publishing.file_names import COMPARISON
from tasks.answering import Backend, Plan, followed_settings

# The families that CTranslate2 has.
FAMILIES = ("t5", "mt5", "umt5", "t5gemma", "t5gemma2")
TOKENS = "shared_vocabulary.json"  # the list of its tokens, by id
# Largest difference of a token's log-probability from PyTorch's, in nats. int8 rounds every weight and activation.
TOLERANCES = {"ctranslate2": 1e-3, "ctranslate2_int8": 0.25}
# CTranslate2's beam search ends when it has beams x patience finished texts: with a patience of 1 that is transformers'
# rule under early_stopping=True. Under False, its default, transformers searches on while the best unfinished text
# scores better than the worst finished one. 8 came nearest to that in our counts, and never found a worse text.
PATIENCE = 8
NO_CAP = "CTranslate2 leaves out the model's cap on attention scores"
# Settings of `generate` that CTranslate2 has too. In a beam search it applies the first group before it normalises
# probabilities, transformers afterwards.
BEFORE_SOFTMAX = ("repetition_penalty", "no_repeat_ngram_size", "suppress_tokens", "bad_words_ids")
LIKE_TRANSFORMERS = ("num_beams", "length_penalty", "early_stopping", "min_length", "min_new_tokens")


def refuse_ctranslate2(config: PreTrainedConfig, kind: str) -> None:
    """UserError for a family that CTranslate2 lacks, and for an encoder without decoder."""
    refuse_part(config, kind, encoder="ctranslate2_encoder", head="huggingface or onnx_encoder")
    if config.model_type not in FAMILIES:
        raise UserError(
            f"--formats {kind}: not for {config.model_type} models, which CTranslate2 lacks. It has "
            + ", ".join(FAMILIES)
        )


def limits_of_engine(config: PreTrainedConfig) -> dict[str, int | bool]:
    """What CTranslate2 lacks for a model, as the names and values that comparison.json holds: {} for a T5.

    "longest_source", "longest_answer": most tokens that all see each other, since it gives its attention no windows.
    "one_at_a_time": its attention over source and answer together reads the padding of a shorter source, and, where an
    answer is given whole, the answer's later tokens. "leaves_out_cap": it has no cap on attention scores.
    """
    shape, limits = shape_of(config), {}
    family = family_of(config)
    for name, window in zip(("longest_source", "longest_answer"), family.windows(config), strict=True):
        if window is not None:
            limits[name] = (min(window) if name == "longest_source" else window[0]) + 1
    if shape.merged:
        limits["one_at_a_time"] = True
    elif any(getattr(half, "attn_logit_softcapping", None) for half in family.configs(config)):
        limits["leaves_out_cap"] = True
    return limits


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
        """CTranslate2's converter, given a copy of the loaded model, since it rounds to int8 in place. It scales the
        decoder's output where `tie_word_embeddings` is set, which transformers 5 does for every T5, mT5 and umT5 that
        it makes: the copy's says whether the family scales."""

        def load_model(self, *_, **__):
            model = copy.deepcopy(original.model)
            model.config.tie_word_embeddings = family_of(model.config).head_scale(model.config) != 1.0
            return model

        def load_tokenizer(self, *_, **__):
            return original.tokenizer

    with torch.no_grad():
        import features.ctranslate2.gemma_converter  # noqa: F401 (registers its converters)

        Converter(original.model.name_or_path).convert(str(folder), quantization=quantization)
    # The converter knows no ids without tokens, and names rows beyond the tokenizer's <extra_id_0> ... a second time.
    rows = len(json.loads((folder / TOKENS).read_text(encoding="utf-8")))
    names = names_of_rows(original.tokenizer, rows)
    (folder / TOKENS).write_text(json.dumps(names, indent=1, ensure_ascii=False), encoding="utf-8")


def names_of_rows(tokenizer: PreTrainedTokenizerBase, rows: int) -> list[str]:
    """The token of each row of an embedding, each once; an id without a token has a name that is no text's."""
    tokens = {number: token for token, number in tokenizer.get_vocab().items()}
    return [tokens.get(number, f"<unused_{number}>") for number in range(rows)]


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
    ends = as_list(config.eos_token_id or eos)
    # transformers skips [EOS] too
    forbidden += [words for words in config.bad_words_ids or () if words not in [[end] for end in ends]]
    return ctranslate2_search(search) | dict(
        num_hypotheses=count,
        end_token=ends,
        max_decoding_length=config.max_new_tokens,
        min_decoding_length=config.min_new_tokens or max(0, (config.min_length or 0) - 1),  # it counts the start token
        repetition_penalty=config.repetition_penalty or 1.0,
        no_repeat_ngram_size=config.no_repeat_ngram_size or 0,
        suppress_sequences=forbidden,
    )


class CTranslate2Engine:
    """The folder of write_ctranslate2, loaded on the CPU, with token ids as inputs and outputs. one_at_a_time: see
    `limits_of`."""

    def __init__(self, folder: Path, one_at_a_time: bool = False):
        import ctranslate2

        self.names = json.loads((folder / TOKENS).read_text(encoding="utf-8"))
        self.ids = {name: number for number, name in enumerate(self.names)}
        # Loading computes, and threads of a loader that lives slow down all answers: int8's to a third.
        load = partial(ctranslate2.Translator, str(folder), device="cpu")
        self.translator = run_in_short_lived_thread(load)
        if "int8" in self.translator.compute_type and not adds_int8_exactly():
            print_once("CTranslate2's sums of int8 overflow on a CPU without VNNI, as this one: in float32 instead")
            self.translator = run_in_short_lived_thread(partial(load, compute_type="float32"))
        self.one_at_a_time = one_at_a_time

    def _named(self, texts: list[list[int]]) -> list[list[str]]:
        return [[self.names[number] for number in text] for text in texts]

    def tokens(
        self, sources: list[list[int]], search: dict, watch: Callable[[int, int], bool] | None = None
    ) -> list[list[int]]:
        """Token ids of every hypothesis, the best of each source first, EOS included. search: arguments of
        translate_batch, with ids in place of tokens. watch: told each token of a search without beams, (number of the
        source, token) -> whether the answer ends with it."""
        options = dict(max_decoding_length=NEW_TOKENS, min_decoding_length=0, max_input_length=0) | search
        options |= dict(return_end_token=True, suppress_sequences=self._named(search.get("suppress_sequences", [])))
        size, found = 1 if self.one_at_a_time else max(1, len(sources)), []
        for first in range(0, len(sources), size):
            if watch:
                options["callback"] = lambda step, first=first: watch(first + step.batch_id, step.token_id)
            results = self.translator.translate_batch(self._named(sources[first : first + size]), **options)
            found += [[self.ids[name] for name in names] for result in results for names in result.hypotheses]
        return found

    def log_probs(self, sources: list[list[int]], targets: list[list[int]], eos: int) -> list[list[float]]:
        """Log-probabilities [T] of the tokens of each target."""
        if self.one_at_a_time:
            return [self._stepwise(source, target) for source, target in zip(sources, targets, strict=True)]
        bodies = [target[:-1] if target[-1:] == [eos] else target for target in targets]  # score_batch adds the EOS
        scores = self.translator.score_batch(self._named(sources), self._named(bodies), max_input_length=0)
        return [scored.log_probs[: len(target)] for scored, target in zip(scores, targets, strict=True)]

    def _stepwise(self, source: list[int], target: list[int]) -> list[float]:
        """The same, as those of an answer that must begin with the target: a step sees nothing that comes later."""
        if not target:
            return []
        options: dict[str, Any] = dict(
            beam_size=1, max_decoding_length=len(target), min_decoding_length=0, max_input_length=0
        )
        options |= dict(target_prefix=self._named([target]), return_logits_vocab=True)
        (result,) = self.translator.translate_batch(self._named([source]), **options)
        log_probs = torch.from_numpy(np.stack([np.array(step) for step in result.logits[0]])).log_softmax(-1)
        return log_probs[range(len(target)), target].tolist()


def export_ctranslate2(kind: str, original: Original, folder: Path) -> tuple[dict, str]:
    """Writes one of FORMATS into `folder` and loads it again; returns (its comparison with PyTorch, one line about it).

    If the checkpoint has a beam search, the comparison also holds "search", CTranslate2's arguments for that search,
    and "same_beams", the number of texts for which it finds the same answer as transformers.
    """
    model, more, limits = original.model, "", limits_of_engine(original.model.config)
    sources = [source[: limits.get("longest_source")] for source in original.sources]
    answers = original.answers if sources == original.sources else pytorch_answers(model, sources)
    most = min(NEW_TOKENS, limits.get("longest_answer", NEW_TOKENS))
    answers = Answers(*([values[:most] for values in of_texts] for of_texts in (answers.tokens, answers.log_probs)))
    write_ctranslate2(original, folder, "int8" if kind.endswith("int8") else None)
    engine = CTranslate2Engine(folder, "one_at_a_time" in limits)
    log_probs = engine.log_probs(sources, answers.tokens, model.config.eos_token_id)
    greedy = engine.tokens(sources, ctranslate2_search(None) | {"max_decoding_length": most})
    found = Answers(greedy, list(map(np.array, log_probs)))
    leaves_out_cap = "leaves_out_cap" in limits
    try:
        tolerance = max(TOLERANCES.values()) if leaves_out_cap else TOLERANCES[kind]
        result = compare(kind, answers, found, tolerance) | limits
    except UserError as error:
        raise UserError(f"{error}{', since ' * leaves_out_cap}{NO_CAP * leaves_out_cap}") from None
    if wanted := beam_search(model, original.num_beams):
        search = ctranslate2_search(wanted)
        pairs = zip(pytorch_tokens(model, sources, wanted), engine.tokens(sources, search), strict=True)
        result |= {"search": search, "same_beams": sum(one == other for one, other in pairs)}
        more = f", {result['same_beams']} with {shown_search(search)}"
    line = described_comparison(result, more)
    if leaves_out_cap:
        line += f"; {NO_CAP}"
    if "longest_source" in limits:
        line += f"; for sources of at most {limits['longest_source']:,} tokens"
    return result, line


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


def files_of_engine(name: str) -> list[Path]:
    """What is loaded. UserError for what is no file: a pipe would be waited for."""
    folder = engine_folder(name)
    files = [folder / file for file in FORMAT.files]
    if (folder / COMPARISON).exists():
        files.append(folder / COMPARISON)
    for file in files:
        if not file.is_file():
            why = "is no file" if file.exists() else "is missing"
            raise UserError(
                f"--model_name_or_path {folder}: its {file.name} {why}. Write it again with export_checkpoint.py "
                "--formats ctranslate2"
            )
    return files


def load_engine(folder: Path, one_at_a_time: bool, tokens: int) -> CTranslate2Engine:
    """The engine of a folder. tokens: ids of the tokenizer. UserError if the folder is damaged."""
    try:
        engine = CTranslate2Engine(folder, one_at_a_time)
        names = engine.names
        if not isinstance(names, list) or len(names) < tokens or len(engine.ids) < len(names):
            raise ValueError(f"{TOKENS} does not list the {tokens:,} ids of the tokenizer, each once")
    except (OSError, ValueError, TypeError, RuntimeError, MemoryError) as error:
        why = " ".join(str(error).split())
        raise UserError(
            f"--model_name_or_path {folder}: is damaged: {why}. Write it again with export_checkpoint.py --formats "
            "ctranslate2"
        ) from None
    return engine


def options_of(config: GenerationConfig, changes: dict, plan: Plan) -> dict:
    """`ctranslate2_options` of the settings, with `changes` in the place of some."""
    changed = copy.deepcopy(config)
    changed.update(**changes)
    count = changes.get("num_return_sequences", plan.count)
    return ctranslate2_options(changed, plan.tokenizer.eos_token_id, count)


def check_lengths(plan: Plan, limits: dict) -> None:
    """UserError for texts that may be longer than the windows of attention, which CTranslate2 does not have."""
    for name, flag, length in (
        ("longest_source", "--max_source_length", plan.entry.max_source_length),
        ("longest_answer", "--max_new_tokens", plan.limit),
    ):
        if length > limits.get(name, length):
            raise UserError(
                f"{flag} {length}: CTranslate2 has no windows of attention, so this model takes at most {limits[name]} "
                f"tokens: give {flag} {limits[name]}, or --backend transformers"
            )


class CTranslate2Answers(Engine):
    """The Engine of `--backend ctranslate2`, which searches as transformers does."""

    def __init__(self, plan: Plan, _: object):
        self.plan, self.config = plan, followed_settings(plan)
        options_of(self.config, {}, plan)  # a setting that CTranslate2 lacks is refused before the first answer
        files_of_engine(plan.args.model_name_or_path)
        folder, self.eos = engine_folder(plan.args.model_name_or_path), plan.tokenizer.eos_token_id
        limits = read_json(folder / COMPARISON)
        for name in ("longest_source", "longest_answer"):
            if not is_of(limits.get(name, 1), int) or limits.get(name, 1) < 1:
                raise UserError(f"{folder / COMPARISON}: {name} {limits[name]!r:.40} must be a number of tokens")
        limits = limits or limits_of_engine(load_config(str(plan.folder), "--model_name_or_path"))
        check_lengths(plan, limits)
        self.loaded = load_engine(folder, "one_at_a_time" in limits, vocabulary_size(plan.tokenizer))
        self.settings, self.ends = deciding_settings(self.config), as_list(self.config.eos_token_id or self.eos)

    def find(
        self,
        sources: Sequence[Source],
        told: Callable[[], object] | None = None,
        more: object = None,  # noqa: ARG002
        scored: bool = False,
        **settings: Any,
    ) -> None:
        """See `Engine`."""
        options, ids = options_of(self.config, settings, self.plan), [source.ids for source in sources]
        count, watch = options["num_hypotheses"], None
        if any(source.watch for source in sources):
            watch = partial(_write, sources)
            for source in sources:
                source.answers = [Answer()]
        found = self.loaded.tokens(ids, options, watch)
        nats = [0.0] * len(found)
        if scored:
            nats = list(map(sum, self.loaded.log_probs([one for one in ids for _ in range(count)], found, self.eos)))
        for number, source in enumerate(sources):
            if watch is None:
                own = slice(number * count, (number + 1) * count)
                source.answers = list(map(Answer, found[own], nats[own]))
            if told:
                told()

    def score(self, source: list[int], texts: torch.Tensor) -> torch.Tensor:
        """See `Engine`."""
        given = [text[text.ne(IGNORE_INDEX)].tolist() for text in texts]
        found = self.loaded.log_probs([source] * len(texts), given, self.eos)
        return torch.tensor(list(itertools.zip_longest(*found, fillvalue=0.0)), dtype=torch.float64).T


def _write(sources: Sequence[Source], number: int, token: int) -> bool:
    """Adds a token to the answer to a source; returns whether the answer ends with it."""
    source = sources[number]
    if source.watch is None:  # who watched it has its answer
        return True
    source.answers[0].tokens.append(token)
    return source.watch(token)


FORMAT = Format(export_ctranslate2, refuse_ctranslate2, ("model.bin", "config.json", TOKENS))
BACKEND = Backend(CTranslate2Answers, files_of_engine)
