"""CTranslate2's encoder: the states are PyTorch's, for texts of any length and in one batch."""

import importlib.util
import unittest

import numpy as np
import torch
import zoo
from absl.testing import parameterized
from helpers import run_main

import export_checkpoint
from foundry.model_t5 import load_model


@unittest.skipUnless(importlib.util.find_spec("ctranslate2"), "ctranslate2 is not installed")
class CTranslate2EncoderTest(parameterized.TestCase):
    def export(self, family: str, **more: int):
        zoo.write_checkpoint(self.folder / family, family)
        flags = ("--model_name_or_path", self.folder / family, "--output_dir", self.folder / "out")
        return run_main(export_checkpoint.main, *flags, "--formats", "ctranslate2_encoder", **more)

    @parameterized.parameters("t5_v1_0", "t5_v1_1", "mt5", "umt5", "byt5")
    def test_its_states_are_pytorchs(self, family):
        import ctranslate2

        found, _, _ = self.export(family)
        self.assertLess(found["ctranslate2_encoder"]["largest_difference"], 1e-4)
        encoder = ctranslate2.Encoder(str(self.folder / "out" / "ctranslate2_encoder"), device="cpu")
        model, texts = load_model(str(self.folder / family)).eval(), [[5, 6, 7, 8, 1], [*range(5, 100), 1] * 3, [9, 1]]
        states = np.array(encoder.forward_batch(texts).last_hidden_state)
        for ids, row in zip(texts, states, strict=True):
            with torch.no_grad():
                wanted = model.get_encoder()(input_ids=torch.tensor([ids])).last_hidden_state[0]
            np.testing.assert_allclose(row[: len(ids)], wanted.numpy(), atol=1e-4)

    def test_what_it_lacks_is_refused(self):
        _, _, error = self.export("longt5_local", code=2)
        self.assertRegex(error, "--formats ctranslate2_encoder: not for longt5 models. It holds t5, mt5, umt5")
