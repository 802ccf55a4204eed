"""A W&B sweep file as one frozen record, the commands of its trials, and when hyperband stops a trial.

sweep = read_sweep("sweeps/glue_rte_sweep.yaml")
sweep.distributions["learning_rate"]     # FloatDistribution(high=0.01, log=True, low=0.0001)
command_line(sweep, {"learning_rate": 3e-3, ...}, run="0007-1f0c3a")
"""

import dataclasses
import importlib
import itertools
import json
import math
import operator
import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundry.common.errors import UserError
from foundry.common.reports import metrics_key, read_metrics, write_aside
from foundry.common.secrets import is_secret, without_secrets
from foundry.common.words import did_you_mean
from foundry.common.yaml_files import read_yaml

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

METHODS = ("grid", "random", "bayes")
KEYS = (
    *("program", "project", "entity", "name", "description", "command", "method", "metric", "parameters"),
    *("run_cap", "early_terminate"),
)
OWN_FLAGS = {"output_dir", "resume_from_checkpoint", "overwrite_output_dir"}  # set for each trial by tools/sweep_t5.py
MOST_OF_A_GRID = 10_000  # most values of one parameter in a grid
WITH_WANDB = "`wandb sweep` and `wandb agent` support all of W&B's features"
# An output folder for each run, named in the file's own command: `--output_dir "out/sweeps/x/$WANDB_RUN_ID"`.
RUN_FOLDER = re.compile(r"(--output[_-]dir[=\s\0]+[\"']?)([^\s\"'\0]*)(/(?:\$\{envvar:|\$\{?)WANDB_RUN_ID\}?)(?![\w/])")
ENVVAR = re.compile(r"\$\{envvar:([A-Z0-9_]*)\}")
USUAL_COMMAND = ["${env}", "${interpreter}", "${program}", "${args}"]
# The training scripts of this project, whose flags are known.
TRAINING_SCRIPTS = ("pre_train_t5.py", "fine_tune_t5.py")


@dataclass(frozen=True)
class Sweep:
    """What a sweep file asks for. metric: its name as the file writes it, None if there is none; goal: minimize or
    maximize; fixed: {flag: its value in all trials}; distributions: {searched flag: Optuna's distribution}; command:
    its words, in which W&B's macros are not replaced yet; folder: of the sweep; names_folder: whether the command
    itself names the folder of each run; environment: W&B's variables for project and entity."""

    path: str
    name: str
    method: str
    metric: str | None
    goal: str
    target: float | None
    flags: tuple[str, ...]  # in the order of the file
    fixed: dict[str, Any]
    distributions: "dict[str, BaseDistribution]"
    command: tuple[str, ...]
    program: str
    folder: Path
    names_folder: bool
    run_cap: float
    early_terminate: dict | None
    environment: dict[str, str]

    @property
    def key(self) -> str:
        """The metric's name in metrics.jsonl: eval/accuracy -> eval_accuracy."""
        return metrics_key(self.metric or "")

    @property
    def sign(self) -> int:
        """1 if a lower metric is better, -1 if a higher one is: a lower value * sign is always better."""
        return -1 if self.goal == "maximize" else 1

    @property
    def size(self) -> float:
        """The number of trials in the whole search; infinite unless it is a grid."""
        sizes = [len(values.choices) for values in self.distributions.values()] if self.method == "grid" else [math.inf]
        return math.prod(sizes)

    def described(self) -> str:
        """The search as JSON. A study that was started with another text belongs to another sweep."""
        fixed = {name: "***" if is_secret(name) else value for name, value in self.fixed.items()}
        searched = {name: str(distribution) for name, distribution in self.distributions.items()}
        return json.dumps([self.method, self.metric, self.goal, fixed, searched], default=str)


# ---------------------------------------------------------------- reading
def read_sweep(path: str, output_dir: str | None = None) -> Sweep:
    """The Sweep of a file, with W&B's defaults. output_dir: the sweep's folder; None for the one that the file names.
    UserError for anything wrong or not supported here."""
    file = _read_file(path)
    parameters, method = file["parameters"], file["method"]
    fixed, distributions = {}, {}
    for name, spec in parameters.items():
        if str(name).replace("-", "_") in OWN_FLAGS:
            raise UserError(f"{path}, {name}: sweep_t5.py gives every trial its own: leave it out")
        values = _distribution(f"{path}, {name}", spec, method == "grid")
        if isinstance(values, tuple):
            (fixed[name],) = values
        else:
            distributions[name] = values
    if secret := next(filter(is_secret, distributions), None):
        raise UserError(f"{path}, {secret}: a secret cannot be searched for: give it as an environment variable")
    metric = _metric(path, file)
    numbers = {key: found[key] for found, key in ((file, "run_cap"), (metric, "target")) if found.get(key) is not None}
    _check_numbers(path, numbers)
    words = file.get("command") or USUAL_COMMAND
    words = _checked_command(path, [str(word) for word in (words if isinstance(words, list) else [words])])
    program = str(file.get("program"))
    if "${program}" in words and not Path(program).is_file():
        raise UserError(f"{path}, program {program}: no such file in {Path.cwd()}: name the training script")
    _check_flags(path, parameters, program)
    folder, words, names_folder = _choose_folder(path, file["name"], words, output_dir)
    return Sweep(
        path=path,
        name=str(file["name"]),
        method=method,
        metric=metric["name"],
        goal=metric["goal"],
        target=metric.get("target"),
        flags=tuple(parameters),
        fixed=fixed,
        distributions=distributions,
        command=tuple(words),
        program=program,
        folder=folder,
        names_folder=names_folder,
        run_cap=file.get("run_cap", math.inf),
        early_terminate=_early_terminate(path, file.get("early_terminate")),
        environment={f"WANDB_{key.upper()}": str(file[key]) for key in ("project", "entity") if key in file},
    )


def _choice(where: str, value: object, known: Collection[str], hint: str = WITH_WANDB) -> None:
    """UserError, which suggests near matches, unless the value is one of `known`."""
    if value not in known:
        near = did_you_mean(str(value), known, most=2)
        raise UserError(f"{where}: {value} is not supported{near}; available: {', '.join(known)}; {hint}")


def _read_file(path: str) -> dict:
    """The file's keys that have a value. A sweep without a name gets the file's name, without the ending."""
    try:
        file = read_yaml(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror} (the first argument must be a sweep file)") from None
    except ValueError as error:
        raise UserError(f"{path}: not the YAML of a sweep: {' '.join(str(error).split())}") from None
    if not isinstance(file, dict):
        raise UserError(f"{path}: {file!r} must be a mapping with the keys method and parameters")
    for key in file:
        _choice(f"{path}, key", key, KEYS)
    file = {"name": Path(path).stem} | {key: value for key, value in file.items() if value is not None}
    _choice(f"{path}, method", file.get("method"), METHODS)
    if not isinstance(file.get("parameters"), dict) or not file["parameters"]:
        raise UserError(f"{path}, parameters: {file.get('parameters')!r} must be a mapping of flags to their values")
    return file


def _distribution(where: str, spec: Any, grid: bool) -> "tuple[Any] | BaseDistribution":
    """W&B's entry for a parameter: (value,) if it has one value, else Optuna's distribution, in a grid always a
    categorical one."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    def stepped(min: float, max: float, q: float = 1) -> FloatDistribution | IntDistribution:
        whole = all(isinstance(number, int) for number in (min, max, q))
        return IntDistribution(min, max, step=q) if whole else FloatDistribution(min, max, step=q)

    kinds: dict[str, Callable] = {
        "constant": lambda value: (value,),
        "categorical": lambda values: CategoricalDistribution([_choice_of(value) for value in values]),
        "int_uniform": lambda min, max: IntDistribution(min, max),
        "uniform": lambda min, max: FloatDistribution(min, max),
        "log_uniform": lambda min, max: FloatDistribution(math.exp(min), math.exp(max), log=True),
        "log_uniform_values": lambda min, max: FloatDistribution(min, max, log=True),
        "q_uniform": stepped,
    }
    keys = spec if isinstance(spec, dict) else {}
    whole = all(isinstance(keys.get(key), int) for key in ("min", "max"))
    guesses = {"value": "constant", "values": "categorical", "min": "int_uniform" if whole else "uniform"}
    kind = keys.get("distribution") or next((guess for key, guess in guesses.items() if key in keys), None)
    if kind is None:
        raise UserError(f"{where}: {spec!r} must be a mapping with value, values, min and max, or a distribution")
    _choice(f"{where}, distribution", kind, tuple(kinds))
    _check_numbers(where, {key: keys[key] for key in ("min", "max", "q") if key in keys})
    try:
        found = kinds[kind](**{key: value for key, value in keys.items() if key != "distribution"})
    except (TypeError, ValueError, ArithmeticError) as error:  # missing or unknown keys, min above max
        raise UserError(
            f"{where} ({kind}): {str(error).removeprefix('read_sweep.').split('.<lambda>() ')[-1]}"
        ) from None
    if kind == "constant":
        return found
    if grid and kind != "categorical":
        found = CategoricalDistribution(_values_of_a_grid(where, kind, keys, found))
    if isinstance(found, CategoricalDistribution) and len(found.choices) == 1:
        return (value_of(found.choices[0]),)
    return found


def _values_of_a_grid(where: str, kind: str, keys: dict, found: Any) -> list:
    """The values between min and max of a distribution, as a grid of W&B takes them."""
    if kind not in ("int_uniform", "q_uniform"):
        raise UserError(f"{where}: method grid takes value, values, int_uniform and q_uniform, not {kind}")
    step = found.step or 1
    count = math.ceil((keys["max"] - keys["min"]) / step - 1e-9)  # as at W&B: q_uniform leaves out its max
    count += kind == "int_uniform"
    if count > MOST_OF_A_GRID:
        raise UserError(f"{where}: {count:,} values are too many for a grid: at most {MOST_OF_A_GRID:,}")
    return [tidy(keys["min"] + place * step) for place in range(count)]


def _check_numbers(where: str, values: dict) -> None:
    """UserError unless all values are finite numbers."""
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise UserError(f"{where}, {key}: {value!r:.80} must be a finite number")


def _choice_of(value: object) -> object:
    """A value in a form that Optuna can store: a list or mapping as JSON."""
    return json.dumps(value) if isinstance(value, list | dict) else value


def value_of(choice: object) -> object:
    """The inverse of `_choice_of`."""
    return json.loads(choice) if isinstance(choice, str) and choice[:1] in ("[", "{") else choice


def _metric(path: str, file: dict) -> dict:
    """The file's metric: {"name", "goal", perhaps "target"}; its name is None if the file has no metric."""
    metric = file.get("metric")
    if metric is None:
        if file["method"] == "bayes" or file.get("early_terminate"):
            raise UserError(
                f"{path}: bayes and early_terminate need a metric: `metric: {{name: eval/loss, goal: minimize}}`"
            )
        return {"name": None, "goal": "minimize"}
    if not isinstance(metric, dict) or not metric.get("name"):
        raise UserError(f"{path}, metric: {metric!r} must have the name of a metric that runs log, such as eval/loss")
    metric = metric | {"name": str(metric["name"])}
    if "goal" not in metric:
        raise UserError(
            f"{path}, metric: {metric['name']} has no goal, which says what is better: minimize or maximize"
        )
    _choice(f"{path}, metric, goal", metric["goal"], ("minimize", "maximize"))
    return metric


def _early_terminate(path: str, stop: dict | None) -> dict | None:
    """Hyperband's settings, with the defaults of W&B's documentation (its package `sweeps` 0.3 sets strict: true)."""
    if stop is None:
        return None
    if not isinstance(stop, dict):
        raise UserError(
            f"{path}, early_terminate: {stop!r:.80} must be a mapping, such as {{type: hyperband, min_iter: 3}}"
        )
    stop = {"eta": 3, "strict": False} | stop
    numbers = {key: stop[key] for key in ("eta", "min_iter", "max_iter", "s") if key in stop}
    _check_numbers(f"{path}, early_terminate", numbers)
    if numbers["eta"] <= 1:
        raise UserError(f"{path}, early_terminate: eta {numbers['eta']}: must be above 1")
    if numbers.get("s", 1) not in range(100):
        raise UserError(f"{path}, early_terminate: s {numbers['s']}: must be a whole number below 100")
    _choice(f"{path}, early_terminate, type", stop.get("type"), ("hyperband",))
    if ("min_iter" in stop) == ("max_iter" in stop) or ("max_iter" in stop) != ("s" in stop) or not brackets(stop):
        raise UserError(
            f"{path}, early_terminate: {stop} has no bracket: give either min_iter, or max_iter (at least eta) and s"
        )
    return stop


def _checked_command(path: str, words: list[str]) -> list[str]:
    """The words of the file's command. UserError for an unknown macro or variable, or if no macro passes the flags."""
    for word in words:
        for variable in set(ENVVAR.findall(word)) - {*os.environ, "WANDB_RUN_ID"}:
            raise UserError(f"{path}, command, {word}: the environment has no {variable}: export it first")
        if word.startswith("${") and word.endswith("}") and not ENVVAR.match(word):  # W&B would drop an unknown one
            _choice(f"{path}, command", word, [f"${{{name}}}" for name in macros({}, "", "")])
    if not any(word.startswith("${args") for word in words):
        raise UserError(f"{path}, command: all trials would be the same: add ${{args}} as a word of its list")
    return words


def _check_flags(path: str, parameters: Collection[str], program: str) -> None:
    """UserError for a parameter that is not a flag of the training script, if that is one of ours."""
    script = Path(program).resolve()
    if script.name in TRAINING_SCRIPTS and script.parent == Path(__file__).resolve().parents[2]:
        groups = importlib.import_module(script.stem).FLAGS
        known = {field.name for group in groups for field in dataclasses.fields(group)}
        for name in parameters:
            if str(name).replace("-", "_") not in known:
                raise UserError(f"{path}, {name}: no flag of {script.name}{did_you_mean(str(name), known, most=2)}")


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


# ---------------------------------------------------------------- commands
def tidy(value: float) -> float:
    """0.30000000000000004 -> 0.3."""
    return float(f"{value:.12g}") if isinstance(value, float) else value


def shown(value: object) -> str:
    """A value as the screen shows it: 0.000123456 -> "0.0001235"."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def macros(values: dict, run_json: str, program: str) -> dict[str, list[str]]:
    """{macro: the words that replace ${macro} in a command}, as in W&B's agent."""
    pairs = [f"{name}={value}" for name, value in values.items()]
    return {
        "env": ["/usr/bin/env"],
        "interpreter": ["python"],
        "program": [program],
        "args": [f"--{pair}" for pair in pairs],
        "args_no_equals": [word for name, value in values.items() for word in (f"--{name}", str(value))],
        "args_no_hyphens": pairs,
        "args_no_boolean_flags": [f"--{n}" if v is True else f"--{n}={v}" for n, v in values.items() if v is not False],
        "args_json": [json.dumps(values, default=str)],
        "args_json_file": [run_json],
    }


def command_line(sweep: Sweep, params: dict, run: str, more: dict | None = None, to_show: bool = False) -> list[str]:
    """The command that runs a trial with these searched values; --output_dir is added unless the file's command has it.

    more: further flags, such as the one to resume. to_show: secrets become ***, and the file that `${args_json_file}`
    stands for is not written.
    """
    values = {name: value_of(params[name]) if name in params else sweep.fixed[name] for name in sweep.flags}
    values |= more or {}
    if not sweep.names_folder:
        values["output_dir"] = str(sweep.folder / run)
    if to_show:
        values = {name: "***" if is_secret(name) else value for name, value in values.items()}
    run_json = sweep.folder / f"{run}.json"
    replaced, environment = macros(values, str(run_json), sweep.program), os.environ | {"WANDB_RUN_ID": run}
    if "${args_json_file}" in sweep.command and not to_show:
        write_aside(run_json, partial(_write_for_the_user_alone, text=replaced["args_json"][0]))
    words = [ENVVAR.sub(lambda match: environment[match[1]], word) for word in sweep.command]
    words = [part for word in words for part in (replaced.get(word[2:-1], [word]) if word[:2] == "${" else [word])]
    return without_secrets(words) if to_show else words


def _write_for_the_user_alone(path: Path, text: str) -> None:
    """A trial's flags may hold a token."""
    path.touch(mode=0o600)
    path.write_text(text)


# ---------------------------------------------------------------- results
def read_lines(folder: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl; [] if there is none."""
    return read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").is_file() else []


def history(lines: list[dict], key: str) -> list[float]:
    """All finite values of a metric, in the order in which a run logged them."""
    values = [line.get(key) for line in lines]
    return [value for value in values if isinstance(value, int | float) and math.isfinite(value)]


def best_value(lines: list[dict], sweep: Sweep) -> float | None:
    """The best finite value that a run logged for the metric, which is its result, as in W&B's own search; None if it
    logged none."""
    return min(history(lines, sweep.key), key=lambda value: sweep.sign * value, default=None)


def brackets(stop: dict) -> list[int]:
    """Hyperband's brackets, for eta 3: min_iter 3 -> [3, 9, 27, ...]; max_iter 27, s 2 -> [3, 9]."""
    if "min_iter" in stop:
        steps = itertools.accumulate([stop["eta"]] * 99, operator.mul, initial=stop["min_iter"])
        return [int(step) for step in steps if step < 1e9]
    return sorted(int(b) for b in (stop["max_iter"] / stop["eta"] ** n for n in range(1, stop["s"] + 1)) if b >= 1)


def is_hopeless(own: list[float], everyone: list[list[float]], stop: dict, sign: int) -> bool:
    """Whether W&B's hyperband stops a run: it is not among the best 1/eta of all runs that reached its last bracket.

    own: its metric so far; everyone: the metric of all runs, itself among them; sign: 1 if lower is better. As in W&B,
    bracket 3 is the third value; the run's best value so far counts or, with `strict`, its value at the bracket.
    """
    bracket = max((bracket for bracket in brackets(stop) if bracket <= len(own)), default=None)
    if bracket is None:
        return False
    reached = sorted(sign * values[bracket - 1] for values in everyone if len(values) >= bracket)
    mine = sign * own[bracket - 1] if stop["strict"] else min(sign * value for value in own)
    return mine > reached[int(len(reached) / stop["eta"])]
