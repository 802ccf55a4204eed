"""A page in the browser on which to try a model.

    python predict_t5.py --model_name_or_path out/fine_tune_t5 --web     # on 127.0.0.1

page.py has what it shows, and serves it.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from foundry.common.flags import Rules, needs_packages, option
from foundry.common.machine import run_in_short_lived_thread
from tasks.frontend import Frontend


@dataclass
class WebPage(Frontend):
    """Shows the answers to what is typed, in place of answering a file."""

    _argument_group_name = "prediction"
    switch: ClassVar = "web"
    rules: ClassVar[Rules] = (needs_packages("web", "gradio", "web"),)

    web: bool = option(False, "Open a page on this machine to try the model, instead of answering --input_file.")

    def work(self, plan: Any, engine: Any) -> None:
        from features.web_page.page import show_page

        show_page(plan, engine)

    def encode(self, args: Any, load: Any) -> None:
        from features.web_page.page import show_encoder

        show_encoder(args, run_in_short_lived_thread(load))
