"""The kind of features that read text otherwise."""

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

from foundry.features import Feature, Features

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from foundry.arguments.model import ModelArguments
    from foundry.arguments.text import PreTrainingDataArguments
    from foundry.data_t5 import FoundText

    Documents = tuple[dict[str, str | None], Iterator[str], Iterator[str]]


class TextSource(Feature):
    """Reads a text otherwise than whole, into a cache, before the training."""

    recorded: ClassVar[Sequence[str]] = ()  # flags that an evaluation takes over from the training

    def found_text(
        self, args: "PreTrainingDataArguments", model: "ModelArguments", tokenizer: "PreTrainedTokenizerBase | None"
    ) -> "FoundText":
        """As the function `found_text`."""
        raise NotImplementedError

    def documents(self, args: "PreTrainingDataArguments", most: int | None) -> "Documents":
        """As the function `documents_of`."""
        raise NotImplementedError


def found_text(
    features: Features,
    args: "PreTrainingDataArguments",
    model: "ModelArguments",
    tokenizer: "PreTrainedTokenizerBase | None",
) -> "FoundText":
    """The text that the flags name. tokenizer: the one that they name, or None."""
    from foundry.data_t5 import FoundText

    source = features.first(TextSource)
    if source:
        return source.found_text(args, model, tokenizer)
    return FoundText(args, model, tokenizer)


def documents_of(features: Features, args: "PreTrainingDataArguments", most: int | None) -> "Documents":
    """(rows of a summary about the text, its first documents, at most `most` of them, the first ones of its validation
    text), for a tokenizer."""
    from foundry.common.reports import human_bytes
    from foundry.corpora.sources import described_sources, find_corpora, find_sources, mixed_documents
    from foundry.report.files import described_files
    from foundry.report.losses import MOST_TEXTS

    source = features.first(TextSource)
    if source:
        return source.documents(args, most)
    corpora = find_corpora(args)
    splits = [find_sources(alone) for _, alone in corpora.values()]
    sources = [of_corpus["train"] for of_corpus in splits]
    held_out = [of_corpus["validation"] for of_corpus in splits if "validation" in of_corpus]
    files = described_files({"train": [source.files for source in sources]}, "train")
    weights = [weight for weight, _ in corpora.values()]
    documents = mixed_documents([source.documents for source in sources], weights)
    limit = f", its first {most:,} documents" if most else ""
    validation = itertools.chain.from_iterable(source.documents() for source in held_out)
    text = {"text": described_sources(sources) + limit, "files": files}
    if len(corpora) > 1:
        shares = ", ".join(f"{name} {weight:.1%}" for name, (weight, _) in corpora.items())
        text["corpora"] = f"{shares} of the characters; a smaller one begins again until all are read"
        if not most and all(source.size for source in sources):
            whole = max(source.size / weight for source, weight in zip(sources, weights, strict=True))
            text["corpora"] += f", about {human_bytes(whole)} in all"
    return text, itertools.islice(documents, most), itertools.islice(validation, MOST_TEXTS)


def recorded_types(features: Sequence[type[Feature]]) -> dict[str, Any]:
    """{flag: its type} of what evaluations take over from a training that knows these features."""
    types = {}
    for kind in features:
        if issubclass(kind, TextSource):
            hints = get_type_hints(kind)
            types |= {name: hints[name] for name in kind.recorded}
    return types
