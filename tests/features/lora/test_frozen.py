"""Frozen weights in bfloat16, int8 and nf4: what stays equal to the bit, what they take, and what is refused.

The reference of bfloat16 is the same model in float32 under autocast; of int8 and nf4 it is a float32 model that has
the dequantised matrices: nf4's from bitsandbytes' own quantisation, int8's by its definition.
"""

import copy

import bitsandbytes
import torch
from absl.testing import parameterized
from zoo import FAMILIES, GEMMA, write_checkpoint

from features.lora.frozen import freeze
from features.lora.low_rank import add_low_rank
from foundry.model_t5 import count_parameters, load_model
from foundry.modeling.families import is_tied, output_head
from foundry.modeling.layers import checkpoint_blocks_only
from foundry.modeling.loss import compute_loss_in_forward
from foundry.modeling.weight_formats import WEIGHT_FORMATS, frozen_layers, weight_bytes

LOW = WEIGHT_FORMATS[1:]


def dequantised(matrix: torch.Tensor, weight_format: str) -> torch.Tensor:
    """What a quantised matrix stands for, in float32."""
    if weight_format == "nf4":
        functional = bitsandbytes.functional
        held, state = functional.quantize_4bit(matrix, compress_statistics=True, quant_type="nf4")
        return functional.dequantize_4bit(held, state)
    scale = matrix.abs().max(dim=1, keepdim=True).values / 127
    return torch.round(matrix / scale).clamp(-127, 127) * scale


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(20, 60, size, generator=generator) for size in ((3, 18), (3, 7)))
    labels[0, 5:] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def trained(model, steps: int = 1, bf16: bool = True) -> tuple[list[float], dict[str, torch.Tensor], dict]:
    """(losses, gradients of the last step, trained weights) of some steps of AdamW on one batch."""
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer, losses, gradients = torch.optim.AdamW(weights.values(), lr=1e-2), [], {}
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(**batch())["loss"]
        loss.backward()
        losses.append(loss.item())
        gradients = {name: p.grad.clone() for name, p in weights.items()}
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, {name: p.detach().clone() for name, p in weights.items()}


class FrozenTest(parameterized.TestCase):
    def model(self, family: str, rank: int = 4):
        """A checkpoint of the family with LoRA whose B has left 0, the same in each call."""
        folder = self.folder / family
        if not folder.exists():
            write_checkpoint(folder, family)
        model = load_model(str(folder))
        torch.manual_seed(1)
        add_low_rank(model, rank, str(folder))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        return model

    def reference(self, family: str, weight_format: str, left_out: str = "no name"):
        model = self.model(family)
        for name, layer in frozen_layers(model).items():
            if weight_format != "bfloat16" and layer is not output_head(model) and left_out not in name:
                layer.weight.data = dequantised(layer.weight.data, weight_format)
        return model

    def frozen(self, family: str, weight_format: str, **how):
        model = self.model(family)
        freeze(model, weight_format, **how)
        return model

    def assert_same_training(self, found, wanted, **how):
        (losses, gradients, weights), expected = trained(found, **how), trained(wanted, **how)
        self.assertEqual(losses, expected[0])
        for kind, tensors, others in (("gradient", gradients, expected[1]), ("weight", weights, expected[2])):
            self.assertEqual(tensors.keys(), others.keys())
            for name, tensor in tensors.items():
                self.assertEqual(tensor.dtype, torch.float32)
                self.assertTrue(torch.equal(tensor, others[name]), f"{kind} {name}")

    @parameterized.product(family=FAMILIES, weight_format=LOW)
    def test_loss_gradients_and_trained_matrices_keep_their_bits(self, family, weight_format):
        found, wanted = self.frozen(family, weight_format), self.reference(family, weight_format)
        for model in (found, wanted):
            compute_loss_in_forward(model)
        self.assert_same_training(found, wanted, steps=3)

    @parameterized.product(weight_format=LOW, how=("chunked", "checkpointed"))
    def test_also_chunked_and_checkpointed(self, weight_format, how):
        found, wanted = self.frozen("t5_v1_1", weight_format), self.reference("t5_v1_1", weight_format)
        for model in (found, wanted):
            compute_loss_in_forward(model, chunk=4 if how == "chunked" else 0)
            if how == "checkpointed":
                model.gradient_checkpointing_enable({"use_reentrant": False})
                checkpoint_blocks_only(model)
        self.assert_same_training(found, wanted, steps=3)

    @parameterized.parameters("int8", "nf4")
    def test_in_float32_too(self, weight_format):
        found, wanted = self.frozen("flan_t5", weight_format, bf16=False), self.reference("flan_t5", weight_format)
        for model in (found, wanted):
            compute_loss_in_forward(model)
        self.assert_same_training(found, wanted, steps=2, bf16=False)

    @parameterized.parameters("int8", "nf4")
    def test_compiled(self, weight_format):
        found, wanted = self.frozen("t5_v1_1", weight_format), self.reference("t5_v1_1", weight_format)
        torch._dynamo.reset()
        compute_loss_in_forward(found, compile_options={"backend": "aot_eager"})
        compute_loss_in_forward(wanted)
        losses, gradients, _ = trained(found)
        expected = trained(wanted)
        self.assertAlmostEqual(losses[0], expected[0][0], places=4)
        for name, tensor in gradients.items():
            torch.testing.assert_close(tensor, expected[1][name], rtol=0.05, atol=1e-3, msg=name)

    @parameterized.product(family=[family for family in FAMILIES if family not in GEMMA], weight_format=("int8", "nf4"))
    def test_a_quantised_wo_costs_little(self, family, weight_format):
        """T5's forward pass casts the input of `wo` to its weight's type: as uint8, the loss was another without an
        error."""
        models = self.frozen(family, weight_format), self.reference(family, weight_format, left_out="wo")
        for model in models:
            compute_loss_in_forward(model)
        found, wanted = (trained(model)[0][0] for model in models)
        self.assertNotEqual(found, wanted)
        self.assertLess(abs(found / wanted - 1), 0.01)

    @parameterized.product(family=("t5_v1_0", "t5_v1_1", *GEMMA), weight_format=WEIGHT_FORMATS)
    def test_what_the_plan_counts_is_what_the_weights_take(self, family, weight_format):
        plain, model = self.model(family), self.model(family)
        if weight_format != "float32":
            freeze(model, weight_format)
        held = 0
        for parameter in model.parameters():
            state = getattr(parameter, "quant_state", None)
            held += parameter.nbytes + (state.absmax.nbytes + state.state2.absmax.nbytes if state else 0)
        held += sum(buffer.nbytes for name, buffer in model.named_buffers() if name.endswith(".scale"))
        for one in (plain, model):
            self.assertEqual(weight_bytes(one, weight_format), held)
            self.assertEqual(count_parameters(one), count_parameters(plain))
        learning = 4 * count_parameters(model, trained_only=True)
        self.assertEqual(weight_bytes(model, weight_format, trained=False), held - learning)

    @parameterized.parameters(*FAMILIES)
    def test_what_stays_in_float32(self, family):
        model = self.frozen(family, "nf4")
        for name, parameter in model.named_parameters():
            kind = torch.float32 if "lora_" in name or parameter.dim() == 1 or "embed" in name else None
            if "relative_attention_bias" in name or "shared" in name:
                kind = torch.float32
            self.assertIn(parameter.dtype, {kind} if kind else {torch.float32, torch.int8, torch.bfloat16})
        head = output_head(model).weight
        self.assertEqual(head.dtype, torch.float32 if is_tied(model) else torch.bfloat16)

    def test_a_cast_of_the_model_leaves_quantised_weights(self):
        model = self.frozen("t5_v1_1", "nf4")
        compute_loss_in_forward(model)
        wanted = trained(copy.deepcopy(model))[0]
        model.float()
        self.assertEqual(trained(model)[0], wanted)
