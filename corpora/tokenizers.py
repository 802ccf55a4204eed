"""Tokenizers: trained with SentencePiece, loaded, fingerprinted, and the plain encoding of a corpus."""

import hashlib
import io
import itertools
import json
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast, T5Tokenizer

from common.processes import in_background, print_once
from common.reports import first_line, read_json, write_json
from constants import CODE_ENTRIES, LEAST_VOCAB_SIZE, NUM_SENTINELS
from corpora.hub import do_not_wait_for_the_hub
from data_collator_t5 import SENTINEL_NAME, UNUSED_NAME, find_eos_id, is_byte_level

TOKENIZER_SENTENCE = 16_384  # bytes; SentencePiece skips longer lines, so they are cut
LINE_PART = 1_024  # characters of a part of such a line
MOST_CHARACTERS = 2**28  # from which SentencePiece learns; it takes 13 bytes of memory for each
TOLD_CHARACTERS = 2**24  # with more, it takes longer than some seconds
BYTES = 256  # tokens of a tokenizer that writes unknown letters as bytes
COVERAGE = 0.9995  # SentencePiece's advice for scripts of thousands of letters
LEAST_COVERAGE = 0.98  # that SentencePiece takes


def train_tokenizer(
    documents: Iterable[str],
    output_dir: Path,
    vocab_size: int,
    byte_fallback: bool | None = None,
    normalization: str = "nmt_nfkc",
    character_coverage: float | None = None,
    max_sentences: int = 1_000_000,
    max_characters: int = MOST_CHARACTERS,
) -> Counter:
    """Trains a SentencePiece unigram model on `documents` and writes it as a T5 tokenizer folder.

    vocab_size counts all tokens: <pad> 0, </s> 1, <unk> 2, the pieces, and 100 sentinels at the end (<extra_id_0> last,
    as in T5's own vocabulary). The pieces are learnt from a sample: at most `max_sentences` lines of `max_characters`
    together, drawn evenly, the same each time. `letters_and_bytes` chooses byte_fallback and character_coverage by
    its letters if they are None.

    Returns how often each letter occurs in the sample. ValueError if the text is too small for the size.
    """
    import sentencepiece

    output_dir.mkdir(parents=True, exist_ok=True)
    shown = tqdm(documents, "reading the text", unit=" documents", disable=not sys.stderr.isatty())
    lines = (line for document in shown for line in document.split("\n") if line.strip())
    sample = _sample((part for line in lines for part in _parts_of(line)), max_sentences, max_characters)
    if (characters := sum(map(len, sample))) > TOLD_CHARACTERS:
        learnt = f"{characters:,} characters in {len(sample):,} lines"
        print_once(f"SentencePiece learns {vocab_size:,} tokens from {learnt}")
    letters = Counter(itertools.chain.from_iterable(sample))
    letters = Counter({letter: count for letter, count in letters.items() if letter.strip()})
    byte_fallback, character_coverage = letters_and_bytes(letters, vocab_size, byte_fallback, character_coverage)
    model = io.BytesIO()
    options = dict(model_type="unigram", vocab_size=vocab_size - NUM_SENTINELS, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    options |= dict(byte_fallback=byte_fallback, character_coverage=character_coverage)
    options |= dict(normalization_rule_name=normalization, max_sentence_length=TOKENIZER_SENTENCE, minloglevel=2)
    # SentencePiece removes its own special tokens from a text, such as <unk> in WikiText, before it counts letters.
    inside = [token for token in ("<pad>", "</s>", "<unk>") if any(token in part for part in sample)]
    options |= dict(required_chars="".join(sorted(set("".join(inside)))))
    options |= dict(num_threads=16)  # not the machine's number of cores: the sums, and so the pieces, depend on it
    train = partial(sentencepiece.SentencePieceTrainer.train, sentence_iterator=iter(sample), model_writer=model)
    try:
        in_background(partial(train, **options)).result()  # C++ sees Ctrl-C when it is done, which may take an hour
    except RuntimeError as error:
        if "sentences_.empty()" in str(error):
            raise ValueError("there is no text to train a tokenizer on") from None
        reason = str(error).split("] ")[-1]
        if most := re.search(r"set it to a value <= (\d+)", str(error)):
            tokens = int(most[1]) + NUM_SENTINELS
            less = f"--vocab_size {tokens} or less, or " * (tokens >= LEAST_VOCAB_SIZE)
            reason = f"it is enough for {tokens} tokens; give {less}more text"
        if least := re.search(r"required_chars. \d+ vs (\d+)", str(error)):
            reason = f"its letters alone take {int(least[1]) + NUM_SENTINELS}"
        raise ValueError(f"--vocab_size {vocab_size}: SentencePiece could not train on this text: {reason}") from None
    (output_dir / "spiece.model").write_bytes(model.getvalue())
    save_tokenizer(_of_model(output_dir, model.getvalue()), output_dir)
    return letters


class _NotNormalizing(T5Tokenizer):
    """T5Tokenizer of a model without a map of characters, where transformers 5.17 fails at an empty one."""

    def __init__(self, *args, _spm_precompiled_charsmap=None, **kwargs):
        super().__init__(*args, _spm_precompiled_charsmap=_spm_precompiled_charsmap or None, **kwargs)


def _of_model(folder: Path, model: bytes) -> PreTrainedTokenizerBase:
    """The T5 tokenizer of the SentencePiece model spiece.model in a folder, with 100 sentinels if it has none."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    proto = ModelProto.FromString(model)
    has_sentinels = any(piece.piece == "<extra_id_0>" for piece in proto.pieces)  # mT5's
    kind = T5Tokenizer if proto.normalizer_spec.precompiled_charsmap else _NotNormalizing
    tokenizer = kind.from_pretrained(str(folder), extra_ids=0 if has_sentinels else NUM_SENTINELS)
    spec, symbols = proto.trainer_spec, {piece.piece for piece in proto.pieces if piece.type == piece.USER_DEFINED}
    symbols = {symbol for symbol in symbols if not SENTINEL_NAME.fullmatch(symbol)}
    if symbols or spec.byte_fallback or spec.unk_id != 2 or not proto.normalizer_spec.name.startswith("nmt_"):
        return _as_sentencepiece(tokenizer, spec.byte_fallback, spec.unk_id, symbols)
    return tokenizer


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
    byte_fallback = not few if byte_fallback is None else byte_fallback
    if few:
        return byte_fallback, 1.0
    frequent = sum(count for _, count in letters.most_common(room))
    return byte_fallback, max(LEAST_COVERAGE, frequent / letters.total()) if byte_fallback else COVERAGE


def _sample(lines: Iterable[str], most: int, most_characters: int) -> list[str]:
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


_READS_BYTES = [  # rules of a decoder
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
]


def _as_sentencepiece(
    tokenizer: PreTrainedTokenizerBase, byte_fallback: bool, unknown: int, symbols: set[str]
) -> PreTrainedTokenizerFast:
    """The tokenizer as a class that keeps its rules: transformers' T5Tokenizer rebuilds itself at every loading.

    T5Tokenizer switches off bytes for unknown letters, takes token 2 for <unk>, and cuts words at every kind of white
    space. sentencepiece cuts at plain spaces only; the nmt_ rules turn no-break spaces, tabs and the like into them.

    symbols: the model's user-defined ones. T5Tokenizer makes added tokens of them, behind which it writes a space. As
    pieces alone they have the score 0, which always wins; only one that normalization changes must stay added.
    """
    content, normalizer = json.loads(tokenizer.backend_tokenizer.to_str()), tokenizer.backend_tokenizer.normalizer
    content["model"] |= {"byte_fallback": byte_fallback, "unk_id": unknown}
    bare = {symbol: symbol.strip("▁") for symbol in symbols}  # without the mark of a space
    pieces = {
        symbol for symbol in symbols if normalizer is None or normalizer.normalize_str(bare[symbol]) == bare[symbol]
    }
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in pieces]
    made = rebuilt(tokenizer, content, {" {2,}": " ", r"\A | \z": ""}, space_marks("always"), _READS_BYTES)
    return with_exact_spaces(made) if symbols - pieces else made


def with_exact_spaces(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerFast:
    """The same unigram tokenizer, which marks the beginning of a text, not of each part between added tokens."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in content["added_tokens"]:
        token["lstrip"] |= token["special"]  # sentinels: a space before one was never a token
    marks = space_marks("first")
    return rebuilt(tokenizer, content, {" {2,}": " "}, marks, [{"type": "ByteFallback"}, marks])


def _with_own_unknown(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer; a T5Tokenizer whose <unk> is not token 2, such as MADLAD-400's, with rules of its own. There
    transformers 5 writes unknown letters as token 2, which may be </s>. They are bytes, as in SentencePiece, if it has
    them, else <unk>."""
    if not isinstance(tokenizer, T5Tokenizer) or tokenizer.unk_token_id in (None, 2):
        return tokenizer
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    byte_fallback = "<0x00>" in tokenizer.get_vocab()
    content["model"] |= {"byte_fallback": byte_fallback, "unk_id": tokenizer.unk_token_id}
    return rebuilt(tokenizer, content, {}, content["pre_tokenizer"], _READS_BYTES)


def space_marks(prepend: str) -> dict:
    """The rule that writes spaces as ▁, and one before "always" every part of a text, or the "first"."""
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": prepend, "split": True}


def rebuilt(
    tokenizer: PreTrainedTokenizerBase, content: dict, replaced: dict[str, str], marks: dict, decoders: list[dict]
) -> PreTrainedTokenizerFast:
    """A tokenizer of T5's kind from changed `content`, as transformers' class that does not change its rules.

    replaced: {regular expression: text} after SentencePiece's own normalisation. marks: rule for spaces.
    """

    rules = content["normalizer"] or {}
    rules = [rule for rule in rules.get("normalizers", [rules]) if rule.get("type") == "Precompiled"]
    rules += [{"type": "Replace", "pattern": {"Regex": pattern}, "content": text} for pattern, text in replaced.items()]
    content["normalizer"] = {"type": "Sequence", "normalizers": rules}
    content["pre_tokenizer"], content["decoder"] = marks, {"type": "Sequence", "decoders": decoders}
    special = {token["content"] for token in content["added_tokens"] if token["special"]}
    kept = dict(extra_special_tokens=[token for token in tokenizer.extra_special_tokens if token in special])
    kept |= dict(model_max_length=tokenizer.model_max_length) | tokenizer.special_tokens_map
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)), **kept)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds the files of a tokenizer."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "spiece.model"))


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes a tokenizer's files, which transformers 4 reads too."""
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


def load_tokenizer(name_or_path: str, flag: str = "--tokenizer_name") -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, Hub name or SentencePiece .model. ValueError naming the flag if there is none."""

    if name_or_path.endswith(".model") and Path(name_or_path).is_file():
        return _load_model(Path(name_or_path), flag)
    do_not_wait_for_the_hub(name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{flag} {name_or_path}: no tokenizer there ({first_line(error, 2)})") from None
    except Exception as error:  # the tokenizers library raises nothing more specific for a damaged file
        raise ValueError(f"{flag} {name_or_path}: the tokenizer cannot be read ({first_line(error)})") from None
    for name in ("eos_token", "pad_token"):
        if getattr(tokenizer, name) is None:
            raise ValueError(
                f"{flag} {name_or_path}: a {type(tokenizer).__name__} without {name}, which T5 needs: "
                "use one of the T5 family, or train one with create_tokenizer.py"
            )
    if tokenizer.padding_side != "right":  # Gemma's would put padding between the start token and a target
        tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "right"
    if tokenizer.clean_up_tokenization_spaces:  # saved by transformers 4: answers would lose the space of " ." and " ?"
        tokenizer.clean_up_tokenization_spaces = tokenizer.init_kwargs["clean_up_tokenization_spaces"] = False
    for name in CODE_ENTRIES:
        tokenizer.init_kwargs.pop(name, None)
    return _with_own_unknown(tokenizer)


def _load_model(path: Path, flag: str) -> PreTrainedTokenizerBase:
    """The T5 tokenizer of a SentencePiece model. ValueError naming the flag for any other file."""
    from sentencepiece import SentencePieceProcessor

    try:
        SentencePieceProcessor(model_proto=path.read_bytes())
    except RuntimeError:
        raise ValueError(f"{flag} {path}: no SentencePiece model") from None
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(path, Path(folder) / "spiece.model")
        return _of_model(Path(folder), path.read_bytes())


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of a tokenizer's behaviour (vocabulary, normalisation, special tokens), whatever its folder."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    content = content | {"truncation": None, "padding": None}  # left there by whoever called it last
    described = f"{json.dumps(content, sort_keys=True)} {tokenizer.eos_token_id} {type(tokenizer).__name__}"
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
        offset = np.uint16(tokenizer.offset)  # many times as fast as the tokenizer, which makes each byte a string
        return lambda texts: [np.frombuffer(text.encode(), dtype=np.uint8) + offset for text in texts]
    if getattr(tokenizer, "backend_tokenizer", None) is None:  # tokenizers in Python
        return lambda texts: tokenizer(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    plain, _ = plain_backend(tokenizer)
    return lambda texts: [encoding.ids for encoding in plain.encode_batch_fast(texts, add_special_tokens=False)]


def encode_targets(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], max_length: int | None = None
) -> list[list[int]]:
    """Token ids of targets, cut to `max_length`, EOS included, also where the tokenizer does not write it (Gemma's, and
    GPT-2's, which FRED-T5 has); without the BOS of Gemma's inputs."""
    cut, eos = dict(max_length=max_length, truncation=max_length is not None), find_eos_id(tokenizer)
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
    special |= {
        token for token in tokenizer.get_vocab() if SENTINEL_NAME.fullmatch(token) or UNUSED_NAME.fullmatch(token)
    }
    unseen = {token: f"\uffff{token}\uffff" for token in special}  # U+FFFF is not a character
    for token in added:
        token["content"] = unseen.get(token["content"], token["content"])
    if isinstance(model["vocab"], list):  # [[piece, score], ...], the id being the place
        model["vocab"] = [[unseen.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {unseen.get(token, token): number for token, number in model["vocab"].items()}
        model["unk_token"] = unseen.get(model.get("unk_token"), model.get("unk_token"))
    return Tokenizer.from_str(json.dumps(content)), unseen
