"""The models of heads in every family: a checkpoint's own encoder, and folders that load in plain transformers.

The reference is the encoder of the whole checkpoint, as the core loads it.
"""

import torch
import zoo
from absl.testing import parameterized
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification, LongT5EncoderModel, T5EncoderModel

from features.encoder_heads.head_kinds import Class
from features.encoder_heads.head_models import load_head_model, load_saved
from features.encoder_heads.head_trainer import outputs_of
from foundry.common.errors import UserError
from foundry.model_t5 import load_model

WITHOUT = "t5gemma2"  # of which transformers has no encoder alone
KIND = Class(["a", "b", "c"], {}, "mean")
CLOSE = dict(rtol=1e-5, atol=1e-6)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(8, 60, (2, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    return {"input_ids": ids, "attention_mask": mask}


class HeadModelsTest(parameterized.TestCase):
    @parameterized.parameters(*(family for family in zoo.FAMILIES if family != WITHOUT))
    @torch.no_grad()
    def test_the_encoder_is_the_checkpoints(self, family):
        source, saved = self.folder / family, self.folder / "saved"
        zoo.write_checkpoint(source, family)
        model, inputs = load_head_model(str(source), None, KIND, freeze=True).eval(), batch()
        states = load_model(str(source)).eval().get_encoder()(**inputs).last_hidden_state
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        weight, bias = (next(w for w in trained.values() if w.dim() == size) for size in (2, 1))
        self.assertLen(trained, 2)
        self.assertLess(float(weight.std()), 2 * weight.shape[1] ** -0.5)
        logits = states @ weight.T + bias
        torch.testing.assert_close(model(**inputs).logits, logits, **CLOSE)
        mask = inputs["attention_mask"][..., None]
        means = (states * mask).sum(1) / mask.sum(1)
        torch.testing.assert_close(outputs_of(model, inputs, KIND)[:, 0], means @ weight.T + bias, **CLOSE)

        model.save_pretrained(saved)
        again = load_saved(str(saved), torch.device("cpu"))
        torch.testing.assert_close(again(**inputs).logits, logits, **CLOSE)
        self.assertEqual(again.config.id2label, {0: "a", 1: "b", 2: "c"})
        if "long" in family:  # as the class's documentation says
            head = load_file(saved / "model.safetensors")
            states = LongT5EncoderModel.from_pretrained(saved).eval()(**inputs).last_hidden_state
            found = states @ head["classifier.weight"].T + head["classifier.bias"]
        else:
            found = AutoModelForTokenClassification.from_pretrained(saved).eval()(**inputs).logits
        torch.testing.assert_close(found, logits, **CLOSE)
        kept = load_head_model(str(saved), None, KIND, freeze=False).eval()
        torch.testing.assert_close(kept(**inputs).logits, logits, **CLOSE)
        other = load_head_model(str(saved), None, Class(["a", "b"], {}, "mean"), freeze=False)
        self.assertEqual(other.config.num_labels, 2)

    def test_an_encoder_alone_can_be_the_start(self):
        source, alone = self.folder / "t5", self.folder / "alone"
        zoo.write_checkpoint(source, "t5_v1_1")
        T5EncoderModel.from_pretrained(source).save_pretrained(alone)
        ours, theirs = (load_head_model(str(folder), None, KIND, freeze=False) for folder in (alone, source))
        for name, weight in ours.transformer.named_parameters():
            torch.testing.assert_close(weight, theirs.transformer.get_parameter(name), rtol=0, atol=0)

    def test_a_family_without_an_encoder_of_its_own_is_refused(self):
        zoo.write_checkpoint(self.folder / WITHOUT, WITHOUT)
        with self.assertRaisesRegex(UserError, "--head: transformers has no encoder with a head for T5Gemma 2"):
            load_head_model(str(self.folder / WITHOUT), None, KIND, freeze=False)
