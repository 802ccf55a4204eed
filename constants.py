"""What the scripts share: model shapes, denoisers, default rates and the registry of tasks. Standard library only.

Adding a task is one more entry in `DATASET_VALS` and nothing else (docs/experiments.md). The fields of an entry:

    prefix              first word(s) of the source text, as T5 writes it: "cola" -> "cola sentence: ..."; a prefix that
                        ends in white space is written unchanged
    inputs              {key in the source text: column}, in the order they are written; key "" writes the bare text. Or
                        a function of a row that returns the text
    target              the column that holds the answer; a list of texts holds several references: each becomes a
                        training row, evaluation counts the best. Any column may be dotted: translation.en, answers.text
    target_type         "class" (one of `labels`), "number" (rounded as `numbers` says) or "text" (unchanged)
    labels              class names in class order (only for "class"); a whole number in the data is an index into it,
                        unless a name is a number: then numbers are compared as numbers
    ordered_labels      False: `labels` are not in class order, and a whole number in the data is an error
    positive_label      the class that f1 measures, where there are two; not set: the second of `labels`
    numbers             {"step": what numbers are rounded to, "least", "most": their range}; not set: as the training
                        rows have them. An answer that is no number counts as the end of the range that is farther from
                        the row's number, or as the number in "unreadable"
    metrics             names in METRICS of tasks/metrics/scoring.py; the first one chooses the best checkpoint. Any
                        other name, or a folder, is loaded with evaluate.load, which runs its code. Or {name: a function
                        of (predictions, references) that returns a number, None for a name that is known}
    metric_columns      further columns that a metric reads (question_exact_match, referent_accuracy)
    tokenize            a function of (tokenizer, row) that returns {"input_ids": [...], "labels": [...]}, in place of
                        tokenising the texts; they end in EOS if the function writes one
    max_source_length, max_target_length   in tokens, EOS included
    hub                 (data set, configuration or None) on the Hugging Face Hub
    builtin             folder of the built-in English corpus (tools/installed_docs.py) instead of `hub`
    files               {split: file below --data_dir, or a path}: .tsv .csv .json .jsonl .parquet, also compressed, a
                        folder, a pattern or a list; or {split: {column: text file}}, parallel files
    file_columns        {column: header name, or index where a file has no header line}, where a file's names differ;
                        with a list of names the column holds all their non-empty values: several references
    records             field that holds the rows of a nested record, such as data.qas; * is any. A row keeps the fields
                        around it
    preprocess          for what cannot be declared: a function of a record that returns a row or a list of rows; a name
                        in tasks.transforms.TRANSFORMS, or the function itself
    skip_where          {column: values}: rows to leave out of every split, an empty cell being ""
    held_out            percent of the training rows to validate on, unless --validation_file names validation rows
    train_without       {column: values}: rows to leave out of training only; or the name of a split: its rows are left
                        out of a training file that repeats them
    train_with          the task whose checkpoint answers this one (AX has no training rows of its own)
    merge_references    True: evaluation rows with the same source become one, with all their references
    max_piece_length    the column text is running text, also whole books: a row is a sentence-like piece of at most
                        this many characters; plain text files have a document on each line
    eval_splits         splits to report when there is more than "validation" (MNLI); the first is the main one
    preference          {"kind", "beta", "gamma"}: answers are compared, by a loss of features/preferences/losses.py
    rejected            with a preference, the column of an answer that is worse than the target
    desirable           with the preference kto, the column that says whether the target is a good answer
    reward              a function of (predictions, references, rows) that returns a number for each row, for --reward
                        entry
    columns             {column: "answer", "answers", "number" or "boolean"}: kept beside a row's tokens for the loss of
                        a feature; an answer is tokenised as the target is, and of answers a row may have none
    submission_file     name inside the GLUE submission zip
"""

from typing import Any

VERSION = "0.1.0"  # of T5 Foundry: run.json, model cards and pyproject.toml take it from here; CITATION.cff repeats it

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
    "t5-v1_1-xxl": dict(d_model=4096, d_kv=64, d_ff=10240, num_heads=64, num_layers=24, num_decoder_layers=24),
}
T5_VOCAB_SIZE = 32_128  # rows of the embedding when a built-in shape is used without a tokenizer of its own
VOCAB_SIZE_MULTIPLE = 64  # a tokenizer's size is rounded up to a multiple of this, so that matrix units get whole tiles
# `--attn_implementation`: transformers' two that are correct for T5 (flex_attention is not).
ATTENTION_IMPLEMENTATIONS = ("eager", "sdpa")
NUM_SENTINELS = 100  # <extra_id_0> ... <extra_id_99>
LEAST_VOCAB_SIZE = NUM_SENTINELS + 5  # of a new tokenizer: also <pad>, </s>, <unk>, the mark of a space, one letter
IGNORE_INDEX = -100  # labels that no loss and no metric counts
# Entries of a checkpoint's JSON files that name code beside it. It is never run, and nothing that is saved names it.
CODE_ENTRIES = ("auto_map", "custom_pipelines", "trust_remote_code")


# ---------------------------------------------------------------- hardware
# From the makers' data sheets: dense matrix peaks in TFLOP/s for MFU, and the memory in GB. For plans, GB/s of the
# memory, of a GPU's links within a machine in one direction (NVLink, else PCIe x16) and of its network card (200 and
# 400 Gb/s in DGX A100 and H100/H200; 100 Gb/s assumed for the others). Below compute capability 8 there is neither bf16
# nor TF32: both peaks are float32's. A device has the first entry whose key occurs in the device's name and is not
# followed by a digit there.
def _gpu(
    bf16: float,
    tf32: float,
    memory_gb: float,
    memory_gb_per_second: float,
    link_gb_per_second: float,
    network_gb_per_second: float,
    capability: float,
) -> dict[str, float]:
    return dict(locals())


HARDWARE_PEAKS = {
    "H200": _gpu(989.0, 494.0, 141, 4800, 450, 50, 9.0),
    "H100": _gpu(989.0, 494.0, 80, 3350, 450, 50, 9.0),
    "A100": _gpu(312.0, 156.0, 80, 2039, 300, 25, 8.0),
    "L40S": _gpu(362.0, 183.0, 48, 864, 32, 12.5, 8.9),
    "RTX 4090": _gpu(165.0, 82.6, 24, 1008, 32, 12.5, 8.9),
    "RTX 3090": _gpu(71.0, 35.6, 24, 936, 32, 12.5, 8.6),
    "L4": _gpu(121.0, 60.0, 24, 300, 32, 12.5, 8.9),
    "T4": _gpu(8.1, 8.1, 16, 320, 16, 12.5, 7.5),
}

# ---------------------------------------------------------------- denoising
# noise_density           share of tokens masked
# mean_noise_span_length  mean length of a masked span in tokens; without it the denoiser masks the end of the text, of
#                         a random length: uniform between 1 and what gives `noise_density` on average (prefix LM)
# sentinels               False: no sentinel stands for the masked end (T5's prefix LM)
# mode                    text at the beginning of the input; a new model gets a token for it
DENOISERS: dict[str, dict] = {
    "span_corruption": dict(noise_density=0.15, mean_noise_span_length=3.0),  # T5's base line
    "prefix_lm": dict(noise_density=0.5, sentinels=False),  # T5's prefix LM
    # UL2 (Tay et al. 2022, table 1): R denoisers, X denoisers (long spans or much masked), and the S denoiser, which is
    # T5's prefix LM in the code of its appendix 9.2, and has no sentinel in google/ul2's answers either.
    "ul2_r_span3": dict(noise_density=0.15, mean_noise_span_length=3.0, mode="[NLU]"),
    "ul2_r_span8": dict(noise_density=0.15, mean_noise_span_length=8.0, mode="[NLU]"),
    "ul2_x_span3": dict(noise_density=0.5, mean_noise_span_length=3.0, mode="[NLG]"),
    "ul2_x_span8": dict(noise_density=0.5, mean_noise_span_length=8.0, mode="[NLG]"),
    "ul2_x_span64": dict(noise_density=0.15, mean_noise_span_length=64.0, mode="[NLG]"),
    "ul2_x_span64_half": dict(noise_density=0.5, mean_noise_span_length=64.0, mode="[NLG]"),
    "ul2_s": dict(noise_density=0.25, sentinels=False, mode="[S2S]"),
}
# `--objective`: {denoiser: weight}, the weight being its share of all input tokens (they need not add up to 1).
OBJECTIVES = {
    "span_corruption": {"span_corruption": 1.0},
    "prefix_lm": {"prefix_lm": 1.0},
    "ul2": {name: 1.0 for name in DENOISERS if name.startswith("ul2_")},
}

# ---------------------------------------------------------------- optimizer, learning rate and schedule
# A job's defaults for flags that are not given; docs/defaults.md has the source and scale of each value. All optimizers
# but torch's AdamW scale a tensor's step by its RMS, which is near 0.05 in a matrix of T5: hence AdamW's lower rates.
# warmup_steps below 1 is a share of the run: nanoT5's 10,000 of 65,536. Without `dropout` it is the checkpoint's.
OPTIMIZERS = ("adamw_rms_scaled", "adamw_torch", "adamw_torch_fused", "adafactor", "muon")
DEFAULT_OPTIMIZER = OPTIMIZERS[0]
# ZeRO gives an optimizer flat slices of the weights, which have no row and column means for Adafactor and no matrix
# products for Muon. RMS-scaled AdamW needs the RMS of a whole tensor, which every rank has under ZeRO-1 and 2, not 3.
NOT_UNDER_ZERO = {1: ("adafactor", "muon"), 2: ("adafactor", "muon"), 3: ("adafactor", "muon", "adamw_rms_scaled")}
# FSDP2 gives the norm of a whole tensor, but not Adafactor's row and column means; Muon is not tested with it.
NOT_UNDER_FSDP = ("adafactor", "muon")
_CHECKPOINT_RATES = dict(adamw_rms_scaled=1e-3, adafactor=1e-3, muon=1e-3, adamw_torch=1e-4, adamw_torch_fused=1e-4)
TRAINING_DEFAULTS = {
    "pre-training from scratch": dict(
        learning_rate=dict(adamw_rms_scaled=2e-2, adafactor=2e-2, muon=2e-2, adamw_torch=1e-3, adamw_torch_fused=1e-3),
        lr_scheduler_type="cosine",
        learning_rate_batch=128,
        warmup_steps=10_000 / 65_536,
        dropout=0.0,
    ),
    "continued pre-training": dict(
        learning_rate=_CHECKPOINT_RATES,
        learning_rate_batch=128,
        lr_scheduler_type="constant",
        warmup_steps=10_000 / 65_536,
        dropout=0.0,
    ),
    "fine-tuning a checkpoint": dict(
        learning_rate=_CHECKPOINT_RATES, learning_rate_batch=32, lr_scheduler_type="constant", warmup_steps=0.05
    ),
    "fine-tuning from scratch": dict(
        learning_rate=dict(adamw_rms_scaled=1e-2, adafactor=1e-3, muon=1e-2, adamw_torch=3e-4, adamw_torch_fused=3e-4),
        learning_rate_batch=32,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
    ),
}
# In TRL the default rate for preferences, 1e-6, is a twentieth of that for fine-tuning, 2e-5. The reference of a
# preference runs without dropout: with it even a model equal to the reference would have rewards. So are answers drawn.
TRAINING_DEFAULTS["learning preferences"] = TRAINING_DEFAULTS["fine-tuning a checkpoint"] | dict(
    learning_rate={optim: rate / 20 for optim, rate in _CHECKPOINT_RATES.items()}, dropout=0.0
)
# LoRA's matrices B begin at 0, where steps scaled by a tensor's RMS are smallest: torch's AdamW is the default.
LORA = " with LoRA"
_LORA_RATES = dict(adamw_rms_scaled=2e-2, adafactor=2e-2, muon=2e-2, adamw_torch=1e-3, adamw_torch_fused=1e-3)
for _job in ("continued pre-training", "fine-tuning a checkpoint"):
    TRAINING_DEFAULTS[_job + LORA] = TRAINING_DEFAULTS[_job] | dict(optim="adamw_torch", learning_rate=_LORA_RATES)
TRAINING_DEFAULTS["learning preferences" + LORA] = TRAINING_DEFAULTS["learning preferences"] | dict(
    optim="adamw_torch", learning_rate={optim: rate / 20 for optim, rate in _LORA_RATES.items()}
)

for _job in ("learning preferences", "learning preferences" + LORA):
    TRAINING_DEFAULTS[_job.replace("preferences", "from rewards")] = TRAINING_DEFAULTS[_job]

PRE_TRAINED, FINE_TUNED = "out/pre_train_t5", "out/fine_tune_t5"  # what trainings write, and other scripts read
PREEMPTED_EXIT_CODE = 75  # a signal or its time limit stopped the run: the same command resumes it
TASK_RECORD = "task.json"  # in the folder of a fine-tuned model: what repeats its evaluation (tasks/task_records.py)

# ---------------------------------------------------------------- the built-in corpus
BUILTIN_CORPUS = "installed_docs"  # `--dataset_name` of the offline default, made by tools/installed_docs.py

# Labels of its task builtin/package_topic: the packages that requirements.txt brings in with the most prose.
PACKAGE_TOPIC_LABELS = ("matplotlib", "networkx", "nltk", "numpy", "pandas", "scipy", "sklearn", "sympy", "torch")
PACKAGE_TOPIC_LABELS += ("transformers",)
# Where fine_tune_t5.py looks for a model if none is named: what pre_train_t5.py and `make demo` write by default.
DEMO_CHECKPOINTS = (PRE_TRAINED, "out/demo/pre_train")


# ---------------------------------------------------------------- metrics
# The best checkpoint has the highest value of a metric in the first list, the lowest of one in the second. The metrics
# are ours and those of `evaluate.load`. A main metric in neither list needs --greater_is_better.
GREATER_IS_BETTER = {
    # of classes, of numbers, of texts, of features
    *("accuracy", "f1", "f1_macro", "matthews_correlation", "question_exact_match"),
    *("pearson", "spearman"),
    *("exact_match", "word_accuracy", "token_accuracy", "final_number_accuracy", "referent_accuracy"),
    *("bleu", "chrf", "chrf++", "rouge1", "rouge2", "rougeL", "rougeLsum", "squad_exact_match", "squad_f1"),
    *("preference_accuracy", "reward_margin", "chosen_log_probability"),
    *("mrr_at_10", "recall_at_10", "text_token_accuracy"),
    # of `evaluate`
    *("bertscore", "bleurt", "comet", "competition_math", "frugalscore", "google_bleu", "mauve", "meteor"),
    *("nist_mt", "pearsonr", "precision", "r_squared", "recall", "roc_auc", "rouge", "sacrebleu", "sari"),
    *("spearmanr", "xnli"),
}
SMALLER_IS_BETTER = {
    *("loss", "perplexity", "bits_per_byte", "nats_per_id", "preference_loss"),
    *("token_error_rate", "sequence_error_rate", "diacritic_error_rate", "ter"),
    *("invalid_outputs", "non_canonical_outputs"),
    # of `evaluate`
    *("brier_score", "cer", "character", "charcut_mt", "mae", "mape", "mase", "mse", "rmse", "smape", "wer"),
}
PERCENT_METRICS = ("bleu", "sacrebleu", "chrf", "chrf++", "ter", "sari")  # 0..100, all others 0..1


# ---------------------------------------------------------------- tasks
DATASET_VALS: dict[str, dict[str, dict]] = {}


def _classes(**fields: Any) -> dict:
    """The entry of a task whose column `label` is one of its labels; fields that it does not name are as in most."""
    usual = dict(target="label", target_type="class", metrics=["accuracy"], max_source_length=256, max_target_length=8)
    return usual | fields


# The texts are T5's own (prefix, keys, label words); the class order is the one of nyu-mll/glue. The files are those of
# the official folders.
DATASET_VALS["glue"] = {
    "cola": _classes(
        prefix="cola",
        inputs={"sentence": "sentence"},
        labels=["unacceptable", "acceptable"],
        metrics=["matthews_correlation", "accuracy"],
        max_source_length=128,
        file_columns={"label": 1, "sentence": 3},  # train and dev have no header line
        hub=("nyu-mll/glue", "cola"),
        files={"train": "CoLA/train.tsv", "validation": "CoLA/dev.tsv", "test": "CoLA/test.tsv"},
        submission_file="CoLA.tsv",
    ),
    "sst2": _classes(
        prefix="sst2",
        inputs={"sentence": "sentence"},
        labels=["negative", "positive"],
        max_source_length=128,
        hub=("nyu-mll/glue", "sst2"),
        files={"train": "SST-2/train.tsv", "validation": "SST-2/dev.tsv", "test": "SST-2/test.tsv"},
        submission_file="SST-2.tsv",
    ),
    "mrpc": _classes(
        prefix="mrpc",
        inputs={"sentence1": "sentence1", "sentence2": "sentence2"},
        labels=["not_equivalent", "equivalent"],
        metrics=["f1", "accuracy"],
        file_columns={"label": "Quality", "sentence1": "#1 String", "sentence2": "#2 String"},
        # GLUE's own train.tsv lacks a row: the original file without the rows of dev.tsv is the training set.
        train_without="validation",
        hub=("nyu-mll/glue", "mrpc"),
        files={"train": "MRPC/msr_paraphrase_train.txt", "validation": "MRPC/dev.tsv", "test": "MRPC/test.tsv"},
        submission_file="MRPC.tsv",
    ),
    "qqp": _classes(
        prefix="qqp",
        inputs={"question1": "question1", "question2": "question2"},
        labels=["not_duplicate", "duplicate"],
        metrics=["f1", "accuracy"],
        file_columns={"label": "is_duplicate"},
        hub=("nyu-mll/glue", "qqp"),
        files={"train": "QQP/train.tsv", "validation": "QQP/dev.tsv", "test": "QQP/test.tsv"},
        submission_file="QQP.tsv",
    ),
    "stsb": dict(
        prefix="stsb",
        inputs={"sentence1": "sentence1", "sentence2": "sentence2"},
        target="label",
        target_type="number",
        numbers={"step": 0.2, "least": 0, "most": 5, "unreadable": -1},  # as in T5's code
        metrics=["pearson", "spearman"],
        max_source_length=256,
        max_target_length=8,
        file_columns={"label": "score"},
        hub=("nyu-mll/glue", "stsb"),
        files={"train": "STS-B/train.tsv", "validation": "STS-B/dev.tsv", "test": "STS-B/test.tsv"},
        submission_file="STS-B.tsv",
    ),
    "mnli": _classes(
        prefix="mnli",
        inputs={"hypothesis": "hypothesis", "premise": "premise"},
        labels=["entailment", "neutral", "contradiction"],
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
        submission_file={"test_matched": "MNLI-m.tsv", "test_mismatched": "MNLI-mm.tsv"},
    ),
    "qnli": _classes(
        prefix="qnli",
        inputs={"question": "question", "sentence": "sentence"},
        labels=["entailment", "not_entailment"],
        hub=("nyu-mll/glue", "qnli"),
        files={"train": "QNLI/train.tsv", "validation": "QNLI/dev.tsv", "test": "QNLI/test.tsv"},
        submission_file="QNLI.tsv",
    ),
    "rte": _classes(
        prefix="rte",
        inputs={"sentence1": "sentence1", "sentence2": "sentence2"},
        labels=["entailment", "not_entailment"],
        hub=("nyu-mll/glue", "rte"),
        files={"train": "RTE/train.tsv", "validation": "RTE/dev.tsv", "test": "RTE/test.tsv"},
        submission_file="RTE.tsv",
    ),
    "wnli": _classes(
        prefix="wnli",
        inputs={"sentence1": "sentence1", "sentence2": "sentence2"},
        labels=["not_entailment", "entailment"],
        hub=("nyu-mll/glue", "wnli"),
        files={"train": "WNLI/train.tsv", "validation": "WNLI/dev.tsv", "test": "WNLI/test.tsv"},
        submission_file="WNLI.tsv",
    ),
    # The diagnostic set has no training rows and no public labels: it is answered by a model trained on MNLI.
    "ax": _classes(
        prefix="mnli",
        inputs={"hypothesis": "hypothesis", "premise": "premise"},
        labels=["entailment", "neutral", "contradiction"],
        hub=("nyu-mll/glue", "ax"),
        train_with="mnli",
        files={"test": "diagnostic/diagnostic.tsv"},
        submission_file="AX.tsv",
        file_columns={"premise": "sentence1", "hypothesis": "sentence2"},
    ),
}

# Made from the documentation of the installed packages: real English tasks that need no download.
DATASET_VALS["builtin"] = {
    "package_topic": _classes(
        prefix="package",
        inputs={"text": "text"},
        labels=list(PACKAGE_TOPIC_LABELS),
        metrics=["accuracy", "f1_macro"],
        max_source_length=128,
        builtin="package_topic",
    ),
    "docstring_summary": dict(
        prefix="summarize",
        inputs={"": "text"},
        target="summary",
        target_type="text",
        metrics=["rougeL", "rouge1", "rouge2"],
        max_source_length=256,
        max_target_length=48,
        builtin="docstring_summary",
    ),
}

# The source is the target without its diacritics. Rows are made from the plain text in --train_file, in any language.
# 200 characters of Romanian are some 70 tokens of mT5, at most 256.
DATASET_VALS["text"] = {
    "restore_diacritics": dict(
        inputs={"": "plain"},
        target="text",
        target_type="text",
        metrics=["word_accuracy", "exact_match", "diacritic_error_rate"],
        max_source_length=256,
        max_target_length=256,
        preprocess="restore_diacritics",
        max_piece_length=200,
    )
}
# With Romanian's legacy letters corrected, and Wikipedia as the text if none is named.
DATASET_VALS["text"]["restore_romanian_diacritics"] = DATASET_VALS["text"]["restore_diacritics"] | dict(
    preprocess="restore_romanian_diacritics", hub=("wikimedia/wikipedia", "20231101.ro")
)

# T5's texts; files of the official release, class order of aps/super_glue.
DATASET_VALS["super_glue"] = {
    "boolq": _classes(
        prefix="boolq",
        inputs={"passage": "passage", "question": "question"},
        labels=["False", "True"],
        max_source_length=512,
        hub=("aps/super_glue", "boolq"),
        files={"train": "BoolQ/train.jsonl", "validation": "BoolQ/val.jsonl", "test": "BoolQ/test.jsonl"},
    ),
    "cb": _classes(
        prefix="cb",
        inputs={"hypothesis": "hypothesis", "premise": "premise"},
        labels=["entailment", "contradiction", "neutral"],
        metrics=["f1_macro", "accuracy"],
        hub=("aps/super_glue", "cb"),
        files={"train": "CB/train.jsonl", "validation": "CB/val.jsonl", "test": "CB/test.jsonl"},
    ),
    "copa": _classes(
        prefix="copa",
        inputs={"choice1": "choice1", "choice2": "choice2", "premise": "premise", "question": "question"},
        labels=["choice1", "choice2"],
        max_source_length=128,
        hub=("aps/super_glue", "copa"),
        files={"train": "COPA/train.jsonl", "validation": "COPA/val.jsonl", "test": "COPA/test.jsonl"},
    ),
    # f1 is the paper's F1a, over all answers.
    "multirc": _classes(
        prefix="multirc",
        inputs={"question": "question", "answer": "answer", "paragraph": "paragraph"},
        labels=["False", "True"],
        metrics=["f1", "question_exact_match"],
        metric_columns=["idx.paragraph", "idx.question"],
        max_source_length=512,
        preprocess="multirc",
        hub=("aps/super_glue", "multirc"),
        files={"train": "MultiRC/train.jsonl", "validation": "MultiRC/val.jsonl", "test": "MultiRC/test.jsonl"},
    ),
    "record": dict(
        prefix="record",
        inputs={"query": "query", "entities": "entities", "passage": "passage"},
        target="answers",
        target_type="text",
        metrics=["squad_f1", "squad_exact_match"],
        max_source_length=512,
        max_target_length=32,
        preprocess="record",
        hub=("aps/super_glue", "record"),
        files={"train": "ReCoRD/train.jsonl", "validation": "ReCoRD/val.jsonl", "test": "ReCoRD/test.jsonl"},
    ),
    "rte": _classes(
        prefix="rte",
        inputs={"hypothesis": "hypothesis", "premise": "premise"},
        labels=["entailment", "not_entailment"],
        hub=("aps/super_glue", "rte"),
        files={"train": "RTE/train.jsonl", "validation": "RTE/val.jsonl", "test": "RTE/test.jsonl"},
    ),
    "wic": _classes(
        prefix="wic",
        inputs={"sentence1": "sentence1", "sentence2": "sentence2", "word": "word"},
        labels=["False", "True"],
        max_source_length=128,
        hub=("aps/super_glue", "wic"),
        files={"train": "WiC/train.jsonl", "validation": "WiC/val.jsonl", "test": "WiC/test.jsonl"},
    ),
    # "wsc: ... *it* ...": what does the marked pronoun stand for?
    "wsc": dict(
        prefix="wsc",
        inputs={"": "text"},
        target="span1_text",
        target_type="text",
        metrics=["referent_accuracy"],
        metric_columns=["label"],
        max_source_length=256,
        max_target_length=16,
        preprocess="wsc",
        train_without={"label": ["False", "0"]},
        hub=("aps/super_glue", "wsc.fixed"),
        files={"train": "WSC/train.jsonl", "validation": "WSC/val.jsonl", "test": "WSC/test.jsonl"},
    ),
}

DATASET_VALS["translation"] = {
    "wmt16_en_ro": dict(
        prefix="translate English to Romanian",
        inputs={"": "translation.en"},
        target="translation.ro",
        target_type="text",
        metrics=["bleu"],
        max_source_length=128,
        max_target_length=128,
        hub=("wmt/wmt16", "ro-en"),
        files={
            "train": {"translation.en": "train.en", "translation.ro": "train.ro"},
            "validation": {"translation.en": "dev.en", "translation.ro": "dev.ro"},
            "test": {"translation.en": "test.en", "translation.ro": "test.ro"},
        },
    ),
    "wmt16_en_de": dict(
        prefix="translate English to German",
        inputs={"": "translation.en"},
        target="translation.de",
        target_type="text",
        metrics=["bleu"],
        max_source_length=128,
        max_target_length=128,
        hub=("wmt/wmt16", "de-en"),
        files={
            "train": {"translation.en": "train.en", "translation.de": "train.de"},
            "validation": {"translation.en": "dev.en", "translation.de": "dev.de"},
            "test": {"translation.en": "test.en", "translation.de": "test.de"},
        },
    ),
    "multi30k_en_de": dict(
        prefix="translate English to German",
        inputs={"": "en"},
        target="de",
        target_type="text",
        metrics=["bleu"],
        max_source_length=128,
        max_target_length=128,
        hub=("bentrevett/multi30k", None),
        files={
            "train": {"en": "train.en", "de": "train.de"},
            "validation": {"en": "val.en", "de": "val.de"},
            "test": {"en": "test_2016_flickr.en", "de": "test_2016_flickr.de"},
        },
    ),
}

DATASET_VALS["summarization"] = {
    "cnn_dailymail": dict(
        prefix="summarize",
        inputs={"": "article"},
        target="highlights",
        target_type="text",
        metrics=["rougeLsum", "rouge1", "rouge2"],
        max_source_length=512,
        max_target_length=128,
        hub=("abisee/cnn_dailymail", "3.0.0"),
        files={"train": "train.jsonl", "validation": "validation.jsonl", "test": "test.jsonl"},
    ),
    "xsum": dict(
        prefix="summarize",
        inputs={"": "document"},
        target="summary",
        target_type="text",
        metrics=["rougeLsum", "rouge1", "rouge2"],
        max_source_length=512,
        max_target_length=64,
        hub=("EdinburghNLP/xsum", None),
        files={"train": "train.jsonl", "validation": "validation.jsonl", "test": "test.jsonl"},
    ),
    "samsum": dict(
        prefix="summarize",
        inputs={"": "dialogue"},
        target="summary",
        target_type="text",
        metrics=["rougeLsum", "rouge1", "rouge2"],
        max_source_length=512,
        max_target_length=96,
        hub=("knkarthick/samsum", None),
        files={"train": "train.json", "validation": "val.json", "test": "test.json"},
    ),
    # Abstracts as lists of sentences; several references in validation and test.
    "scitldr": dict(
        prefix="summarize",
        inputs={"": "source"},
        target="target",
        target_type="text",
        metrics=["rougeL", "rouge1", "rouge2"],
        max_source_length=512,
        max_target_length=64,
        files={"train": "train.jsonl", "validation": "dev.jsonl", "test": "test.jsonl"},
    ),
}

DATASET_VALS["question_answering"] = {
    "squad": dict(
        inputs={"question": "question", "context": "context"},
        target="answers.text",
        target_type="text",
        metrics=["squad_f1", "squad_exact_match"],
        max_source_length=512,
        max_target_length=32,
        hub=("rajpurkar/squad", None),
        preprocess="squad",
        files={"train": "train-v1.1.json", "validation": "dev-v1.1.json"},
    ),
    # GSM8K has no validation rows.
    "gsm8k": dict(
        prefix="solve",
        inputs={"": "question"},
        target="answer",
        target_type="text",
        metrics=["final_number_accuracy"],
        max_source_length=256,
        max_target_length=320,
        hub=("openai/gsm8k", "main"),
        files={"train": "train.jsonl", "test": "test.jsonl"},
        eval_splits=["test"],
    ),
}

DATASET_VALS["generation"] = {
    "common_gen": dict(
        prefix="generate a sentence with",
        inputs={"": "concepts"},
        target="target",
        target_type="text",
        metrics=["bleu", "rougeL"],
        max_source_length=48,
        max_target_length=48,
        hub=("allenai/common_gen", None),
        merge_references=True,
        files={
            "train": {"concepts": "commongen.train.src_alpha.txt", "target": "commongen.train.tgt.txt"},
            "validation": {"concepts": "commongen.dev.src_alpha.txt", "target": "commongen.dev.tgt.txt"},
            "test": {"concepts": "commongen.test.src_alpha.txt", "target": "commongen.test.tgt.txt"},
        },
    ),
    "e2e_nlg": dict(
        prefix="describe",
        inputs={"": "mr"},
        target="ref",
        target_type="text",
        metrics=["bleu", "rougeL"],
        max_source_length=128,
        max_target_length=96,
        merge_references=True,
        files={"train": "trainset.csv", "validation": "devset.csv", "test": "testset_w_refs.csv"},
    ),
    # The JSON files of the GEM benchmark; triples "Aarhus_Airport | cityServed | Aarhus".
    "web_nlg": dict(
        prefix="translate Graph to English",
        inputs={"": "input"},
        target="references",
        target_type="text",
        metrics=["bleu", "rougeL"],
        max_source_length=256,
        max_target_length=128,
        preprocess="web_nlg",
        files={
            "train": "web_nlg_en/train.json",
            "validation": "web_nlg_en/validation.json",
            "test": "web_nlg_en/test.json",
        },
    ),
    "disfl_qa": dict(
        prefix="correct the question",
        inputs={"": "disfluent"},
        target="original",
        target_type="text",
        metrics=["bleu", "exact_match"],
        max_source_length=96,
        max_target_length=64,
        preprocess="rows_of_dictionary",
        files={"train": "train.json", "validation": "dev.json", "test": "test.json"},
    ),
    "wiki_split": dict(
        prefix="split",
        inputs={"": "complex"},
        target="simple",
        target_type="text",
        metrics=["bleu", "exact_match"],
        max_source_length=128,
        max_target_length=128,
        preprocess="wiki_split",
        files={"train": "train.tsv", "validation": "validation.tsv", "test": "test.tsv"},
        file_columns={"complex": 0, "simple": 1},  # no header line
    ),
}
