"""Facts that the scripts share: model shapes, denoisers and the registry of tasks. Standard library only.

Adding a task is one more entry in `DATASET_VALS` and nothing else. The fields of an entry:

    prefix              first word(s) of the source text, as T5 writes it: "cola" -> "cola sentence: ..."
    inputs              {key in the source text: column}, in the order they are written; key "" writes the bare text
    target              the column that holds the answer; a list of texts in it holds several references: training has a
                        row for each, evaluation counts the best. Any column may be dotted: translation.en, answers.text
    target_type         "class" (one of `labels`), "number" (written in STS-B's rounding) or "text" (used as it is)
    labels              class names in class order (only for "class"); an integer in the data is an index into it
    metrics             names from tasks.metrics.METRICS; the first one decides which checkpoint is best
    metric_columns      columns that a metric reads beside answers and targets (question_exact_match, referent_accuracy)
    hub                 (data set, configuration or None) on the Hugging Face Hub
    builtin             folder of the built-in English corpus (corpora/installed_docs.py) instead of `hub`
    files               {split: file below --data_dir, or a path}: .tsv .csv .json .jsonl .parquet, also compressed; or
                        {split: {column: text file}}, whose lines belong together
    file_columns        {column: header name, or index where the file has no header}, where a file's names differ
    file_columns_by_split  the same for single splits
    unfold              name in tasks.transforms.UNFOLDS: a nested record of the file -> its rows
    transform           name in tasks.transforms.TRANSFORMS: a row -> the row with what cannot be declared
    separators          {column: what stands between the items of the list in it}; one space where nothing is said
    train_rows_where    {column: value}: the training rows that are used
    merge_references    True: evaluation rows with the same source become one, with all their references
    exclude_rows        {split: {"file", "columns"}}: leave out the rows whose `columns` stand in that headerless file
    eval_splits         splits to report when there is more than "validation" (MNLI); the first is the main one
    test_splits         the same for prediction without labels; default "test"
    train_with          the task whose training rows this one borrows (AX has none of its own)
    max_piece_length    the column text is running text, of whole books too: a row is a sentence-like piece of at most
                        so many characters; plain text files have a document on each line
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
ATTENTION_IMPLEMENTATIONS = (
    "eager",
    "sdpa",
    "t5_fused",
)  # the last is modeling/attention.py's; flex_attention is wrong on T5
NUM_SENTINELS = 100  # <extra_id_0> ... <extra_id_99>
IGNORE_INDEX = -100  # labels that no loss and no metric counts


# ---------------------------------------------------------------- hardware
# From the makers' data sheets: dense matrix peaks in TFLOP/s (H200: what a matrix product reached), for MFU, and the
# memory in GB. For plans, GB/s of the memory, of a GPU's links within a machine in one direction (NVLink, else PCIe 4.0
# x16) and of its network card (200 and 400 Gb/s in DGX A100 and H100/H200; 100 Gb/s assumed for the others). The first
# name that is part of the device's name counts.
def _gpu(bf16: float, tf32: float, memory: float, speed: float, link: float, network: float) -> dict[str, float]:
    names = ("bf16", "tf32", "memory_gb", "memory_gb_per_second", "link_gb_per_second", "network_gb_per_second")
    return dict(zip(names, (bf16, tf32, memory, speed, link, network), strict=True))


HARDWARE_PEAKS = {
    "H200": _gpu(790.0, 494.0, 141, 4800, 450, 50),
    "H100": _gpu(989.0, 494.0, 80, 3350, 450, 50),
    "A100": _gpu(312.0, 156.0, 80, 2039, 300, 25),
    "L40S": _gpu(362.0, 183.0, 48, 864, 32, 12.5),
    "RTX 4090": _gpu(165.0, 82.6, 24, 1008, 32, 12.5),
    "RTX 3090": _gpu(71.0, 35.6, 24, 936, 32, 12.5),
}

# ---------------------------------------------------------------- denoising
# noise_density           share of tokens hidden
# mean_noise_span_length  mean length of a hidden span in tokens; without it the denoiser hides the end of the text, of
#                         a random length: uniform between 1 and what gives `noise_density` on average (prefix LM)
# sentinels               False: no sentinel stands for the hidden end (T5's prefix LM)
# mode                    token at the beginning of the input; added to a tokenizer that lacks it
DENOISERS = {
    "span_corruption": dict(noise_density=0.15, mean_noise_span_length=3.0),  # T5's base line
    "prefix_lm": dict(noise_density=0.5, sentinels=False),  # T5's prefix LM
    # UL2 (Tay et al. 2022, table 1): R denoisers, X denoisers (long spans or much hidden), and the S denoiser.
    "ul2_r_span3": dict(noise_density=0.15, mean_noise_span_length=3.0, mode="[NLU]"),
    "ul2_r_span8": dict(noise_density=0.15, mean_noise_span_length=8.0, mode="[NLU]"),
    "ul2_x_span3": dict(noise_density=0.5, mean_noise_span_length=3.0, mode="[NLG]"),
    "ul2_x_span8": dict(noise_density=0.5, mean_noise_span_length=8.0, mode="[NLG]"),
    "ul2_x_span64": dict(noise_density=0.15, mean_noise_span_length=64.0, mode="[NLG]"),
    "ul2_x_span64_half": dict(noise_density=0.5, mean_noise_span_length=64.0, mode="[NLG]"),
    "ul2_s": dict(noise_density=0.25, mode="[S2S]"),
}
# `--objective`: {denoiser: weight}, the weight being its share of all input tokens (they need not add up to 1).
OBJECTIVES = {
    "span_corruption": {"span_corruption": 1.0},
    "prefix_lm": {"prefix_lm": 1.0},
    "ul2": {name: 1.0 for name in DENOISERS if name.startswith("ul2_")},
}

# ---------------------------------------------------------------- optimizer, learning rate and schedule
# What a job uses where the flags say nothing; docs/defaults.md has the source of each value, and the scale it was shown
# at. All optimizers but torch's AdamW scale a tensor's step by its RMS, which is near 0.05 in a matrix of T5: hence
# AdamW's lower rates. warmup_steps below 1 is a share of the run: nanoT5's 10,000 of 65,536.
OPTIMIZERS = ("adamw_rms_scaled", "adamw_torch", "adamw_torch_fused", "adafactor", "muon")
DEFAULT_OPTIMIZER = OPTIMIZERS[0]
# ZeRO hands an optimizer flat slices of the weights. Of Adafactor's row and column means and Muon's products nothing is
# left on them. RMS-scaled AdamW needs one number of a tensor: ZeRO-1 and 2 leave the whole weights on every rank, where
# it is found; ZeRO-3 does not.
NOT_UNDER_ZERO = {1: ("adafactor", "muon"), 2: ("adafactor", "muon"), 3: ("adafactor", "muon", "adamw_rms_scaled")}
# FSDP2's slices know their whole: norms are right on them, but not the row and column means that Adafactor keeps, and
# Muon's products have not been tried on them.
NOT_UNDER_FSDP = ("adafactor", "muon")
_CHECKPOINT_RATES = dict(adamw_rms_scaled=1e-3, adafactor=1e-3, muon=1e-3, adamw_torch=1e-4, adamw_torch_fused=1e-4)
TRAINING_DEFAULTS = {
    "pre-training from scratch": dict(
        learning_rate=dict(adamw_rms_scaled=2e-2, adafactor=2e-2, muon=2e-2, adamw_torch=1e-3, adamw_torch_fused=1e-3),
        lr_scheduler_type="cosine",
        warmup_steps=10_000 / 65_536,
    ),
    "continued pre-training": dict(
        learning_rate=_CHECKPOINT_RATES, lr_scheduler_type="constant", warmup_steps=10_000 / 65_536
    ),
    "fine-tuning a checkpoint": dict(learning_rate=_CHECKPOINT_RATES, lr_scheduler_type="constant", warmup_steps=0.05),
    "fine-tuning from scratch": dict(
        learning_rate=dict(adamw_rms_scaled=1e-2, adafactor=1e-3, muon=1e-2, adamw_torch=3e-4, adamw_torch_fused=3e-4),
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
    ),
}
# The step these rates were shown with: T5's and nanoT5's 128 sequences, in pre-training of 568 tokens of text each.
SHOWN_SEQUENCES, SHOWN_TOKENS = 128, 128 * 568

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


def _jsonl(folder: str) -> dict[str, str]:
    """Files of the official SuperGLUE layout: _jsonl("BoolQ")["validation"] -> "BoolQ/val.jsonl"."""
    names = {"train": "train", "validation": "val", "test": "test"}
    return {split: f"{folder}/{name}.jsonl" for split, name in names.items()}


def _classes(prefix: str, inputs: dict | str, labels: list[str], metrics: str, length: int, **other) -> dict:
    """An entry whose target is one of `labels` in the column label."""
    inputs = {name: name for name in inputs.split()} if isinstance(inputs, str) else inputs
    entry = dict(prefix=prefix, inputs=inputs, target="label", target_type="class", labels=labels)
    return entry | dict(metrics=metrics.split(), max_source_length=length, max_target_length=8) | other


def _texts(prefix: str, inputs: dict | str, target: str, metrics: str, lengths: tuple[int, int], **other) -> dict:
    """An entry whose target is a text; `inputs` as a string is a single column without a key."""
    inputs = {"": inputs} if isinstance(inputs, str) else inputs
    entry = dict(prefix=prefix, inputs=inputs, target=target, target_type="text", metrics=metrics.split())
    return entry | dict(max_source_length=lengths[0], max_target_length=lengths[1]) | other


def _translation(prefix: str, columns: list[str], hub: tuple, **names: str) -> dict:
    """An entry of translation; columns ["en", "ro"] and train="train": its files are train.en and train.ro."""
    files = {split: {column: f"{name}.{column[-2:]}" for column in columns} for split, name in names.items()}
    return _texts(prefix, columns[0], columns[1], "bleu", (128, 128), hub=hub, files=files)


_SPLITS = {"train": "train.jsonl", "validation": "validation.jsonl", "test": "test.jsonl"}
_ROUGE = "rougeLsum rouge1 rouge2"

# fmt: off
# T5's texts; files of the official release, class order of aps/super_glue.
DATASET_VALS["super_glue"] = {
    "boolq": _classes(
        "boolq", "passage question", ["False", "True"], "accuracy", 512,
        hub=("aps/super_glue", "boolq"), files=_jsonl("BoolQ"),
    ),
    "cb": _classes(
        "cb", "hypothesis premise", ["entailment", "contradiction", "neutral"], "f1_macro accuracy", 256,
        hub=("aps/super_glue", "cb"), files=_jsonl("CB"),
    ),
    "copa": _classes(
        "copa", "choice1 choice2 premise question", ["choice1", "choice2"], "accuracy", 128,
        hub=("aps/super_glue", "copa"), files=_jsonl("COPA"),
    ),
    "multirc": _classes(  # f1 is the paper's F1a: over all answers
        "multirc", "question answer paragraph", ["False", "True"], "f1 question_exact_match", 512,
        hub=("aps/super_glue", "multirc"), files=_jsonl("MultiRC"), unfold="multirc", transform="multirc",
        metric_columns=["idx.paragraph", "idx.question"],
    ),
    "record": _texts(
        "record", {"query": "query", "entities": "entities", "passage": "passage"}, "answers",
        "squad_f1 squad_exact_match", (512, 32),
        hub=("aps/super_glue", "record"), files=_jsonl("ReCoRD"), unfold="record", transform="record",
        separators={"entities": ", "},
    ),
    "rte": _classes(
        "rte", "hypothesis premise", ["entailment", "not_entailment"], "accuracy", 256,
        hub=("aps/super_glue", "rte"), files=_jsonl("RTE"),
    ),
    "wic": _classes(
        "wic", "sentence1 sentence2 word", ["False", "True"], "accuracy", 128,
        hub=("aps/super_glue", "wic"), files=_jsonl("WiC"),
    ),
    "wsc": _texts(  # "wsc: ... *it* ...": what does the marked pronoun stand for?
        "wsc", "text", "span1_text", "referent_accuracy", (256, 16),
        hub=("aps/super_glue", "wsc.fixed"), files=_jsonl("WSC"), transform="wsc",
        train_rows_where={"label": True}, metric_columns=["label"],
    ),
}

DATASET_VALS["translation"] = {
    "wmt16_en_ro": _translation(
        "translate English to Romanian", ["translation.en", "translation.ro"], ("wmt/wmt16", "ro-en"),
        train="train", validation="dev", test="test",
    ),
    "wmt16_en_de": _translation(
        "translate English to German", ["translation.en", "translation.de"], ("wmt/wmt16", "de-en"),
        train="train", validation="dev", test="test",
    ),
    "multi30k_en_de": _translation(
        "translate English to German", ["en", "de"], ("bentrevett/multi30k", None),
        train="train", validation="val", test="test_2016_flickr",
    ),
}

DATASET_VALS["summarization"] = {
    "cnn_dailymail": _texts(
        "summarize", "article", "highlights", _ROUGE, (512, 128),
        hub=("abisee/cnn_dailymail", "3.0.0"), files=_SPLITS,
    ),
    "xsum": _texts(
        "summarize", "document", "summary", _ROUGE, (512, 64), hub=("EdinburghNLP/xsum", None), files=_SPLITS,
    ),
    "samsum": _texts(
        "summarize", "dialogue", "summary", _ROUGE, (512, 96), hub=("knkarthick/samsum", None),
        files={"train": "train.json", "validation": "val.json", "test": "test.json"},
    ),
    "scitldr": _texts(  # abstracts as lists of sentences, several references in validation and test
        "summarize", "source", "target", "rougeL rouge1 rouge2", (512, 64),
        files=_SPLITS | {"validation": "dev.jsonl"},
    ),
}

DATASET_VALS["question_answering"] = {
    "squad": _texts(
        None, {"question": "question", "context": "context"}, "answers.text", "squad_f1 squad_exact_match",
        (512, 32), hub=("rajpurkar/squad", None), unfold="squad", transform="squad",
        files={"train": "train-v1.1.json", "validation": "dev-v1.1.json"},
    ),
    "gsm8k": _texts(  # has no validation rows
        "solve", "question", "answer", "final_number_accuracy", (256, 320), hub=("openai/gsm8k", "main"),
        files={"train": "train.jsonl", "test": "test.jsonl"}, eval_splits=["test"],
    ),
}

DATASET_VALS["generation"] = {
    "common_gen": _texts(
        "generate a sentence with", "concepts", "target", "bleu rougeL", (48, 48),
        hub=("allenai/common_gen", None), merge_references=True,
        files={
            split: {"concepts": f"commongen.{name}.src_alpha.txt", "target": f"commongen.{name}.tgt.txt"}
            for split, name in (("train", "train"), ("validation", "dev"), ("test", "test"))
        },
    ),
    "e2e_nlg": _texts(
        "describe", "mr", "ref", "bleu rougeL", (128, 96), merge_references=True,
        files={"train": "trainset.csv", "validation": "devset.csv", "test": "testset_w_refs.csv"},
    ),
    "web_nlg": _texts(  # the JSON files of the GEM benchmark; triples "Aarhus_Airport | cityServed | Aarhus"
        "translate Graph to English", "input", "references", "bleu rougeL", (256, 128), transform="gem",
        files={split: f"web_nlg_en/{split}.json" for split in ("train", "validation", "test")},
        separators={"input": " && "},
    ),
    "disfl_qa": _texts(
        "correct the question", "disfluent", "original", "bleu exact_match", (96, 64), unfold="values",
        files={"train": "train.json", "validation": "dev.json", "test": "test.json"},
    ),
    "wiki_split": _texts(
        "split", "complex", "simple", "bleu exact_match", (128, 128), transform="wiki_split",
        files={"train": "train.tsv", "validation": "validation.tsv", "test": "test.tsv"},
        file_columns={"complex": 0, "simple": 1},  # no header line
    ),
}
# fmt: on
