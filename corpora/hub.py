"""The Hugging Face Hub and saved `datasets` folders. Without a network nothing waits for the Hub."""

import os
from pathlib import Path
from typing import Any

from common.processes import answers
from common.reports import first_line
from constants import DATASET_VALS

SAVED_SHARDS = 96  # into which a saved data set is cut when it is streamed


def load_dataset_splits(
    name: str, config: str | None, flag: str, streaming: bool = False, needed: str | None = None
) -> dict[str, Any]:
    """{split: a datasets.Dataset, with `streaming` an IterableDataset} of a saved folder or a Hub name. ValueError if
    there is none, or no split called `needed`."""
    import datasets

    do_not_wait_for_the_hub(name)
    try:
        if (Path(name) / "dataset_dict.json").is_file() or (Path(name) / "state.json").is_file():
            loaded = datasets.load_from_disk(name)
            splits = loaded if isinstance(loaded, dict) else datasets.DatasetDict(train=loaded)
            splits = {split: _plain(rows) for split, rows in splits.items()}
            if streaming:
                shards = {split: max(1, min(SAVED_SHARDS, len(rows))) for split, rows in splits.items()}
                splits = {split: rows.to_iterable_dataset(shards[split]) for split, rows in splits.items()}
        else:
            splits = datasets.load_dataset(name, config, streaming=streaming)
    except (OSError, ValueError, RuntimeError) as error:
        hint = "" if hub_is_reachable() else "; the Hub cannot be reached from here: give local files instead"
        tasks = [f"{benchmark}/{task}" for benchmark, tasks in DATASET_VALS.items() for task in tasks]
        tasks = [task for task in tasks if name in (task, task.partition("/")[2])]
        hint = f"; {name} is a task: fine_tune_t5.py --task {' or '.join(tasks)}" if tasks else hint
        reason = f"neither a saved data set nor one on the Hub ({first_line(error)}){hint}"
        raise ValueError(f"{flag} {name}: {reason}") from None
    if needed and needed not in splits:
        raise ValueError(f"{flag} {name}: has no split called {needed}; there is {', '.join(splits)}")
    return splits


def _plain(rows: Any) -> Any:
    """The rows with all columns as Python values, also of a data set that was saved after `set_format("torch")`."""
    saved = rows.format
    return rows if saved["type"] is None and saved["columns"] == rows.column_names else rows.with_format(None)


def do_not_wait_for_the_hub(name: str) -> None:
    """Makes Hugging Face's libraries use only their caches if `name` is no path and the Hub is out of reach: they would
    retry for 20 to 50 seconds. They read the variables once, so both places are set."""
    if not Path(name).exists() and not hub_is_reachable():
        import huggingface_hub.constants

        os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
        huggingface_hub.constants.HF_HUB_OFFLINE = True


def hub_is_reachable() -> bool:
    """Whether the Hugging Face Hub answers."""
    from huggingface_hub import constants

    return answers(constants.ENDPOINT)
