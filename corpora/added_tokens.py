"""A tokenizer with more tokens, such as line breaks and braces, which T5's vocabulary lacks."""

import json

from tokenizers import AddedToken, Tokenizer

from corpora.word_encoder import cuts_at_spaces

_ESCAPES = {"\\n": "\n", "\\t": "\t"}  # as a command line writes them


def add_tokens(tokenizer, texts: list[str]):
    """(the tokenizer with tokens of these texts after its last one, those that it did not have yet).

    Its other tokens keep their ids, and texts without the new ones their tokens. T5's tokenizers write a space behind
    every added token, and drop those that are there: {a b}, {a and { a would all come back as "{ a". The one returned
    here gives back what it was given. ValueError for a text that cannot be a token.
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


def _with_exact_spaces(tokenizer):
    """The same unigram tokenizer, which marks the beginning of a text, not of each part between added tokens."""
    from transformers import PreTrainedTokenizerFast

    content = json.loads(tokenizer.backend_tokenizer.to_str())
    rules = content["normalizer"] or {}
    rules = [rule for rule in rules.get("normalizers", [rules]) if rule.get("type") == "Precompiled"]
    one_space = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    content["normalizer"] = {"type": "Sequence", "normalizers": [*rules, one_space]}
    for token in content["added_tokens"]:
        token["lstrip"] |= token["special"]  # sentinels: a space before one was never a token
    marks = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    content["pre_tokenizer"] = marks
    content["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, marks]}
    special = {name: getattr(tokenizer, name) for name in ("pad_token", "eos_token", "unk_token")}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)), **special)
