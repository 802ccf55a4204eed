"""Nothing of the data leaves unasked: each text, its ids, each name of a file and each path are looked for in all that
a stand-in Hub received, of a run with each feature and for every --hub_strategy."""

import contextlib
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from absl.testing import parameterized
from fake_hub import FakeHub
from helpers import run_main, sentences, write_tiny_model
from transformers.trainer_utils import HubStrategy

import export_checkpoint
import fine_tune_t5
import pre_train_t5
from features.hub.uploads import RunUploads
from foundry.common.whole_folders import checkpoints_of
from foundry.corpora.tokenizers import load_tokenizer

# Each name of a folder or file has the mark "secret".
COMMON = "--model_name_or_path secret/client/model --data_cache_dir out/run/secretcache --disable_tqdm true "
COMMON += "--max_steps 4 --warmup_steps 1 --logging_steps 1 --eval_strategy steps --eval_steps 2 --save_strategy steps "
COMMON += "--save_steps 1 --save_total_limit 9 --per_device_train_batch_size 4 --gradient_accumulation_steps 1 "
COMMON += "--max_eval_samples 4 --preprocessing_num_workers 1 --output_dir out/run --hub_model_id me/run --push_to_hub "
COMMON += "--hub_strategy all_checkpoints --most_unknown 1 --report_to "
PAIRS = "--train_file secret/pairs.jsonl --source_column long --target_column short --max_source_length 32 "
PAIRS += "--max_target_length 8 --predict_with_generate true --load_best_model_at_end false "
RUNS = {
    "plain": ("pre_train", "--train_file secret/text.txt --input_seq_length 32"),
    "two_corpora": ("pre_train", "--train_file secret/text.txt:0.5 secret/more.txt:0.5 --input_seq_length 32"),
    "documents": ("pre_train", "--train_file secret/text.txt --input_seq_length 32 --packing documents"),
    "streams": ("pre_train", "--train_file secret/text.txt --input_seq_length 32 --streaming true"),
    "pairs": ("fine_tune", PAIRS),
    "streamed_pairs": ("fine_tune", f"{PAIRS} --validation_file secret/pairs.jsonl --streaming true"),
    "rewards": ("fine_tune", f"{PAIRS} --reward rougeL --reward_method grpo --reward_updates 2"),
    "preferences": ("fine_tune", f"{PAIRS} --rejected_column bad --preference dpo"),
    "distillation": ("fine_tune", f"{PAIRS} --teacher secret/client/model --teacher_top_k 4"),
}


class LeakTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.material = place = cls.folder / "material" / "secret"
        cls.lines = sentences(160)
        write_tiny_model(place / "client" / "model", sentences(200, seed=1), 300)
        (place / "text.txt").write_text("\n".join(cls.lines) + "\n")
        (place / "more.txt").write_text("\n".join(cls.lines[::-1]) + "\n")
        shorter = [dict(long=text, short=text[:40], bad=text[-40:]) for text in cls.lines[:60]]
        (place / "pairs.jsonl").write_text("".join(f"{row}\n".replace("'", '"') for row in shorter))
        tokenizer = load_tokenizer(str(place / "client" / "model"))
        texts = cls.lines + [f"{row[side]}" for row in shorter for side in ("short", "bad")]
        cls.marks = {text[:24].encode() for text in texts}
        cls.clean = set()  # what has no mark: most files are sent again and again
        for ids in (tokenizer(text, add_special_tokens=False).input_ids[:8] for text in texts):
            cls.marks |= {", ".join(map(str, ids)).encode(), ",".join(map(str, ids)).encode()}
            cls.marks |= {np.array(ids, kind).tobytes() for kind in (np.uint16, np.int32, np.int64)}

    def received(self, hub: FakeHub) -> dict[str, bytes]:
        return {f"{n}/{name}": text for n, commit in enumerate(hub.commits) for name, text in commit["files"].items()}

    def check(self, files: dict[str, bytes]) -> None:
        self.assertEmpty([name for name in files if "secret" in name])
        new = {content: name for name, content in files.items() if content not in self.clean}
        self.assertEmpty([name for content, name in new.items() if b"secret" in content.lower()], "names of files")
        self.assertEmpty([name for content, name in new.items() if any(mark in content for mark in self.marks)])
        self.clean.update(new)

    @parameterized.parameters(*RUNS)
    def test_no_upload_has(self, name):
        script, flags = RUNS[name]
        self.enter_context(contextlib.chdir(self.enter_context(tempfile.TemporaryDirectory(dir=self.folder))))
        Path("secret").symlink_to(self.material)
        main = {"pre_train": pre_train_t5.main, "fine_tune": fine_tune_t5.main}[script]
        argv = [*COMMON.split(), "tensorboard", *flags.split()]
        with FakeHub() as hub:
            run_main(main, *argv)
        self.check(self.received(hub))
        out = Path("out/run")
        kept = [path for path in out.rglob("*") if path.is_file()]
        self.assertTrue(any(self.lines[0][:24].encode() in path.read_bytes() for path in kept), "the marks are there")
        for strategy in HubStrategy:
            args = SimpleNamespace(hub_strategy=strategy, hub_token=None, hub_private_repo=None, hub_model_id="me/run")
            args.output_dir = str(out)
            with FakeHub() as hub:
                uploads = RunUploads(args, texts=False)
                for step, checkpoint in enumerate(checkpoints_of(out)):
                    uploads.start(checkpoint, step)
                uploads.wait()
            sent = self.received(hub)
            self.assertEqual(bool(sent), strategy is not HubStrategy.END)
            self.check(sent)
        # A run may be exported from another folder, where its relative paths look like names of the Hub.
        run = out.absolute()
        flags = f"--output_dir {run.parent}/export --push_to_hub me/run --num_samples 2".split()
        with FakeHub() as hub, contextlib.chdir(self.folder):
            run_main(export_checkpoint.main, "--model_name_or_path", run, *flags)
        self.check(self.received(hub))
