"""An exponential moving average of the weights, which is evaluated and saved as the model (--ema_decay).

    python fine_tune_t5.py --model_name_or_path google/t5-v1_1-small --train_file pairs.csv --ema_decay 0.999

Polyak and Juditsky 1992; as Tarvainen and Valpola 2017 (arXiv 1703.01780) use it. averaged_weights.py has the callback.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from foundry.common.errors import UserError
from foundry.common.flags import option
from foundry.features import Feature
from foundry.modeling.training_method import TrainingMethod


@dataclass
class MovingAverage(Feature):
    """The flag of the average."""

    _argument_group_name = "optimizer and schedule"
    _usual = ""
    switch: ClassVar = "ema_decay"
    decisive: ClassVar = ("ema_decay",)

    ema_decay: float | None = option(
        None, "Evaluate and save a moving average of the weights with this decay, such as 0.999.", above=0, below=1
    )

    def of_run(self) -> "AverageKept":
        return AverageKept(self)


class AverageKept(TrainingMethod):
    """Trains as ever, and keeps the average beside the weights. size: its bytes, once the model's shape is known."""

    def __init__(self, flags: MovingAverage):
        self.flags, self.size = flags, 0

    def is_on(self) -> bool:
        return self.flags.is_on()

    def check(self, args: Any, config: Any, tokenizer: Any, packed: object = None) -> None:
        from foundry.arguments.sharding import wants_fsdp
        from foundry.modeling.families import shape_of

        if args.deepspeed or wants_fsdp(args):
            flag = f"--deepspeed {args.deepspeed}" if args.deepspeed else "--fsdp"
            raise UserError(
                f"{flag}: --ema_decay {self.flags.ema_decay:g} needs whole weights in each process: leave one out"
            )
        self.size = 4 * (shape_of(config).layer_weights + shape_of(config).embedding_weights)

    def callbacks(self, trainer: Any) -> list:
        from features.moving_average.averaged_weights import AverageCallback

        callback = AverageCallback(trainer, self.flags.ema_decay)
        self.size = 4 * sum(weight.numel() for weight in callback.weights.values())
        return [callback]

    def memory(self, args: Any) -> dict[str, int]:
        return {"moving average": self.size}

    def plan(self, args: Any, model: Any) -> dict[str, str | None]:
        from features.moving_average.averaged_weights import grown_after

        steps = grown_after(self.flags.ema_decay)
        until = f", less until step {steps:,}" if steps > 1 else ""
        decay = f"{self.flags.ema_decay:g}{until}"
        return {"moving average": f"of the weights, decay {decay}: is evaluated and saved as the model"}
