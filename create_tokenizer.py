"""Train a T5 tokenizer (SentencePiece unigram, 100 sentinels) on your own text, or add tokens to a tokenizer.

    python create_tokenizer.py --train_file 'corpus/*.txt' --vocab_size 32100 --output_dir out/tokenizer
    python create_tokenizer.py --train_file corpus.jsonl.gz --text_column content --config_name t5-v1_1-base
    python create_tokenizer.py --pieces characters --train_file words.tsv --source_column 0 --target_column 1
    python create_tokenizer.py --from_tokenizer google/flan-t5-base --add_tokens '\\n' '{' '}'
    python create_tokenizer.py --model_name_or_path google/flan-t5-base --add_tokens '{' --output_dir out/new
    python create_tokenizer.py --from_tokenizer ai-forever/FRED-T5-large --eos_token '</s>' --pad_token '<pad>'

The folder loads with AutoTokenizer and AutoConfig; give it to the other scripts as `--tokenizer_name`. 10 MB of text
take about 10 seconds on two cores; SentencePiece samples at most --max_sentences lines of a larger corpus. With
--pieces characters each letter (code point) is a token, and each symbol between spaces of --target_column. Added tokens
get embedding rows in a checkpoint when it is trained with the new tokenizer (--model_name_or_path and
--tokenizer_name), or at once if --model_name_or_path names it here. Rows of old tokens and sentinels do not change; new
rows begin at their mean.
"""

from foundry.common.command_line import answer_early

if __name__ == "__main__":
    answer_early(__doc__)


import dataclasses
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from constants import LEAST_VOCAB_SIZE, NUM_SENTINELS, TASK_RECORD
from data_collator_t5 import find_sentinel_ids, vocabulary_size
from foundry.arguments.model import LEAST_VOCABULARY
from foundry.arguments.text import PreTrainingDataArguments, check_pre_training_data
from foundry.common.command_line import exit_on_user_error, parse_arguments
from foundry.common.errors import UserError
from foundry.common.flags import Flags, check_rules, check_value, option, refuse
from foundry.common.machine import run_script
from foundry.common.paths import check_folder, is_free
from foundry.common.reports import end_summary, start_summary
from foundry.common.whole_folders import made_aside
from foundry.common.words import listed
from foundry.corpora.characters import Pieces, write_character_tokenizer
from foundry.corpora.reading import as_list
from foundry.corpora.tokenizers import (
    LEAST_COVERAGE,
    MOST_CHARACTERS,
    MOST_SENTINELS,
    has_tokenizer,
    load_tokenizer,
    plain_encoder,
    save_tokenizer,
    train_tokenizer,
    with_exact_spaces,
)
from foundry.corpora.word_encoder import cuts_at_spaces
from foundry.features import Features, features_of
from foundry.model_t5 import build_config, load_model
from foundry.modeling.generation_settings import drop_idle_search
from foundry.modeling.new_vocabulary import change_vocabulary
from foundry.report.losses import TextSample, described_losses, round_trip
from foundry.report.preview import UNCUT, Sample, Seen, print_preview
from foundry.text_source import documents_of
from tasks import examples, row_texts
from tasks.mixture import unsplit_task

CHARACTERS = "characters"  # --pieces: letters and symbols; "unigram": what SentencePiece learns
# nfkc: one form for letters that look alike; nmt_: all white space is a space; _cf: lower case; identity: unchanged.
NORMALIZATIONS = ("nmt_nfkc", "nfkc", "identity", "nmt_nfkc_cf", "nfkc_cf")
NFD = "nfd"  # of --pieces characters: é is e and ´, a syllable of Hangul its two or three letters

_ESCAPES = {"\\n": "\n", "\\t": "\t"}  # as a command line writes them


@dataclass
class TokenizerArguments:
    """Text, size, and how text becomes pieces."""

    _argument_group_name = "tokenizer"

    from_tokenizer: str | None = option(None, "Add to this tokenizer: folder, Hub name, .model. Not set: the model's.")
    add_tokens: list[str] | None = option(None, "Texts to add as tokens; \\n: a line break, \\t: a tab.")
    eos_token: str | None = option(None, "Token that ends a text, if the files of --from_tokenizer name none.")
    pad_token: str | None = option(None, "Token that fills rows up, if the files of --from_tokenizer name none.")
    model_name_or_path: str | None = option(None, "Also write this checkpoint, with rows for the new tokens.")
    train_file: list[str] | None = option(
        None, "Text: files, folders, globs, with weights a.txt:0.7 b.txt:0.3, as for pre_train_t5.py."
    )
    validation_file: list[str] | None = option(None, "Text not to learn from, of which the losses are shown too.")
    dataset_name: str | None = option(None, "Saved `datasets` folder, Hub name, or the built-in installed_docs.")
    dataset_config_name: str | None = option(None, "Configuration of the Hub data set.")
    text_column: str = option("text", "Column that holds the text in JSON, CSV, parquet and Hub data.")
    max_train_samples: int | None = option(None, "Read the first N documents only.", at_least=1)
    output_dir: str = option("out/tokenizer", "Folder to write; must be empty. It appears when it is complete.")
    pieces: str = option(
        "unigram",
        "Learnt by SentencePiece, or each letter a token and each symbol between spaces of a target.",
        choices=("unigram", CHARACTERS),
    )
    source_column: list[str] | None = option(None, "Characters of pairs: column of the sources, as in fine_tune_t5.py.")
    target_column: list[str] | None = option(None, "Characters of pairs: of the targets, symbols with spaces between.")
    tsv_header: bool | None = option(None, "Of pairs: whether line 1 of a .tsv names the columns. Not set: detected.")
    extra_ids: int = option(NUM_SENTINELS, "Characters: number of sentinels.", at_least=0, at_most=MOST_SENTINELS)
    vocab_size: int = option(
        32_100,
        f"Size, sentinels included (T5: 32,100); from {LEAST_VOCAB_SIZE} on. Characters: at most.",
        at_least=4,
        at_most=LEAST_VOCABULARY["at_most"],
    )
    byte_fallback: bool | None = option(
        None, "Write letters without a token as bytes (256 tokens). Not set: if there are too many letters."
    )
    normalization: str | None = option(
        None,
        "SentencePiece's normalization. Not set: nmt_nfkc, as T5's. nfd: characters, letters taken apart.",
        choices=(*NORMALIZATIONS, NFD),
    )
    character_coverage: float | None = option(
        None,
        "Share of the text's letters with a token. Not set: all, with bytes the most frequent.",
        at_least=LEAST_COVERAGE,
        at_most=1,
    )
    max_sentences: int = option(
        1_000_000, f"Lines that SentencePiece samples, of {MOST_CHARACTERS / 1e6:.0f}M characters at most.", at_least=1
    )
    config_name: str | None = option(None, "Also write the config.json of this shape, with the tokenizer's vocabulary.")
    data_cache_dir: str = option("~/.cache/t5_foundry", "Cache folder of the built-in corpus.")


FLAGS = [TokenizerArguments, *features_of("create_tokenizer")]
_PAIRS = "source_column target_column tsv_header"
_TEXT_FLAGS = ("train_file", "validation_file", "dataset_name", "dataset_config_name", "text_column", "data_cache_dir")
_RULES = (
    (
        "normalization",
        lambda args: (args.normalization == NFD) != (args.pieces == CHARACTERS),
        "nfd is for --pieces characters, which has no other normalization",
    ),
    (
        "byte_fallback character_coverage max_sentences",
        lambda args: args.pieces == CHARACTERS,
        "is for SentencePiece, which --pieces characters does not train: leave it out",
    ),
    (
        f"{_PAIRS} extra_ids",
        lambda args: args.pieces != CHARACTERS,
        "is for --pieces characters: give it, or leave this out",
    ),
    ("source_column", lambda args: not args.target_column, "needs --target_column"),
    ("source_column", lambda args: not args.train_file, "needs --train_file, the pairs"),
    ("target_column tsv_header", lambda args: not args.source_column, "needs --source_column"),
    (
        "dataset_name dataset_config_name validation_file",
        lambda args: args.source_column,
        "is for text, and --source_column for pairs in --train_file: give one of them",
    ),
)


def check_tokenizer(args: TokenizerArguments) -> PreTrainingDataArguments:
    """The flags of the text as PreTrainingDataArguments. UserError for contradictions."""
    if args.from_tokenizer or args.model_name_or_path or args.add_tokens or args.eos_token or args.pad_token:
        _check_adding(args)
    check_rules(args, _RULES)
    if args.pieces != CHARACTERS:
        check_value("vocab_size", args.vocab_size, LEAST_VOCABULARY)
    check_folder("--output_dir", args.output_dir)
    if not is_free(Path(args.output_dir)):
        raise UserError(f"--output_dir {args.output_dir} is not empty: name another folder")
    if args.source_column:
        return PreTrainingDataArguments()  # the flags of text are at their defaults, which pairs do not read
    shared = (*_TEXT_FLAGS, "max_train_samples")
    data_args = PreTrainingDataArguments(**{name: getattr(args, name) for name in shared})
    check_pre_training_data(data_args)
    return data_args


def _check_adding(args: TokenizerArguments) -> None:
    if not (args.add_tokens or args.eos_token or args.pad_token):
        named = "model_name_or_path" if args.model_name_or_path else "from_tokenizer"
        raise UserError(f"--{named} {getattr(args, named)}: name the new tokens with --add_tokens")
    if not (args.from_tokenizer or args.model_name_or_path):
        raise UserError(
            "--add_tokens, --eos_token, --pad_token: name the tokenizer with --from_tokenizer, or its checkpoint with "
            "--model_name_or_path"
        )
    refuse(
        args,
        "train_file validation_file dataset_name dataset_config_name text_column max_train_samples "
        f"{_PAIRS} pieces extra_ids vocab_size byte_fallback normalization character_coverage max_sentences "
        "config_name",
        "is for a tokenizer that is trained; --add_tokens changes no other token",
    )


def add_tokens(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> tuple[PreTrainedTokenizerBase, list[str]]:
    """(the tokenizer with these texts as tokens after its last one, those of them that are new).

    Its other tokens keep their ids, and texts without the new tokens are tokenised as before. T5's tokenizers would
    decode an added token with one space behind it, whether the text has one or not: {a and { a as "{ a". The one
    returned decodes to the exact text. UserError for a text that cannot be a token.
    """
    texts = [_ESCAPES.get(text, text) for text in texts]
    for text in texts:
        if not text.strip(" "):
            raise UserError(f"--add_tokens {text!r}: a space alone cannot be a token: spaces are part of words")
    new = [text for text in dict.fromkeys(texts) if text not in tokenizer.get_vocab()]
    if new and cuts_at_spaces(tokenizer):
        tokenizer = with_exact_spaces(tokenizer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in new])
    return tokenizer, new


def write_with_added_tokens(args: TokenizerArguments, folder: Path) -> dict[str, str | None]:
    """Writes the tokenizer with `--add_tokens`, and its checkpoint if one is named; returns the rows of the summary."""
    name = args.from_tokenizer or args.model_name_or_path
    flag = "--from_tokenizer" if args.from_tokenizer else "--model_name_or_path"
    given = {}
    if args.eos_token:
        given["eos_token"] = args.eos_token
    if args.pad_token:
        given["pad_token"] = args.pad_token
    tokenizer, new = add_tokens(load_tokenizer(name, flag, given), args.add_tokens or [])
    if not new and not given:
        raise UserError(f"--add_tokens {' '.join(args.add_tokens)}: all of them are tokens of {name} already")
    changed, flags = None, f"--model_name_or_path ... --tokenizer_name {shlex.quote(args.output_dir)}"
    if args.model_name_or_path:
        model = load_model(args.model_name_or_path)
        folder_of_model = Path(args.model_name_or_path)
        bare = folder_of_model.is_dir() and not has_tokenizer(folder_of_model)
        own = load_tokenizer(name if bare else args.model_name_or_path)  # its ids order the rows
        tokens = change_vocabulary(model, own, tokenizer)
        changed = f"{tokens['kept']:,} rows kept, {tokens['new']:,} new ones at their mean"
        flags = f"--model_name_or_path {shlex.quote(args.output_dir)}"
        drop_idle_search(model)
        model.save_pretrained(folder)
        if (record := Path(args.model_name_or_path) / TASK_RECORD).is_file():
            shutil.copy(record, folder)
    save_tokenizer(tokenizer, folder)
    shown = f"{len(tokenizer):,}, {len(new)} of them new: {' '.join(map(repr, new))}"
    rows = {"tokens": shown, "special": listed(given.values()) if given else None, "checkpoint": changed}
    return rows | {"written to": args.output_dir, "next": f"python fine_tune_t5.py {flags} ..."}


def next_command(script: str, args: TokenizerArguments, names: tuple[str, ...]) -> str:
    """The command that trains on the same rows with the new tokenizer. names: flags that say which rows these are."""
    model = args.output_dir if args.config_name else "mini"
    words = ["python", script, "--tokenizer_name", args.output_dir, "--config_name", model]
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if field.name in names and value != field.default:
            words += [f"--{field.name}", *map(str, as_list(value))]
    return shlex.join(words)


def write_of_pairs(args: TokenizerArguments, folder: Path) -> tuple[PreTrainedTokenizerBase, dict[str, str | None]]:
    """Writes the tokenizer of the letters of all sources and the symbols of all targets; returns it, and rows of the
    summary."""
    shared = ("train_file", "source_column", "target_column", "tsv_header", "max_train_samples", "data_cache_dir")
    task = unsplit_task(args, shared)
    rows, pieces = task.training_rows(), Pieces(args.normalization == NFD)
    empty, unspaced = [], []
    for number, row in enumerate(rows, start=1):
        target = row_texts.target_text(task.name, task.entry, row)
        pieces.add(row_texts.source_text(task.entry, row), target)
        if not target.strip():
            empty.append(str(number))
        elif len(target) > 1 and " " not in target:
            unspaced.append(target)
    _refuse_unspaced(args, unspaced, len(rows), pieces)
    write_character_tokenizer(pieces, folder, args.extra_ids, args.vocab_size)
    tokenizer = load_tokenizer(str(folder))
    tokenize = examples.build_tokenize_function(task.name, task.entry, tokenizer, UNCUT, None)
    (first,) = examples.as_rows(tokenize(examples.as_columns(rows[:1])))
    print_preview(tokenizer, [[Sample("source", first["input_ids"]), Sample("target", first["labels"])]])
    losses = {"training": examples.tokenizer_losses(task.name, task.entry, tokenizer, rows)}
    command = next_command("fine_tune_t5.py", args, ("train_file", *_PAIRS.split()))
    return tokenizer, {
        "pairs": f"{len(rows):,}",
        "empty": f"{len(empty):,} targets, of rows {listed(empty)}" if empty else None,
        "lost by the tokenizer": described_losses(losses, own=True),
        "next": f"{command} --metrics sequence_error_rate,token_error_rate",
    }


def _refuse_unspaced(args: TokenizerArguments, unspaced: list[str], rows: int, pieces: Pieces) -> None:
    """UserError if targets are whole words: most have no space, and most of their symbols stand in one row alone."""
    rare = sum(count == 1 for count in pieces.symbols.values())
    if 2 * len(unspaced) > rows and 2 * rare > len(pieces.symbols):
        raise UserError(
            f"--target_column {','.join(args.target_column)}: {len(unspaced):,} of {rows:,} targets have no space, "
            f"such as {unspaced[0]}, of which each would be one token: write a space between symbols, as in "
            f"{' '.join(unspaced[0])}. For a token for each letter, name such texts alone, without --target_column"
        )


def write_of_text(
    args: TokenizerArguments, features: Features, data_args: PreTrainingDataArguments, folder: Path
) -> tuple[PreTrainedTokenizerBase, dict[str, str | None]]:
    """Writes the tokenizer of a text; returns it, and rows of the summary."""
    text, documents, held_out = documents_of(features, data_args, args.max_train_samples)
    size = f"at most {args.vocab_size:,}" if args.pieces == CHARACTERS else f"{args.vocab_size:,}"
    start_summary(text | {"tokens": size, "will be written to": args.output_dir}, "tokenizer")
    seen, sample = Seen(), TextSample()
    documents = sample.of(seen.of(documents))
    if args.pieces == CHARACTERS:
        pieces = Pieces(args.normalization == NFD)
        for document in documents:
            pieces.add(document)
        write_character_tokenizer(pieces, folder, args.extra_ids, args.vocab_size)
    else:
        how = args.normalization or NORMALIZATIONS[0], args.character_coverage, args.max_sentences
        train_tokenizer(documents, folder, args.vocab_size, args.byte_fallback, *how)
    tokenizer = load_tokenizer(str(folder))
    texts, encode = {"training": sample.texts, "held-out": list(held_out)}, plain_encoder(tokenizer)
    losses = {split: {"documents": round_trip(tokenizer, texts[split], encode)[0]} for split in texts}
    print_preview(tokenizer, seen.shown(tokenizer))
    return tokenizer, {
        "documents": seen.described(),
        "lost by the tokenizer": described_losses(losses, own=True),
        "next": next_command("pre_train_t5.py", args, _TEXT_FLAGS),
    }


@exit_on_user_error()
def main(argv: list[str] | None = None) -> str:
    """Runs the script; returns the folder it wrote."""
    args, *features = parse_arguments(FLAGS, argv, about=__doc__)
    for feature in features:
        check_rules(Flags(args, *features), feature.rules)
    data_args = check_tokenizer(args)
    if args.from_tokenizer or args.model_name_or_path:
        with made_aside(Path(args.output_dir)) as folder:
            rows = write_with_added_tokens(args, folder)
        end_summary(rows, title="tokenizer")
        return args.output_dir
    if args.config_name:
        build_config(args.config_name)  # refuses an unknown name before the training
    with made_aside(Path(args.output_dir)) as folder:
        if args.source_column:
            tokenizer, rows = write_of_pairs(args, folder)
        else:
            tokenizer, rows = write_of_text(args, Features(features), data_args, folder)
        if args.config_name:
            build_config(args.config_name, vocabulary_size(tokenizer)).save_pretrained(folder)
    rows["tokens"] = f"{len(tokenizer):,}"
    if sentinels := find_sentinel_ids(tokenizer, required=False).tolist():
        rows["tokens"] += f", sentinels {sentinels[0]} to {sentinels[-1]}"
    end_summary(rows | {"written to": args.output_dir, "next": rows.pop("next")}, title="tokenizer")
    return args.output_dir


if __name__ == "__main__":
    run_script(main)
