"""Puts what runs left behind into one file of results/: flags, versions, commit, hardware, and the numbers.

    python results/record.py results/2026-11-21_romanian_diacritics_cpu.json training=out/ro test=out/ro_test \\
        --note "other work on the machine meanwhile"

A run is label=folder: the --output_dir of a training script, or of evaluate_t5.py, whose folder has no run.json. Only
what those scripts wrote is copied, nothing is typed in. Seconds.
"""

import argparse
import json
import platform
import re
from pathlib import Path


def processor() -> str:
    """The processor's name as the system gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.is_file() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def main(argv: list[str] | None = None) -> dict:
    """Writes the file; returns its content. Exits with a message where a folder holds no results."""
    parser = argparse.ArgumentParser(prog="record.py", description=__doc__.split("\n", 1)[0])
    parser.add_argument("output", type=Path, help="the JSON file to write")
    parser.add_argument("runs", nargs="+", metavar="LABEL=FOLDER", help="runs and evaluations")
    parser.add_argument("--note", help="what else to know about the circumstances")
    options = parser.parse_args(argv)
    record = {"processor": processor(), "note": options.note, "runs": {}}
    for run in options.runs:
        label, _, folder = run.partition("=")
        found = {}
        for name in ("run.json", "all_results.json"):
            path = Path(folder) / name
            if path.is_file():
                found |= {name.removesuffix(".json"): json.loads(path.read_text(encoding="utf-8"))}
        if "all_results" not in found:
            parser.error(f"{run}: write label=folder, with a folder that holds an all_results.json")
        record["runs"][label] = found
    options.output.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return record


if __name__ == "__main__":
    main()
