"""What the page of --web shows of a model's answers."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from features.web_page.page import open_page
from foundry.common.reports import start_summary
from foundry.corpora.gaps import source_ids
from foundry.corpora.tokenizers import answering_tokenizer
from tasks.answering import Engine, Plan, answer_window, summary, tokenised
from tasks.examples import class_label_ids
from tasks.model_folders import Encoder


def show_page(plan: Plan, engine: Engine) -> None:
    """Opens the page of --web, and answers its inputs until Ctrl-C."""
    labels = class_label_ids(plan.entry, plan.tokenizer)
    rows = summary(plan, f"those of the page: {', '.join(plan.reader.inputs)}", engine)
    start_summary(rows, title="a page to try the model")

    def answer(row: dict[str, str]) -> dict:
        item, plan.endless, plan.no_value = plan.reader.made({}, row), 0, 0
        (record,) = answer_window([item], engine, plan, tqdm(disable=True), first=0)
        sources = tokenised(item.texts, plan)
        uncut = [len(ids) for ids in source_ids(plan.tokenizer, item.texts)]
        record["read"] = "\n".join(as_read(*one, plan.tokenizer) for one in zip(sources, uncut, strict=True))
        record["notes"] = list(plan.odd().values())
        if labels is not None and item.texts:
            (source,) = sources
            chances = engine.score(source, labels).sum(dim=1).softmax(dim=0).tolist()
            record["labels"] = dict(zip(plan.entry["labels"], chances, strict=True))
        return record

    shown = {"prediction": "answer"}
    shown |= {"n_best": f"all answers, the best first by {order_of(engine, plan)}"} if plan.count > 1 else {}
    shown |= {} if labels is None else {"labels": "probability of each class"}
    open_page(Path(plan.args.model_name_or_path).name, rows["model reads"], plan.reader.inputs, shown, answer)


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
SHOWN = {
    "embedding": {"prediction": "cosine similarity"},
    "tokens": {"tags": "tags"},
    "class": {"prediction": "answer", "labels": "probability of each class"},
    "labels": {"prediction": "answer", "labels": "probability of each class"},
    "number": {"prediction": "number"},
}


def show_encoder(args: Any, encoder: Encoder) -> None:
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
