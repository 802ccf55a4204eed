"""T5Gemma and T5Gemma 2 on two processes: data-parallel and sharded, they train to the weights of one process."""

import os
import shutil
import subprocess
from pathlib import Path

import torch
import torture
from absl.testing import parameterized
from helpers import on_two_ranks, run_main
from safetensors.torch import load_file
from test_zoo import SMALL, animal, place
from warm_python import warm_python

import constants
import pre_train_t5
from foundry.model_t5 import load_model

ROOT = Path(constants.__file__).parent
SHARDED = [("t5gemma", "ul2", "fsdp2"), ("t5gemma2", "prefix_lm", "fsdp2")]
OTHERS_SHARDED = [("t5gemma", "prefix_lm", "zero3"), ("t5gemma2", "ul2", "zero3")]


def pre_training_flags(family: str, objective: str, **more) -> dict:
    """Those of a run that two processes repeat."""
    flags = SMALL | dict(model_name_or_path=animal(family)[0], train_file=place() / "text.txt", objective=objective)
    flags |= dict(data_cache_dir=place() / "cache", input_seq_length=64, learning_rate=1e-3, save_steps=2)
    return flags | dict(validation_split_count=30, num_samples=0) | more


class TwoProcessesTest(parameterized.TestCase):
    @parameterized.parameters(("t5gemma2", "ul2", ()), ("t5gemma", "prefix_lm", ("--train_only=cross_attn",)))
    def test_they_train_to_the_weights_of_one(self, family, objective, more):
        """Rows of several examples; of T5Gemma 2 the part that reads pictures, of T5Gemma all but cross-attention stays
        as it was, which torch's data parallelism must be told."""
        out = [place() / "processes" / f"{family}_{count}" for count in (1, 2)]
        flags = pre_training_flags(family, objective, max_steps=2)
        argv = [f"--{key}={value}" for key, value in flags.items()]
        run_main(pre_train_t5.main, *argv, *more, f"--output_dir={out[0]}")
        script = [pre_train_t5.__file__, *argv, *more, f"--output_dir={out[1]}", "--per_device_train_batch_size=1"]
        script = [word for word in script if word != "--per_device_train_batch_size=2"]
        on_two_ranks(*script)
        one, two = (load_file(folder / "model.safetensors") for folder in out)
        before = load_model(str(animal(family)[0])).state_dict()
        for name, tensor in one.items():
            torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=1e-6, msg=name)
            still = "vision" in name or "multi_modal" in name or (more and "cross_attn" not in name)
            self.assertTrue(not still or torch.equal(tensor, before[name]), name)
        self.assertTrue(any(not torch.equal(tensor, before[name]) for name, tensor in one.items()))


class ShardedTest(parameterized.TestCase):
    @parameterized.parameters(*SHARDED, *(OTHERS_SHARDED if os.environ.get("T5_ALL_LAUNCHERS") else ()))
    def test_two_processes_with_shares_of_the_weights_train_to_those_of_one(self, family, objective, way):
        """Started by accelerate, stopped after two of four steps and resumed."""
        out = [place() / "sharded" / f"{family}_{way}_{count}" for count in (1, 2)]
        flags = pre_training_flags(family, objective, max_steps=4, optim="adamw_torch")
        run_main(pre_train_t5.main, *(f"--{key}={value}" for key, value in flags.items()), f"--output_dir={out[0]}")
        argv = [f"--{key}={value}" for key, value in (flags | dict(per_device_train_batch_size=1)).items()]
        argv += [f"--output_dir={out[1]}"]
        started = [pre_train_t5.__file__, *argv, f"--deepspeed={ROOT}/zero_stage3_config.json"]
        if way == "fsdp2":
            started = [f"{ROOT}/tests/support/fsdp2_on_cpu.py", "pre_train_t5.py", *argv, "--fsdp"]
        for more in ([], ["--resume_from_checkpoint", f"{out[1]}/checkpoint-2"]):
            command = [*torture.launcher_command("accelerate", warm_python()), *started, *more]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
            self.assertEqual(done.returncode, 0, done.stdout[-1000:] + done.stderr[-3000:])
            self.assertRegex(done.stdout, f"sharding +{'ZeRO-3' if way == 'zero3' else 'FSDP2'}")
            one, two = (load_file(folder / "model.safetensors") for folder in out)
            self.assertEqual(one.keys(), two.keys())
            for name, tensor in one.items():
                torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n} {m}")
            shutil.rmtree(out[1] / "checkpoint-4")
            (out[1] / "model.safetensors").unlink()
