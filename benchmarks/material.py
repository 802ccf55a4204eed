"""Inputs of the measurements: model shapes, attention implementations by name, random batches like those of training.

Legend of shapes: B batch, S source length, T target length.
"""

from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import torch
from transformers import PreTrainedModel, T5Config
from transformers.activations import NewGELUActivation

from constants import IGNORE_INDEX, MODEL_SHAPES
from data_collator_t5 import T5DataCollator
from model_t5 import build_config, create_model, is_local_model, set_dropout
from training.batching import MULTIPLE

SMALL_VOCABULARY = 4096  # of the shapes that are trained with their own tokenizer
# Tokens of a GLUE sentence or pair under T5's vocabulary, as a share of run_glue's --max_seq_length 128: log-normal.
MEDIAN_SHARE, SIGMA = 0.28, 0.5


# ---------------------------------------------------------------- models
def full_name(model: str) -> str:
    """A name of MODEL_SHAPES from its short form: "xl" -> "t5-v1_1-xl"; a folder with a config.json, unchanged.
    ValueError if it is neither."""
    for name in (model, f"t5-v1_1-{model}"):
        if name in MODEL_SHAPES or is_local_model(name):
            return name
    shapes = ", ".join(name.split("-")[-1] for name in MODEL_SHAPES)
    raise ValueError(f"--model {model}: neither a shape ({shapes}) nor a folder with a config.json")


def benchmark_config(name: str) -> T5Config:
    """Configuration of a built-in shape, with its usual vocabulary."""
    return build_config(name, None if name.startswith("t5-") else SMALL_VOCABULARY)


def parameter_shapes(config: T5Config) -> list[tuple[int, ...]]:
    """Shapes of all weights of a model with this configuration, without allocating them."""
    with torch.device("meta"):
        return [tuple(p.shape) for p in create_model(config).parameters()]


def new_model(config: T5Config, ours: bool, attention: str | None = None, dropout: float = 0.0) -> PreTrainedModel:
    """A model with the initial weights of a comparison. A peer gets transformers' own GELU back, which create_model has
    replaced (modeling/layers.py)."""
    torch.manual_seed(0)
    model = create_model(config, attention)
    set_dropout(model, dropout)
    for module in () if ours else model.modules():
        if isinstance(getattr(module, "act", None), torch.nn.GELU):
            module.act = NewGELUActivation()
    return model


def setting_of(args: Namespace) -> dict:
    """The fields that say how a result on a model was measured."""
    precision = "bf16" if args.bf16 else "float32"
    return dict(config_name=args.model, batch=args.batch, source_length=args.source_length, precision=precision)


# ---------------------------------------------------------------- batches
def bare_tokenizer(vocab_size: int) -> SimpleNamespace:
    """The parts of a tokenizer that T5DataCollator uses: 100 sentinels at the end of the vocabulary, and EOS 1."""
    sentinels = {f"<extra_id_{number}>": vocab_size - 1 - number for number in range(100)}
    return SimpleNamespace(get_vocab=lambda: sentinels, eos_token_id=1, name_or_path="none")


def random_batches(config: T5Config, batch: int, source_length: int, count: int, device: torch.device) -> list[dict]:
    """`count` batches {"input_ids" [B, S], "labels" [B, T], "decoder_input_ids" [B, T]} of random tokens, corrupted as
    in pre-training."""
    collator = T5DataCollator(bare_tokenizer(config.vocab_size), source_length)
    generator, batches = np.random.default_rng(0), []
    for number in range(count):
        tokens = generator.integers(3, config.vocab_size - 110, size=(batch, collator.tokens_length), dtype=np.int64)
        examples = {"input_ids": tokens, "key": np.arange(batch) + number * batch}
        batches.append({name: tensor.to(device) for name, tensor in collator(examples).items()})
    return batches


def random_sources(rows: int, longest: int, vocab_size: int) -> list[list[int]]:
    """Token ids of 8 to `longest` tokens, log-normal with median 0.28 `longest` and sigma 0.5: GLUE's under 128."""
    generator = np.random.default_rng(0)
    lengths = MEDIAN_SHARE * longest * np.exp(SIGMA * generator.standard_normal(rows))
    lengths = lengths.round().astype(int).clip(min(8, longest), longest)
    return [generator.integers(3, vocab_size - 110, length).tolist() for length in lengths]


def padded(rows: list[dict], source_length: int | None = None) -> dict[str, torch.Tensor]:
    """A batch of rows, padded as DataCollatorForSeq2Seq does: to `source_length`, or to the next multiple of eight."""
    batch = {}
    for name, filler, length in (("input_ids", 0, source_length), ("labels", IGNORE_INDEX, None)):
        if name in rows[0]:
            length = length or -(-max(len(row[name]) for row in rows) // MULTIPLE) * MULTIPLE
            batch[name] = torch.tensor([row[name] + [filler] * (length - len(row[name])) for row in rows])
    return batch | {"attention_mask": batch["input_ids"].ne(0).long()}
