"""export_checkpoint.py --formats ctranslate2: what CTranslate2 writes is compared with PyTorch."""

import contextlib
import io
import json
import shutil
from unittest import mock

import test_export_checkpoint
import torch
import zoo
from absl.testing import parameterized
from helpers import sentences
from test_export_checkpoint import TEXTS, workspace

from features.ctranslate2 import engine
from foundry.common.machine import adds_int8_exactly
from foundry.corpora.tokenizers import load_tokenizer
from foundry.model_t5 import load_model
from foundry.publishing import exports
from foundry.publishing.exports import Original


class EnginesTest(test_export_checkpoint.TestCase):
    @parameterized.parameters(
        *[(name, kind) for name in ("whole", "tied") for kind in ("ctranslate2", "ctranslate2_int8")]
    )
    def test_ctranslate2(self, name, kind):
        with mock.patch.dict(engine.TOLERANCES, {"ctranslate2_int8": 3.0}):  # weights of deviation 0.7 round coarsely
            found, _, _ = self.export(workspace() / name, "--formats", kind)
        self.assertEqual(found[kind]["same_tokens"] + found[kind]["near_ties"], 3)
        self.assert_same_weights(workspace() / name, self.out)  # int8 rounds in place: not these
        import ctranslate2

        tokenizer = load_tokenizer(str(self.out))
        pieces = tokenizer.convert_ids_to_tokens(tokenizer(TEXTS[0]).input_ids)
        answer = ctranslate2.Translator(str(self.out / kind)).translate_batch([pieces], beam_size=1)
        self.assertNotEmpty(answer[0].hypotheses[0])

    @parameterized.parameters((True, "int8_float32", ""), (False, "float32", "overflow on a CPU without VNNI"))
    def test_int8_is_multiplied_in_float32_where_its_sums_overflow(self, is_exact, computed, told):
        """A kernel that adds two products in 16 bits gives other answers; the rounded weights in float32 do not."""
        folder, printed = self.folder / "int8", io.StringIO()
        whole = str(workspace() / "whole")
        engine.write_ctranslate2(Original(load_model(whole), load_tokenizer(whole), []), folder, "int8")
        with mock.patch.object(engine, "adds_int8_exactly", lambda: is_exact), contextlib.redirect_stdout(printed):
            found = engine.CTranslate2Engine(folder)
        self.assertEqual(found.translator.compute_type, computed)
        self.assertIn(told, printed.getvalue())

    @parameterized.parameters(
        ("flags\t\t: fpu avx2 avx512_vnni\n", True),
        ("flags\t\t: fpu avx2 avx_vnni\n", True),
        ("flags\t\t: fpu avx2 avx512f\nvmx flags\t: vnmi\n", False),
        ("Features\t: asimd asimddp\n", True),
        (None, True),
    )
    def test_cpus_that_add_int8_exactly(self, cpuinfo, is_exact):
        path = self.folder / "cpuinfo"
        if cpuinfo is not None:
            path.write_text(cpuinfo)
        self.assertEqual(adds_int8_exactly(path), is_exact)

    @parameterized.parameters("t5_v1_1", "mt5", "umt5")
    def test_a_head_that_is_the_embedding(self, family):
        """CTranslate2's own converter scales its input in every family, transformers in umT5 alone."""
        zoo.write_tied(self.folder / family, family)
        found, _, _ = self.export(self.folder / family, "--formats", "ctranslate2")
        self.assertLess(found["ctranslate2"]["largest_difference"], 1e-3)

    @parameterized.parameters((False, 8), (True, 1))
    def test_beams_of_ctranslate2_are_counted(self, early_stopping, patience):
        source = self.folder / "source"
        shutil.copytree(workspace() / "whole", source)
        settings = json.loads((source / "generation_config.json").read_text())
        settings |= {"early_stopping": early_stopping, "length_penalty": 0.5}
        (source / "generation_config.json").write_text(json.dumps(settings))
        found, _, _ = self.export(source, "--formats", "ctranslate2")
        self.assertNotIn("search", found["ctranslate2"], "decoded greedily")
        (source / "task.json").write_text(
            json.dumps({"benchmark": "mine", "dataset_name": "own", "generation_num_beams": 3})
        )
        found, printed, _ = self.export(source, "--formats", "ctranslate2", "--overwrite_output_dir")
        search = {"beam_size": 3, "length_penalty": 0.5, "patience": patience}
        self.assertEqual(found["ctranslate2"]["search"], search)
        self.assertBetween(found["ctranslate2"]["same_beams"], 0, 3)
        shown = f"beam_size=3, length_penalty=0.5, patience={patience}"
        self.assertRegex(printed, rf"3 of 3 texts with PyTorch's tokens, \d with {shown}; log-probabilities")

    def test_patience_is_what_brings_beams_together(self):
        model, tokenizer = load_model(str(workspace() / "whole")).eval(), load_tokenizer(str(workspace() / "whole"))
        with torch.no_grad():
            model.lm_head.weight.mul_(0.2)
            model.lm_head.weight[1].mul_(3)  # texts end, and at many places
        engine.write_ctranslate2(exports.Original(model, tokenizer, []), self.out, None)
        loaded, sources, same = engine.CTranslate2Engine(self.out), tokenizer(sentences(24)).input_ids, {}
        for rule in (True, "never"):
            search = dict(num_beams=4, length_penalty=1.0, early_stopping=rule)
            wanted, own = exports.pytorch_tokens(model, sources, search), engine.ctranslate2_search(search)
            for patience in {1, own["patience"]}:
                found = loaded.tokens(sources, own | {"patience": patience})
                same[rule, patience] = sum(one == other for one, other in zip(wanted, found, strict=True))
        self.assertGreaterEqual(same[True, 1], 20)  # of 24; the others are near ties
        self.assertGreaterEqual(same["never", engine.PATIENCE], 19)
        self.assertLess(same["never", 1], 15)

    def test_the_names_of_what_is_missing(self):
        with mock.patch("importlib.util.find_spec", return_value=None):
            _, _, error = self.export(workspace() / "whole", "--formats", "ctranslate2", code=2)
        self.assertRegex(error, "--formats ctranslate2: needs ctranslate2: pip install -r req")
