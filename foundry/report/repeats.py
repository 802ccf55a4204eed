"""What repeats and what is odd among the documents of a text, or among the sources or targets of a task.

    counted(ids, ends)   # [T] tokens of all documents, [D] where each of them ends -> a TokenCounts

A document is compared with the text as a whole: its tokens have so many bits each, -log2 of their share of all tokens.
Rare tokens (another language, markup, codes) raise their mean, and repeated ones lower it.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedTokenizerBase

from foundry.common.terminal import visible
from foundry.corpora.own_ids import ids_offset
from foundry.report.lengths import percent

LONG_RUN = 16  # equal tokens in a row from which on they count as one run; dashes of a table are fewer tokens
AVERAGE_TOKENS = 16  # added to each document where it is compared: a heading of rare words is not odd
MOST_TOKENS = 2**23  # of a text that are counted, in whole documents; the longest one alone is counted as far as that
# What is more than ordinary text has. Of English novels, Wikipedia, Romanian novels and translated sentences at most
# 8 % are the most frequent token (19 % of bytes), 0.01 % stand in runs, and 0.5 % are copies of one document.
COMMON_TOKEN = 1 / 3  # of DNA, a third
COMMON_RUNS = 0.005
COMMON_COPIES, FEW_COPIES = 0.005, 5  # share of the documents or of the tokens; and their number
QUOTED_TOKENS = 24  # of a document that a plan names


@dataclass
class TokenCounts:
    """What was counted of `tokens` tokens in `documents` documents. [] where there is none.

    token: [the most frequent one, how often it stands]. run: [the token of the longest run, its length]. in_runs:
    tokens that stand in runs of LONG_RUN or more. copies: [how often the most frequent document stands, number of one
    of them]. oddest: [number of the document whose tokens are farthest from the mean, how far, in bits].
    """

    tokens: int = 0
    documents: int = 0
    token: list[int] = field(default_factory=list)
    run: list[int] = field(default_factory=list)
    in_runs: int = 0
    copies: list[int] = field(default_factory=list)
    oddest: list = field(default_factory=list)


def counted(ids: np.ndarray, ends: np.ndarray) -> TokenCounts:
    """The counts of tokens [T] in documents that end at `ends` [D]; copies are not looked for."""
    found = TokenCounts(len(ids), len(ends))
    if not len(ids):
        return found
    of_token = np.bincount(ids)
    found.token = [int(of_token.argmax()), int(of_token.max())]
    changes = np.flatnonzero(np.diff(ids)) + 1
    begins = np.concatenate([[0], changes])
    runs = np.diff(begins, append=len(ids))
    longest = int(runs.argmax())
    found.run = [int(ids[begins[longest]]), int(runs[longest])]
    found.in_runs = int(runs[runs >= LONG_RUN].sum())
    bits = -np.log2(np.maximum(of_token, 1) / len(ids), dtype=np.float32)
    mean = float(of_token @ bits / len(ids))
    lengths = np.diff(ends, prepend=0)
    filled = np.flatnonzero(lengths)  # reduceat wants no empty ones
    lengths = lengths[filled]
    sums = np.add.reduceat(bits.take(ids), ends[filled] - lengths)
    far = np.abs(sums / lengths - mean) * lengths / (lengths + AVERAGE_TOKENS)
    oddest = int(far.argmax())
    found.oddest = [int(filled[oddest]), float(far[oddest])]
    return found


def counted_documents(tokens: np.ndarray, places: np.ndarray) -> TokenCounts:
    """The counts of documents, copies too, of which `places` [D, 3] has number, beginning and length: of all, or of so
    many of them, spread evenly, as have MOST_TOKENS together."""
    stride = max(1, -(-int(places[:, 2].sum()) // MOST_TOKENS))
    documents = []
    for _, begin, size in places[::stride].tolist():
        documents.append(tokens[begin : begin + min(size, MOST_TOKENS)])
    if not documents:
        return TokenCounts()
    found = counted(np.concatenate(documents), np.cumsum(list(map(len, documents))))
    names = [hash(document.tobytes()) for document in documents]
    ((name, times),) = Counter(names).most_common(1)
    if times > 1:
        found.copies = [times, stride * names.index(name)]
    if found.oddest:
        found.oddest[0] *= stride
    return found


def described_repeats(
    found: TokenCounts,
    tokenizer: PreTrainedTokenizerBase,
    common: float = COMMON_TOKEN,
    copied: np.ndarray | None = None,
    documents: int | None = None,
) -> str | None:
    """What repeats more than in ordinary text: "id 0: 63 % of the tokens, up to 390 in a row: padding?"; None if
    nothing does. common: share that a token may have. copied: tokens of the most frequent document. documents: how many
    there are, if not all were counted."""
    parts, total = [], max(found.tokens, 1)
    if found.tokens and (found.token[1] > common * total or found.in_runs > COMMON_RUNS * total):
        token, times = found.token
        parts.append(f"{_named(tokenizer, token)}: {percent(times / total)} of the tokens")
        run, longest = found.run
        if longest >= LONG_RUN:
            other = "" if run == token else f" {_named(tokenizer, run)}"
            parts[-1] += f", up to {longest:,}{other} in a row"
            if found.in_runs > total / 10:
                parts[-1] += ": padding?"
    if found.copies and copied is not None:
        times, size = found.copies[0], len(copied)
        share = times / found.documents
        if times >= FEW_COPIES and max(share, times * size / total) > COMMON_COPIES:
            text = visible(tokenizer.decode(copied[:QUOTED_TOKENS], skip_special_tokens=True).strip())
            quoted = text + (" ..." if size > QUOTED_TOKENS else "")
            count = f"{times:,}"
            if documents and documents > found.documents:
                count = f"about {round(share * documents):,}"
            parts.append(f'"{quoted}" stands {count} times, in {percent(share)} of the documents')
    return "; ".join(parts) or None


def _named(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """A token in a plan: 'id 0' of ready-made ids, '"▁the"' of a text."""
    name = visible(str(tokenizer.convert_ids_to_tokens(token)))
    return f"id {name}" if ids_offset(tokenizer) else f'"{name}"'
