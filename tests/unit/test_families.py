"""Tests of foundry/modeling/families.py: what families have and lack, and how many rows of one fit into memory."""

import copy
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
import zoo
from absl.testing import parameterized
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoConfig, GenerationConfig, GPT2Tokenizer, RobertaTokenizer

from constants import IGNORE_INDEX
from data_collator_t5 import T5DataCollator
from foundry.arguments.model import ModelArguments
from foundry.common.errors import UserError
from foundry.corpora.tokenizers import encode_targets, load_tokenizer
from foundry.model_t5 import check_options, create_model, get_model, load_model
from foundry.modeling.families import families, output_head, shape_of, stacks
from foundry.modeling.loss import chunked_loss_sums
from foundry.modeling.rows_at_a_time import cached_numbers, rows_to_generate, rows_to_score
from foundry.runs.memory import block_parameters, matrix_parameters
from foundry.training.checkpoints import check_resumed

WORDS = 300
BASE = dict(d_model=768, d_kv=64, d_ff=2048, num_heads=12, num_layers=12, num_decoder_layers=12)


def config_of(family: str, words: int = WORDS, **changes):
    values = zoo.config_of(family, words) | changes
    return AutoConfig.for_model(**values)


def model_of(family: str, attention: str | None = None, words: int = WORDS):
    torch.manual_seed(0)
    model = create_model(config_of(family, words), attention).double()
    for parameter in model.parameters():  # fresh norms are all alike, and fresh logits near zero
        torch.nn.init.normal_(parameter, std=0.3) if parameter.requires_grad else None
    return model.eval()


class RowsAtATimeTest(parameterized.TestCase):
    """Where no gradient is needed: as many rows as keep the largest tensor below 2^28 numbers, and caches small."""

    @parameterized.parameters("t5_v1_0", "umt5", "longt5_local")
    def test_numbers_that_generating_keeps(self, family):
        model, ids = model_of(family), torch.full((2, 5), 7)
        found = model.generate(ids, max_length=9, min_length=9, return_dict_in_generate=True)
        caches = found.past_key_values.self_attention_cache, found.past_key_values.cross_attention_cache
        layers = (layer for cache in caches for layer in cache.layers if layer.keys is not None)
        kept = sum(layer.keys.numel() + layer.values.numel() for layer in layers)
        self.assertEqual(kept, 2 * cached_numbers(model.config, 5, 8))  # the last token is not read

    @parameterized.parameters((1, True, 203), (4, True, 50), (4, False, 25))
    def test_texts_that_are_generated_at_a_time(self, beams, bf16, rows):
        """24 GB: of each text 11.8 million numbers."""
        memory = mock.Mock(return_value=mock.Mock(total_memory=24e9))
        with mock.patch.object(torch.cuda, "get_device_properties", memory):
            config = AutoConfig.for_model("t5", **BASE)
            self.assertEqual(rows_to_generate([config], 512, 128, beams, torch.device("cuda"), bf16), rows)

    @parameterized.parameters(
        ("t5", 32_128, 512, 128, 65),  # fine-tuning's default batch of 64 is one
        ("mt5", 250_112, 512, 128, 8),  # logits
        ("t5", 32_128, 4_096, 128, 1),  # attention scores
        ("longt5", 32_128, 16_384, 128, 3),  # scores over three blocks of 128 tokens
    )
    def test_of_a_base_model(self, family, words, source, target, rows):
        shape = BASE | (dict(local_radius=127, encoder_attention_type="local") if family == "longt5" else {})
        self.assertEqual(rows_to_score(AutoConfig.for_model(family, vocab_size=words, **shape), source, target), rows)


class FamiliesTest(parameterized.TestCase):
    @parameterized.product(family=("t5_v1_0", "mt5", "umt5", "longt5_local"), beams=(1, 3))
    def test_a_decoder_deeper_than_its_encoder_generates(self, family, beams):
        torch.manual_seed(0)
        made = create_model(config_of(family, num_layers=1, num_decoder_layers=3)).eval()
        made.save_pretrained(self.folder)
        search = dict(max_new_tokens=9, min_new_tokens=9, num_beams=beams, num_return_sequences=beams)
        ids = torch.tensor([[7, 9, 11, 1], [8, 1, 0, 0]])
        search["attention_mask"] = ids.ne(0).long()
        wanted = made.generate(ids, use_cache=False, **search)
        for model in (made, load_model(str(self.folder)).eval(), copy.deepcopy(made)):
            self.assertTrue(torch.equal(model.generate(ids, **search), wanted))
            again = model.generate(
                input_ids=ids, generation_config=GenerationConfig(decoder_start_token_id=0), **search
            )
            self.assertTrue(torch.equal(again, wanted))

    @parameterized.parameters(*zoo.FAMILIES)
    def test_sizes_are_those_of_the_weights(self, name):
        model = create_model(config_of(name))
        config, shape = model.config, shape_of(model.config)
        text = {id(p): p for n, p in model.named_parameters() if "vision" not in n and "multi_modal" not in n}
        matrices = [p for p in text.values() if p.dim() == 2 and p.shape[0] != shape.vocabulary]
        matrices = [p for p in matrices if p.shape[0] != 32]  # T5's tables of biases
        of_layers = sum(p.numel() for p in matrices)
        self.assertEqual(of_layers, matrix_parameters(config) - shape.head)
        embeddings = [p for p in text.values() if p.shape[0] == shape.vocabulary]
        self.assertEqual(sum(p.numel() for p in embeddings), shape.embedding_weights)
        self.assertEqual(output_head(model).weight.numel(), shape.head)
        self.assertLess(block_parameters(config), of_layers)
        self.assertEqual([len(getattr(s, "layers", None) or s.block) for s in stacks(model)], [2, shape.decoder.layers])

    def test_every_refusal_has_its_reason(self):
        for kind, family in families().items():
            config = SimpleNamespace(model_type=kind)
            if family.attentions is not None:
                for attention in {"eager", "sdpa"} - {*family.attentions}:
                    with self.assertRaisesRegex(ValueError, f"--attn_implementation {attention}: "):
                        check_options(config, attention)
            for option in family.unsupported_reason.keys() & {"bf16_residual", "torch_compile"}:
                with self.assertRaisesRegex(ValueError, f"--{option}: .*not .*{kind} models"):
                    check_options(config, training_args=SimpleNamespace(**{option: True}))

    def test_a_checkpoint_of_other_trained_weights_is_not_resumed(self):
        folder = Path(tempfile.mkdtemp())
        config = config_of("t5_v1_1")
        config.save_pretrained(folder / "checkpoint-2")
        (folder / "run.json").write_text('{"arguments": {"optim": "adamw_torch", "train_only": "cross_attn"}}')
        flags = SimpleNamespace(optim="adamw_torch", train_only="cross_attn")
        check_resumed(str(folder / "checkpoint-2"), config, {}, flags)
        flags.train_only = None
        with self.assertRaisesRegex(ValueError, "--train_only: cross_attn in its run, None now"):
            check_resumed(str(folder / "checkpoint-2"), config, {}, flags)

    @parameterized.named_parameters(
        ("text", {"train": "other"}, "the contents of train: text in its run, other now"),
        ("tokenizer", {"tokenizer": "other"}, "the contents of tokenizer: pieces in its run, other now"),
        ("held_out", {"validation": "own"}, "a validation text of its own: no in its run, yes now"),
        ("copies", {"copies": "on both sides"}, "copies of held-out documents: on one side in its run, on both sides"),
    )
    def test_a_checkpoint_of_other_contents_is_not_resumed(self, change, message):
        folder, config, flags = Path(tempfile.mkdtemp()), config_of("t5_v1_1"), SimpleNamespace()
        config.save_pretrained(folder / "checkpoint-2")
        saved = {"train": "text", "tokenizer": "pieces"}
        (folder / "run.json").write_text(json.dumps({"fingerprints": saved}))
        check_resumed(str(folder / "checkpoint-2"), config, saved, flags)
        with self.assertRaisesRegex(UserError, message):
            check_resumed(str(folder / "checkpoint-2"), config, saved | change, flags)


class CapTest(parameterized.TestCase):
    @parameterized.product(smoothing=(0.0, 0.1), z_loss=(0.0, 1e-2), chunk=(2, 100))
    def test_gradients_where_the_cap_bends_much(self, smoothing, z_loss, chunk):
        """Logits of -3 to 3 times the cap, against autograd through cap * tanh(logits / cap)."""
        torch.manual_seed(0)
        hidden, weight = (torch.randn(n, 6, dtype=torch.float64, requires_grad=True) for n in (7, 11))
        labels, cap = torch.tensor([3, 0, IGNORE_INDEX, 10, 5, 5, 1]), 2.0
        capped = cap * torch.tanh(hidden @ weight.T / cap)
        self.assertGreater(capped.abs().max(), 0.9 * cap)
        wanted = F.cross_entropy(capped, labels, reduction="sum", label_smoothing=smoothing)
        wanted = wanted + z_loss * capped.logsumexp(-1)[labels.ne(IGNORE_INDEX)].square().sum()
        found, _ = chunked_loss_sums(hidden, weight, labels, smoothing, z_loss, chunk, cap)
        torch.testing.assert_close(found, wanted)
        of_ours, of_autograd = (torch.autograd.grad(loss, (hidden, weight)) for loss in (found, wanted))
        torch.testing.assert_close(of_ours, of_autograd, rtol=1e-9, atol=1e-9)


class TargetsTest(parameterized.TestCase):
    def test_targets_of_a_tokenizer_that_writes_bos_and_eos(self):
        """CodeT5's is RoBERTa's, <s> ... </s>; so are the targets that its models were fine-tuned on."""
        folder, special = self.enterContext(tempfile.TemporaryDirectory()), ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
        backend = ByteLevelBPETokenizer()
        backend.train_from_iterator(zoo.lines(), 300, special_tokens=special, show_progress=False)
        words = RobertaTokenizer(backend.get_vocab(), [], pad_token="<pad>", extra_special_tokens=["<extra_id_0>"])
        words.save_pretrained(folder)
        words = load_tokenizer(folder)
        texts = list(zoo.lines()[:3])
        wanted = words(texts)["input_ids"]
        self.assertEqual({(ids[0], ids[-1]) for ids in wanted}, {(1, 2)})
        self.assertEqual(encode_targets(words, texts), wanted)
        self.assertEqual(encode_targets(words, texts[:1], 5), [[*wanted[0][:4], 2]])
        collator = T5DataCollator(words, 8, mean_noise_span_length=2)
        batch = collator({"input_ids": np.full((1, collator.tokens_length), 9)})
        self.assertEqual((batch["input_ids"][0, -1], batch["labels"][0, -1]), (2, 2))
        model, _ = get_model(ModelArguments(config_name="tiny"), words)  # whose answers begin with 1, T5's EOS
        self.assertEqual((model.config.eos_token_id, model.generation_config.eos_token_id), (2, 2))

    def test_targets_of_a_tokenizer_that_writes_neither_end(self):
        """FRED-T5's is GPT-2's, which writes no EOS: a model trained without one never ends its answers."""
        folder, special = self.enterContext(tempfile.TemporaryDirectory()), ["<pad>", "<s>", "</s>", "<unk>"]
        backend = ByteLevelBPETokenizer()
        backend.train_from_iterator(zoo.lines(), 300, special_tokens=special, show_progress=False)
        named = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
        GPT2Tokenizer(backend.get_vocab(), [], **named).save_pretrained(folder)
        words, texts = load_tokenizer(folder), list(zoo.lines()[:3])
        plain = words(texts)["input_ids"]
        self.assertNotIn(2, plain[0])
        self.assertEqual(encode_targets(words, texts), [[*ids, 2] for ids in plain])
        self.assertEqual(encode_targets(words, texts, 5), [[*ids[:4], 2] for ids in plain])
