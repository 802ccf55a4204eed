"""Exports: from every kind of checkpoint, into every format, with a card; and uploads against a Hub of one thread.

A model of a few thousand weights with random ones, so that logits are far from each other.
"""

import contextlib
import functools
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import yaml
import zoo
from absl.testing import parameterized
from fake_hub import FakeHub
from helpers import run_main, sentences, small_disk
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, TrainerState

import export_checkpoint
import pre_train_t5
from common.errors import UserError
from common.whole_folders import checkpoints_of
from corpora.tokenizers import load_tokenizer, train_tokenizer
from model_t5 import build_config, create_model, load_model
from publishing import exports, hub_uploads
from publishing.hub_uploads import published
from publishing.model_cards import model_card

ROOT = Path(export_checkpoint.__file__).resolve().parent
SHAPE = dict(d_model=16, d_kv=4, d_ff=24, num_heads=4, num_layers=1, num_decoder_layers=1)
TEXTS = list(export_checkpoint.TEXTS[:3])


@functools.cache
def workspace() -> Path:
    """`whole`: a checkpoint of a T5 v1.1; `tied`: one of T5 v1.0; none of the tests changes them."""
    folder = Path(tempfile.mkdtemp())
    (folder / "text.txt").write_text("\n".join(sentences(400)) + "\n")
    train_tokenizer(sentences(400), folder / "tokenizer", 330)
    torch.manual_seed(0)
    for name, changes in (("whole", {}), ("tied", {"feed_forward_proj": "relu", "tie_word_embeddings": True})):
        model = create_model(build_config("tiny", 330, SHAPE | changes))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.7)
        model.save_pretrained(folder / name)
        load_tokenizer(str(folder / "tokenizer")).save_pretrained(folder / name)
    return folder


class TestCase(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.out = self.folder / "out"

    def export(self, source, *more, code: int | None = None):
        flags = ("--model_name_or_path", source, "--output_dir", self.out, "--num_samples", 3)
        return run_main(export_checkpoint.main, *flags, *more, code=code)

    def assert_same_weights(self, one: Path, two: Path):
        first, second = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
        self.assertEqual(first.keys(), second.keys())
        for name, tensor in first.items():
            self.assertTrue(torch.equal(tensor, second[name]), name)


class HuggingFaceTest(TestCase):
    @parameterized.parameters("whole", "tied")
    def test_a_clean_folder_with_the_same_model(self, name):
        found, printed, _ = self.export(workspace() / name)
        self.assertEqual(found["huggingface"]["same_tokens"], 3)
        self.assertEqual(found["huggingface"]["largest_difference"], 0)
        self.assertRegex(printed, "3 of 3 texts with PyTorch's tokens")
        names = {path.name for path in self.out.iterdir()}
        wanted = {"config.json", "generation_config.json", "model.safetensors", "README.md"}
        self.assertEqual(names - {"tokenizer.json", "tokenizer_config.json", "spiece.model"}, wanted)
        self.assert_same_weights(workspace() / name, self.out)
        self.assertEqual(AutoTokenizer.from_pretrained(self.out)("Bada.").input_ids[-1], 1)
        self.assertEqual(self.out.stat().st_mode & 0o444, 0o444, "others may read it")

    def test_bfloat16_is_the_rounded_checkpoint(self):
        self.export(workspace() / "whole", "--dtype", "bfloat16")
        before, after = (
            load_file(workspace() / "whole" / "model.safetensors"),
            load_file(self.out / "model.safetensors"),
        )
        for name, tensor in before.items():
            self.assertTrue(torch.equal(tensor.bfloat16(), after[name]), name)
        self.assertEqual(json.loads((self.out / "config.json").read_text())["dtype"], "bfloat16")

    @parameterized.parameters(*zoo.GEMMA)
    def test_bfloat16_leaves_the_frequencies_of_t5gemma(self, family):
        zoo.write_checkpoint(self.folder / "gemma", family)
        found, _, _ = self.export(self.folder / "gemma", "--dtype", "bfloat16")
        self.assertEqual(found["huggingface"]["largest_difference"], 0)
        self.assertEqual(
            {tensor.dtype for tensor in load_file(self.out / "model.safetensors").values()}, {torch.bfloat16}
        )

    def test_a_run_that_has_not_ended_gives_its_newest_whole_checkpoint(self):
        run_folder = self.folder / "run"
        for step in (2, 4, 6):
            shutil.copytree(workspace() / "whole", run_folder / f"checkpoint-{step}")
            TrainerState(global_step=step).save_to_json(run_folder / f"checkpoint-{step}" / "trainer_state.json")
        weights = run_folder / "checkpoint-6" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:900])
        _, printed, _ = self.export(run_folder)
        self.assertRegex(printed, "checkpoint-6 is damaged and skipped")
        self.assertRegex(printed, "newest whole checkpoint, .*checkpoint-4")

    def test_an_export_that_fails_leaves_nothing(self):
        with mock.patch("export_checkpoint.model_card", side_effect=UserError("the disk is full")):
            self.export(workspace() / "whole", code=2)
        self.assertEmpty(list(self.folder.iterdir()))

    def test_entries_that_name_code_stay_behind(self):
        source = shutil.copytree(workspace() / "whole", self.folder / "source")
        entries = {"trust_remote_code": True, "custom_pipelines": {"own": {"impl": "own.P"}}}
        entries |= {"auto_map": {"AutoModelForSeq2SeqLM": "own.M", "AutoTokenizer": ["own.T", None]}}
        for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            (source / name).write_text(json.dumps(json.loads((source / name).read_text()) | entries))
        self.export(source, "--formats", "huggingface", "encoder", "sentence_transformers")
        for path in self.out.rglob("*.json"):
            self.assertNoCommonElements(re.findall(r"\w+", path.read_text()), entries, path.name)
        self.assertLen(list(self.out.rglob("config.json")), 4)

    @parameterized.parameters(400, 10_000)  # before the weights, or within them
    def test_a_full_disk_is_named_and_leaves_nothing(self, largest):
        source = workspace() / "whole"
        loaded = mock.patch.object(export_checkpoint, "load_tokenizer", return_value=load_tokenizer(str(source)))
        with loaded, small_disk(largest):
            _, _, error = self.export(source, code=2)
        self.assertRegex(error.splitlines()[-1], "error: --output_dir .*out: no room on the disk .*Free some space, or")
        self.assertEmpty(list(self.folder.iterdir()))

    def test_an_earlier_export_is_replaced_as_a_whole(self):
        self.export(workspace() / "whole")
        (self.out / "old").write_text("x")
        self.export(workspace() / "tied", "--overwrite_output_dir")
        self.assertFalse((self.out / "old").exists())
        self.assert_same_weights(workspace() / "tied", self.out)
        self.assertEqual([path.name for path in self.folder.iterdir()], ["out"])

    def test_weights_that_come_back_changed_are_refused(self):
        def other(name):
            model = load_model(name)
            model.decoder.final_layer_norm.weight.data[3] += 1e-3
            return model

        with mock.patch("export_checkpoint.load_model", other):
            _, _, error = self.export(workspace() / "whole", code=2)
        self.assertRegex(error, "decoder.final_layer_norm.weight is not what the checkpoint holds")


class CompareTest(parameterized.TestCase):
    """compare() refuses another model, and only that."""

    def setUp(self):
        super().setUp()
        log_probs = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 0.9995]]).log_softmax(-1).numpy()
        self.wanted = exports.Answers([[0, 1]], [log_probs])

    def found(self, tokens, off=0.0, alone=True):
        """The comparison with an engine that gives the wanted tokens' log-probabilities alone, or those of all."""
        log_probs = self.wanted.log_probs[0] + np.float32(off)
        log_probs = log_probs[[0, 1], [0, 1]] if alone else log_probs
        return exports.compare("engine", self.wanted, exports.Answers([tokens], [log_probs]), 1e-3)

    def test_same_and_near_ties(self):
        for alone in (False, True):
            self.assertEqual(self.found([0, 1], 5e-4, alone)["same_tokens"], 1)
            self.assertAlmostEqual(self.found([0, 1], 5e-4, alone)["largest_difference"], 5e-4, delta=1e-6)
        self.assertEqual(self.found([0, 2])["near_ties"], 1)  # 5e-4 nats between the two best

    @parameterized.parameters(
        ([1, 1], 0.0, "from token 1 on"),
        ([0], 0.0, "from token 2 on"),
        ([0, 1], 2e-3, "0.002 nats off"),
        ([0, 1], float("nan"), "nan nats off"),
    )
    def test_refused(self, tokens, off, message):
        with self.assertRaisesRegex(ValueError, message):
            self.found(tokens, off)


class CardTest(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.run_folder = workspace() / "run"
        flags = dict(
            train_file=workspace() / "text.txt",
            tokenizer_name=workspace() / "tokenizer",
            config_name="tiny",
            config_overrides=",".join(f"{k}={v}" for k, v in SHAPE.items()),
            input_seq_length=32,
            max_steps=2,
            warmup_steps=1,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=1,
            logging_steps=1,
            eval_steps=2,
            max_eval_samples=4,
            output_dir=cls.run_folder,
            data_cache_dir=workspace() / "cache",
            report_to="none",
            disable_tqdm="true",
            preprocessing_num_workers=1,
            noise_density=0.2,
        )
        if not cls.run_folder.exists():
            run_main(pre_train_t5.main, *[word for key, value in flags.items() for word in (f"--{key}", value)])
        cls.flags = flags

    def test_is_filled_from_the_run(self):
        self.export(self.run_folder, "--license", "apache-2.0", "--language", "en", "it")
        card = (self.out / "README.md").read_text()
        front = yaml.safe_load(card.split("---")[1])
        self.assertEqual(front["license"], "apache-2.0")
        self.assertEqual(front["language"], ["en", "it"])
        self.assertEqual(front["library_name"], "transformers")
        results = json.loads((self.run_folder / "all_results.json").read_text())
        self.assertIn(f"| `loss` | {results['eval_loss']:.4g} |", card)
        self.assertIn("| `train_file` | `text.txt` |", card)
        self.assertNotIn(str(workspace()), card, "no local path")
        self.assertIn("| `noise_density` | `0.2` |", card)
        self.assertIn("| `learning_rate` | `0.02` |", card)  # a default too: it decides the training
        self.assertNotIn("output_dir", card)
        self.assertIn("2 steps", card)
        self.assertIn("](loss.png)", card)
        self.assertTrue((self.out / "loss.png").is_file())
        code = card.split("```python\n")[1].split("```")[0].replace('"out"', repr(str(self.out)))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, "README.md", "exec"), {})  # what the card says works
        self.assertNotEmpty(printed.getvalue())

    def test_of_a_checkpoint_has_its_own_numbers(self):
        folder = self.folder / "run" / "checkpoint-2"
        shutil.copytree(workspace() / "whole", folder)
        (folder / "trainer_state.json").write_text('{"global_step": 2}')
        (folder.parent / "run.json").write_text(json.dumps({"arguments": {"max_steps": 4}}))
        (folder.parent / "all_results.json").write_text('{"eval_loss": 0.5}')
        losses = [{"step": step, "eval_loss": loss} for step, loss in ((2, 1.25), (4, 0.5))]
        (folder.parent / "metrics.jsonl").write_text("\n".join(map(json.dumps, losses)) + "\n")
        self.export(folder)
        card = (self.out / "README.md").read_text()
        self.assertIn("| `loss` | 1.25 |\n\nFrom the last evaluation before this checkpoint was written", card)
        self.assertIn("\n2 steps in", card)

    def test_texts_of_the_run_stay_texts(self):
        """A run.json may come with a checkpoint from anywhere."""
        model = AutoModelForSeq2SeqLM.from_pretrained(workspace() / "whole")
        hostile = "`[free](https://example.com) | <img src=x onerror=alert(1)>\n\n# Title\n```"
        arguments = dict(benchmark="own", dataset_name=f"a{hostile}", source_prefix=hostile, optim=hostile)
        run = dict(arguments=arguments, versions=dict(torch=hostile), git=dict(commit=hostile))
        run |= dict(hardware=dict(gpus=1, gpu_name=hostile))
        metrics = [{"step": 1, "seconds": 1.0, f"eval_{hostile}": 0.5}]
        card = model_card("me/mine", dict(run=run, results={}, metrics=metrics), model)
        body = card.split("---\n", 2)[2]
        code = body.split("```python\n")[1].split("\n```\n")[0]
        compile(code, "README.md", "exec")
        outside = re.sub(r"`[^`\n]*`", "", body.replace(code, ""))
        for part in ("[free]", "<img", "# Title"):
            self.assertNotIn(part, outside)
        table = [line for line in body.splitlines() if line.startswith("| `optim` |")]
        self.assertEqual(len(re.findall(r"(?<!\\)\|", table[0])), 3, "one cell")

    def test_of_a_fine_tuned_model(self):
        model = AutoModelForSeq2SeqLM.from_pretrained(workspace() / "whole")
        arguments = dict(benchmark="glue", dataset_name="cola", model_name_or_path="google/t5-v1_1-base", seed=7)
        record = dict(
            run=dict(arguments=arguments), results=dict(eval_matthews_correlation=0.5, eval_loss=1.0), metrics=[]
        )
        card = model_card("me/cola", record, model)
        self.assertIn("parameters, fine-tuned on `glue/cola`. Made with", card)
        self.assertIn('tokenizer("cola sentence: ...", return_tensors="pt")', card)
        front = yaml.safe_load(card.split("---")[1])
        self.assertEqual(front["base_model"], "google/t5-v1_1-base")
        self.assertEqual(front["datasets"], ["nyu-mll/glue"])
        (result,) = front["model-index"][0]["results"]
        self.assertEqual(result["metrics"][0]["value"], 0.5)

    def test_a_prefix_with_quotes_is_valid_python(self):
        model = AutoModelForSeq2SeqLM.from_pretrained(workspace() / "whole")
        arguments = dict(benchmark="own", dataset_name="pairs", source_column=["a"], target_column=["b"])
        run = dict(arguments=arguments | dict(train_file=["x.csv"], source_prefix='As in "Emma"\n: '))
        card = model_card("me/mine", dict(run=run, results={}, metrics=[]), model)
        self.assertIn(r'inputs = tokenizer("As in \"Emma\"\n: ...", return_tensors="pt")', card)

    @parameterized.parameters(
        (
            dict(benchmark="own", dataset_name="pairs", hub_dataset="/data/mine/sent"),
            None,
            "| `hub_dataset` | `sent` |",
        ),
        (
            dict(benchmark="own", dataset_name="pairs", hub_dataset="me/sent"),
            ["me/sent"],
            "| `hub_dataset` | `me/sent` |",
        ),
        (dict(dataset_name="/data/mine/text"), None, "| `dataset_name` | `text` |"),
        (
            dict(dataset_name="allenai/c4:0.7,wikimedia/wikipedia:0.3"),
            ["allenai/c4", "wikimedia/wikipedia"],
            "`allenai/c4:0.7",
        ),
    )
    def test_data_sets_are_those_of_the_hub(self, arguments, named, text):
        model = AutoModelForSeq2SeqLM.from_pretrained(workspace() / "whole")
        card = model_card(
            "me/mine", dict(run=dict(arguments=arguments), results=dict(eval_bleu=1.0), metrics=[]), model
        )
        self.assertEqual(yaml.safe_load(card.split("---")[1]).get("datasets"), named)
        self.assertIn(text, card)
        self.assertNotIn("/data/mine", card)

    @parameterized.parameters(
        ("glue", "cola,pairs", "cola sentence: ..."),
        ("glue", "pairs,cola", "tell: ..."),
        ("glue", "all", "cola sentence: ..."),
        ("glue", "super_glue/rte", "rte hypothesis: ... premise: ..."),
        ("own", "pairs", "tell: ..."),  # columns that only the rows tell
        ("gone", "task", "..."),
    )
    def test_the_example_is_what_the_first_task_reads(self, benchmark, name, text):
        model = AutoModelForSeq2SeqLM.from_pretrained(workspace() / "whole")
        arguments = dict(benchmark=benchmark, dataset_name=name, train_file=["x.csv"], source_prefix="tell: ")
        card = model_card("me/mine", dict(run=dict(arguments=arguments), results={}, metrics=[]), model)
        self.assertIn(f'inputs = tokenizer("{text}", return_tensors="pt")', card)

    @parameterized.parameters(
        (None, "span_corruption", "The cat <extra_id_0> on the <extra_id_1>.", "marks a gap"),
        ("ul2", "ul2", "[NLU] The cat <extra_id_0> on the <extra_id_1>.", "marks a gap"),
        ("prefix_lm", "prefix_lm", "The cat sat on the", "The model continues the text"),
        ("gone", "gone", "The cat <extra_id_0> on the <extra_id_1>.", "marks a gap"),
    )
    def test_of_each_objective(self, objective, name, text, explained):
        model = AutoModelForSeq2SeqLM.from_pretrained(workspace() / "whole")
        arguments = dict(max_steps=4) | ({"objective": objective} if objective else {})
        card = model_card("me/mine", dict(run=dict(arguments=arguments), results={}, metrics=[]), model)
        self.assertIn(f"parameters, pre-trained with `{name}`. Made with", card)
        self.assertIn(f"- {name.replace('_', '-')}\n", card)
        self.assertIn(f'inputs = tokenizer("{text}", return_tensors="pt")', card)
        self.assertIn(explained, card)
        self.assertEqual("extra_id" in card, objective != "prefix_lm")

    @parameterized.parameters(("ul2", "[NLU] 0 1 <extra_id_0> 1 0 <extra_id_1> 1"), ("prefix_lm", "0 1 1 0"))
    def test_ready_made_ids_are_read_as_numbers(self, objective, text):
        model = AutoModelForSeq2SeqLM.from_pretrained(workspace() / "whole")
        model.config.update(dict(input_ids_offset=3, sentinel_ids=[9, 8]))
        record = dict(run=dict(arguments=dict(objective=objective)), results={}, metrics=[])
        self.assertIn(f'inputs = tokenizer("{text}", return_tensors="pt")', model_card("me/mine", record, model))

    # ------------------------------------------------------------ uploads
    def train(self, *more, code=None):
        words = [
            word for key, value in (self.flags | dict(output_dir=self.out)).items() for word in (f"--{key}", value)
        ]
        return run_main(pre_train_t5.main, *words, *more, code=code)

    def test_export_is_uploaded_as_it_is(self):
        with FakeHub() as hub:
            _, printed, _ = self.export(workspace() / "whole", "--push_to_hub", "me/mine", "--hub_private")
        self.assertEqual(hub.repositories["me/mine"]["visibility"], "private")
        (commit,) = hub.commits
        self.assertEqual(commit["files"], {path.name: path.read_bytes() for path in self.out.iterdir()})
        self.assertRegex(printed, "upload +to me/mine of the Hub: weights, tokenizer, .*; no texts of the data")
        self.assertIn('from_pretrained("me/mine")', commit["files"]["README.md"].decode())
        self.assertIn("uploaded to", printed)

    def test_runs_upload_whole_checkpoints_and_end_with_the_card(self):
        with FakeHub() as hub:
            _, printed, _ = self.train(
                "--push_to_hub",
                "--hub_model_id",
                "me/run",
                "--hub_strategy",
                "all_checkpoints",
                "--save_steps",
                1,
                "--save_total_limit",
                1,
            )
        self.assertIn("uploaded to", printed)
        *steps, last = hub.commits
        whole = {name.split("/")[0] for commit in steps for name in commit["files"] if "/" in name}
        self.assertEqual(whole, {"checkpoint-1", "checkpoint-2"})
        for commit in steps:
            names = {name.split("/")[-1] for name in commit["files"]}
            self.assertIn("model.safetensors", names)
            self.assertEqual("manifest.json" in names, "/" in next(iter(commit["files"])), "only whole ones have it")
        self.assertIn("| `loss` |", last["files"]["README.md"].decode())
        self.assertContainsSubset({"model.safetensors", "all_results.json", "loss.png"}, last["files"])
        private = {"run.json", "training_args.bin", "trainer_state.json", "samples.md"}
        self.assertTrue((self.out / "samples.md").is_file())
        self.assertNoCommonElements(private, last["files"])

    def test_a_link_of_a_downloaded_run_is_not_followed(self):
        model = self.folder / "theirs"
        shutil.copytree(workspace() / "whole", model)
        (self.folder / "private").write_text("a key")
        (model / "loss.png").symlink_to(self.folder / "private")
        with FakeHub() as hub:
            _, printed, _ = self.export(model, "--push_to_hub", "me/mine")
        self.assertNotIn("loss.png", hub.commits[0]["files"])
        self.assertFalse((self.out / "loss.png").exists())
        self.assertIn("loss.png is a link, and links are not exported", printed)

    def test_all_formats_of_an_export_are_published(self):
        for name in ("task.json", "encoder/model.safetensors", "encoder/tokenizer.json", "ctranslate2/model.bin"):
            (self.out / name).parent.mkdir(parents=True, exist_ok=True)
            (self.out / name).touch()
        (self.out / "sentence_transformers" / "1_Pooling").mkdir(parents=True)
        (self.out / "sentence_transformers" / "1_Pooling" / "config.json").touch()
        found = published(self.out, ["encoder", "ctranslate2", "sentence_transformers"])
        wanted = ["ctranslate2/model.bin", "encoder/model.safetensors", "encoder/tokenizer.json"]
        self.assertEqual(sorted(found), [*wanted, "sentence_transformers/1_Pooling/config.json"])

    def test_nothing_is_uploaded_without_the_flag_or_by_a_dry_run(self):
        with FakeHub() as hub:
            self.train("--push_to_hub", "--dry_run", code=0)
            self.export(workspace() / "whole", "--overwrite_output_dir")
        self.assertEmpty(hub.requests)

    def test_a_hub_that_refuses_is_said_before_the_training(self):
        with FakeHub(refuse={"repos/create": 400}) as hub:
            _, _, error = self.train("--push_to_hub", "--hub_model_id", "other/run", code=2)
        self.assertRegex(error, "--hub_model_id other/run: .*you may not do this")
        self.assertFalse((self.out / "model.safetensors").exists())
        self.assertEmpty(hub.commits)

    def test_a_failed_upload_loses_nothing(self):
        with FakeHub(refuse={"/commit/": 403}):
            _, printed, error = self.train("--push_to_hub", code=1)
        self.assertTrue((self.out / "all_results.json").is_file())
        self.assertRegex(printed, "an upload to nobody/out failed")
        self.assertRegex(error, "the model is whole in .*; later: python export_checkpoint.py")

    def test_a_run_that_is_told_to_stop_waits_for_no_upload(self):
        """It ended when its uploads had, or by its job's time limit, and was not queued again."""

        def told_to_stop(*_, **__):
            os.kill(os.getpid(), signal.SIGTERM)
            return mock.Mock(exception=mock.Mock(side_effect=AssertionError("waited")))

        self.flags = self.flags | {"max_steps": 4}
        with FakeHub(), mock.patch.object(hub_uploads, "start_upload", side_effect=told_to_stop) as started:
            self.train("--push_to_hub", "--save_steps", 1, "--save_total_limit", 1, code=75)
        started.assert_called_once()
        self.assertEqual([path.name for path in checkpoints_of(self.out)], ["checkpoint-1", "checkpoint-2"])

    def test_a_process_ends_before_its_uploads(self):
        program = (
            "import sys, time; from pathlib import Path; from huggingface_hub import HfApi\n"
            "from publishing.hub_uploads import published, start_upload\n"
            "HfApi.create_commit = lambda *_, **__: time.sleep(1000)\n"
            "start_upload(published(Path(sys.argv[1])), 'me/run', 'a step', 'hf_x')\nsys.exit(75)"
        )
        command = [sys.executable, "-c", program, workspace() / "whole"]
        done = subprocess.run(command, cwd=Path(pre_train_t5.__file__).parent, timeout=20)
        self.assertEqual(done.returncode, 75)

    def test_a_failed_upload_of_an_export_can_be_repeated(self):
        with FakeHub(refuse={"/commit/": 403}):
            _, _, error = self.export(workspace() / "whole", "--push_to_hub", "me/mine", code=2)
        self.assertRegex(error, "the model is whole in .*; --overwrite_output_dir lets the same command try again")
        with FakeHub() as hub:
            self.export(workspace() / "whole", "--push_to_hub", "me/mine", "--overwrite_output_dir")
        self.assertLen(hub.commits, 1)


class BadInputTest(TestCase):
    @parameterized.named_parameters(
        ("format", ["--formats", "onxx"], "--formats onxx: must be one of huggingface"),
        ("dtype", ["--dtype", "float16"], "--dtype float16: must be one of float32, bfloat16"),
        ("no_folder", ["--model_name_or_path", "{folder}/nowhere"], "nowhere: no tokenizer there"),
        (
            "no_weights",
            ["--model_name_or_path", "{folder}/fsdp"],
            "--model_name_or_path .*fsdp: no weights there, .*"
            "Shards of DeepSpeed are joined by `python -m deepspeed.utils.zero_to_fp32` .*, "
            "of FSDP by `accelerate merge-weights`",
        ),
        ("no_tokenizer", ["--model_name_or_path", "{folder}/bare"], "no tokenizer in .*bare or above it"),
        ("no_config", ["--model_name_or_path", "{folder}/bare", "--tokenizer_name", "{good}/tokenizer"], "bare"),
        ("output", ["--output_dir", "{good}"], "--output_dir .* holds the model: name another folder"),
        ("not_empty", ["--output_dir", "{folder}"], "--output_dir .* is not empty: .* --overwrite_output_dir"),
        ("repository", ["--push_to_hub", "a/b/c"], "--push_to_hub a/b/c: "),
        ("samples", ["--samples_file", "{folder}/none.txt"], "--samples_file .*none.txt: no such file"),
        ("blank", ["--samples_file", "{folder}/blank.txt"], "--samples_file .*blank.txt: holds no text"),
        ("column", ["--samples_file", "{folder}/rows.jsonl"], "rows.jsonl, row 1: no column source; available: text"),
        ("count", ["--num_samples", "0"], "--num_samples 0: must be at least 1"),
        ("flag", ["--dtypes", "x"], "--dtypes: no such flag; did you mean --dtype"),
        ("tokenizer", ["--tokenizer_name", "{folder}"], "--tokenizer_name .*: no tokenizer there"),
    )
    def test_refused(self, flags, message):
        (self.folder / "bare").mkdir()
        (self.folder / "bare" / "model.safetensors").touch()
        (self.folder / "blank.txt").write_text("\n\n \n")
        (self.folder / "rows.jsonl").write_text('{"text": "x"}\n')
        shutil.copytree(workspace() / "whole", self.folder / "fsdp")
        (self.folder / "fsdp" / "model.safetensors").rename(self.folder / "fsdp" / "pytorch_model_fsdp.bin")
        given = {"--model_name_or_path": workspace() / "whole", "--output_dir": self.out}
        words = [word.format(folder=self.folder, good=workspace()) for word in flags]
        given = {name: value for name, value in given.items() if name not in words}
        argv = [*words, *[word for pair in given.items() for word in pair]]
        _, _, error = run_main(export_checkpoint.main, *argv, code=2)
        self.assertRegex(error, f"^[^\n]*error: [^\n]*({message})[^\n]*\n$")
        self.assertFalse(self.out.exists())
