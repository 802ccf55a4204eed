"""A task as one typed record: an entry of `DATASET_VALS`, read and checked once.

TaskEntry.of("mine", DATASET_VALS["benchmark"]["mine"])     # of the dictionary that a user wrote
dataclasses.replace(entry, max_source_length=64)            # with what flags or task.json say
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from foundry.arguments.task import TARGET_TYPES
from foundry.common.errors import UserError
from foundry.common.words import did_you_mean, listed
from foundry.corpora.files import say_once
from foundry.corpora.reading import as_list
from foundry.features import Column, further_fields, task_features
from tasks.transforms import TRANSFORMS

# The column for the text that a function `inputs` returns, which `source_text` reads.
MADE_SOURCE = "text of inputs"
COLUMN_KINDS = ("answer", "answers", "number", "boolean")
FURTHER_COLUMNS = further_fields("column")  # fields of features that name a column
_BATCH = ("input_ids", "attention_mask", "labels", "decoder_input_ids")
_REQUIRED = ("inputs", "target", "target_type", "metrics", "max_source_length", "max_target_length")


class UnreadableRow(UserError):
    """A function of an entry cannot read a row. The message names the function and the row's columns."""


def call_on_row(name: str, function: Callable[[dict], Any], row: dict) -> Any:
    """function(row). UnreadableRow, with the function's name, if it cannot read the row."""
    try:
        return function(row)
    except UnreadableRow:  # of a function that it calls
        raise
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        reason = f"no column {error}" if isinstance(error, KeyError) else error
        raise UnreadableRow(f"{name}: {reason}; available: {listed(row)}") from None


@dataclass(frozen=True, kw_only=True)
class TaskEntry:
    """What is read, written and measured in a task. The head of constants.py says what each field means to a user; here
    `inputs` and `metrics` have no functions any more, and fields that only features read are in `further`.

    Every field has a value. `inputs` is {} as long as flags of own pairs leave the columns to the rows.
    """

    # what the model reads and writes
    prefix: str | None = None
    inputs: dict[str, str] = field(default_factory=dict)  # {key in the source text: column}
    target: str = ""
    file_columns: dict[str, Any] = field(default_factory=dict)  # {column: its name or number in the files, or several}
    preprocess: Callable[[dict], dict | list[dict]] | str | None = None
    target_type: str = "text"  # one of TARGET_TYPES
    labels: Sequence[str] = ()
    ordered_labels: bool = True  # else a whole number in the data is no class, but an error
    positive_label: str | None = None  # as it is written; `positive_class` is what counts
    # what is measured
    metrics: Sequence[str] = ()
    metric_functions: dict[str, Callable] = field(default_factory=dict)  # those metrics that are functions
    metric_columns: Sequence[str] = ()
    # which rows
    records: str = ""
    skip_where: dict[str, Sequence[str]] = field(default_factory=dict)
    json_as_text: bool = False
    hub: tuple[str, str | None] | None = None
    files: dict[str, Any] = field(default_factory=dict)  # {split: file, files, or {column: file}}
    builtin: str | None = None
    held_out: float | None = None  # percent
    train_without: dict[str, Sequence[str]] | str | None = None
    train_with: str | None = None
    merge_references: bool = False
    eval_splits: list[str] = field(default_factory=lambda: ["validation"])  # the first one chooses the best checkpoint
    submission_file: str | dict[str, str] | None = None
    further: dict[str, Any] = field(default_factory=dict)  # {field of a feature (`TaskFeature.fields`): its value}
    # tokens
    max_source_length: int = 512
    max_target_length: int = 128
    cuts_targets: bool = False  # in evaluations too, where the model reads the targets
    max_piece_length: int | None = None  # in characters; the rows are pieces of running text if it is set
    numbers: dict[str, float] | None = None  # step and range; None until they are found in the rows
    columns: dict[str, str] | None = None  # {further column: one of COLUMN_KINDS}
    tokenize: Callable[[Any, dict], dict] | None = None
    functions: dict[str, str] = field(default_factory=dict)  # {field: name of its function}, for task.json

    # ------------------------------------------------------------ from what a user wrote
    @classmethod
    def of(cls, name: str, written: dict) -> "TaskEntry":
        """The entry `name` of DATASET_VALS. UserError, which names the field, if it is incomplete, has an unknown field
        or contradicts itself.

        dict(inputs=f, metrics={"rougeL": None, "mine": g}, ...) -> TaskEntry(inputs={"": MADE_SOURCE}, preprocess=...,
        metrics=["rougeL", "mine"], metric_functions={"mine": g}, functions={"inputs": "f", "metrics mine": "g"}, ...)
        """
        values = _translated(name, written)
        functions = _functions_of(values)
        if isinstance(metrics := values.get("metrics"), dict):
            given = {metric: function for metric, function in metrics.items() if function is not None}
            values = values | {"metrics": list(metrics), "metric_functions": given}
        if callable(values.get("inputs")):
            values = values | {"inputs": {"": MADE_SOURCE}, "preprocess": _with_source(values)}
        _check_fields(name, values)
        known = {key: value for key, value in values.items() if value is not None}
        if "eval_splits" in known:
            known["eval_splits"] = list(known["eval_splits"])
        further = {key: known.pop(key) for key in _further() & known.keys()}
        return cls(**known, further=further, functions=functions).checked(name)

    def checked(self, name: str) -> "TaskEntry":
        """This entry. UserError if its fields contradict each other."""
        where = f"DATASET_VALS task {name}:"
        if wrong := self._contradiction():
            raise UserError(f"{where} {wrong}")
        try:
            self.further_columns  # noqa: B018  (features check their fields there)
        except UserError as error:
            raise UserError(f"{where} {error}") from None
        return self

    def _contradiction(self) -> str | None:
        """What is wrong with an entry whose fields have their types; None if nothing is."""
        if not all(isinstance(text, str) for pair in self.inputs.items() for text in pair):
            return f"inputs {self.inputs}: must be {{key in the text: column}}, or a function of a row"
        if self.target_type not in TARGET_TYPES:
            return f"target_type {self.target_type}: must be one of {', '.join(TARGET_TYPES)}"
        if self.target_type == "class" and len({*self.labels}) < max(2, len(self.labels)):
            return "target_type class needs `labels`, at least two different ones"
        positive = self.positive_label
        if positive is not None and (len(self.labels) != 2 or positive not in self.labels):
            return f"positive_label {positive}: must be one of two labels, and they are {listed(self.labels)}"
        if self.numbers is not None and not {"step", "least", "most"} <= self.numbers.keys():
            return f"numbers {self.numbers}: needs step, least and most"
        if not callable(self.preprocess) and self.preprocess not in (None, *TRANSFORMS):
            near = did_you_mean(str(self.preprocess), TRANSFORMS)
            return (
                f"preprocess {self.preprocess}: not in tasks/transforms.py{near}. Give a function of a row, or one of "
                f"{', '.join(TRANSFORMS)}"
            )
        if self.columns and self.tokenize:
            return f"columns {self.columns}: not with tokenize, which makes all tokens of a row"
        if not (self.columns or {}).keys().isdisjoint(_BATCH):
            return f"columns {self.columns}: {listed(_BATCH)} are names of a batch. Rename with file_columns"
        return None

    def written(self) -> dict[str, Any]:
        """The fields that differ from their defaults, and those that every entry needs, as a user would write them."""
        values: dict[str, Any] = {}
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            default = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
            if each.name == "further":
                values |= value
            elif each.name in _REQUIRED or value != default:
                values[each.name] = value
        return values

    # ------------------------------------------------------------ rows
    @property
    def is_running_text(self) -> bool:
        """Whether the rows are pieces of running text, cut from documents."""
        return bool(self.max_piece_length)

    @functools.cached_property
    def reads(self) -> list[str]:
        """The columns of the inputs."""
        return list(self.inputs.values())

    @property
    def prepare(self) -> Callable[[dict], dict | list[dict]]:
        """`preprocess` as a function, which without one returns the row unchanged."""
        if isinstance(self.preprocess, str):
            return TRANSFORMS[self.preprocess]
        return self.preprocess or _unchanged

    @property
    def prepare_name(self) -> str:
        """The name of the function `prepare`."""
        return _name(self.preprocess) if callable(self.preprocess) else str(self.preprocess)

    @functools.cached_property
    def row_columns(self) -> list[str]:
        """The columns that the task reads from its rows."""
        further = [column.column for column in self.further_columns.values() if not column.made]
        return list(dict.fromkeys([*self.reads, self.target, *self.metric_columns, *further]))

    @functools.cached_property
    def further_columns(self) -> dict[str, Column]:
        """{name beside a row's tokens: column} of the columns beside inputs and target: those of `columns`, and those
        that features read. UserError if the entry contradicts itself."""
        found = {}
        for name, kind in (self.columns or {}).items():
            found[name] = Column(kind, name, plural=f"{name} answers", shown=name)
        for feature in task_features():
            found |= feature.columns(self)
        return found

    @functools.cached_property
    def further_answers(self) -> dict[str, Column]:
        """Those of `further_columns` that are answers."""
        return {name: column for name, column in self.further_columns.items() if column.has_tokens}

    @functools.cached_property
    def answer_columns(self) -> list[str]:
        """The columns of the rows' own answers: the target, and further ones."""
        return [self.target, *(column.column for column in self.further_answers.values() if not column.made)]

    @functools.cached_property
    def source_prefix(self) -> str:
        """What all sources of the task begin with."""
        prefix = self.prefix or ""
        if prefix and prefix == prefix.rstrip():  # one that ends in white space is written unchanged: "TL;DR <text>"
            prefix += ": " if "" in self.inputs else " "  # "summarize: <text>", "rte sentence1: ..."
        return prefix

    # ------------------------------------------------------------ splits and metrics
    @property
    def test_splits(self) -> list[str]:
        """Names of the splits that a submission predicts, whose labels may be secret: "test", or MNLI's test_matched
        and test_mismatched."""
        named = [split.replace("validation", "test") for split in self.eval_splits if split.startswith("validation")]
        return named or ["test"]

    def may_hide_answers(self, split: str) -> bool:
        """Whether the answers of a split may be secret, so that the split is predicted and not evaluated."""
        return split in self.test_splits and split not in self.eval_splits

    @property
    def evaluated_names(self) -> dict[str, str]:
        """{name of a result of an evaluation, without "eval_": its metric}. With several splits a name begins with its
        split: {"validation_matched_accuracy": "accuracy", ...}. The first one chooses the best checkpoint."""
        metrics = [*self.metrics, "loss", "token_accuracy"]
        if self.target_type != "text":
            metrics.append("invalid_outputs")
        for feature in task_features():
            metrics += feature.measures.names(self)
        if len(self.eval_splits) == 1:
            return {metric: metric for metric in metrics}
        return {f"{split}_{metric}": metric for split in self.eval_splits for metric in metrics}

    @property
    def main_metric(self) -> str:
        """The result that chooses the best checkpoint: "matthews_correlation", or "validation_matched_accuracy"."""
        return next(iter(self.evaluated_names))

    @property
    def positive_class(self) -> str | None:
        """The class of which F1, precision and recall are reported: `positive_label`, else the second of two labels;
        None unless there are two."""
        if len(self.labels) != 2:
            return None
        return self.labels[1] if self.positive_label is None else self.positive_label


# ---------------------------------------------------------------- the fields of a dictionary
def _is_texts(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


def _further() -> set[str]:
    return {name for feature in task_features() for name in feature.fields}


_TEXTS = ("target", "target_type", "prefix", "builtin", "records", "train_with", "positive_label")
# {what a value must be: (fields of a user's entry, the test of a value)}; what the others hold is checked where it is
# used.
_KINDS: dict[str, tuple[tuple[str, ...], Callable[[Any], bool]]] = {
    "a text": (
        (*_TEXTS, *FURTHER_COLUMNS),
        lambda value: isinstance(value, str),
    ),
    "a list of texts": (("metrics", "labels", "metric_columns", "eval_splits"), _is_texts),
    "a dictionary": (
        ("inputs", "files", "file_columns", "skip_where", "numbers", *further_fields("dictionary")),
        lambda value: isinstance(value, dict),
    ),
    "a whole number of at least 2": (
        ("max_source_length", "max_target_length", "max_piece_length"),
        lambda value: isinstance(value, int) and value >= 2,
    ),
    "(name, configuration or None)": (("hub",), lambda value: isinstance(value, list | tuple) and len(value) == 2),
    "a function": (("tokenize", *further_fields("function")), callable),
    "{column: answer, answers, number or boolean}": (
        ("columns",),
        lambda value: isinstance(value, dict) and set(value.values()) <= {*COLUMN_KINDS},
    ),
    "{name: function}": (("metric_functions",), lambda value: all(map(callable, value.values()))),
    "true or false": (("ordered_labels",), lambda value: isinstance(value, bool)),
}
_MADE_HERE = ("further", "functions", "cuts_targets")  # not for users to write


def _check_fields(name: str, values: dict) -> None:
    """UserError for an unknown field of a dictionary, a missing one, and one whose value has another type."""
    where = f"DATASET_VALS task {name}:"
    known = [each.name for each in dataclasses.fields(TaskEntry) if each.name not in _MADE_HERE]
    known += sorted(_further())
    for key in values:
        if key not in known:
            raise UserError(
                f"{where} {key} is no field of an entry{did_you_mean(key, known)}. The fields are {listed(known)}"
            )
    for key in _REQUIRED:
        if not values.get(key):
            raise UserError(f"{where} the entry has no {key}. The head of constants.py says what it is")
    for kind, (fields, is_one) in _KINDS.items():
        for key in fields:
            if values.get(key) is not None and not is_one(values[key]):
                raise UserError(f"{where} {key} {values[key]!r}: must be {kind}")


def _with_source(values: dict) -> Callable[[dict], list[dict]]:
    """The `preprocess` of an entry whose `inputs` is a function: what its own one makes, with that function's text as
    the column MADE_SOURCE."""
    inputs, before = values["inputs"], values.get("preprocess")
    if not callable(before):
        before = TRANSFORMS.get(before, _unchanged)
    where = f"inputs ({_name(inputs)})"

    @functools.wraps(inputs)
    def preprocess(row: dict) -> list[dict]:
        return [made | {MADE_SOURCE: call_on_row(where, inputs, made)} for made in as_list(before(row))]

    return preprocess


def _unchanged(row: dict) -> dict:
    return row


def _functions_of(values: dict) -> dict[str, str]:
    """{field: name of its function}: {"inputs": "<lambda>", "metrics mine": "share_of_verbs"}. run.json has version and
    commit of the code."""
    found = {key: values.get(key) for key in ("inputs", "tokenize", "preprocess")}
    if isinstance(values.get("metrics"), dict):
        found |= {f"metrics {name}": function for name, function in values["metrics"].items()}
    return {key: _name(function) for key, function in found.items() if callable(function)}


def _name(function: Callable) -> str:
    return getattr(function, "__qualname__", type(function).__name__)  # a functools.partial has no name


def as_source(name: str, written: dict) -> str:
    """An entry as code for constants.py: "DATASET_VALS['mine'] = {\\n    'name': dict(\\n        prefix=..."."""
    fields = "".join(f"        {key}={value!r},\n" for key, value in written.items())
    return f"DATASET_VALS['mine'] = {{\n    {name!r}: dict(\n{fields}    ),\n}}"


# ---------------------------------------------------------------- entries of another toolkit
# {field of another toolkit: ours}
_INSTEAD = {"text_column_name": "inputs", "label_column_name": "target", "metric_names": "metrics"}
_OPTIMIZED = "metric_to_optimize"  # another toolkit's field; in ours this metric is the first of `metrics`


def _translated(name: str, entry: dict) -> dict:
    """The entry with the fields of another toolkit (`text_column_name`, `label_column_name`, `metric_names`,
    `metric_to_optimize`, a dictionary as `labels`) replaced by those of constants.py, and printed; other entries
    unchanged. UserError if it has a field in both forms, or labels do not count from 0.

    {"text_column_name": "sentence", "label_column_name": "label", "labels": {0: "no", 1: "yes"},
     "metric_names": ["accuracy", "f1"], "metric_to_optimize": "f1"}
    -> dict(prefix=name, inputs={"sentence": "sentence"}, target="label", target_type="class", labels=["no", "yes"],
            metrics=["f1", "accuracy"], max_source_length=512, max_target_length=8)
    """
    if not {*_INSTEAD, _OPTIMIZED} & set(entry) and not isinstance(entry.get("labels"), dict):
        return entry
    for old, new in _INSTEAD.items():
        if old in entry and new in entry:
            raise UserError(f"DATASET_VALS task {name}: {old} is {new} here, and the entry has both. Leave one out")
    new = dict(prefix=name, target_type="text", max_source_length=512, max_target_length=128)
    if entry.get("labels"):
        new |= dict(target_type="class", max_target_length=8)
    new |= {_INSTEAD.get(field, field): value for field, value in entry.items() if field != _OPTIMIZED}
    if "text_column_name" in entry and not callable(new["inputs"]):
        new["inputs"] = {column: column for column in as_list(new["inputs"])}
    metrics = new.get("metrics", [])
    if not isinstance(metrics, dict):
        metrics = dict.fromkeys(as_list(metrics))
    if first := entry.get(_OPTIMIZED, "").removeprefix("eval_"):
        metrics = {first: metrics.get(first)} | metrics
    new["metrics"] = metrics if any(metrics.values()) else list(metrics)
    if "target_type" not in entry and {"pearson", "spearman"} & set(metrics):
        new |= dict(target_type="number", max_target_length=16)
    if isinstance(entry.get("labels"), dict):
        new["labels"] = _in_order(name, entry["labels"])
    say_once(
        f"task {name}: its entry has fields of another toolkit; with ours it is", *as_source(name, new).split("\n")
    )
    return new


def _in_order(name: str, labels: dict) -> list[str]:
    """Class names by their index: {0: "no", 1: "yes"}, {"0": "no", "1": "yes"} and {"no": 0, "yes": 1} ->
    ["no", "yes"]."""
    by_index = {str(index): text for index, text in labels.items()}
    if all(isinstance(index, int) for index in labels.values()):
        by_index = {str(index): text for text, index in labels.items()}
    indices = list(map(str, range(len(labels))))
    if set(by_index) != set(indices):
        raise UserError(
            f"DATASET_VALS task {name}: labels {labels} do not count from 0; write them as a list in class order"
        )
    return [str(by_index[index]) for index in indices]
