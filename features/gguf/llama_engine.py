"""Llama.cpp by llama-cpp-python: a GGUF file is compared with PyTorch, and answers.

The high-level interface of llama-cpp-python calls no encoder, so this calls the functions of llama.h.
"""

import copy
import ctypes
import importlib.util
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import GenerationConfig

from constants import IGNORE_INDEX
from features.gguf.writing import FILE, refuse_gguf, write_gguf
from foundry.common.errors import UserError
from foundry.corpora.sentencepiece_models import probe_texts
from foundry.modeling.decoding import Answer, Source
from foundry.modeling.found_answers import Engine
from foundry.modeling.generation_settings import deciding_settings
from foundry.publishing.exports import (
    LONGEST_SOURCE,
    NEW_TOKENS,
    Answers,
    Format,
    Original,
    compare,
    compare_outputs,
    described_comparison,
    described_within,
    encoder_outputs,
)
from tasks.answering import Backend, Plan, followed_settings

# Largest difference of a token's log-probability from PyTorch's, in nats. llama.cpp looks up the activation in a table
# of 16 bits, and q8_0 rounds every matrix. For the encoder: of any number in its output.
TOLERANCES = {"gguf": 0.02, "gguf_q8_0": 0.25, "gguf_encoder": 0.02}


class LlamaEngine:
    """A GGUF file, loaded on the CPU, with token ids as inputs and outputs. longest: the most tokens of a text."""

    def __init__(self, file: Path, longest: int, is_encoder: bool = False):
        import llama_cpp

        self.lib = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)  # kept: llama.cpp calls it later too
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), options)
        if not self.model:
            raise UserError(f"{file}: llama.cpp cannot load it")
        wanted = llama_cpp.llama_context_default_params()
        wanted.n_ctx = wanted.n_batch = wanted.n_ubatch = longest
        wanted.type_k = wanted.type_v = 0  # float32
        wanted.flash_attn_type = 0  # has no bias
        wanted.embeddings = is_encoder
        wanted.pooling_type = 0  # the states of all tokens
        self.context = llama_cpp.llama_init_from_model(self.model, wanted)
        self.vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.size = llama_cpp.llama_vocab_n_tokens(self.vocabulary)

    def close(self) -> None:
        """Frees the memory."""
        self.lib.llama_free(self.context)
        self.lib.llama_model_free(self.model)

    def ids(self, text: str) -> list[int]:
        """The ids of a text by llama.cpp's own tokenizer, EOS included."""
        raw = text.encode()
        room = (ctypes.c_int32 * (len(raw) + 8))()
        count = self.lib.llama_tokenize(self.vocabulary, raw, len(raw), room, len(room), True, True)
        return list(room[:count])

    def encode(self, source: list[int]) -> np.ndarray | None:
        """Runs the encoder, whose output the decoder then sees. Returns the output [S, D] of an encoder alone."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        self._run(self.lib.llama_encode, source, 0)
        states = self.lib.llama_get_embeddings(self.context)
        if not states:
            return None
        shape = len(source), self.lib.llama_model_n_embd(self.model)
        return np.ctypeslib.as_array(states, shape=shape).copy()

    def decode(self, tokens: list[int], start: int) -> np.ndarray:
        """Logits [T, V] behind each of the tokens, the first of which is at the place `start`."""
        self._run(self.lib.llama_decode, tokens, start)
        return np.ctypeslib.as_array(self.lib.llama_get_logits(self.context), shape=(len(tokens), self.size)).copy()

    def _run(self, function, tokens: list[int], start: int) -> None:
        batch = self.lib.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, start + place
            batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, 0, 1
        failed = function(self.context, batch)
        self.lib.llama_batch_free(batch)
        if failed:
            raise UserError(f"llama.cpp: cannot read {len(tokens)} tokens (code {failed})")

    def greedy(self, source: list[int]) -> Iterator[int]:
        """The likeliest token each time, without an end."""
        self.encode(source)
        token = self.lib.llama_model_decoder_start_token(self.model)
        for place in itertools.count():
            token = int(self.decode([token], place)[0].argmax())
            yield token

    def log_probs(self, source: list[int], target: list[int]) -> np.ndarray:
        """Log-probabilities [T, V] in nats at each token of a target."""
        self.encode(source)
        start = self.lib.llama_model_decoder_start_token(self.model)
        logits = torch.from_numpy(self.decode([start, *target[:-1]], 0))
        return logits.double().log_softmax(-1).numpy()


def export_gguf(kind: str, original: Original, folder: Path) -> tuple[dict, str]:
    """Writes one of FORMATS into `folder`; returns (its comparison with PyTorch, one line about it). Without
    llama-cpp-python nothing is compared, and the line says so."""
    left = write_gguf(original, folder, kind)
    more = f"; {left} matrices stay in float32, whose rows are no multiple of 32" if left else ""
    size = dict(megabytes=round((folder / FILE).stat().st_size / 1e6, 1))
    if importlib.util.find_spec("llama_cpp") is None:
        return size, f"not compared: pip install -r requirements/llama_cpp.txt brings llama.cpp{more}"
    engine = LlamaEngine(folder / FILE, LONGEST_SOURCE + 8, kind == "gguf_encoder")
    try:
        result, line = (compare_states if kind == "gguf_encoder" else compare_answers)(kind, original, engine)
        same, texts = equal_ids(original, engine)
    finally:
        engine.close()
    result |= size | dict(same_ids=same, texts_of_ids=texts)
    return result, f"{line}; llama.cpp's tokenizer gives equal ids to {same} of {texts} texts{more}"


def compare_answers(kind: str, original: Original, engine: LlamaEngine) -> tuple[dict, str]:
    """(the comparison of greedy answers, in words)."""
    eos, sources = original.model.config.eos_token_id, original.sources
    written = [until(engine.greedy(source), {eos}, NEW_TOKENS) for source in sources]
    pairs = zip(sources, original.answers.tokens, strict=True)
    found = Answers(written, [engine.log_probs(source, tokens) for source, tokens in pairs])
    result = compare(kind, original.answers, found, TOLERANCES[kind])
    return result, described_comparison(result)


def compare_states(kind: str, original: Original, engine: LlamaEngine) -> tuple[dict, str]:
    """(the comparison of the encoder's output, in words)."""
    wanted = encoder_outputs(original.model, original.sources)
    found = list(map(engine.encode, original.sources))
    result = compare_outputs(kind, wanted, found, TOLERANCES[kind])
    return result, f"{described_within(result)} of PyTorch's"


def until(
    tokens: Iterator[int],
    ends: Collection[int],
    limit: int,
    watch: Callable[[int], bool] | None = None,
    answer: list[int] | None = None,
) -> list[int]:
    """The tokens of an answer: up to one of `ends` or to one at which `watch` says so, at most `limit`. answer: the
    list that they are written into."""
    answer = [] if answer is None else answer
    while len(answer) < limit:
        answer.append(next(tokens))
        stops = watch is not None and watch(answer[-1])  # told of every token, the last one too
        if stops or answer[-1] in ends:
            break
    return answer


def equal_ids(original: Original, engine: LlamaEngine) -> tuple[int, int]:
    """(texts with the ids of our tokenizer, all texts): those of `probe_texts` and the sources, read by llama.cpp's own
    tokenizer. UserError if it differs on a text whose letters the vocabulary has all: then it is another tokenizer."""
    tokenizer, same = original.tokenizer, 0
    texts = probe_texts(tokenizer.get_vocab().keys() - {*tokenizer.all_special_tokens})
    texts += [tokenizer.decode(source, skip_special_tokens=True) for source in original.sources]
    unknown = tokenizer.unk_token_id
    for text in texts:
        wanted, found = tokenizer(text).input_ids, engine.ids(text)
        same += found == wanted
        if found != wanted and unknown not in found:
            raise UserError(f"gguf: llama.cpp's tokenizer reads {text!r} as {found}, ours as {wanted}: not written")
    return same, len(texts)


def model_file(name: str) -> Path:
    """The file that llama.cpp loads: in the folder named, or the only whole model in an export. UserError without."""
    places = [Path(name), Path(name) / FILE, *sorted(Path(name).glob(f"*/{FILE}"))]
    found = [file for file in places if file.is_file() and file.parent.name != "gguf_encoder"]
    if len(found) != 1:
        raise UserError(
            f"--model_name_or_path {name}: --backend gguf needs a folder that export_checkpoint.py --formats gguf "
            f"wrote; found {', '.join(map(str, found)) or 'none'}" + (": name one of these" if found else "")
        )
    return found[0]


def check_greedy(config: GenerationConfig) -> None:
    """UserError for a search other than the likeliest token each time, which is all that this engine does."""
    settings = deciding_settings(config) | ({"do_sample": True} if config.do_sample else {})
    for name, value in settings.items():
        raise UserError(
            f"--backend gguf: answers greedily, and has nothing like {name} {value}: take --backend transformers, "
            "or leave out this flag, or this setting of generation_config.json"
        )


class GreedyAnswers(Engine):
    """The Engine of `--backend gguf`, which answers greedily, one source after the other."""

    settings: ClassVar[dict] = {}  # none decides anything: all that do were refused

    def __init__(self, plan: Plan, _: object):
        self.plan, self.config, eos = plan, followed_settings(plan), plan.tokenizer.eos_token_id
        check_greedy(self.config)
        labels = (len(plan.tokenizer(str(label)).input_ids) for label in plan.entry.labels)
        self.longest, self.ends = max(plan.entry.max_source_length, plan.limit, *labels), [eos]
        self.loaded = LlamaEngine(model_file(plan.args.model_name_or_path), self.longest + 1)

    def find(
        self,
        sources: Sequence[Source],
        told: Callable[[], object] | None = None,
        more: object = None,  # noqa: ARG002
        scored: bool = False,  # noqa: ARG002
        **settings: Any,
    ) -> None:
        """See `Engine`; it scores no answers."""
        wanted = copy.deepcopy(self.config)
        wanted.update(**settings)
        check_greedy(wanted)
        limit = min(wanted.max_new_tokens or self.plan.limit, self.longest)
        for source in sources:
            source.answers = [Answer()]
            until(self.loaded.greedy(source.ids), self.ends, limit, source.watch, source.answers[0].tokens)
            if told:
                told()

    def score(self, source: list[int], texts: torch.Tensor) -> torch.Tensor:
        """See `Engine`."""
        scores = torch.zeros(texts.shape)
        for row, text in enumerate(texts):
            ids = text[text.ne(IGNORE_INDEX)].tolist()
            scores[row, : len(ids)] = torch.from_numpy(self.loaded.log_probs(source, ids)[np.arange(len(ids)), ids])
        return scores


FORMAT = Format(export_gguf, refuse_gguf, (FILE,))
BACKEND = Backend(GreedyAnswers, lambda name: [model_file(name)])
