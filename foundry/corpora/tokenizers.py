"""Tokenizers: trained with SentencePiece, loaded, fingerprinted, and the plain encoding of a corpus."""

import base64
import contextlib
import hashlib
import io
import itertools
import json
import math
import random
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, processors
from tqdm.auto import tqdm
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import cached_file

from constants import CODE_ENTRIES, NUM_SENTINELS
from data_collator_t5 import SENTINEL_NAME, UNUSED_NAME, find_eos_id, is_byte_level
from foundry.common.errors import UserError
from foundry.common.machine import in_background
from foundry.common.reports import (
    check_records,
    first_line,
    human_time,
    read_json,
    record_bytes,
    record_json,
    write_json,
)
from foundry.common.terminal import print_once
from foundry.common.whole_folders import temporary_folder
from foundry.corpora.files import refuse_pointers
from foundry.corpora.hub import do_not_wait_for_the_hub
from foundry.corpora.sentencepiece_models import (
    SentencePieceModel,
    check_same_ids,
    probe_texts,
    space_marks,
    special_token,
    with_bytes,
)

TOKENIZER_SENTENCE = 16_384  # longest line in bytes that SentencePiece takes; longer ones are cut
LINE_PART = 1_024  # characters of each part of a line that is cut
MOST_CHARACTERS = 2**28  # SentencePiece learns from at most this many; each takes 13 bytes of memory
TOLD_CHARACTERS = 2**24  # learning from more takes a while, which a line says
LONGEST_WORD = 100  # characters; longer words count as text without spaces, such as DNA
TOLD_WITHOUT_SPACES = 2**17  # like TOLD_CHARACTERS, for characters of such words
SECONDS_A_CHARACTER, SECONDS_WITHOUT_SPACES = 1e-6, 1e-4  # time to learn from a character, on two cores
MOST_SENTINELS = 10_000  # a tokenizer_config.json may name; T5 has 100
MOST_ADDED = 50_000  # tokens beside the vocabulary; Gemma 3 has 6,415
MOST_GROWTH = 1_000  # letters that a tokenizer's rules may make of one
MOST_FRAME = 2**16  # characters of the rule that puts tokens around a text, as JSON
SECONDS = 60  # to load a tokenizer; those of 256,000 tokens take three
# {rule: letters that it may make of one}, after https://www.unicode.org/faq/normalization#12
_GROWTH = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "ByteLevel": 4, "BertNormalizer": 12}
_REPETITIVE = ["a" * 100 + "!", " " * 100 + "!", "1" * 100 + "!"]  # on which a pattern may take forever
BYTES = 256  # tokens of a tokenizer that writes unknown letters as bytes
COVERAGE = 0.9995  # the character coverage that SentencePiece advises for scripts of thousands of letters
LEAST_COVERAGE = 0.98  # the lowest that SentencePiece accepts
RULES = "tokenizer.json"  # the file of the `tokenizers` library
MODELS = ("spiece.model", "tokenizer.model")  # SentencePiece's
OTHER_VOCABULARIES = ("vocab.json", "vocab.txt")
CONFIGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
CONFIGS += ("adapter_config.json",)
BYTES_NAME = "bytes"  # in place of a folder or Hub name: ByT5's tokenizer, which has no files
T5_NAMES = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
ROLES = tuple(T5_NAMES)
TURNS = ("<start_of_turn>", "<end_of_turn>")  # Gemma's begin and end of what one side of a dialogue says
TARGET_PREFIX = "target_prefix"  # entry of tokenizer_config.json: text before each target, which decoding leaves out


def train_tokenizer(
    documents: Iterable[str],
    output_dir: Path,
    vocab_size: int,
    byte_fallback: bool | None = None,
    normalization: str = "nmt_nfkc",
    character_coverage: float | None = None,
    max_sentences: int = 1_000_000,
    max_characters: int = MOST_CHARACTERS,
    is_exact: bool = True,
) -> None:
    """Trains a SentencePiece unigram model on `documents` and writes it as a T5 tokenizer folder.

    vocab_size counts all tokens: <pad> 0, </s> 1, <unk> 2, the pieces, and 100 sentinels at the end (<extra_id_0> last,
    as in T5's own vocabulary). The pieces are learnt from a sample: at most `max_sentences` lines of `max_characters`
    together, drawn evenly, the same each time. `letters_and_bytes` chooses byte_fallback and character_coverage by
    its letters if they are None. Where normalization leaves line breaks as they are, those within a document are a
    letter too. is_exact: False takes fewer tokens where the text has not enough. UserError if the text is too small.
    """
    import sentencepiece

    output_dir.mkdir(parents=True, exist_ok=True)
    shown = tqdm(documents, "reading the text", unit=" documents", disable=not sys.stderr.isatty())
    breaks: Counter = Counter()

    def parts() -> Iterator[str]:
        for document in shown:
            breaks["\n"] += document.strip("\n").count("\n")
            for line in filter(str.strip, document.split("\n")):
                yield from _parts_of(line)

    sample = _sampled(parts(), max_sentences, max_characters)
    _announce_learning(sample, vocab_size)
    letters = Counter(itertools.chain.from_iterable(sample)) + breaks
    for letter in set(letters):  # these become the mark of a word's beginning
        if letter == " " or letter.isspace() and normalization.startswith("nmt_"):
            del letters[letter]
    byte_fallback, character_coverage = letters_and_bytes(letters, vocab_size, byte_fallback, character_coverage)
    model = io.BytesIO()
    options = dict(model_type="unigram", vocab_size=vocab_size - NUM_SENTINELS, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    options |= dict(byte_fallback=byte_fallback, character_coverage=character_coverage)
    options |= dict(normalization_rule_name=normalization, max_sentence_length=TOKENIZER_SENTENCE, minloglevel=2)
    # SentencePiece removes its own special tokens from a text, such as <unk> in WikiText, before it counts letters.
    inside = [token for token in ("<pad>", "</s>", "<unk>") if any(token in part for part in sample)]
    needed = set("".join(inside)) | (letters.keys() & set("\n"))
    options |= dict(required_chars="".join(sorted(needed)), hard_vocab_limit=is_exact)
    options |= dict(num_threads=16)  # not the machine's number of cores: the sums, and so the pieces, depend on it
    train = partial(sentencepiece.SentencePieceTrainer.train, sentence_iterator=iter(sample), model_writer=model)
    try:
        in_background(partial(train, **options)).result()  # C++ sees Ctrl-C when it is done, which may take an hour
    except RuntimeError as error:
        if "sentences_.empty()" in str(error):
            raise UserError(
                "there is no text to train a tokenizer on: all documents are empty. Give --tokenizer_name"
            ) from None
        reason = str(error).split("] ")[-1]
        if most := re.search(r"set it to a value <= (\d+)", str(error)):
            tokens = int(most[1]) + NUM_SENTINELS
            reason = f"it is enough for {tokens} tokens; give --vocab_size {tokens} or less, or more text"
        if least := re.search(r"required_chars. \d+ vs (\d+)", str(error)):
            what = "letters and the bytes" if byte_fallback else "letters"
            reason = f"its {what} alone take {int(least[1]) + NUM_SENTINELS}: give as many, or more"
        raise UserError(f"--vocab_size {vocab_size}: SentencePiece could not train on this text: {reason}") from None
    (output_dir / "spiece.model").write_bytes(model.getvalue())
    save_tokenizer(load_tokenizer(str(output_dir / MODELS[0])), output_dir)


def _announce_learning(sample: list[str], vocab_size: int) -> None:
    """Prints what is learnt from and how long it may take, if that is more than some seconds.

    SentencePiece takes a hundred times as long for text without spaces, each of whose words is a new one.
    """
    characters = sum(map(len, sample))
    sizes = itertools.chain.from_iterable(map(len, line.split()) for line in sample)
    without_spaces = sum(size for size in sizes if size > LONGEST_WORD)
    if characters <= TOLD_CHARACTERS and without_spaces <= TOLD_WITHOUT_SPACES:
        return
    seconds = characters * SECONDS_A_CHARACTER + without_spaces * SECONDS_WITHOUT_SPACES
    learnt = f"{characters:,} characters in {len(sample):,} lines"
    print_once(f"SentencePiece learns {vocab_size:,} tokens from {learnt}: about {human_time(seconds)}")
    if without_spaces > TOLD_WITHOUT_SPACES:
        print_once(
            f"{without_spaces:,} of them are in words of more than {LONGEST_WORD}, for which SentencePiece is slow: "
            "create_tokenizer.py --max_sentences takes less text, and ready-made ids (--input_ids_column) need none"
        )


def letters_and_bytes(
    letters: Counter, vocab_size: int, byte_fallback: bool | None, coverage: float | None
) -> tuple[bool, float]:
    """(byte_fallback, character_coverage), chosen if not given such that no letter of a text is lost.

    If its letters are no more than a tenth of the tokens, or than the 256 that bytes would take, each gets a token
    (coverage 1). If they are more, the most frequent ones get that many tokens, or as many as LEAST_COVERAGE takes, and
    the others are written as bytes; with `byte_fallback` False SentencePiece's 0.9995 decides which are lost.
    """
    tokens = vocab_size - NUM_SENTINELS
    room = max(BYTES, tokens // 10)
    if coverage is not None:
        return bool(byte_fallback), coverage
    few = len(letters) <= room or tokens < 2 * room  # the error for too small a size names the letters' need
    if byte_fallback is None:
        byte_fallback = not few
    if few:
        return byte_fallback, 1.0
    if not byte_fallback:
        return byte_fallback, COVERAGE
    frequent = sum(count for _, count in letters.most_common(room))
    return byte_fallback, max(LEAST_COVERAGE, frequent / letters.total())


def _sampled(lines: Iterable[str], most: int, most_characters: int) -> list[str]:
    """At most this many lines, each with the same chance; the same ones each time."""
    chooser, sample = random.Random(0), []
    for number, line in enumerate(lines):
        if number < most:
            sample.append(line)
        elif (place := int(chooser.random() * (number + 1))) < most:
            sample[place] = line
    return sample[:: max(1, -(-sum(map(len, sample)) // most_characters))]


def _parts_of(line: str) -> Iterator[str]:
    if len(line) * 4 <= TOKENIZER_SENTENCE or len(line.encode()) <= TOKENIZER_SENTENCE:
        return iter([line])
    return cut_at_spaces(line, LINE_PART)


def with_exact_spaces(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerFast:
    """The same unigram tokenizer, which marks the beginning of a text, not of each part between added tokens."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in content["added_tokens"]:
        token["lstrip"] |= token["special"]  # the space before a sentinel has never been a token
    before = content["normalizer"] or {}
    rules = [rule for rule in before.get("normalizers", [before]) if rule.get("type") in ("NFC", "Precompiled")]
    rules.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    content["normalizer"] = {"type": "Sequence", "normalizers": rules}
    marks = content["pre_tokenizer"] = space_marks("first")
    content["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, marks]}
    special = {token["content"] for token in content["added_tokens"] if token["special"]}
    kept = dict(extra_special_tokens=[token for token in tokenizer.extra_special_tokens if token in special])
    kept |= dict(model_max_length=tokenizer.model_max_length) | tokenizer.special_tokens_map
    content = with_bytes(content) if content["model"].get("byte_fallback") else content
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)), **kept)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes a tokenizer's files, which transformers 4 reads too. They do not keep the length at which the last texts
    were cut: `tokenizers`, which reads tokenizer.json by itself, would cut all texts there."""
    if backend := getattr(tokenizer, "backend_tokenizer", None):
        backend.no_truncation()
        backend.no_padding()
    tokenizer.save_pretrained(str(folder))
    use_older_names(folder)


def use_older_names(folder: Path) -> None:
    """Gives special tokens and class in a tokenizer_config.json the names that transformers 4 knows: it fails at
    those of transformers 5, which reads both."""
    path = folder / "tokenizer_config.json"
    if not (content := read_json(path)):
        return
    if isinstance(content.get("extra_special_tokens"), list):
        content["additional_special_tokens"] = content.pop("extra_special_tokens")
    if content["tokenizer_class"] == "TokenizersBackend":
        content["tokenizer_class"] = "PreTrainedTokenizerFast"  # there it gives token_type_ids too, which T5 refuses
        content["model_input_names"] = ["input_ids", "attention_mask"]
    write_json(path, dict(sorted(content.items())))


# ---------------------------------------------------------------- loading
def load_tokenizer(
    name_or_path: str, flag: str = "--tokenizer_name", special: dict[str, str] | None = None, asked: tuple = ()
) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, Hub name, SentencePiece .model or tokenizer.json, or BYTES_NAME, with the ids of the
    tool that made it: a tokenizer.json counts as it is, a .model is compared with sentencepiece. UserError naming the
    flag for any other, or one without EOS or padding. special: {"eos_token": "</s>", ...} where its files name none.
    asked: folders of adapters of which it is the base."""
    shown = f"{flag} {name_or_path}"
    try:
        files = _tokenizer_files(name_or_path)
        refuse_pointers(shown, files.values())
        check_records(shown, name_or_path)
        load = partial(_load, files, name_or_path, shown, (*asked, Path(name_or_path).resolve()))
        tokenizer = in_background(load).result(SECONDS)
    except UserError:
        raise
    except TimeoutError:
        raise UserError(f"{shown}: to load and try the tokenizer takes more than {SECONDS} s: it is not used") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{shown}: no tokenizer there ({first_line(error, 2)})") from None
    except BaseException as error:
        # The tokenizers library raises a bare Exception for a damaged file, and panics at a damaged map of letters.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{shown}: the tokenizer cannot be read ({first_line(error)})") from None
    for role, token in (special or {}).items():
        if token not in tokenizer.get_vocab():
            raise UserError(f"--{role} {token}: {name_or_path} has no such token. Give one of its tokens")
        tokenizer.add_special_tokens({role: token})
    for role in ("eos_token", "pad_token"):
        if getattr(tokenizer, role) is None:
            raise UserError(
                f"{shown}: its files name no {role}, which T5 needs: give it with create_tokenizer.py --from_tokenizer "
                f"{name_or_path} --{role} TOKEN"
            )
    if tokenizer.padding_side != "right":  # Gemma's pads on the left, between the start token and a target
        tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "right"
    if tokenizer.clean_up_tokenization_spaces:  # saved by transformers 4: answers would lose the space of " ." and " ?"
        tokenizer.clean_up_tokenization_spaces = tokenizer.init_kwargs["clean_up_tokenization_spaces"] = False
    for name in CODE_ENTRIES:
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.name_or_path = name_or_path
    return tokenizer


def named_tokenizer(args: Any) -> PreTrainedTokenizerBase | None:
    """The tokenizer that the flags of the model name, or the checkpoint's; None where both are from scratch."""
    name, flag = args.tokenizer_name, "--tokenizer_name"
    if not name:
        name, flag = args.model_name_or_path, "--model_name_or_path"
    return load_tokenizer(name, flag) if name else None


def answering_tokenizer(model: str, named: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer with which the model of a folder or Hub name answers: its own, or the one `named` by
    --tokenizer_name. UserError if the model has its own and that one has other pieces: only training gives a model the
    embeddings of others."""
    if not named:
        return load_tokenizer(model, "--model_name_or_path")
    given = load_tokenizer(named)
    try:
        own = load_tokenizer(model, "--model_name_or_path")
    except UserError:  # it has none
        return given
    pieces = given.get_vocab()
    others = sorted(pieces.items() ^ own.get_vocab().items(), key=lambda pair: pair[::-1])
    if others:
        piece, number = others[0]
        there = "is" if pieces.get(piece) == number else "is not"
        raise UserError(
            f"--tokenizer_name {named}: is not the tokenizer of {model}: {len(others):,} pieces differ, such as "
            f"{piece!r}, which {there} its {number:,}. Leave the flag out; fine_tune_t5.py moves a model to another"
        )
    return given


def decoded(tokenizer: PreTrainedTokenizerBase, rows: Iterable[Sequence[int] | np.ndarray]) -> list[str]:
    """The texts [N] of N rows of token ids, as answers show them: without padding (negative ids too), begin, end, <unk>
    and sentinels. Special tokens that were added for targets stay: [5, 300, 6, 1, 0] -> "a <sep> b". Unigram tokenizers
    drop the space before such a token; it is written again."""
    gone = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id}
    special = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    gone |= {number for number, name in special.items() if SENTINEL_NAME.fullmatch(name) or name in TURNS}
    texts, there = [], set()
    for row in rows:
        kept = [number for number in map(int, row) if number >= 0 and number not in gone]
        there.update(special.keys() & kept)
        texts.append(tokenizer.decode(kept, skip_special_tokens=False))
    for name in map(special.get, there):
        if tokenizer(f"a {name}")["input_ids"] == tokenizer(f"a{name}")["input_ids"]:
            texts = [re.sub(rf"(?<=\S){re.escape(name)}", f" {name}", text) for text in texts]
    return texts


def described_tokenizer(tokenizer: PreTrainedTokenizerBase, origin: str, joins_documents: bool = False) -> str:
    """For a plan: where the tokenizer comes from, its size, and what it does to a text that not everybody expects.

    joins_documents: whether documents follow each other without EOS, as in T5's pre-training.
    """
    parts = [f"{origin}, {len(tokenizer):,} tokens"]
    (letter,) = plain_encoder(tokenizer)(["a"])
    if joins_documents and tokenizer.decode([*letter, *letter]).strip() == "aa":
        parts.append("nothing parts the end of a document and the next one's first word: --eos_between_documents does")
    added = set(tokenizer.all_special_tokens) - set(tokenizer.special_tokens_map.values())
    own = sorted(token for token in map(str, added) if not SENTINEL_NAME.fullmatch(token))
    if own:
        parts.append(f"{' '.join(own[:5])} in a text of pre-training are read as plain letters")
    return "; ".join(parts)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds the files of a tokenizer, or names ByT5's, which needs none."""
    return folder.is_dir() and _is_complete(_tokenizer_files(str(folder)))


def _tokenizer_files(name_or_path: str) -> dict[str, Path]:
    """{name: place} of the files that make the tokenizer: a .model alone, or a .json and what lies beside it; {} of
    BYTES_NAME."""
    path = Path(name_or_path)
    if name_or_path == BYTES_NAME and not path.exists():
        return {}
    if path.is_file() and path.suffix == ".model":
        return {MODELS[0]: path}
    if path.is_file() and path.name in OTHER_VOCABULARIES:
        return {path.name: path}
    if path.is_file():
        return {name: path.parent / name for name in CONFIGS if (path.parent / name).is_file()} | {RULES: path}
    names = (RULES, *MODELS, *OTHER_VOCABULARIES, *CONFIGS)
    if path.is_dir():
        return {name: path / name for name in names if (path / name).is_file()}
    do_not_wait_for_the_hub(name_or_path)
    files = {}
    for name in names:
        if place := cached_file(name_or_path, name, _raise_exceptions_for_missing_entries=False):
            files[name] = Path(place)
    if not files:
        cached_file(name_or_path, "config.json")  # raises the error that says why there are none
    return files


def _is_complete(files: dict[str, Path]) -> bool:
    return not files.keys().isdisjoint((RULES, *MODELS, *OTHER_VOCABULARIES)) or _class_name(files) == "ByT5Tokenizer"


def _class_name(files: dict[str, Path]) -> str:
    """The class of tokenizers that the files name, without "Fast"; "" if they name none."""
    name = _read(files, "tokenizer_config.json").get("tokenizer_class")
    return (name or _read(files, "config.json").get("tokenizer_class") or "").removesuffix("Fast")


def _check_rules(content: dict, shown: str) -> None:
    """UserError for a tokenizer.json whose rules would make far more of a text than it is."""
    for name in ("normalizer", "decoder"):
        if (growth := _growth(content.get(name) or {})) > MOST_GROWTH:
            raise UserError(f"{shown}: its {name} may write {growth:.3g} letters for one: at most {MOST_GROWTH:,}")
    if (size := len(json.dumps(content.get("post_processor")))) > MOST_FRAME:
        raise UserError(f"{shown}: its post_processor has {size:,} characters: at most {MOST_FRAME:,}")


def _growth(rule: dict) -> float:
    """The number of letters that a rule of a tokenizer.json, or a sequence of rules, may make of one.

    {"type": "Replace", "pattern": {"String": "ab"}, "content": "cde"} -> 1.5
    """
    if parts := rule.get("normalizers") or rule.get("decoders"):
        return math.prod(map(_growth, parts))
    if rule.get("type") == "Prepend":
        return 1 + len(rule["prepend"])
    if rule.get("type") == "Precompiled":  # a map of letters, and the texts that it leads to
        charsmap = base64.b64decode(rule["precompiled_charsmap"])
        texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].decode(errors="replace")
        return max(map(len, texts.split("\0")))
    if rule.get("type") != "Replace":
        return _GROWTH.get(rule.get("type", ""), 1)
    size, pattern = len(rule["content"]), rule["pattern"]
    if pattern.get("String"):
        return max(1, size / len(pattern["String"]))
    with contextlib.suppress(re.error):
        if "String" not in pattern and not re.match(pattern["Regex"], ""):
            return max(1, size)
    return 1 + size  # between any two letters


def _check_added(files: dict[str, Path], shown: str) -> None:
    """UserError if a tokenizer's files have more tokens beside the vocabulary than transformers takes in a while."""
    lists = {name: _read(files, name) for name in ("added_tokens.json", "special_tokens_map.json")}
    lists |= _read(files, "tokenizer_config.json") | lists
    for name, value in lists.items():
        if isinstance(value, list | dict) and len(value) > MOST_ADDED:
            raise UserError(f"{shown}: {len(value):,} tokens in its {name}: at most {MOST_ADDED:,}")


def _load(files: dict[str, Path], name_or_path: str, shown: str, asked: tuple) -> PreTrainedTokenizerBase:
    """The tokenizer of these files, whose special tokens may be missing, tried on some texts."""
    _check_added(files, shown)
    tokenizer = _loaded(files, name_or_path, shown, asked)
    if "input_ids" not in tokenizer.model_input_names:
        raise UserError(f"{shown}: the model_input_names of its tokenizer_config.json lack input_ids")
    tokenizer(["a", *_REPETITIVE])  # what its rules put around a text may name tokens that are not there
    _check_apart(tokenizer, shown)
    return tokenizer


def _check_apart(tokenizer: PreTrainedTokenizerBase, shown: str) -> None:
    """UserError if two tokens have one id: where a vocabulary has ids without tokens, the `tokenizers` library counts
    its tokens to number those that are added."""
    tokens: dict[int, str] = {}
    for token, number in sorted(tokenizer.get_vocab().items()):
        if number in tokens:
            raise UserError(
                f"{shown}: its tokens {tokens[number]!r} and {token!r} have the same id, {number}: some ids below have "
                "no token. Write each added token, with its id, into the vocabulary of the tokenizer.json too"
            )
        tokens[number] = token


def _loaded(files: dict[str, Path], name_or_path: str, shown: str, asked: tuple) -> PreTrainedTokenizerBase:
    if name_or_path == BYTES_NAME and not files:
        return ByT5Tokenizer()
    sentinels = _read(files, "tokenizer_config.json").get("extra_ids") or 0
    if not (isinstance(sentinels, int) and 0 <= sentinels <= MOST_SENTINELS):
        raise UserError(f"{shown}: extra_ids {sentinels} of tokenizer_config.json: must be 0 to {MOST_SENTINELS:,}")
    if (prefix := _read(files, "tokenizer_config.json").get(TARGET_PREFIX, "")) not in ("", " "):
        raise UserError(f"{shown}: {TARGET_PREFIX} {prefix!r} of tokenizer_config.json: must be a space, or not there")
    if not _is_complete(files):
        if base := _read(files, "adapter_config.json").get("base_model_name_or_path"):
            if Path(base).resolve() in asked:
                raise UserError(f"{shown}: its adapter_config.json names {base}, its own base")
            return load_tokenizer(base, f"{shown}: its base", asked=asked)
        raise UserError(f"{shown}: no tokenizer there: name one with --tokenizer_name")
    if RULES in files:
        content = record_json(files[RULES])
        if (count := len(content["added_tokens"])) > MOST_ADDED:
            raise UserError(f"{shown}: {count:,} added_tokens in its {files[RULES].name}: at most {MOST_ADDED:,}")
        _check_rules(content, shown)
        tokenizer = _of_rules(content, files, {})
        special = {*tokenizer.added_tokens_encoder, *map(str, tokenizer.all_special_tokens)}
        texts = probe_texts(tokenizer.get_vocab().keys() - special)
        rules = Tokenizer.from_str(json.dumps(content | {"truncation": None, "padding": None}))
        wanted = [encoding.ids for encoding in rules.encode_batch(texts, add_special_tokens=False)]
        check_same_ids(texts, _plain_ids(tokenizer, texts), wanted, shown, tool="tokenizers")
        return tokenizer
    models = [files[name] for name in MODELS if name in files]
    if not models:
        return _of_vocabulary(files, name_or_path, shown)
    try:
        model = SentencePieceModel(record_bytes(models[0]))
    except RuntimeError:
        raise UserError(f"{shown}: no SentencePiece model. Give one, or a folder with its tokenizer.json") from None
    if _class_name(files) in ("", "T5Tokenizer", "MT5Tokenizer", "PreTrainedTokenizer"):
        content = model.tokenizer_content(shown)
        _check_rules(content, shown)
        tokenizer = _of_rules(content, files, model.special_pieces())
    else:
        tokenizer = _of_class(files, name_or_path)
    texts = model.probe_texts()
    check_same_ids(texts, _plain_ids(tokenizer, texts), model.encode(texts), f"{shown} ({model.described})")
    return tokenizer


def _plain_ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def _read(files: dict[str, Path], name: str) -> dict:
    return read_json(files[name]) if name in files else {}


def _tokens(content: dict) -> list[str]:
    """The tokens of a tokenizer.json's model, by their ids."""
    vocabulary = content["model"]["vocab"]  # [[piece, score], ...] or {token: id}
    if isinstance(vocabulary, list):
        return [token for token, _ in vocabulary]
    return sorted(vocabulary, key=vocabulary.get)


def _named_tokens(files: dict[str, Path]) -> dict[str, str]:
    """{"eos_token": "</s>", ...}: the special tokens that the tokenizer's own files name."""
    found, named = _read(files, "tokenizer_config.json") | _read(files, "special_tokens_map.json"), {}
    for role, token in found.items():
        if role in ROLES and token:
            named[role] = token["content"] if isinstance(token, dict) else token
    return named


def _of_rules(content: dict, files: dict[str, Path], pieces: dict[str, str]) -> PreTrainedTokenizerFast:
    """The tokenizer of a tokenizer.json, whose rules are kept as they are. pieces: {role: token} where no file has one.

    Changes `content` where transformers makes a SentencePiece model into a wrong one: <unk> is the token of that name,
    and letters without a token become bytes where there are any. T5's tokenizers also get sentinels and an EOS behind
    each text, which their class once added.
    """
    model, config, named = content["model"], _read(files, "tokenizer_config.json"), _named_tokens(files)
    tokens, is_t5 = _tokens(content), _class_name(files) in ("", "T5Tokenizer", "MT5Tokenizer")
    if isinstance(model["vocab"], list):
        model["type"] = "Unigram"
        unknown = named.get("unk_token", "<unk>")
        if unknown in tokens:
            model["unk_id"] = tokens.index(unknown)
        if "<0x00>" in tokens:
            content = with_bytes(content)
    added = content["added_tokens"]
    if is_t5:
        added += _sentinels_of_its_class(config, tokens, added, bool(pieces))
    with temporary_folder() as folder:
        for name in CONFIGS:
            if name in files:
                shutil.copyfile(files[name], folder / name)
        write_json(folder / RULES, content)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if not tokenizer.extra_special_tokens:
        names = [token["content"] for token in added]
        sentinels = sorted(filter(SENTINEL_NAME.fullmatch, names), key=lambda name: (len(name), name))
        tokenizer.add_special_tokens({"extra_special_tokens": sentinels})
    of_config, vocabulary = _tokens_of_config(files, tokenizer), tokenizer.get_vocab()
    t5s = {role: name for role, name in T5_NAMES.items() if is_t5 and (name in vocabulary or pieces)}
    tokenizer.add_special_tokens(t5s | of_config | pieces | named)
    if is_t5 and tokenizer.eos_token and not tokenizer("")["input_ids"]:
        eos = tokenizer.eos_token
        both, ids = ["$A", eos, "$B", eos], [(eos, tokenizer.eos_token_id)]
        template = processors.TemplateProcessing(single=both[:2], pair=both, special_tokens=ids)
        tokenizer.backend_tokenizer.post_processor = template
    return tokenizer


def _sentinels_of_its_class(config: dict, tokens: list[str], added: list[dict], is_named: bool) -> list[dict]:
    """The sentinels that T5's class adds behind all `tokens` and `added` ones; [] where there are any, or where the
    configuration lists them. is_named: whether they are added where it does, too."""
    listed = list(filter(SENTINEL_NAME.fullmatch, map(str, config.get("additional_special_tokens") or ())))
    there = [*tokens, *(token["content"] for token in added)]
    if any(map(SENTINEL_NAME.fullmatch, there)) or listed and not is_named:
        return []
    first = max([len(tokens) - 1, *(token["id"] for token in added)]) + 1
    count = len(listed) or config.get("extra_ids", NUM_SENTINELS)
    return [special_token(first + n, f"<extra_id_{count - 1 - n}>") for n in range(count)]


def _tokens_of_config(files: dict[str, Path], tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """{"pad_token": "<pad>", ...}: the special tokens whose ids config.json names."""
    config, found = _read(files, "config.json"), {}
    tokens = {number: token for token, number in tokenizer.get_vocab().items()}
    for role in ROLES:
        number = config.get(f"{role}_id")
        if isinstance(number, int) and number in tokens:
            found[role] = tokens[number]
    return found


def _of_vocabulary(files: dict[str, Path], name_or_path: str, shown: str) -> PreTrainedTokenizerBase:
    """The tokenizer of the class that the files name, which reads their vocab.json or vocab.txt. UserError if none
    does: such a list does not say how a text is cut into its tokens, and T5's class makes an empty vocabulary of it."""
    name = next((name for name in OTHER_VOCABULARIES if name in files), None)
    if not name:
        return _of_class(files, name_or_path)
    tokenizer = None
    if not Path(name_or_path).is_file():
        with contextlib.suppress(OSError, ValueError):
            tokenizer = _of_class(files, name_or_path)
    text = files[name].read_text(encoding="utf-8")
    tokens = set(json.loads(text) if name == "vocab.json" else text.splitlines())
    if tokenizer is None or len(tokens & tokenizer.get_vocab().keys()) * 2 < len(tokens):
        raise UserError(
            f"{shown}: its {name} does not say how a text is cut into its {len(tokens):,} tokens. If it is a BPE of "
            "bytes, write them: tokenizers.ByteLevelBPETokenizer('vocab.json', 'merges.txt').save('tokenizer.json')"
        )
    return tokenizer


def _of_class(files: dict[str, Path], name_or_path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of another class, made by transformers. Special tokens that no file names are those of config.json:
    the class's own defaults, such as GPT-2's, would be new tokens."""
    tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=False)
    roles = {*ROLES, "bos_token"} - _named_tokens(files).keys()
    of_config = _tokens_of_config(files, tokenizer)
    names = {}  # of those that the class invented
    for role in roles:
        if (getattr(tokenizer, f"{role}_id") or 0) >= tokenizer.vocab_size:
            names[role] = of_config.get(role)
    if names:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=False, **names)
        kept = dict(model_max_length=tokenizer.model_max_length) | tokenizer.special_tokens_map
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **kept)  # has no defaults
    missing = {role: token for role, token in of_config.items() if role in roles and getattr(tokenizer, role) is None}
    tokenizer.add_special_tokens(missing)
    return tokenizer


def check_saved(tokenizer: PreTrainedTokenizerBase) -> None:
    """Saves the tokenizer and loads it again, here and by AutoTokenizer. AssertionError if one is another then."""
    texts = probe_texts(tokenizer.get_vocab())
    wanted = tokenizer(texts)["input_ids"], tokenizer.get_vocab(), tokenizer.eos_token_id, tokenizer.pad_token_id
    with temporary_folder() as folder:
        save_tokenizer(tokenizer, folder)
        for again in (load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)):
            found = again(texts)["input_ids"], again.get_vocab(), again.eos_token_id, again.pad_token_id
            assert found == wanted, f"{tokenizer.name_or_path}: the tokenizer is another when it is saved and loaded"


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of a tokenizer's behaviour (vocabulary, normalisation, special tokens), whatever its folder."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    content = content | {"truncation": None, "padding": None}  # these hold the settings of the last call
    described = f"{json.dumps(content, sort_keys=True)} {tokenizer.eos_token_id} {type(tokenizer).__name__}"
    described += target_prefix(tokenizer)
    return hashlib.sha256(described.encode()).hexdigest()


def cut_at_spaces(text: str, longest: int) -> Iterator[str]:
    """Parts of at most `longest` characters, words whole if possible: ("one two three", 8) -> "one two", "three"."""
    begin, end = 0, len(text.rstrip())
    while end - begin > longest:
        cut = text.rfind(" ", begin + 1, begin + longest + 1)
        cut = begin + longest if cut == -1 else cut
        yield text[begin:cut]
        begin = cut + (text[cut] == " ")
    yield text[begin:]


def plain_encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[str]], Sequence[Sequence[int]]]:
    """texts -> token ids, uncut and without EOS; "<extra_id_0>" or "</s>" in a text is read as plain characters."""
    if is_byte_level(tokenizer) and set(tokenizer.get_added_vocab()) <= set(tokenizer.all_special_tokens):
        offset = np.uint16(tokenizer.offset)  # much faster than the tokenizer, which makes a string of each byte
        return lambda texts: [np.frombuffer(text.encode(), dtype=np.uint8) + offset for text in texts]
    if getattr(tokenizer, "backend_tokenizer", None) is None:  # tokenizers in Python
        return lambda texts: tokenizer(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    plain, _ = plain_backend(tokenizer)
    return lambda texts: [encoding.ids for encoding in plain.encode_batch_fast(texts, add_special_tokens=False)]


def target_prefix(tokenizer: PreTrainedTokenizerBase) -> str:
    """What a tokenizer wants before each target (" " in corpora/characters.py); "" for almost all."""
    return tokenizer.init_kwargs.get(TARGET_PREFIX, "")


def encode_targets(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], max_length: int | None = None
) -> list[list[int]]:
    """Token ids of targets, cut to `max_length`, EOS included, also where the tokenizer does not write it (Gemma's, and
    GPT-2's, which FRED-T5 has); without the BOS of Gemma's inputs; behind the tokenizer's `target_prefix`."""
    cut = dict(max_length=max_length, truncation=max_length is not None, verbose=False)
    eos = find_eos_id(tokenizer)
    texts = [target_prefix(tokenizer) + text for text in texts]
    if tokenizer("")["input_ids"][-1:] == [eos]:
        return tokenizer(texts, **cut)["input_ids"]
    cut["max_length"] = max_length and max_length - 1
    return [[*ids, eos] for ids in tokenizer(texts, add_special_tokens=False, **cut)["input_ids"]]


def plain_backend(tokenizer: PreTrainedTokenizerBase) -> tuple[Tokenizer, dict[str, str]]:
    """(a copy of the `tokenizers` object in which no text is a special token, {special token: its name there}).

    T5's sentinels are also pieces of the unigram model, with a score that always wins; mT5's are only pieces. So the
    copy keeps the ids of special tokens and sentinels under names that occur in no text.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str()) | {"post_processor": None}
    content |= {"truncation": None, "padding": None}  # left there by whoever called it last
    model, added = content["model"], content["added_tokens"]
    special = {token["content"] for token in added if token["special"]}
    special.update(filter(SENTINEL_NAME.fullmatch, tokenizer.get_vocab()))
    special.update(filter(UNUSED_NAME.fullmatch, tokenizer.get_vocab()))
    unseen = {token: f"\uffff{token}\uffff" for token in special}  # U+FFFF is not a character
    for token in added:
        token["content"] = unseen.get(token["content"], token["content"])
    if isinstance(model["vocab"], list):  # [[piece, score], ...], the id being the place
        model["vocab"] = [[unseen.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {unseen.get(token, token): number for token, number in model["vocab"].items()}
        model["unk_token"] = unseen.get(model.get("unk_token"), model.get("unk_token"))
    return Tokenizer.from_str(json.dumps(content)), unseen
