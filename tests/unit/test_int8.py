"""foundry/modeling/int8.py: products are those worked out in whole numbers, and answers those of `generate`."""

import copy
import json
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import test_ensemble
import torch
import zoo
from absl.testing import parameterized
from helpers import run_main
from safetensors.torch import load_file, save_file
from test_decoding import BEAMS, WRITTEN_OUT, found, generated, made_model, made_sources
from test_server import served

import evaluate_t5
import export_checkpoint
import predict_t5
from features.lora.low_rank import add_low_rank
from foundry.corpora.tokenizers import load_tokenizer
from foundry.model_t5 import load_model
from foundry.modeling import int8
from foundry.modeling.found_answers import AnswerFinder
from foundry.modeling.int8 import Int8Linear, Int8Matrices, multiply_in_int8, rounded_matrix


def setUpModule():
    if not int8.multiplies_int8(torch.device("cpu")):
        raise unittest.SkipTest("this CPU has no AVX2")


def layer_of(matrix: torch.Tensor) -> Int8Linear:
    layer = Int8Linear(*matrix.T.shape, bias=False, device="meta")
    layer.hold(matrix)
    return layer


def made_int8(family: str, **changes):
    model = made_model(family, **changes)
    multiply_in_int8(model)
    return model


STEPS = (63, 127) if int8.multiplies_int8(torch.device("cpu")) and int8.input_steps() == 127 else (63,)


class ProductsTest(parameterized.TestCase):
    def steps(self, steps: int) -> None:
        self.enter_context(mock.patch.object(int8, "input_steps", lambda: steps))

    @parameterized.parameters(STEPS)
    def test_by_hand(self, steps):
        """The largest number of each row is 127 steps, of an input perhaps 63; half of it are 63.5, which become 64, or
        31.5, which become 32."""
        self.steps(steps)
        layer = layer_of(torch.tensor([[127.0, -63.5, 0.0], [0.0, 0.0, 0.0], [0.25, 1.0, -127.0]]))
        self.assertEqual(layer.weight.tolist(), [[127, -64, 0], [0, 0, 0], [0, 1, -127]])
        x = torch.tensor([[1.0, 0.5, -0.5], [0.0, 0.0, 0.0], [0.0, 0.0, 254.0]])
        half = {127: 64, 63: 32}[steps]
        rounded = torch.tensor([[steps, half, -half], [0, 0, 0], [0, 0, steps]])
        scales = torch.tensor([[1 / steps], [0.0], [254 / steps]])
        torch.testing.assert_close(layer(x), (rounded @ layer.weight.long().T) * scales * torch.tensor([1.0, 0.0, 1.0]))

    @parameterized.parameters(STEPS)
    def test_sums_that_are_as_large_as_they_can_be(self, steps):
        """A CPU without AVX512-VNNI adds two products in 16 bits, whose largest number is 32,767."""
        self.steps(steps)
        for sign in (1, -1):
            layer = layer_of(torch.full((40, 512), 127.0 * sign))
            for x in (torch.full((3, 512), 5.0), torch.full((3, 512), -5.0)):
                (found,) = Int8Matrices([layer])(x)
                torch.testing.assert_close(found, x @ layer.weight.float().T)

    @parameterized.parameters((64 * 127 * 127, 127), (64 * 32767 / 2, 63))
    def test_inputs_have_127_steps_where_sums_do_not_overflow(self, found, steps):
        with mock.patch.object(int8, "product", lambda *_: torch.tensor([[float(found)]])):
            self.assertEqual(int8.input_steps.__wrapped__(), steps)

    @parameterized.product(rows=(1, 2, 33), steps=STEPS)
    def test_joined_and_packed_they_have_the_same_bits_for_any_rows(self, rows, steps):
        self.steps(steps)
        torch.manual_seed(0)
        x, layers = torch.randn(rows, 3, 40), [layer_of(torch.randn(size, 40)) for size in (7, 64, 24)]
        for layer, product in zip(layers, Int8Matrices(layers)(x), strict=True):
            exact = (x.double() / x.abs().amax(-1, keepdim=True) * steps + 0.5).floor() @ layer.weight.double().T
            exact *= x.abs().amax(-1, keepdim=True) / steps * layer.weight_scale
            torch.testing.assert_close(product.double(), exact, rtol=1e-4, atol=1e-2)
            self.assertTrue(torch.equal(product, layer(x)))
            (last,) = Int8Matrices([layer])(x[-1:, -1:])  # one row, which is scaled by the kernel
            torch.testing.assert_close(product[-1:, -1:], last, rtol=1e-6, atol=1e-5)

    def test_a_rounded_matrix_is_rounded_to_itself(self):
        torch.manual_seed(0)
        matrix = torch.randn(300, 50) * torch.rand(300, 1).exp()
        rounded, scales = rounded_matrix(matrix)
        again, scales_again = rounded_matrix(rounded * scales[:, None])
        self.assertTrue(torch.equal(rounded, again) and torch.equal(scales, scales_again))
        torch.testing.assert_close(rounded * scales[:, None], matrix, rtol=0, atol=0.51 * scales.max().item())


class AnswersTest(parameterized.TestCase):
    @parameterized.product(family=WRITTEN_OUT, plain=(False, True))
    def test_those_of_generate(self, family, plain):
        """Of models with a head of their own, and with the embedding as head. With 127 steps of inputs beams may
        change places: where numbers are added in another order, one between two steps may be rounded to either."""
        model, sources = made_int8(family, plain=plain), made_sources(9)
        for search in (dict(), BEAMS):
            wanted = generated(model, sources, max_new_tokens=12, **search)
            for slots in (1, 4):
                got = [answer.tokens for answer in found(model, sources, slots, **search)]
                others = sum(one != other for one, other in zip(got, wanted, strict=True))
                self.assertLessEqual(others, 2 if search and int8.input_steps() < 127 else 0)
        self.assertIsNone(AnswerFinder(model, 4).model_unsupported)

    def test_embeddings_and_norms_stay_as_they_are(self):
        model = made_model(plain=True)
        before = copy.deepcopy(model.state_dict())
        multiply_in_int8(model)
        for name, tensor in model.state_dict().items():
            if name.endswith((".weight_scale", "lm_head.weight")) or tensor.dtype == torch.int8:
                continue
            self.assertTrue(torch.equal(tensor, before[name]), name)
        self.assertEqual(model.lm_head.weight.dtype, torch.int8)


class ScriptsTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
        self.one, self.two = test_ensemble.folders()

    def predict(self, *flags, code: int | None = None) -> tuple[str, str]:
        """(the answers, what was printed)."""
        (self.folder / "in.txt").write_text("\n".join(test_ensemble.LINES))
        output = self.folder / "answers.jsonl"
        argv = ["--input_file", self.folder / "in.txt", "--output_file", output, "--max_new_tokens", 6, "--use_cpu"]
        _, printed, error = run_main(predict_t5.main, *argv, *flags, code=code)
        return output.read_text() if output.exists() else "", printed + error

    @parameterized.named_parameters(("one", 1), ("ensemble", 2))
    def test_the_plan_and_v1_models_tell(self, count):
        models = ("--model_name_or_path", self.one, self.two)[: 1 + count]
        answers, printed = self.predict(*models, "--int8")
        self.assertRegex(printed, f"products +int8, .* {2 * int8.input_steps() + 1} steps")
        _, error = self.predict(*models, code=2)
        self.assertIn("holds answers with form int8, not", error)
        _, error = self.predict(*models, "--load_in_8bit", code=2)
        self.assertRegex(error, "int8 True, not|held in int8")  # no ensemble is held so
        with served(*models, "--int8") as it:
            (about,) = it.ask("/v1/models")[1]["data"]
            self.assertEqual(about["weights"], "int8")
            texts = [it.texts(prompt=line, max_tokens=6)[0] for line in test_ensemble.LINES]
        for text in texts:
            self.assertIn(text.strip(), answers)

    @parameterized.parameters(
        (["--bf16"], "multiplies in int8"),
        (["--backend", "ctranslate2"], "is PyTorch's"),
    )
    def test_int8_is_refused(self, flags, named):
        _, error = self.predict("--model_name_or_path", self.one, "--int8", *flags, code=2)
        self.assertRegex(error.splitlines()[-1], f"error: --int8 True: {named}")

    @parameterized.parameters((["--load_in_8bit"],), (["--load_in_4bit"],), (["--dtype", "float32"],))
    def test_other_formats_are_refused(self, flags):
        _, error = self.predict("--model_name_or_path", self.one, "--int8", *flags, code=2)
        self.assertRegex(error.splitlines()[-1], f"error: {flags[0]} .*--int8")

    def test_a_family_or_a_machine_without_it(self):
        zoo.write_checkpoint(self.folder / "gemma", "t5gemma")
        _, error = self.predict("--model_name_or_path", self.folder / "gemma", "--int8", code=2)
        self.assertRegex(error.splitlines()[-1], "error: --int8 True: not for t5gemma models")
        with mock.patch.object(int8, "multiplies_int8", lambda _: False):
            _, error = self.predict("--model_name_or_path", self.one, "--int8", code=2)
        self.assertRegex(error.splitlines()[-1], "error: --int8 True: needs a CPU with AVX2")
        with mock.patch("foundry.common.machine.has_accelerator", lambda: True):
            flags = ["--model_name_or_path", self.one, "--int8", "--input_file", self.folder / "in.txt"]
            _, _, error = run_main(predict_t5.main, *flags, code=2)
        self.assertRegex(error.splitlines()[-1], "error: --int8 True: multiplies on a CPU: add --use_cpu")
        flags = ["--model_name_or_path", self.folder / "gemma", "--output_dir", self.folder / "out", "--dtype", "int8"]
        _, _, error = run_main(export_checkpoint.main, *flags, code=2)
        self.assertRegex(error.splitlines()[-1], "error: --dtype int8: not for t5gemma models")

    @parameterized.named_parameters(("own_head", False), ("tied", True))
    def test_a_folder_in_int8_has_the_answers_of_the_checkpoint(self, tied):
        """And in float32 those of its rounded matrices. A tied head stays in float32 in the folder."""
        source = self.one
        if tied:
            zoo.write_tied(source := self.folder / "tied", "t5_v1_0")
        export, again = self.folder / "export", self.folder / "again"
        flags = ["--output_dir", export, "--dtype", "int8", "--model_name_or_path"]
        run_main(export_checkpoint.main, *flags, source)
        tensors = load_file(export / "model.safetensors")
        matrices = [name for name, tensor in tensors.items() if tensor.dtype == torch.int8]
        self.assertEqual("lm_head.weight" in matrices, not tied)
        original, read = load_model(str(source)), load_model(str(export))
        for name in matrices:
            scales = tensors[f"{name}_scale"]
            self.assertTrue(torch.equal(read.get_parameter(name), tensors[name] * scales))
            self.assertLess((read.get_parameter(name) - original.get_parameter(name)).abs().max(), 0.51 * scales.max())
        wanted, _ = self.predict("--model_name_or_path", source, "--int8")
        self.assertEqual(self.predict("--model_name_or_path", export, "--int8", "--overwrite_output_file")[0], wanted)
        run_main(export_checkpoint.main, "--output_dir", again, "--model_name_or_path", export)
        self.assertNotIn("quantization_config", json.loads((again / "config.json").read_text()))
        self.assertEqual(load_file(again / "model.safetensors")[matrices[0]].dtype, torch.float32)

    def test_a_matrix_without_scales_is_refused(self):
        export = self.folder / "export"
        run_main(export_checkpoint.main, "--output_dir", export, "--dtype", "int8", "--model_name_or_path", self.one)
        tensors = load_file(export / "model.safetensors")
        tensors.pop("lm_head.weight_scale")
        save_file(tensors, export / "model.safetensors", {"format": "pt"})
        _, error = self.predict("--model_name_or_path", export, "--int8", code=2)
        self.assertRegex(error.splitlines()[-1], f"error: --model_name_or_path {export}: .*lm_head.weight_scale")

    def test_matrices_of_lora_are_merged_first(self):
        model = load_model(self.one)
        add_low_rank(model, 4, self.one)
        for name, parameter in model.named_parameters():
            if "lora" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        adapter, merged = self.folder / "adapter", self.folder / "merged"
        model.save_pretrained(adapter)
        load_tokenizer(self.one).save_pretrained(adapter)
        run_main(export_checkpoint.main, "--model_name_or_path", adapter, "--output_dir", merged)
        wanted, _ = self.predict("--model_name_or_path", merged, "--int8")
        found, _ = self.predict("--model_name_or_path", adapter, "--int8", "--overwrite_output_file")
        self.assertEqual(found, wanted)
        plain, _ = self.predict("--model_name_or_path", self.one, "--int8", "--overwrite_output_file")
        self.assertNotEqual(found, plain)

    def test_an_evaluation_has_the_answers_of_predict_t5(self):
        """Whose loss is that of the same products."""
        rows = [{"source": line, "target": line} for line in test_ensemble.LINES]
        (self.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        flags = ["--model_name_or_path", self.one, "--validation_file", self.folder / "rows.jsonl", "--use_cpu"]
        flags += ["--source_column", "source", "--target_column", "target", "--predict_with_generate"]
        flags += ["--generation_max_length", 7, "--output_dir", self.folder / "out", "--overwrite_output_dir"]
        whole, _, _ = run_main(evaluate_t5.main, *flags)
        results, printed, _ = run_main(evaluate_t5.main, *flags, "--int8")
        self.assertRegex(printed, f"products +int8, .* {2 * int8.input_steps() + 1} steps")
        self.assertNotEqual(results["eval_loss"], whole["eval_loss"])
        self.assertAlmostEqual(results["eval_loss"], whole["eval_loss"], delta=0.1)
        lines = (self.folder / "out/predictions.jsonl").read_text().splitlines()
        found = [json.loads(line)["prediction"] for line in lines]
        wanted, _ = self.predict("--model_name_or_path", self.one, "--int8")
        self.assertEqual(found, [json.loads(line)["prediction"] for line in wanted.splitlines()])
