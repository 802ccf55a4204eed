"""Reads a Weights & Biases sweep file, and says which values it draws: for tools/sweep_t5.py."""

import dataclasses
import importlib
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundry.common.errors import UserError
from foundry.common.reports import metrics_key
from foundry.common.secrets import is_secret
from foundry.common.words import did_you_mean
from foundry.common.yaml_files import read_yaml

if TYPE_CHECKING:
    from optuna.trial import Trial

KEYS = ("program", "project", "entity", "name", "description", "command", "method", "metric", "parameters", "run_cap")
METHODS = ("grid", "random", "bayes")
# {distribution: the keys that its entry has in W&B's schema, beside "distribution"}
KINDS = {
    "constant": ("value",),
    "categorical": ("values",),
    "int_uniform": ("min", "max"),
    "uniform": ("min", "max"),
    "log_uniform": ("min", "max"),
    "log_uniform_values": ("min", "max"),
    "q_uniform": ("min", "max", "q"),
}
GRID_KINDS = ("constant", "categorical", "int_uniform", "q_uniform")
MOST_EXPONENT = 700  # of log_uniform, whose ends are exponents of e: more overflows
OWN_FLAGS = {"output_dir", "resume_from_checkpoint", "overwrite_output_dir"}  # set here for each trial
WITH_WANDB = "`wandb sweep` and `wandb agent` do all that W&B knows"
USUAL_COMMAND = ["${env}", "${interpreter}", "${program}", "${args}"]
# A folder for each run, named in the file's own command: `--output_dir "out/sweeps/x/$WANDB_RUN_ID"`.
RUN_FOLDER = re.compile(r"(--output[_-]dir[=\s\0]+[\"']?)([^\s\"'\0]*)(/(?:\$\{envvar:|\$\{?)WANDB_RUN_ID\}?)(?![\w/])")


@dataclass(frozen=True)
class Sweep:
    """What a sweep file asks for. parameters: {flag: W&B's entry, with its kind as "distribution"}. metric: its name,
    None if there is none; goal: minimize or maximize. command: its words, with W&B's macros. folder: of the sweep.
    names_folder: whether the command names the folder of each run itself."""

    method: str
    parameters: dict[str, dict]
    metric: str | None
    goal: str
    command: tuple[str, ...]
    program: str
    run_cap: float
    environment: dict[str, str]
    folder: Path
    names_folder: bool

    @property
    def key(self) -> str:
        """The metric's name in metrics.jsonl: eval/accuracy -> eval_accuracy."""
        return metrics_key(self.metric or "")


def read_sweep(path: str, output_dir: str | None = None) -> Sweep:
    """The Sweep of a file. output_dir: the sweep's folder; None for the one that the file names. UserError for anything
    wrong or not searched here."""
    try:
        file = read_yaml(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror} (the first argument must be a sweep file)") from None
    except ValueError as error:
        raise UserError(f"{path}: not the YAML of a sweep: {' '.join(str(error).split())}") from None
    if not isinstance(file, dict):
        raise UserError(f"{path}: {file!r} must be a mapping with the keys method and parameters")
    for key in file:
        _check_choice(f"{path}, key", key, KEYS)
    file = {"name": Path(path).stem} | {key: value for key, value in file.items() if value is not None}
    _check_choice(f"{path}, method", file.get("method"), METHODS)
    metric = _metric(path, file)
    program = str(file.get("program"))
    words = file.get("command") or USUAL_COMMAND
    words = words if isinstance(words, list) else [words]
    if lists := [word for word in words if isinstance(word, list | dict)]:
        raise UserError(f"{path}, command, {lists[0]!r:.80}: must be a word, as ${{args}} stands alone in its line")
    words = [str(word) for word in words]
    if not any(word.startswith("${args") for word in words):
        raise UserError(f"{path}, command: all trials would be the same: add ${{args}} as a word of its list")
    if "${program}" in words and not Path(program).is_file():
        raise UserError(f"{path}, program {program}: no such file in {Path.cwd()}: name the training script")
    folder, words, names_folder = _choose_folder(path, file["name"], words, output_dir)
    return Sweep(
        method=file["method"],
        parameters=_parameters(path, file, program),
        metric=metric.get("name"),
        goal=metric.get("goal", "minimize"),
        command=tuple(words),
        program=program,
        run_cap=_number(f"{path}, run_cap", file["run_cap"]) if "run_cap" in file else math.inf,
        environment={f"WANDB_{key.upper()}": str(file[key]) for key in ("project", "entity") if key in file},
        folder=folder,
        names_folder=names_folder,
    )


def _check_choice(where: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        near = did_you_mean(str(value), known, most=2)
        raise UserError(f"{where}: {value} is not supported{near}; available: {', '.join(known)}; {WITH_WANDB}")


def _number(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{where}: {value!r:.80} must be a finite number")
    return value


def _metric(path: str, file: dict) -> dict:
    """The file's metric, {} if it has none."""
    metric = file.get("metric")
    if metric is None and file["method"] != "bayes":
        return {}
    if not isinstance(metric, dict) or not metric.get("name") or "goal" not in metric:
        raise UserError(f"{path}, metric: {metric!r} must have a name that runs log and a goal, minimize or maximize")
    if "target" in metric:
        raise UserError(f"{path}, metric, target: is not followed here: leave it out; {WITH_WANDB}")
    _check_choice(f"{path}, metric, goal", metric["goal"], ("minimize", "maximize"))
    return metric | {"name": str(metric["name"])}


def _parameters(path: str, file: dict, program: str) -> dict[str, dict]:
    """{flag: its entry, with its kind}. UserError for an entry that cannot be searched, and for a flag that the
    training script does not have, if that is one of ours."""
    found, entries = {}, file.get("parameters")
    if not isinstance(entries, dict) or not entries:
        raise UserError(f"{path}, parameters: {entries!r} must be a mapping of flags to their values")
    known = _flags_of(program)
    for name, entry in entries.items():
        where, flag = f"{path}, {name}", str(name).replace("-", "_")
        if flag in OWN_FLAGS:
            raise UserError(f"{where}: sweep_t5.py gives every trial its own: leave it out")
        if known and flag not in known:
            raise UserError(f"{where}: no flag of {Path(program).name}{did_you_mean(str(name), known, most=2)}")
        entry = entry if isinstance(entry, dict) else {}
        kind = _kind(where, entry)
        _check_entry(where, entry, kind)
        if file["method"] == "grid" and kind not in GRID_KINDS:
            raise UserError(f"{where}: method grid takes {', '.join(GRID_KINDS)}, not {kind}")
        if kind != "constant" and is_secret(str(name)):
            raise UserError(f"{where}: a secret cannot be searched for: give it as an environment variable")
        found[str(name)] = entry | {"distribution": kind}
    return found


def _kind(where: str, entry: dict) -> str:
    """The distribution of an entry, which follows from its keys where it is not named."""
    has_integers = all(isinstance(entry.get(key), int) for key in ("min", "max"))
    guesses = {"value": "constant", "values": "categorical", "min": "int_uniform" if has_integers else "uniform"}
    kind = entry.get("distribution") or next((guess for key, guess in guesses.items() if key in entry), None)
    _check_choice(f"{where}, distribution", kind, tuple(KINDS))
    return str(kind)


def _check_entry(where: str, entry: dict, kind: str) -> None:
    """UserError for a key that W&B does not know for this distribution, or that is not followed here, and for ends
    between which nothing can be drawn."""
    for key in entry:
        if key not in ("distribution", *KINDS[kind]):
            known = (*KINDS[kind], "distribution")
            near = did_you_mean(str(key), known)
            raise UserError(f"{where}, {key}: not of {kind}{near}; its keys: {', '.join(known)}; {WITH_WANDB}")
    if kind == "constant" and "value" not in entry:
        raise UserError(f"{where}: {entry!r} must have a value")
    if kind == "categorical" and not (isinstance(entry.get("values"), list) and entry["values"]):
        raise UserError(f"{where}: {entry!r} must have a list of values")
    if kind in ("constant", "categorical"):
        return
    low, high = (_number(f"{where}, {key}", entry.get(key)) for key in ("min", "max"))
    if low > high:
        raise UserError(f"{where}: min {low} is above max {high}")
    if kind == "int_uniform" and not (isinstance(low, int) and isinstance(high, int)):
        raise UserError(f"{where}: min {low} and max {high} must be whole numbers for int_uniform")
    if kind == "log_uniform_values" and low <= 0:
        raise UserError(f"{where}, min {low}: must be above 0: its logarithm is drawn")
    if kind == "log_uniform" and max(abs(low), abs(high)) > MOST_EXPONENT:
        raise UserError(
            f"{where}: {low} to {high} are exponents of e, at most {MOST_EXPONENT}; log_uniform_values has values"
        )
    if kind == "q_uniform" and _number(f"{where}, q", entry.get("q", 1)) <= 0:
        raise UserError(f"{where}, q {entry['q']}: must be above 0")


def _flags_of(program: str) -> set[str]:
    """The flags of one of our training scripts; of another program none are known."""
    script = Path(program).resolve()
    if (
        script.name not in ("pre_train_t5.py", "fine_tune_t5.py")
        or script.parent != Path(__file__).resolve().parents[1]
    ):
        return set()
    groups = importlib.import_module(script.stem).FLAGS
    return {field.name for group in groups for field in dataclasses.fields(group)}


def _choose_folder(path: str, name: object, words: list[str], output_dir: str | None) -> tuple[Path, list[str], bool]:
    """(the sweep's folder, the command's words, whether these name the folder of each run). If they do, output_dir
    replaces the folder that holds the runs' folders in them. UserError if all runs would write into one folder."""
    text = "\0".join(words)
    match = RUN_FOLDER.search(text)
    if not match and re.search("--output[_-]dir", text):
        raise UserError(f"{path}, command: all trials would write into one --output_dir: let it end in /$WANDB_RUN_ID")
    plain = re.sub(r"[^\w.-]+", "_", str(name))
    if not plain.strip("._"):
        raise UserError(f"{path}, name: {name!r} names the sweep's folder: it must have a letter or digit")
    folder = output_dir or (match[2] if match else f"out/sweeps/{plain}")
    if match and re.search(r"[\s$`~\"'\\]", folder):
        raise UserError(f"--output_dir {folder}: the command's shell would change this name: use plain letters")
    words = RUN_FOLDER.sub(lambda found: found[1] + folder + found[3], text).split("\0")
    return Path(folder), words, match is not None


# ---------------------------------------------------------------- values
def quantised(number: float, step: float) -> float:
    """W&B's q_uniform: the nearest multiple of q, so 9 by 4 is 8."""
    multiple = round(number / step) * step
    return multiple if isinstance(multiple, int) else float(f"{multiple:.12g}")


def suggest(trial: "Trial", name: str, entry: dict) -> None:
    """Lets Optuna draw a flag's parameter by W&B's entry; `value_of` makes the flag's value of it."""
    kind, low, high = entry["distribution"], entry.get("min"), entry.get("max")
    if kind == "categorical":  # values may be lists and mappings, which Optuna does not store: their places are drawn
        trial.suggest_categorical(name, list(range(len(entry["values"]))))
    elif kind == "int_uniform":
        trial.suggest_int(name, low, high)
    elif kind == "log_uniform":
        trial.suggest_float(name, math.exp(low), math.exp(high), log=True)
    elif kind != "constant":
        trial.suggest_float(name, low, high, log=kind == "log_uniform_values")


def value_of(entry: dict, drawn: Any) -> Any:
    """The value of a flag. drawn: Optuna's parameter, None for a constant."""
    if entry["distribution"] == "constant":
        return entry["value"]
    if entry["distribution"] == "categorical":
        return entry["values"][drawn]
    if entry["distribution"] == "q_uniform":
        return quantised(drawn, entry.get("q", 1))
    return drawn


def values_of(sweep: Sweep, drawn: dict[str, Any]) -> dict[str, Any]:
    """{flag: value} of a trial with these parameters."""
    return {name: value_of(entry, drawn.get(name)) for name, entry in sweep.parameters.items()}


def grid_values(entry: dict) -> Sequence:
    """The parameters that a grid goes through, as `suggest` would draw them, in W&B's order."""
    if entry["distribution"] == "categorical":
        return range(len(entry["values"]))
    if entry["distribution"] == "int_uniform":
        return range(entry["min"], entry["max"] + 1)
    step = entry.get("q", 1)  # W&B counts from min by q and leaves max out
    count = max(1, math.ceil((entry["max"] - entry["min"]) / step))
    return [entry["min"] + number * step for number in range(count)]


def next_cell(sweep: Sweep, taken: list[dict]) -> dict[str, Any] | None:
    """The parameters of the grid's first cell that no trial has; None if all have been taken."""
    axes = {name: grid_values(entry) for name, entry in sweep.parameters.items() if entry["distribution"] != "constant"}
    gone = {tuple(drawn.get(name) for name in axes) for drawn in taken}
    cells = (cell for cell in itertools.product(*axes.values()) if cell not in gone)
    cell = next(cells, None)
    return None if cell is None else dict(zip(axes, cell, strict=True))
