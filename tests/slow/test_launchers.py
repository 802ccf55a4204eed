"""Every launcher and way of sharding trains to the weights of one process, and resumes to them.

Two real processes over gloo. `make test` runs a cover (every launcher, every sharding, both scripts) whose launchers
and ranks are forks of a Python that has imported everything (warm_python.py). All cells, in processes of their own:

    T5_ALL_LAUNCHERS=1 python -m pytest tests/slow/test_launchers.py        (make test-launchers)
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torture
from absl.testing import parameterized
from accelerate.commands.config.config_args import load_config_from_file
from safetensors.torch import load_file
from warm_python import warm_python

from constants import DEFAULT_OPTIMIZER, PREEMPTED_EXIT_CODE
from foundry.common.whole_folders import checkpoints_of, damage

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
ALL = bool(os.environ.get("T5_ALL_LAUNCHERS"))
SHARDING = {"ddp": [], "zero2": ["zero_stage2_config.json"], "zero3": ["zero_stage3_config.json"], "fsdp2": []}
LAUNCHERS = ("accelerate", "torchrun", "deepspeed")
PAIRS = [(began, way) for began in ("alone", *SHARDING) for way in ("alone", *SHARDING)]
# accelerate's own FSDP2 over gloo, through fsdp2_on_cpu.py; `deepspeed` starts processes as torchrun does.
CELLS = [
    (launcher, way, script)
    for launcher in LAUNCHERS
    for way in SHARDING
    for script in ("pre_train", "fine_tune", "preferences")
    if (launcher, way) != ("deepspeed", "fsdp2") and (script, way) != ("preferences", "zero3")  # which is refused
]
COVER = [
    ("accelerate", "ddp", "fine_tune"),
    ("torchrun", "ddp", "pre_train"),
    ("deepspeed", "zero2", "fine_tune"),
    ("deepspeed", "zero3", "pre_train"),
    ("torchrun", "fsdp2", "fine_tune"),
    ("torchrun", "fsdp2", "preferences"),
]
# (script, how the run began, how it goes on), of runs that COVER has made
PAIR_COVER = [
    ("pre_train", "zero3", "alone"),
    ("pre_train", "alone", "zero3"),
    ("fine_tune", "zero2", "fsdp2"),
    ("fine_tune", "fsdp2", "zero2"),
]


def launcher_command(name: str) -> list[str]:
    return torture.launcher_command(name, python())


def python() -> str:
    return sys.executable if ALL else warm_python()


class LauncherTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.commands = torture.material_of(cls.folder)
        cls.runs = {}

    def flags(self, script: str, processes: int, optim_of: str = "ddp") -> list[str]:
        """The same global batch with one process and with two; no dropout, whose random numbers differ by rank. The
        optimizer is the default one but under ZeRO-3, which cannot have it."""
        size = {"fine_tune": 16}.get(script, 8) // processes
        own = {
            "pre_train": "--gradient_accumulation_steps 1 --max_steps 7 --save_steps 3 --eval_steps 5",
            "pre_train_stream": "--gradient_accumulation_steps 1 --max_steps 7 --save_steps 3 --eval_steps 5",
            "fine_tune": "--predict_with_generate true --num_train_epochs 2 --max_train_samples 49",
            "preferences": "--save_steps 3 --load_best_model_at_end false",
        }
        optim = (
            "adamw_torch --learning_rate 1e-3" if optim_of == "zero3" else f"{DEFAULT_OPTIMIZER} --learning_rate 1e-2"
        )
        more = f"--per_device_train_batch_size {size} --dropout_rate 0 --save_total_limit 9 --optim {optim} "
        return torture.changed(self.commands[script], *(more + own[script]).split())

    def one_process(self, script: str, optim_of: str = "ddp", *more: str) -> Path:
        """Output of the run that all others with this optimizer must equal. more: further flags."""
        return self.finished("", "alone", script, optim_of, *more)

    def finished(self, launcher: str, way: str, script: str, optim_of: str, *more: str) -> Path:
        """Output of a run that has not stopped."""
        key = (way, script, *self.flags(script, 1, optim_of), *more)
        if key not in self.runs:
            out = self.folder / f"{way}_{script}_{len(self.runs)}"
            self.launch(launcher, way, script, out, *more, optim_of=optim_of)
            self.runs[key] = out
        return self.runs[key]

    def launch(self, launcher: str, way: str, script: str, out: Path, *more: str, optim_of: str | None = None) -> str:
        """What a run prints. way: "alone", without a launcher, or one of SHARDING."""
        name = script.removesuffix("_stream")
        argv = [*self.flags(script, 1 if way == "alone" else 2, optim_of or way), "--output_dir", str(out), *more]
        if way == "alone":
            log = self.folder / f"{out.name}.log"
            self.assertEqual(torture.exit_code(torture.start(name, argv, log)), 0, log.read_text()[-2000:])
            return log.read_text()
        argv += [word for file in SHARDING[way] for word in ("--deepspeed", str(ROOT / file))]
        if way == "fsdp2":
            started = [str(ROOT / "tests" / "support" / "fsdp2_on_cpu.py"), torture.file_of(script), *argv, "--fsdp"]
        else:
            started = [str(ROOT / torture.file_of(script)), *argv]
        command = [*launcher_command(launcher), *started]
        environment = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
        self.assertEqual(done.returncode, 0, done.stdout[-1000:] + done.stderr[-3000:])
        return done.stdout

    def assert_same_run(self, out: Path, alone: Path, what: str):
        """Weights and evaluations of two runs agree to float32 rounding over seven or eight steps. A run that was
        resumed in a folder of its own has logged there what came then."""
        weights, wanted = (load_file(folder / "model.safetensors") for folder in (out, alone))
        self.assertEqual(set(weights), set(wanted))
        for name, tensor in wanted.items():
            torch.testing.assert_close(
                weights[name], tensor, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{what} {n} {m}"
            )
        found, expected = torture.outcome(out), torture.outcome(alone)
        self.assertEqual(found["steps"], expected["steps"])
        since = [line for line in expected["metrics"] if line["step"] >= found["metrics"][0]["step"]]
        self.assertGreater(len(since), 2)
        for one, two in zip(found["metrics"], since, strict=True):
            compared = {"loss", "eval_loss", "train_loss", "grad_norm", "reward_margin", "eval_reward_margin"}
            for key in compared & set(two):
                self.assertAlmostEqual(one[key], two[key], delta=2e-3, msg=f"{what} {key} at step {two['step']}")
            for key in {"eval_accuracy", "eval_matthews_correlation"} & set(two):
                self.assertEqual(one[key], two[key], f"{what} {key} at step {two['step']}")

    @parameterized.parameters(*(CELLS if ALL else COVER))
    def test_two_processes_end_with_the_weights_of_one(self, launcher, way, script):
        alone, out = self.one_process(script, way), self.folder / f"{launcher}_{way}_{script}"
        printed = self.launch(launcher, way, script, out)
        self.runs[way, script, *self.flags(script, 1, way)] = out
        self.assertEqual(printed.count("-- done --"), 1, "rank 0 alone reports")
        shown = {"ddp": "none, 2 whole copies", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2"}
        self.assertRegex(printed, rf"sharding +{shown[way]}")
        self.assert_same_run(out, alone, "trained")
        for checkpoint in checkpoints_of(out):
            self.assertIsNone(damage(checkpoint))

    @parameterized.parameters(
        *(PAIR_COVER if not ALL else [(script, *pair) for script in ("pre_train", "fine_tune") for pair in PAIRS]),
        *([("pre_train_stream", *pair) for pair in PAIRS] if ALL else ()),
    )
    def test_a_run_goes_on_under_any_sharding(self, script, began, way):
        """The optimizer's states of tensors and the weights are those of the run that did not stop."""
        optim_of = "zero3" if "zero3" in (began, way) else "ddp"
        alone, out = self.one_process(script, optim_of), self.folder / f"{script}_{began}_then_{way}"
        first = checkpoints_of(self.finished("torchrun", began, script, optim_of))[0]
        self.launch("torchrun", way, script, out, "--resume_from_checkpoint", str(first), optim_of=optim_of)
        self.assert_same_run(out, alone, f"{began}, resumed as {way}")

    @parameterized.parameters(
        ("torchrun", "ddp", "fine_tune", "--teacher_top_k 7"),  # 49 rows: some only fill up the last batch
        ("deepspeed", "zero3", "fine_tune", ""),
        ("torchrun", "fsdp2", "pre_train_stream", "--distillation_beta 0.5"),
    )
    def test_a_teacher_is_whole_on_every_rank(self, launcher, way, script, more):
        given = ["--teacher", str(self.folder / "prepared"), *more.split()]
        out = self.folder / f"{launcher}_{way}_taught"
        alone = self.one_process(script, way, *given)
        printed = self.launch(launcher, way, script, out, *given)
        self.assertRegex(printed, r"teacher +\S+prepared \(t5, d_model 32, 1 \+ 1 layers\)")
        self.assert_same_run(out, alone, "taught")

    def test_fsdp_that_is_not_in_force_is_said(self):
        config = ["--config_file", str(ROOT / "launch" / "fsdp2.yaml"), "--num_processes", "2", "--main_process_port"]
        argv = [*self.flags("pre_train", 2), "--output_dir", str(self.folder / "said"), "--dry_run"]
        accelerate, port = [python(), str(BIN / "accelerate"), "launch"], launcher_command("torchrun")[-1]
        done = subprocess.run(
            [*accelerate, *config, port, str(ROOT / "pre_train_t5.py"), *argv],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=400,
        )
        self.assertEqual(done.returncode, 0, done.stderr[-2000:])
        self.assertEqual(done.stdout.count("FSDP has no effect here"), 1)
        self.assertRegex(done.stdout, "sharding +none, 2 whole copies")

    def test_two_nodes_by_the_multi_node_configuration(self):
        out, port = self.folder / "two_nodes", launcher_command("torchrun")[-1]
        alone = self.one_process("pre_train")
        config = ["--config_file", str(ROOT / "launch" / "multi_node.yaml"), "--num_machines", "2", "--num_processes"]
        argv = [str(ROOT / "pre_train_t5.py"), *self.flags("pre_train", 2), "--output_dir", str(out)]
        logs = [self.folder / f"node_{rank}.log" for rank in range(2)]
        nodes = []
        for rank, log in enumerate(logs):
            place = ["2", "--machine_rank", str(rank), "--main_process_port", port]
            command = [python(), str(BIN / "accelerate"), "launch", *config, *place, *argv]
            with log.open("w") as file:  # 1 would be accelerate's default, and each node would take all cores
                node = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "2"}, stdout=file, stderr=file)
            self.addCleanup(node.kill)
            nodes.append(node)
        for node, log in zip(nodes, logs, strict=True):
            self.assertEqual(node.wait(400), 0, log.read_text()[-2000:])
        self.assert_same_run(out, alone, "two nodes")

    @parameterized.parameters(*sorted(path.name for path in (ROOT / "launch").glob("*.yaml")))
    def test_configurations_are_accelerates(self, name):
        config = load_config_from_file(str(ROOT / "launch" / name))
        self.assertEqual(config.num_machines, 2 if "multi_node" in name else 1)
        self.assertEqual(config.distributed_type, "FSDP" if "fsdp2" in name else "MULTI_GPU")
        self.assertEqual((config.fsdp_config or {}).get("fsdp_version"), 2 if "fsdp2" in name else None)

    def failing(self, *argv: str, ends_well: bool = False, program: str = "support/failing_rank.py") -> str:
        """What two ranks print of which one fails; see the program, failing_rank.py or another below tests/."""
        command = [*launcher_command("torchrun"), str(ROOT / "tests" / program), *argv]
        done = subprocess.run(
            command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
        )
        self.assertEqual(done.returncode == 0, ends_well, done.stderr[-2000:])
        return done.stdout + done.stderr

    def test_the_others_wait_longer_than_the_process_group_does(self):
        """Tokenising for half an hour ended all ranks."""
        program = (
            "import datetime, time, torch.distributed as dist\n"
            "from foundry.common.ranks import first_of_node_first\n"
            "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=0.5))\n"
            "with first_of_node_first():\n    time.sleep(1.5 * (dist.get_rank() == 0))\n    print('worked')\n"
            "dist.destroy_process_group()"
        )
        (self.folder / "waits.py").write_text(program)
        command = [*launcher_command("torchrun"), str(self.folder / "waits.py")]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        self.assertEqual((done.returncode, done.stdout.count("worked")), (0, 2), done.stderr[-2000:])

    def test_a_rank_that_dies_takes_the_run_down_with_its_own_error(self):
        began = time.monotonic()
        text = self.failing("step", *self.flags("pre_train", 2), "--output_dir", str(self.folder / "dies"))
        self.assertIn("RuntimeError: this rank has had enough", text)
        self.assertLess(time.monotonic() - began, 90)

    def test_ranks_draw_other_dropout_and_draw_it_again_after_a_resume(self):
        out, found = self.folder / "masks", []
        steps = "--max_steps 4 --save_steps 2 --eval_strategy no --dropout_rate 0.3 --load_best_model_at_end false"
        argv = torture.changed(self.flags("pre_train", 2), *steps.split(), "--output_dir", str(out))
        weights = []
        for resumed in ([], ["--resume_from_checkpoint", str(out / "checkpoint-2")]):
            masks = self.folder / f"masks_{len(found)}"
            self.failing(str(masks), *argv, *resumed, ends_well=True, program="support/masks_of_ranks.py")
            found.append([json.loads((masks / f"{rank}.json").read_text()) for rank in range(2)])
            weights.append((out / "model.safetensors").read_bytes())
        whole, rest = found
        self.assertNotEmpty(whole[0])
        self.assertEmpty(set(whole[0]) & set(whole[1]))
        for of_rank, again in zip(whole, rest, strict=True):
            self.assertLen(set(of_rank), len(of_rank))
            self.assertEqual(of_rank[len(of_rank) // 2 :], again)
        self.assertEqual(*weights)

    def rows_of_ranks(self, name: str, script: str, ranks: int, *argv: str) -> list[list[str]]:
        """The rows that each rank of a run trains on, in their order."""
        program, found = "support/rows_of_ranks.py", self.folder / name
        if ranks == 2:
            self.failing(str(found), script, *argv, ends_well=True, program=program)
        else:
            command = [python(), str(ROOT / "tests" / program), str(found), script, *argv]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            self.assertEqual(done.returncode, 0, done.stderr[-2000:])
        return [list(map(str, json.loads((found / f"{rank}.json").read_text()))) for rank in range(ranks)]

    @parameterized.product(script=("pre_train_t5", "fine_tune_t5"), began=(1, 2))
    def test_every_row_is_read_once_by_another_number_of_processes(self, script, began):
        name = f"rows_{script}_{began}"
        own = "--num_train_epochs 1 --max_steps -1 --per_device_train_batch_size 4 --gradient_accumulation_steps 2 "
        own += "--save_strategy steps --save_steps 1 --save_total_limit 99 --eval_strategy no --dropout_rate 0 "
        own += f"--load_best_model_at_end false --output_dir {self.folder}/{name}"
        argv = torture.changed(self.commands["pre_train"], *f"{own} --max_train_samples 110".split())
        if script == "fine_tune_t5":
            pairs = f"--train_file {self.folder}/pairs.jsonl --source_column text --target_column good {own} "
            pairs += "--packing false "
            pairs += f"--model_name_or_path {self.folder}/start --validation_split_percentage 20 --report_to none "
            argv = f"{pairs} --max_target_length 16 --data_cache_dir {self.folder}/cache --disable_tqdm true".split()
        before = self.rows_of_ranks(f"{name}_whole", script, began, *argv)
        rows = [row for of_rank in before for row in of_rank]
        self.assertLen(set(rows), len(rows))
        read = [row for of_rank in before for row in of_rank[: 2 * 8]]  # of two steps, of which each rank reads 8 rows
        resume = "--resume_from_checkpoint", f"{self.folder}/{name}/checkpoint-2"
        rest = self.rows_of_ranks(f"{name}_rest", script, 3 - began, *argv, *resume)
        again = read + [row for of_rank in rest for row in of_rank]
        self.assertLen(set(again), len(again))
        if script == "fine_tune_t5":
            self.assertEqual(set(again), set(rows))
        else:  # an epoch has whole batches
            self.assertGreater(len(again), len(rows) - 8 * (3 - began))
            self.assertLessEqual(len(again), len(rows) + 8 * began)
        state = json.loads((self.folder / name / "trainer_state.json").read_text())
        self.assertEqual(state["epoch"], 1.0)

    @parameterized.parameters(("full_disk", "ddp"), ("full_disk_random", "zero2"))
    def test_a_disk_that_is_full_for_one_rank_costs_both_a_checkpoint(self, what, way):
        """The others waited for ever at a barrier within the checkpoint."""
        out = self.folder / what
        sharding = [word for name in SHARDING[way] for word in ("--deepspeed", str(ROOT / name))]
        steps = "--max_steps 6 --save_steps 2 --eval_steps 2 --save_total_limit 9 --save_strategy steps"
        best = "--load_best_model_at_end true --metric_for_best_model loss"
        argv = torture.changed(self.flags("pre_train", 2), *steps.split(), *best.split(), "--output_dir", str(out))
        text = self.failing(what, *argv, *sharding, ends_well=True)
        self.assertEqual(text.count("step 4: no room for a checkpoint"), 1)
        self.assertEqual([path.name for path in checkpoints_of(out)], ["checkpoint-2", "checkpoint-6"])
        self.assertEqual([damage(path) for path in checkpoints_of(out)], [None, None])

    def own_disks(self, *files: Path) -> list[Path]:
        """The disks of two nodes, a folder each, with copies of the files."""
        disks = [Path(self.enterContext(tempfile.TemporaryDirectory())) for _ in range(2)]
        for disk in disks:
            for path in files:
                (shutil.copytree if path.is_dir() else shutil.copy)(path, disk / path.name)
        return disks

    def on_two_nodes(
        self, disks: list[Path], script: str, *argv: str, second: tuple[str, ...] = ()
    ) -> list[tuple[int, str]]:
        """(exit code, what is printed) of one process on each of two nodes, which starts in the node's own folder.
        second: further flags of the second."""
        common = dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
        common |= dict(MASTER_PORT=launcher_command("torchrun")[-1], OMP_NUM_THREADS="1")
        logs, processes = [self.folder / f"on_node_{rank}.log" for rank in range(2)], []
        for rank, log in enumerate(logs):
            words, environment = [python(), ROOT / f"{script}_t5.py", *argv, *second * rank], {"RANK": str(rank)}
            with log.open("w") as file:
                started = dict(env=os.environ | common | environment, stdout=file, stderr=file)
                processes.append(subprocess.Popen(words, cwd=disks[rank], **started))
            self.addCleanup(processes[-1].kill)
        return [(process.wait(60), log.read_text()) for process, log in zip(processes, logs, strict=True)]

    def assert_refused(self, ends: list[tuple[int, str]], expected: str):
        for code, text in ends:
            self.assertEqual(code, 2, text[-2000:])
            self.assertRegex(text, f"error: {expected}")
            self.assertNotIn("Traceback", text)

    @parameterized.named_parameters(
        # where the second node's text begins, its further flags -> what both nodes' messages name
        ("text", 5000, (), "contents of train: .*process 1.*process 0"),
        ("flags", 0, ("--seed", "4", "--report_to", "none"), "--seed: 4 on .*, 42 on "),
    )
    def test_nodes_that_differ_do_not_train(self, first, second, named):
        """Trackers and data workers may differ."""
        disks, out = self.own_disks(self.folder / "text.txt"), self.folder / "differs"
        (disks[1] / "text.txt").write_text((self.folder / "text.txt").read_text()[first:])
        argv = torture.changed(self.flags("pre_train", 2), "--train_file", "text.txt", "--output_dir", str(out))
        del argv[(place := argv.index("--report_to")) : place + 2]
        argv += [] if second else ["--report_to", "none"]
        ends = self.on_two_nodes(disks, "pre_train", *argv, second=(*second, "--dataloader_num_workers", "1"))
        self.assert_refused(ends, named)
        self.assertFalse(out.exists())

    def test_a_file_that_one_node_lacks_is_told_by_that_node(self):
        disks = self.own_disks(self.folder / "text.txt")
        (disks[1] / "text.txt").unlink()
        argv = torture.changed(self.flags("pre_train", 2), "--train_file", "text.txt")
        _, (code, second) = self.on_two_nodes(disks, "pre_train", *argv, "--output_dir", str(self.folder / "no"))
        self.assertEqual(code, 2)
        self.assertRegex(second, "error: --train_file text.txt: ")

    def test_an_output_dir_that_nodes_do_not_share_is_refused(self):
        """The checkpoints lacked the states of the second node, and it ended with other weights than the best ones."""
        disks = self.own_disks()
        argv = [*self.flags("pre_train", 2), "--output_dir", "out/new"]
        ends = self.on_two_nodes(disks, "pre_train", *argv)
        self.assert_refused(ends, "--output_dir .*/out/new on .* is not the folder .* on a disk that all nodes share")
        self.assertEqual([list(disk.iterdir()) for disk in disks], [[], []])
        argv = torture.changed(argv, "--save_strategy", "no", "--max_steps", "1")
        ends = self.on_two_nodes(disks, "pre_train", *argv)
        self.assertEqual([code for code, _ in ends], [0, 0], ends)

    def test_nodes_with_own_disks_answer_as_one_process(self):
        """Continued, they ended in a KeyError: the second node began at its own first input."""
        model = self.one_process("fine_tune")
        disks = self.own_disks(self.folder / "text.txt")
        flags = "--input_file text.txt --output_file answers.jsonl --batch_size 2 --max_samples 300 --max_new_tokens 2"
        argv = ["--model_name_or_path", str(model), *flags.split()]
        ends = self.on_two_nodes(disks, "predict", *argv)
        self.assertEqual([code for code, _ in ends], [0, 0], ends)
        answers = disks[0] / "answers.jsonl"
        whole = answers.read_text()
        answers.write_text("".join(whole.splitlines(keepends=True)[:150]))
        ends = self.on_two_nodes(disks, "predict", *argv)
        self.assertEqual([code for code, _ in ends], [0, 0], ends)
        self.assertEqual(answers.read_text(), whole)
        with (disks[1] / "text.txt").open("a") as file:
            file.write("one line more\n")
        self.assert_refused(
            self.on_two_nodes(disks, "predict", *argv), "input: .*: give all nodes the same flags and files"
        )

    def test_a_checkpoint_that_nodes_do_not_share_is_not_evaluated(self):
        disks = self.own_disks()
        for disk in disks:
            shutil.copytree(self.one_process("fine_tune"), disk / "model")
        with (disks[1] / "model" / "config.json").open("a") as file:
            file.write("\n")
        flags = (
            f"--model_name_or_path model --task glue/cola --data_dir {self.folder} --report_to none --output_dir out"
        )
        self.assert_refused(
            self.on_two_nodes(disks, "evaluate", *flags.split()), "checkpoint for cola: .* the same files"
        )

    def test_a_signal_to_one_rank_stops_both_at_the_same_step(self):
        out, log = self.folder / "signalled", self.folder / "signalled.log"
        argv = torture.changed(self.flags("pre_train", 2), "--output_dir", str(out), "--max_steps", "3000")
        common = dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
        common["MASTER_PORT"] = launcher_command("torchrun")[-1]
        environments = [os.environ | common | dict(RANK=rank, LOCAL_RANK=rank) for rank in ("0", "1")]
        with log.open("w") as file:
            ranks = [
                subprocess.Popen([python(), ROOT / "pre_train_t5.py", *argv], env=env, stdout=file, stderr=file)
                for env in environments
            ]
        self.addCleanup(lambda: [process.kill() for process in ranks if process.poll() is None])
        deadline = time.monotonic() + 120
        while not (out / "checkpoint-4").exists() and not checkpoints_of(out):
            self.assertLess(time.monotonic(), deadline, log.read_text()[-2000:])
            time.sleep(0.05)
        ranks[1].send_signal(signal.SIGUSR1)
        self.assertEqual([process.wait(60) for process in ranks], [PREEMPTED_EXIT_CODE] * 2, log.read_text()[-2000:])
        self.assertRegex(log.read_text(), "SIGUSR1: saved and stopped after step")
        self.assertIsNone(damage(checkpoints_of(out)[-1]))
