"""Train a T5 tokenizer (SentencePiece unigram, 100 sentinels) on your own text, with a matching model configuration.

    python create_tokenizer.py --train_file 'corpus/*.txt' --vocab_size 32100 --output_dir out/tokenizer
    python create_tokenizer.py --train_file corpus.jsonl.gz --text_column content --config_name t5-v1_1-base

The folder loads with AutoTokenizer and AutoConfig, and goes into `--tokenizer_name` of the other scripts. 10 MB of text
take about 10 seconds on two cores; SentencePiece samples at most --max_sentences lines of a larger corpus.
"""

from dataclasses import dataclass
from pathlib import Path

from arguments_t5 import PreTrainingDataArguments, check_pre_training_data, check_vocab_size
from common.command_line import exit_on_user_error, option, parse_arguments
from common.reports import end_summary
from constants import NUM_SENTINELS
from corpora.tokenizers import load_tokenizer, train_tokenizer
from data_t5 import find_sources
from model_t5 import build_config


@dataclass
class TokenizerArguments:
    """The text, the size, and how text becomes pieces."""

    _argument_group_name = "tokenizer"

    train_file: list[str] | None = option(None, "Text: files, folders or globs, as for pre_train_t5.py.")
    dataset_name: str | None = option(None, "Or a saved `datasets` folder, a Hub name, or the built-in installed_docs.")
    dataset_config_name: str | None = option(None, "Configuration of the Hub data set.")
    text_column: str = option("text", "Column that holds the text in JSON, CSV, parquet and Hub data.")
    output_dir: str = option("out/tokenizer", "Folder to write; must be empty.")
    vocab_size: int = option(32_100, f"Words, {NUM_SENTINELS} sentinels included (T5: 32,100).")
    byte_fallback: bool = option(False, "Write unknown letters as bytes (256 words) instead of <unk>.")
    normalization: str = option("nmt_nfkc", "SentencePiece's rule: nmt_nfkc (T5's), nfkc, identity; *_cf lower-case.")
    character_coverage: float = option(
        0.9995, "Share of the text's letters that get a piece (0.9995 for large scripts)."
    )
    max_sentences: int = option(1_000_000, "Lines that SentencePiece samples from the text.")
    config_name: str | None = option(None, "Also write the config.json of this shape, with the tokenizer's vocabulary.")
    data_cache_dir: str = option("~/.cache/t5_foundry", "Where the built-in corpus is kept.")


def check_tokenizer(args: TokenizerArguments) -> PreTrainingDataArguments:
    """The same text as flags of pre-training; ValueError for what cannot work."""
    check_vocab_size(args.vocab_size)
    if not 0.9 <= args.character_coverage <= 1:
        raise ValueError(f"--character_coverage {args.character_coverage}: must lie between 0.9 and 1")
    if Path(args.output_dir).is_dir() and any(Path(args.output_dir).iterdir()):
        raise ValueError(f"--output_dir {args.output_dir} is not empty: name another folder")
    shared = ("train_file", "dataset_name", "dataset_config_name", "text_column", "data_cache_dir")
    data_args = PreTrainingDataArguments(**{name: getattr(args, name) for name in shared})
    check_pre_training_data(data_args)
    return data_args


def main(argv: list[str] | None = None) -> str:
    """Runs the script; returns the folder it wrote."""
    with exit_on_user_error():
        (args,) = parse_arguments([TokenizerArguments], argv)
        data_args = check_tokenizer(args)
        source = find_sources(data_args)["train"]
        if args.config_name:
            build_config(args.config_name)  # an unknown name is refused before the training
        train_tokenizer(
            source.documents(),
            Path(args.output_dir),
            args.vocab_size,
            args.byte_fallback,
            args.normalization,
            args.character_coverage,
            args.max_sentences,
        )
        tokenizer = load_tokenizer(args.output_dir)
        if args.config_name:
            build_config(args.config_name, len(tokenizer)).save_pretrained(args.output_dir)
    sample = next(text for text in source.documents() if text.strip())[:60]
    end_summary(
        {
            "text": source.description,
            "words": f"{len(tokenizer):,}, sentinels {tokenizer.convert_tokens_to_ids('<extra_id_0>')} downwards",
            "example": f"{sample!r} -> {' '.join(tokenizer.tokenize(sample))}",
            "written to": args.output_dir,
            "next": f"accelerate launch pre_train_t5.py --tokenizer_name {args.output_dir} --config_name mini ...",
        },
        title="tokenizer",
    )
    return args.output_dir


if __name__ == "__main__":
    main()
