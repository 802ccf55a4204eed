"""A page in the browser on which to try a model: `predict_t5.py --web`.

open_page("fine_tune_t5", "rte sentence1: <sentence1> sentence2: <sentence2>", ["sentence1", "sentence2"], {}, answer)
-> serves http://127.0.0.1:7860 until Ctrl-C

A program asks it with gradio_client.Client(url).predict("a", "b", api_name="/answer").
"""

import html
import os
import time
from collections.abc import Callable

HEADERS = ["prediction", "log_probability"]  # columns of the table of `n_best`


def open_page(
    title: str, reads: str, inputs: list[str], more: dict[str, str], answer: Callable[[dict[str, str]], dict]
) -> None:
    """Serves a page with a text box for each of `inputs`, until Ctrl-C. Only this machine can open it, unless the
    environment variable GRADIO_SERVER_NAME says otherwise.

    reads: what the model reads, shown at the top, with <input> in place of each input. answer: function {input: text}
    -> {"prediction": the answer, "read": the text that the model has read, and what `more` names}. more: {name: its
    heading} of "n_best", whose value is a list of records with HEADERS, and "labels", whose value is {class: its
    probability}.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # set before the import, at which gradio sends a first report
    import gradio

    def answered(*texts: str) -> list:
        begin = time.perf_counter()
        found = answer(dict(zip(inputs, texts, strict=True)))
        milliseconds = f"{1000 * (time.perf_counter() - begin):.0f}"
        n_best = [[one[name] for name in HEADERS] for one in found.get("n_best", [])]
        shown = {"n_best": n_best, "labels": found.get("labels")}
        return [found["prediction"], *(shown[name] for name in more), found["read"], milliseconds]

    with gradio.Blocks(title=title, analytics_enabled=False) as page:
        gradio.HTML(f"<h1>{html.escape(title)}</h1>The model reads <code>{html.escape(reads)}</code>")
        with gradio.Row():
            with gradio.Column():
                boxes = [gradio.Textbox(label=name, lines=3, autofocus=name == inputs[0]) for name in inputs]
                button = gradio.Button("Answer", variant="primary")
                about = [gradio.Textbox(label="what the model read"), gradio.Textbox(label="milliseconds")]
            with gradio.Column():
                results = [gradio.Textbox(label="answer", lines=3)]
                for name, heading in more.items():
                    if name == "labels":
                        results.append(gradio.Label(label=heading))
                    else:
                        results.append(gradio.Dataframe(headers=HEADERS, label=heading))
        started = [button.click, *(box.submit for box in boxes)]  # submit: Shift-Enter in a box
        gradio.on(started, answered, boxes, [*results, *about], api_name="answer")
    options = dict(share=False, show_error=True, ssr_mode=False, run_history=False, footer_links=["api"])
    page.launch(**options, quiet=True, prevent_thread_lock=True)
    print(f"the page is at {page.local_url} until Ctrl-C", flush=True)
    page.block_thread()
