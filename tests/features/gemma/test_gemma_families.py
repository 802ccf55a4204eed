"""What T5Gemma and T5Gemma 2 need beside T5: caps, windows, rotary positions, tokenizers that begin with BOS.

Models of a few thousand weights on the CPU, in the published layout (support/zoo.py).

transformers computes their norms and softmaxes in float32 whatever the model's type: hence the tolerance.
"""

import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
import zoo
from absl.testing import parameterized
from helpers import needs_newer_transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, Gemma2Config, Gemma2ForCausalLM
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaPreTrainedModel

from constants import IGNORE_INDEX
from data_collator_t5 import T5DataCollator, find_bos_id, find_sentinel_ids
from features.gemma.adaptation import adapt
from foundry.arguments.text import PreTrainingDataArguments
from foundry.corpora.tokenizers import encode_targets, load_tokenizer, plain_encoder
from foundry.model_t5 import create_model, dropout_of, flops_per_sequence, load_model, set_dropout
from foundry.modeling.families import family_of, output_head, shape_of, stacks
from foundry.modeling.loss import compute_loss_in_forward, token_nll
from foundry.modeling.new_vocabulary import change_vocabulary
from foundry.modeling.segment_masks import enable_packing
from foundry.objectives.objective_types import objective_type
from foundry.training.batching import OneShapeCollator, PackingCollator
from foundry.training.checkpoints import check_resumed
from tasks.entry import TaskEntry
from tasks.examples import non_canonical_outputs

WORDS = 300
NEAR = dict(rtol=1e-4, atol=1e-5)


def config_of(family: str, words: int = WORDS, **changes):
    values = zoo.config_of(family, words) | changes
    return AutoConfig.for_model(**values)


def model_of(family: str, attention: str | None = None, words: int = WORDS):
    torch.manual_seed(0)
    model = create_model(config_of(family, words), attention).double()
    for parameter in model.parameters():  # fresh norms are all alike, and fresh logits near zero
        torch.nn.init.normal_(parameter, std=0.3) if parameter.requires_grad else None
    return model.eval()


@functools.cache
def tokenizer():
    folder = Path(tempfile.mkdtemp()) / "t5gemma"
    zoo.write_checkpoint(folder, "t5gemma")
    return load_tokenizer(str(folder))


class FamiliesTest(parameterized.TestCase):
    @parameterized.parameters(*zoo.GEMMA)
    def test_flops_are_those_that_torch_counts(self, name):
        needs_newer_transformers("multiplies matrices for rotary positions, which are not counted")
        model, batch, source, target = model_of(name, "eager"), 3, 11, 7
        ids, labels = torch.randint(8, WORDS, (batch, source)), torch.randint(8, WORDS, (batch, target))
        compute_loss_in_forward(model)
        with FlopCounterMode(display=False) as counter:
            model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels)["loss"].backward()
        self.assertEqual(counter.get_total_flops(), batch * flops_per_sequence(model.config, source, target))

    def test_attention_scores_are_capped_whatever_transformers_would_choose(self):
        """Up to 5.17 it chose sdpa for T5Gemma, which has no cap."""
        with mock.patch.object(T5GemmaPreTrainedModel, "_supports_sdpa", True), tempfile.TemporaryDirectory() as folder:
            created = create_model(config_of("t5gemma"))
            created.save_pretrained(folder)
            adapted, _ = adapt(
                Gemma2ForCausalLM(Gemma2Config(**created.config.decoder.to_dict() | {"model_type": "gemma2"}))
            )
            for model in (created, load_model(folder), adapted):
                layers = [m for m in model.modules() if hasattr(m, "attn_logit_softcapping")]
                self.assertEqual({m.config._attn_implementation for m in layers}, {"eager"})

    @parameterized.parameters(*zoo.GEMMA)
    def test_dropout_reaches_attention_and_comes_back_from_the_file(self, name):
        model = create_model(config_of(name))
        set_dropout(model, 0.25)
        self.assertEqual(dropout_of(model), 0.25)
        rates = [m.attention_dropout for s in stacks(model) for m in s.modules() if hasattr(m, "attention_dropout")]
        self.assertEqual({*rates}, {0.25})

    @parameterized.parameters(("hidden_size", 32), ("num_hidden_layers", 3), ("sliding_window", 4))
    def test_a_checkpoint_of_another_shape_is_not_resumed(self, name, value):
        folder = Path(tempfile.mkdtemp()) / "checkpoint-2"
        changed = zoo.config_of("t5gemma", WORDS)
        changed["decoder"][name] = value
        changed["decoder"].pop("layer_types")
        changed["encoder"].pop("layer_types")
        AutoConfig.for_model(**changed).save_pretrained(folder)
        with self.assertRaisesRegex(ValueError, rf"the model's decoder.{name}: {value} in its run"):
            check_resumed(str(folder), config_of("t5gemma"), {}, SimpleNamespace(optim="adamw_torch"))

    @parameterized.parameters(*zoo.GEMMA)
    def test_what_fsdp_asks_of_the_model(self, name):
        """The embedding that its head shares is the decoder's, and every layer to be sharded is in the model."""
        model = model_of(name)
        family_of(model.config).fit_for_fsdp(model)
        self.assertIs(model.get_input_embeddings().weight, output_head(model).weight)
        self.assertNotEmpty(model._no_split_modules)
        self.assertContainsSubset(model._no_split_modules, {type(module).__name__ for module in model.modules()})


class LossTest(parameterized.TestCase):
    @parameterized.product(name=zoo.GEMMA, chunk=(0, 5), z_loss=(0.0, 1e-3))
    def test_loss_and_gradients_are_transformers_own(self, name, chunk, z_loss):
        """Of T5Gemma with the logits' cap, which the chunked loss applies itself."""
        model = model_of(name)
        ids, labels = torch.randint(8, WORDS, (2, 12)), torch.randint(8, WORDS, (2, 9))
        labels[1, 6:] = IGNORE_INDEX
        inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
        started = model.prepare_decoder_input_ids_from_labels(labels)
        self.assertEqual(started[:, 0].tolist(), [2, 2])
        logits = model(**inputs, decoder_input_ids=started).logits.flatten(0, 1)
        counted = labels.flatten().ne(IGNORE_INDEX)
        wanted = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX)
        wanted = wanted + z_loss * logits.logsumexp(-1).square()[counted].mean()
        wanted.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        compute_loss_in_forward(model, z_loss=z_loss, chunk=chunk)
        found = model(**inputs, labels=labels)["loss"]
        found.backward()
        torch.testing.assert_close(found, wanted, **NEAR)
        for n, p in model.named_parameters():
            if p.grad is not None:
                torch.testing.assert_close(p.grad, gradients[n], rtol=1e-4, atol=1e-6, msg=n)

    def test_the_cap_matters_here(self):
        model = model_of("t5gemma")
        self.assertEqual(family_of(model.config).logit_cap(model.config), 30.0)
        ids = torch.randint(8, WORDS, (2, 12))
        model.config.decoder.final_logit_softcapping = 0.5
        self.assertLess(model(input_ids=ids, decoder_input_ids=ids).logits.abs().max(), 0.5)


class PackingTest(parameterized.TestCase):
    @parameterized.parameters(("t5gemma", "eager"), ("t5gemma2", "eager"), ("t5gemma2", "sdpa"))
    def test_an_example_of_a_row_is_what_it_is_alone(self, name, attention):
        """Longer than the windows of eight places, and in T5Gemma 2, whose cross-attention is rotated, at any place."""
        model = model_of(name, attention)
        enable_packing(model)
        sizes = [(17, 12), (23, 14), (5, 3)]
        examples = [tuple(torch.randint(8, WORDS, (1, n)) for n in size) for size in sizes]
        segments = [
            torch.cat([torch.full((1, size[side]), n + 1) for n, size in enumerate(sizes)], 1) for side in (0, 1)
        ]
        joined = (torch.cat([example[side] for example in examples], 1) for side in (0, 1))
        ids, decoder_ids = joined
        with torch.no_grad():
            packed = model(
                input_ids=ids,
                decoder_input_ids=decoder_ids,
                input_segments=segments[0],
                target_segments=segments[1],
                target_kinds=segments[1],
            ).logits
            alone = [
                model(
                    input_ids=i,
                    attention_mask=torch.ones_like(i),
                    decoder_input_ids=d,
                    decoder_attention_mask=torch.ones_like(d),
                ).logits
                for i, d in examples
            ]
        torch.testing.assert_close(packed, torch.cat(alone, 1), **NEAR)


class OfficialTest(parameterized.TestCase):
    """Google's T5Gemma in Flax (google-deepmind/gemma 7691fd4, gemma/research/t5gemma) ran once in float32 with these
    weights: for each target token its nats. Without padding, and with BOS as the decoder's first token."""

    EXAMPLES = (  # tokens of source and target, nats
        (7, (3.1648, 2.5293, 2.5116, 2.5180, 2.5551, 6.8517, 4.6253, 4.2090, 3.6970, 2.6857, 2.5963, 4.2326)),
        # Longer than the window of 8, which transformers makes a place wider to each side: Google's got the window 9
        # in the encoder. With 8 there its nats are 2.8432 2.5143 2.5245 2.5653 2.6533.
        (14, (3.0603, 2.5222, 2.5111, 2.5253, 2.5737)),
    )

    def model(self) -> torch.nn.Module:
        config = config_of("t5gemma", 40)
        for half in (config.encoder, config.decoder):  # low caps, which matter
            half.attn_logit_softcapping, half.final_logit_softcapping = 2.0, 3.0
        model = create_model(config).eval()
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                angles = torch.arange(parameter.numel(), dtype=torch.float64) * (1 + number / 7)
                parameter.copy_(0.5 * torch.sin(angles).view_as(parameter))
        return model

    def rows(self) -> list[dict]:
        return [
            {
                "input_ids": [(5 * k + 2) % 37 + 3 for k in range(source)],
                "labels": [(7 * k + 3) % 37 + 3 for k in range(len(nats))],
            }
            for source, nats in self.EXAMPLES
        ]

    @parameterized.parameters("padded", "packed")
    def test_the_nats_of_the_official_code(self, kind):
        model, (first, second) = self.model(), self.rows()
        rows = [second, first, first]
        if kind == "packed":
            enable_packing(model)
            batch = PackingCollator(0, 2, cost=lambda source, target: source + target)(rows)
        else:
            batch = OneShapeCollator(0, 2, source_length=16, target_length=16, rows=3)(rows)
        labels = batch.pop("labels")
        self.assertLen(labels, 2 if kind == "packed" else 3)
        with torch.no_grad():
            nats = token_nll(model(**batch).logits, labels)[labels.ne(IGNORE_INDEX)]
        (_, short), (_, long) = self.EXAMPLES
        torch.testing.assert_close(nats, torch.tensor(long + short + short), rtol=0, atol=2e-4)


class BosTest(parameterized.TestCase):
    def test_inputs_begin_with_bos_and_targets_end_in_eos(self):
        collator = T5DataCollator(tokenizer(), 64, mean_noise_span_length=6)
        tokens = torch.arange(110, 110 + collator.tokens_length)[None].numpy()
        batch = collator({"input_ids": tokens})
        inputs, labels, decoder = (batch[n][0].tolist() for n in ("input_ids", "labels", "decoder_input_ids"))
        self.assertEqual((len(inputs), inputs[0], inputs.count(1)), (64, 2, 0))
        self.assertEqual((labels[-1], decoder[0]), (1, 0))  # the start token is the caller's to name
        text = [n for n in inputs + labels if n >= 110]
        self.assertCountEqual(text, tokens[0].tolist())

    @parameterized.parameters("ul2", "prefix_lm")
    def test_rows_of_several_examples(self, objective):
        flags = PreTrainingDataArguments(objective=objective, input_seq_length=64)
        mixture = objective_type(flags).of(flags, tokenizer(), 2)
        tokens = np.random.default_rng(0).integers(110, 300, 5000).astype(np.uint16)
        batch = mixture(mixture.rows(tokens).__getitems__(range(20)))
        inputs, segments = batch["input_ids"], batch["input_segments"]
        begins = segments.diff(dim=1, prepend=torch.zeros(20, 1, dtype=torch.long)).ne(0)
        self.assertTrue(bool(inputs[begins].eq(2).all()))
        self.assertEqual(int(inputs.eq(2).sum()), int(begins.sum()))
        self.assertEqual(int(inputs.eq(1).sum()), 0)
        starts = batch["target_segments"].diff(dim=1, prepend=torch.zeros(20, 1, dtype=torch.long)).ne(0)
        self.assertTrue(bool(batch["decoder_input_ids"][starts].eq(2).all()))

    def test_unused_tokens_are_sentinels_where_there_are_no_others(self):
        self.assertEqual(find_sentinel_ids(tokenizer()).tolist(), list(range(7, 106)))
        both = SimpleNamespace(get_vocab=lambda: {"<unused0>": 5, "<extra_id_0>": 9})
        self.assertEqual(find_sentinel_ids(both).tolist(), [9])
        many = SimpleNamespace(get_vocab=lambda: {f"<unused{n}>": n for n in range(6242)})  # Gemma 3's
        self.assertEqual(find_sentinel_ids(many).tolist(), list(range(100)))

    def test_targets_and_plain_text(self):
        words = tokenizer()
        self.assertEqual((find_bos_id(words), words.padding_side), (2, "right"))
        text = zoo.lines()[0]
        plain = plain_encoder(words)([text])[0]
        self.assertEqual(words(text)["input_ids"], [2, *plain])
        self.assertEqual(encode_targets(words, [text]), [[*plain, 1]])
        self.assertEqual(encode_targets(words, [text], 5), [[*plain[:4], 1]])
        (marked,) = plain_encoder(words)(["a <unused3> <bos> b"])
        self.assertEmpty({2, 10} & {*marked})

    def test_generated_labels_are_their_own_tokens_behind_the_start_token(self):
        words, labels = tokenizer(), [line.split()[1] for line in zoo.lines()[:2]]
        written = np.array([[2, *encode_targets(words, labels[:1])[0], filler] for filler in (0, -100)])
        entry = TaskEntry(target_type="class", labels=labels)
        self.assertEqual(non_canonical_outputs(entry, words, written), {"non_canonical_outputs": 0})

    @parameterized.parameters(*zoo.GEMMA)
    def test_another_vocabulary(self, name):
        """Every embedding and the head, which stay shared as they were; and what each part's configuration says."""
        words = tokenizer()
        model = create_model(config_of(name, len(words)))
        before = [stack.embed_tokens.weight.detach().clone() for stack in stacks(model)]
        folder = Path(tempfile.mkdtemp())
        words.save_pretrained(folder)
        other = load_tokenizer(str(folder))
        other.add_tokens(["<new>"])
        self.assertEqual(change_vocabulary(model, words, other), {"kept": len(words), "new": 1})
        size = -(-(len(words) + 1) // 64) * 64
        self.assertEqual(shape_of(model.config).vocabulary, size)
        for stack, old in zip(stacks(model), before, strict=True):
            self.assertEqual(stack.embed_tokens.weight.shape[0], size)
            self.assertTrue(torch.equal(stack.embed_tokens.weight[: len(words)], old))
        self.assertIs(output_head(model).weight, stacks(model)[1].embed_tokens.weight)
        self.assertEqual(model.config.decoder_start_token_id, 2)
        without = SimpleNamespace(bos_token_id=None, get_vocab=dict)
        with self.assertRaisesRegex(ValueError, f"--tokenizer_name: .* without bos_token, .*{name} model begins"):
            change_vocabulary(model, words, without)
