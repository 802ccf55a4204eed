"""A tokenizer with more tokens, such as line breaks and braces, which T5's vocabulary lacks."""

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from corpora.tokenizers import with_exact_spaces
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
        tokenizer = with_exact_spaces(tokenizer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in new])
    return tokenizer, new
