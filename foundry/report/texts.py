"""What a plan says of a text for pre-training, from its token files: plain functions over a `Text`."""

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from foundry.common.reports import human_count
from foundry.corpora.sources import described_sources
from foundry.corpora.tokenizers import described_tokenizer
from foundry.corpora.trained_text import TRAINED_TEXT
from foundry.report.files import described_files
from foundry.report.lengths import described_lengths, evenly
from foundry.report.losses import Losses
from foundry.report.preview import Sample
from foundry.report.repeats import described_repeats
from foundry.report.report import Report

if TYPE_CHECKING:
    from foundry.corpora.token_files import TokenFile

SHORT_NAME = 12  # letters of a corpus in the names of a preview


def report_of_text(text: Any, steps: float, further: dict[str, str | None] | None = None) -> Report:
    """What the plan of a run of so many optimizer steps says of its text. further: rows about a stream."""
    return Report(_rows(text, steps, further or {}), partial(shown_of_text, text), losses_of_text(text), _unknown(text))


def losses_of_text(text: Any) -> dict[str, dict[str, Losses]]:
    """What the tokenizer loses of each split."""
    losses = {}
    for split, files in text.counted.items():
        losses[split] = {"documents": sum((file.losses for file in files), Losses())}
    return losses


def _unknown(text: Any) -> dict[str, float] | None:
    if text.found.ids:
        return None
    shares = {}
    for split, files in text.files.items():
        shares[split] = sum(file.unknown for file in files) / max(1, sum(len(file.tokens) for file in files))
    return shares


def _rows(text: Any, steps: float, further: dict[str, str | None]) -> dict[str, str | None]:
    found, objective, length = text.found, text.objective, text.tokens_per_example
    first = next(iter(text.files))  # "train", or the validation text of a stream
    read_for = "" if first == "train" else f"read for {first} "
    per_step = round(text.batch * length)
    in_all = f"{human_count(per_step)} per step, {human_count(per_step * steps)} in total"
    epochs = steps / text.steps_per_epoch if text.steps_per_epoch else None
    if epochs:
        in_all += f" ({epochs:.1f} epochs)"
    rows = {
        "text": described_sources(found.of_split("train")),
        "files": _described_files(text),
        "documents": described_documents(text.of_split(first), read_for),
        "tokenizer": _described_tokenizer(text, text.files[first]),
        "repeats": _repeats(text),
        "known": described_known(text),
        "trained before": described_trained_before(text),
    } | further
    if found.is_mixed:
        corpora = [f"{name} {weight:.1%}" for name, weight in zip(found.names, found.weights, strict=True)]
        if epochs:
            seen = zip(corpora, text.train.times_seen(epochs), strict=True)
            corpora = [f"{corpus} (seen {times:.3g} times)" for corpus, times in seen]
        rows["corpora"] = ", ".join(corpora)
    rows |= objective.plan(text.rows)
    lengths = f"{objective.inputs_length} input, {objective.targets_length} target tokens"
    rows["chunks"] = f"{_chunks(text)} validation, of {length:.0f} raw tokens -> {lengths}"
    rows["tokens"] = in_all
    return rows


def described_documents(files: "list[TokenFile]", what: str = "") -> str:
    """ "1,204 (3 empty ones left out) of 3 to 9,031 tokens, median 140". what: follows the number."""
    documents, empty = sum(file.documents for file in files), sum(file.empty_documents for file in files)
    lengths = described_lengths(sum((file.lengths for file in files), Counter()))
    return f"{documents:,} {what}({empty:,} empty ones left out) of {lengths}"


def _described_files(text: Any) -> str | None:
    names, counts = {}, {}
    for split in ("train", "validation"):
        sources = text.found.of_split(split)
        if split == "validation" and text.args.validation_file:  # that of every corpus
            sources = sources[:1]
        names[split], counts[split] = [getattr(source, "files", None) for source in sources], []
        for files, file in zip(names[split], text.of_split(split), strict=False):
            uncounted = len(files or ()) - len(file.files)
            counts[split] += file.files + [[0, 0, 0, {}]] * uncounted
    return described_files(names, "train", counts, text.found.is_mixed)


def _described_tokenizer(text: Any, files: "list[TokenFile]") -> str:
    """Where the tokenizer comes from and what it does; its size alone for ready-made ids."""
    found, joins = text.found, not text.args.eos_between_documents
    if found.ids:
        described = f"{len(found.tokenizer):,} tokens"
    else:
        described = described_tokenizer(found.tokenizer, found.origin, joins_documents=joins)
    if text_bytes := sum(file.text_bytes for file in files):
        described += f", {text_bytes / sum(len(file.tokens) for file in files):.2f} bytes per token"
    return described


def _repeats(text: Any) -> str | None:
    """What repeats more than in ordinary text, of each corpus and split."""
    parts = []
    for split, files in text.counted.items():
        of_split = text.of_split(split) if split in text.files else files
        shown = split if split in text.files or len(files) == 1 else "a sample"
        for corpus, file in zip(text.found.names, of_split, strict=False):
            copied = file.document(file.found.copies[1]) if file.found.copies else None
            told = described_repeats(file.found, text.found.tokenizer, copied=copied, documents=file.documents)
            if not told:
                continue
            where = [shown] if split != "train" else []
            if len(of_split) > 1:
                where.append(corpus)
            parts.append(f"{told} ({' of '.join(where)})" if where else told)
    return "; ".join(parts) or None


def described_known(text: Any) -> str | None:
    """How many validation documents are trained on too."""
    found, known = text.found, []
    for file, name in zip(text.files["validation"], found.names, strict=True):
        if not file.known:
            continue
        where = f"{text.known_in} the training text"
        if found.is_mixed:
            where += f" of {name}"
        known.append(f"{file.known:,} of {file.documents:,} validation documents are {where}")
    return "; ".join(known) or None


def described_trained_before(text: Any) -> str | None:
    """What earlier runs of the model were trained on of the text that is to be held out."""
    earlier, files = text.found.earlier, text.of_split("validation")
    if earlier is None or text.found.splits_off and text.found.held_out_before():
        return None
    if earlier.text is None:
        return f"not known: {earlier.model} has no {TRAINED_TEXT} beside its run.json"
    if text.found.splits_off:
        count = sum(file.before for file in files)
        what = f"{count:,} documents were trained on by {earlier.model}, and are not held out"
        return what if count else None
    count = sum(earlier.text.count(file.hashes) for file in files)
    documents = sum(file.documents for file in files)
    what = f"{count:,} of {documents:,} validation documents were trained on by {earlier.model}"
    if earlier.text.streamed:
        return what + ", besides those that it read as a stream, which nobody has listed"
    return what if count else None


def _chunks(text: Any) -> str:
    """ "9,600 training, 512 of 1,000"."""
    scored = len(text.validation or ())
    if text.steps_per_epoch is None:
        return f"a stream for training, {scored:,}"
    told = f"{len(text.train):,} training, {scored:,}"
    return f"{told} of {text.held_out:,}" if text.held_out > scored else told


# ---------------------------------------------------------------- the preview
def shown_of_text(text: Any, detailed: bool) -> list[list[Sample]]:
    """The first, a middle and the oddest document, the first one of validation, and an example as the objective makes
    it. detailed: twice as many documents. Of several corpora the first document of each."""
    documents, name, examples = text.firsts, "validation", text.validation
    if text.steps_per_epoch is not None:
        count = 4 if detailed else 2
        documents = _documents(text, "train", 1 if text.found.is_mixed else count)
        name, examples = "example", text.train
    rows = [[document] for document in documents + _oddest(text, documents) + _documents(text, "validation", 1)[:1]]
    return rows if examples is None else [*rows[:5], _example(text, name, examples), *rows[5:]]


def _example(text: Any, name: str, examples: Any) -> list[Sample]:
    batch, parts = text.objective([examples[0]]), []
    for side, column in (("source", "input_ids"), ("target", "labels")):
        ids = [number for number in batch[column][0].tolist() if number >= 0]
        parts.append(Sample(f"{name} {side}", ids, None, text.objective.sentinel_ids))
    return parts


def _documents(text: Any, split: str, count: int) -> list[Sample]:
    """`count` documents of each corpus of a split, with the corpus's name and weight if there are several."""
    documents, files = [], text.of_split(split)
    for corpus, file in zip(text.found.names, files, strict=False):
        before = named(text.found, corpus) if len(files) > 1 else ""
        if split == "validation":
            before += "validation "
        for place in evenly(range(len(file.places)), count):
            documents.append(Sample(f"{before}document {file.places[place, 0] + 1:,}", file.document(place)))
    return documents


def _oddest(text: Any, others: list[Sample]) -> list[Sample]:
    """The document whose tokens are farthest from those of its corpus, unless it is among the others."""
    files = next(iter(text.counted.values()))
    known = [pair for pair in zip(text.found.names, files, strict=True) if pair[1].found.oddest]
    if not known:
        return []
    corpus, odd = max(known, key=lambda pair: pair[1].found.oddest[1])
    place = odd.found.oddest[0]
    ids = odd.document(place)
    if any(np.array_equal(ids, other.ids) for other in others):
        return []
    return [Sample(f"{named(text.found, corpus)}oddest, {odd.places[place, 0] + 1:,}", ids)]


def named(found: Any, corpus: str) -> str:
    """What the names in a preview begin with: "novels 70%, " of one of several corpora of a `FoundText`, else ""."""
    weight = found.weights[found.names.index(corpus)]
    return f"{corpus[:SHORT_NAME]} {weight:.0%}, " if found.is_mixed else ""
