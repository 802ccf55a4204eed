"""Runs one of our scripts under FSDP2 on CPUs, where accelerate would silently use plain data parallelism.

    torchrun --nproc_per_node 2 tests/support/fsdp2_on_cpu.py pre_train_t5.py --fsdp --config_name tiny ...

accelerate uses FSDP2 only on what it calls a GPU-like device. `fully_shard` itself works over gloo, so telling
accelerate's state that the plugin counts is enough: Trainer and accelerate then take the same path as on GPUs.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import accelerate.state
from accelerate.utils import DistributedType

import fine_tune_t5
import pre_train_t5
from foundry.common.machine import run_script

_as_accelerate_has_it = accelerate.state.AcceleratorState.__init__


def _with_fsdp(self, *args, fsdp_plugin=None, **kwargs):
    _as_accelerate_has_it(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.FSDP
        self.fsdp_plugin = fsdp_plugin
        accelerate.state.PartialState._shared_state["distributed_type"] = self.distributed_type


if __name__ == "__main__":
    accelerate.state.AcceleratorState.__init__ = _with_fsdp
    scripts = {"pre_train_t5.py": pre_train_t5.main, "fine_tune_t5.py": fine_tune_t5.main}
    run_script(lambda: scripts[sys.argv[1]](sys.argv[2:]))
