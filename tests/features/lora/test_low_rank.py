"""LoRA: what is trained and saved, that merging changes nothing, and folders that cannot be merged."""

import contextlib
import io
import json
import os
import shutil

import torch
from absl.testing import parameterized
from helpers import SHAPE, run_main
from peft import AutoPeftModelForSeq2SeqLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM
from zoo import FAMILIES, write_checkpoint

import predict_t5
from constants import LORA, OPTIMIZERS
from features.lora import LowRank
from features.lora.low_rank import add_low_rank, base_of, low_rank_state
from foundry.arguments.model import ModelArguments
from foundry.arguments.training import FineTuningArguments, check_training, decide_features
from foundry.common.errors import UserError
from foundry.corpora.tokenizers import load_tokenizer
from foundry.features import Features
from foundry.model_t5 import (
    build_config,
    count_parameters,
    create_model,
    get_model,
    load_ensemble,
    load_model,
    planned_model,
)
from foundry.training.optimizers import optimizer_class_and_kwargs
from foundry.training.saving import load_weights

IDS = torch.tensor([[5, 6, 7, 8, 1]])


class Tokenizer:
    """As many tokens as the models here have rows."""

    def get_vocab(self):
        return {f"w{number}": number for number in range(64)}


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, decoder_input_ids=IDS).logits


class LowRankTest(parameterized.TestCase):
    def base(self, **changes) -> str:
        torch.manual_seed(0)
        model = create_model(build_config("tiny", 64, SHAPE | changes))
        model.save_pretrained(self.folder / "base")
        return str(self.folder / "base")

    def trained(self, base: str, rank: int = 4):
        """A model whose matrices B have left 0."""
        model = load_model(base)
        add_low_rank(model, rank, base)
        torch.manual_seed(1)
        for name, tensor in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(tensor, std=0.1)
        return model

    @parameterized.parameters({}, dict(feed_forward_proj="relu", tie_word_embeddings=True))
    def test_saved_small_and_merged_to_the_same_model(self, **changes):
        base = self.base(**changes)
        model, plain = self.trained(base), load_model(base)
        wanted = logits_of(model)
        self.assertGreater((wanted - logits_of(plain)).abs().max(), 0.01)
        model.save_pretrained(self.folder / "lora")
        names = {path.name for path in (self.folder / "lora").iterdir()}
        self.assertContainsSubset({"adapter_model.safetensors", "adapter_config.json"}, names)
        self.assertTrue(names.isdisjoint({"model.safetensors", "config.json"}))
        saved = load_file(self.folder / "lora/adapter_model.safetensors")
        self.assertEqual(sum(t.numel() for t in saved.values()), count_parameters(model, trained_only=True))
        again = load_model(str(self.folder / "lora"))
        torch.testing.assert_close(logits_of(again), wanted, rtol=1e-4, atol=1e-5)
        self.assertEqual(again.state_dict().keys(), plain.state_dict().keys())
        self.assertEqual(count_parameters(again, trained_only=True), count_parameters(plain))  # peft freezes them
        by_peft = PeftModel.from_pretrained(AutoModelForSeq2SeqLM.from_pretrained(base), self.folder / "lora")
        by_peft.base_model.model.lm_head.weight = plain.lm_head.weight  # which transformers would tie
        torch.testing.assert_close(logits_of(by_peft), wanted, rtol=1e-4, atol=1e-5)

    def test_plain_transformers_and_peft_load_the_folder(self):
        """Beside a config.json transformers would look for a whole model. T5 v1.0: its head is tied in transformers
        too."""
        base = self.base(scale_decoder_outputs=True, feed_forward_proj="relu")
        model = self.trained(base)
        wanted = logits_of(model)
        model.save_pretrained(self.folder / "lora")
        for loader in (AutoModelForSeq2SeqLM, AutoPeftModelForSeq2SeqLM):
            found = loader.from_pretrained(str(self.folder / "lora"))
            torch.testing.assert_close(logits_of(found), wanted, rtol=1e-4, atol=1e-5, msg=loader.__name__)

    def test_a_folder_of_matrices_in_an_ensemble(self):
        base, folder = self.base(), str(self.folder / "lora")
        self.trained(base).save_pretrained(folder)
        joined = load_ensemble([folder, base], None, Features(), torch.device("cpu"), bf16=False)
        mean = (logits_of(load_model(folder)).softmax(-1) + logits_of(load_model(base)).softmax(-1)) / 2
        torch.testing.assert_close(logits_of(joined), mean.log())

    def test_the_base_is_found_from_another_directory(self):
        base = self.base()
        with contextlib.chdir(self.folder):
            model = load_model("base")
            add_low_rank(model, 4, "base")
            model.save_pretrained("lora")
        self.assertEqual(base_of(self.folder / "lora"), base)
        self.assertEqual(load_model(str(self.folder / "lora")).config.d_model, SHAPE["d_model"])
        add_low_rank(named := load_model(base), 4, "google/t5-v1_1-base")
        self.assertEqual(named.peft_config["default"].base_model_name_or_path, "google/t5-v1_1-base")

    def test_settings_of_generate_are_the_folder_s(self):
        model = self.trained(self.base())
        model.generation_config.max_length = 77
        model.save_pretrained(self.folder / "lora")
        self.assertEqual(load_model(str(self.folder / "lora")).generation_config.max_length, 77)

    def test_a_whole_model_in_the_same_folder_is_not_read_and_named(self):
        self.trained(self.base()).save_pretrained(self.folder / "lora")
        shutil.copy(self.folder / "base" / "model.safetensors", self.folder / "lora")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            load_model(str(self.folder / "lora"))
        line = "lora: the weights are read from adapter_model.safetensors, and not from model.safetensors"
        self.assertIn(line, printed.getvalue())

    @parameterized.parameters("t5gemma", "t5gemma2")
    def test_merged_and_saved_with_a_tied_head_that_is_no_t5s(self, family):
        """Its head has the name of a layer of T5Gemma 2's picture encoder, which is not trained."""
        base = self.folder / "base"
        write_checkpoint(base, family)
        model = self.trained(str(base))
        wanted = logits_of(model)
        model.save_pretrained(self.folder / "lora")
        saved = load_file(self.folder / "lora/adapter_model.safetensors")
        self.assertEmpty([name for name in saved if "vision" in name or "lm_head" in name])
        again = load_model(str(self.folder / "lora"))
        torch.testing.assert_close(logits_of(again), wanted, rtol=1e-4, atol=1e-5)
        again.save_pretrained(self.folder / "whole")
        whole = load_model(str(self.folder / "whole"))
        torch.testing.assert_close(logits_of(whole), wanted, rtol=1e-4, atol=1e-5)
        self.assertEqual(count_parameters(again, trained_only=True), count_parameters(whole, trained_only=True))

    def test_only_the_matrices_learn(self):
        model = self.trained(self.base())
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        self.assertTrue(all(".lora_" in name for name in trained))
        layers = {name.split(".lora_")[0].rpartition(".")[2] for name in trained}
        self.assertEqual(layers, {"q", "k", "v", "o", "wi_0", "wi_1", "wo"})
        rank, width, inner = 4, SHAPE["d_model"], SHAPE["num_heads"] * SHAPE["d_kv"]
        attentions, feed_forwards = 3 * 4 * rank * (width + inner), 2 * 3 * rank * (width + SHAPE["d_ff"])
        self.assertEqual(count_parameters(model, trained_only=True), attentions + feed_forwards)
        model.train()(input_ids=IDS, labels=IDS).loss.backward()
        self.assertEqual({name for name, p in model.named_parameters() if p.grad is not None}, trained)

    def test_matrices_on_matrices(self):
        """A folder of matrices is a checkpoint like any other, also for further matrices."""
        base = self.base()
        self.trained(base).save_pretrained(self.folder / "one")
        second = self.trained(str(self.folder / "one"), rank=2)
        wanted = logits_of(second)
        second.save_pretrained(self.folder / "two")
        torch.testing.assert_close(logits_of(load_model(str(self.folder / "two"))), wanted, rtol=1e-4, atol=1e-5)

    def test_a_checkpoint_of_the_same_run(self):
        base = self.base()
        model = self.trained(base)
        model.save_pretrained(self.folder / "lora")
        other = load_model(base)
        add_low_rank(other, 4, base)
        load_weights(other, self.folder / "lora")
        self.assertTrue(torch.equal(logits_of(other), logits_of(model)))
        fewer = create_model(build_config("tiny", 64, SHAPE | dict(num_layers=2)))
        add_low_rank(fewer, 4, base)
        fewer.base_checksum = model.base_checksum
        with self.assertRaisesRegex(ValueError, "its 36 LoRA matrices are not the 50 of this model"):
            low_rank_state(fewer, self.folder / "lora")

    @parameterized.parameters("lm_head", "shared")
    def test_matrices_of_a_weight_that_two_layers_share(self, layer):
        """T5 v1.0's head is the embedding: merged, the head's matrices changed that too, and logits by 0.5."""
        base = self.base(feed_forward_proj="relu", tie_word_embeddings=True)
        config = LoraConfig(r=4, target_modules=["q", layer], task_type="SEQ_2_SEQ_LM")
        get_peft_model(AutoModelForSeq2SeqLM.from_pretrained(base), config).save_pretrained(self.folder / "lora")
        with self.assertRaisesRegex(ValueError, f"do not fit what .*{layer} shares its weights with another layer"):
            load_model(str(self.folder / "lora"))

    @parameterized.parameters(
        lambda name: name.replace("base_model.model.", "base_model.model._orig_mod."),
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module.{name}",
        lambda name: name.replace("encoder.block.0.", "encoder.block.0._orig_mod."),
        lambda name: name.removeprefix("base_model.model."),
        lambda name: f"base_model.model.{name}",
    )
    def test_names_that_wrappers_of_the_model_have_changed(self, rename):
        """With names that fit nothing peft loaded no matrix, and the base answered in their place."""
        model = self.trained(self.base())
        model.save_pretrained(self.folder / "lora")
        self.rename(rename)
        found = logits_of(load_model(str(self.folder / "lora")))
        torch.testing.assert_close(found, logits_of(model), rtol=1e-4, atol=1e-5)

    def rename(self, rename) -> None:
        """Gives the tensors of the adapter other names; those without a name are dropped."""
        path = self.folder / "lora/adapter_model.safetensors"
        save_file({new: t for name, t in load_file(path).items() if (new := rename(name))}, path, {"format": "pt"})

    @parameterized.parameters(
        (
            lambda n: n.replace("model.encoder", "model.transformer.encoder"),
            r"lacks: 14 tensors, .*, unknown to the model: 14 ",
        ),
        (lambda name: name if "encoder" in name else None, r"the file lacks: 22 tensors, base_model.model.decoder"),
        (
            lambda name: name.replace(".lora_A.", ".lora_X."),
            r"lacks: 18 tensors.* and the file has, unknown to the model: 18",
        ),
    )
    def test_matrices_of_another_kind_of_model(self, rename, message):
        """Of T5ForSequenceClassification, of T5EncoderModel: the matrices that had no place were left out."""
        self.trained(self.base()).save_pretrained(self.folder / "lora")
        self.rename(rename)
        with self.assertRaisesRegex(UserError, f"adapter_model.safetensors is of another kind.*{message}"):
            load_model(str(self.folder / "lora"))

    def test_a_layer_saved_whole_that_the_file_lacks(self):
        base = self.base()
        config = LoraConfig(r=4, target_modules=["q"], modules_to_save=["lm_head"], task_type="SEQ_2_SEQ_LM")
        get_peft_model(load_model(base), config).save_pretrained(self.folder / "lora")
        load_model(str(self.folder / "lora"))
        self.rename(lambda name: name if ".lora_" in name else None)
        with self.assertRaisesRegex(UserError, "the file lacks: 1 tensors, .*lm_head"):
            load_model(str(self.folder / "lora"))

    def test_folders_that_cannot_be_merged(self):
        self.trained(self.base()).save_pretrained(self.folder / "lora")
        lora, base = self.folder / "lora", self.folder / "base"
        base.rename(self.folder / "elsewhere")
        with self.assertRaisesRegex(ValueError, "lora: its LoRA matrices belong to .*base, not a folder or Hub"):
            load_model(str(lora))
        (self.folder / "elsewhere").rename(base)
        config = json.loads((lora / "adapter_config.json").read_text())
        (lora / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "PROMPT_TUNING"}))
        with self.assertRaisesRegex(ValueError, "an adapter .PROMPT_TUNING, made from .*base. that cannot be merged"):
            load_model(str(lora))
        (lora / "adapter_config.json").write_text("{")
        with self.assertRaisesRegex(ValueError, "its adapter_config.json cannot be read"):
            load_model(str(lora))
        (lora / "adapter_config.json").write_text(json.dumps(config))
        retrained = load_model(str(base))
        with torch.no_grad():
            retrained.encoder.final_layer_norm.weight.mul_(1.01)
        retrained.save_pretrained(base)
        with self.assertRaisesRegex(ValueError, "its LoRA matrices were trained with other base weights"):
            load_model(str(lora))
        with self.assertRaisesRegex(ValueError, "its LoRA matrices were trained with other base weights"):
            load_weights(self.trained(str(base)), lora)
        other = create_model(build_config("tiny", 64, SHAPE | dict(d_ff=64)))
        shutil.rmtree(base)
        other.save_pretrained(base)
        with self.assertRaisesRegex(ValueError, "lora: its LoRA matrices belong to .*base, and do not fit what"):
            load_model(str(lora))

    @parameterized.parameters(
        dict(target_modules="("), dict(target_modules=5), dict(r="x"), dict(lora_alpha="x"), dict(rank_pattern={"(": 4})
    )
    def test_settings_that_no_adapter_has(self, **changes):
        self.trained(self.base()).save_pretrained(self.folder / "lora")
        path = self.folder / "lora" / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        with self.assertRaisesRegex(UserError, "lora: its LoRA matrices belong to .*base, and do not fit what"):
            load_model(str(self.folder / "lora"))

    @parameterized.parameters(
        (dict(target_modules="(?:(?:[a-zA-Z0-9._]+)+)+!"), None),  # a pattern: the layers of the file are taken
        (dict(rank_pattern={"(.+)+(.+)+!": 4}), "adapter_config.json has the pattern '.*only names of layers are read"),
        (dict(alpha_pattern={"(.+)+(.+)+!": 4}), "only names of layers are read"),
        (dict(exclude_modules="(.+)+(.+)+!"), "only names of layers are read"),
        (dict(layers_to_transform=[0], layers_pattern="(.+)+(.+)+!"), "only names of layers are read"),
        (dict(r=10**6), "has the rank 1000000, and the matrices of adapter_model.safetensors at most 4"),
        (dict(rank_pattern={"q": 10**6}), "has the rank 1000000"),
        (dict(layer_replication=[[0, 10**6]]), "has a layer_replication"),
    )
    def test_settings_that_would_take_forever(self, changes, message):
        trained = self.trained(self.base())
        trained.save_pretrained(self.folder / "lora")
        path = self.folder / "lora" / "adapter_config.json"
        rows = dict(input_ids=torch.tensor([[5, 6, 1]]), labels=torch.tensor([[7, 1]]))
        before = load_model(str(self.folder / "lora"))(**rows).loss
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        if message:
            with self.assertRaisesRegex(UserError, message):
                load_model(str(self.folder / "lora"))
        else:
            self.assertEqual(load_model(str(self.folder / "lora"))(**rows).loss, before)

    @parameterized.parameters((os.mkfifo,), (lambda path: path.symlink_to("/dev/zero"),))
    def test_settings_that_are_no_file(self, make):
        make(self.folder / "adapter_config.json")
        with self.assertRaisesRegex(UserError, "no regular file|cannot be read"):
            base_of(str(self.folder))

    @parameterized.parameters(["a"], ["a", "b"], ["a", "b", "c"])
    def test_an_adapter_that_is_its_own_base(self, *names):
        folders = [self.folder / name for name in names]
        for folder, base in zip(folders, [*folders[1:], folders[0]], strict=True):
            folder.mkdir()
            config = dict(peft_type="LORA", base_model_name_or_path=str(base))
            (folder / "adapter_config.json").write_text(json.dumps(config))
            (folder / "adapter_model.safetensors").write_bytes(b"")
        (self.folder / "in.txt").write_text("a\n")
        for load in (load_tokenizer, load_model):
            with self.assertRaisesRegex(UserError, "adapter_config.json.* names .*, its own base"):
                load(str(folders[0]))
        flags = ["--model_name_or_path", folders[0], "--input_file", self.folder / "in.txt", "--use_cpu"]
        self.assertIn("its own base", run_main(predict_t5.main, *flags, code=2)[2])


class FlagsTest(parameterized.TestCase):
    def training(self, **flags) -> FineTuningArguments:
        return FineTuningArguments(output_dir=str(self.folder / "out"), report_to=["none"], use_cpu=True, **flags)

    @parameterized.parameters(*OPTIMIZERS)
    def test_every_optimizer_takes_the_matrices(self, optim):
        base = create_model(build_config("tiny", 64, SHAPE))
        add_low_rank(base, 2, "base")
        args = self.training(optim=optim)
        check_training(args, f"fine-tuning a checkpoint{LORA}")
        made = optimizer_class_and_kwargs(args, base)
        if made is None:
            return
        trained = [p for p in base.parameters() if p.requires_grad]
        optimizer = made[0](trained, **made[1])
        before = [p.detach().clone() for p in trained]
        for _ in range(2):  # B leaves 0 in the first step, and A has a gradient in the second
            base(input_ids=IDS, labels=IDS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        for p, was in zip(trained, before, strict=True):
            self.assertTrue(p.isfinite().all())
            self.assertFalse(torch.equal(p, was))

    def test_defaults(self):
        args = self.training()
        check_training(args, f"fine-tuning a checkpoint{LORA}")
        self.assertEqual((args.optim, args.learning_rate, args.lr_scheduler_type), ("adamw_torch", 1e-3, "constant"))

    def test_refusals(self):
        create_model(build_config("tiny", 64, SHAPE)).save_pretrained(self.folder / "base")
        features = Features([LowRank(lora_rank=4)])
        args = self.training().replaced(features=features)
        with self.assertRaisesRegex(ValueError, "--lora_rank: adapts a checkpoint, and none is named"):
            decide_features(args, ModelArguments(config_name="tiny"))
        decide_features(args, ModelArguments(model_name_or_path="somewhere"))
        model, _ = get_model(ModelArguments(model_name_or_path=str(self.folder / "base")), Tokenizer(), None, features)
        self.assertEqual(model.peft_config["default"].r, 4)

    @parameterized.parameters(
        (dict(), None),
        (dict(lora_rank=4, load_in_4bit=True), None),
        (dict(dtype="float32"), "--dtype float32: is for weights that are not trained: add --lora_rank 16"),
        (dict(load_in_8bit=True), "--load_in_8bit True: is for weights that are not trained"),
        (dict(lora_rank=4, load_in_8bit=True, load_in_4bit=True), "--load_in_4bit True: --load_in_8bit holds the same"),
        (dict(lora_rank=4, load_in_8bit=True, dtype="bfloat16"), "--dtype bfloat16: --load_in_8bit holds the same"),
    )
    def test_a_form_that_is_given_as_false_asks_for_none(self, flags, message):
        """A sweep gives --load_in_8bit false beside --load_in_4bit true."""
        given = frozenset({"load_in_4bit", "load_in_8bit", *flags})
        args = self.training().replaced(features=Features([LowRank(**flags)]), given=given)
        expected = self.assertRaisesRegex(UserError, message) if message else contextlib.nullcontext()
        with expected:
            decide_features(args, ModelArguments(model_name_or_path="somewhere"))

    @parameterized.parameters(*(name for name in FAMILIES if "longt5" not in name))  # which has no tokenizer there
    def test_the_planned_model_is_the_one_that_is_built(self, family):
        write_checkpoint(self.folder / "model", family)
        tokenizer = load_tokenizer(str(self.folder / "model"))
        args, features = ModelArguments(model_name_or_path=str(self.folder / "model")), Features([LowRank(lora_rank=2)])
        planned, (model, _) = planned_model(args, tokenizer, None, features), get_model(args, tokenizer, None, features)
        shapes = [
            {name: tuple(p.shape) for name, p in each.named_parameters() if p.requires_grad}
            for each in (planned, model)
        ]
        self.assertEqual(*shapes)
        self.assertEqual({p.device.type for p in planned.parameters()}, {"meta"})
