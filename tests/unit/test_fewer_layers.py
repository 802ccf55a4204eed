"""Students with layers left out are the small model with these weights, in every family."""

import copy
import re
import tempfile

import torch
import zoo
from absl.testing import parameterized
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from foundry.model_t5 import create_model
from foundry.modeling.fewer_layers import evenly_spaced, leave_out_layers

WORDS = 300
EXACT = dict(rtol=1e-9, atol=1e-11)


def model_of(family: str, seed: int = 0, **changes) -> AutoModelForSeq2SeqLM:
    """In float64, without dropout."""
    torch.manual_seed(seed)
    model = create_model(AutoConfig.for_model(**zoo.config_of(family, WORDS) | changes)).double().eval()
    for parameter in model.parameters():  # fresh norms are all alike, and fresh logits near zero
        torch.nn.init.normal_(parameter, std=0.3) if parameter.requires_grad else None
    return model


class FewerLayersTest(parameterized.TestCase):
    @parameterized.parameters(
        (12, 1, [0]), (12, 2, [0, 11]), (12, 4, [0, 4, 7, 11]), (24, 6, [0, 5, 9, 14, 18, 23]), (3, 3, [0, 1, 2])
    )
    def test_they_are_evenly_spaced(self, layers, count, expected):
        self.assertEqual(evenly_spaced(layers, count), expected)

    @parameterized.product(family=zoo.FAMILIES, counts=((3, 2), (2, 1), (5, 4)))
    def test_a_student_is_the_small_model_with_these_weights(self, family, counts):
        """The reference is a model that transformers makes of the smaller configuration, with renamed weights."""
        changes = dict(num_layers=5, num_decoder_layers=4)
        if family in zoo.GEMMA:
            changes = zoo.config_of(family, WORDS)
            of_encoder = changes["encoder"].get("text_config", changes["encoder"])
            for part, layers in ((of_encoder, 5), (changes["decoder"], 4)):
                kinds = ("sliding_attention", "full_attention")
                part |= dict(num_hidden_layers=layers, layer_types=[kinds[n % 2] for n in range(layers)])
        whole = model_of(family, **changes)
        student = copy.deepcopy(whole)
        leave_out_layers(student, dict(zip(("num_layers", "num_decoder_layers"), counts, strict=True)))
        with tempfile.TemporaryDirectory() as folder:
            student.save_pretrained(folder)
            config = AutoConfig.from_pretrained(folder)
        reference, state = create_model(config).double().eval(), {}
        kept = dict(encoder=evenly_spaced(5, counts[0]), decoder=evenly_spaced(4, counts[1]))
        for name, tensor in whole.state_dict().items():
            found = re.search(r"(encoder|decoder)\.(?:text_model\.)?(?:block|layers)\.(\d+)\.", name)
            if found and "vision" not in name:
                stack, number = found[1], int(found[2])
                if number not in kept[stack]:
                    continue
                name = name[: found.start(2)] + str(kept[stack].index(number)) + name[found.end(2) :]
            state[name] = tensor
        reference.load_state_dict(state)
        ids, written = torch.randint(8, WORDS, (2, 11)), torch.randint(8, WORDS, (2, 6))
        inputs = dict(input_ids=ids, decoder_input_ids=written, use_cache=False)
        torch.testing.assert_close(student(**inputs).logits, reference(**inputs).logits, **EXACT)
        search = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False)
        cached, uncached = (student.generate(ids, use_cache=cache, **search).tolist() for cache in (True, False))
        self.assertEqual(cached, uncached)
        self.assertEqual(cached, reference.generate(ids, **search).tolist())

    def test_layers_are_those_of_the_plan(self):
        model = model_of("t5_v1_0", num_layers=5, num_decoder_layers=4)
        leave_out_layers(model, {"num_decoder_layers": 2})
        self.assertEqual(model.kept_layers, "decoder 1, 4 of 4")
        leave_out_layers(model, {})
        self.assertIsNone(model.kept_layers)

    @parameterized.parameters(
        ({"d_model": 8}, "--config_overrides d_model=8: is for a new model. Of a checkpoint .* num_decoder_layers"),
        ({"num_layers": 6}, "num_layers=6: must be a whole number of at most 5, the layers of the checkpoint"),
        ({"num_layers": 2.5}, "num_layers=2.5: must be a whole number"),
    )
    def test_refused(self, overrides, message):
        with self.assertRaisesRegex(ValueError, message):
            leave_out_layers(model_of("t5_v1_0", num_layers=5, num_decoder_layers=4), overrides)
