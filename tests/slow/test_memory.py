"""foundry/runs/memory.py: its formulas against what small models really hold, byte for byte where PyTorch tells.

Saved tensors are counted with autograd's hooks, once for each storage; the peak of a step with the allocations that
PyTorch's profiler reports; divided states in two gloo processes.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from types import SimpleNamespace

import torch
import zoo
from absl.testing import parameterized
from helpers import token_mean_loss
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig
from warm_python import warm_python

from benchmarks.kept import kept_bytes
from foundry.model_t5 import build_config, create_model, set_dropout
from foundry.modeling.layers import checkpoint_blocks_only
from foundry.modeling.loss import compute_loss_in_forward
from foundry.runs.memory import (
    STRATEGIES,
    activation_bytes,
    block_parameters,
    communication_bytes,
    matrix_parameters,
    state_bytes,
)
from foundry.trainer_t5 import set_up_step
from foundry.training.optimizers import optimizer_class_and_kwargs

ROOT = Path(__file__).resolve().parents[2]
# (batch, source, target, changes to the shape): wide and narrow, long and short, deep and shallow, gated and not.
SHAPES = {
    "square": (2, 24, 16, {}),
    "long": (3, 96, 40, {}),
    "wide": (4, 20, 20, dict(d_model=96, d_ff=320, num_heads=3, d_kv=24)),
    "deep decoder": (2, 32, 48, dict(num_layers=1, num_decoder_layers=4)),
    "many words": (4, 16, 32, dict(vocab_size=4096, d_model=32)),
    "ungated": (2, 40, 24, dict(feed_forward_proj="relu")),
}


def small_config(**changes):
    shape = dict(d_model=64, d_kv=16, num_heads=2, d_ff=96, num_layers=2, num_decoder_layers=2, dropout_rate=0.0)
    return build_config("tiny", 640, shape | changes)


def batch_of(config, batch: int, source: int, target: int) -> tuple[dict, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((batch, source), (batch, target), (batch, target))
    ids, decoder_ids, labels = (torch.randint(3, config.vocab_size, size, generator=generator) for size in sizes)
    return {"input_ids": ids, "decoder_input_ids": decoder_ids, "use_cache": False}, labels


def saved_bytes(model, inputs: dict, labels: torch.Tensor, bf16: bool) -> tuple[int, torch.Tensor]:
    """(bytes of all storages that autograd keeps for the backward pass, weights left out; the loss)."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor: no address is used twice
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = token_mean_loss(model(**inputs), labels)
    return sum(size for size, _ in storages.values()), loss


class ActivationsTest(parameterized.TestCase):
    def assert_near(self, formula: float, measured: float, share: float):
        self.assertLess(abs(formula / measured - 1), share, f"formula {formula:,}, measured {measured:,}")

    @parameterized.product(shape=tuple(SHAPES), bf16=(False, True))
    def test_what_autograd_saves(self, shape, bf16):
        batch, source, target, changes = SHAPES[shape]
        config = small_config(**changes)
        model = create_model(config, "eager").train()
        inputs, labels = batch_of(config, batch, source, target)
        measured, _ = saved_bytes(model, inputs, labels, bf16)
        formula = activation_bytes(config, batch, source, target, "eager", bf16, on_cpu=True)
        log_softmax = 4 * batch * target * config.vocab_size  # of formula.loss, the part that autograd saves
        self.assert_near(formula.stored + formula.weight_copies + log_softmax, measured, 0.02)

    @parameterized.product(
        shape=tuple(SHAPES),
        bf16=(False, True),
        attention=("eager", "sdpa"),
        dropout=(0.0, 0.1),
        checkpointing=(False, True),
    )
    def test_what_autograd_saves_of_layers_that_keep_less(self, shape, bf16, attention, dropout, checkpointing):
        """As T5Trainer prepares a step that is not compiled."""
        batch, source, target, changes = SHAPES[shape]
        config = small_config(**changes)
        model = create_model(config, attention).train()
        set_dropout(model, dropout)
        step = dict(torch_compile=False, bf16_residual=False, keep_less=True)
        step |= dict(label_smoothing_factor=0.0, z_loss=0.0, loss_chunk_size=0)
        set_up_step(model, SimpleNamespace(**step))
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            checkpoint_blocks_only(model)
        inputs, labels = batch_of(config, batch, source, target)

        def forward() -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                return model(**inputs, labels=labels)["loss"]

        kept = kept_bytes(forward, model.parameters())
        self.assertEqual(kept.weight_copies, 0)
        job = config, batch, source, target, attention, bf16, checkpointing, True
        formula = activation_bytes(*job, keeps_less=True, dropout=dropout)
        log_softmax = 4 * batch * target * config.vocab_size
        self.assert_near(formula.stored + log_softmax, kept.activations, 0.1 if checkpointing else 0.05)

    @parameterized.product(family=zoo.GEMMA, shape=("square", "long"), bf16=(False, True))
    def test_what_autograd_saves_of_gemma(self, family, shape, bf16):
        """The decoder narrower than the encoder where the family allows it. Rotary angles and masks are not counted."""
        batch, source, target, _ = SHAPES[shape]
        sizes = dict(hidden_size=64, head_dim=16, num_attention_heads=4, intermediate_size=96)
        values = zoo.config_of(family, 640)
        for one in (values["encoder"].get("text_config", values["encoder"]), values["decoder"]):
            one.update(sizes)
        values["decoder"] |= dict(hidden_size=48) if family == "t5gemma" else {}
        config = AutoConfig.for_model(**values)
        model = create_model(config, "eager").train()
        inputs, labels = batch_of(SimpleNamespace(vocab_size=640), batch, source, target)
        measured, _ = saved_bytes(model, inputs, labels, bf16)
        formula = activation_bytes(config, batch, source, target, "eager", bf16)
        log_softmax = 4 * batch * target * 640 + (formula.loss - batch * target * 640 * 12)
        self.assert_near(formula.stored + formula.weight_copies + log_softmax, measured, 0.05)

    @parameterized.product(family=("longt5_local", "longt5_tglobal"), source=(96, 500), bf16=(False, True))
    def test_what_autograd_saves_of_longt5(self, family, source, bf16):
        """Its encoder sees neighbouring blocks: four times the memory for four times the length, not sixteen."""
        sizes = dict(d_model=64, d_kv=16, d_ff=96, num_decoder_layers=2, dropout_rate=0.0, local_radius=15)
        config = AutoConfig.for_model(**zoo.config_of(family, 640) | sizes)
        model = create_model(config, "eager").train()
        measured, _ = saved_bytes(model, *batch_of(config, 2, source, 16), bf16)
        formula = activation_bytes(config, 2, source, 16, "eager", bf16)
        log_softmax = 4 * 2 * 16 * config.vocab_size
        self.assert_near(formula.stored + formula.weight_copies + log_softmax, measured, 0.1)

    @parameterized.parameters("square", "long", "deep decoder")
    def test_a_kernel_that_keeps_no_weights(self, shape):
        """On a CPU sdpa has such a kernel for a bias without gradient, which masked rows have."""
        batch, source, target, changes = SHAPES[shape]
        config = small_config(**changes)
        model = create_model(config, "sdpa").train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("relative_attention_bias" not in name)
        measured, _ = saved_bytes(model, *batch_of(config, batch, source, target), False)
        formula = activation_bytes(config, batch, source, target, "sdpa", False)
        log_softmax = 4 * batch * target * config.vocab_size
        self.assert_near(formula.stored + log_softmax, measured, 0.05)
        eager = activation_bytes(config, batch, source, target, "eager", False)
        self.assertGreater(eager.stored, formula.stored)

    @parameterized.product(shape=("square", "long", "deep decoder"), bf16=(False, True))
    def test_checkpointing(self, shape, bf16):
        batch, source, target, changes = SHAPES[shape]
        config = small_config(**changes)
        model = create_model(config, "eager").train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for module in model.modules():
            if hasattr(module, "relative_attention_num_buckets"):
                module.gradient_checkpointing = False  # else transformers keeps zeros with a gradient
        inputs, labels = batch_of(config, batch, source, target)
        measured, _ = saved_bytes(model, inputs, labels, bf16)
        formula = activation_bytes(config, batch, source, target, "eager", bf16, True, on_cpu=True)
        log_softmax = 4 * batch * target * config.vocab_size
        head = 2 * config.vocab_size * config.d_model if bf16 else 0  # the blocks' copies are made again
        self.assert_near(formula.stored + head + log_softmax, measured, 0.1)

    @parameterized.parameters("", "decoder_")
    def test_a_layer_more_is_a_block_more(self, stack):
        """A layer of a stack adds what the formula says, and a recomputed block is no smaller than the larger one."""
        batch, source, target, _ = SHAPES["long"]
        sizes = []
        for layers in (1, 2):
            config = small_config(**{f"num_{stack}layers": layers})
            model = create_model(config, "eager").train()
            sizes.append(saved_bytes(model, *batch_of(config, batch, source, target), False)[0])
        configs = [small_config(**{f"num_{stack}layers": layers}) for layers in (1, 2)]
        one, two = (activation_bytes(config, batch, source, target, "eager", False).stored for config in configs)
        self.assert_near(two - one, sizes[1] - sizes[0], 0.02)
        again = activation_bytes(small_config(), batch, source, target, "eager", False, checkpointing=True)
        self.assertGreater(again.recomputed, sizes[1] - sizes[0])

    @parameterized.product(
        case=(
            ("long", 0.0, 0),
            ("wide", 0.0, 0),
            ("many words", 0.0, 0),
            ("many words", 1e-4, 0),
            ("many words", 1e-4, 24),
        ),  # shape, z-loss, chunk
        checkpointing=(False, True),
        bf16=(False, True),
    )
    def test_peak_of_a_step(self, case, checkpointing, bf16):
        """The most memory between the start and the end of an accumulated micro-batch, on top of weights and
        gradients: what the formula calls the total."""
        shape, z_loss, chunk = case
        batch, source, target, changes = SHAPES[shape]
        batch *= 4
        config = small_config(**changes)
        model = create_model(config, "eager").train()
        compute_loss_in_forward(model, z_loss=z_loss, chunk=chunk)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        inputs, labels = batch_of(config, batch, source, target)

        lengths, loss = (batch, source, target), dict(z_loss=z_loss > 0, chunk=chunk)
        formula = activation_bytes(config, *lengths, "eager", bf16, checkpointing, on_cpu=True, **loss)
        self.assert_near(
            formula.total,
            peak_of_micro_batch(model, inputs, labels, bf16),
            0.25 if checkpointing else 0.15 if chunk else 0.1,
        )


def peak_of_micro_batch(model, inputs: dict, labels: torch.Tensor, bf16: bool) -> int:
    """The most bytes that an accumulated micro-batch holds, on top of weights and gradients."""

    def micro_batch() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(**inputs, labels=labels)["loss"]
        loss.backward()

    micro_batch()  # the gradients are there
    return peak_bytes(micro_batch)


def peak_bytes(function) -> int:
    """The most bytes that a call had allocated at a time, of those it allocated itself."""
    with contextlib.redirect_stderr(None), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


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
