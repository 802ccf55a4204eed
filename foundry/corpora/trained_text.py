"""Which text a pre-training has trained on, so that no evaluation and no further pre-training holds that text out.

    trained_text.npz, beside run.json
        documents [N] uint32   hashes of the training documents, those of the runs before too: 4 bytes a document
        streamed [M]           marks of the files and data sets that were read as a stream, whose documents nobody lists

    before = earlier_run(model_args.model_name_or_path)      # None: no pre-training of this toolkit
    before.text.count(hashes)

Two of N documents have the same hash with a chance of N / 2**32: such a document is merely not held out.
"""

import hashlib
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from constants import TASK_RECORD
from foundry.common.digests import PIECE_BYTES, kept_digests
from foundry.common.errors import UserError
from foundry.common.reports import first_line, is_of, read_json
from foundry.common.whole_folders import patiently

TRAINED_TEXT = "trained_text.npz"
# Flags that decide which part of a text is trained on. (A text's fingerprint covers all of it.)
DECIDES_PART = (
    "text_column",
    "input_ids_column",
    "max_train_samples",
    "validation_split_percentage",
    "validation_split_count",
)
NO_EARLIER = "none"  # fingerprint where no earlier run counts


def short_hashes(digests: np.ndarray | Sequence[int]) -> np.ndarray:
    """Hashes of 64 bits, cut to their upper 32."""
    return (np.asarray(digests, dtype=np.uint64) >> np.uint64(32)).astype(np.uint32)


@dataclass(frozen=True)
class TrainedText:
    """documents: hashes [N] uint32, sorted, each once. streamed: marks of `marks_of`."""

    documents: np.ndarray
    streamed: frozenset[str] = frozenset()

    @cached_property
    def fingerprint(self) -> str:
        """A hash of it all."""
        marks = "".join(sorted(self.streamed)).encode()
        return hashlib.sha256(np.ascontiguousarray(self.documents).tobytes() + marks).hexdigest()

    def holds(self, digest: int) -> bool:
        """Whether a document with this hash of 64 bits was trained on."""
        wanted = np.uint32(digest >> 32)
        place = int(np.searchsorted(self.documents, wanted))
        return place < len(self.documents) and bool(self.documents[place] == wanted)

    def count(self, hashes: np.ndarray) -> int:
        """How many of the documents with these hashes [n] of 32 bits were trained on."""
        if not len(self.documents):
            return 0
        places = np.minimum(np.searchsorted(self.documents, hashes), len(self.documents) - 1)
        return int((self.documents[places] == hashes).sum())

    def joined(self, documents: Iterable[np.ndarray], streamed: Iterable[str]) -> "TrainedText":
        """With further ones."""
        together = np.unique(np.concatenate([self.documents, *documents]))
        return TrainedText(together, self.streamed | set(streamed))

    def save(self, folder: Path) -> None:
        """Writes it into a run's folder."""
        aside = folder / f".{TRAINED_TEXT}"
        with aside.open("wb") as file:
            np.savez(file, documents=self.documents, streamed=np.array(sorted(self.streamed), dtype=np.str_))
        patiently(lambda: aside.replace(folder / TRAINED_TEXT))


NOTHING = TrainedText(np.empty(0, np.uint32))


@dataclass(frozen=True)
class EarlierRun:
    """The pre-training that made a model. text: None where it did not write one (T5 Foundry 1.x before this file)."""

    model: str
    arguments: dict
    fingerprints: dict[str, str]
    documents: dict[str, int]  # read of each split
    text: TrainedText | None

    def held_out_of(self, args: Any, fingerprint: str) -> bool:
        """Whether what the flags hold out of the text with this fingerprint is what this run held out of it."""
        if "validation" in self.fingerprints or self.fingerprints.get("train") != fingerprint:
            return False
        if self.fingerprints.get("earlier", NO_EARLIER) != NO_EARLIER:
            return False
        return all(self.arguments.get(name) == getattr(args, name) for name in DECIDES_PART)


def earlier_run(model: str | None) -> EarlierRun | None:
    """The pre-training whose folder or checkpoint a model is; None if it is none, or was fine-tuned since. UserError
    for a damaged file."""
    folder = Path(model or "")
    places = [place for place in (folder, folder.parent) if model and (place / "run.json").is_file()]
    if not places or (folder / TASK_RECORD).is_file():
        return None
    run, path, text = read_json(places[0] / "run.json"), places[0] / TRAINED_TEXT, None
    if not is_of(run.get("arguments"), dict) or "objective" not in run["arguments"]:
        return None
    if path.is_file():
        try:
            check_arrays(path, ("documents", "streamed"))
            with np.load(path, allow_pickle=False) as file:
                documents, streamed = file["documents"], file["streamed"]
            text = TrainedText(documents.astype(np.uint32, casting="safe"), frozenset(streamed.tolist()))
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise UserError(
                f"{path}: cannot be read ({first_line(error)}). Without this file nobody knows what {model} was "
                "trained on: delete it, and give text that is new with --validation_file"
            ) from None
    examples, fingerprints = (run[name] if is_of(run.get(name), dict) else {} for name in ("examples", "fingerprints"))
    counts = {split: count for split, count in examples.items() if isinstance(count, int)}
    return EarlierRun(str(model), run["arguments"], fingerprints, counts, text)


def check_arrays(path: Path, names: Sequence[str]) -> None:
    """ValueError, before numpy takes memory for them, unless each of these arrays of an .npz file is a list that the
    file really holds, uncompressed."""
    with zipfile.ZipFile(path) as archive:
        for name in names:
            info = archive.getinfo(f"{name}.npy")
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > path.stat().st_size:
                raise ValueError(f"{name} is compressed, or longer than the file")
            with archive.open(info) as member:
                version = np.lib.format.read_magic(member)
                read_header = np.lib.format.read_array_header_1_0
                if version >= (2, 0):
                    read_header = np.lib.format.read_array_header_2_0
                shape, _, kind = read_header(member)
                held = info.file_size - member.tell()
            if len(shape) != 1 or shape[0] * kind.itemsize != held:
                raise ValueError(f"{name} has the shape {shape}, and is no list of {held:,} bytes")


def knows_earlier(checkpoint: str) -> bool:
    """Whether the run that saved this checkpoint knew of runs before it. Older versions of T5 Foundry did not."""
    return "earlier" in (read_json(Path(checkpoint).parent / "run.json").get("fingerprints") or ())


def marks_of(origin: Sequence[Path] | str, cache: Path | None) -> list[str]:
    """A mark for the contents of each file: a hash of its size, beginning and end. Of a data set of the Hub, one of its
    name."""
    if isinstance(origin, str):
        return [hashlib.sha256(origin.encode()).hexdigest()]
    files, marks = list(origin), []
    sizes = [file.stat().st_size for file in files]
    pieces = [2 if size > 2 * PIECE_BYTES else 0 for size in sizes]
    for size, digest in zip(sizes, kept_digests(files, cache, pieces), strict=True):
        marks.append(hashlib.sha256(f"{size} {digest}".encode()).hexdigest())
    return marks
