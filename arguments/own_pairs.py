"""A user's own pairs: the flags that describe them become an entry as in DATASET_VALS (constants.py).

--train_file pairs.jsonl --source_column prompt --target_column completion --source_prefix "summarize: "
-> dict(prefix="summarize", inputs={"": "prompt"}, target="completion", files={"train": "pairs.jsonl"}, ...)
"""

from typing import Any

from common.command_line import comma_words, home_path
from corpora.files import ROW_SUFFIXES, TEXT_SUFFIXES, data_suffix, expand_files

OWN = "pairs"  # the task's name, in --dataset_name and before its metrics in a mixture
HELD_OUT = 5.0  # percent of the training rows, where no validation rows are named
# {shape of records: (columns that tell it, fields of the entry)}.
SHAPES = {
    "natural_instructions_2": ("Definition Instances", dict(preprocess="natural_instructions_2")),
    "alpaca": ("instruction output", dict(preprocess="alpaca")),
    "pretokenized": ("inputs_pretokenized targets_pretokenized", dict()),  # P3, of which T0 was made
    "prompt_completion": ("prompt completion", dict()),
    "inputs_targets": ("inputs targets", dict()),  # FLAN
}
SHAPES |= {  # with another number of worked examples than the two of Tk-Instruct
    f"natural_instructions_{n}": ("Definition Instances", dict(preprocess=f"natural_instructions_{n}"))
    for n in (0, 1, 3, 4)
}
_METRICS = {"class": ["accuracy", "f1_macro"], "number": ["pearson", "spearman"], "text": ["rougeL", "bleu"]}
_LENGTHS = {"class": (512, 8), "number": (512, 8), "text": (512, 128)}
SOURCES = ("train_file", "source_file", "hub_dataset", "validation_file", "validation_source_file")
_DESCRIBING = (
    "source_column target_column source_prefix target_type labels metrics record_shape records skip_rows_where "
    "source_file target_file validation_source_file validation_target_file hub_dataset hub_config "
    "validation_split_percentage"
).split()


# `args` are TaskArguments, whose module imports this one.
def names_own_pairs(args: Any) -> bool:
    """Whether the flags name pairs that no entry of DATASET_VALS describes."""
    alone = args.benchmark is None and args.dataset_name is None and any(getattr(args, flag) for flag in SOURCES)
    described = any(getattr(args, flag) not in (None, []) for flag in _DESCRIBING)
    return alone or described or OWN in comma_words(args.dataset_name or "")


def has_training_rows(args: Any) -> bool:
    """Whether the flags name rows to train on."""
    return bool(args.train_file or args.source_file or args.hub_dataset)


def has_validation_files(args: Any) -> bool:
    """Whether the flags name files to evaluate on."""
    return bool(args.validation_file or args.validation_source_file)


def check_own_pairs(args: Any) -> None:
    """ValueError for contradictions among the flags of own pairs, and for missing files."""
    if not any(getattr(args, flag) for flag in SOURCES):
        flag = next((name for name in _DESCRIBING if getattr(args, name) not in (None, [])), None)
        named = f"--{flag} describes pairs of your own: name them" if flag else f"--dataset_name {OWN}: name your pairs"
        raise ValueError(f"{named} with --train_file, --source_file and --target_file, or --hub_dataset")
    sources = [flag for flag in ("train_file", "source_file", "hub_dataset") if getattr(args, flag)]
    if len(sources) > 1:
        raise ValueError(f"--{sources[0]} and --{sources[1]} exclude each other: name one source of training rows")
    side_by_side = [_check_parallel(args, prefix) for prefix in ("", "validation_")]
    for one, other in (("source_column", "target_column"), ("target_column", "source_column")):
        if getattr(args, one) and not getattr(args, other):
            raise ValueError(f"--{one} {','.join(getattr(args, one))} goes with --{other}")
    for flag in ("source_column", "record_shape"):
        if getattr(args, flag) and any(side_by_side):
            raise ValueError(f"--{flag}: files side by side (--source_file) have no columns")
    if args.record_shape and args.source_column:
        raise ValueError(f"--record_shape {args.record_shape} says the columns itself: leave out --source_column")
    if args.hub_config and not args.hub_dataset:
        raise ValueError(f"--hub_config {args.hub_config} goes with --hub_dataset")
    if args.labels and args.target_type not in (None, "class"):
        raise ValueError(f"--labels goes with --target_type class, not {args.target_type}")
    for flag in ("train_file", "validation_file"):
        for file in expand_files(f"--{flag}", getattr(args, flag) or [], ROW_SUFFIXES):
            if data_suffix(file) not in ROW_SUFFIXES:
                raise ValueError(f"--{flag} {file}: pairs are read from files that end in one of "
                                 f"{' '.join(ROW_SUFFIXES)} (and .gz, .xz ...); of text side by side give "
                                 "--source_file and --target_file")  # fmt: skip
    has_validation = has_validation_files(args)
    if has_validation and args.hub_dataset:
        raise ValueError("--hub_dataset brings its own validation rows: leave out the files, or hold some out with "
                         "--validation_split_percentage")  # fmt: skip
    if has_validation and args.validation_split_percentage:
        raise ValueError(f"--validation_split_percentage {args.validation_split_percentage:g}: there are validation "
                         "files already")  # fmt: skip
    if args.streaming and (args.validation_split_percentage or not (has_validation or args.hub_dataset)):
        raise ValueError("--streaming: pairs of your own need --validation_file, since a stream is not read twice")


def complete_own_pairs(args: Any) -> None:
    """Sets --validation_split_percentage where files are named without validation rows."""
    named = (args.train_file or args.source_file) and not has_validation_files(args)
    if named and args.validation_split_percentage is None:
        args.validation_split_percentage = HELD_OUT


def _check_parallel(args, prefix: str) -> bool:
    """Whether files side by side are named. ValueError unless as many sources as targets."""
    flags = [f"{prefix}source_file", f"{prefix}target_file"]
    files = [expand_files(f"--{flag}", getattr(args, flag) or [], TEXT_SUFFIXES) for flag in flags]
    if len(files[0]) != len(files[1]):
        raise ValueError(f"--{flags[0]} names {len(files[0])} files and --{flags[1]} {len(files[1])}: give the two "
                         "sides of each pair of files")  # fmt: skip
    return bool(files[0])


def own_entry(args: Any) -> dict:
    """The entry that the flags describe; without `inputs` if they name neither columns nor a shape of records."""
    kind = args.target_type or ("class" if args.labels else "text")
    source_length, target_length = _LENGTHS[kind]
    entry = dict(prefix=prefix_of(args.source_prefix), **_columns(args), target_type=kind, labels=args.labels)
    entry |= dict(metrics=args.metrics or _METRICS[kind], records=args.records, skip_where=_skipped(args))
    entry |= dict(hub=(args.hub_dataset, args.hub_config) if args.hub_dataset else None, files=_files(args) or None)
    entry |= dict(held_out=args.validation_split_percentage)
    entry |= dict(max_source_length=args.max_source_length or source_length)
    entry |= dict(max_target_length=args.max_target_length or target_length)
    return {field: value for field, value in entry.items() if value not in (None, {}, [])}


def prefix_of(text: str | None) -> str | None:
    """The prefix of an entry: "summarize: " -> "summarize", written with a colon; "TL;DR " -> "TL;DR ", as it is."""
    return text.rstrip(" ").removesuffix(":") if text and text.rstrip(" ").endswith(":") else text or None


def _columns(args) -> dict:
    """inputs, target, file_columns and preprocess of the entry; {} if only the rows tell them."""
    if args.source_file or args.validation_source_file:
        return dict(inputs={"": "source"}, target="target")
    if args.record_shape:
        columns, fields = SHAPES[args.record_shape]
        source, target = ("source", "target") if fields else columns.split()
        return dict(inputs={"": source}, target=target, **fields)
    if not args.source_column:
        return {}
    # A number is the index of a column in a .tsv without header line.
    names = {column: f"column_{column}" if column.isdecimal() else column for column in args.source_column}
    renamed = {names[column]: int(column) for column in names if column.isdecimal()}
    inputs = {"" if len(names) == 1 else name: name for name in names.values()}
    target = args.target_column[0]
    if len(args.target_column) > 1:
        target, renamed["target"] = "target", [int(c) if c.isdecimal() else c for c in args.target_column]
    elif target.isdecimal():
        target, renamed["target"] = "target", int(target)
    return dict(inputs=inputs, target=target, file_columns=renamed)


def _files(args) -> dict:
    """{split: file or files}, of files side by side {split: {"source": ..., "target": ...}}; absolute paths if
    --data_dir is set, for other tasks."""

    def one(paths: list[str]) -> str | list[str]:
        shown = [str(home_path(path).absolute()) if args.data_dir else path for path in paths]
        return shown[0] if len(shown) == 1 else shown

    found = {
        "train": (args.train_file, args.source_file, args.target_file),
        "validation": (args.validation_file, args.validation_source_file, args.validation_target_file),
    }
    sides = {split: {"source": one(s), "target": one(t)} for split, (_, s, t) in found.items() if s}
    return {split: one(rows) for split, (rows, _, _) in found.items() if rows} | sides


def _skipped(args) -> dict[str, list[str]]:
    """["label=-", "label="] -> {"label": ["-", ""]}."""
    skipped = {}
    for word in args.skip_rows_where or []:
        column, equals, value = word.partition("=")
        if not equals or not column:
            raise ValueError(f"--skip_rows_where {word}: must be COLUMN=VALUE, such as label=-")
        skipped.setdefault(column, []).append(value)
    return skipped
