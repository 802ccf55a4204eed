"""A run that is killed and resumed stands in W&B, TensorBoard and trackio with the names and values of metrics.jsonl.

The trackers' own files are read here: W&B's offline log, TensorBoard's event files, trackio's database. Nothing waits
for seconds: what a tracker had not written when its run was killed has to be there all the same.
"""

import contextlib
import io
import json
import os
import signal
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torture
from absl.testing import parameterized
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import TrainerCallback, TrainerState
from wandb.proto.wandb_internal_pb2 import Record
from warm_python import warm_python

from foundry.arguments.training import T5TrainingArguments
from foundry.common.errors import UserError
from foundry.common.reports import metrics_key, read_metrics, tracked_name
from foundry.runs import trackers
from foundry.runs.trackers import WandbTracker, start_trackers

ROOT = Path(__file__).parents[3]
ALL = ("wandb", "tensorboard", "trackio")
# Ends itself without any farewell, as a node does that loses power, when everything of step 6 has been logged.
KILLED = """
import os, signal, sys, pre_train_t5, foundry.runs.trackers
from foundry.runs.callbacks import LossCurveCallback
def die(self, args, state, control, **_):
    if state.global_step == 6:
        os.kill(os.getpid(), signal.SIGKILL)
LossCurveCallback.on_step_begin = die
foundry.runs.trackers.HELD = 1e9  # however slow this machine is
pre_train_t5.main(sys.argv[1:])
"""
TRACKIO = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage
names = sorted({run["name"] for run in SQLiteStorage.get_run_records(sys.argv[1])})
print(json.dumps({name: [SQLiteStorage.get_logs(sys.argv[1], name), SQLiteStorage.get_run_config(sys.argv[1], name)]
                  for name in names}))
"""


def wandb_records(path: Path) -> Iterator[Record]:
    """The records of a run's *.wandb file: LevelDB's log format, blocks of 32 KiB behind 7 bytes."""
    data, place, parts = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:  # too little for the head of a part: filled up
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)  # behind a checksum
        place += 7 + length
        if kind == 0 or place > len(data):  # cut off
            return
        parts += data[place - length : place]
        if kind in (1, 4):  # whole, or the last part of a record
            yield Record.FromString(parts)
            parts = b""


def wandb_points(record: Record) -> list[tuple[str, int, object]]:
    """(name, step, value) of what a record logs, W&B's own names left out."""
    row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
    return [(name, row["_step"], value) for name, value in row.items() if not name.startswith("_")]


def wandb_run(folders: list[Path]) -> tuple[list[tuple[str, int, float]], dict, dict, set[str]]:
    """(points, configuration, summary, ids) of the parts of one run."""
    points, config, summary, ids = [], {}, {}, set()
    for path in [path for folder in folders for path in folder.glob("*.wandb")]:
        for record in wandb_records(path):
            points += wandb_points(record)
            ids |= {record.run.run_id} if record.HasField("run") else set()
            for item in [*record.run.config.update, *record.config.update]:
                config[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
            for item in record.summary.update:
                summary[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
    return points, config, summary, ids


def tensorboard_points(folder: Path) -> tuple[list[tuple[str, int, float]], str]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    points = [(name, event.step, event.value) for name in events.Tags()["scalars"] for event in events.Scalars(name)]
    texts = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("config/text_summary")]
    return points, texts[-1]


def expected_points(folder: Path) -> dict[tuple[str, int], float]:
    """{(name, step): value} of metrics.jsonl; the first of two values counts."""
    points = {}
    for line in read_metrics(folder / "metrics.jsonl"):
        for key in line.keys() - {"step", "seconds"}:
            points.setdefault((tracked_name(key), line["step"]), line[key])
    return points


class KilledRunTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.out = cls.folder / "out"
        flags = torture.changed(
            torture.material_of(cls.folder)["pre_train"], "--max_steps", "10", "--logging_steps", "1"
        )
        flags = torture.changed(flags, "--eval_steps", "2", "--save_steps", "4", "--report_to", "X")
        flags[flags.index("X") : flags.index("X") + 1] = ALL
        flags += ["--load_best_model_at_end", "--metric_for_best_model", "loss", "--save_total_limit", "9"]
        # The rate rises until it is too high, so that the last evaluation is not the best.
        flags = torture.changed(flags, "--warmup_steps", "9", "--learning_rate", "1.5")
        flags += ["--lr_scheduler_type", "constant_with_warmup", "--output_dir", str(cls.out)]
        cls.environment = {n: v for n, v in os.environ.items() if not n.startswith(("WANDB_", "TRACKIO_", "TENSORB"))}
        cls.environment |= {"TRACKIO_DIR": str(cls.folder / "trackio"), "HOME": str(cls.folder)}
        path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        cls.environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        cls.runs = [cls.start("-c", KILLED, *flags)]
        cls.sent_by_the_first = json.loads((cls.out / "trackers.json").read_text())
        cls.runs.append(cls.start(str(ROOT / "pre_train_t5.py"), *flags, "--resume_from_checkpoint"))
        cls.expected = expected_points(cls.out)

    @classmethod
    def start(cls, *words: str) -> subprocess.CompletedProcess:
        options = dict(env=cls.environment, cwd=cls.folder, capture_output=True, text=True, timeout=1500)
        return subprocess.run([warm_python(), *words], **options)

    def setUp(self):
        super().setUp()
        self.assertEqual(self.runs[0].returncode, -signal.SIGKILL, self.runs[0].stderr[-3000:])
        self.assertEqual(self.runs[1].returncode, 0, self.runs[1].stderr[-3000:])

    def check(self, points: list[tuple[str, int, float]], once: bool) -> None:
        """Every point of metrics.jsonl is there, and no other; the steps that were trained twice may be there twice
        unless `once`, and differ in their speeds."""
        places = [(name, step) for name, step, _ in points]
        if once:
            self.assertCountEqual(places, self.expected)
        self.assertEqual(set(places), set(self.expected))
        self.assertEmpty([place for place in set(places) if places.count(place) > 1 + (place[1] <= 6)])
        for name, step, value in points:
            if once or not (name.startswith("perf/") and step in (5, 6)):
                self.assertAlmostEqual(value, self.expected[name, step], delta=2e-6 * abs(value), msg=(name, step))

    def check_config(self, config: dict) -> None:
        record = json.loads((self.out / "run.json").read_text())
        for name in ("learning_rate", "output_dir", "input_seq_length"):
            self.assertEqual(config[name], record["arguments"][name])
        self.assertEqual(config["git"], record["git"])
        self.assertEqual(config["fingerprints"], record["fingerprints"])
        self.assertEqual(config["model"]["d_model"], json.loads((self.out / "config.json").read_text())["d_model"])

    def test_the_run_is_what_it_is_to_be(self):
        losses = {step for name, step in self.expected if name == "train/loss"}
        self.assertEqual(losses, set(range(1, 11)))
        self.assertIn(("eval/loss", 10), self.expected)
        self.assertIn(("perf/sequences_per_second", 3), self.expected)
        self.assertIn(("train/train_loss", 10), self.expected)
        self.assertEqual(self.sent_by_the_first["sent"]["tensorboard"]["train/loss"], 6)
        self.assertNotIn("wandb", self.sent_by_the_first["sent"])  # which may not have written it
        checkpoint = json.loads((self.out / "checkpoint-4" / "trainer_state.json").read_text())
        state = checkpoint["stateful_callbacks"]["trackers.json"]
        self.assertEqual((state["id"], state["sent"]["tensorboard"]["train/loss"]), (self.sent_by_the_first["id"], 4))
        at_the_end = json.loads((self.out / "trackers.json").read_text())["sent"]
        self.assertEqual([at_the_end[name]["train/loss"] for name in ALL], [10] * 3)

    def test_wandb(self):
        folders = sorted((self.out / "wandb").glob("offline-run-*"))
        self.assertLen(folders, 2)
        points, config, summary, ids = wandb_run(folders)
        self.assertEqual(ids, {self.sent_by_the_first["id"]})
        table = [(name, step) for name, step, _ in points if name.startswith("samples.")]
        self.assertIn(("samples.nrows", 6), table)
        self.check([point for point in points if not point[0].startswith("samples.")], once=False)
        self.check_config(config)
        best = json.loads((self.out / "all_results.json").read_text())["eval_loss"]
        self.assertNotAlmostEqual(best, self.expected["eval/loss", 10], delta=1e-2)
        self.assertAlmostEqual(summary["eval/loss"], best, places=5)
        self.assertIn("wandb sync", self.runs[1].stdout)

    def test_tensorboard(self):
        points, config = tensorboard_points(self.out / "tensorboard")
        self.check(points, once=True)
        self.check_config(json.loads(config.removeprefix("```json\n").removesuffix("\n```")))

    def test_trackio(self):
        project = self.start("-c", TRACKIO, "t5_foundry")
        self.assertEqual(project.returncode, 0, project.stderr[-2000:])
        runs = json.loads(project.stdout)
        self.assertEqual([*runs], [f"out-{self.sent_by_the_first['id']}"])
        logs, config = next(iter(runs.values()))
        self.check([(name, log["step"], log[name]) for log in logs for name in log if "/" in name], once=False)
        self.check_config(config)


class FakeTracker:
    def __init__(self, args, identity, name, config, step):  # noqa: ARG002
        self.begun, self.logs, self.tables, self.shown = (identity, name, config, step), [], [], name

    def log(self, values, step):
        self.logs.append((step, values))

    def log_table(self, name, columns, rows, step):
        self.tables.append((step, name, columns, rows))

    def finish(self, latest):
        self.latest = latest


class BrokenTracker(FakeTracker):
    def log(self, values, step):  # noqa: ARG002
        raise ConnectionError("the server is gone")


class FakeTrainer:
    """What start_trackers needs of a trainer."""

    def __init__(self, folder: Path, **flags):
        self.args = T5TrainingArguments(output_dir=str(folder), report_to="none", **flags)
        self.args.report_to = [*ALL]
        self.state, self.callbacks = TrainerState(), []
        self.callback_handler = self

    def add_callback(self, callback: TrainerCallback):
        self.callbacks.append(callback)

    def remove_callback(self, kind):
        self.callbacks = [callback for callback in self.callbacks if not isinstance(callback, kind)]

    def log(self, step: int, **logs):
        self.state.global_step = step
        for callback in self.callbacks:
            callback.on_log(self.args, self.state, None, logs=logs)


class TrackersTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.out = Path(self.enter_context(tempfile.TemporaryDirectory())) / "my_run"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        self.enter_context(mock.patch.dict(os.environ, environment, clear=True))

    def start(self, kinds: dict, checkpoint=None, **flags) -> FakeTrainer:
        trainer = FakeTrainer(self.out, **flags)
        with mock.patch.object(trackers, "TRACKERS", kinds):
            trainer.args.report_to = [*kinds]
            start_trackers(trainer, {"seed": 1}, checkpoint)
        return trainer

    def checkpoint(self, trainer: FakeTrainer, folder: Path) -> str:
        folder.mkdir(parents=True)
        trainer.state.save_to_json(str(folder / "trainer_state.json"))
        return str(folder)

    def test_a_name_comes_once_a_step_and_never_backwards(self):
        trainer = self.start({"wandb": FakeTracker})
        trainer.log(1, loss=2.0, epoch=0.1)
        trainer.log(1, eval_loss=3.0, epoch=0.1)
        trainer.log(2, loss=1.0, note="text", flag=True)
        trainer.log(1, loss=9.0)
        (callback,) = trainer.callbacks
        expected = [(1, {"train/loss": 2.0, "train/epoch": 0.1}), (1, {"eval/loss": 3.0}), (2, {"train/loss": 1.0})]
        tracker = callback.trackers["wandb"]
        self.assertEqual(tracker.logs, expected)
        trackers.finish_trackers(trainer)
        self.assertEqual(tracker.latest, {"train/loss": 9.0, "train/epoch": 0.1, "eval/loss": 3.0})

    def test_tables(self):
        trainer = self.start({"wandb": FakeTracker, "trackio": FakeTracker})
        trainer.state.global_step = 5
        trackers.show_table(trainer, "samples", ["source", "target"], [["a", "b"]])
        trackers.show_table(trainer, "samples", ["source", "target"], [["again", "at this step"]])
        (callback,) = trainer.callbacks
        for tracker in callback.trackers.values():
            self.assertEqual(tracker.tables, [(5, "samples", ["source", "target"], [["a", "b"]])])
        trackers.show_table(FakeTrainer(self.out), "samples", ["source"], [])  # without trackers nothing happens

    def test_a_broken_tracker_does_not_end_the_run(self):
        trainer = self.start({"wandb": BrokenTracker, "trackio": FakeTracker})
        with self.assertLogs(trackers.logger, "WARNING") as logs:
            trainer.log(1, loss=2.0)
        self.assertIn("wandb is left out from now on (ConnectionError: the server is gone)", logs.output[0])
        trainer.log(2, loss=1.0)
        (callback,) = trainer.callbacks
        self.assertEqual([step for step, *_ in callback.trackers["trackio"].logs], [1, 2])
        self.assertNotIn("train/loss", callback.sent["wandb"])

    def test_wandb_that_is_disabled_is_no_tracker_and_gets_the_whole_curve_later(self):
        with mock.patch.dict(os.environ, {"WANDB_MODE": "disabled"}):
            first = self.start({"wandb": WandbTracker, "trackio": FakeTracker})
        first.log(4, loss=2.0)
        self.assertEqual(trackers.finish_trackers(first), {"tracked": "my_run"})
        (self.out / "metrics.jsonl").write_text('{"step": 4, "loss": 2.0}\n')
        second = self.start({"wandb": FakeTracker}, self.checkpoint(first, self.out / "4"))
        self.assertEqual(second.callbacks[0].trackers["wandb"].logs, [(4, {"train/loss": 2.0})])

    @parameterized.parameters((True, "wandb sync '.*/my run'/offline-run-.*-abc"), (False, "https://wandb"))
    def test_where_wandb_shows_a_run(self, offline, shown):  # offline: WANDB_MODE=offline and dryrun
        run = mock.Mock(
            offline=offline, url=None if offline else "https://wandb", dir=str(self.out / "my run/a/b"), id="abc"
        )
        with mock.patch("wandb.init", return_value=run):
            args = mock.Mock(output_dir=str(self.out), project="p")
            self.assertRegex(WandbTracker(args, "abc", "name", {}, None).shown, shown)

    def test_one_that_cannot_begin_is_named_before_the_training(self):
        with self.assertRaisesRegex(ValueError, "--report_to wandb: RuntimeError: no such project"):
            self.start({"wandb": mock.Mock(side_effect=RuntimeError("no such project"))})

    def test_checkpoint_that_was_moved_takes_its_run_along(self):
        first = self.start({"wandb": FakeTracker})
        first.log(4, loss=2.0)
        first.callbacks[0].on_train_end(first.args, first.state, None)
        checkpoint = self.checkpoint(first, self.out.parent / "elsewhere" / "checkpoint-4")
        self.out = self.out.parent / "another"
        second = self.start({"wandb": FakeTracker, "trackio": FakeTracker}, checkpoint, trackio_space_id="me/space")
        second.log(4, loss=2.0)
        second.log(5, loss=1.5)
        (callback,) = second.callbacks
        identity, name, config, step = callback.trackers["wandb"].begun
        self.assertEqual((identity, name, config, step), (first.callbacks[0].identity, "another", {"seed": 1}, 4))
        self.assertEqual([values for _, values in callback.trackers["wandb"].logs], [{"train/loss": 1.5}])
        values = [values for _, values in callback.trackers["trackio"].logs]  # which had nothing before
        self.assertEqual(values, [{"train/loss": 2.0}, {"train/loss": 1.5}])

    def test_the_last_minute_before_a_kill_is_sent_again_and_no_more(self):
        with mock.patch.object(trackers.time, "monotonic", return_value=1000.0) as clock:
            first = self.start({"wandb": FakeTracker, "tensorboard": FakeTracker})
            for step, clock.return_value in ((1, 1010.0), (2, 1090.0), (3, 1110.0), (4, 1160.0), (5, 1170.0)):
                first.log(step, loss=2.0 / step)
        with (self.out / "metrics.jsonl").open("w") as file:
            file.writelines(json.dumps({"step": step, "loss": 2.0 / step}) + "\n" for step in range(1, 6))
        second = self.start({"wandb": FakeTracker, "tensorboard": FakeTracker}, self.checkpoint(first, self.out / "5"))
        (callback,) = second.callbacks
        logs = {name: [step for step, _ in tracker.logs] for name, tracker in callback.trackers.items()}
        self.assertEqual(logs, {"wandb": [3, 4, 5], "tensorboard": []})

    def test_id_of_a_sweep(self):
        with mock.patch.dict(os.environ, {"WANDB_RUN_ID": "0003-abc"}):
            trainer = self.start({"wandb": FakeTracker}, run_name="mine")
        self.assertEqual(trainer.callbacks[0].trackers["wandb"].begun[:2], ("0003-abc", "mine"))

    def test_two_new_runs_are_two(self):
        ids = {self.start({"wandb": FakeTracker}).callbacks[0].identity for _ in range(2)}
        self.assertLen(ids, 2)

    def test_other_trackers_stay_transformers_own(self):
        trainer = self.start({})
        self.assertEmpty(trainer.callbacks)


class NamesTest(parameterized.TestCase):
    @parameterized.parameters(
        ("loss", "train/loss"),
        ("train_loss", "train/train_loss"),
        ("eval_matched_accuracy", "eval/matched_accuracy"),
        ("test_f1", "test/f1"),
        ("sequences_per_second", "perf/sequences_per_second"),
        ("tokens_per_second", "perf/tokens_per_second"),
        ("eval_runtime", "perf/eval_runtime"),
        ("eval_model_preparation_time", "perf/eval_model_preparation_time"),
        ("train_samples_per_second", "perf/train_samples_per_second"),
        ("mfu", "perf/mfu"),
        ("peak_memory_gib", "perf/peak_memory_gib"),
        ("total_flos", "perf/total_flos"),
    )
    def test_there_and_back(self, key, name):
        self.assertEqual(tracked_name(key), name)
        self.assertEqual(metrics_key(name), key)

    def test_a_name_that_has_no_group(self):
        self.assertEqual(
            [metrics_key(name) for name in ("loss", "eval_loss", "other/x", "")], ["loss", "eval_loss", "other/x", ""]
        )


class ResumedElsewhereTest(parameterized.TestCase):
    def resume(self, report_to: str, kept: object) -> str:
        """What a run prints that resumes beside a trackers.json with this content."""
        checkpoint = self.folder / "checkpoint-2"
        checkpoint.mkdir()
        state = {"global_step": 2, "log_history": [], "stateful_callbacks": {}}
        (checkpoint / "trainer_state.json").write_text(json.dumps(state))
        (self.folder / "trackers.json").write_text(json.dumps(kept))
        args = SimpleNamespace(report_to=[report_to], output_dir=str(self.folder), run_name="run")
        trainer = SimpleNamespace(args=args, remove_callback=lambda _: None)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            trackers.start_trackers(trainer, {}, str(checkpoint))
        return printed.getvalue()

    @parameterized.parameters((None, "begins a new run there .MLflow goes on .* MLFLOW_RUN_ID"), ("7", "^$"))
    def test_mlflow_says_that_a_new_run_begins(self, run, line):
        with mock.patch.dict(os.environ, {"MLFLOW_RUN_ID": run} if run else {}):
            self.assertRegex(self.resume("mlflow", {}), line)

    def test_an_id_that_leads_out_of_the_folder_is_refused(self):
        with self.assertRaisesRegex(UserError, r"trackers.json: '../../x' is no id of a run. Delete the file"):
            self.resume("tensorboard", {"id": "../../x", "sent": {}})
