"""Writes a T5 as two ONNX graphs, encoder and decoder, and compares ONNX Runtime's answers with PyTorch's.

    states = encoder.run(["last_hidden_state"], {"input_ids": ids, "attention_mask": mask})
    logits, *cache = decoder.run(None, {"input_ids": answer, "encoder_attention_mask": mask,
                                        "encoder_hidden_states": states[0], "past_key_values.0.decoder.key": ..., ...})

Files, inputs and outputs have the names by which Transformers.js and Optimum find them. One graph of the decoder begins
and continues an answer: with an empty cache it computes the keys and values of the source, with a filled one it takes
those of the cache.

Legend of shapes: B batch, S tokens of the source, T tokens of the answer that are given, P tokens of it in the cache,
H heads, K size of a head's keys, D width, V vocabulary.
"""

import copy
from pathlib import Path

import numpy as np
import torch
from onnxscript import opset20 as op
from transformers import (
    GenerationConfig,
    MT5Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    T5Config,
    UMT5Config,
)
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from features.onnx.encoder_graph import exported, padded, write_graph
from foundry.common.errors import UserError
from foundry.common.reports import read_json, write_json
from foundry.corpora.tokenizers import save_tokenizer
from foundry.modeling.generation_settings import drop_idle_search
from foundry.publishing.exports import (
    NEW_TOKENS,
    Answers,
    Format,
    Original,
    compare,
    described_comparison,
    encoder_alone,
    refuse_part,
)
from foundry.publishing.file_names import CONFIGURATIONS, TOKENIZER

# {setting of `generate` that Transformers.js 4.3 does not follow: the value with which it changes nothing}
NOT_IN_TRANSFORMERS_JS = {
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "sequence_bias": {},
    "exponential_decay_length_penalty": (),
    "encoder_repetition_penalty": 1.0,
}
ENCODER = "onnx/encoder_model.onnx"
DECODER = "onnx/decoder_model_merged.onnx"
FAMILIES = (T5Config, MT5Config, UMT5Config)
TOLERANCE = 1e-3  # nats


def refuse_onnx(config: PreTrainedConfig, kind: str) -> None:
    """UserError for a model without a decoder, and for families whose cache has another form."""
    refuse_part(config, kind, encoder="onnx_encoder", head="huggingface or onnx_encoder")
    if type(config) not in FAMILIES:
        raise UserError(
            f"--formats {kind}: for T5, mT5 and umT5, not for {config.model_type} models. Give huggingface, or "
            "another format"
        )


# ---------------------------------------------------------------- the keys and values of the source
@torch.library.custom_op("t5_foundry::source_keys", mutates_args=())
def source_keys(past: torch.Tensor, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Keys (or values) [B, H, S, K] of the source's states [B, S, D]: those of the cache, `past`, and behind them those
    of the states that it lacks. weight: [H * K, D]. An operator of its own, since torch.export would fix for the graph
    whether the cache is empty."""
    rest = states[:, past.shape[2] :] @ weight.T
    return torch.cat([past, rest.unflatten(-1, (past.shape[1], past.shape[3])).transpose(1, 2)], dim=2)


@source_keys.register_fake
def _(past: torch.Tensor, states: torch.Tensor, _weight: torch.Tensor) -> torch.Tensor:
    return past.new_empty(past.shape[0], past.shape[1], states.shape[1], past.shape[3])


def source_keys_in_onnx(past, states, weight):
    """`source_keys` as nodes of a graph."""
    begin = op.Shape(past, start=2, end=3)
    end = op.Constant(value_ints=[np.iinfo(np.int64).max])
    rest = op.MatMul(op.Slice(states, begin, end, op.Constant(value_ints=[1])), op.Transpose(weight, perm=[1, 0]))
    same = op.Constant(value_ints=[0, 0])  # the first two sizes stay
    sizes = op.Concat(same, op.Shape(past, start=1, end=2), op.Shape(past, start=3, end=4), axis=0)
    return op.Concat(past, op.Transpose(op.Reshape(rest, sizes), perm=[0, 2, 1, 3]), axis=2)


# ---------------------------------------------------------------- the decoder's graph
class DecoderGraph(torch.nn.Module):
    """The decoder as a function of tokens [B, T], mask [B, S], the encoder's states [B, S, D], and a cache, to logits
    [B, T, V] and the cache with these tokens. cache: for each layer keys and values [B, H, P, K] of the answer, and
    those [B, H, S or 0, K] of the source."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(
        self, tokens: torch.Tensor, mask: torch.Tensor, states: torch.Tensor, cache: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        of_answer, of_source = DynamicCache(), DynamicCache()
        for number, block in enumerate(self.model.decoder.block):
            keys, values, known_keys, known_values = cache[4 * number : 4 * number + 4]
            attention = block.layer[1].EncDecAttention
            of_answer.update(keys, values, number)
            of_source.update(
                source_keys(known_keys, states, attention.k.weight),
                source_keys(known_values, states, attention.v.weight),
                number,
            )
        output = self.model(
            attention_mask=mask,
            encoder_outputs=(states,),
            decoder_input_ids=tokens,
            past_key_values=EncoderDecoderCache(of_answer, of_source),
            use_cache=True,
        )
        outputs = [output.logits]
        for layer, source_layer in zip(of_answer.layers, of_source.layers, strict=True):
            outputs += [layer.keys, layer.values, source_layer.keys, source_layer.values]
        return tuple(outputs)


def cache_names(layers: int) -> list[str]:
    """Names of the cache's tensors, without what stands before them in inputs and outputs: 0.decoder.key ..."""
    return [
        f"{number}.{stack}.{part}"
        for number in range(layers)
        for stack in ("decoder", "encoder")
        for part in ("key", "value")
    ]


def write_decoder(model: PreTrainedModel, file: Path) -> None:
    """Writes the decoder with its head as a graph that reads any number of rows and tokens, and a cache of any length,
    none included."""
    config = model.config
    rows, source, given, known = 2, 8, 3, 5  # of the batch by which the graph is found
    names = cache_names(config.num_decoder_layers)
    batch = {0: "batch_size"}  # Transformers.js makes an empty cache for as many rows, by this name
    cache, sizes = [], []
    for name in names:
        is_of_source = ".encoder." in name
        cache.append(torch.zeros(rows, config.num_heads, source if is_of_source else known, config.d_kv))
        sizes.append(batch | {2: "cached_source" if is_of_source else "cached"})
    inputs = (
        torch.full((rows, given), 3),
        torch.ones(rows, source, dtype=torch.int64),
        torch.zeros(rows, source, config.d_model),
        cache,
    )
    of_source = batch | {1: "source"}
    exported(
        model,
        DecoderGraph(model),
        inputs,
        file,
        input_names=["input_ids", "encoder_attention_mask", "encoder_hidden_states"]
        + [f"past_key_values.{name}" for name in names],
        output_names=["logits", *(f"present.{name}" for name in names)],
        dynamic_shapes=(batch | {1: "given"}, of_source, of_source, sizes),
        custom_translation_table={torch.ops.t5_foundry.source_keys.default: source_keys_in_onnx},
    )


# ---------------------------------------------------------------- the comparison
class OnnxModel:
    """The two graphs in a folder, run by ONNX Runtime on the CPU."""

    def __init__(self, folder: Path):
        import onnxruntime

        self.encoder, self.decoder = (
            onnxruntime.InferenceSession(str(folder / file), providers=["CPUExecutionProvider"])
            for file in (ENCODER, DECODER)
        )

    def encoded(self, sources: list[list[int]]) -> dict[str, np.ndarray]:
        """What the decoder reads of the sources, in one padded batch, with an empty cache."""
        ids, mask = padded(sources)
        (states,) = self.encoder.run(None, {"input_ids": ids, "attention_mask": mask})
        inputs = {"encoder_attention_mask": mask, "encoder_hidden_states": states}
        for entry in self.decoder.get_inputs():
            if entry.name.startswith("past_key_values."):
                _, heads, _, size = entry.shape
                inputs[entry.name] = np.zeros((len(sources), heads, 0, size), dtype=np.float32)
        return inputs

    def step(self, inputs: dict[str, np.ndarray], tokens: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """(logits [B, T, V] of the next tokens, the inputs with the cache that holds `tokens` [B, T] too)."""
        logits, *cache = self.decoder.run(None, inputs | {"input_ids": tokens})
        names = [entry.name.replace("present.", "past_key_values.") for entry in self.decoder.get_outputs()[1:]]
        return logits, inputs | dict(zip(names, cache, strict=True))

    def greedy(self, source: list[int], start: int, eos: int, most: int) -> list[int]:
        """The surest tokens, EOS included, one step for each."""
        inputs, token, written = self.encoded([source]), start, []
        while len(written) < most and token != eos:
            logits, inputs = self.step(inputs, np.array([[token]]))
            token = int(logits[0, -1].argmax())
            written.append(token)
        return written

    def log_probs(self, sources: list[list[int]], answers: list[list[int]], start: int) -> list[np.ndarray]:
        """The log-probabilities [T, V] of each answer, in one step for all in a padded batch."""
        tokens, _ = padded([[start, *answer[:-1]] for answer in answers])
        logits, _ = self.step(self.encoded(sources), tokens)
        found = torch.from_numpy(logits).log_softmax(-1).numpy()
        return [of_row[: len(answer)] for of_row, answer in zip(found, answers, strict=True)]


def export_onnx(kind: str, original: Original, folder: Path) -> tuple[dict, str]:
    """Writes the whole model into `folder`, with configuration, settings of `generate` and tokenizer; returns (its
    comparison with PyTorch, one line about it)."""
    model = original.model
    (folder / ENCODER).parent.mkdir(parents=True)
    write_graph(encoder_alone(model), folder / ENCODER)
    write_decoder(model, folder / DECODER)
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    vars(config).pop("task_specific_params", None)  # Transformers.js would put the prefixes of T5 before each text
    config.save_pretrained(folder)
    own, model.generation_config = model.generation_config, copy.deepcopy(model.generation_config)
    drop_idle_search(model)
    model.generation_config.save_pretrained(folder)
    model.generation_config = own
    save_tokenizer(original.tokenizer, folder)
    keep_spaces(original.tokenizer, folder)
    result = compare_whole(kind, original, folder)
    result["megabytes"] = round(sum(file.stat().st_size for file in (folder / "onnx").iterdir()) / 1e6, 1)
    return result, described_comparison(result) + settings_left_out(original.num_beams, own)


def keep_spaces(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Says in tokenizer_config.json whether decoding takes the spaces before punctuation out. transformers 5 does not
    and does not say so; Transformers.js 4.3 does unless the file says otherwise."""
    path = folder / "tokenizer_config.json"
    content = read_json(path)
    content["clean_up_tokenization_spaces"] = bool(tokenizer.clean_up_tokenization_spaces)
    write_json(path, dict(sorted(content.items())))


def settings_left_out(beams_of_task: int | None, settings: GenerationConfig) -> str:
    """The end of the line about the format: what the task's evaluation or the model's settings search with, and
    Transformers.js 4.3 passes over without a word; "" for greedy answers."""
    beams = beams_of_task or settings.num_beams or 1
    left_out = [f"num_beams {beams}"] if beams > 1 else []
    for name, idle in NOT_IN_TRANSFORMERS_JS.items():
        value = getattr(settings, name, None)
        if value not in (None, idle):
            left_out.append(f"{name} {value}")
    return f"; Transformers.js leaves out {', '.join(left_out)}" if left_out else ""


def compare_whole(kind: str, original: Original, folder: Path) -> dict:
    """The comparison with PyTorch: greedy answers to each text alone, token by token with the cache, and the
    log-probabilities of PyTorch's answers in one padded batch. UserError for a difference beyond the tolerance."""
    engine, config = OnnxModel(folder), original.model.config
    start, eos = config.decoder_start_token_id, config.eos_token_id
    tokens = [engine.greedy(source, start, eos, NEW_TOKENS) for source in original.sources]
    log_probs = engine.log_probs(original.sources, original.answers.tokens, start)
    return compare(kind, original.answers, Answers(tokens, log_probs), TOLERANCE)


GRAPHS = (ENCODER, f"{ENCODER}.data", DECODER, f"{DECODER}.data")
FORMAT = Format(export_onnx, refuse_onnx, (*GRAPHS, *CONFIGURATIONS, *TOKENIZER))
