"""Tokenizers of single letters: each letter of a source is a token, and each symbol between spaces of a target.

    pieces = Pieces()
    pieces.add("aalst", "aː l s t")
    write_character_tokenizer(pieces, Path("out/tokenizer"), sentinels=100, most=32_100)

    source  "aalst"       a a l s t
    target  "aː l s t"    ▁aː ▁l ▁s ▁t      of " aː l s t": the folder's target_prefix is put before each target

A letter is a code point as it stands in the text, a combining mark after its letter too: nothing is normalised. With
`Pieces(decomposed=True)` the tokenizer takes letters apart (Unicode's NFD), é into e and ´, a syllable of Hangul into
its two or three sounds, but no symbol of a target. It is a
SentencePiece unigram model whose scores leave no choice, so whatever reads T5's tokenizers reads these: a piece ▁aː has
a better score than all others together, and what has no piece of its own falls to its letters.

A space within a source belongs to the letter behind it where a symbol is that letter alone: "la abba" -> l a ▁a b b a.
A tag before a word is best a token of its own: --add_tokens '<dut>', then "<dut>aalst".
"""

import unicodedata
from collections import Counter
from pathlib import Path

from tokenizers import normalizers

from foundry.common.errors import UserError
from foundry.common.reports import write_json
from foundry.corpora.tokenizers import MODELS, TARGET_PREFIX, load_tokenizer, save_tokenizer

_SPECIAL = (("<pad>", "CONTROL"), ("</s>", "CONTROL"), ("<unk>", "UNKNOWN"))
_SPACE = "▁"
_SYMBOL_SCORE, _LETTER_SCORE = -0.5, -1.0  # one symbol is better than any two pieces, and a longer one than a shorter


class Pieces:
    """What texts are made of. letters: how often each code point is there, without spaces; symbols: how often each part
    of a target between spaces is. decomposed: whether a letter is taken apart where Unicode can (NFD)."""

    def __init__(self, decomposed: bool = False) -> None:
        self.decomposed = decomposed
        self.letters: Counter[str] = Counter()
        self.symbols: Counter[str] = Counter()

    def add(self, source: str, target: str = "") -> None:
        """Counts the pieces of a pair, or of a text alone."""
        self.letters.update(unicodedata.normalize("NFD", source) if self.decomposed else source)
        self.letters.update(target)
        self.symbols.update(filter(None, target.replace(_SPACE, " ").split(" ")))

    @property
    def normalizer(self) -> normalizers.Normalizer:
        """Takes letters apart, and puts those together again that are so in a symbol."""
        steps = [normalizers.NFD()]
        for symbol in _by_frequency(self.symbols):
            apart = unicodedata.normalize("NFD", symbol)
            if apart != symbol:
                steps.append(normalizers.Replace(apart, symbol))
        return normalizers.Sequence(steps)

    @property
    def names(self) -> list[str]:
        """The pieces of the vocabulary, those of symbols first, the frequent before the rare."""
        letters = dict(self.letters)
        letters.pop(" ", None)
        letters.pop(_SPACE, None)  # a text that has this letter has a space there, to all such tokenizers
        marked = [_SPACE + symbol for symbol in _by_frequency(self.symbols)]
        return [*marked, _SPACE, *_by_frequency(letters)]


def _by_frequency(counts: dict[str, int]) -> list[str]:
    return sorted(counts, key=lambda text: (-counts[text], text))


def write_character_tokenizer(pieces: Pieces, folder: Path, sentinels: int, most: int) -> None:
    """Writes the tokenizer folder: <pad> 0, </s> 1, <unk> 2, the pieces, and the sentinels, <extra_id_0> last.

    most: tokens that it may have. UserError if the text has no letters, or needs more.
    """
    names = pieces.names
    if len(names) == 1:
        raise UserError("--pieces characters: there is no text to take letters from: all rows are empty")
    needed = len(_SPECIAL) + len(names) + sentinels
    if needed > most:
        raise UserError(
            f"--vocab_size {most}: --pieces characters needs {needed:,} tokens for this text: {len(names):,} letters "
            f"and symbols, {sentinels} sentinels and {len(_SPECIAL)} special ones"
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MODELS[0]).write_bytes(_model(names))
    config: dict = {"extra_ids": sentinels}
    if pieces.symbols:
        config |= {TARGET_PREFIX: " "}
    write_json(folder / "tokenizer_config.json", config)
    tokenizer = load_tokenizer(str(folder))
    if pieces.decomposed:
        tokenizer.backend_tokenizer.normalizer = pieces.normalizer
    save_tokenizer(tokenizer, folder)


def _model(names: list[str]) -> bytes:
    """The SentencePiece model of these pieces."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    model = ModelProto()
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type = trainer.UNIGRAM
    trainer.vocab_size = len(_SPECIAL) + len(names)
    trainer.pad_id, trainer.eos_id, trainer.unk_id, trainer.bos_id = 0, 1, 2, -1
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = normalizer.remove_extra_whitespaces = False
    for name, kind in _SPECIAL:
        model.pieces.add(piece=name, score=0.0, type=ModelProto.SentencePiece.Type.Value(kind))
    for name in names:
        is_symbol = name.startswith(_SPACE) and name != _SPACE
        model.pieces.add(piece=name, score=_SYMBOL_SCORE if is_symbol else _LETTER_SCORE)
    return model.SerializeToString()
