"""A page in the browser on which to try a model: `predict_t5.py --web`.

reads, shown = "rte sentence1: <sentence1> sentence2: <sentence2>", {"prediction": "answer"}
open_page("fine_tune_t5", reads, ["sentence1", "sentence2"], shown, answer)
-> serves http://127.0.0.1:7860 until Ctrl-C

A program asks it with gradio_client.Client(url).predict("a", "b", api_name="/answer").
"""

import functools
import html
import os
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from foundry.common.processes import say, user_cache

HEADERS = ["prediction", "log_probability"]  # columns of the table of `n_best`
HERE = {"localhost", "127.0.0.1", "::1"}
LONGEST_TEXT = 100_000  # characters of an input
MOST_BYTES = 2**22  # of a request
MOST_WAITING = 32  # requests; further ones are told that the queue is full


class Guard:
    """ASGI middleware: no files are uploaded, no request is large, and unless the page `is_open` to other machines,
    only this machine's addresses are answered, and no page of another origin asks. So a page that a browser opens
    elsewhere, also under a name that leads here, cannot use this one."""

    def __init__(self, app: Callable, is_open: bool):
        self.app, self.is_open = app, is_open

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        refusal = scope["type"] == "http" and self._refusal(scope)
        if not refusal:
            await self.app(scope, receive, send)
            return
        status, text = refusal
        head = {"status": status, "headers": [(b"content-type", b"text/plain"), (b"connection", b"close")]}
        await send({"type": "http.response.start"} | head)
        await send({"type": "http.response.body", "body": text.encode()})

    def _refusal(self, scope: dict) -> tuple[int, str] | None:
        sent = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = sent.get("host", ""), sent.get("origin")
        try:
            named, from_page = urlsplit(f"//{host}").hostname, urlsplit(origin or "").netloc
        except ValueError:  # [::1
            return 400, "the request names no host or origin"
        if not self.is_open and named not in HERE:
            return 403, "this page is for its own machine: open it at the address that the script printed"
        if not self.is_open and origin is not None and from_page != host:
            return 403, "a page of another origin may not ask this one"
        if scope["method"] in ("POST", "PUT", "PATCH"):
            if not sent.get("content-type", "application/json").startswith("application/json"):
                return 415, "this page takes texts as JSON, and no files"
            if not sent.get("content-length", "").isdecimal():
                return 411, "the request must say its length"
            if int(sent["content-length"]) > MOST_BYTES:
                return 413, f"a request has at most {MOST_BYTES:,} bytes"
        return None


def open_page(
    title: str, reads: str, inputs: list[str], shown: dict[str, str], answer: Callable[[dict[str, str]], dict]
) -> None:
    """Serves a page with a text box for each of `inputs`, until Ctrl-C. Only this machine can open it, unless the
    environment variable GRADIO_SERVER_NAME says otherwise; then whoever reaches this machine can.

    reads: what the model reads, shown at the top, with <input> in place of each input. shown: {name: its heading} of
    what the page shows: "prediction", a text; "n_best", a list of records with HEADERS; "labels", {class: its
    probability}; "tags", the parts of a text with their tags or None. answer: function {input: text} -> {name: its
    value, "read": the text that the model has read, "notes": what is odd about the answer}.
    """
    # In the system's temporary directory its folder could be another user's.
    os.environ.setdefault("GRADIO_TEMP_DIR", str(user_cache("page")))
    import gradio
    from starlette.middleware import Middleware

    def answered(*texts: str) -> list:
        for name, text in zip(inputs, texts, strict=True):
            if len(text) > LONGEST_TEXT:
                raise gradio.Error(
                    f"{name}: {len(text):,} characters; a text has at most {LONGEST_TEXT:,}", print_exception=False
                )
        begin = time.perf_counter()
        found = answer(dict(zip(inputs, texts, strict=True)))
        milliseconds = f"{1000 * (time.perf_counter() - begin):.0f}"
        for note in found["notes"]:
            gradio.Warning(note)
        if "n_best" in shown:
            found["n_best"] = [[one[name] for name in HEADERS] for one in found["n_best"]]
        return [*(found.get(name) for name in shown), found["read"], milliseconds]

    makers = {
        "prediction": functools.partial(gradio.Textbox, lines=3),
        "n_best": functools.partial(gradio.Dataframe, headers=HEADERS),
        "labels": gradio.Label,
        "tags": functools.partial(gradio.HighlightedText, combine_adjacent=True),
    }

    with gradio.Blocks(title=title, analytics_enabled=False) as page:
        gradio.HTML(f"<h1>{html.escape(title)}</h1>The model reads <code>{html.escape(reads)}</code>")
        with gradio.Row():
            with gradio.Column():
                boxes = [gradio.Textbox(label=name, lines=3, autofocus=name == inputs[0]) for name in inputs]
                button = gradio.Button("Answer", variant="primary")
                about = [gradio.Textbox(label="what the model read"), gradio.Textbox(label="milliseconds")]
            with gradio.Column():
                results = [makers[name](label=heading) for name, heading in shown.items()]
        started = [button.click, *(box.submit for box in boxes)]  # submit: Shift-Enter in a box
        gradio.on(started, answered, boxes, [*results, *about], api_name="answer")
    options = dict(share=False, show_error=True, ssr_mode=False, run_history=False, footer_links=["api"])
    name = os.environ.get("GRADIO_SERVER_NAME", "127.0.0.1")
    options["app_kwargs"] = {"middleware": [Middleware(Guard, is_open=name not in HERE)]}
    page.queue(max_size=MOST_WAITING)
    page.launch(**options, quiet=True, prevent_thread_lock=True)
    say(f"the page is at {page.local_url} until Ctrl-C")
    page.block_thread()
