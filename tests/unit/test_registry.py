"""Every entry of the text-to-text benchmarks and of SuperGLUE, from official files and from the Hub's columns.

Hermetic: the files are written here in the official layouts, and what the Hub has as saved `datasets` folders with its
features. The expected texts are written out by hand; those of SuperGLUE and SQuAD as T5's own preprocessors give them
(t5/data/preprocessors.py, t5/data/glue_utils.py).
"""

import dataclasses
import functools
import json
from pathlib import Path
from unittest import mock

import datasets
import numpy as np
from absl.testing import parameterized
from datasets import ClassLabel, Features, List, Value
from transformers import ByT5Tokenizer, EvalPrediction

from constants import DATASET_VALS
from foundry.arguments.task import TaskArguments
from foundry.arguments.training import FineTuningArguments
from foundry.common.errors import UserError
from foundry.modeling.loss import STATISTICS
from tasks.entry import TaskEntry
from tasks.examples import build_tokenize_function, task_metrics
from tasks.metrics import scoring
from tasks.mixture import Tasks
from tasks.named import find_entry
from tasks.row_texts import reference_texts, source_text, target_text
from tasks.rows import load_rows
from tasks.task import LoadedTask, Task
from tasks.transforms import TRANSFORMS, pad_punctuation

GROUPS = ("super_glue", "translation", "summarization", "question_answering", "generation")
TEXT, INTEGER = Value("string"), Value("int32")


def jsonl(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


PASSAGE = "A ship <b>Sent 1: </b>sank.<br>It rose."
MULTIRC = {
    "idx": 7,
    "version": 1.1,
    "passage": {
        "text": PASSAGE,
        "questions": [
            {
                "question": "What sank?",
                "idx": 3,
                "answers": [{"text": "A ship", "idx": 0, "label": 1}, {"text": "Rain", "idx": 1, "label": 0}],
            },
            {"question": "When?", "idx": 4, "answers": [{"text": "Never", "idx": 2, "label": 0}]},
        ],
    },
}
MULTIRC_TEXTS = [
    ("multirc question: What sank? answer: A ship paragraph: A ship Sent 1: sank. It rose.", ["True"]),
    ("multirc question: What sank? answer: Rain paragraph: A ship Sent 1: sank. It rose.", ["False"]),
    ("multirc question: When? answer: Never paragraph: A ship Sent 1: sank. It rose.", ["False"]),
]
RECORD_PASSAGE = 'Bob met Ann.\n@highlight\nAnn won\n@highlight\nBob "lost"\n@highlight\nEnd'
RECORD = {
    "source": "Daily mail",
    "passage": {
        "text": RECORD_PASSAGE,
        "entities": [{"start": 8, "end": 10}, {"start": 0, "end": 2}, {"start": 24, "end": 26}],
    },
    "qas": [
        {
            "query": "@placeholder won",
            "idx": 0,
            "answers": [{"start": 8, "end": 10, "text": "Ann"}, {"start": 24, "end": 26, "text": "Ann"}],
        },
        {
            "query": "@placeholder met",
            "idx": 1,
            "answers": [{"start": 8, "end": 10, "text": "Bob"}, {"start": 0, "end": 2, "text": "Ann"}],
        },
    ],
    "idx": 5,
}
RECORD_END = 'entities: Ann, Bob passage: Bob met Ann. Ann won. Bob "lost" End'
RECORD_TEXTS = [
    (f"record query: @placeholder won {RECORD_END}", ["Ann"]),
    (f"record query: @placeholder met {RECORD_END}", ["Ann", "Bob"]),
]
SQUAD = {
    "version": "1.1",
    "data": [
        {
            "title": "Air",
            "paragraphs": [
                {
                    "context": "Oxygen (O2) is 21%.",
                    "qas": [
                        {
                            "id": "a",
                            "question": "What's O2?",
                            "answers": [
                                {"answer_start": 0, "text": "Oxygen"},
                                {"answer_start": 0, "text": "Oxygen (O2)"},
                            ],
                        },
                        {"id": "b", "question": "How much?", "answers": [{"answer_start": 15, "text": "21%"}]},
                    ],
                }
            ],
        }
    ],
}
SQUAD_TEXTS = [
    ("question: What ' s O2 ? context: Oxygen ( O2 ) is 21 % .", ["Oxygen", "Oxygen ( O2 )"]),
    ("question: How much ? context: Oxygen ( O2 ) is 21 % .", ["21 %"]),
]
WSC_ROW = {"text": "Tom asked Bob if he may go.", "span1_text": "Tom", "span2_text": "he", "span2_index": 4}
WSC_OTHER = {"text": 'Ann said "Good for him," to us.', "span1_text": "Ann", "span2_text": "him", "span2_index": 4}
WSC_SHIFTED = {"text": "They want to use it , really.", "span1_text": "the stone", "span2_text": "it", "span2_index": 3}
WSC_TEXTS = [
    ("wsc: Tom asked Bob if *he* may go.", ["Tom"]),
    ('wsc: Ann said "Good for *him* ," to us.', ["Ann"]),
    ("wsc: They want to use *it* , really.", ["the stone"]),
]


def wsc_file(row: dict, label: bool | None) -> dict:
    """A row of WSC's official file, where the spans stand below "target"."""
    spans = {name: value for name, value in row.items() if name != "text"}
    return {"text": row["text"], "target": spans | {"span1_index": 0}, "idx": 0} | (
        {} if label is None else {"label": label}
    )


# (benchmark, task) -> split -> [(source, all references, or None where they are hidden)]
TEXTS: dict[tuple[str, str], dict[str, list]] = {}
FILES: dict[tuple[str, str], dict[str, str]] = {}  # (benchmark, task) -> file below --data_dir -> content
HUB: dict[tuple[str, str], tuple[Features, dict[str, list[dict]]]] = {}  # -> (features, {split: rows}), same texts

TEXTS["super_glue", "boolq"] = {
    "train": [("boolq passage: Ice is cold. question: is ice hot", ["False"])],
    "validation": [("boolq passage: Ice is cold. question: is ice cold", ["True"])],
    "test": [("boolq passage: P. question: q", None)],
}
FILES["super_glue", "boolq"] = {
    "BoolQ/train.jsonl": jsonl({"question": "is ice hot", "passage": "Ice is cold.", "idx": 0, "label": False}),
    "BoolQ/val.jsonl": jsonl({"question": "is ice cold", "passage": "Ice is cold.", "idx": 0, "label": True}),
    "BoolQ/test.jsonl": jsonl({"question": "q", "passage": "P.", "idx": 0}),
}
HUB["super_glue", "boolq"] = (
    Features(question=TEXT, passage=TEXT, idx=INTEGER, label=ClassLabel(names=["False", "True"])),
    {
        "train": [{"question": "is ice hot", "passage": "Ice is cold.", "idx": 0, "label": 0}],
        "validation": [{"question": "is ice cold", "passage": "Ice is cold.", "idx": 0, "label": 1}],
        "test": [{"question": "q", "passage": "P.", "idx": 0, "label": -1}],
    },
)
TEXTS["super_glue", "cb"] = {
    "train": [("cb hypothesis: It rained premise: It is wet.", ["entailment"])],
    "validation": [("cb hypothesis: H premise: P", ["neutral"]), ("cb hypothesis: I premise: Q", ["contradiction"])],
}
FILES["super_glue", "cb"] = {
    "CB/train.jsonl": jsonl({"premise": "It is wet.", "hypothesis": "It rained", "label": "entailment", "idx": 0}),
    "CB/val.jsonl": jsonl(
        {"premise": "P", "hypothesis": "H", "label": "neutral", "idx": 0},
        {"premise": "Q", "hypothesis": "I", "label": "contradiction", "idx": 1},
    ),
}
HUB["super_glue", "cb"] = (
    Features(
        premise=TEXT, hypothesis=TEXT, idx=INTEGER, label=ClassLabel(names=["entailment", "contradiction", "neutral"])
    ),
    {
        "train": [{"premise": "It is wet.", "hypothesis": "It rained", "label": 0, "idx": 0}],
        "validation": [
            {"premise": "P", "hypothesis": "H", "label": 2, "idx": 0},
            {"premise": "Q", "hypothesis": "I", "label": 1, "idx": 1},
        ],
    },
)
COPA = {"premise": "It rained.", "choice1": "I got wet.", "choice2": "I ate.", "question": "effect", "idx": 0}
COPA_SOURCE = "copa choice1: I got wet. choice2: I ate. premise: It rained. question: effect"
TEXTS["super_glue", "copa"] = {"train": [(COPA_SOURCE, ["choice2"])], "validation": [(COPA_SOURCE, ["choice1"])]}
FILES["super_glue", "copa"] = {
    "COPA/train.jsonl": jsonl(COPA | {"label": 1}),
    "COPA/val.jsonl": jsonl(COPA | {"label": 0}),
}
HUB["super_glue", "copa"] = (
    Features(
        premise=TEXT,
        choice1=TEXT,
        choice2=TEXT,
        question=TEXT,
        idx=INTEGER,
        label=ClassLabel(names=["choice1", "choice2"]),
    ),
    {"train": [COPA | {"label": 1}], "validation": [COPA | {"label": 0}]},
)
TEXTS["super_glue", "multirc"] = {"train": MULTIRC_TEXTS, "validation": MULTIRC_TEXTS[:2]}
FILES["super_glue", "multirc"] = {
    "MultiRC/train.jsonl": jsonl(MULTIRC),
    "MultiRC/val.jsonl": jsonl(
        MULTIRC | {"passage": {"text": PASSAGE, "questions": MULTIRC["passage"]["questions"][:1]}}
    ),
}
MULTIRC_ROWS = [
    {
        "paragraph": PASSAGE,
        "question": q,
        "answer": a,
        "idx": {"paragraph": 7, "question": n, "answer": m},
        "label": label,
    }
    for q, a, n, m, label in (
        ("What sank?", "A ship", 3, 0, 1),
        ("What sank?", "Rain", 3, 1, 0),
        ("When?", "Never", 4, 2, 0),
    )
]
HUB["super_glue", "multirc"] = (
    Features(
        paragraph=TEXT,
        question=TEXT,
        answer=TEXT,
        label=ClassLabel(names=["False", "True"]),
        idx={"paragraph": INTEGER, "question": INTEGER, "answer": INTEGER},
    ),
    {"train": MULTIRC_ROWS, "validation": MULTIRC_ROWS[:2]},
)
TEXTS["super_glue", "record"] = {  # in training a row for each answer
    "train": [RECORD_TEXTS[0], (RECORD_TEXTS[1][0], ["Ann"]), (RECORD_TEXTS[1][0], ["Bob"])],
    "validation": RECORD_TEXTS,
}
FILES["super_glue", "record"] = {"ReCoRD/train.jsonl": jsonl(RECORD), "ReCoRD/val.jsonl": jsonl(RECORD)}
RECORD_ROWS = [
    {
        "passage": RECORD_PASSAGE,
        "query": query,
        "entities": ["Ann", "Bob"],
        "answers": answers,
        "entity_spans": {"text": ["Ann"], "start": [8], "end": [11]},
        "idx": {"passage": 5, "query": n},
    }
    for n, (query, answers) in enumerate([("@placeholder won", ["Ann"]), ("@placeholder met", ["Ann", "Bob"])])
]
HUB["super_glue", "record"] = (
    Features(
        passage=TEXT,
        query=TEXT,
        entities=List(TEXT),
        answers=List(TEXT),
        idx={"passage": INTEGER, "query": INTEGER},
        entity_spans={"text": List(TEXT), "start": List(INTEGER), "end": List(INTEGER)},
    ),
    {"train": RECORD_ROWS, "validation": RECORD_ROWS},
)
TEXTS["super_glue", "rte"] = {
    "train": [("rte hypothesis: H. premise: P.", ["not_entailment"])],
    "validation": [("rte hypothesis: I. premise: Q.", ["entailment"])],
}
FILES["super_glue", "rte"] = {
    "RTE/train.jsonl": jsonl({"premise": "P.", "hypothesis": "H.", "label": "not_entailment", "idx": 0}),
    "RTE/val.jsonl": jsonl({"premise": "Q.", "hypothesis": "I.", "label": "entailment", "idx": 0}),
}
HUB["super_glue", "rte"] = (
    Features(premise=TEXT, hypothesis=TEXT, idx=INTEGER, label=ClassLabel(names=["entailment", "not_entailment"])),
    {
        "train": [{"premise": "P.", "hypothesis": "H.", "label": 1, "idx": 0}],
        "validation": [{"premise": "Q.", "hypothesis": "I.", "label": 0, "idx": 0}],
    },
)
WIC = {"word": "bank", "sentence1": "A bank of sand.", "sentence2": "My bank."}
TEXTS["super_glue", "wic"] = {
    "train": [("wic sentence1: A bank of sand. sentence2: My bank. word: bank", ["False"])],
    "validation": [("wic sentence1: A bank of sand. sentence2: My bank. word: bank", ["True"])],
}
FILES["super_glue", "wic"] = {
    "WiC/train.jsonl": jsonl(WIC | {"idx": 0, "label": False, "start1": 2, "end1": 6, "start2": 3, "end2": 7}),
    "WiC/val.jsonl": jsonl(WIC | {"idx": 0, "label": True, "start1": 2, "end1": 6, "start2": 3, "end2": 7}),
}
HUB["super_glue", "wic"] = (
    Features(
        word=TEXT,
        sentence1=TEXT,
        sentence2=TEXT,
        start1=INTEGER,
        idx=INTEGER,
        label=ClassLabel(names=["False", "True"]),
    ),
    {"train": [WIC | {"start1": 2, "idx": 0, "label": 0}], "validation": [WIC | {"start1": 2, "idx": 0, "label": 1}]},
)
TEXTS["super_glue", "wsc"] = {  # rows whose candidate is wrong teach nothing, but are judged
    "train": [WSC_TEXTS[0], WSC_TEXTS[2]],
    "validation": WSC_TEXTS,
    "test": [(WSC_TEXTS[0][0], None)],
}
FILES["super_glue", "wsc"] = {
    "WSC/train.jsonl": jsonl(wsc_file(WSC_ROW, True), wsc_file(WSC_OTHER, False), wsc_file(WSC_SHIFTED, True)),
    "WSC/val.jsonl": jsonl(wsc_file(WSC_ROW, True), wsc_file(WSC_OTHER, False), wsc_file(WSC_SHIFTED, True)),
    "WSC/test.jsonl": jsonl(wsc_file(WSC_ROW, None)),
}
WSC_ROWS = [row | {"span1_index": 0, "label": n} for row, n in ((WSC_ROW, 1), (WSC_OTHER, 0), (WSC_SHIFTED, 1))]
HUB["super_glue", "wsc"] = (
    Features(
        text=TEXT,
        span1_index=INTEGER,
        span2_index=INTEGER,
        span1_text=TEXT,
        span2_text=TEXT,
        label=ClassLabel(names=["False", "True"]),
    ),
    {"train": WSC_ROWS, "validation": WSC_ROWS, "test": [WSC_ROWS[0] | {"label": -1}]},
)

for name, language, word in (("ro", "Romanian", "Bună"), ("de", "German", "Hallo")):
    key = ("translation", f"wmt16_en_{name}")
    TEXTS[key] = {
        "train": [
            (f"translate English to {language}: Hello.", [f"{word}."]),
            (f"translate English to {language}: He said: yes", [f"{word}: x"]),
        ],
        "validation": [(f"translate English to {language}: Hello.", [f"{word}."])],
    }
    FILES[key] = {
        "train.en": "Hello.\nHe said: yes \n",
        f"train.{name}": f"{word}.\n{word}: x\n",
        "dev.en": "Hello.\n",
        f"dev.{name}": f"{word}.\n",
    }
    pairs = [{"en": "Hello.", name: f"{word}."}, {"en": "He said: yes ", name: f"{word}: x"}]
    rows = [{"translation": pair} for pair in pairs]
    HUB[key] = (Features(translation={"en": TEXT, name: TEXT}), {"train": rows, "validation": rows[:1]})
TEXTS["translation", "multi30k_en_de"] = {
    "train": [("translate English to German: Two dogs run.", ["Zwei Hunde rennen."])],
    "validation": [("translate English to German: A man.", ["Ein Mann."])],
    "test": [("translate English to German: A boy.", ["Ein Junge."])],
}
FILES["translation", "multi30k_en_de"] = {
    "train.en": "Two dogs run.\n",
    "train.de": "Zwei Hunde rennen.\n",
    "val.en": "A man.\n",
    "val.de": "Ein Mann.\n",
    "test_2016_flickr.en": "A boy.\n",
    "test_2016_flickr.de": "Ein Junge.",
}
HUB["translation", "multi30k_en_de"] = (
    Features(en=TEXT, de=TEXT),
    {
        "train": [{"en": "Two dogs run.", "de": "Zwei Hunde rennen."}],
        "validation": [{"en": "A man.", "de": "Ein Mann."}],
        "test": [{"en": "A boy.", "de": "Ein Junge."}],
    },
)

for name, columns in (
    ("cnn_dailymail", ("article", "highlights")),
    ("xsum", ("document", "summary")),
    ("samsum", ("dialogue", "summary")),
):
    key = ("summarization", name)
    row = {columns[0]: "Ann: Hi!\nBob: Hello.", columns[1]: "They greet .\nBoth do .", "id": "1"}
    TEXTS[key] = {
        split: [("summarize: Ann: Hi!\nBob: Hello.", ["They greet .\nBoth do ."])]
        for split in ("train", "validation", "test")
    }
    files = DATASET_VALS["summarization"][name]["files"]
    as_array = files["train"].endswith(".json")  # SAMSum's corpus is one array a file
    FILES[key] = {file: json.dumps([row], indent=1) if as_array else jsonl(row) for file in files.values()}
    HUB[key] = (Features({column: TEXT for column in row}), {split: [row] for split in files})
SCITLDR = {"source": ["We do it.", "It works."], "source_labels": [0, 1], "paper_id": "x", "target": ["A way."]}
TEXTS["summarization", "scitldr"] = {
    "train": [("summarize: We do it. It works.", ["A way."])],
    "validation": [("summarize: We do it. It works.", ["A way.", "The way"])],
}
FILES["summarization", "scitldr"] = {
    "train.jsonl": jsonl(SCITLDR),
    "dev.jsonl": jsonl(SCITLDR | {"target": ["A way.", "The way "]}),
}

TEXTS["question_answering", "squad"] = {
    "train": [(SQUAD_TEXTS[0][0], ["Oxygen"]), (SQUAD_TEXTS[0][0], ["Oxygen ( O2 )"]), SQUAD_TEXTS[1]],
    "validation": SQUAD_TEXTS,
}
FILES["question_answering", "squad"] = {"train-v1.1.json": json.dumps(SQUAD), "dev-v1.1.json": json.dumps(SQUAD)}
SQUAD_ROWS = [
    {
        "id": qa["id"],
        "title": "Air",
        "context": "Oxygen (O2) is 21%.",
        "question": qa["question"],
        "answers": {key: [answer[key] for answer in qa["answers"]] for key in ("text", "answer_start")},
    }
    for qa in SQUAD["data"][0]["paragraphs"][0]["qas"]
]
HUB["question_answering", "squad"] = (
    Features(
        id=TEXT, title=TEXT, context=TEXT, question=TEXT, answers={"text": List(TEXT), "answer_start": List(INTEGER)}
    ),
    {"train": SQUAD_ROWS, "validation": SQUAD_ROWS},
)
GSM8K = {"question": "2 + 2?", "answer": "It is <<2+2=4>>4.\n#### 4"}
TEXTS["question_answering", "gsm8k"] = {
    split: [("solve: 2 + 2?", ["It is <<2+2=4>>4.\n#### 4"])] for split in ("train", "test")
}
FILES["question_answering", "gsm8k"] = {"train.jsonl": jsonl(GSM8K), "test.jsonl": jsonl(GSM8K)}
HUB["question_answering", "gsm8k"] = (Features(question=TEXT, answer=TEXT), {"train": [GSM8K], "test": [GSM8K]})

SKI = "generate a sentence with: ski mountain"
TEXTS["generation", "common_gen"] = {  # lines with the same concepts are references of one example
    "train": [(SKI, ["We ski."]), (SKI, ["A mountain."])],
    "validation": [(SKI, ["We ski.", "I ski there."]), ("generate a sentence with: dog run", ["A dog runs."])],
}
FILES["generation", "common_gen"] = {
    "commongen.train.src_alpha.txt": "ski mountain\nski mountain\n",
    "commongen.train.tgt.txt": "We ski.\nA mountain.\n",
    "commongen.dev.src_alpha.txt": "ski mountain\ndog run\nski mountain\n",
    "commongen.dev.tgt.txt": "We ski.\nA dog runs.\nI ski there. \n",
}
HUB["generation", "common_gen"] = (
    Features(concept_set_idx=INTEGER, concepts=List(TEXT), target=TEXT),
    {
        "train": [
            {"concept_set_idx": 0, "concepts": ["ski", "mountain"], "target": "We ski."},
            {"concept_set_idx": 0, "concepts": ["ski", "mountain"], "target": "A mountain."},
        ],
        "validation": [
            {"concept_set_idx": 0, "concepts": ["ski", "mountain"], "target": "We ski."},
            {"concept_set_idx": 1, "concepts": ["dog", "run"], "target": "A dog runs."},
            {"concept_set_idx": 0, "concepts": ["ski", "mountain"], "target": "I ski there."},
        ],
        "test": [{"concept_set_idx": 0, "concepts": ["a", "b"], "target": ""}],
    },
)
TEXTS["generation", "e2e_nlg"] = {
    "train": [("describe: name[Blue Spice], area[city centre]", ["Blue Spice is there."])],
    "validation": [("describe: name[X]", ["X it is.", 'It is "X".'])],
}
FILES["generation", "e2e_nlg"] = {
    "trainset.csv": 'mr,ref\n"name[Blue Spice], area[city centre]",Blue Spice is there.\n',
    "devset.csv": 'mr,ref\nname[X],X it is.\nname[X],"It is ""X""."\n',
}
TRIPLES = ['Aarhus_Airport | cityServed | "Aarhus, Denmark"', "Aarhus | country | Denmark"]
WEB_NLG_SOURCE = (
    'translate Graph to English: Aarhus_Airport | cityServed | "Aarhus, Denmark" && Aarhus | country | Denmark'
)
TEXTS["generation", "web_nlg"] = {
    "train": [(WEB_NLG_SOURCE, ["It serves Aarhus."])],
    "validation": [(WEB_NLG_SOURCE, ["It serves Aarhus.", "Aarhus has it."])],
}
WEB_NLG = {"gem_id": "x", "input": TRIPLES, "target": "It serves Aarhus.", "references": []}
FILES["generation", "web_nlg"] = {
    "web_nlg_en/train.json": json.dumps([WEB_NLG]),
    "web_nlg_en/validation.json": json.dumps([WEB_NLG | {"references": ["It serves Aarhus.", "Aarhus has it."]}]),
}
TEXTS["generation", "disfl_qa"] = {
    split: [
        ("correct the question: Who no What is it?", ["What is it?"]),
        ("correct the question: Uh when?", ["When?"]),
    ]
    for split in ("train", "validation")
}
DISFL_QA = {
    "5a66": {"original": "What is it?", "disfluent": "Who no What is it?"},
    "5a67": {"original": "When?", "disfluent": "Uh when?"},
}
FILES["generation", "disfl_qa"] = {name: json.dumps(DISFL_QA) for name in ("train.json", "dev.json")}
TEXTS["generation", "wiki_split"] = {
    split: [('split: It "rains and we stay .', ['It "rains . We stay .'])] for split in ("train", "validation")
}
FILES["generation", "wiki_split"] = {
    name: 'It "rains and we stay .\tIt "rains . <::::> We stay .\n' for name in ("train.tsv", "validation.tsv")
}

# The entries of all other groups, whose files test_examples.py and test_diacritics.py read: the columns of two rows as
# they are read, and what the model reads and writes of them.
SENTENCES = [dict(sentence1="It rains.", sentence2="It pours."), dict(sentence1="A cat.", sentence2="A dog.")]
PAIRS_OF = "{} sentence1: It rains. sentence2: It pours.", "{} sentence1: A cat. sentence2: A dog."
HYPOTHESES = [dict(premise="It rains.", hypothesis="It is wet."), dict(premise="A cat.", hypothesis="A dog.")]
MNLI = "mnli hypothesis: It is wet. premise: It rains.", "mnli hypothesis: A dog. premise: A cat."
OTHERS = {
    ("glue", "cola"): (
        [dict(sentence="We won."), dict(sentence="Won we have.")],
        ("cola sentence: We won.", "cola sentence: Won we have."),
        ("acceptable", "unacceptable"),
    ),
    ("glue", "sst2"): (
        [dict(sentence="a smile"), dict(sentence="a bore")],
        ("sst2 sentence: a smile", "sst2 sentence: a bore"),
        ("positive", "negative"),
    ),
    ("glue", "mrpc"): (SENTENCES, PAIRS_OF, ("equivalent", "not_equivalent")),
    ("glue", "qqp"): (
        [dict(question1="How?", question2="Why?"), dict(question1="Who?", question2="Whom?")],
        ("qqp question1: How? question2: Why?", "qqp question1: Who? question2: Whom?"),
        ("duplicate", "not_duplicate"),
    ),
    ("glue", "stsb"): (SENTENCES, PAIRS_OF, ("3.8", "0.4")),
    ("glue", "mnli"): (HYPOTHESES, MNLI, ("entailment", "contradiction")),
    ("glue", "qnli"): (
        [dict(question="What?", sentence="That."), dict(question="Who?", sentence="When.")],
        ("qnli question: What? sentence: That.", "qnli question: Who? sentence: When."),
        ("entailment", "not_entailment"),
    ),
    ("glue", "rte"): (SENTENCES, PAIRS_OF, ("entailment", "not_entailment")),
    ("glue", "wnli"): (SENTENCES, PAIRS_OF, ("entailment", "not_entailment")),
    ("glue", "ax"): (HYPOTHESES, MNLI, ("entailment", "neutral")),
    ("builtin", "package_topic"): (
        [dict(text="A tensor."), dict(text="An axis.")],
        ("package text: A tensor.", "package text: An axis."),
        ("torch", "matplotlib"),
    ),
    ("builtin", "docstring_summary"): (
        [dict(text="Returns it.\nMore."), dict(text="Sorts all.")],
        ("summarize: Returns it.\nMore.", "summarize: Sorts all."),
        ("The value of it", "A list in order"),
    ),
    ("text", "restore_diacritics"): (
        [dict(text="Così è."), dict(text="Ça va.")],
        ("Cosi e.", "Ca va."),
        ("Così è.", "Ça va."),
    ),
    ("text", "restore_romanian_diacritics"): (
        [dict(text="Aşa e."), dict(text="În fața.")],  # a cedilla is written as a comma
        ("Asa e.", "In fata."),
        ("Așa e.", "În fața."),
    ),
}
# What each metric gives to all answers right, and to two rows' answers in each other's place.
FULL_AND_SWAPPED = {"matthews_correlation": (1, -1), "pearson": (1, -1), "spearman": (1, -1)}
FULL_AND_SWAPPED["diacritic_error_rate"] = (0, 1)

ENTRIES = [(group, name) for group in GROUPS for name in DATASET_VALS[group]]
CASES = [(f"{name}_{split}", group, name, split) for (group, name), splits in TEXTS.items() for split in splits]


class TestCase(parameterized.TestCase):
    def texts(self, group: str, name: str, split: str, task: TaskEntry, **flags) -> list:
        rows = load_rows(name, task, TaskArguments(group, name, **flags), split)
        return [
            (source_text(task, row), reference_texts(name, task, row) if task.target in row else None) for row in rows
        ]

    def write(self, files: dict[str, str]) -> Path:
        for file, content in files.items():
            path = self.folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        return self.folder


class RegistryTest(TestCase):
    def test_every_entry_stands_in_the_tables(self):
        self.assertCountEqual(TEXTS, ENTRIES)
        self.assertCountEqual(FILES, ENTRIES)
        self.assertCountEqual(HUB, [(g, n) for g, n in ENTRIES if find_entry(g, n).hub])
        for group, name in ENTRIES:
            self.assertContainsSubset(["train", *find_entry(group, name).eval_splits], TEXTS[group, name], name)

    def test_each_entry_there_is_stands_in_one_of_the_tables(self):
        everything = [(group, name) for group, entries in DATASET_VALS.items() for name in entries]
        self.assertCountEqual([*TEXTS, *OTHERS], everything)

    @parameterized.parameters(*OTHERS)
    def test_the_texts_and_metrics_of_the_others(self, group, name):
        task, (rows, sources, targets) = find_entry(group, name), OTHERS[group, name]
        made = []
        for row, target in zip(rows, targets, strict=True):
            read = {task.target: target} | row
            made.append(TRANSFORMS[task.preprocess](read) if isinstance(task.preprocess, str) else read)
        prefixed = tuple(source.format(name) for source in sources)
        self.assertEqual(tuple(source_text(task, row) for row in made), prefixed)
        self.assertEqual(tuple(target_text(name, task, row) for row in made), targets)
        for place, answers in enumerate((targets, targets[::-1])):
            scores = scoring.score_predictions(task, list(answers), list(targets))
            for metric in task.metrics:
                self.assertAlmostEqual(scores[metric], FULL_AND_SWAPPED.get(metric, (1, 0))[place], msg=metric)

    @parameterized.named_parameters(*CASES)
    def test_official_files(self, group, name, split):
        task = find_entry(group, name)
        found = self.texts(group, name, split, task, data_dir=str(self.write(FILES[group, name])))
        self.assertEqual(found, TEXTS[group, name][split])

    @parameterized.named_parameters(*[case for case in CASES if (case[1], case[2]) in HUB])
    def test_columns_of_the_hub(self, group, name, split):
        task = self.saved_hub(group, name)
        self.assertEqual(self.texts(group, name, split, task), TEXTS[group, name][split])

    def saved_hub(self, group: str, name: str) -> TaskEntry:
        """The entry with a saved folder in place of its Hub name."""
        features, splits = HUB[group, name]
        saved = {split: datasets.Dataset.from_list(rows, features=features) for split, rows in splits.items()}
        datasets.DatasetDict(saved).save_to_disk(self.folder / "hub")
        return dataclasses.replace(find_entry(group, name), hub=(str(self.folder / "hub"), None))

    def test_answers_that_the_hub_hides_as_empty_texts(self):
        found = self.texts("generation", "common_gen", "test", self.saved_hub("generation", "common_gen"))
        self.assertEqual(found, [("generate a sentence with: a b", None)])

    @parameterized.parameters(*ENTRIES)
    def test_rows_become_tokens_and_right_answers_score_full_marks(self, group, name):
        """From the files through the tokens to the metrics, where a model says each reference's first text."""
        task, tokenizer = find_entry(group, name), ByT5Tokenizer()
        flags = dict(data_dir=str(self.write(FILES[group, name])), data_cache_dir=str(self.folder / "cache"))
        split, made = task.eval_splits[0], Task(name, task, TaskArguments(group, name, **flags))
        made = LoadedTask(made, made.read([split]), tokenizer)
        rows, data = made.rows[split], made.data[split]
        self.assertLen(rows, len(TEXTS[group, name][split]))
        answers = [target_text(name, task, row) for row in rows]
        self.assertEqual([tokenizer.decode(ids, skip_special_tokens=True) for ids in data["labels"]], answers)
        if name == "wsc":  # the candidate of the second row is the wrong one: saying it is an error
            answers[1] = "somebody else"
        width = max(len(text.encode()) for text in answers) + 1
        ids = tokenizer(answers, padding="max_length", max_length=width, return_tensors="np")["input_ids"]
        statistics = [[1.0] * len(STATISTICS)] * len(rows)
        output = EvalPrediction(predictions=(ids, np.array(statistics)), label_ids=ids)
        scores = task_metrics(task, tokenizer, True, rows)(output)
        for metric in task.metrics:
            if metric != "bleu":  # of a few words: some have no four-grams
                self.assertAlmostEqual(scores[metric], 1.0, msg=metric)
        self.assertIn(task.metrics[0], scores)

    @parameterized.parameters(  # what TensorFlow Datasets' own reader makes of such rows of the official file
        ("I washed the knife , since it was dirty.", "The knife", "the knife"),
        ("The old king fled when it burned.", "the old king", "The old king"),
        ('It was " a b c " because it was short.', "a b\nc", "a b c"),
        ("We left the ship. And it sank.", "The ship.", "the ship"),
        ("Ann saw Bob, and it was late.", "Ann and Bob", "Ann and Bob"),  # not in the text
    )
    def test_candidates_of_wsc_as_the_hub_has_them(self, text, candidate, expected):
        row = {"text": text, "span1_text": candidate, "span2_text": "it", "span2_index": text.split().index("it")}
        self.assertEqual(TRANSFORMS["wsc"](row)["span1_text"], expected)
        self.assertEqual(row["span1_text"], candidate)  # the argument stays as it is

    @parameterized.parameters(  # made by t5.data.preprocessors._pad_punctuation, spaces at the ends aside
        ("O2\xa0(21%)\tis  air.\u2028", "O2\xa0 ( 21 % ) is air . \u2028"),
        ('"it\'s"\r\n$5-6 – «x» ¿no? _a_', '" it \' s " $ 5 - 6 – «x» ¿no ? _ a _'),
        ("a\u3000b,c", "a\u3000b , c"),
    )
    def test_spaces_around_punctuation(self, text, expected):
        self.assertEqual(pad_punctuation(text), expected)

    def test_entities_of_record_keep_their_spaces(self):  # as in t5.data.preprocessors.record
        row = {"passage": "P", "query": "Q", "entities": ["Bob ", "Ann"], "answers": ["Ann"]}
        source = source_text(find_entry("super_glue", "record"), TRANSFORMS["record"](row))
        self.assertEqual(source, "record query: Q entities: Bob , Ann passage: P")

    def test_tokenize_function_joins_lists(self):
        task = dataclasses.replace(find_entry("generation", "common_gen"), prefix="write")
        encode = build_tokenize_function("common_gen", task, ByT5Tokenizer(), 512, None)
        batch = encode({"concepts": [["A", "B "]], "target": [["B", "A"]]})
        self.assertEqual(ByT5Tokenizer().decode(batch["input_ids"][0], skip_special_tokens=True), "write: A B")
        self.assertEqual(ByT5Tokenizer().decode(batch["labels"][0], skip_special_tokens=True), "B")

    def test_rows_without_answers_can_be_asked(self):
        task = find_entry("super_glue", "wsc")
        flags = dict(data_dir=str(self.write(FILES["super_glue", "wsc"])), data_cache_dir=str(self.folder / "cache"))
        task = Task("wsc", task, TaskArguments("super_glue", "wsc", **flags))
        task = LoadedTask(task, task.read(["validation", "test"]), ByT5Tokenizer())
        self.assertEqual(task.examples, {"validation": 3, "test": 1})
        self.assertNotIn("labels", task.data["test"].column_names)
        scoring = task.evaluation_task("test", with_generate=False)
        self.assertEqual((scoring.class_label_ids, scoring.predict_with_generate, scoring.max_length), (None, True, 17))
        self.assertEqual([task.label("validation"), task.label("test")], ["", "test"])


class MainMetricTest(TestCase):
    """Which metric chooses the best checkpoint, and which way it is better."""

    ENTRY = dict(inputs={"": "a"}, target="b", max_source_length=8, max_target_length=8)

    def flags(self, *entries: dict, **flags) -> dict:
        names = TaskArguments("mine", ",".join("abc"[: len(entries)]))
        tasks = [
            Task(name, TaskEntry.of(name, self.ENTRY | entry), names, len(entries) > 1)
            for name, entry in zip("abc", entries, strict=False)
        ]
        args = FineTuningArguments(output_dir=str(self.folder / "out"), report_to="none", **flags)
        args.given = frozenset(flags)
        return Tasks(tasks).flags(args)

    @parameterized.parameters(
        (["accuracy"], {}, "eval_accuracy", True),
        (["diacritic_error_rate"], {}, "eval_diacritic_error_rate", False),
        (["token_error_rate", "sequence_error_rate"], {}, "eval_token_error_rate", False),
        (["sequence_error_rate"], {}, "eval_sequence_error_rate", False),
        (["exact_match"], dict(metric_for_best_model="loss"), "loss", False),
        (["accuracy"], dict(metric_for_best_model="eval_invalid_outputs"), "eval_invalid_outputs", False),
        (["accuracy"], dict(metric_for_best_model="token_accuracy"), "token_accuracy", True),
        (["accuracy"], dict(greater_is_better=False), "eval_accuracy", False),
        ({"mine": len}, dict(greater_is_better=False), "eval_mine", False),
        ({"mine": len}, dict(greater_is_better=True), "eval_mine", True),
    )
    def test_direction(self, metrics, flags, name, greater):
        kind = dict(target_type="class", labels=["x", "y"]) if metrics == ["accuracy"] else dict(target_type="text")
        found = self.flags(kind | {"metrics": metrics}, **flags)
        self.assertEqual((found["metric_for_best_model"], found["greater_is_better"]), (name, greater))
        self.assertEqual(found["predict_with_generate"], kind["target_type"] == "text")

    def test_several_tasks(self):
        error = dict(target_type="text", metrics=["diacritic_error_rate"])
        right = dict(target_type="text", metrics=["exact_match"])
        self.assertTrue(self.flags(right, right)["greater_is_better"])
        self.assertFalse(self.flags(error, error)["greater_is_better"])
        with self.assertRaisesRegex(
            UserError, "--task mine/a,mine/b: .* diacritic_error_rate, exact_match have no common mean.*--metric_for_b"
        ):
            self.flags(error, right)
        mine = dict(target_type="text", metrics={"mine": len})
        with self.assertRaisesRegex(
            UserError, "metric mine: nothing says which way it is better. Add its name to GREATER"
        ):
            self.flags(mine, right)
        with mock.patch.object(scoring, "GREATER_IS_BETTER", {"mine", "exact_match"}):
            self.assertTrue(self.flags(mine, right)["greater_is_better"])
        found = self.flags(error, right, metric_for_best_model="a_diacritic_error_rate")
        self.assertEqual(found["greater_is_better"], False)

    def test_an_unknown_metric_needs_its_direction(self):
        with self.assertRaisesRegex(UserError, "metric mine: nothing .* or give --greater_is_better true or false"):
            self.flags(dict(target_type="text", metrics={"mine": len}))


class OwnEntryTest(TestCase):
    """What an entry may say, on a task of one's own."""

    ENTRY = dict(
        prefix="p",
        inputs={"": "doc.text"},
        target="refs",
        target_type="text",
        metrics=["exact_match"],
        max_source_length=32,
        max_target_length=32,
        files={"train": "train.jsonl", "validation": "dev.jsonl"},
    )

    def rows(self, split: str, change: dict, *rows: dict) -> list:
        self.write({self.ENTRY["files"][split]: jsonl(*rows)})
        return self.texts("glue", "mine", split, TaskEntry.of("mine", self.ENTRY | change), data_dir=str(self.folder))

    def test_nested_columns_through_lists_of_records(self):
        change = {"target": "refs.text"}
        row = {"doc": {"text": "a"}, "refs": [{"text": "x"}, {"text": "y"}]}
        self.assertEqual(self.rows("validation", change, row), [("p: a", ["x", "y"])])
        self.assertEqual(self.rows("train", change, row), [("p: a", ["x"]), ("p: a", ["y"])])

    def test_a_column_whose_name_has_a_dot(self):
        self.assertEqual(self.rows("validation", {}, {"doc.text": "a", "refs": "x"}), [("p: a", ["x"])])

    A, X = {"doc": {"text": "a"}}, {"doc": {"text": "a"}, "refs": "x"}

    @parameterized.parameters(  # (row, what the entry says, what the message names)
        (X | {"doc": {"txt": "a"}}, {}, "dev.jsonl, row 1", "doc.text", "doc, refs"),
        (X | {"doc": "a"}, {}, "doc.text"),
        (X | {"refs": []}, {}, "row 1", "refs"),
        (X | {"refs": ["x", None]}, {}, "refs is empty in part"),
        (X | {"doc": [{"text": "a"}, {"text": None}]}, {}, "doc.text is empty in part"),
        (X | {"doc": {"text": {"en": "a", "de": "b"}}}, {}, "row 1", "doc.text", "dict"),
        (X | {"refs": [["x"]]}, {}, "row 1", "refs", "list"),
        (A, {"preprocess": lambda row: row | {"refs": b"x"}}, "row 1", "refs", "bytes"),
        ({"text": "a"}, {"preprocess": "wsc"}, "row 1", "wsc", "'span2_index'", "text"),
        ({"text": "a"}, {"preprocess": lambda row: {"doc.text": row["txt"]}}, "OwnEntryTest.<lambda>", "'txt'", "text"),
        ({"text": "x"}, {"inputs": lambda row: row["txt"]}, "row 1", "inputs .OwnEntryTest.<lambda>", "'txt'", "text"),
        ({"text": "a"}, {"preprocess": lambda _: None}, "row 1", "OwnEntryTest.<lambda>", "None", "a row"),
        ({"passage": "a", "idx": 1}, {"preprocess": "multirc"}, "multirc", "string"),
        ({"text": "a b", "span2_text": "he", "span2_index": 1}, {"preprocess": "wsc"}, "wsc", "'he'"),
    )
    def test_refused_row(self, row, change, *named):
        with self.assertRaisesRegex(ValueError, ".*".join(named)):
            self.rows("validation", change, row)

    def test_no_training_row_is_wanted(self):
        with self.assertRaisesRegex(ValueError, "task mine, split train: no rows"):
            self.rows("train", {"train_without": {"good": ["0"]}}, {"doc": {"text": "a"}, "refs": "x", "good": 0})

    def test_a_function_of_a_row_gives_one_row_or_several(self):
        def parts(row: dict) -> list[dict] | dict:
            return [{"doc.text": text, "refs": row["refs"]} for text in row["texts"]] if "texts" in row else row

        rows = {"texts": ["a", "b"], "refs": "x"}, {"texts": [], "refs": "y"}, {"doc.text": "c", "refs": "z"}
        expected = [("p: a", ["x"]), ("p: b", ["x"]), ("p: c", ["z"])]
        for function in (parts, functools.partial(parts)):  # which has no name
            self.assertEqual(self.rows("validation", {"preprocess": function}, *rows), expected)

    def test_training_rows_by_their_values(self):
        change = {"train_without": {"good": ["0"]}}
        rows = [{"doc": {"text": f"{i}{good}", "id": i}, "refs": "x", "good": good} for i in (1, 2) for good in (0, 1)]
        self.assertEqual([source for source, _ in self.rows("train", change, *rows)], ["p: 11", "p: 21"])
        self.assertLen(self.rows("validation", change, *rows), 4)

    def test_splits_to_predict(self):
        for evaluated, predicted in (
            (None, ["test"]),
            (["near", "far"], ["test"]),
            (["test"], ["test"]),
            (["validation_a", "validation_b"], ["test_a", "test_b"]),
        ):
            self.assertEqual(TaskEntry(**({"eval_splits": evaluated} if evaluated else {})).test_splits, predicted)

    def parallel(self, texts: dict[str, str]) -> list:
        self.write(texts)
        change = {"inputs": {"": "a"}, "target": "b", "files": {"train": {"a": "a.txt", "b": "b.txt"}}}
        entry = TaskEntry.of("mine", self.ENTRY | change)
        return self.texts("glue", "mine", "train", entry, data_dir=str(self.folder))

    def test_a_carriage_return_within_a_line_shifts_no_pairs(self):  # nor does it where TensorFlow Datasets reads WMT
        (self.folder / "a.txt").write_bytes(b"1\rone\r\n2\n3\n")
        (self.folder / "b.txt").write_bytes(b"x\ny\rz\r\nw\r\n")
        self.assertEqual(self.parallel({}), [("p: 1\rone", ["x"]), ("p: 2", ["y\rz"]), ("p: 3", ["w"])])

    @parameterized.parameters(
        ({"a.txt": "1\n2\n", "b.txt": "1\n2\n3\n"}, r"a.txt: ends at line 2, before .*b\.txt"),
        ({"a.txt": "1\n2\n3\n", "b.txt": "1\n2\n"}, r"b.txt: ends at line 2, before .*a\.txt"),
        ({"a.txt": "1\n"}, "no file b.txt, which task mine reads as train"),
    )
    def test_parallel_files_that_do_not_fit(self, texts, message):
        with self.assertRaisesRegex(ValueError, message):
            self.parallel(texts)

    def test_a_task_of_files_alone_without_their_folder(self):
        change = {"files": {"train": "nowhere/train.jsonl"}}
        with self.assertRaisesRegex(ValueError, "^--data_dir is not given: no file nowhere/train.jsonl, which task"):
            self.texts("glue", "mine", "train", TaskEntry.of("mine", self.ENTRY | change))
