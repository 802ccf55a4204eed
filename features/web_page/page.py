"""A page in the browser on which to try a model: `predict_t5.py --web`.

A program asks it with gradio_client.Client(url).predict("a", "b", api_name="/answer").
"""

import functools
import html
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from foundry.common.paths import user_cache
from foundry.common.reports import start_summary
from foundry.common.terminal import say
from foundry.corpora.sentinels import source_ids
from foundry.corpora.tokenizers import answering_tokenizer
from foundry.modeling.found_answers import Engine
from tasks.answering import Plan, answer_window, summary, tokenise
from tasks.examples import class_label_ids
from tasks.model_folders import LoadedEncoder

HEADERS = ["prediction", "log_probability"]  # columns of the table of `n_best`
HERE = {"localhost", "127.0.0.1", "::1"}
LONGEST_TEXT = 100_000  # characters of an input
MOST_BYTES = 2**22  # of a request
MOST_WAITING = 32  # requests; further ones are told that the queue is full
# {kind of encoder: what the page shows of its answer}
SHOWN = {
    "embedding": {"prediction": "cosine similarity"},
    "tokens": {"tags": "tags"},
    "class": {"prediction": "answer", "labels": "probability of each class"},
    "labels": {"prediction": "answer", "labels": "probability of each class"},
    "number": {"prediction": "number"},
}


def show_page(plan: Plan, engine: Engine) -> None:
    """Opens the page of --web, and answers its inputs until Ctrl-C."""
    labels = class_label_ids(plan.entry, plan.tokenizer)
    rows = summary(plan, f"those of the page: {', '.join(plan.reader.inputs)}", engine)
    start_summary(rows, title="a page to try the model")

    def answer(row: dict[str, str]) -> dict:
        item, plan.endless, plan.no_value = plan.reader.made({}, row), 0, 0
        (record,) = answer_window([item], engine, plan, tqdm(disable=True), first=0)
        sources = tokenise(item.texts, plan)
        uncut = [len(ids) for ids in source_ids(plan.tokenizer, item.texts)]
        record["read"] = "\n".join(as_read(*one, plan.tokenizer) for one in zip(sources, uncut, strict=True))
        record["notes"] = list(plan.odd().values())
        if labels is not None and item.texts:
            (source,) = sources
            chances = engine.score(source, labels).sum(dim=1).softmax(dim=0).tolist()
            record["labels"] = dict(zip(plan.entry.labels, chances, strict=True))
        return record

    shown = {"prediction": "answer"}
    shown |= {"n_best": f"all answers, the best first by {order_of(engine, plan)}"} if plan.count > 1 else {}
    shown |= {} if labels is None else {"labels": "probability of each class"}
    title = " + ".join(Path(model).name for model in plan.args.models)
    open_page(title, rows["model reads"], plan.reader.inputs, shown, answer)


def as_read(ids: list[int], uncut: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """What the model reads of a text, decoded from its ids, of which the last is EOS. uncut: how many it had."""
    read = tokenizer.decode(ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids)
    return read if uncut == len(ids) else f"{read} ... (cut: {len(ids):,} of {uncut:,} tokens)"


def order_of(engine: Engine, plan: Plan) -> str:
    """By what the texts of an input are sorted. Beam search divides by a power of the length; tokens include EOS."""
    search = engine.settings | plan.search
    power = 0 if search.get("do_sample") else search.get("length_penalty", 1.0)
    return f"log_probability / tokens ** {power:g}" if power else "log_probability"


# ---------------------------------------------------------------- encoders
def show_encoder(args: Any, encoder: LoadedEncoder) -> None:
    """Opens the page of --web for an encoder, and answers its inputs until Ctrl-C. Of embeddings it compares two texts,
    of which the first is a query if the model has a prompt for queries. args: the flags of predict_t5.py."""
    tokenizer, prompt = answering_tokenizer(args.model_name_or_path, args.tokenizer_name), encoder.prompt
    inputs = encoder.columns
    if encoder.kind == "embedding":
        inputs = ["query", "document"] if prompt else ["text", "other text"]
    start_summary(
        encoder.about | {"inputs": f"those of the page: {', '.join(inputs)}"}, title="a page to try the model"
    )

    def answer(row: dict[str, str]) -> dict:
        read = [encoder.read(row)] if encoder.kind != "embedding" else []
        if not read:
            query, document = row.values()
            read = [encoder.read(prompt + query), encoder.read(document)]
        records = encoder.answer(read)
        found = shown_of(encoder.kind, records, next(iter(row.values())))
        return found | {"read": "\n".join(as_read(*one[:2], tokenizer) for one in read), "notes": []}

    reads = prompt + ", ".join(f"<{name}>" for name in inputs)
    open_page(Path(args.model_name_or_path).name, reads, inputs, SHOWN[encoder.kind], answer)


def shown_of(kind: str, records: list[dict], text: str) -> dict[str, Any]:
    """{name of `open_page`: value} of an encoder's answer to a text, or to two that are compared."""
    if kind == "embedding":
        one, other = (record["embedding"].astype(float) for record in records)
        return {"prediction": f"{one @ other / np.sqrt(one @ one * (other @ other)):.4f}"}
    (record,) = records
    found = record["prediction"]
    if kind == "tokens":
        if "offsets" in record:
            marks = [(*place, tag) for place, tag in zip(record["offsets"], found, strict=True)]
        else:
            marks = [(span["start"], span["end"], span["label"]) for span in found]
        return {"tags": list(parts_of(text, marks))}
    if kind == "number":
        return {"prediction": f"{found:.6g}"}
    return {"prediction": found if kind == "class" else ", ".join(found), "labels": record["probabilities"]}


def parts_of(text: str, marks: Iterable[tuple[int, int, str]]) -> Iterator[tuple[str, str | None]]:
    """The parts of a text, with the tags of those that are marked: "a Ana" and [(2, 5, "PER")] -> ("a ", None),
    ("Ana", "PER")."""
    end = 0
    for begin, stop, tag in marks:
        if begin > end:
            yield text[end:begin], None
        yield text[begin:stop], tag or None
        end = stop
    if end < len(text):
        yield text[end:], None


# ---------------------------------------------------------------- the page
class PageGuard:
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

    thread = ThreadPoolExecutor(1, "answers")  # gradio takes any; see `run_in_short_lived_thread`

    def answered(*texts: str) -> list:
        for name, text in zip(inputs, texts, strict=True):
            if len(text) > LONGEST_TEXT:
                raise gradio.Error(
                    f"{name}: {len(text):,} characters; a text has at most {LONGEST_TEXT:,}", print_exception=False
                )
        begin = time.perf_counter()
        found = thread.submit(answer, dict(zip(inputs, texts, strict=True))).result()
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
    options["app_kwargs"] = {"middleware": [Middleware(PageGuard, is_open=name not in HERE)]}
    page.queue(max_size=MOST_WAITING)
    page.launch(**options, quiet=True, prevent_thread_lock=True)
    say(f"the page is at {page.local_url} until Ctrl-C")
    page.block_thread()
