"""A server that answers many people at once, in the shape of OpenAI's completions and embeddings.

    python predict_t5.py --serve --model_name_or_path out/messages --port 8000     # on 127.0.0.1
    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "how are you"}'

app.py has the addresses, completions.py reads a request and makes its response, waiting_texts.py answers what waits
(continuous batching) and counts it, encoded_texts.py does these three for encoders. docs/use.md describes it.
"""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from foundry.common.flags import Rules, needs_packages, option
from foundry.common.machine import run_in_short_lived_thread
from tasks.frontend import Frontend

KEY = "T5_API_KEY"  # the environment variable with the key that clients must send


def is_origin(text: str) -> bool:
    """Whether it is the origin of a page, as browsers send it."""
    return text == "*" or re.fullmatch(r"https?://[a-z0-9.-]+(:\d+)?|https?://\[[0-9a-f:]+\](:\d+)?", text) is not None


@dataclass
class Server(Frontend):
    """Answers requests, in place of a file."""

    _argument_group_name = "prediction"
    _usual = "serve"
    switch: ClassVar = "serve"
    rules: ClassVar[Rules] = (
        (
            "do_sample temperature top_k top_p num_return_sequences",
            lambda flags: flags.serve,
            "is what each request says (temperature, top_p, n): leave it out with --serve",
        ),
        ("host port max_wait_ms max_queue cut_sources cors_origin", lambda flags: not flags.serve, "needs --serve"),
        (
            "cors_origin",
            lambda flags: not all(map(is_origin, flags.cors_origin or [])),
            "an origin is a scheme, a host and a port, as in http://localhost:3000, or * for the pages of all sites",
        ),
        needs_packages("serve", "fastapi uvicorn", "serve"),
    )

    serve: bool = option(False, "Answer requests in the shape of OpenAI's API, instead of --input_file.")
    host: str = option("127.0.0.1", "Of --serve: the address to listen on; 0.0.0.0 for other machines too.")
    port: int = option(8000, "Of --serve; 0 for any that is free.", at_least=0, at_most=65535)
    max_wait_ms: float = option(5.0, "Of --serve: how long a text waits for others to be answered with.", at_least=0)
    max_queue: int = option(2048, "Of --serve: texts that may wait; further requests get 429.", at_least=1)
    cut_sources: bool = option(False, "Of --serve: cut sources that are too long, which are otherwise refused.")

    cors_origin: list[str] | None = option(None, "Of --serve: sites whose pages may ask this server from a browser.")

    def work(self, plan: Any, engine: Any) -> None:
        from features.server.app import serve

        serve(plan, engine, self)

    def encode(self, args: Any, load: Any) -> None:
        from features.server.encoded_texts import serve_encoder

        serve_encoder(args, run_in_short_lived_thread(load), self)
