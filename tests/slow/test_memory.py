"""foundry/runs/counted.py and memory.py: counts and sums against what small models really hold, byte for byte.

Divided states are those of two gloo processes.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from absl.testing import parameterized
from helpers import token_mean_loss
from planned import memory_on_a_gpu
from real_peaks import CASES, Case, arguments, new_model
from transformers import default_data_collator
from warm_python import warm_python

from foundry.model_t5 import build_config, create_model
from foundry.runs import counted, step_memory
from foundry.runs.counted import CountedAs, LiveBytes, pass_peaks, passes, prepare, update, update_bytes
from foundry.runs.memory import (
    STRATEGIES,
    block_parameters,
    communication_bytes,
    matrix_parameters,
    state_bytes,
)
from foundry.trainer_t5 import T5Trainer
from foundry.training.optimizers import optimizer_class_and_kwargs

ROOT = Path(__file__).resolve().parents[2]


def small_config(**changes):
    shape = dict(d_model=64, d_kv=16, num_heads=2, d_ff=96, num_layers=2, num_decoder_layers=2, dropout_rate=0.0)
    return build_config("tiny", 640, shape | changes)


def batch_of(config, batch: int, source: int, target: int) -> tuple[dict, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((batch, source), (batch, target), (batch, target))
    ids, decoder_ids, labels = (torch.randint(3, config.vocab_size, size, generator=generator) for size in sizes)
    return {"input_ids": ids, "decoder_input_ids": decoder_ids, "use_cache": False}, labels


class CountTest(parameterized.TestCase):
    """tests/support/real_peaks.py compares the count with the memory of real processes (make torture)."""

    @parameterized.parameters(
        "less_sdpa",
        "plain_sdpa_dropout",
        "longt5_tglobal",
        "lora_int8",
        "checkpointing_plain_bf16",
        "t5gemma_bf16",
        "packed",
    )
    def test_without_numbers_it_is_what_a_step_with_numbers_holds(self, name):
        case = small(CASES[name])
        args, how, planned = arguments(case), CountedAs(case.attention), new_model(case, "meta")
        random = torch.get_rng_state()
        found, of_update = pass_peaks(planned, args, case.batch, how), update_bytes(planned, args, how)
        self.assertTrue(torch.equal(torch.get_rng_state(), random))
        model, live = new_model(case), LiveBytes()
        self.assertEqual(update(model, args, how, live), of_update)
        model = new_model(case)
        prepare(model, args, how)
        self.assertEqual(passes(model, args, case.batch, how, live=LiveBytes()), found)

    @parameterized.parameters("checkpointing", "longt5_local", "t5gemma")
    def test_many_layers_are_counted_with_few(self, name):
        case = small(CASES[name])
        args, how = arguments(case), CountedAs(case.attention)
        model = new_model(case, "meta", dict(num_layers=4, num_decoder_layers=3))
        exact = max(pass_peaks(model, args, case.batch, how).values())
        with mock.patch.object(counted, "FEW_LAYERS", 4):
            self.assertLess(abs(max(pass_peaks(model, args, case.batch, how).values()) / exact - 1), 0.01)

    @parameterized.parameters(dict(), dict(recompute=False, bf16=True), dict(activation_checkpointing=True))
    def test_it_is_what_the_trainer_s_step_holds(self, **flags):
        """Two steps of two micro-batches."""
        case = small(CASES["less_eager"])._replace(flags=flags)
        args, model = arguments(case), new_model(case)
        more = dict(gradient_accumulation_steps=2, max_steps=2, warmup_steps=0, save_strategy="no", eval_strategy="no")
        more |= dict(output_dir=str(self.folder), disable_tqdm=True, dry_run=False, lr_scheduler_type="constant")
        args = args.replaced(per_device_train_batch_size=case.batch.size, **more)
        rows = [{name: row[0] for name, row in replace(case.batch, size=1).tensors("cpu").items()}] * 64
        trainer = T5Trainer(model=model, args=args, train_dataset=rows, data_collator=default_data_collator)
        live = LiveBytes()
        live.begin(model)
        with live, contextlib.redirect_stdout(None):
            trainer.train()
        how = CountedAs(case.attention, accumulates=True)
        of_update, states = update_bytes(new_model(case, "meta"), args, how)
        plan = max(of_update, states + max(pass_peaks(new_model(case, "meta"), args, case.batch, how).values()))
        self.assertLess(abs(plan / max(live.peaks.values()) - 1), 0.02)

    @parameterized.parameters(
        # family, weight_format, compiled, GPU -> what the plan says beside the bytes
        ("t5_v1_1", "float32", False, False, r"^\S+ \S+ at the peak of a step$"),
        ("t5_v1_1", "float32", True, True, "^about .* uncompiled"),
        ("flan_t5", "nf4", False, True, "^about .* int8"),
    )
    def test_what_is_not_counted_is_said(self, family, weight_format, compiled, on_gpu, said):
        case = small(CASES["less_eager"])._replace(family=family, lora=family == "flan_t5")
        memory, step = memory_on_a_gpu(new_model(case, "meta"), 8)
        if not on_gpu:
            memory.gpu = None
        self.assertRegex(memory.described(step._replace(weight_format=weight_format, compiled=compiled)), said)
        with mock.patch.object(step_memory, "pass_peaks", side_effect=RuntimeError("no such kernel")):
            self.assertIn("no such kernel", memory.described(step._replace(size=3)))


def small(case: Case) -> Case:
    return case._replace(batch=replace(case.batch, size=2, source=48, target=8))


class StatesTest(parameterized.TestCase):
    @parameterized.parameters("adamw_torch", "adamw_rms_scaled", "adafactor", "muon")
    def test_weights_gradients_and_optimizer(self, name):
        config = small_config()
        model = create_model(config)
        inputs, labels = batch_of(config, 2, 16, 8)
        token_mean_loss(model(**inputs), labels).backward()
        args = SimpleNamespace(
            optim=name, deepspeed=None, learning_rate=1e-3, adam_beta1=0.9, adam_beta2=0.99, adam_epsilon=1e-6
        )
        kind, kwargs = optimizer_class_and_kwargs(args, model) or (torch.optim.AdamW, {})
        optimizer = kind(model.parameters(), **kwargs)
        optimizer.step()
        shapes = [tuple(p.shape) for p in model.parameters()]
        states = state_bytes("ddp", config, shapes, name, processes=1)
        self.assertEqual(states.weights, sum(p.nbytes for p in model.parameters()))
        self.assertEqual(states.gradients, sum(p.grad.nbytes for p in model.parameters()))
        kept = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        measured = sum(value.nbytes for value in kept if value.numel() > 1)  # without the counters of steps
        self.assertEqual(states.optimizer, measured)

    def test_parameters_by_kind(self):
        config = small_config(num_decoder_layers=3)
        model = create_model(config)
        products = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
        self.assertEqual(matrix_parameters(config), products)
        block = sum(p.numel() for p in model.decoder.block[1].parameters())
        self.assertEqual(block_parameters(config), block)

    def test_the_papers_example(self):
        """ZeRO, figure 1: 7.5 billion weights, 64 GPUs, K = 12: 120 GB without it, 16.6 GB and 1.9 GB with stages 2, 3.
        Stage 1: 31.4 GB.

        The 120 GB are those of bfloat16 weights and gradients with a float32 copy; ours keeps float32 alone: the same
        16 bytes a weight.
        """
        shapes, config = [(75_000, 100_000)], build_config("t5-v1_1-xl")
        sizes = {}
        for strategy in STRATEGIES:
            states = state_bytes(strategy, config, shapes, "adamw_torch", 64)
            sizes[strategy] = (states.weights + states.gradients + states.optimizer) / 1e9
        self.assertAlmostEqual(sizes["ddp"], 120.0, places=1)
        self.assertAlmostEqual(sizes["zero1"], 31.4, places=1)
        self.assertAlmostEqual(sizes["zero2"], 16.6, places=1)
        self.assertAlmostEqual(sizes["zero3"], 1.9, places=1)
        self.assertAlmostEqual(sizes["fsdp2"], 1.9, places=1)

    def test_communication_of_the_paper(self):
        """ZeRO, section 7: stages 1 and 2 send as much as data parallelism, 2 volumes; stage 3 sends 3."""
        weights, processes = 1000, 1_000_000  # (N - 1) / N is 1
        sent = {strategy: communication_bytes(strategy, weights, processes).total for strategy in STRATEGIES}
        self.assertAlmostEqual(sent["zero1"], 2 * 2 * weights, delta=1)
        self.assertAlmostEqual(sent["zero2"], 2 * 2 * weights, delta=1)
        self.assertAlmostEqual(sent["zero3"], 3 * 2 * weights, delta=1)
        self.assertAlmostEqual(sent["fsdp2"], sent["zero3"])
        self.assertAlmostEqual(sent["ddp"], 2 * 4 * weights, delta=1)  # in float32
        self.assertEqual(communication_bytes("zero3", weights, 1).total, 0)
        four = communication_bytes("zero2", weights, processes, accumulation=4)
        self.assertAlmostEqual(four.total, (4 + 1) * 2 * weights, delta=1)
        self.assertEqual(communication_bytes("ddp", weights, 8, accumulation=4), communication_bytes("ddp", weights, 8))


# One rank: trains a step under fully_shard, and under DeepSpeed's ZeRO where it is installed, and prints its bytes.
RANK = """
    import json, os, sys, torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from test_memory import batch_of, small_config
    from helpers import token_mean_loss
    from foundry.model_t5 import create_model

    def nbytes(tensor):
        return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes

    def state_of(optimizer):
        values = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        return sum(nbytes(v) for v in values if v.numel() > 1)

    config, found = small_config(), {}
    inputs, labels = batch_of(config, 2, 16, 8)
    dist.init_process_group("gloo")
    model = create_model(config)
    for block in [*model.encoder.block, *model.decoder.block]:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    token_mean_loss(model(**inputs), labels).backward()
    optimizer.step()
    found["fsdp2"] = [sum(nbytes(p) for p in model.parameters()), sum(nbytes(p.grad) for p in model.parameters()),
                      state_of(optimizer)]
    import deepspeed
    deepspeed.ops.__compatible_ops__.clear()  # gloo alone: its own CPU kernels would first have to be compiled
    for stage in (2, 3):
        torch.manual_seed(0)
        model = create_model(config)
        settings = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True,
                    "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
        optimizer = torch.optim.AdamW(model.parameters())
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        loss = token_mean_loss(engine(**inputs), labels)
        engine.backward(loss)
        engine.step()
        weights = [p.ds_tensor if stage == 3 else p for p in model.parameters()]
        masters = [p for group in engine.optimizer.optimizer.param_groups for p in group["params"]]
        if stage == 3:
            masters = engine.optimizer.fp32_partitioned_groups_flat
        found[f"zero{stage}"] = [sum(nbytes(p) for p in weights), None,
                                 sum(nbytes(p) for p in masters) + state_of(engine.optimizer.optimizer)]
    with open(sys.argv[1] + os.environ["RANK"], "w") as file:
        json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()
"""


class PartitionsTest(parameterized.TestCase):
    def test_two_processes_hold_what_the_formula_says(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "rank.py"
            script.write_text(textwrap.dedent(RANK))
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu"}
            commands = [
                subprocess.Popen(
                    [warm_python(), str(script), f"{folder}/rank"],
                    env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                for rank in (0, 1)
            ]
            try:
                printed = [command.communicate(timeout=240)[0] for command in commands]
            finally:
                for command in commands:
                    command.kill()
            self.assertEqual([command.returncode for command in commands], [0, 0], printed[0][-3000:])
            ranks = [json.loads((Path(folder) / f"rank{rank}").read_text()) for rank in (0, 1)]
        config = small_config()
        shapes = [tuple(p.shape) for p in create_model(config).parameters()]
        for strategy in ("fsdp2", "zero2", "zero3"):
            formula = state_bytes(strategy, config, shapes, "adamw_torch", processes=2, bf16=False)
            for found in ranks:
                wanted = (formula.weights, formula.gradients, formula.optimizer)
                for measured, expected in zip(found[strategy], wanted, strict=True):
                    if measured is not None:
                        self.assertLess(abs(measured / expected - 1), 0.02, f"{strategy}: {found[strategy]}, {wanted}")
