"""Tests of foundry/modeling/segment_masks.py: the masks that keep examples of a row apart, and T5X's numbers with them.

A T5 of a few thousand weights, on a CPU.
"""

import torch
import torch.nn.functional as F
from absl.testing import parameterized
from transformers import T5Config

from constants import ATTENTION_IMPLEMENTATIONS
from foundry.model_t5 import create_model
from foundry.modeling.loss import compute_loss_in_forward
from foundry.modeling.segment_masks import enable_packing, segment_mask


class MasksTest(parameterized.TestCase):
    def test_masks(self):
        segments = torch.tensor([[1, 1, 2, 0]])
        low = torch.finfo(torch.float32).min
        both = segment_mask(segments, segments)[0, 0].eq(0).int().tolist()
        self.assertEqual(both, [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
        causal = segment_mask(segments, segments, causal=True)
        self.assertEqual(causal[0, 0].eq(low).int().tolist(), [[0, 1, 1, 1], [0, 0, 1, 1], [1, 1, 0, 1], [1, 1, 1, 0]])
        self.assertEqual(segment_mask(torch.tensor([[1, 2]]), segments, torch.bfloat16).dtype, torch.bfloat16)


# Loss with its z-loss, and norms of the gradients of the encoder's relative biases and of the embedding, from T5X
# cc342d4: its examples/t5/network.py and losses.py (z_loss 1e-4), with the weights, tokens and segments of the test, in
# float32.
T5X = {
    ("v1_1", "padded"): (4.490637779, 0.149025753, 1.030239582),
    ("v1_1", "packed"): (4.101300716, 0.135466442, 0.777859330),
    ("v1_0", "padded"): (3.800577402, 0.045353584, 0.408383697),
    ("v1_0", "packed"): (3.757446766, 0.108069062, 0.615382850),
}


class ReferenceTest(parameterized.TestCase):
    @parameterized.product(version=["v1_0", "v1_1"], rows=["padded", "packed"], attention=ATTENTION_IMPLEMENTATIONS)
    def test_loss_and_gradients_are_t5x_s(self, version, rows, attention):
        own = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False) if version == "v1_1" else {}
        shape = dict(d_model=16, d_kv=4, d_ff=24, num_heads=4, num_layers=2, dropout_rate=0.0, vocab_size=40)
        model = create_model(T5Config(**shape, **own, decoder_start_token_id=0), attention)
        enable_packing(model)
        compute_loss_in_forward(model, z_loss=1e-4)
        with torch.no_grad():
            for number, (name, weight) in enumerate(sorted(model.named_parameters())):
                places = torch.arange(weight.numel(), dtype=torch.float64)
                wave = torch.sin(places**1.5 + number).view(weight.shape)
                is_table = "relative" in name or "shared" in name
                spread = 1 if is_table else 1.4 * weight.shape[-1] ** -0.5
                weight.copy_(1 + wave / 4 if weight.ndim == 1 else spread * wave)
        inputs = torch.arange(24).view(2, 12) % 37 + 3
        targets = torch.arange(18).view(2, 9) * 5 % 37 + 3
        inputs[1, 7:], targets[0, 6:] = 0, 0
        batch = dict(input_ids=inputs, decoder_input_ids=F.pad(targets[:, :-1], (1, 0)))
        if rows == "packed":
            batch["input_segments"] = torch.tensor([[1] * 5 + [2] * 7, [1] * 3 + [2] * 4 + [0] * 5])
            batch["target_segments"] = torch.tensor([[1] * 2 + [2] * 4 + [0] * 3, [1] * 4 + [2] * 5])
            batch["decoder_input_ids"][:, 1:][batch["target_segments"].diff() != 0] = 0
        else:
            batch["attention_mask"] = inputs.ne(0).long()
        found = model(**batch, labels=targets.masked_fill(targets.eq(0), -100))
        found.loss.backward()
        biases = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        norms = (biases.grad.norm(), model.shared.weight.grad.norm())
        found = torch.stack([found.loss, *norms]).detach()
        torch.testing.assert_close(found, torch.tensor(T5X[version, rows]), rtol=1e-5, atol=1e-7)
