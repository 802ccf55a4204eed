"""Model cards, and uploads of trainings and exports against a Hub of one thread."""

import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import ctranslate2
import gguf
import numpy as np
import onnxruntime
import test_export_checkpoint
import torch
import yaml
from absl.testing import parameterized
from fake_hub import FakeHub
from helpers import SMALL_RUN, argv_of, run_main
from sentence_transformers import SentenceTransformer
from test_export_checkpoint import SHAPE, TEXTS, workspace
from transformers import AutoModelForSeq2SeqLM, AutoModelForTextEncoding, AutoTokenizer

import export_checkpoint
import pre_train_t5
from constants import DATASET_VALS
from features import FORMATS
from features.hub import uploads
from features.hub.model_cards import hub_task, model_card
from foundry.common.whole_folders import checkpoints_of
from foundry.publishing.exports import Format
from tasks.named import first_entry


def card_of(arguments: dict, results: dict | None = None, name: str = "me/mine", more: tuple = (), **record) -> str:
    """The card of the workspace's model, whose run had these arguments."""
    model = AutoModelForSeq2SeqLM.from_pretrained(workspace() / "whole")
    record = dict(run=dict(arguments=arguments), results=results or {}, metrics=[]) | record
    return model_card(name, record, model, *more)


def written(kind: str, _: object, folder: Path) -> tuple[dict, str]:
    folder.mkdir()
    (folder / "weights.own").write_text(kind)
    return {}, "written"


def written_with_secret(*given: object) -> tuple[dict, str]:
    found = written(*given)
    (given[-1] / "secret").write_text("which the format does not name")
    return found


OWN = Format(written, mock.Mock(), ("weights.*",))
CARELESS = Format(written_with_secret, mock.Mock(), ("weights.*",))


class CardTest(test_export_checkpoint.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.run_folder = workspace() / "run"
        files = dict(train_file="text.txt", tokenizer_name="tokenizer", output_dir="run", data_cache_dir="cache")
        cls.flags = SMALL_RUN | {name: workspace() / file for name, file in files.items()}
        cls.flags |= dict(config_name="tiny", config_overrides=",".join(f"{k}={v}" for k, v in SHAPE.items()))
        cls.flags |= dict(input_seq_length=32, max_steps=2, eval_steps=2, max_eval_samples=4, noise_density=0.2)
        if not cls.run_folder.exists():
            run_main(pre_train_t5.main, *argv_of(cls.flags))

    def test_is_filled_from_the_run(self):
        self.export(self.run_folder, "--license", "apache-2.0", "--language", "en", "no")
        card = (self.out / "README.md").read_text()
        front = yaml.safe_load(card.split("---")[1])
        self.assertEqual(front["license"], "apache-2.0")
        self.assertEqual(front["language"], ["en", "no"])
        self.assertEqual(front["library_name"], "transformers")
        results = json.loads((self.run_folder / "all_results.json").read_text())
        self.assertIn(f"| `loss` | {results['eval_loss']:.4g} |", card)
        self.assertNotIn("text.txt", card, "no file of the data")
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
        hostile = "`[free](https://example.com) | <img src=x onerror=alert(1)>\n\n# Title\n```"
        arguments = dict(benchmark="own", dataset_name=f"a{hostile}", source_prefix=hostile, optim=hostile)
        run = dict(arguments=arguments, versions=dict(torch=hostile), git=dict(commit=hostile))
        run |= dict(hardware=dict(gpus=1, gpu_name=hostile))
        metrics = [{"step": 1, "seconds": 1.0, f"eval_{hostile}": 0.5}]
        card = card_of({}, run=run, metrics=metrics)
        body = card.split("---\n", 2)[2]
        code = body.split("```python\n")[1].split("\n```\n")[0]
        compile(code, "README.md", "exec")
        outside = re.sub(r"`[^`\n]*`", "", body.replace(code, ""))
        for part in ("[free]", "<img", "# Title"):
            self.assertNotIn(part, outside)
        table = [line for line in body.splitlines() if line.startswith("| `optim` |")]
        self.assertEqual(len(re.findall(r"(?<!\\)\|", table[0])), 3, "one cell")

    def test_of_a_fine_tuned_model(self):
        arguments = dict(benchmark="glue", dataset_name="cola", model_name_or_path="google/t5-v1_1-base", seed=7)
        results = dict(eval_matthews_correlation=0.5, eval_loss=1.0)
        more = ({"sentence_transformers": {"max_seq_length": 77}},)
        card = card_of(arguments, results, "me/cola", more)
        self.assertIn("Texts are cut at 77 tokens (`max_seq_length` of `sentence_bert_config.json`).", card)
        self.assertIn("parameters, fine-tuned on `glue/cola`. Made with", card)
        self.assertIn('tokenizer("cola sentence: ...", return_tensors="pt")', card)
        front = yaml.safe_load(card.split("---")[1])
        self.assertEqual(front["base_model"], "google/t5-v1_1-base")
        self.assertEqual(front["datasets"], ["nyu-mll/glue"])
        (result,) = front["model-index"][0]["results"]
        self.assertEqual(result["metrics"][0]["value"], 0.5)

    def test_a_prefix_with_quotes_is_valid_python(self):
        arguments = dict(benchmark="own", dataset_name="pairs", source_column=["a"], target_column=["b"])
        card = card_of(arguments | dict(train_file=["x.csv"], source_prefix='As in "Emma"\n: '))
        self.assertIn(r'inputs = tokenizer("As in \"Emma\"\n: ...", return_tensors="pt")', card)

    @parameterized.parameters(
        (dict(benchmark="own", dataset_name="pairs", hub_dataset="/data/mine/sent"), None, None),
        (
            dict(benchmark="own", dataset_name="pairs", hub_dataset="me/sent"),
            ["me/sent"],
            "| `hub_dataset` | `me/sent` |",
        ),
        (dict(dataset_name="/data/mine/text"), None, None),
        (dict(dataset_name="mine/text", local=["dataset_name"]), None, None),
        (
            dict(dataset_name="allenai/c4:0.7,wikimedia/wikipedia:0.3"),
            ["allenai/c4", "wikimedia/wikipedia"],
            "`allenai/c4:0.7",
        ),
    )
    def test_data_sets_are_those_of_the_hub(self, arguments, named, text):
        run = dict(local=arguments.pop("local", []), arguments=arguments)
        card = card_of(arguments, dict(eval_bleu=1.0), run=run)
        self.assertEqual(yaml.safe_load(card.split("---")[1]).get("datasets"), named)
        self.assertIn(text or "## Training", card)
        self.assertNotIn("mine/", card.replace("me/mine", ""))
        self.assertNotIn("sent", card.replace("me/sent", "").replace("sentinel", ""))

    @parameterized.parameters(
        ("glue", "cola,pairs", "cola sentence: ..."),
        ("glue", "pairs,cola", "tell: ..."),
        ("glue", "all", "cola sentence: ..."),
        ("glue", "super_glue/rte", "rte hypothesis: ... premise: ..."),
        ("own", "pairs", "tell: ..."),  # columns that only the rows tell
        ("summarization", "cnn_dailymail", "summarize: ..."),
        ("question_answering", "squad", "question: ... context: ..."),
        ("gone", "task", "..."),
    )
    def test_the_example_is_what_the_first_task_reads(self, benchmark, name, text):
        arguments = dict(benchmark=benchmark, dataset_name=name, train_file=["x.csv"], source_prefix="tell: ")
        card = card_of(arguments)
        self.assertIn(f'inputs = tokenizer("{text}", return_tensors="pt")', card)

    @parameterized.parameters(
        (None, "span_corruption", "The cat <extra_id_0> on the <extra_id_1>.", "marks a gap"),
        ("ul2", "ul2", "[NLU] The cat <extra_id_0> on the <extra_id_1>.", "marks a gap"),
        ("prefix_lm", "prefix_lm", "The cat sat on the", "The model continues the text"),
        ("gone", "gone", "The cat <extra_id_0> on the <extra_id_1>.", "marks a gap"),
    )
    def test_of_each_objective(self, objective, name, text, explained):
        card = card_of(dict(max_steps=4) | ({"objective": objective} if objective else {}))
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
        return run_main(pre_train_t5.main, *argv_of(self.flags | dict(output_dir=self.out)), *more, code=code)

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
            flags = "--push_to_hub --hub_model_id me/run --hub_strategy all_checkpoints --save_steps 1"
            _, printed, _ = self.train(*flags.split(), "--save_total_limit", 1)
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

    def test_all_formats_of_an_export_load_again_from_what_was_uploaded(self):
        """Each by the library that it is for. A format that another folder adds says what it writes, too."""

        formats = [*FORMATS]
        more = {"own": f"{__name__}:OWN", "careless": f"{__name__}:CARELESS"}
        limits = {"choices": ("huggingface", *FORMATS, *more)}
        flag = next(flag for flag in dataclasses.fields(export_checkpoint.ExportArguments) if flag.name == "formats")
        for target, values in ((FORMATS, more), (flag.metadata["limits"], limits)):
            self.enter_context(mock.patch.dict(target, values))
        with FakeHub() as hub:
            self.export(workspace() / "tied", "--push_to_hub", "me/mine", "--formats", *formats, "own")
        files, place = hub.commits[0]["files"], self.folder / "downloaded"
        for name, content in files.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(content)
            for ours in (
                Path(__file__).parents[3],
                sys.prefix,
                Path(torch.__file__).parents[1],
                self.folder,
                workspace(),
            ):
                self.assertNotIn(str(ours).encode(), content, f"{name} names a folder of this machine")
        self.assertEqual(files["own/weights.own"], b"own")
        for kind in formats:
            self.assertIn(f"{kind}/comparison.json", files)
        tokenizer = AutoTokenizer.from_pretrained(place)
        model = AutoModelForSeq2SeqLM.from_pretrained(place).eval()
        ids = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
        names = tokenizer.convert_ids_to_tokens(ids[0])
        with torch.no_grad():
            states = model.encoder(ids).last_hidden_state[0].numpy()
            answer = model.generate(ids, max_new_tokens=8, num_beams=1)[0, 1:].tolist()
        for kind in formats:
            folder = str(place / kind)
            with self.subTest(kind):
                if kind in ("ctranslate2", "ctranslate2_int8"):
                    translator = ctranslate2.Translator(folder)
                    (found,) = translator.translate_batch([names], beam_size=1, max_decoding_length=8)
                    if kind == "ctranslate2":
                        listed = json.loads(files["ctranslate2/shared_vocabulary.json"])
                        wanted = [listed[token] for token in answer if token != tokenizer.eos_token_id]
                        self.assertEqual(found.hypotheses[0], wanted)
                    continue
                if kind.startswith("gguf"):
                    reader = gguf.GGUFReader(place / kind / "model.gguf")
                    self.assertNotEmpty(reader.tensors)
                    continue
                own = AutoTokenizer.from_pretrained(folder)(TEXTS[0])["input_ids"]
                self.assertEqual(own, ids[0].tolist())
                if kind == "ctranslate2_encoder":
                    found = np.array(ctranslate2.Encoder(folder).forward_batch([own]).last_hidden_state)[0]
                elif kind == "encoder":
                    with torch.no_grad():
                        found = AutoModelForTextEncoding.from_pretrained(folder)(ids).last_hidden_state[0].numpy()
                elif kind == "sentence_transformers":
                    (found,) = SentenceTransformer(folder, device="cpu").encode(TEXTS[:1])
                    np.testing.assert_allclose(found, states.mean(0), atol=1e-4)
                    continue
                else:
                    self.assertIn(kind, ("onnx", "onnx_encoder"), "a new format: load it here with its own library")
                    names = {"onnx": ("encoder_model", "decoder_model_merged"), "onnx_encoder": ("model",)}[kind]
                    graph, *_ = [onnxruntime.InferenceSession(f"{folder}/onnx/{name}.onnx") for name in names]
                    inputs = {"input_ids": ids.numpy(), "attention_mask": np.ones_like(ids)}
                    found = graph.run(None, inputs)[0][0]
                np.testing.assert_allclose(found, states, atol=1e-3)
        with self.assertRaisesRegex(AssertionError, "careless: its Format does not name .*secret"):
            self.export(workspace() / "tied", "--overwrite_output_dir", "--formats", "careless")

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

        def told_to_stop(*_, **__):
            os.kill(os.getpid(), signal.SIGTERM)
            return mock.Mock(exception=mock.Mock(side_effect=AssertionError("waited")))

        self.flags = self.flags | {"max_steps": 4}
        with FakeHub(), mock.patch.object(uploads, "start_upload", side_effect=told_to_stop) as started:
            self.train("--push_to_hub", "--save_steps", 1, "--save_total_limit", 1, code=75)
        started.assert_called_once()
        self.assertEqual([path.name for path in checkpoints_of(self.out)], ["checkpoint-1", "checkpoint-2"])

    def test_a_process_ends_before_its_uploads(self):
        program = (
            "import sys, time; from pathlib import Path; from huggingface_hub import HfApi\n"
            "from features.hub.uploads import published, start_upload\n"
            "HfApi.create_commit = lambda *_, **__: time.sleep(1000)\n"
            "start_upload(published(Path(sys.argv[1])), 'me/run', 'a step', 'hf_x')\nsys.exit(75)"
        )
        command = [sys.executable, "-c", program, workspace() / "whole"]
        done = subprocess.run(command, cwd=Path(pre_train_t5.__file__).parent, timeout=20)
        self.assertEqual(done.returncode, 75)

    @parameterized.parameters(None, OSError("no network"))
    def test_one_commit_at_a_time(self, error):
        """Both of a checkpoint's began at once: the Hub refuses one of them, or they arrive in another order."""
        (self.folder / "config.json").write_text("{}")
        running, most, second = [], [], threading.Event()

        def create_commit(*_, commit_message):
            running.append(commit_message)
            most.append(len(running))
            if commit_message == "first":
                second.wait(0.5)
            else:
                second.set()
            running.remove(commit_message)
            if error:
                raise error
            return commit_message

        with mock.patch.object(uploads.HfApi, "create_commit", create_commit):
            files = uploads.published(self.folder)
            first = uploads.start_upload(files, "me/run", "first", None)
            last = uploads.start_upload(files, "me/run", "last", None, into="last-checkpoint", after=first)
            self.assertIs(last.exception(), error)
        self.assertEqual(most, [1, 1])

    def test_a_failed_upload_of_an_export_can_be_repeated(self):
        with FakeHub(refuse={"/commit/": 403}):
            _, _, error = self.export(workspace() / "whole", "--push_to_hub", "me/mine", code=2)
        self.assertRegex(error, "the model is whole in .*; --overwrite_output_dir lets the same command try again")
        with FakeHub() as hub:
            self.export(workspace() / "whole", "--push_to_hub", "me/mine", "--overwrite_output_dir")
        self.assertLen(hub.commits, 1)

    @parameterized.parameters(
        (["--hub_model_id", "me/x"], "--hub_model_id me/x"),
        (["--push_to_hub", "--hub_model_id", "a/b/c"], "--hub_model_id a/b/c"),
    )
    def test_refused(self, flags, message):
        _, _, error = self.train(*flags, code=2)
        self.assertRegex(error, message)

    def test_an_export_to_no_repository_is_refused(self):
        _, _, error = self.export(workspace() / "whole", "--push_to_hub", "a/b/c", code=2)
        self.assertRegex(error, "--push_to_hub a/b/c: ")

    def test_the_search_of_an_engine_is_shown(self):
        compared = dict(texts=3, same_tokens=3, near_ties=0, largest_difference=1e-6, tolerance=1e-3)
        search = {"beam_size": 3, "length_penalty": 0.5, "patience": 8}
        found = {"huggingface": compared, "ctranslate2": compared | dict(search=search, same_beams=2)}
        card = card_of({}, more=(found,), run={})
        self.assertIn("translate_batch([pieces], beam_size=3, length_penalty=0.5, patience=8)", card)
        self.assertIn("With this search, 2 of 3 texts are the same as with transformers' beam search", card)


class TaskOfCardTest(parameterized.TestCase):
    @parameterized.parameters(
        ("glue/cola", "text-classification"),
        ("summarization/xsum", "summarization"),
        ("translation/wmt16_en_ro", "translation"),
        ("own/pairs", "text-generation"),
        (None, "text-generation"),
    )
    def test_tasks_that_the_hub_has(self, task, expected):
        task = task and tuple(task.split("/"))
        entry = first_entry(dict(benchmark=task[0], dataset_name=task[1])) if task else None
        self.assertEqual(hub_task(task, entry), expected)

    def test_a_task_with_the_fields_of_another_toolkit(self):
        theirs = dict(
            text_column_name=["a", "b"], label_column_name="c", metric_names="accuracy", labels={0: "x", 1: "y"}
        )
        self.enterContext(mock.patch.dict(DATASET_VALS, mine={"theirs": theirs}))
        card = card_of(dict(benchmark="mine", dataset_name="theirs"))
        for part in ("pipeline_tag: text-classification", "metrics:\n- accuracy", "theirs a: ... b: ..."):
            self.assertIn(part, card)
