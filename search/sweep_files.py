"""W&B's sweep files: their checks, what is drawn from one, and what hyperband stops.

Every function is pure, but `command_line` writes the file that `${args_json_file}` names.
"""

import bisect
import inspect
import itertools
import json
import math
import operator
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import betaincinv, ndtri

from common.command_line import did_you_mean, read_yaml
from common.reports import metrics_key, read_metrics, write_aside

ALMOST = 1 - 1e-9  # quantiles lie between 1 - ALMOST and ALMOST: a normal distribution has no ends
OWN_FLAGS = {"output_dir", "resume_from_checkpoint", "overwrite_output_dir"}
# A folder that the file's own command gives to each run: `--output_dir "out/sweeps/x/$WANDB_RUN_ID"`.
RUN_FOLDER = re.compile(r"(--output[_-]dir[=\s\0]+[\"']?)([^\s\"'\0]*)(/(?:\$\{envvar:|\$\{?)WANDB_RUN_ID\}?)(?![\w/])")
ENVVAR = re.compile(r"\$\{envvar:([A-Z0-9_]*)\}")
TEXT_NUMBER = re.compile(r"([-+]?\d+)(\.\d+)?\.?[eE]([-+]?)(\d+)")  # a number, but not in YAML

# W&B's definitions at the quantile u, or for `categorical` at the index u; the other arguments are keys of the file.
DISTRIBUTIONS = {
    "constant": lambda _, value: value,
    "categorical": lambda u, values: values[u],
    "categorical_w_probabilities": lambda u, values, probabilities: values[
        min(bisect.bisect_right(list(itertools.accumulate(probabilities)), u), len(values) - 1)
    ],
    "int_uniform": lambda u, min, max: min + int(u * (max - min + 1)),
    "uniform": lambda u, min, max: min + u * (max - min),
    "log_uniform": lambda u, min, max: math.exp(min + u * (max - min)),
    "log_uniform_values": lambda u, min, max: min * (max / min) ** u,
    "inv_log_uniform": lambda u, min, max: math.exp(u * (max - min) - max),  # log(1/x) is uniform
    "inv_log_uniform_values": lambda u, min, max: min * (max / min) ** u,
    "normal": lambda u, mu=0, sigma=1: mu + sigma * float(ndtri(u)),
    "log_normal": lambda u, mu=0, sigma=1: math.exp(mu + sigma * float(ndtri(u))),
    "beta": lambda u, a=1, b=1: float(betaincinv(a, b, u)),
}
for _name in "uniform log_uniform log_uniform_values normal log_normal beta".split():
    DISTRIBUTIONS[f"q_{_name}"] = DISTRIBUTIONS[_name]  # rounded to multiples of the key q
NUMBERS = {
    "a number": lambda _: True,
    "a positive number": lambda value: value > 0,
    "a number of at least 0": lambda value: value >= 0,
    "a number above 1": lambda value: value > 1,
    "a whole number": lambda value: isinstance(value, int),
    "a positive whole number": lambda value: isinstance(value, int) and value > 0,
}
# {key of a section: its possible values, the kind of number, or None for anything}.
TOP_KEYS = dict.fromkeys("program project entity name description command metric early_terminate parameters".split())
TOP_KEYS |= {"method": ("grid", "random", "bayes"), "run_cap": "a positive whole number"}
METRIC_KEYS = {"name": None, "goal": ("minimize", "maximize"), "target": "a number"}
STOP_KEYS = dict.fromkeys(("min_iter", "max_iter", "s"), "a positive whole number")
STOP_KEYS |= {"type": ("hyperband",), "eta": "a number above 1", "strict": (False, True)}
PARAMETER_KEYS = {"distribution": tuple(DISTRIBUTIONS), "value": None, "values": None, "probabilities": None}
PARAMETER_KEYS |= {"min": "a number", "max": "a number", "mu": "a number", "sigma": "a number of at least 0"}
PARAMETER_KEYS |= dict.fromkeys("abq", "a positive number")


# ---------------------------------------------------------------- the sweep file
def check_choice(where: str, value: object, known: Collection) -> None:
    """ValueError with the near matches unless a value is one of the known ones."""
    if value not in list(known):
        hint = did_you_mean(str(value), map(str, known), most=2)
        raise ValueError(f"{where}: {value} is not supported{hint}; available: {', '.join(map(str, known))}")


def check_keys(where: str, given: object, rules: dict, needed: Iterable[str] = ()) -> None:
    """ValueError unless `given` is a mapping of known keys to values that keep their rules, with the needed keys."""
    if not isinstance(given, dict) or not given:
        raise ValueError(f"{where}: {given!r} must be a mapping, with {', '.join(rules)}")
    for key, value in given.items():
        check_choice(f"{where}, key", key, rules)
        if isinstance(rules[key], tuple):
            check_choice(f"{where}, {key}", value, rules[key])
        elif rules[key]:
            check_number(f"{where}, {key}", value, rules[key])
    for key in needed:
        if key not in given:
            raise ValueError(f"{where}: key {key} is missing")


def check_text(where: str, value: object) -> None:
    """ValueError for 1e-5 and the like, which YAML reads as text."""
    if isinstance(value, str) and (match := TEXT_NUMBER.fullmatch(value)):
        right = f"{match[1]}{match[2] or '.0'}e{match[3] or '+'}{match[4]}"
        raise ValueError(f"{where}: YAML reads {value} as text: write {right}")


def check_number(where: str, value: object, kind: str) -> None:
    """ValueError unless a value is a finite number of this kind (NUMBERS)."""
    check_text(where, value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not NUMBERS[kind](value):
        raise ValueError(f"{where}: {value!r} must be {kind}")


def check_parameter(where: str, spec: Any, grid: bool) -> dict:
    """The entry of a parameter with its distribution, by W&B's rules; in a grid `constant` or `categorical`."""
    check_keys(where, spec, PARAMETER_KEYS)
    whole = all(isinstance(spec.get(key), int) for key in ("min", "max"))
    guesses = {"value": "constant", "values": "categorical", "min": "int_uniform" if whole else "uniform"}
    kind = spec.get("distribution") or next((guess for key, guess in guesses.items() if key in spec), None)
    if kind is None:
        raise ValueError(f"{where}: needs value, values, min and max, or a distribution")
    kind += "_w_probabilities" * (kind == "categorical" and "probabilities" in spec)
    arguments = dict(list(inspect.signature(DISTRIBUTIONS[kind]).parameters.items())[1:])
    needed = [key for key, argument in arguments.items() if argument.default is argument.empty]
    rules = {key: PARAMETER_KEYS[key] for key in [*arguments, "distribution"] + ["q"] * kind.startswith("q_")}
    rules |= {"min": "a positive number"} if kind.endswith("_values") else {}
    rules |= dict.fromkeys(("min", "max"), "a whole number") if kind == "int_uniform" else {}
    check_keys(f"{where} ({kind})", spec, rules, needed)
    spec, values, chances = spec | {"distribution": kind}, spec.get("values", [0]), spec.get("probabilities")
    if "min" in spec and spec["min"] >= spec["max"]:
        raise ValueError(f"{where}: min {spec['min']} must be below max {spec['max']}")
    if not isinstance(values, list) or not values:
        raise ValueError(f"{where}: values {values!r} must be a list of at least one value")
    for value in [spec.get("value"), *values]:
        check_text(where, value)
    if chances is not None:
        numbers = [n for n in chances if isinstance(n, int | float) and n >= 0] if isinstance(chances, list) else []
        if len(numbers) != len(values) or chances != numbers or abs(sum(numbers) - 1) > 1e-6:
            raise ValueError(f"{where}: probabilities {chances} must be {len(values)} numbers that sum to 1")
    if grid and kind in ("int_uniform", "q_uniform"):  # as W&B: q_uniform without its max
        low, high, q = spec["min"], spec["max"], spec.get("q", 1)
        count = high - low + 1 if kind == "int_uniform" else math.ceil((high - low) / q - 1e-9)
        values = [tidy(low + i * q) for i in range(min(count, 10_001))]
        spec = {"distribution": "categorical", "values": values}
    elif grid and kind not in ("constant", "categorical"):
        raise ValueError(f"{where}: method grid takes value, values, int_uniform and q_uniform, not {kind}")
    if len(values) > 10_000:
        raise ValueError(f"{where}: more than 10,000 values")
    try:
        draw(spec, 0 if "values" in spec else ALMOST)
    except OverflowError:
        raise ValueError(f"{where}: {kind} takes exponents of e, max {spec.get('max')} is too large") from None
    return {"distribution": "constant", "value": values[0]} if "values" in spec and len(values) == 1 else spec


def read_sweep(path: str) -> dict:
    """The checked sweep file with W&B's defaults. ValueError, in one line, for what is wrong."""
    try:
        sweep = read_yaml(path)
        json.dumps(sweep)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror} (the first argument must be a sweep file)") from None
    except (ValueError, TypeError) as error:  # TypeError: a date
        raise ValueError(f"{path}: not the YAML of a sweep: {' '.join(str(error).split())}") from None
    check_keys(path, sweep, TOP_KEYS, ("method", "parameters"))
    sweep = {key: value for key, value in sweep.items() if value is not None}  # `entity:` without a value
    sweep = {"name": Path(path).stem, "metric": None, "early_terminate": None, "run_cap": math.inf} | sweep
    method, metric, stop, parameters = map(sweep.get, ("method", "metric", "early_terminate", "parameters"))
    if not isinstance(parameters, dict) or not parameters:
        raise ValueError(f"{path}, parameters: {parameters!r} must be a mapping of flags to what they can be")
    for name in [name for name in parameters if str(name).replace("-", "_") in OWN_FLAGS]:
        raise ValueError(f"{path}, {name}: leave it out, sweep_t5.py gives every trial its own")
    entries = {name: check_parameter(f"{path}, {name}", spec, method == "grid") for name, spec in parameters.items()}
    if metric is None and (method == "bayes" or stop):
        why = "early_terminate" if stop else "method bayes"
        raise ValueError(f"{path}: {why} needs a metric, such as `metric: {{name: eval/loss, goal: minimize}}`")
    if metric is not None:
        check_keys(f"{path}, metric", metric, METRIC_KEYS, ("name",))
        if metric["name"] in (None, ""):
            raise ValueError(f"{path}, metric, name: must be a metric that the runs log, such as eval/loss")
        metric = {"goal": "minimize"} | metric | {"name": str(metric["name"])}
    if stop is not None:
        check_keys(f"{path}, early_terminate", stop, STOP_KEYS, ("type",))
        stop = {"eta": 3, "strict": False} | stop  # W&B's documents; its package `sweeps` 0.3 fills in strict: true
        if ("min_iter" in stop) == ("max_iter" in stop) or ("max_iter" in stop) != ("s" in stop):
            raise ValueError(f"{path}, early_terminate: give either min_iter, or max_iter and s")
        if not brackets(stop):
            raise ValueError(f"{path}, early_terminate: max_iter {stop['max_iter']} is below eta {stop['eta']}")
    words = sweep.get("command") or ["${env}", "${interpreter}", "${program}", "${args}"]
    words = [str(word) for word in (words if isinstance(words, list) else [words])]
    for word in words:
        for variable in set(ENVVAR.findall(word)) - {*os.environ, "WANDB_RUN_ID"}:
            raise ValueError(f"{path}, command: {word}: the environment has no {variable}")
        if word.startswith("${") and word.endswith("}") and not ENVVAR.match(word):  # W&B would drop an unknown one
            check_choice(f"{path}, command", word, [f"${{{name}}}" for name in macros({}, Path(), "", "")])
    if not any(word.startswith("${args") for word in words):
        raise ValueError(f"{path}, command: has no ${{args}} as a word of its list, all trials would be the same")
    if "${program}" in words and not Path(str(sweep.get("program", ""))).is_file():
        raise ValueError(f"{path}, program: {sweep.get('program')}: no such file in {Path.cwd()}")
    sweep |= {"metric": metric, "early_terminate": stop, "parameters": entries, "command": words}
    name, sweep["goal"] = (metric["name"], metric["goal"]) if metric else ("", "minimize")
    sweep["key"] = metrics_key(name)
    sweep["sign"] = -1 if sweep["goal"] == "maximize" else 1  # of value * sign, less is better
    sweep["searched"] = {name: spec for name, spec in entries.items() if spec["distribution"] != "constant"}
    sizes = [len(spec["values"]) for spec in sweep["searched"].values() if method == "grid"]
    return sweep | {"size": math.prod(sizes) if method == "grid" else math.inf}  # of the whole search, in trials


def choose_folder(path: str, sweep: dict, output_dir: str | None) -> Path:
    """The sweep's folder: --output_dir, or the one below which the file's command gives each run a folder.

    In such a command --output_dir replaces that folder. ValueError if all runs would write into one folder.
    """
    text = "\0".join(sweep["command"])
    match = RUN_FOLDER.search(text)
    sweep["names_folder"] = match is not None
    if not match and re.search("--output[_-]dir", text):
        raise ValueError(
            f"{path}, command: all trials would write into one --output_dir: leave it out, or let it end "
            "in /$WANDB_RUN_ID"
        )
    name = re.sub(r"[^\w.-]+", "_", str(sweep["name"] or ""))
    if not name.strip("._"):
        raise ValueError(f"{path}, name: {sweep['name']!r} must have a letter: it names the sweep's folder")
    folder = output_dir or (match[2] if match else f"out/sweeps/{name}")
    if match and re.search(r"[\s$`~\"'\\]", folder):
        raise ValueError(f"--output_dir {folder}: the command's shell would read that otherwise, use plain letters")
    sweep["command"] = RUN_FOLDER.sub(lambda found: found[1] + folder + found[3], text).split("\0")
    return Path(folder)


# ---------------------------------------------------------------- what is tried
def tidy(value: float) -> float:
    """0.30000000000000004 -> 0.3."""
    return float(f"{value:.12g}") if isinstance(value, float) else value


def shown(value: object) -> str:
    """A value as the screen and the pictures show it: 0.000123456 -> "0.0001235"."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def draw(spec: dict, x: float) -> object:
    """The value of a parameter at quantile x, or at index x if it is categorical."""
    arguments = {key: value for key, value in spec.items() if key not in ("distribution", "q")}
    value = DISTRIBUTIONS[spec["distribution"]](x, **arguments)
    q = spec.get("q", 1)
    return tidy(round(value / q) * q) if spec["distribution"].startswith("q_") else value


def propose(trials: list, sweep: dict, seed: int) -> tuple[dict, dict, dict]:
    """The next trial after these of Optuna: {flag: value}, and Optuna's indices or quantiles with their distributions.

    Each trial has its own generator, from `seed` and its number, so that agents never draw the same.
    """
    from optuna import create_study
    from optuna.distributions import CategoricalDistribution, FloatDistribution
    from optuna.samplers import RandomSampler, TPESampler

    kinds, chosen, rest = {}, {}, len(trials)
    for name, spec in sweep["searched"].items():
        listed = spec["distribution"] == "categorical"
        quantile = FloatDistribution(1 - ALMOST, ALMOST)
        kinds[name] = CategoricalDistribution(range(len(spec["values"]))) if listed else quantile
    if sweep["method"] == "grid":
        for name in reversed(kinds):  # the last parameter of the file changes fastest, at W&B the last by name
            rest, chosen[name] = divmod(rest, len(kinds[name].choices))
    else:
        own_seed = int(np.random.SeedSequence((seed, len(trials))).generate_state(1)[0])
        sampler = (TPESampler if sweep["method"] == "bayes" else RandomSampler)(seed=own_seed)
        copy = create_study(sampler=sampler, direction=sweep["goal"])
        copy.add_trials(trials)
        chosen = copy.ask(kinds).params
    return {name: draw(spec, chosen.get(name)) for name, spec in sweep["parameters"].items()}, chosen, kinds


def macros(values: dict, folder: Path, run: str, program: str) -> dict[str, list[str]]:
    """{macro: the words that replace ${macro} in a command}, as in W&B's agent."""
    pairs = [f"{name}={value}" for name, value in values.items()]
    return {
        "env": ["/usr/bin/env"],
        "interpreter": ["python"],
        "program": [program],
        "args": [f"--{pair}" for pair in pairs],
        "args_no_hyphens": pairs,
        "args_no_boolean_flags": [f"--{n}" if v is True else f"--{n}={v}" for n, v in values.items() if v is not False],
        "args_json": [json.dumps(values)],
        "args_json_file": [str(folder / f"{run}.json")],
    }


def command_line(sweep: dict, values: dict, folder: Path, run: str, write: bool = True) -> list[str]:
    """The command that runs these values; --output_dir is added unless the file's command has it."""
    values = values if sweep["names_folder"] else values | {"output_dir": str(folder / run)}
    found, environment = macros(values, folder, run, str(sweep.get("program"))), os.environ | {"WANDB_RUN_ID": run}
    if write and "${args_json_file}" in sweep["command"]:
        write_aside(folder / f"{run}.json", lambda aside: aside.write_text(found["args_json"][0]))
    words = [ENVVAR.sub(lambda match: environment[match[1]], word) for word in sweep["command"]]
    return [part for word in words for part in (found.get(word[2:-1], [word]) if word[:2] == "${" else [word])]


def read_lines(folder: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl; [] without such a file."""
    return read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").is_file() else []


def history(lines: list[dict], key: str) -> list[float]:
    """All finite values of a metric among the lines that a run has logged."""
    values = [line.get(key) for line in lines]
    return [value for value in values if isinstance(value, int | float) and math.isfinite(value)]


def best_value(lines: list[dict], sweep: dict) -> float | None:
    """The best finite value of the metric among a run's lines: its result, as in W&B's own search."""
    return min(history(lines, sweep["key"]), key=lambda value: sweep["sign"] * value, default=None)


def brackets(stop: dict) -> list[int]:
    """min_iter 3 -> [3, 9, 27, ...]; max_iter 27, s 2 -> [3, 9] (eta 3)."""
    if "min_iter" in stop:
        steps = itertools.accumulate([stop["eta"]] * 99, operator.mul, initial=stop["min_iter"])
        return [int(step) for step in steps if step < 1e9]
    return sorted(int(b) for b in (stop["max_iter"] / stop["eta"] ** n for n in range(1, stop["s"] + 1)) if b >= 1)


def is_hopeless(own: list[float], everyone: list[list[float]], stop: dict, sign: int) -> bool:
    """Whether W&B's hyperband stops a run: it is not among the best 1/eta of all runs that reached its last bracket.

    own: its metric so far; everyone: that of all runs, itself among them; sign: 1 if less is better. As in W&B, bracket
    3 is the third value, and the best value so far is compared, or with `strict` the one at the bracket.
    """
    bracket = max((bracket for bracket in brackets(stop) if bracket <= len(own)), default=None)
    if bracket is None:
        return False
    there = sorted(sign * values[bracket - 1] for values in everyone if len(values) >= bracket)
    mine = sign * own[bracket - 1] if stop["strict"] else min(sign * value for value in own)
    return mine > there[int(len(there) / stop["eta"])]
