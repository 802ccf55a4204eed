"""One run, the same in every tracker: W&B, TensorBoard and trackio get equal names, values, configuration and tables.

    loss, grad_norm, learning_rate -> train/loss, train/grad_norm, train/learning_rate
    eval_loss, eval_matched_accuracy -> eval/loss, eval/matched_accuracy
    sequences_per_second, mfu, eval_runtime -> perf/sequences_per_second, perf/mfu, perf/eval_runtime

The x-axis of every curve is the optimizer step. transformers' own callbacks for these three are removed: each names the
closing numbers differently or drops them, and doubles points when a run is resumed.

A resumed run continues its curves. trackers.json in the output folder, and every checkpoint's trainer_state.json, hold
the run's id and, for each tracker and name, the last step that the tracker has certainly stored. Values up to that step
are not sent again, since a resumed run computes the same ones; TensorBoard instead hides what came after the checkpoint
(its purge step). Values before the checkpoint that a tracker lacks are sent from metrics.jsonl, so a tracker that is
added later gets the whole curve. W&B and trackio hold values in memory for a while, so what they got in the last minute
before a run was killed is sent again: an online W&B run drops the copy, elsewhere a point may appear twice.

The libraries' own resuming is used where it exists (an id, TensorBoard's purge step), and is not enough: W&B knows the
last step of a run only online, its rewinding works only there, and trackio 0.43 stores a step that comes twice twice.
"""

import copy
import json
import logging
import os
import re
import secrets
import shlex
import time
from collections.abc import Callable
from numbers import Real
from pathlib import Path

from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations import INTEGRATION_TO_CALLBACK

from foundry.arguments.training import T5TrainingArguments
from foundry.common.errors import UserError
from foundry.common.machine import is_answered
from foundry.common.paths import check_folder
from foundry.common.ranks import is_first_process
from foundry.common.reports import (
    markdown_table,
    plain_json,
    read_json,
    record_json,
    side_file,
    tracked_name,
    write_json,
)
from foundry.common.terminal import print_once
from foundry.runs.callbacks import metrics_until

logger = logging.getLogger(__name__)

TRACKERS_FILE = "trackers.json"
HELD = 60.0  # seconds after which a tracker has surely stored what it was sent
TENSORBOARD_FOLDER = "tensorboard"  # below --output_dir, unless TENSORBOARD_LOGGING_DIR names another place


# ---------------------------------------------------------------- the three trackers
def wandb_settings(args: T5TrainingArguments) -> dict[str, str | None]:
    """Project, folder ("dir") and mode of a W&B run, as W&B's environment variables say. Without WANDB_MODE: online if
    the user is logged in and W&B answers, else offline, which a printed line says. Sets no variable, since the next run
    of this process would take it for the user's."""
    project, mode = os.environ.get("WANDB_PROJECT", args.project), os.environ.get("WANDB_MODE")
    folder = os.environ.get("WANDB_DIR", args.output_dir)
    try:
        check_folder("WANDB_DIR", folder)
    except ValueError as error:
        folder = args.output_dir
        print_once(f"W&B: {error}; its files go to {folder}")
    Path(folder).mkdir(parents=True, exist_ok=True)
    if mode is None:
        # wandb's own check of the login would start its session, which reads the mode only once, before it is decided.
        import wandb
        from requests.utils import get_netrc_auth

        server = os.environ.get("WANDB_BASE_URL") or wandb.Settings().base_url
        # Up to version 0.30 wandb stored the login under the second address.
        logins = [server] if "WANDB_BASE_URL" in os.environ else [server, "https://api.wandb.ai"]
        logged_in = {"WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"} & set(os.environ) or any(map(get_netrc_auth, logins))
        if not (logged_in and is_answered(server)):
            mode, reason = "offline", f"{server} does not answer" if logged_in else "not logged in"
            runs = Path(folder) / "wandb" / "offline-run-*"
            print_once(f"W&B: {reason}, tracking offline; later: wandb sync {runs} (--report_to none: off)")
    return dict(project=project, dir=folder, mode=mode)


class WandbTracker:
    """A W&B run, online or offline as `wandb_settings` decides. A run that is resumed offline adds a folder with the
    same id; `wandb sync` sends both in order."""

    def __init__(self, args: T5TrainingArguments, identity: str, name: str, config: dict, step: int | None):
        import wandb

        ours = wandb_settings(args) | dict(name=name, id=identity)
        if os.environ.get("WANDB_SWEEP_ID"):
            del ours["id"], ours["project"]
        # Otherwise wandb would mix this run into one that failed earlier in this process.
        ours["reinit"] = "finish_previous"
        self.table = wandb.Table
        # init gets the configuration, since a later update would make a sweep warn of each value that it has set.
        self.run = wandb.init(**ours, config=config, resume=None if step is None else "allow")
        folders = shlex.quote(str(Path(self.run.dir).parent.parent))
        self.shown = f"wandb sync {folders}/offline-run-*-{self.run.id}" if self.run.offline else self.run.url

    def log(self, values: dict, step: int) -> None:
        self.run.log(values, step=step)

    def log_table(self, name: str, columns: list[str], rows: list[list], step: int) -> None:
        self.run.log({name: self.table(columns=columns, data=rows, allow_mixed_types=True)}, step=step)

    def finish(self, latest: dict) -> None:
        """Ends the run. The summary, which a sweep reads, gets the best checkpoint's evaluation."""
        self.run.log({}, commit=True)
        self.run.summary.update(latest)
        self.run.finish()


class TensorBoardTracker:
    """Event files in <output_dir>/tensorboard, so that `tensorboard --logdir out` shows all runs."""

    def __init__(self, args: T5TrainingArguments, identity: str, name: str, config: dict, step: int | None):
        from torch.utils.tensorboard import SummaryWriter

        elsewhere = os.environ.get("TENSORBOARD_LOGGING_DIR")
        own = re.sub(r"[^\w.-]+", "_", name)  # a folder's name, even if the run's has slashes
        folder = Path(elsewhere) / f"{own}-{identity}" if elsewhere else Path(args.output_dir) / TENSORBOARD_FOLDER
        self.writer = SummaryWriter(str(folder), purge_step=None if step is None else step + 1)
        self.shown = f"tensorboard --logdir {shlex.quote(str(folder))}"
        self.writer.add_text("config", f"```json\n{json.dumps(plain_json(config), indent=2)}\n```", step or 0)

    def log(self, values: dict, step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def log_table(self, name: str, columns: list[str], rows: list[list], step: int) -> None:
        self.writer.add_text(name, markdown_table(columns, rows), step)
        self.writer.flush()

    def finish(self, _latest: dict) -> None:
        self.writer.close()


class TrackioTracker:
    """A run of trackio: `trackio show --project t5_foundry` opens its dashboard on this machine."""

    def __init__(self, args: T5TrainingArguments, identity: str, name: str, config: dict, step: int | None):
        import trackio

        self.trackio, self.shown = trackio, f"trackio show --project {shlex.quote(args.project)}"
        trackio.init(
            project=args.project,
            name=name if identity in name else f"{name}-{identity}",  # trackio finds a run by its name
            config=plain_json(config),
            resume="never" if step is None else "allow",
            space_id=args.trackio_space_id,
            bucket_id=args.trackio_bucket_id,
            private=args.hub_private_repo,
        )

    def log(self, values: dict, step: int) -> None:
        self.trackio.log(values, step=step)

    def log_table(self, name: str, columns: list[str], rows: list[list], step: int) -> None:
        self.trackio.log({name: self.trackio.Table(columns=columns, data=rows)}, step=step)

    def finish(self, _latest: dict) -> None:
        self.trackio.finish()


TRACKERS = {"wandb": WandbTracker, "tensorboard": TensorBoardTracker, "trackio": TrackioTracker}


# ---------------------------------------------------------------- all at once
class TrackersCallback(TrainerCallback):
    """Sends every log to the trackers, each name once a step.

    If a step has two values of a name, the first one counts, as in loss.png: the second is that of the best checkpoint,
    evaluated after training, and goes into W&B's summary. A tracker that fails is left out from then on, with a
    warning.

    trackers: {name: tracker}. identity: the run's id. sent: {tracker: {name: last step that it was sent}}. path: the
    trackers.json to write.
    """

    def __init__(self, trackers: dict, identity: str, sent: dict, path: Path):
        self.trackers, self.identity, self.sent, self.path = trackers, identity, sent, path
        self.latest = {}  # {name: its latest value}
        # Copies of `sent`: as it was at recent_since, and as it was at least HELD seconds earlier.
        self.recent = self.certain = copy.deepcopy(sent)
        self.recent_since = time.monotonic()

    def on_log(self, _args: TrainingArguments, state: TrainerState, *_, logs: dict, **__) -> None:
        self.send(logs, state.global_step)
        self._keep(state)

    def on_train_end(self, _args: TrainingArguments, state: TrainerState, *_, **__) -> None:
        self.latest = {}
        self.certain = self.recent = self.sent  # the process ends in an orderly way, so the trackers store everything
        self._keep(state)

    def send(self, logs: dict, step: int) -> None:
        """Sends each tracker the numbers of a log that it lacks at this step."""
        numbers = {key: value for key, value in logs.items() if isinstance(value, Real) and not isinstance(value, bool)}
        values = {tracked_name(key): v if isinstance(v, int) else float(v) for key, v in numbers.items()}
        self.latest |= values
        self._each(lambda tracker, new: tracker.log(new, step), values, step)

    def log_table(self, state: TrainerState, name: str, columns: list[str], rows: list[list]) -> None:
        """Sends a table to the trackers that lack it at this step."""
        step = state.global_step
        self._each(lambda tracker, _: tracker.log_table(name, columns, rows, step), {name: rows}, step)
        self._keep(state)

    def finish(self) -> list[str]:
        """Ends the run at its trackers; returns the commands and addresses that show it."""
        self._each(lambda tracker, _: tracker.finish(self.latest))
        shown = [tracker.shown for tracker in self.trackers.values()]
        self.trackers = {}
        return shown

    def _each(self, act: Callable, values: dict | None = None, step: int = 0) -> None:
        """Calls act(tracker, values that this tracker lacks at this step) for every tracker that lacks any; without
        values, act(tracker, {}) for all trackers."""
        for name, tracker in list(self.trackers.items()):
            sent = self.sent.setdefault(name, {})
            new = {key: value for key, value in (values or {}).items() if step > sent.get(key, -1)}
            if values is not None and not new:
                continue
            try:
                act(tracker, new)
                sent |= dict.fromkeys(new, step)
            except Exception as error:
                del self.trackers[name]
                logger.warning(
                    "%s is left out from now on (%s: %s); metrics.jsonl has all values",
                    name,
                    type(error).__name__,
                    error,
                )

    def _keep(self, state) -> None:
        if time.monotonic() - self.recent_since > HELD:
            self.certain, self.recent, self.recent_since = self.recent, copy.deepcopy(self.sent), time.monotonic()
        written_at_once = {name: steps for name, steps in self.sent.items() if name == "tensorboard"}
        record = {"id": self.identity, "sent": self.certain | written_at_once}
        state.stateful_callbacks[TRACKERS_FILE] = record  # goes into the trainer_state.json of every checkpoint
        with side_file(self.path):
            write_json(self.path, record)


# ---------------------------------------------------------------- for the scripts
def start_trackers(trainer: Trainer, config: dict, checkpoint: str | None = None) -> None:
    """Replaces transformers' callbacks for the trackers of `--report_to` with ours.

    config: shown as the run's configuration. checkpoint: the one that the run resumes from. UserError, with the
    tracker's own words, if a tracker cannot start.
    """
    args, trackers = trainer.args, {}
    names = [name for name in TRACKERS if name in args.report_to]
    if checkpoint is not None:
        tell_of_new_runs([name for name in args.report_to if name not in (*TRACKERS, "none")])
    for name in names:
        trainer.remove_callback(INTEGRATION_TO_CALLBACK[name])
    if os.environ.get("WANDB_MODE") == "disabled":
        names = [name for name in names if name != "wandb"]  # a run that is resumed with W&B sends it the whole curve
    if not names or not is_first_process():
        return
    path = Path(args.output_dir) / TRACKERS_FILE
    known, sent, step, lines = resumed_run(path, checkpoint) if checkpoint is not None else (None, {}, None, [])
    identity = os.environ.get("WANDB_RUN_ID") or known or secrets.token_hex(4)
    title = args.run_name or os.environ.get("WANDB_NAME") or Path(args.output_dir).resolve().name
    for name in names:
        try:
            trackers[name] = TRACKERS[name](args, identity, title, config, step)
        except Exception as error:
            raise UserError(f"--report_to {name}: {type(error).__name__}: {error}") from error
    callback = TrackersCallback(trackers, identity, sent, path)
    trainer.add_callback(callback)
    for line in lines:
        callback.send({key: value for key, value in line.items() if key not in ("step", "seconds")}, line["step"])


def tell_of_new_runs(others: list[str]) -> None:
    """Prints that a run that is resumed begins anew at these trackers, which transformers serves."""
    if not others or (others == ["mlflow"] and os.environ.get("MLFLOW_RUN_ID")):
        return
    more = " (MLflow goes on with the run that MLFLOW_RUN_ID names)" if "mlflow" in others else ""
    print_once(f"--report_to {' '.join(others)}: the resumed run begins a new run there{more}")


def resumed_run(path: Path, checkpoint: str) -> tuple[str, dict, int, list[dict]]:
    """(id, what was sent, the checkpoint's step, the lines of metrics.jsonl up to it) of a run that is resumed; id and
    what was sent as in TrackersCallback, "" and {} for a run without trackers. path: its trackers.json."""
    state = record_json(Path(checkpoint) / "trainer_state.json")
    record = read_json(path) or (state.get("stateful_callbacks") or {}).get(TRACKERS_FILE, {})
    identity, sent, step = str(record.get("id") or ""), record.get("sent", {}), state["global_step"]
    if Path(identity).name != identity:  # it becomes part of a folder's name
        raise UserError(f"{path}: {identity!r:.80} is no id of a run. Delete the file: the curves begin anew")
    if "tensorboard" in sent:  # TensorBoard hides what was logged beyond the step from which the run resumes
        sent["tensorboard"] = {name: min(last, step) for name, last in sent["tensorboard"].items()}
    return identity, sent, step, metrics_until(path.with_name("metrics.jsonl"), step, state["log_history"])


def show_table(trainer: Trainer, name: str, columns: list[str], rows: list[list]) -> None:
    """Shows a table of numbers and texts in every tracker of the run, at the run's current step.

    show_table(trainer, "samples", ["source", "target"], [["a <extra_id_0> c", "b"]])
    """
    for callback in _callbacks(trainer):
        callback.log_table(trainer.state, name, columns, rows)


def finish_trackers(trainer: Trainer) -> dict[str, str | None]:
    """Ends the run at its trackers; returns a row of the end summary: the commands and addresses that show it."""
    shown = [where for callback in _callbacks(trainer) for where in callback.finish()]
    return {"tracked": "; ".join(shown) or None}


def _callbacks(trainer: Trainer) -> list[TrackersCallback]:
    return [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, TrackersCallback)]
