"""Exports a model for other engines, or its encoder alone, and compares each export with PyTorch on real texts.

`compare`: an engine must write PyTorch's greedy tokens, and give them the same log-probabilities within TOLERANCES. Its
text may leave PyTorch's at a near tie, with a token whose log-probability under PyTorch is at most twice the tolerance
below the best. If the checkpoint is decoded with beams, CTranslate2's beam search is compared too, by counting equal
texts.
"""

import copy
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import MODEL_FOR_TEXT_ENCODING_MAPPING, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from common.errors import UserError
from common.processes import print_once
from common.reports import write_json
from corpora.tokenizers import save_tokenizer
from modeling.generation_settings import deciding_settings

# Largest difference of a token's log-probability from PyTorch's, in nats. int8 rounds every weight and activation.
TOLERANCES = {"huggingface": 0.0, "ctranslate2": 1e-3, "ctranslate2_int8": 0.25}
# For the encoder alone: largest difference of any number in its output, or in a text's embedding. transformers' own
# class computes the activation in eight operations, which round differently from our single one.
TOLERANCES |= {"encoder": 1e-5, "sentence_transformers": 1e-5}
NEW_TOKENS = 32  # generated greedily for each text
LONGEST_SOURCE = 512  # tokens of a text that are compared
# CTranslate2's beam search ends when it has beams x patience finished texts: with a patience of 1 that is transformers'
# rule under early_stopping=True. Under False, its default, transformers searches on while the best unfinished text
# scores better than the worst finished one. 8 came nearest to that in our counts, and never found a worse text.
PATIENCE = 8
CTRANSLATE2_TOKENS = "shared_vocabulary.json"  # the list of its tokens, by id
# Settings of `generate` that CTranslate2 has too. In a beam search it applies the first group before it normalises
# probabilities, transformers afterwards.
BEFORE_SOFTMAX = ("repetition_penalty", "no_repeat_ngram_size", "suppress_tokens", "bad_words_ids")
LIKE_TRANSFORMERS = ("num_beams", "length_penalty", "early_stopping", "min_length", "min_new_tokens")
NEEDS = {"ctranslate2": ("ctranslate2",), "ctranslate2_int8": ("ctranslate2",)}  # {format: packages that it needs}


# ---------------------------------------------------------------- what is compared
@dataclass
class Answers:
    """What an engine writes for each text. tokens: its greedy tokens [T], EOS included. log_probs, in nats, at each
    position of PyTorch's greedy tokens: of the whole vocabulary [T, V], or of PyTorch's tokens alone [T]."""

    tokens: list[list[int]]
    log_probs: list[np.ndarray]


@dataclass
class Original:
    """The model to export, and what its exports are compared with. sources: token ids of the texts. answers: PyTorch's
    own. search: the result of `beam_search`."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sources: list[list[int]]
    answers: Answers | None = None
    search: dict | None = None


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Source ids with EOS, cut at LONGEST_SOURCE."""
    return tokenizer(texts, truncation=True, max_length=LONGEST_SOURCE)["input_ids"]


def beam_search(model: PreTrainedModel, num_beams: int | None) -> dict | None:
    """The arguments of `generate` for a checkpoint's beam search; None if it is decoded greedily. num_beams: None for
    the number in its generation_config.json."""
    own = model.generation_config
    beams = num_beams or own.num_beams or 1
    penalty = 1.0 if own.length_penalty is None else own.length_penalty
    search = dict(num_beams=beams, length_penalty=penalty, early_stopping=own.early_stopping or False)
    return search if beams > 1 else None


def pytorch_tokens(model: PreTrainedModel, sources: list[list[int]], search: dict | None = None) -> list[list[int]]:
    """Tokens that the model generates for each text, EOS included: greedily, or with `beam_search`'s arguments."""
    special = {name: getattr(model.config, name) for name in ("decoder_start_token_id", "pad_token_id", "eos_token_id")}
    plain = GenerationConfig(max_length=NEW_TOKENS + 1, **special, **(search or {}))
    own, model.generation_config = model.generation_config, plain  # its own may forbid repetitions
    batches = [torch.tensor([source], device=model.device) for source in sources]
    tokens = [model.generate(input_ids=ids, attention_mask=torch.ones_like(ids))[0, 1:].tolist() for ids in batches]
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


def compare(kind: str, wanted: Answers, found: Answers) -> dict:
    """{"texts", "same_tokens", "near_ties", "largest_difference", "tolerance"}: an engine's answers (`found`) beside
    PyTorch's (`wanted`). UserError if they differ by more than the tolerance of `kind`."""
    tolerance, same, ties, largest = TOLERANCES[kind], 0, 0, 0.0
    for number, (tokens, others) in enumerate(zip(wanted.tokens, found.tokens, strict=True)):
        everything, theirs = wanted.log_probs[number], found.log_probs[number]
        along = (np.arange(len(tokens)), tokens)
        theirs = theirs[along] if theirs.ndim == 2 else theirs
        largest = float(np.abs(theirs - everything[along]).max(initial=largest))
        if others == tokens:
            same += 1
            continue
        others = [*others, *[-1] * len(tokens)]  # -1: has ended
        place = next((place for place, token in enumerate(tokens) if others[place] != token), len(tokens) - 1)
        gap = everything[place].max() - everything[place][others[place]] if others[place] >= 0 else np.inf
        if not gap <= 2 * tolerance:
            raise UserError(
                f"{kind}: text {number + 1} is answered with other tokens than PyTorch's from token "
                f"{place + 1} on (PyTorch prefers its own by {gap:.3g} nats): not written"
            )
        ties += 1
    found = _within(kind, largest, f"log-probabilities are up to {largest:.3g} nats off PyTorch's")
    return dict(texts=len(wanted.tokens), same_tokens=same, near_ties=ties) | found


def _within(kind: str, largest: float, shown: str) -> dict[str, float]:
    """{"largest_difference", "tolerance"}; UserError if the difference is larger, or nan."""
    if not largest <= TOLERANCES[kind]:
        raise UserError(f"{kind}: {shown}, {TOLERANCES[kind]:g} are allowed: not written")
    return dict(largest_difference=largest, tolerance=TOLERANCES[kind])


# ---------------------------------------------------------------- CTranslate2
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
    names = json.loads((folder / CTRANSLATE2_TOKENS).read_text(encoding="utf-8"))
    tokens = len(original.tokenizer)
    names[tokens:] = [f"<unused_{number}>" for number in range(len(names) - tokens)]
    (folder / CTRANSLATE2_TOKENS).write_text(json.dumps(names, indent=1, ensure_ascii=False), encoding="utf-8")


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

        self.names = json.loads((folder / CTRANSLATE2_TOKENS).read_text(encoding="utf-8"))
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
        scores = self.translator.score_batch(self._named(sources), self._named(bodies))
        return [scored.log_probs[: len(target)] for scored, target in zip(scores, targets, strict=True)]


# ---------------------------------------------------------------- the encoder alone
def write_encoder(original: Original, folder: Path, pooled: bool) -> None:
    """Writes the encoder, as the class that transformers has for it (T5EncoderModel), and the tokenizer. pooled: also
    the files of sentence-transformers, which older versions of it read too; a text's embedding is the mean of its
    token states."""
    model = original.model
    with torch.device("meta"):
        encoder = MODEL_FOR_TEXT_ENCODING_MAPPING[type(model.config)](copy.deepcopy(model.config))
    encoder.shared, encoder.encoder = model.shared, model.encoder
    encoder.save_pretrained(folder)
    save_tokenizer(original.tokenizer, folder)
    if not pooled:
        return
    pooling = {"word_embedding_dimension": model.config.d_model, "pooling_mode_cls_token": False}
    pooling |= {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate({"": "Transformer", "1_Pooling": "Pooling"}.items())
    ]
    (folder / "1_Pooling").mkdir()
    write_json(folder / "1_Pooling" / "config.json", pooling)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": LONGEST_SOURCE, "do_lower_case": False})
    write_json(folder / "modules.json", modules)


@torch.no_grad()
def compare_encoder(kind: str, original: Original, folder: Path) -> dict:
    """{"texts", "largest_difference", "tolerance", "loaded_by"}: the encoder in a folder beside the model's own. If
    sentence-transformers is installed, it loads the folder written for it. UserError for a difference beyond the
    tolerance."""
    model, sources, loaded_by = original.model, original.sources, ["transformers"]
    encoder = MODEL_FOR_TEXT_ENCODING_MAPPING[type(model.config)].from_pretrained(folder).eval()
    batches = [{"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))} for ids in sources]
    wanted = [model.encoder(**batch).last_hidden_state for batch in batches]
    pairs = [(hidden, encoder(**batch).last_hidden_state) for hidden, batch in zip(wanted, batches, strict=True)]
    if kind == "sentence_transformers" and importlib.util.find_spec(kind):
        from sentence_transformers import SentenceTransformer

        embedder = SentenceTransformer(str(folder), device="cpu")
        embeddings = [embedder(batch)["sentence_embedding"] for batch in batches]
        pairs += [(hidden.mean(1), embedding) for hidden, embedding in zip(wanted, embeddings, strict=True)]
        loaded_by.append("sentence-transformers")
    largest = max(float((one - other).abs().max()) for one, other in pairs)
    found = _within(kind, largest, f"the encoder's output is up to {largest:.3g} off")
    return dict(texts=len(sources)) | found | dict(loaded_by=loaded_by)


# ---------------------------------------------------------------- all of them
def write_format(kind: str, original: Original, folder: Path) -> dict:
    """Writes a format into `folder` and loads it again; returns its comparison with PyTorch, by `compare` or, for the
    encoder alone, `compare_encoder`.

    If the checkpoint has a beam search, CTranslate2's comparison also holds "search", its arguments for that search,
    and "same_beams", the number of texts for which it finds the same answer as transformers.
    """
    model, sources = original.model, original.sources
    if kind in ("encoder", "sentence_transformers"):
        write_encoder(original, folder, pooled=kind == "sentence_transformers")
        result = compare_encoder(kind, original, folder)
    else:
        write_ctranslate2(original, folder, "int8" if kind.endswith("int8") else None)
        engine = CTranslate2Engine(folder)
        log_probs = engine.log_probs(sources, original.answers.tokens, model.config.eos_token_id)
        found = Answers(engine.tokens(sources, ctranslate2_search(None)), list(map(np.array, log_probs)))
        result = compare(kind, original.answers, found)
        if original.search:
            search = ctranslate2_search(original.search)
            pairs = zip(pytorch_tokens(model, sources, original.search), engine.tokens(sources, search), strict=True)
            result |= {"search": search, "same_beams": sum(one == other for one, other in pairs)}
    write_json(folder / "comparison.json", result)
    return result
