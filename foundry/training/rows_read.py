"""How many rows a run has read, and where in an epoch it is: in rows, since a resumed run may have other batches.

    read = saved_rows(checkpoint, step=12, batch=16, rows=1_024, drop_last=True)
    left = steps_to_come(read, epochs=1.0, batch=16, rows=1_024, drop_last=True)

An epoch of a pre-training has only whole global batches (`drop_last`); the last batch of a fine-tuning's epoch
may be a short one.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from foundry.common.errors import UserError
from foundry.common.reports import is_of, read_json

SAVED_AS = "rows_read"  # in loss_state_*.json
SINCE = "same_batch_since"  # in loss_state_*.json
SEGMENTS = "sequences_from_step"  # in run.json: {step: rows of a global batch from there on}


@dataclass(frozen=True)
class RowsRead:
    """total: rows in all. epoch, of_epoch: epochs that have ended, and rows of the one that has begun. group: rows
    among which `--train_sampling_strategy group_by_length` sorts by length, which must stay for the order to stay."""

    total: int = 0
    epoch: int = 0
    of_epoch: int = 0
    group: int = 0

    def after(self, steps: int, batch: int, rows: int, drop_last: bool) -> "RowsRead":
        """After this many steps more, in epochs of `rows` rows."""
        of_rest = steps_of_rest(self, batch, rows, drop_last)
        if not steps or steps < of_rest:
            return replace(self, total=self.total + steps * batch, of_epoch=self.of_epoch + steps * batch)
        rows_of_rest = end_of_epoch(self.of_epoch, batch, rows, drop_last) - self.of_epoch
        rows_of_epoch = end_of_epoch(0, batch, rows, drop_last)
        epochs, steps = divmod(steps - of_rest, max(1, steps_of_rest(RowsRead(), batch, rows, drop_last)))
        total = self.total + rows_of_rest + epochs * rows_of_epoch + steps * batch
        return replace(self, total=total, epoch=self.epoch + 1 + epochs, of_epoch=steps * batch)

    def record(self) -> dict[str, int]:
        """As a checkpoint keeps it."""
        return asdict(self)


def rows_of_record(saved: Any, path: Path) -> RowsRead:
    """RowsRead of what a checkpoint keeps. UserError for anything that no run has written. path: named in it."""
    known = {field.name for field in fields(RowsRead)}
    is_right = is_of(saved, dict[str, int]) and saved.keys() <= known and all(count >= 0 for count in saved.values())
    if not is_right or saved.get("of_epoch", 0) > saved.get("total", 0):
        raise UserError(f"{path}: {SAVED_AS} is {saved!r:.80}, which no run has written. Take another checkpoint")
    return RowsRead(**saved)


def end_of_epoch(first: int, batch: int, rows: int, drop_last: bool) -> int:
    """Rows after which an epoch of `rows` rows ends that goes on behind the first `first` of them."""
    return first + (rows - first) // batch * batch if drop_last else rows


def steps_of_rest(read: RowsRead, batch: int, rows: int, drop_last: bool) -> int:
    """Steps until the epoch that has begun ends."""
    end = end_of_epoch(read.of_epoch, batch, rows, drop_last)
    return math.ceil((end - read.of_epoch) / batch)


def steps_to_come(read: RowsRead, epochs: float, batch: int, rows: int, drop_last: bool) -> int:
    """Steps until a run of this many epochs ends."""
    steps_per_epoch = steps_of_rest(RowsRead(), batch, rows, drop_last)
    if not read.of_epoch:
        return max(0, math.ceil((epochs - read.epoch) * steps_per_epoch))
    if epochs > read.epoch + 1:
        return steps_of_rest(read, batch, rows, drop_last) + math.ceil((epochs - read.epoch - 1) * steps_per_epoch)
    end = (epochs - read.epoch) * end_of_epoch(0, batch, rows, drop_last)
    return min(steps_of_rest(read, batch, rows, drop_last), max(0, math.ceil((end - read.of_epoch) / batch)))


def saved_rows(checkpoint: str, step: int, batch: int, rows: int | None, drop_last: bool) -> RowsRead:
    """What the run of a checkpoint had read at its step. Versions of T5 Foundry that did not count had batches of one
    size. batch: the size now, for a checkpoint without its run.json. rows: of an epoch; None: a stream."""
    paths = sorted(Path(checkpoint).glob("loss_state_*.json"))
    saved = read_json(paths[0]).get(SAVED_AS) if paths else None
    if saved:
        return rows_of_record(saved, paths[0])
    stream = [read_json(path).get("next_example") for path in sorted(Path(checkpoint).glob("stream_state_*.json"))]
    if stream:
        return RowsRead(stream[0], 0, 0, batch)
    before = read_json(Path(checkpoint).parent / "run.json").get("sequences_per_step") or batch
    if rows is None:
        return RowsRead(step * before, 0, 0, before)
    steps_per_epoch = max(1, steps_of_rest(RowsRead(), before, rows, drop_last))
    epoch, steps = divmod(step, steps_per_epoch)
    end = end_of_epoch(0, before, rows, drop_last)
    return RowsRead(epoch * end + steps * before, epoch, steps * before, before)


@dataclass(frozen=True)
class SameBatch:
    """Since when a run's global batches have had `batch` rows: the step, and how far it had come.

    A schedule in epochs is counted from there, and so does not depend on the checkpoint from which the run goes on.
    """

    step: int
    batch: int
    read: RowsRead

    def record(self) -> dict[str, int]:
        """As a checkpoint keeps it."""
        return {"step": self.step, "batch": self.batch} | self.read.record()


def saved_batch(checkpoint: str) -> SameBatch | None:
    """What the run of a checkpoint has saved of it; None: it is of a version that did not save it."""
    saved = [read_json(path).get(SINCE) for path in sorted(Path(checkpoint).glob("loss_state_*.json"))]
    if not saved or not is_of(saved[0], dict[str, int]):
        return None
    read = dict(saved[0])
    return SameBatch(read.pop("step"), read.pop("batch"), RowsRead(**read))


def segments_of(run: dict) -> list[tuple[int, int]]:
    """[(step, rows of a global batch from there on)] of a run.json. One that its run cannot have written counts as of
    batches of one size."""
    found = run.get(SEGMENTS)
    if not is_of(found, dict[str, int]) or not all(step.isdecimal() and size > 0 for step, size in found.items()):
        found = {}
    return sorted((int(step), size) for step, size in (found or {"0": run.get("sequences_per_step") or 1}).items())


def with_segment(run: dict, step: int, batch: int) -> dict[str, int]:
    """The SEGMENTS of a run.json that goes on at a step with batches of this size. run: that of the run before; {} for
    none."""
    kept = [(begin, size) for begin, size in (segments_of(run) if run and step else []) if begin < step]
    if not kept or kept[-1][1] != batch:
        kept.append((step, batch))
    return {str(begin): size for begin, size in kept}


def tokens_at(run: dict) -> Callable[[int], int] | None:
    """A function from a step to the tokens that the run with this run.json had read by then; None where its rows have
    different lengths."""
    per_step, segments = run.get("tokens_per_step"), segments_of(run)
    if not per_step:
        return None
    now = segments[-1][1]

    def tokens(step: int) -> int:
        ends = [begin for begin, _ in segments[1:]] + [step]
        rows = sum(size * max(0, min(end, step) - begin) for (begin, size), end in zip(segments, ends, strict=True))
        return round(per_step * rows / now)

    return tokens
