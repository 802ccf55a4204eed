"""LoRA: small matrices are trained beside frozen weights, which may be held in fewer bytes, also to answer.

    python fine_tune_t5.py --model_name_or_path google/flan-t5-xl --lora_rank 16 --load_in_8bit --train_file pairs.jsonl
    python predict_t5.py --model_name_or_path out/fine_tune_t5 --load_in_8bit --input_file new.txt

low_rank.py has the matrices and their folders, frozen.py the formats of frozen weights.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from constants import LORA
from foundry.common.errors import UserError
from foundry.common.flags import Flags, Rules, needs_packages, option, refuse
from foundry.modeling.weights import Weights

DTYPES = ("float32", "bfloat16")
WEIGHT_FORMAT_FLAGS = "load_in_4bit load_in_8bit dtype int8"


def _no_weight_format(is_refused: Callable[[Flags], object], reason: str) -> Rules:
    """Rules that refuse each of WEIGHT_FORMAT_FLAGS that asks for a format, as --load_in_8bit false does not."""
    names = WEIGHT_FORMAT_FLAGS.split()
    return [(name, lambda flags, name=name: flags.get(name) and is_refused(flags), reason) for name in names]


_LOAD_IN_4BIT = option(False, "Hold frozen weights in 4 bits (nf4), an eighth of float32.")
_LOAD_IN_8BIT = option(False, "Hold frozen weights in 8 bits (int8), a quarter of float32.")
_WEIGHT_FORMAT_RULES = (
    (
        "load_in_4bit",
        lambda flags: flags.load_in_4bit and flags.load_in_8bit,
        "--load_in_8bit holds the same weights: leave one out",
    ),
    ("dtype", lambda flags: flags.load_in_8bit, "--load_in_8bit holds the same weights: leave one out"),
    ("dtype", lambda flags: flags.load_in_4bit, "--load_in_4bit holds the same weights: leave one out"),
    needs_packages("load_in_4bit", "bitsandbytes", "quantisation"),
)


class _Frozen(Weights):
    """What training and answering share."""

    load_in_4bit: bool
    load_in_8bit: bool
    dtype: str | None

    def weight_format(self) -> str | None:
        if self.load_in_4bit:
            return "nf4"
        return "int8" if self.load_in_8bit else self.dtype

    def hold(self, model: Any, device: Any, bf16: bool) -> None:
        if (weight_format := self.weight_format()) not in (None, "float32"):
            from features.lora.frozen import freeze

            freeze(model, weight_format, device, bf16)

    def check_weight_format(self, args: Any) -> None:
        """UserError if flags exclude the format: sharding excludes every one, and bfloat16 needs --bf16, which must be
        decided."""
        from foundry.arguments.sharding import wants_fsdp

        sharding = "--deepspeed" if getattr(args, "deepspeed", None) else None
        if hasattr(args, "fsdp") and wants_fsdp(args):
            sharding = "--fsdp"
        if sharding:
            reason = f"not with {sharding}, which shards float32 weights: leave one of them out"
            refuse(self, WEIGHT_FORMAT_FLAGS, reason)
        if self.dtype == "bfloat16" and not args.bf16:
            refuse(self, "dtype", "such weights are multiplied in bfloat16 only: add --bf16, or leave --dtype out")


@dataclass
class LowRank(_Frozen):
    """Trains only LoRA's matrices."""

    _argument_group_name = "model and tokenizer"
    _usual = "lora_rank"
    switch: ClassVar = "lora_rank"
    rules: ClassVar[Rules] = (
        *_WEIGHT_FORMAT_RULES,
        *_no_weight_format(
            lambda flags: not flags.lora_rank,
            "is for weights that are not trained: add --lora_rank 16, or leave it out",
        ),
        (
            "lora_rank",
            lambda flags: flags.model_name_or_path and flags.config_overrides,
            "its matrices belong to a whole checkpoint, and --config_overrides {config_overrides} leaves layers out: "
            "train without LoRA",
        ),
        needs_packages("lora_rank", "peft", "lora"),
    )
    decisive: ClassVar = ("lora_rank", "load_in_4bit", "load_in_8bit", "dtype")
    suffix: ClassVar = LORA
    smaller: ClassVar = "--load_in_8bit, --load_in_4bit, or a smaller model"

    lora_rank: int | None = option(None, "Train only LoRA matrices of this rank. Not set: all weights.", at_least=1)
    load_in_4bit: bool = _LOAD_IN_4BIT
    load_in_8bit: bool = _LOAD_IN_8BIT
    dtype: str | None = option(None, "Type of frozen weights.", choices=DTYPES, auto=True)

    def decide(self, flags: Flags) -> dict[str, Any]:
        """Nothing. UserError without a checkpoint, and for one that the run would delete, or that only this machine
        has."""
        if not flags.model_name_or_path:
            raise UserError("--lora_rank: adapts a checkpoint, and none is named: give --model_name_or_path")
        base, folder = Path(flags.model_name_or_path).resolve(), Path(flags.output_dir).resolve()
        if base.is_dir() and folder in (base, *base.parents):
            raise UserError(
                f"--output_dir {flags.output_dir} holds the checkpoint that the matrices of "
                f"--lora_rank {self.lora_rank} will need: name another folder"
            )
        if base.is_dir() and flags.push_to_hub:
            raise UserError(
                f"--push_to_hub with --lora_rank {self.lora_rank} would upload matrices of a checkpoint "
                f"that only this machine has, {flags.model_name_or_path}: name one of the Hub, or upload "
                "the merged model with export_checkpoint.py --push_to_hub"
            )
        return {}

    def check(self, args: Any, config: Any, tokenizer: Any, packed: object = None) -> None:
        self.check_weight_format(args)

    def adapt(self, model: Any, base: str, vocabulary: str | None = None) -> None:
        from features.lora.low_rank import add_low_rank

        if vocabulary:
            raise UserError(
                f"--lora_rank {self.lora_rank}: new tokens ({vocabulary}) would keep the embeddings they begin with, "
                "which are frozen. Leave the flag out to train all weights, or leave out --tokenizer_name"
            )
        add_low_rank(model, self.lora_rank, base)

    def choose_weight_format(self, gpu: Any, bf16: bool, sharding: str, earlier: dict) -> tuple[str, str] | None:
        if earlier:
            return (earlier["dtype"], "as in the run that is resumed") if earlier.get("dtype") else None
        if gpu is None or not bf16 or sharding != "ddp":
            return None
        return "bfloat16", "autocast casts them to it anyway: no bit of the results differs"

    def in_weight_format(self, weight_format: str | None) -> Weights:
        if weight_format is None:
            return self
        dtype = weight_format if weight_format in DTYPES else None
        return replace(self, dtype=dtype, load_in_8bit=weight_format == "int8", load_in_4bit=weight_format == "nf4")


@dataclass
class HeldToAnswer(_Frozen):
    """Answers with weights that are held in fewer bytes."""

    _argument_group_name = "weights in fewer bytes"
    _usual = WEIGHT_FORMAT_FLAGS
    rules: ClassVar[Rules] = (
        *_WEIGHT_FORMAT_RULES,
        *_no_weight_format(
            lambda flags: flags.get("backend") not in (None, "transformers"),
            "is PyTorch's: leave it out with --backend {backend}",
        ),
        (
            "load_in_4bit load_in_8bit dtype",
            lambda flags: flags.int8,
            "--int8 gives the same weights another format: leave one out",
        ),
        ("int8", lambda flags: flags.bf16, "multiplies in int8, and --bf16 in bfloat16: leave one out"),
    )

    load_in_4bit: bool = _LOAD_IN_4BIT
    load_in_8bit: bool = _LOAD_IN_8BIT
    dtype: str | None = option(None, "Type of the layers' weights. Not set: float32.", choices=DTYPES)
    int8: bool = option(False, "Multiply in int8, on a CPU with AVX2: faster, and a quarter of the weights.")

    def is_on(self) -> bool:
        return self.weight_format() is not None

    def weight_format(self) -> str | None:
        return "int8" if self.int8 else super().weight_format()

    def merges(self) -> bool:
        return self.int8

    def decide(self, flags: Flags) -> dict[str, Any]:
        """Nothing. UserError for flags that exclude the format, and for a machine that cannot multiply in int8."""
        self.check_weight_format(flags)
        if self.int8:
            import torch

            from foundry.common.machine import has_accelerator
            from foundry.modeling.int8 import multiplies_int8

            if not flags.use_cpu and has_accelerator():
                refuse(self, "int8", "multiplies on a CPU: add --use_cpu, or give --bf16 in its place")
            if not multiplies_int8(torch.device("cpu")):
                refuse(self, "int8", "needs a CPU with AVX2, and this one has none: leave it out")
        return {}

    def check(self, args: Any, config: Any, tokenizer: Any, packed: object = None) -> None:
        from foundry.modeling.decoding_layers import DECODERS

        if self.int8 and config.model_type not in DECODERS:
            refuse(self, "int8", f"not for {config.model_type} models: give --load_in_8bit, or --bf16")

    def plan(self, args: Any, model: Any) -> dict[str, str | None]:
        if not self.int8:
            return {"products": None}
        from foundry.modeling.int8 import input_steps

        return {"products": f"int8, each row of an input rounded to {2 * input_steps() + 1} steps"}

    def record(self) -> dict[str, Any]:
        return {"int8": True} if self.int8 else {}

    def hold(self, model: Any, device: Any, bf16: bool) -> None:
        model.requires_grad_(False)
        if self.int8:
            from foundry.modeling.int8 import multiply_in_int8

            multiply_in_int8(model)
        else:
            super().hold(model, device, bf16)
