"""Tests of model_t5: shapes, heads, files in Google's layouts, the loss and the FLOPs, against outside references.

Hermetic: tiny models made here (no network, no GPU).
"""

import contextlib
import io
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import huggingface_hub.constants
import torch
from absl.testing import parameterized
from helpers import token_mean_loss
from safetensors import safe_open
from safetensors.torch import save_file
from test_data_collator_t5 import make_tokenizer
from test_new_vocabulary import tokenizer_of
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForSeq2SeqLM,
    BertConfig,
    LongT5Config,
    LongT5ForConditionalGeneration,
    MT5Config,
    MT5ForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

from data_collator_t5 import shift_right
from foundry.arguments.model import ModelArguments
from foundry.common.errors import UserError
from foundry.model_t5 import (
    build_config,
    check_model_source,
    count_parameters,
    create_model,
    dropout_of,
    fit_vocabulary,
    flops_per_sequence,
    get_model,
    is_local_model,
    load_model,
    set_attention,
    set_dropout,
)
from foundry.modeling.generation_settings import forget_search, set_generation_length


@contextlib.contextmanager
def without_hub():
    """No Hub answers; what the process notes of that is undone at the end."""
    offline = mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    unreachable = mock.patch("foundry.corpora.hub.is_answered", return_value=False)
    with offline, mock.patch.dict(os.environ), unreachable as asked:
        yield asked


TINY = dict(d_model=16, d_kv=8, d_ff=24, num_heads=3, num_layers=2, num_decoder_layers=1, dropout_rate=0.0)
TIED_NAMES = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")

# config.json of the published models, as far as it matters here (google-t5/t5-small, google/t5-v1_1-small,
# google/flan-t5-small, google/mt5-small, google/umt5-small), with our tiny shape in place of theirs.
SHAPE = TINY | dict(vocab_size=96, decoder_start_token_id=0, eos_token_id=1, pad_token_id=0, is_encoder_decoder=True)
V1_0 = SHAPE | dict(model_type="t5", architectures=["T5WithLMHeadModel"], n_positions=512)
V1_1 = SHAPE | dict(
    model_type="t5",
    architectures=["T5ForConditionalGeneration"],
    feed_forward_proj="gated-gelu",
    tie_word_embeddings=False,
    dropout_rate=0.1,
    output_past=True,
)
FLAN = V1_1 | dict(n_positions=512, dense_act_fn="gelu_new", is_gated_act=True, use_cache=True)
MT5 = V1_1 | dict(model_type="mt5", architectures=["MT5ForConditionalGeneration"], tokenizer_class="T5Tokenizer")
UMT5 = V1_1 | dict(model_type="umt5", architectures=["UMT5ForConditionalGeneration"], scalable_attention=True)
LONGT5 = V1_1 | dict(  # published: local_radius 127, global_block_size 16
    model_type="longt5",
    architectures=["LongT5ForConditionalGeneration"],
    n_positions=4096,
    local_radius=3,
    global_block_size=4,
    encoder_attention_type="local",
)
TGLOBAL = LONGT5 | dict(encoder_attention_type="transient-global")
CLASSES = dict(
    t5=(T5Config, T5ForConditionalGeneration),
    mt5=(MT5Config, MT5ForConditionalGeneration),
    umt5=(UMT5Config, UMT5ForConditionalGeneration),
    longt5=(LongT5Config, LongT5ForConditionalGeneration),
)


def random_state(config: dict, tied: bool) -> dict[str, torch.Tensor]:
    """A state dict with all four embedding names, as Google's files have them; lm_head is apart unless `tied`."""
    config_class, model_class = CLASSES[config["model_type"]]
    with torch.device("meta"):
        shapes = {name: w.shape for name, w in model_class(config_class(**config)).state_dict().items()}
    generator = torch.Generator().manual_seed(3)
    state = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    for name in TIED_NAMES + (("lm_head.weight",) if tied else ()):
        state[name] = state["shared.weight"]
    return state


def write_checkpoint(folder: Path, config: dict, state: dict[str, torch.Tensor], safetensors: bool = False) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    if safetensors:
        save_file({name: w.clone() for name, w in state.items()}, folder / "model.safetensors", {"format": "pt"})
    else:
        torch.save(state, folder / "pytorch_model.bin")
    return str(folder)


def logits_of(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ids, decoder_input_ids=ids[:, :5]).logits


class ModelTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        torch.manual_seed(0)
        self.ids = torch.randint(2, 90, (2, 9))

    def tiny(self, **overrides):
        return create_model(build_config("tiny", 90, TINY | overrides))


class ShapeTest(ModelTest):
    @parameterized.parameters(
        ("t5-v1_1-small", 60_511_616, 76_961_152),
        ("t5-v1_1-base", 222_903_552, 247_577_856),
        ("t5-v1_1-large", 750_251_008, 783_150_080),
    )
    def test_parameters_are_those_of_the_published_models(self, name, tied, untied):
        with torch.device("meta"):
            self.assertEqual(count_parameters(create_model(build_config(name))), untied)
            as_v1_0 = create_model(build_config(name, overrides={"tie_word_embeddings": True}))
        self.assertEqual(count_parameters(as_v1_0), tied)
        self.assertIs(as_v1_0.lm_head.weight, as_v1_0.shared.weight)

    def test_t5_small_v1_0(self):
        with torch.device("meta"):
            self.assertEqual(count_parameters(create_model(T5Config(decoder_start_token_id=0))), 60_506_624)

    def test_vocabulary_is_rounded_up_to_whole_tiles(self):
        self.assertEqual(build_config("tiny").vocab_size, 32_128)
        self.assertEqual([build_config("tiny", n).vocab_size for n in (64, 65, 4096)], [64, 128, 4096])
        self.assertEqual(build_config("tiny", 65, {"vocab_size": 70}).vocab_size, 70)

    @parameterized.parameters(
        (True, (-200, -128, -127, -16, -8, -1, 0, 1, 8, 16, 127, 128), (15, 15, 15, 10, 8, 1, 0, 17, 24, 26, 31, 31)),
        (True, (-91, -90, 90, 91), (15, 14, 30, 31)),
        (False, (0, -1, -15, -16, -17, -64, -128), (0, 1, 15, 16, 16, 26, 31)),
        (False, (-112, -113, 5), (30, 31, 0)),
    )
    def test_relative_position_buckets(self, bidirectional, distances, buckets):
        model = self.tiny()
        stack = model.encoder if bidirectional else model.decoder
        attention = stack.block[0].layer[0].SelfAttention
        self.assertEqual(attention.is_decoder, not bidirectional)
        found = attention._relative_position_bucket(
            torch.tensor(distances),
            bidirectional=not attention.is_decoder,
            num_buckets=model.config.relative_attention_num_buckets,
            max_distance=model.config.relative_attention_max_distance,
        )
        self.assertEqual(tuple(found.tolist()), buckets)

    def test_every_layer_has_the_attention_that_is_set(self):
        """transformers 5.17 changes no part of the model whose configuration is of the model's own class."""
        model = create_model(build_config("tiny", 90, TINY), "sdpa")
        set_attention(model, "eager")
        attentions = {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}
        self.assertEqual(attentions, {"eager"})

    @parameterized.parameters("eager", "sdpa")
    def test_attention_is_not_divided_by_the_root_of_d(self, kernel):
        model = create_model(build_config("tiny", 90, TINY), kernel).eval()
        self.assertEqual(model.config._attn_implementation, kernel)
        attention = model.encoder.block[0].layer[0].SelfAttention
        x = torch.randn(2, 6, TINY["d_model"])
        with torch.no_grad():
            for weight in (attention.q, attention.k, attention.v):
                torch.nn.init.normal_(weight.weight)  # large enough for the scale to show
            found = attention(x)[0]
            q, k, v = (
                (x @ w.weight.T).unflatten(-1, (TINY["num_heads"], TINY["d_kv"])).transpose(1, 2)
                for w in (attention.q, attention.k, attention.v)
            )
            distance = torch.arange(6)[None, :] - torch.arange(6)[:, None]
            bucket = distance.abs() + 16 * (distance > 0)  # all distances are below 8: one bucket each
            bias = attention.relative_attention_bias.weight[bucket].permute(2, 0, 1)
            weights = torch.softmax(q @ k.transpose(-1, -2) + bias, dim=-1)
            expected = (weights @ v).transpose(1, 2).flatten(2) @ attention.o.weight.T
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    def test_first_loss_is_near_ln_vocabulary(self):
        """transformers' own, with T5Config(tie_word_embeddings=False): MistakesTest of test_benchmark_t5.py."""
        config = build_config("t5-v1_1-small", overrides={"num_layers": 1, "num_decoder_layers": 1})
        model = create_model(config)
        self.assertAlmostEqual(model.lm_head.weight.std().item(), 512**-0.5, delta=2e-4)
        self.assertAlmostEqual(model.shared.weight.std().item(), 1.0, delta=5e-3)
        ids = torch.randint(0, 32_000, (2, 40))
        with torch.no_grad():
            loss = token_mean_loss(model(input_ids=ids, decoder_input_ids=ids), torch.randint(0, 32_000, (2, 40)))
        self.assertBetween(loss.item(), 10.0, 11.5)

    def test_a_second_model_from_the_same_configuration(self):
        """transformers reads tie_word_embeddings for the stacks' embeddings too: these stay one matrix."""
        config = build_config("tiny", 90, TINY)
        first, second = create_model(config), create_model(config)
        self.assertEqual(count_parameters(first), count_parameters(second))
        self.assertIs(second.encoder.embed_tokens.weight, second.shared.weight)


class FlopsTest(ModelTest):
    @parameterized.parameters(("t5-v1_1-small", 106.3), ("t5-v1_1-base", 425.9), ("t5-v1_1-large", 1467.8))
    def test_published_shapes(self, name, giga):
        self.assertAlmostEqual(flops_per_sequence(build_config(name), 512, 114) / 1e9, giga, delta=0.05)

    @parameterized.parameters("gated-gelu", "relu")
    def test_against_torch_counting_a_real_step(self, feed_forward):
        config = build_config("tiny", 90, TINY | {"feed_forward_proj": feed_forward})
        model = create_model(config, "eager")
        batch, source, target = 3, 11, 7
        ids, labels = torch.randint(2, 90, (batch, source)), torch.randint(2, 90, (batch, target))
        with FlopCounterMode(display=False) as counter:
            outputs = model(input_ids=ids, decoder_input_ids=shift_right(labels, 0, 0))
            token_mean_loss(outputs, labels).backward()
        self.assertEqual(counter.get_total_flops(), batch * flops_per_sequence(config, source, target))

    @parameterized.parameters(
        (LONGT5, 16, 7),
        (LONGT5, 11, 7),
        (TGLOBAL, 16, 7),
        (TGLOBAL, 11, 3),  # whole blocks of 4, and not
    )
    def test_longt5_against_torch_counting_a_real_step(self, layout, source, target):
        config = LongT5Config(**layout)
        model, batch = create_model(config), 3
        ids, labels = torch.randint(2, 90, (batch, source)), torch.randint(2, 90, (batch, target))
        with FlopCounterMode(display=False) as counter:
            outputs = model(input_ids=ids, decoder_input_ids=shift_right(labels, 0, 0))
            token_mean_loss(outputs, labels).backward()
        # transformers sums the blocks' tokens by a product with zeros and ones, forward and for the gradient.
        sums = 0 if layout is LONGT5 else 2 * 2 * source * (source // 4) * config.d_model * config.num_layers
        wanted = flops_per_sequence(config, source, target) + sums
        self.assertEqual(counter.get_total_flops(), batch * wanted)

    def test_longt5_of_16384_tokens(self):
        """By hand for google/long-t5-tglobal-base: 12 layers, d 768, F 2048, 12 heads of 64, 1,024 global tokens."""
        shape = dict(d_model=768, d_kv=64, d_ff=2048, num_heads=12, num_layers=12, num_decoder_layers=12)
        shape |= dict(vocab_size=32128, local_radius=127, global_block_size=16)
        config = LongT5Config(**TGLOBAL | shape)
        s, t, d = 16384, 512, 768
        encoder = 12 * (s * (8 * d * d + 6 * d * 2048) + 4 * s * (3 * 128 + 1024) * d + 4 * 1024 * d * d)
        decoder = 12 * (t * (12 * d * d + 6 * d * 2048) + 4 * t * t * d + 4 * s * d * d + 4 * t * s * d)
        self.assertEqual(flops_per_sequence(config, s, t), 3 * (encoder + decoder + 2 * t * d * 32128))


class SavingTest(ModelTest):
    def test_the_head_survives_saving_as_a_tensor_of_its_own(self):
        model = self.tiny()
        expected = logits_of(model, self.ids)
        for number in range(2):  # the second time after our load_model
            folder = self.folder / str(number)
            model.save_pretrained(folder)
            with safe_open(folder / "model.safetensors", "pt") as file:
                embeddings = [name for name in file.keys() if file.get_slice(name).get_shape() == [128, 16]]  # noqa: SIM118
            self.assertCountEqual(embeddings, ["shared.weight", "lm_head.weight"])
            self.assertIs(json.loads((folder / "config.json").read_text())["tie_word_embeddings"], False)
            plain = AutoModelForSeq2SeqLM.from_pretrained(folder)
            torch.testing.assert_close(logits_of(plain, self.ids), expected, rtol=1e-5, atol=2e-6)
            with self.assertNoLogs("transformers", "WARNING"):
                model = load_model(str(folder))
            torch.testing.assert_close(logits_of(model, self.ids), expected, rtol=0, atol=0)

    def test_a_tied_v1_0_model_survives_saving_tied(self):
        model = self.tiny(tie_word_embeddings=True, feed_forward_proj="relu")
        expected = logits_of(model, self.ids)
        model.save_pretrained(self.folder)
        with safe_open(self.folder / "model.safetensors", "pt") as file:
            self.assertNotIn("lm_head.weight", file.keys())
        for again in (AutoModelForSeq2SeqLM.from_pretrained(self.folder), load_model(str(self.folder))):
            self.assertIs(again.lm_head.weight, again.shared.weight)
            torch.testing.assert_close(logits_of(again, self.ids), expected, rtol=0, atol=0)

    def test_tying_again_keeps_the_head_apart(self):
        """Whoever wraps a model may ask for its ties again."""
        model = self.tiny()
        for mapping_anew in (True, False):
            model.tie_weights(recompute_mapping=mapping_anew)
            self.assertIsNot(model.lm_head.weight, model.shared.weight)
            self.assertIs(model.decoder.embed_tokens.weight, model.shared.weight)

    def test_training_moves_head_and_embedding_apart(self):
        model = self.tiny()
        ids = self.ids
        token_mean_loss(model(input_ids=ids, decoder_input_ids=shift_right(ids, 0, 0)), ids).backward()
        self.assertGreater(model.lm_head.weight.grad.abs().sum(), 0)
        self.assertFalse(torch.equal(model.lm_head.weight.grad, model.shared.weight.grad))


class LoadingTest(ModelTest):
    @parameterized.parameters("../private/model.safetensors", "{folder}/private/model.safetensors")
    def test_a_list_of_parts_names_no_file_elsewhere(self, part):
        """A downloaded folder would have other weights of this machine read, and exported as its own."""
        part = part.format(folder=self.folder)
        self.tiny().save_pretrained(self.folder / "private")
        theirs = self.folder / "theirs"
        self.tiny().save_pretrained(theirs)
        (theirs / "model.safetensors").unlink()
        with safe_open(self.folder / "private" / "model.safetensors", "pt") as file:
            index = {"metadata": {}, "weight_map": dict.fromkeys(file.keys(), part)}
        (theirs / "model.safetensors.index.json").write_text(json.dumps(index))
        with self.assertRaisesRegex(UserError, f"--model_name_or_path .*index.json names {part}, which is no file of"):
            load_model(str(theirs))

    @parameterized.named_parameters(
        ("v1_1_bin", V1_1, False),
        ("v1_1_safetensors", V1_1, True),
        ("flan", FLAN, True),
        ("mt5", MT5, False),
        ("umt5", UMT5, False),
        ("longt5_local", LONGT5, True),
        ("longt5_tglobal", TGLOBAL, False),
    )
    def test_google_files_with_a_head_apart(self, config, safetensors):
        state = random_state(config, tied=False)
        folder = write_checkpoint(self.folder, config, state, safetensors)
        with self.assertNoLogs("transformers", "WARNING"):
            model = load_model(folder)
        torch.testing.assert_close(model.lm_head.weight.detach(), state["lm_head.weight"], rtol=0, atol=0)
        for name in TIED_NAMES:
            torch.testing.assert_close(model.get_parameter(name).detach(), state["shared.weight"], rtol=0, atol=0)
        self.assertEqual(count_parameters(model), sum(w.numel() for w in state.values()) - 2 * 96 * 16)
        # v1.1's logits are not scaled. transformers 5 does scale those of umT5 (it forgets the file's `false`).
        logits = logits_of(model, self.ids)
        with torch.no_grad():
            encoded = model.encoder(self.ids)[0]
            decoded = model.decoder(self.ids[:, :5], encoder_hidden_states=encoded)[0]
        torch.testing.assert_close(logits, decoded @ state["lm_head.weight"].T, rtol=1e-4, atol=1e-5)
        if config is not UMT5:
            plain = AutoModelForSeq2SeqLM.from_pretrained(folder)
            torch.testing.assert_close(logits, logits_of(plain, self.ids), rtol=1e-5, atol=2e-6)
        again = self.folder / "again"
        model.save_pretrained(again)
        torch.testing.assert_close(logits_of(load_model(str(again)), self.ids), logits, rtol=0, atol=0)
        self.assertIs(json.loads((again / "config.json").read_text())["tie_word_embeddings"], False)

    @parameterized.parameters(True, False)
    def test_google_files_of_v1_0(self, safetensors):
        state = random_state(V1_0, tied=True)
        # Google's t5-small has this left-over, which no version of the model reads.
        state["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.zeros(32, 3)
        model = load_model(write_checkpoint(self.folder, V1_0, state, safetensors))
        self.assertIs(model.lm_head.weight, model.shared.weight)
        self.assertEqual(type(model.encoder.block[0].layer[1].DenseReluDense).__name__, "T5DenseActDense")
        with torch.no_grad():
            encoded = model.encoder(self.ids)[0]
            decoded = model.decoder(self.ids[:, :5], encoder_hidden_states=encoded)[0]
        expected = 16**-0.5 * decoded @ state["shared.weight"].T  # T5 v1.0 scales its outputs
        torch.testing.assert_close(logits_of(model, self.ids), expected, rtol=1e-4, atol=1e-5)
        plain = AutoModelForSeq2SeqLM.from_pretrained(self.folder)
        torch.testing.assert_close(logits_of(model, self.ids), logits_of(plain, self.ids), rtol=1e-5, atol=2e-6)

    def test_half_precision_files_are_trained_in_float32(self):
        state = {name: w.bfloat16() for name, w in random_state(V1_1, tied=False).items()}
        model = load_model(write_checkpoint(self.folder, V1_1 | {"torch_dtype": "bfloat16"}, state, safetensors=True))
        self.assertEqual({p.dtype for p in model.parameters()}, {torch.float32})

    @parameterized.parameters("mt5", "umt5")
    def test_other_members_of_the_family_from_scratch(self, kind):
        config = CLASSES[kind][0](**SHAPE | dict(vocab_size=4096, d_model=64, dropout_rate=0.0))
        model = create_model(config)
        self.assertAlmostEqual(model.lm_head.weight.std().item(), 64**-0.5, delta=2e-3)
        self.assertBetween(logits_of(model, self.ids).std().item(), 0.8, 1.2)  # neither scaled nor of deviation 8

    def test_decoder_starts_with_pad_where_the_config_is_silent(self):
        config = {name: value for name, value in V1_1.items() if name != "decoder_start_token_id"}
        folder = write_checkpoint(self.folder, config, random_state(V1_1, tied=False))
        model = load_model(folder)
        self.assertEqual(model.config.decoder_start_token_id, 0)
        self.assertEqual(model.generate(self.ids, max_new_tokens=2)[0, 0], 0)
        self.assertEqual(create_model(build_config(folder)).config.decoder_start_token_id, 0)

    def test_missing_tensors_are_refused(self):
        state = random_state(V1_1, tied=False)
        del state["encoder.block.1.layer.0.SelfAttention.k.weight"], state["decoder.final_layer_norm.weight"]
        folder = write_checkpoint(self.folder, V1_1, state)
        message = r"--model_name_or_path .* lacks: 2 tensors, decoder.final_layer_norm.weight, encoder.block.1"
        with self.assertRaisesRegex(ValueError, message):
            load_model(folder)

    @parameterized.product(prefix=("_orig_mod.", "module.", "module._orig_mod."), safetensors=(True, False))
    def test_names_of_a_wrapped_model_are_understood_and_not_saved(self, prefix, safetensors):
        state = random_state(V1_1, tied=False)
        folder = write_checkpoint(self.folder, V1_1, {f"{prefix}{n}": w for n, w in state.items()}, safetensors)
        with self.assertNoLogs("transformers", "WARNING"):
            model = load_model(folder)
        self.assertTrue(all(torch.equal(tensor, state[name]) for name, tensor in model.named_parameters()))
        model.save_pretrained(self.folder / "again")
        with safe_open(self.folder / "again/model.safetensors", "pt") as file:
            self.assertEqual(set(file.keys()), {name for name, _ in model.named_parameters()})

    @parameterized.parameters("classification_head.dense.weight", "encoder.block.9.layer.0.layer_norm.weight")
    def test_tensors_without_a_place_are_refused(self, name):
        """Of T5ForSequenceClassification, or of a deeper model than config.json says: they were left out."""
        folder = write_checkpoint(self.folder, V1_1, random_state(V1_1, tied=False) | {name: torch.zeros(4)})
        message = f"--model_name_or_path .*unknown to the model: 1 tensors, {name}.* name a checkpoint that T5ForCond"
        with self.assertNoLogs("transformers", "WARNING"), self.assertRaisesRegex(UserError, message):
            load_model(folder)

    @parameterized.parameters((-60, "pytorch_model.bin"), (60, "pytorch_model.bin (newer)"))
    def test_of_several_files_of_weights_the_one_that_is_read_is_named(self, later, shown):
        weights, path = random_state(V1_1, tied=False), self.folder / "model.safetensors"
        write_checkpoint(self.folder, V1_1, {name: tensor + 1 for name, tensor in weights.items()})
        folder = write_checkpoint(self.folder, V1_1, weights, safetensors=True)
        os.utime(self.folder / "pytorch_model.bin", (path.stat().st_mtime + later,) * 2)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            torch.testing.assert_close(load_model(folder).shared.weight.detach(), weights["shared.weight"])
            path.unlink()
            load_model(folder)
        line = f"--model_name_or_path {folder}: the weights are read from model.safetensors, and not from {shown}"
        self.assertEqual(printed.getvalue().splitlines(), [line])

    def test_damaged_weights_are_refused(self):
        folder = write_checkpoint(self.folder, V1_1, {})
        for name in ("model.safetensors", "pytorch_model.bin"):
            (self.folder / name).write_bytes(b"\x00" * 7)
            with self.assertRaisesRegex(ValueError, "--model_name_or_path .*: its weights cannot be read"):
                load_model(folder)
            (self.folder / name).unlink()

    @parameterized.parameters(
        (
            "global_step9/mp_rank_00_model_states.pt",
            "shards of DeepSpeed are joined by `python -m deepspeed.utils.zero_to_fp32`",
        ),
        ("pytorch_model_fsdp_0/__0_0.distcp", "shards of FSDP are joined by `accelerate merge-weights`"),
        ("flax_model.msgpack", "transformers 4 converts weights of Flax, with from_flax=True"),
        ("tf_model.h5", "transformers 4 converts weights of TensorFlow, with from_tf=True"),
        ("onnx/encoder_model.onnx", "ONNX is for answers alone: name the checkpoint that it was exported from"),
        ("README.md", "name a folder that save_pretrained wrote"),
    )
    def test_the_way_from_a_folder_of_another_tool(self, name, advice):
        folder = write_checkpoint(self.folder, V1_1, {})
        (self.folder / "pytorch_model.bin").unlink(missing_ok=True)
        (self.folder / name).parent.mkdir(exist_ok=True)
        (self.folder / name).touch()
        with self.assertRaisesRegex(UserError, f"--model_name_or_path .*its weights cannot be read .*; {advice}"):
            load_model(folder)

    def test_another_architecture_is_refused(self):
        BertConfig(num_hidden_layers=1).save_pretrained(self.folder)
        for function, flag in ((build_config, "--config_name"), (load_model, "--model_name_or_path")):
            message = f"{flag} .* is a bert model: these scripts train T5 v1.0 and v1.1, .*ByT5 .*, mT5 .*umT5 .*LongT5"
            with self.assertRaisesRegex(ValueError, message):
                function(str(self.folder))

    @parameterized.parameters("bitsandbytes", "gptq")
    def test_quantised_weights_are_refused_by_name(self, method):
        quantized = {"quantization_config": {"quant_method": method, "load_in_8bit": True}}
        folder = write_checkpoint(self.folder, V1_1 | quantized, random_state(V1_1, tied=False))
        message = (
            f"--model_name_or_path .*: its weights are quantised .{method}.*. Give the checkpoint that it was made"
        )
        with self.assertRaisesRegex(UserError, message):
            check_model_source(ModelArguments(model_name_or_path=folder))
        self.assertRaises(UserError, load_model, folder)

    @parameterized.parameters(
        (dict(attn_implementation="sdpa"), {}, "--attn_implementation sdpa"),
        ({}, dict(torch_compile=True), "--torch_compile"),
        ({}, "--packing documents", "--packing documents"),
    )
    def test_longt5_refuses_what_its_encoder_has_not(self, model_flags, others, message):
        folder = write_checkpoint(self.folder, LONGT5, random_state(LONGT5, tied=False))
        options = dict(torch_compile=False, output_dir="out", overwrite_output_dir=False)
        args = SimpleNamespace(**options | (others if isinstance(others, dict) else {}))
        packed = others if isinstance(others, str) else None
        for source in (dict(model_name_or_path=folder), dict(config_name=folder)):
            check_model_source(ModelArguments(**source), SimpleNamespace(**options))
            with self.assertRaisesRegex(ValueError, message):
                check_model_source(ModelArguments(**source, **model_flags), args, packed)
        if model_flags:
            with self.assertRaisesRegex(ValueError, message):
                load_model(folder, **model_flags)

    @parameterized.parameters((1, 44e9, True), (1, 45e9, False), (8, 300e9, True), (8, 360e9, False))
    def test_a_model_that_this_machine_cannot_build_is_refused(self, processes, memory, refused):
        """T5 XXL: 44.5 GB in float32 for each process. The system would end them without a word."""
        args, launched = ModelArguments(config_name="t5-v1_1-xxl"), {"LOCAL_WORLD_SIZE": str(processes)}
        expected = contextlib.nullcontext()
        if refused:
            copies = ", one for each of 8 processes," if processes == 8 else ""
            expected = self.assertRaisesRegex(
                ValueError, f"^--config_name t5-v1_1-xxl: its weights in float32{copies} take "
            )
        with (
            mock.patch("foundry.model_t5.available_memory", return_value=memory),
            mock.patch.dict(os.environ, launched),
            expected,
        ):
            check_model_source(args)

    @parameterized.parameters((None, "not a folder or Hub name"), ("{", "valid JSON"), ("{}", "model_type"))
    def test_what_is_no_model_is_refused(self, content, message):
        if content is not None:
            (self.folder / "config.json").write_text(content)
        self.assertEqual(is_local_model(str(self.folder)), content is not None)
        with self.assertRaisesRegex(ValueError, rf"--model_name_or_path {self.folder}.*{message}"):
            load_model(str(self.folder))
        with self.assertRaisesRegex(ValueError, f"--config_name {self.folder}: neither a built-in shape"):
            build_config(str(self.folder))

    def test_without_an_answering_hub_nothing_is_waited_for(self):
        """transformers alone asks five times, for 23 s."""
        with without_hub() as asked:
            began = time.perf_counter()
            for function in (load_model, build_config):
                with self.assertRaisesRegex(ValueError, "t5-v1_1-bsae"):
                    function("t5-v1_1-bsae")
            self.assertLess(time.perf_counter() - began, 5)
        self.assertTrue(asked.called)


class ConfigTest(ModelTest):
    @parameterized.parameters(
        (dict(d_modle=8), "--config_overrides d_modle=8"),
        (dict(d_model="wide"), "--config_overrides d_model=wide"),
        (dict(feed_forward_proj="a-b-c"), "--config_overrides feed_forward_proj=a-b-c"),
    )
    def test_wrong_overrides_are_refused(self, overrides, message):
        build_config("tiny", 90).save_pretrained(self.folder)
        for name in ("tiny", str(self.folder)):
            with self.assertRaisesRegex(ValueError, message):
                build_config(name, 90, overrides)

    def test_overrides_of_a_folder_change_what_follows_from_them(self):
        (self.folder / "config.json").write_text(json.dumps(V1_1))
        self.assertTrue(build_config(str(self.folder)).is_gated_act)
        changed = build_config(str(self.folder), overrides={"feed_forward_proj": "relu", "num_layers": 1})
        model = create_model(changed)
        self.assertEqual(type(model.encoder.block[0].layer[1].DenseReluDense).__name__, "T5DenseActDense")
        self.assertLen(model.encoder.block, 1)
        self.assertIsNot(model.lm_head.weight, model.shared.weight)  # as the file says
        self.assertEqual(changed.vocab_size, 96)
        tied = create_model(build_config(str(self.folder), overrides={"tie_word_embeddings": True}))
        self.assertIs(tied.lm_head.weight, tied.shared.weight)

    def test_fit_vocabulary_refuses_and_never_resizes(self):
        """Ids count, not tokens: a vocabulary may have ids without any."""
        model = self.tiny()  # 128 rows
        for size in (90, 128):
            fit_vocabulary(model, make_tokenizer(size))
        self.assertEqual(model.shared.num_embeddings, 128)
        message = "ids up to 128 .* only 128 embedding rows: .* --config_overrides vocab_size=129$"
        for tokenizer in (make_tokenizer(129), tokenizer_of([], far={"far": 128})):
            with self.assertRaisesRegex(ValueError, message):
                fit_vocabulary(model, tokenizer)


class GenerationTest(ModelTest):
    def test_set_generation_length(self):
        model = self.tiny().eval()
        model.generation_config.max_new_tokens = 3  # as an older checkpoint may say
        set_generation_length(model, 6)
        written = model.generate(self.ids, min_new_tokens=6)[:, 1:]  # without the start token
        self.assertEqual(written.shape[1], 6)
        model.save_pretrained(self.folder)
        self.assertEqual(load_model(str(self.folder)).generate(self.ids, min_new_tokens=6).shape[1], 7)


class DropoutTest(ModelTest):
    @parameterized.parameters(0.0, 0, 0.1)
    def test_set_dropout_changes_the_computation(self, built_with):
        model = self.tiny(dropout_rate=built_with).train()
        forward = lambda: model(input_ids=self.ids, decoder_input_ids=self.ids).logits  # noqa: E731
        with torch.no_grad():
            set_dropout(model, 0.5)
            self.assertGreater((forward() - forward()).abs().max(), 0.1)
            self.assertEqual(dropout_of(model), 0.5)
            self.assertEqual(model.config.dropout_rate, built_with)
            set_dropout(model, 0.0)
            torch.testing.assert_close(forward(), forward(), rtol=0, atol=0)

    def test_attention_weights_are_dropped_too(self):
        """T5Attention keeps a plain number beside the Dropout modules; a config.json with `0` makes it an integer."""
        for kernel in ("eager", "sdpa"):
            model = create_model(build_config("tiny", 90, TINY | {"dropout_rate": 0}), kernel).train()
            set_dropout(model, 0.5)
            attention = model.encoder.block[0].layer[0].SelfAttention
            x = torch.randn(2, 6, 16)
            with torch.no_grad():
                self.assertGreater((attention(x)[0] - attention(x)[0]).abs().max(), 1e-4)


class ShiftTest(ModelTest):
    def test_shift_right_is_t5s(self):
        labels = torch.tensor([[5, 6, 1, -100], [7, 1, -100, -100]])
        self.assertEqual(shift_right(labels, 0, 0).tolist(), [[0, 5, 6, 1], [0, 7, 1, 0]])
        model = self.tiny()
        model.config.decoder_start_token_id, model.config.pad_token_id = 3, 4
        torch.testing.assert_close(shift_right(labels, 3, 4), model._shift_right(labels))
        self.assertEqual(labels[0, 3], -100)  # the argument is left alone


class SearchSettingsTest(parameterized.TestCase):
    @parameterized.product(
        rules=[
            dict(early_stopping=True, length_penalty=2.0),  # of beams, and there are none
            dict(temperature=0.7, top_p=0.9, min_p=0.1),
            dict(do_sample=True, num_return_sequences=3, typical_p=0.9),
        ],
        place=["generation_config.json", "config.json"],
        fine_tunes=[True, False],
    )
    def test_a_model_with_settings_without_effect_can_be_saved(self, rules, place, fine_tunes):
        """transformers refuses to save them once anything is changed, as the length of answers is."""
        args = ModelArguments(model_name_or_path=str(self.folder / "own"))
        create_model(build_config("tiny", 64, TINY)).save_pretrained(args.model_name_or_path)
        path = self.folder / "own" / place
        own = json.loads(path.read_text()) | rules
        path.write_text(
            json.dumps({name: value for name, value in own.items() if fine_tunes or name != "eos_token_id"})
        )
        if place == "config.json":
            (self.folder / "own" / "generation_config.json").unlink()
        model, _ = get_model(args, make_tokenizer(64))
        if fine_tunes:
            forget_search(model, greedy=False)
            set_generation_length(model, 9)
        model.save_pretrained(self.folder / "new")
        saved = json.loads((self.folder / "new" / "generation_config.json").read_text())
        self.assertEqual(saved["eos_token_id"], 1)
        self.assertNoCommonElements(saved, [] if "do_sample" in saved else rules)

    @parameterized.parameters(
        dict(forced_bos_token_id=9),
        dict(forced_eos_token_id=9),
        dict(suppress_tokens=[9]),
        dict(begin_suppress_tokens=[9]),
        dict(bad_words_ids=[[9]]),
        dict(sequence_bias=[[[9], 2.0]]),
        dict(exponential_decay_length_penalty=[1, 2.0]),
    )
    def test_rules_about_tokens_do_not_outlive_fine_tuning(self, **rules):
        """The new targets may lack a token that they force, or have one that they forbid."""
        model = create_model(build_config("tiny", 64, TINY))
        model.generation_config.update(num_beams=2, **rules)
        model.save_pretrained(self.folder / "own")
        model = load_model(str(self.folder / "own"))
        self.assertContainsSubset(rules, model.generation_config.to_dict())
        forget_search(model, greedy=False)
        model.save_pretrained(self.folder / "new")
        saved = json.loads((self.folder / "new" / "generation_config.json").read_text())
        self.assertNoCommonElements(saved, rules)
        self.assertEqual(saved["num_beams"], 2)
