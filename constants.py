"""What the scripts share: model shapes, denoisers, default rates and the registry of tasks. Standard library only.

Adding a task is one more entry in `DATASET_VALS` and nothing else (docs/tasks.md). The fields of an entry:

    prefix              first word(s) of the source text, as T5 writes it: "cola" -> "cola sentence: ..."; a prefix that
                        ends in white space is written unchanged
    inputs              {key in the source text: column}, in the order they are written; key "" writes the bare text
    target              the column that holds the answer; a list of texts holds several references: each becomes a
                        training row, evaluation counts the best. Any column may be dotted: translation.en, answers.text
    target_type         "class" (one of `labels`), "number" (written in STS-B's rounding) or "text" (unchanged)
    labels              class names in class order (only for "class"); a whole number in the data is an index into it,
                        unless a name is a number: then numbers are compared as numbers
    metrics             names in METRICS of tasks/metrics/scoring.py; the first one chooses the best checkpoint. Any
                        other name, or a folder, is loaded with evaluate.load, which runs its code
    metric_columns      further columns that a metric reads (question_exact_match, referent_accuracy)
    max_source_length, max_target_length   in tokens, EOS included
    hub                 (data set, configuration or None) on the Hugging Face Hub
    builtin             folder of the built-in English corpus (corpora/installed_docs.py) instead of `hub`
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
    train_without       {column: values}: the same of training rows only; or the split whose rows are in the training
                        file too
    train_with          the task whose checkpoint answers this one (AX has no training rows of its own)
    merge_references    True: evaluation rows with the same source become one, with all their references
    max_piece_length    the column text is running text, also whole books: a row is a sentence-like piece of at most
                        this many characters; plain text files have a document on each line
    eval_splits         splits to report when there is more than "validation" (MNLI); the first is the main one
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
    "t5-v1_1-xxl": dict(d_model=4096, d_kv=64, d_ff=10240, num_heads=64, num_layers=24, num_decoder_layers=24),
}
T5_VOCAB_SIZE = 32_128  # rows of the embedding when a built-in shape is used without a tokenizer of its own
VOCAB_SIZE_MULTIPLE = 64  # a tokenizer's size is rounded up to a multiple of this, so that matrix units get whole tiles
# `--attn_implementation`: transformers' two that are correct for T5 (flex_attention is not), and ours.
ATTENTION_IMPLEMENTATIONS = ("eager", "sdpa", "t5_fused")
NUM_SENTINELS = 100  # <extra_id_0> ... <extra_id_99>
LEAST_VOCAB_SIZE = 300  # of a tokenizer that is trained
IGNORE_INDEX = -100  # labels that no loss and no metric counts


# ---------------------------------------------------------------- hardware
# From the makers' data sheets: dense matrix peaks in TFLOP/s for MFU (H200: as measured in a matrix product), and the
# memory in GB. For plans, GB/s of the memory, of a GPU's links within a machine in one direction (NVLink, else PCIe
# x16) and of its network card (200 and 400 Gb/s in DGX A100 and H100/H200; 100 Gb/s assumed for the others). Below
# compute capability 8 there is neither bf16 nor TF32: both peaks are float32's. A device has the first entry whose name
# occurs in its own name, and not before a digit.
def _gpu(*values: float) -> dict[str, float]:
    names = "bf16 tf32 memory_gb memory_gb_per_second link_gb_per_second network_gb_per_second capability"
    return dict(zip(names.split(), values, strict=True))


HARDWARE_PEAKS = {
    "H200": _gpu(790.0, 494.0, 141, 4800, 450, 50, 9.0),
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
# warmup_steps below 1 is a share of the run: nanoT5's 10,000 of 65,536.
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
# LoRA's matrices B begin at 0, where steps scaled by a tensor's RMS are smallest: torch's AdamW is the default.
LORA = " with LoRA"
_LORA_RATES = dict(adamw_rms_scaled=2e-2, adafactor=2e-2, muon=2e-2, adamw_torch=1e-3, adamw_torch_fused=1e-3)
for _job in ("continued pre-training", "fine-tuning a checkpoint"):
    TRAINING_DEFAULTS[_job + LORA] = TRAINING_DEFAULTS[_job] | dict(optim="adamw_torch", learning_rate=_LORA_RATES)

PREEMPTED_EXIT_CODE = 75  # a signal or its time limit stopped the run: the same command resumes it
TASK_RECORD = "task.json"  # in the folder of a fine-tuned model: what repeats its evaluation (tasks/task_records.py)

# ---------------------------------------------------------------- the built-in corpus
BUILTIN_CORPUS = "installed_docs"  # `--dataset_name` of the offline default, made by corpora/installed_docs.py

# Labels of its task builtin/package_topic: the packages that requirements.txt brings in with the most prose.
PACKAGE_TOPIC_LABELS = tuple("matplotlib networkx nltk numpy pandas scipy sklearn sympy torch transformers".split())
# Where fine_tune_t5.py looks for a model if none is named: what pre_train_t5.py and `make demo` write by default.
DEMO_CHECKPOINTS = ("out/pre_train_t5", "out/demo/pre_train")


# ---------------------------------------------------------------- tasks
def _task(prefix: str | None, inputs: dict | str, metrics: str, lengths: tuple[int, int], **other) -> dict:
    """An entry without the fields that are None. `inputs` as a string: columns under their own names; `metrics` too."""
    inputs = {column: column for column in inputs.split()} if isinstance(inputs, str) else inputs
    entry = dict(prefix=prefix, inputs=inputs, metrics=metrics.split())
    entry |= dict(max_source_length=lengths[0], max_target_length=lengths[1]) | other
    return {field: value for field, value in entry.items() if value is not None}


def _classes(prefix: str, inputs: str, labels: list[str], metrics: str, length: int, **other) -> dict:
    """An entry whose target is one of `labels` in the column label; `length` is the source's."""
    return _task(prefix, inputs, metrics, (length, 8), target="label", target_type="class", labels=labels, **other)


def _texts(prefix: str | None, inputs: dict | str, target: str, metrics: str, lengths: tuple, **other) -> dict:
    """An entry whose target is a text; `inputs` as a string is a single column without a key."""
    inputs = {"": inputs} if isinstance(inputs, str) else inputs
    return _task(prefix, inputs, metrics, lengths, target=target, target_type="text", **other)


def _glue(name: str, folder: str, train: str = "train.tsv") -> dict:
    """Where an entry of GLUE is: on the Hub, in the official folders (CoLA/dev.tsv), in a submission (CoLA.tsv)."""
    files = {"train": f"{folder}/{train}", "validation": f"{folder}/dev.tsv", "test": f"{folder}/test.tsv"}
    return dict(hub=("nyu-mll/glue", name), files=files, submission_file=f"{folder}.tsv")


def _super_glue(name: str, folder: str) -> dict:
    """Where an entry of SuperGLUE is: on the Hub, in the official folders (BoolQ/val.jsonl)."""
    files = {"train": f"{folder}/train.jsonl", "validation": f"{folder}/val.jsonl", "test": f"{folder}/test.jsonl"}
    return dict(hub=("aps/super_glue", name), files=files)


def _translation(prefix: str, columns: list[str], hub: tuple, **names: str) -> dict:
    """An entry of translation; columns ["en", "ro"] and train="train": its files are train.en and train.ro."""
    files = {split: {column: f"{name}.{column[-2:]}" for column in columns} for split, name in names.items()}
    return _texts(prefix, columns[0], columns[1], "bleu", (128, 128), hub=hub, files=files)


def _restoring(preprocess: str, **other) -> dict:
    """The text without diacritics -> the text. 200 characters of Romanian are some 70 tokens of mT5, at most 256."""
    metrics = "word_accuracy exact_match diacritic_error_rate"
    return _texts(None, "plain", "text", metrics, (256, 256), preprocess=preprocess, max_piece_length=200, **other)


_NLI = ["entailment", "neutral", "contradiction"]
_ENTAILS = ["entailment", "not_entailment"]
_SPLITS = {"train": "train.jsonl", "validation": "validation.jsonl", "test": "test.jsonl"}
_ROUGE = "rougeLsum rouge1 rouge2"

# fmt: off
DATASET_VALS = {}

# The texts are T5's own (prefix, keys, label words); the class order is the one of nyu-mll/glue.
DATASET_VALS["glue"] = {
    "cola": _classes("cola", "sentence", ["unacceptable", "acceptable"], "matthews_correlation accuracy", 128,
        file_columns={"label": 1, "sentence": 3},  # train and dev have no header line
        **_glue("cola", "CoLA")),
    "sst2": _classes("sst2", "sentence", ["negative", "positive"], "accuracy", 128, **_glue("sst2", "SST-2")),
    "mrpc": _classes("mrpc", "sentence1 sentence2", ["not_equivalent", "equivalent"], "f1 accuracy", 256,
        file_columns={"label": "Quality", "sentence1": "#1 String", "sentence2": "#2 String"},
        # GLUE's own train.tsv lacks a row: the original file without the rows of dev.tsv is the training set.
        train_without="validation", **_glue("mrpc", "MRPC", "msr_paraphrase_train.txt")),
    "qqp": _classes("qqp", "question1 question2", ["not_duplicate", "duplicate"], "f1 accuracy", 256,
        file_columns={"label": "is_duplicate"}, **_glue("qqp", "QQP")),
    "stsb": _task("stsb", "sentence1 sentence2", "pearson spearman", (256, 8), target="label", target_type="number",
        file_columns={"label": "score"}, **_glue("stsb", "STS-B")),
    "mnli": _classes("mnli", "hypothesis premise", _NLI, "accuracy", 256, hub=("nyu-mll/glue", "mnli"),
        files={
            "train": "MNLI/train.tsv",
            "validation_matched": "MNLI/dev_matched.tsv", "validation_mismatched": "MNLI/dev_mismatched.tsv",
            "test_matched": "MNLI/test_matched.tsv", "test_mismatched": "MNLI/test_mismatched.tsv",
        },
        file_columns={"premise": "sentence1", "hypothesis": "sentence2", "label": "gold_label"},
        eval_splits=["validation_matched", "validation_mismatched"],
        submission_file={"test_matched": "MNLI-m.tsv", "test_mismatched": "MNLI-mm.tsv"}),
    "qnli": _classes("qnli", "question sentence", _ENTAILS, "accuracy", 256, **_glue("qnli", "QNLI")),
    "rte": _classes("rte", "sentence1 sentence2", _ENTAILS, "accuracy", 256, **_glue("rte", "RTE")),
    "wnli": _classes(
        "wnli", "sentence1 sentence2", ["not_entailment", "entailment"], "accuracy", 256, **_glue("wnli", "WNLI")),
    # The diagnostic set has no training rows and no public labels: it is answered by a model trained on MNLI.
    "ax": _classes("mnli", "hypothesis premise", _NLI, "accuracy", 256, hub=("nyu-mll/glue", "ax"), train_with="mnli",
        files={"test": "diagnostic/diagnostic.tsv"}, submission_file="AX.tsv",
        file_columns={"premise": "sentence1", "hypothesis": "sentence2"}),
}

# Made from the documentation of the installed packages: real English tasks that need no download.
DATASET_VALS["builtin"] = {
    "package_topic": _classes(
        "package", "text", list(PACKAGE_TOPIC_LABELS), "accuracy f1_macro", 128, builtin="package_topic"),
    "docstring_summary": _texts(
        "summarize", "text", "summary", "rougeL rouge1 rouge2", (256, 48), builtin="docstring_summary"),
}

# Made from plain text in any language: --train_file names the text.
DATASET_VALS["text"] = {
    "restore_diacritics": _restoring("restore_diacritics"),
    # With Romanian's legacy letters corrected, and Wikipedia as the text if none is named.
    "restore_romanian_diacritics": _restoring(
        "restore_romanian_diacritics", hub=("wikimedia/wikipedia", "20231101.ro")),
}

# T5's texts; files of the official release, class order of aps/super_glue.
DATASET_VALS["super_glue"] = {
    "boolq": _classes("boolq", "passage question", ["False", "True"], "accuracy", 512, **_super_glue("boolq", "BoolQ")),
    "cb": _classes("cb", "hypothesis premise", ["entailment", "contradiction", "neutral"], "f1_macro accuracy", 256,
        **_super_glue("cb", "CB")),
    "copa": _classes("copa", "choice1 choice2 premise question", ["choice1", "choice2"], "accuracy", 128,
        **_super_glue("copa", "COPA")),
    # f1 is the paper's F1a, over all answers.
    "multirc": _classes("multirc", "question answer paragraph", ["False", "True"], "f1 question_exact_match", 512,
        metric_columns=["idx.paragraph", "idx.question"], preprocess="multirc", **_super_glue("multirc", "MultiRC")),
    "record": _texts("record", {"query": "query", "entities": "entities", "passage": "passage"}, "answers",
        "squad_f1 squad_exact_match", (512, 32), preprocess="record", **_super_glue("record", "ReCoRD")),
    "rte": _classes("rte", "hypothesis premise", _ENTAILS, "accuracy", 256, **_super_glue("rte", "RTE")),
    "wic": _classes("wic", "sentence1 sentence2 word", ["False", "True"], "accuracy", 128, **_super_glue("wic", "WiC")),
    # "wsc: ... *it* ...": what does the marked pronoun stand for?
    "wsc": _texts("wsc", "text", "span1_text", "referent_accuracy", (256, 16), preprocess="wsc",
        train_without={"label": ["False", "0"]}, metric_columns=["label"], **_super_glue("wsc.fixed", "WSC")),
}

DATASET_VALS["translation"] = {
    "wmt16_en_ro": _translation(
        "translate English to Romanian", ["translation.en", "translation.ro"], ("wmt/wmt16", "ro-en"),
        train="train", validation="dev", test="test"),
    "wmt16_en_de": _translation(
        "translate English to German", ["translation.en", "translation.de"], ("wmt/wmt16", "de-en"),
        train="train", validation="dev", test="test"),
    "multi30k_en_de": _translation("translate English to German", ["en", "de"], ("bentrevett/multi30k", None),
        train="train", validation="val", test="test_2016_flickr"),
}

DATASET_VALS["summarization"] = {
    "cnn_dailymail": _texts("summarize", "article", "highlights", _ROUGE, (512, 128),
        hub=("abisee/cnn_dailymail", "3.0.0"), files=_SPLITS),
    "xsum": _texts(
        "summarize", "document", "summary", _ROUGE, (512, 64), hub=("EdinburghNLP/xsum", None), files=_SPLITS),
    "samsum": _texts("summarize", "dialogue", "summary", _ROUGE, (512, 96), hub=("knkarthick/samsum", None),
        files={"train": "train.json", "validation": "val.json", "test": "test.json"}),
    # Abstracts as lists of sentences; several references in validation and test.
    "scitldr": _texts("summarize", "source", "target", "rougeL rouge1 rouge2", (512, 64),
        files=_SPLITS | {"validation": "dev.jsonl"}),
}

DATASET_VALS["question_answering"] = {
    "squad": _texts(None, {"question": "question", "context": "context"}, "answers.text", "squad_f1 squad_exact_match",
        (512, 32), hub=("rajpurkar/squad", None), preprocess="squad",
        files={"train": "train-v1.1.json", "validation": "dev-v1.1.json"}),
    # It has no validation rows.
    "gsm8k": _texts("solve", "question", "answer", "final_number_accuracy", (256, 320), hub=("openai/gsm8k", "main"),
        files={"train": "train.jsonl", "test": "test.jsonl"}, eval_splits=["test"]),
}

DATASET_VALS["generation"] = {
    "common_gen": _texts("generate a sentence with", "concepts", "target", "bleu rougeL", (48, 48),
        hub=("allenai/common_gen", None), merge_references=True,
        files={
            split: {"concepts": f"commongen.{name}.src_alpha.txt", "target": f"commongen.{name}.tgt.txt"}
            for split, name in (("train", "train"), ("validation", "dev"), ("test", "test"))
        }),
    "e2e_nlg": _texts("describe", "mr", "ref", "bleu rougeL", (128, 96), merge_references=True,
        files={"train": "trainset.csv", "validation": "devset.csv", "test": "testset_w_refs.csv"}),
    "web_nlg": _texts(  # the JSON files of the GEM benchmark; triples "Aarhus_Airport | cityServed | Aarhus"
        "translate Graph to English", "input", "references", "bleu rougeL", (256, 128), preprocess="web_nlg",
        files={split: f"web_nlg_en/{split}.json" for split in ("train", "validation", "test")}),
    "disfl_qa": _texts(
        "correct the question", "disfluent", "original", "bleu exact_match", (96, 64), preprocess="rows_of_dictionary",
        files={"train": "train.json", "validation": "dev.json", "test": "test.json"}),
    "wiki_split": _texts("split", "complex", "simple", "bleu exact_match", (128, 128), preprocess="wiki_split",
        files={"train": "train.tsv", "validation": "validation.tsv", "test": "test.tsv"},
        file_columns={"complex": 0, "simple": 1}),  # no header line
}
# fmt: on
