"""A tokenizer with more tokens, such as line breaks and braces, which T5's vocabulary lacks."""

import json

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from corpora.tokenizers import rebuilt, space_marks
from corpora.word_encoder import cuts_at_spaces

_ESCAPES = {"\\n": "\n", "\\t": "\t"}  # as a command line writes them


def add_tokens(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> tuple[PreTrainedTokenizerBase, list[str]]:
    """(the tokenizer with these texts as tokens after its last one, those of them that are new).

    Its other tokens keep their ids, and texts without the new ones their tokens. T5's tokenizers write a space behind
    every added token, and drop those that are there: {a b}, {a and { a would all come back as "{ a". The one returned
    gives back the exact text. ValueError for a text that cannot be a token.
    """
    texts = [_ESCAPES.get(text, text) for text in texts]
    for text in texts:
        if not text.strip(" "):
            raise ValueError(f"--add_tokens {text!r}: a space alone cannot be a token: spaces are part of words")
    new = [text for text in dict.fromkeys(texts) if text not in tokenizer.get_vocab()]
    if new and cuts_at_spaces(tokenizer):
        tokenizer = _with_exact_spaces(tokenizer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in new])
    return tokenizer, new


def _with_exact_spaces(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The same unigram tokenizer, which marks the beginning of a text, not of each part between added tokens."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in content["added_tokens"]:
        token["lstrip"] |= token["special"]  # sentinels: a space before one was never a token
    marks = space_marks("first")
    return rebuilt(tokenizer, content, {" {2,}": " "}, marks, [{"type": "ByteFallback"}, marks])
