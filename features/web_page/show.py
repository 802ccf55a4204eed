"""What the page of --web shows of a model's answers."""

from pathlib import Path

from tqdm.auto import tqdm

from features.web_page.page import open_page
from foundry.common.reports import start_summary
from tasks.answering import Engine, Plan, answer_window, summary, tokenised
from tasks.examples import class_label_ids


def show_page(plan: Plan, engine: Engine) -> None:
    """Opens the page of --web, and answers its inputs until Ctrl-C."""
    labels = class_label_ids(plan.entry, plan.tokenizer)
    rows = summary(plan, f"those of the page: {', '.join(plan.reader.inputs)}", engine)
    start_summary(rows, title="a page to try the model")

    def answer(row: dict[str, str]) -> dict:
        item, plan.endless, plan.no_value = plan.reader.made({}, row), 0, 0
        (record,) = answer_window([item], engine, plan, tqdm(disable=True), first=0)
        sources = tokenised(item.texts, plan)
        record["read"] = "\n".join(map(as_read, item.texts, sources))
        record["notes"] = list(plan.odd().values())
        if labels is not None and item.texts:
            (source,) = sources
            chances = engine.score(source, labels).sum(dim=1).softmax(dim=0).tolist()
            record["labels"] = dict(zip(plan.entry["labels"], chances, strict=True))
        return record

    def as_read(text: str, source: list[int]) -> str:
        """What the model reads of a text, decoded from its ids, of which the last is EOS."""
        ends = source[-1:] == [plan.tokenizer.eos_token_id]
        read, whole = (
            plan.tokenizer.decode(source[:-1] if ends else source),
            len(plan.tokenizer(text, verbose=False)["input_ids"]),
        )
        return read if whole == len(source) else f"{read} ... (cut: {len(source):,} of {whole:,} tokens)"

    shown = {"n_best": f"all answers, the best first by {order_of(engine, plan)}"} if plan.count > 1 else {}
    shown |= {} if labels is None else {"labels": "probability of each class"}
    open_page(Path(plan.args.model_name_or_path).name, rows["model reads"], plan.reader.inputs, shown, answer)


def order_of(engine: Engine, plan: Plan) -> str:
    """By what the texts of an input are sorted. Beam search divides by a power of the length; tokens include EOS."""
    search = engine.settings | plan.search
    power = 0 if search.get("do_sample") else search.get("length_penalty", 1.0)
    return f"log_probability / tokens ** {power:g}" if power else "log_probability"
