"""Tests of what counts as text in the metrics of pre-training: neither sentinels nor EOS, wherever one stands.

The model is made up: it finds every target the likeliest, all with the same probability. So the right accuracy is 1,
and the right bits per byte follow by hand. Hermetic, a few seconds.
"""

import math
import tempfile
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from absl.testing import parameterized
from test_data_collator_t5 import EOS, make_tokenizer
from test_trainer_t5 import arguments, quietly

from features import PACKINGS
from foundry.arguments.text import PreTrainingDataArguments
from foundry.corpora.token_files import TokenFile
from foundry.model_t5 import build_config, create_model
from foundry.objectives.objective_types import get_objective, objective_type
from foundry.trainer_t5 import T5Trainer

VOCABULARY, BYTES = 400, 3.0  # bytes that a token of text stands for
SHAPE = dict(d_model=16, d_kv=8, d_ff=32, num_heads=2, num_layers=1, num_decoder_layers=1)
KINDS = ("chunks", *PACKINGS, "ul2", "prefix_lm")


def documents(longest: int) -> np.ndarray:
    """Documents of 1 to `longest` tokens, each with its EOS."""
    rng = np.random.default_rng(0)
    parts = ([*rng.integers(3, 290, rng.integers(1, longest + 1)), EOS] for _ in range(16_000 // longest))
    return np.concatenate([np.array(part, dtype=np.uint16) for part in parts])


def perfect(*_, decoder_input_ids: torch.Tensor, **__) -> SimpleNamespace:
    """Logits of 1 for the targets, which the decoder's inputs tell, and 0 for all others."""
    labels = torch.nn.functional.pad(decoder_input_ids[:, 1:], (0, 1))
    labels = torch.where(labels == 0, EOS, labels)  # an example ends where the next one starts
    logits = torch.nn.functional.one_hot(labels, VOCABULARY).float()
    return SimpleNamespace(logits=logits, encoder_last_hidden_state=None)


class PerfectModelTest(parameterized.TestCase):
    @parameterized.product(kind=KINDS, longest=(12, 400))
    def test_accuracy_and_bits_per_byte(self, kind, longest):
        tokenizer = make_tokenizer(VOCABULARY - 3 * (kind == "ul2"))
        objective = kind if kind in ("ul2", "prefix_lm") else "span_corruption"
        data_args = PreTrainingDataArguments(
            objective=objective,
            packing="documents" if kind == "documents" else "chunks",
            input_seq_length=128,
            eos_between_documents=True,
        )
        tokenizer = objective_type(data_args).new_tokenizer(tokenizer, data_args)
        model = create_model(build_config("tiny", VOCABULARY, SHAPE))
        collator = get_objective(data_args, tokenizer, model)
        text = documents(longest)
        file = TokenFile(text, documents=1, empty_documents=0, text_bytes=round(BYTES * np.count_nonzero(text != EOS)))
        data = collator.rows(text)
        metrics = collator.metrics(file.bytes_per_token(EOS))
        trainer = T5Trainer(
            model=model,
            args=arguments(self.enterContext(tempfile.TemporaryDirectory()), per_device_eval_batch_size=7),
            eval_dataset=data,
            data_collator=collator,
            compute_metrics=metrics,
        )
        with mock.patch.object(trainer.model, "forward", perfect):
            found, _ = quietly(trainer.evaluate)
        batch = collator(data.__getitems__(range(len(data))))
        labels = batch["labels"]
        is_text = ~torch.isin(labels, torch.tensor([*collator.sentinel_ids, EOS]))
        examples = labels.eq(EOS).sum() if not collator.packs_examples else None
        nats = math.log(math.e + VOCABULARY - 1) - 1
        self.assertAlmostEqual(found["eval_loss"], nats, places=4)
        self.assertEqual(found["eval_token_accuracy"], 1.0)
        self.assertEqual(found["eval_text_token_accuracy"], 1.0)
        bits = nats * labels.numel() / math.log(2) / (BYTES * int(is_text.sum()))
        self.assertAlmostEqual(found["eval_bits_per_byte"], bits, delta=1e-4 * bits)
        if examples is not None:
            self.assertGreater(int(examples), len(data), "an EOS was hidden")
