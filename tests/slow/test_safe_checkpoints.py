"""What a checkpoint, a file or a flag of somebody else must not do: run code, be lost, be taken for something else."""

import contextlib
import errno
import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import stat
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import datasets
import numpy as np
import torch
from absl.testing import parameterized
from helpers import run_main, sentences
from transformers.integrations.deepspeed import HfDeepSpeedConfig
from transformers.trainer_callback import TrainerState

import evaluate_t5
import pre_train_t5
from foundry.arguments.training import FineTuningArguments
from foundry.common import whole_folders
from foundry.common.command_line import parse_arguments
from foundry.common.digests import file_digests
from foundry.common.errors import UserError
from foundry.common.paths import LOCK
from foundry.common.reports import read_json, read_metrics, side_file
from foundry.common.whole_folders import cached, difference, is_disk_full, publish, write_manifest
from foundry.corpora import sources
from foundry.corpora.hub import load_dataset_splits
from foundry.corpora.sources import find_sources
from foundry.corpora.token_files import tokenised
from foundry.corpora.tokenizers import load_tokenizer, train_tokenizer
from foundry.model_t5 import build_config, create_model, load_model
from foundry.modeling.loading import load_config
from foundry.publishing.records import read_run_folder
from foundry.runs.callbacks import MetricsFileCallback
from foundry.training.checkpoints import check_saved_state, prepare_output_dir
from foundry.training.output_lock import lock_output_dir, unlock_output_dir
from tasks.task_records import read_record, recorded_flags
from tools import sweep_file

ROOT = Path(__file__).parents[2]


class Bomb:
    """Pickled, it makes a folder wherever it is read."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


class TestCase(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.crater = self.folder / "crater"

    def training(self, **flags) -> FineTuningArguments:
        return FineTuningArguments(**{"output_dir": str(self.folder / "out"), "report_to": "none"} | flags)


class TrustTest(TestCase):
    """A checkpoint that would run code is refused."""

    def test_shards_of_deepspeed_are_not_read(self):
        folder = self.folder / "checkpoint-2"
        (folder / "global_step2").mkdir(parents=True)
        torch.save({"x": Bomb(self.crater)}, folder / "global_step2" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
        with self.assertRaisesRegex(UserError, "it has no optimizer.pt and no scheduler.pt .saved with --save_only"):
            check_saved_state(self.training(), str(folder))
        self.assertFalse(self.crater.exists())

    @parameterized.parameters("config", "tokenizer")
    def test_code_beside_a_model_is_not_run(self, kind):
        code = f"import os\nos.mkdir({str(self.crater)!r})\nclass C: pass\n"
        (self.folder / "own.py").write_text(code)
        config = {"model_type": "own", "auto_map": {"AutoConfig": "own.C"}}
        (self.folder / "config.json").write_text(json.dumps(config))
        own = {"tokenizer_class": "C", "auto_map": {"AutoTokenizer": ["own.C", None]}}
        (self.folder / "tokenizer_config.json").write_text(json.dumps(own))
        load = load_tokenizer if kind == "tokenizer" else build_config
        asked = mock.patch("builtins.input", return_value="y")
        with asked as question, self.assertRaisesRegex(ValueError, str(self.folder)):
            load(str(self.folder))
        question.assert_not_called()
        self.assertFalse(self.crater.exists())

    def test_a_recorded_metric_is_no_code(self):
        """`evaluate` would import the folder's script; another name would be fetched from the Hub and run."""
        seen, is_watched = [], [True]
        watched = ("import", "exec", "socket.connect", "socket.getaddrinfo")

        def hook(event: str, args: tuple) -> None:
            if is_watched and event in watched:
                seen.append(f"{event} {args[0]!r:.200}")

        model = self.folder / "model"
        (model / "score").mkdir(parents=True)
        (model / "score" / "score.py").write_text(f"import os\nos.mkdir({str(self.crater)!r})\n")
        (self.folder / "rows.jsonl").write_text('{"q": "a", "a": "b"}\n')
        record = dict(benchmark="own", dataset_name="pairs", source_column=["q"], target_column=["a"])
        record |= dict(validation_file=[str(self.folder / "rows.jsonl")])
        sys.addaudithook(hook)
        self.addCleanup(is_watched.clear)
        for name in (str(model / "score"), "somebody/score"):
            (model / "task.json").write_text(json.dumps(record | dict(metrics=["rougeL", name])))
            _, _, error = run_main(evaluate_t5.main, "--model_name_or_path", model, "--use_cpu", code=2)
            self.assertIn(f"the metric {name} is none of ours", error)
            self.assertIn(f"give --metrics rougeL {name}", error)
        self.assertFalse(self.crater.exists())
        self.assertEmpty([line for line in seen if "score" in line or line.startswith("socket")])
        values = dict(benchmark=None, dataset_name=None, split=None, do_predict=False)
        self.assertNotIn("metrics", recorded_flags(str(model), values, ["metrics"]), "the person has named them")

    def test_rules_with_a_token_that_is_not_there(self):
        train_tokenizer(sentences(200), self.folder, 300)
        path = self.folder / "tokenizer.json"
        rules = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}], "pair": []}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": rules | {"special_tokens": {}}}))
        with self.assertRaisesRegex(UserError, "the tokenizer cannot be read"):
            load_tokenizer(str(self.folder))

    def test_a_tokenizer_that_gives_no_ids(self):
        (self.folder / "tokenizer_config.json").write_text(
            json.dumps(dict(tokenizer_class="ByT5Tokenizer", model_input_names=["evil"]))
        )
        with self.assertRaisesRegex(UserError, "the model_input_names of its tokenizer_config.json lack input_ids"):
            load_tokenizer(str(self.folder))

    @parameterized.parameters("T5Tokenizer", "ByT5Tokenizer")
    def test_more_sentinels_than_memory(self, name):
        (self.folder / "tokenizer_config.json").write_text(
            json.dumps(dict(tokenizer_class=name, extra_ids=300_000_000))
        )
        if name == "T5Tokenizer":
            train_tokenizer(sentences(200), self.folder / "whole", 300)
            shutil.copyfile(self.folder / "whole" / "spiece.model", self.folder / "spiece.model")
        with self.assertRaisesRegex(UserError, "extra_ids 300000000 of tokenizer_config.json: must be 0 to 10,000"):
            load_tokenizer(str(self.folder))

    @parameterized.parameters(
        ({"num_layers": 10**9}, "has num_layers 1000000000: at most 1,000 are built"),
        ({"encoder": {"num_hidden_layers": 10**9}}, "has num_hidden_layers 1000000000: at most 1,000"),
        ({"num_labels": 10**9}, "has num_labels 1000000000: at most 1,048,576"),
        ({"d_model": "16"}, "not a folder or Hub name with a model .*d_model"),
        ({"dtype": "load"}, "not a folder or Hub name with a model"),
        ({"relative_attention_max_distance": 0}, "is wrong .relative_attention_max_distance 0: must be at least 1"),
        ({"dropout_rate": float("nan")}, "is wrong .dropout_rate nan: must be"),
        ({"decoder_start_token_id": 10**9}, "is wrong .decoder_start_token_id 1000000000: must be"),
        ({"feed_forward_proj": "gated-evil", "dense_act_fn": "evil"}, "its configuration .* is wrong .*evil"),
    )
    def test_values_that_no_model_has(self, changes, message):
        create_model(build_config("tiny", 300)).save_pretrained(self.folder)
        config = json.loads((self.folder / "config.json").read_text()) | changes
        (self.folder / "config.json").write_text(json.dumps(config))
        with self.assertRaisesRegex(UserError, message):
            load_model(str(self.folder))

    @parameterized.parameters("attn_implementation", "_attn_implementation")
    def test_an_attention_of_the_hub(self, name):
        config = build_config("tiny").to_dict() | {name: "somebody/kernel"}
        (self.folder / "config.json").write_text(json.dumps(config))
        message = "config.json names the attention somebody/kernel, which is code"
        no_network = mock.patch("socket.getaddrinfo", side_effect=AssertionError("fetched"))
        with no_network, self.assertRaisesRegex(UserError, message):
            load_model(str(self.folder))

    def test_settings_of_generate_that_transformers_refuses(self):
        create_model(build_config("tiny", 300)).save_pretrained(self.folder)
        (self.folder / "generation_config.json").write_text('{"compile_config": {"fullgraph": true}}')
        with self.assertRaisesRegex(UserError, "generation_config.json is wrong .*compile_config"):
            load_model(str(self.folder))

    @parameterized.parameters(
        (dict(num_beams=10**7), "num_beams 10000000: must be 1 to 1,000"),
        (dict(num_return_sequences=10**6, do_sample=True), "num_return_sequences 1000000: must be 1 to 1,000"),
        (dict(forced_bos_token_id=10**9), "forced_bos_token_id has 1000000000, which is no token of the model"),
        (dict(bad_words_ids=[[5, 10**9]]), "bad_words_ids has 1000000000"),
        (dict(sequence_bias=[[[10**9], 1.0]]), "sequence_bias has 1000000000"),
        (dict(sequence_bias={"x": "y"}), "sequence_bias has 'x'"),
        (dict(eos_token_id="x"), "eos_token_id has 'x'"),
        (dict(eos_token_id={}), "eos_token_id {}: cannot be generated with"),
        (dict(bad_words_ids=[[-1]]), r"bad_words_ids \[\[-1\]\]: cannot be generated with"),
        (dict(repetition_penalty=-1), "repetition_penalty -1: cannot be generated with"),
        (dict(exponential_decay_length_penalty=[[5]]), "exponential_decay_length_penalty .*cannot be generated with"),
        (dict(token_healing=True, is_assistant=True, output_hidden_states="x"), None),  # nothing of the answer's text
        (dict(num_beams=4, repetition_penalty=1.5, no_repeat_ngram_size=3, length_penalty=0.6, min_length=5), None),
        (dict(suppress_tokens=[3], bad_words_ids=[[5, 6]], sequence_bias=[[[7], -1.0]], eos_token_id=[1, 2]), None),
    )
    def test_settings_of_generate_that_no_model_has(self, changes, message):
        create_model(build_config("tiny", 300)).save_pretrained(self.folder)
        (self.folder / "generation_config.json").write_text(json.dumps(changes))
        refused = self.assertRaisesRegex(UserError, message) if message else contextlib.nullcontext()
        before = torch.random.get_rng_state()
        with refused:
            model = load_model(str(self.folder))
            model.generate(torch.tensor([[5, 6, 1]]), max_new_tokens=2)
        if "do_sample" not in changes:
            self.assertTrue(torch.equal(before, torch.random.get_rng_state()))  # training draws the same numbers

    def test_the_form_of_outputs_is_not_the_file_s(self):
        create_model(build_config("tiny", 300)).save_pretrained(self.folder)
        path = self.folder / "config.json"
        odd = {"return_dict": False, "output_hidden_states": True}
        path.write_text(json.dumps(json.loads(path.read_text()) | odd))
        model, ids = load_model(str(self.folder)), torch.tensor([[5, 6, 1]])
        found = model(input_ids=ids, labels=ids)
        self.assertEqual(found.logits.shape, (1, 3, 320))
        self.assertIsNone(found.decoder_hidden_states)

    @parameterized.parameters(
        ({"arguments": [1]}, "arguments .1.: is none"),
        ({"arguments": {"benchmark": 5}}, "benchmark 5: is none"),
        ({"arguments": {"source_column": {"a": 1}}}, "source_column {'a': 1}: is none"),
        ({"arguments": {"target_type": "x"}}, "--target_type x: must be one of"),
        ({"arguments": {"max_source_length": -5}}, "--max_source_length -5: must be"),
        ({"parameters": "x"}, "parameters 'x': is none"),
    )
    def test_a_record_that_no_run_has_written(self, content, message):
        (self.folder / "run.json").write_text(json.dumps(content))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            self.assertEqual(read_run_folder(self.folder), {"run": {}, "results": {}, "metrics": []})
        self.assertRegex(printed.getvalue(), f"not used: .*{message}")

    def test_a_step_that_is_no_number(self):
        path = self.folder / "metrics.jsonl"
        path.write_text('{"step": 1, "loss": 2.5}\n{"step": "x", "loss": 2.5}\n')
        with self.assertRaisesRegex(UserError, "metrics.jsonl, line 2: its step is no whole number"):
            read_metrics(path)
        for name, value in (("seconds", "x"), ("loss", [1]), ("eval_f1", {})):
            path.write_text(json.dumps({"step": 1, name: value}) + "\n")
            with self.assertRaisesRegex(UserError, f"line 1: its {name} is no number"):
                read_metrics(path)

    @parameterized.parameters(
        ({"weight_map": {"shared.weight": 5}}, "names 5, which is no file of this folder"),
        ({"weight_map": {"shared.weight": "../x"}}, "names ../x, which is no file of this folder"),
        ({"weight_map": [1]}, "has no weight_map"),
        ({}, "has no weight_map"),
    )
    def test_a_list_of_weights_that_is_none(self, content, message):
        create_model(build_config("tiny", 300)).save_pretrained(self.folder)
        (self.folder / "model.safetensors").unlink()
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(content))
        with self.assertRaisesRegex(UserError, message):
            load_model(str(self.folder))

    def test_a_pickle_is_named_for_what_it_calls(self):
        """torch's message advises to read it with weights_only=False."""
        create_model(build_config("tiny", 300)).save_pretrained(self.folder)
        (self.folder / "model.safetensors").unlink()
        torch.save(Bomb(self.crater), self.folder / "pytorch_model.bin")
        with self.assertRaisesRegex(UserError, "would call posix.mkdir, which can be any code of its author"):
            load_model(str(self.folder))

    @parameterized.parameters(
        ("dataset_dict.json", {"splits": ["train", "../theirs"]}, "lists ../theirs, which is no part of this folder"),
        ("dataset_dict.json", {"splits": 5}, "its lists of splits and files are none"),
        ("train/state.json", {"_data_files": [{"filename": "/x/y.arrow"}]}, "lists /x/y.arrow, which is no part"),
        ("train/state.json", {"_data_files": [5]}, "its lists of splits and files are none"),
        ("train/state.json", {}, "cannot be loaded from disk"),
    )
    def test_a_saved_data_set_that_leads_elsewhere(self, name, content, message):
        rows = datasets.Dataset.from_dict({"text": ["a", "b"]})
        rows.save_to_disk(self.folder / "theirs")
        datasets.DatasetDict(train=rows).save_to_disk(self.folder / "saved")
        (self.folder / "saved" / name).write_text(json.dumps(content))
        no_network = mock.patch("socket.getaddrinfo", side_effect=AssertionError("asked"))
        with no_network, self.assertRaisesRegex(UserError, message):
            load_dataset_splits(str(self.folder / "saved"), None, "--dataset_name")

    @parameterized.parameters(
        ("README.md", "configs:\n- data_files: ../theirs.jsonl", "its settings name ../theirs.jsonl, which is no part"),
        ("README.md", "configs:\n- data_files:\n  - split: train\n    path: [/x/y.jsonl]", "name /x/y.jsonl, which"),
        ("README.md", "configs:\n- data_files: https://example.com/a.jsonl", "name https://example.com/a.jsonl"),
        ("README.md", "configs:\n- data_files: hf://datasets/a/b/c.jsonl", "name hf://datasets/a/b/c.jsonl"),
        ("README.md", "configs:\n- data_dir: ../..", "its settings name ../.., which is no part"),
        ("README.md", "a: &a [1]\nconfigs: [*a, *a]", r"the head of its README.md cannot be read .*the alias \*a"),
        ("README.md", "configs: 5", "the head of its README.md cannot be read"),
        ("README.md", "configs: !!python/object/apply:os.getcwd []", "the head of its README.md cannot be read"),
        (".huggingface.yaml", "configs:\n- data_files: ../theirs.jsonl", "its settings name ../theirs.jsonl"),
        ("README.md", "configs:\n- config_name: a\n  data_files: a.jsonl\n  field: x", "cannot be loaded from disk"),
        ("README.md", "configs:\n- config_name: a\n  data_files: a.jsonl", None),
    )
    def test_a_data_folder_whose_settings_lead_elsewhere(self, name, settings, message):
        """`datasets` follows them: it read any file, and fetched any address."""
        (self.folder / "rows").mkdir()
        for place in ("rows/a", "theirs"):
            (self.folder / f"{place}.jsonl").write_text('{"text": "a"}\n')
        (self.folder / "rows" / name).write_text(f"---\n{settings}\n---\n" if name == "README.md" else settings)
        no_network = mock.patch("socket.getaddrinfo", side_effect=AssertionError("asked"))
        refused = self.assertRaisesRegex(UserError, message) if message else contextlib.nullcontext()
        with no_network, refused, mock.patch.object(datasets.config, "HF_DATASETS_CACHE", self.folder / "cache"):
            load_dataset_splits(str(self.folder / "rows"), None, "--dataset_name")

    DEEP = "[" * 100_000 + "]" * 100_000
    LONG = "1" * 400

    @parameterized.product(
        content=('{"a": ' + DEEP + "}", '{"a": ' + LONG + "}"),
        read=(
            ("task.json", lambda path: read_record(str(path.parent))),
            ("run.json", read_json),
            ("adapter_config.json", lambda path: load_config(str(path.parent), "--model_name_or_path")),
            ("adapter_config.json", lambda path: load_tokenizer(str(path.parent))),
            ("config.json", lambda path: load_config(str(path.parent), "--model_name_or_path")),
            ("metrics.jsonl", read_metrics),
            ("recipe.yaml", lambda path: parse_arguments([FineTuningArguments], [str(path)])),
        ),
    )
    def test_brackets_and_digits_without_end(self, content, read):
        """One line, not a traceback; a number of many digits may also be read."""
        name, function = read
        path = self.folder / name
        path.write_text(content + "\n" + "{}\n" * (name == "metrics.jsonl"))
        with self.assertRaises(UserError) as caught:
            function(path)
        self.assertIn(str(self.folder), str(caught.exception))


class StateTest(TestCase):
    def checkpoint(self, *names: str) -> str:
        folder = self.folder / "out" / "checkpoint-5"
        folder.mkdir(parents=True)
        TrainerState(global_step=5).save_to_json(folder / "trainer_state.json")
        for name in names:
            if name.startswith("optimizer"):
                torch.save(torch.optim.SGD([torch.zeros(1)]).state_dict(), folder / name)
            elif name == "manifest.json":
                (folder / name).write_text("{}")
            else:
                torch.save({"last_epoch": 5}, folder / name)
        return str(folder)

    def random_numbers(self) -> dict:
        return {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}

    def test_random_numbers_are_read_as_transformers_saved_them(self):
        checkpoint = self.checkpoint("optimizer.pt", "scheduler.pt")
        torch.save(self.random_numbers(), Path(checkpoint) / "rng_state.pth")
        check_saved_state(self.training(), checkpoint)

    @parameterized.product(
        name=("optimizer.pt", "scheduler.pt", "rng_state.pth", "loss_state_0.json"),
        how=("cut", "emptied", "noise", "list", "types", "bomb"),
    )
    def test_a_damaged_file_is_named_in_one_line(self, name, how):
        """Without a manifest they were tracebacks, one of which advised weights_only=False."""
        checkpoint = self.checkpoint("optimizer.pt", "scheduler.pt")
        path = Path(checkpoint) / name
        torch.save(self.random_numbers(), Path(checkpoint) / "rng_state.pth")
        if how in ("list", "types", "bomb"):
            content = {"list": [1], "types": {"state": 3, "param_groups": 4, "python": 5}, "bomb": Bomb(self.crater)}[
                how
            ]
            if name == "scheduler.pt" and how == "types":
                content = 7
            torch.save({"x": content} if how == "bomb" else content, path)
        else:
            data = path.read_bytes() if path.exists() else b'{"running_loss": 1.5}'
            path.write_bytes({"cut": data[: len(data) // 2], "emptied": b"", "noise": os.urandom(200)}[how])
        with self.assertRaises(UserError) as caught:
            check_saved_state(self.training(), checkpoint)
        said = str(caught.exception)
        self.assertStartsWith(said, f"--resume_from_checkpoint {path}: ")
        self.assertNotIn("weights_only", said)
        self.assertNotIn("\n", said)
        if how == "bomb" and name != "loss_state_0.json":
            self.assertIn("posix.mkdir, which can be any code of its author", said)
        self.assertFalse(self.crater.exists())

    @parameterized.parameters(
        ("[]", "cannot be read"),
        ("{}", "cannot be read"),
        ('{"global_step": 5', "cannot be read"),
        ('{"global_step": "5", "max_steps": 9, "log_history": []}', "a global_step of the wrong type"),
        ('{"global_step": 5, "max_steps": 9, "log_history": [{"loss": 1}]}', "cannot be read"),
        ('{"global_step": 5, "max_steps": 9, "log_history": [{"step": null}]}', "a log_history of the wrong type"),
        ('{"global_step": 5, "max_steps": 9, "log_history": [], "best_metric": "x"}', "a best_metric of the wrong"),
        ('{"global_step": 5, "max_steps": 9, "log_history": [], "stateful_callbacks": 1}', "a stateful_callbacks of"),
    )
    def test_a_damaged_state_of_the_trainer(self, text, message):
        checkpoint = self.checkpoint("optimizer.pt", "scheduler.pt")
        (Path(checkpoint) / "trainer_state.json").write_text(text)
        with self.assertRaisesRegex(
            UserError, f"checkpoint-5: not a whole checkpoint: its trainer_state.json .*{message}"
        ):
            prepare_output_dir(self.training(resume_from_checkpoint=checkpoint))

    def test_a_field_of_a_newer_transformers_is_named(self):
        checkpoint = self.checkpoint("optimizer.pt", "scheduler.pt")
        state = Path(checkpoint) / "trainer_state.json"
        state.write_text(json.dumps(json.loads(state.read_text()) | {"newer": 1}))
        with self.assertRaisesRegex(UserError, "trainer_state.json: .*unexpected keyword argument 'newer'"):
            check_saved_state(self.training(), checkpoint)

    @parameterized.parameters(
        ((), "no optimizer.pt and no scheduler.pt"),
        (("optimizer.pt",), "has no scheduler.pt"),
        (("scheduler.pt",), "has no optimizer.pt"),
    )
    def test_a_checkpoint_without_the_optimizer(self, names, message):
        checkpoint = self.checkpoint(*names)
        with self.assertRaisesRegex(ValueError, f"{message}.*only the weights with --model_name_or_path .*-5"):
            check_saved_state(self.training(), checkpoint)

    @parameterized.parameters(
        ("nvme", {"shared.weight": {}}, "offload_optimizer to nvme .* make it cpu"),
        ("cpu", {"shared.weight": {}}, None),
    )
    def test_what_deepspeed_cannot_take(self, device, state, message):
        checkpoint = Path(self.checkpoint("scheduler.pt"))
        torch.save({"state": state, "param_groups": [{"lr": 0.1}]}, checkpoint / "optimizer.pt")
        args = self.training()
        args.deepspeed = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": device}}}
        args.hf_deepspeed_config = HfDeepSpeedConfig(args.deepspeed)
        refused = self.assertRaisesRegex(UserError, message) if message else contextlib.nullcontext()
        with refused:
            check_saved_state(args, str(checkpoint))

    def test_a_whole_one(self):
        check_saved_state(self.training(), None)
        check_saved_state(self.training(), self.checkpoint("optimizer.pt", "scheduler.pt", "manifest.json"))

    def test_one_without_a_manifest_is_named(self):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            check_saved_state(self.training(), self.checkpoint("optimizer.pt", "scheduler.pt"))
        self.assertIn("checkpoint-5 has no manifest.json", printed.getvalue())

    @parameterized.parameters(
        ({}, "lists no files"),
        ({"../secret": {"bytes": 1, "sha256": "0"}}, "lists ../secret, which is no file of it"),
        ({"/secret": {"bytes": 1, "sha256": "0"}}, "lists /secret, which is no file of it"),
        ({"a": {"bytes": "x", "sha256": "0"}}, "cannot be read"),
    )
    def test_a_manifest_that_is_not_of_its_folder(self, files, message):
        (self.folder / "a").touch()
        (self.folder / "manifest.json").write_text(json.dumps({"files": files}))
        self.assertEqual(difference(self.folder), f"its manifest.json {message}")


class LockTest(TestCase):
    def holder(self, args) -> multiprocessing.Process:
        """The process of another run, a fork that has locked the folder."""
        fork = multiprocessing.get_context("fork")
        locked = fork.Event()

        def hold() -> None:
            os.environ["SLURM_JOB_ID"] = "123"
            lock_output_dir(args)
            locked.set()
            signal.pause()

        process = fork.Process(target=hold, daemon=True)
        process.start()
        self.assertTrue(locked.wait(60))
        return process

    def test_two_runs_in_one_folder(self):
        args = self.training()
        out = Path(args.output_dir)
        out.mkdir()
        holder = self.holder(args)
        with self.assertRaisesRegex(ValueError, f"--output_dir .*out: another run .*process {holder.pid} on .*job 123"):
            prepare_output_dir(args)
        with mock.patch.dict(os.environ, RANK="1"):
            lock_output_dir(args)  # only rank 0 locks
        lock_output_dir(self.training(dry_run=True))
        holder.kill()
        holder.join()
        self.assertTrue((out / LOCK).exists())
        self.assertIsNone(prepare_output_dir(args), "a dead run holds nothing, and its lock file is no content")
        self.assertEqual(json.loads((out / LOCK).read_text())["pid"], os.getpid())
        prepare_output_dir(args)  # by the same process
        unlock_output_dir(args)
        self.assertFalse((out / LOCK).exists())

    def test_a_file_system_without_locks(self):
        args = self.training()
        Path(args.output_dir).mkdir()
        refuse = mock.patch("fcntl.flock", side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK)))
        with refuse, mock.patch("builtins.print") as printed:
            self.assertIsNone(prepare_output_dir(args))
        self.assertIn("cannot be locked (No locks available)", printed.call_args.args[0])


class NamesTest(TestCase):
    @parameterized.parameters(
        (["--train_file", ""], "--train_file '': an empty value"),
        (["--train_file", "a.txt", "", "b.txt"], "'': an empty value"),
        (["--output_dir="], "--output_dir '': an empty value"),
    )
    def test_a_variable_that_is_not_set(self, words, message):
        _, _, error = run_main(pre_train_t5.main, *words, code=2)
        self.assertRegex(error, message)

    def test_a_recipe_with_an_empty_value(self):
        (self.folder / "r.yaml").write_text("output_dir: ''\n")
        with self.assertRaisesRegex(ValueError, "--output_dir '': an empty value"):
            parse_arguments([FineTuningArguments], [str(self.folder / "r.yaml")])

    @parameterized.parameters("", "..", ".", None)
    def test_a_sweep_without_a_name(self, name):
        sweep = {"program": __file__, "method": "grid", "parameters": {"x": {"values": [1, 2]}}, "name": name}
        (self.folder / "_.yaml").write_text(json.dumps(sweep))
        with self.assertRaisesRegex(UserError, "name: .* must have a letter"):
            sweep_file.read_sweep(str(self.folder / "_.yaml"))


class PermissionsTest(TestCase):
    @parameterized.parameters((0o022, 0o644, 0o755), (0o007, 0o660, 0o770))
    def test_files_for_a_group(self, umask, file_mode, folder_mode):
        self.addCleanup(os.umask, os.umask(umask))
        aside = self.folder / "_saving" / "checkpoint-1"
        aside.mkdir(parents=True)
        (aside / "model.safetensors").touch(mode=0o600)
        publish(aside, self.folder / "checkpoint-1")
        folder = cached(self.folder, "tokens", "key", lambda aside: (aside / "a").touch(mode=0o600))
        for path in (self.folder / "checkpoint-1", folder):
            self.assertEqual(stat.S_IMODE(path.stat().st_mode), folder_mode)
            for file in path.iterdir():
                self.assertEqual(stat.S_IMODE(file.stat().st_mode), file_mode, file)

    def test_the_group_of_a_folder_stays(self):
        folder = self.folder / "shared"
        folder.mkdir()
        folder.chmod(0o2700)
        (folder / "a").touch()
        write_manifest(folder)
        self.assertTrue(folder.stat().st_mode & stat.S_ISGID)


class WeakFileSystemTest(TestCase):
    """CIFS, shared folders of virtual machines and gcsfuse: the first checkpoint ended the run."""

    @parameterized.parameters(("os.fsync", errno.EINVAL), ("os.chmod", errno.EPERM), ("os.fsync", errno.ENOTSUP))
    def test_what_it_lacks_is_said_once(self, function, number):
        def refuse(*_, **__):
            raise OSError(number, os.strerror(number))

        whole_folders._say.cache_clear()
        with mock.patch(function, refuse), contextlib.redirect_stdout(io.StringIO()) as printed:
            for step in (1, 2):
                aside = self.folder / "_saving" / f"checkpoint-{step}"
                aside.mkdir(parents=True)
                (aside / "model.safetensors").write_text("weights")
                publish(aside, self.folder / f"checkpoint-{step}")
                self.assertIsNone(difference(self.folder / f"checkpoint-{step}"))
        self.assertEqual(printed.getvalue().count(os.strerror(number)), 1, printed.getvalue())

    @parameterized.parameters(("os.fsync", errno.EIO), ("os.fsync", errno.ENOSPC), ("os.chmod", errno.EROFS))
    def test_what_failed_is_an_error(self, function, number):
        (self.folder / "a").write_text("a")
        refuse = mock.patch(function, side_effect=OSError(number, os.strerror(number)))
        at_once = mock.patch.object(whole_folders, "PATIENCE", 0.0)
        with refuse, at_once, self.assertRaisesRegex(OSError, os.strerror(number)):
            write_manifest(self.folder)


class FullDiskTest(TestCase):
    def test_what_torch_says(self):
        for text in (
            "[enforce fail at inline_container.cc:664] . unexpected pos 576 vs 470",
            "PytorchStreamWriter failed writing file data/3: file write failed",
        ):
            self.assertTrue(is_disk_full(RuntimeError(text)))

    def test_a_side_file_warns(self):
        with mock.patch("sys.stderr", io.StringIO()) as err, side_file(Path("x/samples.md")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.assertEqual(err.getvalue(), "x/samples.md was not written: No space left on device\n")

    def test_half_a_line_of_metrics_is_taken_back(self):
        args, state = None, SimpleNamespace(is_world_process_zero=True, global_step=0, epoch=0.0)
        callback = MetricsFileCallback(self.folder)
        callback.on_train_begin(args, state, None)
        callback.on_log(args, state, None, logs={"loss": 1.0})
        real = Path.open

        def full(path, *words, **options):
            file = real(path, *words, **options)

            def write(text):
                type(file).write(file, text[:9])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            return mock.MagicMock(__enter__=lambda _: mock.Mock(write=write), __exit__=lambda *_: file.close())

        with mock.patch.object(Path, "open", full), mock.patch("sys.stderr", io.StringIO()) as err:
            callback.on_log(args, state, None, logs={"loss": 2.0})
        self.assertIn("metrics.jsonl was not written", err.getvalue())
        callback.on_log(args, state, None, logs={"loss": 3.0})
        self.assertEqual([line["loss"] for line in read_metrics(self.folder / "metrics.jsonl")], [1.0, 3.0])


class ChangedFileTest(TestCase):
    def test_a_file_that_changes_while_it_is_read(self):
        text = self.folder / "a.txt"
        text.write_text("the cat sat on the mat and the dog lay by the door\n" * 60)
        train_tokenizer([text.read_text()], self.folder / "tokenizer", 120)
        tokenizer = load_tokenizer(str(self.folder / "tokenizer"))
        flags = pre_train_t5.PreTrainingDataArguments(train_file=[str(text)], data_cache_dir=str(self.folder / "cache"))
        found = find_sources(flags)
        text.write_text("something else entirely stands here now\n" * 60)
        with self.assertRaisesRegex(ValueError, "a.txt has changed while it was read"):
            tokenised(flags, found, tokenizer)
        self.assertEmpty([path for path in (self.folder / "cache").glob("tokens-*")])
        with self.assertRaisesRegex(ValueError, "a.txt has changed while it was read"):
            sources.tokenizer_for([found["train"]], 120, self.folder / "cache")
        tokenised(flags, find_sources(flags), tokenizer)


class CtrlCTest(TestCase):
    """What works in threads and in C++ was waited for, which may take minutes, or an hour."""

    def test_while_files_are_hashed(self):
        class Long(io.RawIOBase):
            left, told = 2**31, False

            def readable(self):
                return True

            def readinto(self, buffer):
                if self.left < 2**30 and not self.told:
                    self.told = True
                    os.kill(os.getpid(), signal.SIGINT)
                size = min(self.left, len(buffer))
                self.left -= size
                return size

        file = Long()
        with self.assertRaises(KeyboardInterrupt):
            file_digests([SimpleNamespace(open=lambda _: file)])
        self.assertGreater(file.left, 0)

    def test_while_a_tokenizer_is_trained(self):
        def train_in_c(**_):
            with contextlib.suppress(KeyboardInterrupt):  # which C++ does not hear
                os.kill(os.getpid(), signal.SIGINT)
                ended.wait(60)

        ended = threading.Event()
        self.addCleanup(ended.set)
        patch = mock.patch("sentencepiece.SentencePieceTrainer.train", train_in_c)
        with patch, self.assertRaises(KeyboardInterrupt):
            train_tokenizer(["a text"], self.folder / "tokenizer", 300)


class MetricTest(TestCase):
    @parameterized.parameters(
        (["--metric_for_best_model", "loss"], "loss", False),
        ([], "eval_accuracy", True),
        (["--greater_is_better", "false"], "eval_accuracy", False),  # as of an error rate that evaluate.load brings
    )
    def test_the_metric_that_was_asked_for_stays(self, words, metric, greater):
        import fine_tune_t5

        flags = ["--benchmark", "glue", "--dataset_name", "sst2", "--report_to", "none", "--config_name", "tiny"]
        *_, args, _ = fine_tune_t5.parse_flags([*flags, "--output_dir", str(self.folder / "out"), *words])
        self.assertEqual((args.metric_for_best_model, args.greater_is_better), (metric, greater))
