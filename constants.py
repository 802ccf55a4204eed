"""Facts that the scripts share: model shapes, denoisers and the registry of tasks. Standard library only.

Adding a task is one more entry in `DATASET_VALS` and nothing else. The fields of an entry:

    prefix              first word(s) of the source text, as T5 writes it: "cola" -> "cola sentence: ..."
    inputs              {key in the source text: column}, in the order they are written; key "" writes the bare text
    target              the column that holds the answer
    target_type         "class" (one of `labels`), "number" (STS-B's rounding) or "text" (used as it is)
    labels              class names in class order (only for "class"); an integer in the data is an index into it
    metrics             names from tasks.metrics.METRICS; the first one decides which checkpoint is best
    hub                 (data set, configuration or None) on the Hugging Face Hub
    builtin             folder of the built-in English corpus (corpora/installed_docs.py) instead of `hub`
    files               {split: file below --data_dir, or a path}: .tsv .csv .json .jsonl .parquet, also compressed
    file_columns        {column: header name, or index where the file has no header}, where a file's names differ
    file_columns_by_split  the same for single splits
    exclude_rows        {split: {"file", "columns"}}: leave out the rows whose `columns` stand in that headerless file
    eval_splits         splits to report when there is more than "validation" (MNLI); the first is the main one
    test_splits         the same for prediction without labels; default "test"
    train_with          the task whose training rows this one borrows (AX has none of its own)
    transform           name from tasks.transforms.TRANSFORMS: makes each row out of a row of the data
    columns             the columns that the data must have, where a transform makes others out of them
    max_piece_length    the first of `columns` is running text, of whole books too: a row is a sentence-like piece of at
                        most so many characters; plain text files have a document on each line
    max_source_length, max_target_length   in tokens, EOS included
    submission_file     name inside the GLUE submission zip
"""

# ---------------------------------------------------------------- model shapes
# `--config_name` takes these names, or a folder/Hub name with a config.json. All use v1.1's gated GELU and untied head.
# Shapes of the published models: google/t5-v1_1-*; tiny and mini are ours, sized to be trained on a laptop's CPU.
MODEL_SHAPES = {
    "tiny": dict(d_model=128, d_kv=32, d_ff=320, num_heads=4, num_layers=2, num_decoder_layers=2),
    "mini": dict(d_model=320, d_kv=64, d_ff=768, num_heads=5, num_layers=4, num_decoder_layers=4),
    "t5-v1_1-small": dict(d_model=512, d_kv=64, d_ff=1024, num_heads=6, num_layers=8, num_decoder_layers=8),
    "t5-v1_1-base": dict(d_model=768, d_kv=64, d_ff=2048, num_heads=12, num_layers=12, num_decoder_layers=12),
    "t5-v1_1-large": dict(d_model=1024, d_kv=64, d_ff=2816, num_heads=16, num_layers=24, num_decoder_layers=24),
    "t5-v1_1-xl": dict(d_model=2048, d_kv=64, d_ff=5120, num_heads=32, num_layers=24, num_decoder_layers=24),
}
T5_VOCAB_SIZE = 32_128  # rows of the embedding when a built-in shape is used without a tokenizer of its own
VOCAB_SIZE_MULTIPLE = 64  # a tokenizer's size is rounded up to this, so that matrix units are fed whole tiles
NUM_SENTINELS = 100  # <extra_id_0> ... <extra_id_99>

# ---------------------------------------------------------------- hardware
# Dense matrix peaks in TFLOP/s from the makers' data sheets (H200: what a matrix product reached), for MFU. The first
# name that is part of the device's name counts.
HARDWARE_PEAKS = {
    "H200": dict(bf16=790.0, tf32=494.0),
    "H100": dict(bf16=989.0, tf32=494.0),
    "A100": dict(bf16=312.0, tf32=156.0),
    "L40S": dict(bf16=362.0, tf32=183.0),
    "RTX 4090": dict(bf16=165.0, tf32=82.6),
    "RTX 3090": dict(bf16=71.0, tf32=35.6),
}

# ---------------------------------------------------------------- denoising
# T5's base-line objective ("R" denoiser): share of tokens hidden, and mean length of a hidden span in tokens.
DENOISERS = {"span_corruption": dict(noise_density=0.15, mean_noise_span_length=3.0)}

# ---------------------------------------------------------------- learning rates
# Peaks used when `--learning_rate` is not given. Pre-training: nanoT5's for RMS scaling, T5's for Adafactor.
DEFAULT_LEARNING_RATES = {
    "pre_training": dict(adamw_rms_scaled=2e-2, adafactor=1e-2, adamw_torch=1e-3, adamw_torch_fused=1e-3),
    "fine_tuning": dict(adamw_rms_scaled=1e-2, adafactor=1e-3, adamw_torch=3e-4, adamw_torch_fused=3e-4),
}

# ---------------------------------------------------------------- the built-in corpus
BUILTIN_CORPUS = "installed_docs"  # `--dataset_name` of the offline default, made by corpora/installed_docs.py

# Labels of its task builtin/package_topic: the packages that requirements.txt brings in with the most prose.
PACKAGE_TOPIC_LABELS = tuple("matplotlib networkx nltk numpy pandas scipy sklearn sympy torch transformers".split())
# Where fine_tune_t5.py looks for a model when none is named: what pre_train_t5.py and `make demo` write by default.
DEMO_CHECKPOINTS = ("out/pre_train_t5", "out/demo/pre_train")

# ---------------------------------------------------------------- tasks
_SENTENCE = {"sentence": "sentence"}
_SENTENCE_PAIR = {"sentence1": "sentence1", "sentence2": "sentence2"}


def _tsv(folder: str, **other: str) -> dict[str, str]:
    """Files of the official GLUE layout: _tsv("CoLA")["validation"] -> "CoLA/dev.tsv"."""
    names = {"train": "train.tsv", "validation": "dev.tsv", "test": "test.tsv"} | other
    return {split: f"{folder}/{name}" for split, name in names.items()}


def _restoring(transform: str, **other) -> dict:
    """The text without diacritics -> the text. 200 characters of Romanian are some 70 tokens of mT5, at most 256."""
    return dict(
        inputs={"": "plain"},
        target="text",
        target_type="text",
        metrics=["word_accuracy", "exact_match", "diacritic_error_rate"],
        transform=transform,
        columns=["text"],
        max_piece_length=200,
        max_source_length=256,
        max_target_length=256,
        **other,
    )


DATASET_VALS = {
    # The texts are T5's own (prefix, keys, label words); the class order is the one of nyu-mll/glue.
    "glue": {
        "cola": dict(
            prefix="cola",
            inputs=_SENTENCE,
            target="label",
            target_type="class",
            labels=["unacceptable", "acceptable"],
            metrics=["matthews_correlation", "accuracy"],
            hub=("nyu-mll/glue", "cola"),
            files=_tsv("CoLA"),
            file_columns={"label": 1, "sentence": 3},  # train and dev have no header line
            file_columns_by_split={"test": {"sentence": "sentence"}},
            max_source_length=128,
            max_target_length=8,
            submission_file="CoLA.tsv",
        ),
        "sst2": dict(
            prefix="sst2",
            inputs=_SENTENCE,
            target="label",
            target_type="class",
            labels=["negative", "positive"],
            metrics=["accuracy"],
            hub=("nyu-mll/glue", "sst2"),
            files=_tsv("SST-2"),
            max_source_length=128,
            max_target_length=8,
            submission_file="SST-2.tsv",
        ),
        "mrpc": dict(
            prefix="mrpc",
            inputs=_SENTENCE_PAIR,
            target="label",
            target_type="class",
            labels=["not_equivalent", "equivalent"],
            metrics=["f1", "accuracy"],
            hub=("nyu-mll/glue", "mrpc"),
            # GLUE's own train.tsv lacks a row: the original file without the pairs of dev_ids.tsv is the training set.
            files=_tsv("MRPC", train="msr_paraphrase_train.txt"),
            file_columns={"label": "Quality", "sentence1": "#1 String", "sentence2": "#2 String"},
            exclude_rows={"train": {"file": "MRPC/dev_ids.tsv", "columns": ["#1 ID", "#2 ID"]}},
            max_source_length=256,
            max_target_length=8,
            submission_file="MRPC.tsv",
        ),
        "qqp": dict(
            prefix="qqp",
            inputs={"question1": "question1", "question2": "question2"},
            target="label",
            target_type="class",
            labels=["not_duplicate", "duplicate"],
            metrics=["f1", "accuracy"],
            hub=("nyu-mll/glue", "qqp"),
            files=_tsv("QQP"),
            file_columns={"label": "is_duplicate"},
            max_source_length=256,
            max_target_length=8,
            submission_file="QQP.tsv",
        ),
        "stsb": dict(
            prefix="stsb",
            inputs=_SENTENCE_PAIR,
            target="label",
            target_type="number",
            metrics=["pearson", "spearman"],
            hub=("nyu-mll/glue", "stsb"),
            files=_tsv("STS-B"),
            file_columns={"label": "score"},
            max_source_length=256,
            max_target_length=8,
            submission_file="STS-B.tsv",
        ),
        "mnli": dict(
            prefix="mnli",
            inputs={"hypothesis": "hypothesis", "premise": "premise"},
            target="label",
            target_type="class",
            labels=["entailment", "neutral", "contradiction"],
            metrics=["accuracy"],
            hub=("nyu-mll/glue", "mnli"),
            files={
                "train": "MNLI/train.tsv",
                "validation_matched": "MNLI/dev_matched.tsv",
                "validation_mismatched": "MNLI/dev_mismatched.tsv",
                "test_matched": "MNLI/test_matched.tsv",
                "test_mismatched": "MNLI/test_mismatched.tsv",
            },
            file_columns={"premise": "sentence1", "hypothesis": "sentence2", "label": "gold_label"},
            eval_splits=["validation_matched", "validation_mismatched"],
            test_splits=["test_matched", "test_mismatched"],
            max_source_length=256,
            max_target_length=8,
            submission_file={"test_matched": "MNLI-m.tsv", "test_mismatched": "MNLI-mm.tsv"},
        ),
        "qnli": dict(
            prefix="qnli",
            inputs={"question": "question", "sentence": "sentence"},
            target="label",
            target_type="class",
            labels=["entailment", "not_entailment"],
            metrics=["accuracy"],
            hub=("nyu-mll/glue", "qnli"),
            files=_tsv("QNLI"),
            max_source_length=256,
            max_target_length=8,
            submission_file="QNLI.tsv",
        ),
        "rte": dict(
            prefix="rte",
            inputs=_SENTENCE_PAIR,
            target="label",
            target_type="class",
            labels=["entailment", "not_entailment"],
            metrics=["accuracy"],
            hub=("nyu-mll/glue", "rte"),
            files=_tsv("RTE"),
            max_source_length=256,
            max_target_length=8,
            submission_file="RTE.tsv",
        ),
        "wnli": dict(
            prefix="wnli",
            inputs=_SENTENCE_PAIR,
            target="label",
            target_type="class",
            labels=["not_entailment", "entailment"],
            metrics=["accuracy"],
            hub=("nyu-mll/glue", "wnli"),
            files=_tsv("WNLI"),
            max_source_length=256,
            max_target_length=8,
            submission_file="WNLI.tsv",
        ),
        # The diagnostic set has no training rows and no public labels: it is answered by a model trained on MNLI.
        "ax": dict(
            prefix="mnli",
            inputs={"hypothesis": "hypothesis", "premise": "premise"},
            target="label",
            target_type="class",
            labels=["entailment", "neutral", "contradiction"],
            metrics=["accuracy"],
            hub=("nyu-mll/glue", "ax"),
            files={"test": "diagnostic/diagnostic.tsv"},
            file_columns={"premise": "sentence1", "hypothesis": "sentence2"},
            train_with="mnli",
            max_source_length=256,
            max_target_length=8,
            submission_file="AX.tsv",
        ),
    },
    # Made from the documentation of the installed packages: real English tasks that need no download.
    "builtin": {
        "package_topic": dict(
            prefix="package",
            inputs={"text": "text"},
            target="label",
            target_type="class",
            labels=list(PACKAGE_TOPIC_LABELS),
            metrics=["accuracy", "f1_macro"],
            builtin="package_topic",
            max_source_length=128,
            max_target_length=8,
        ),
        "docstring_summary": dict(
            prefix="summarize",
            inputs={"": "text"},
            target="summary",
            target_type="text",
            metrics=["rougeL", "rouge1", "rouge2"],
            builtin="docstring_summary",
            max_source_length=256,
            max_target_length=48,
        ),
    },  # Made from plain text in any language: --train_file names the text.
    "text": {
        "restore_diacritics": _restoring("restore_diacritics"),
        # With Romanian's legacy letters mended, and Wikipedia as the text where none is named.
        "restore_romanian_diacritics": _restoring(
            "restore_romanian_diacritics", hub=("wikimedia/wikipedia", "20231101.ro")
        ),
    },
}
