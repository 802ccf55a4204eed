"""What is measured by running a script as a user would: the check of the attention kernels, and pre-training."""

import shlex
import tempfile
from argparse import Namespace
from pathlib import Path

from benchmarks.material import setting_of
from benchmarks.measure import median, recording
from benchmarks.settings import read, run_script
from common.reports import read_metrics

PARITY_COLUMNS = {"name": "", "checked": "{:d}", "wrong": "{:d}"}
PRE_TRAIN_COLUMNS = {"name": "", "what": "", "sequences_per_second": "{:,.1f}", "mfu": "{:.1%}"}
PRE_TRAIN_COLUMNS |= {"peak_memory_gib": "{:.2f}", "eval_loss": "{:.3f}", "seconds": "{:,.0f}"}
FAST = "--attn_implementation t5_fused --fused_projections --fused_cross_projections"
PRE_TRAININGS = {  # flags beside --pre_train_args: of every run, and of a GPU alone
    "default": ("--attn_implementation sdpa", ""),
    "fast": (FAST, "--torch_compile --bf16_residual"),
}


def measure_parity(args: Namespace) -> dict:
    """The report of tests/support/check_attention.py: every attention kernel of this machine against float64."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--device", args.device.type, "--output", f"{folder}/parity.json"]
        code = run_script("tests/support/check_attention.py", words, Path(folder, "log"), wrong=1)
        report = read(Path(folder), "parity.json")
    row = {"name": "attention kernels", "checked": report["checked"], "wrong": report["wrong"]}
    return report | {"rows": [row]} | ({"error": f"{report['wrong']} are wrong"} if code else {})


def measure_pre_train(args: Namespace) -> dict:
    """A row for each of PRE_TRAININGS through pre_train_t5.py: its speed as logged, held-out loss and curve.

    Runs lie beside --output, in a folder of its name, or are deleted without one.
    """
    rows = {name: {"name": name} for name in PRE_TRAININGS}
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(args.output).with_suffix("") if args.output else Path(temporary)
        for name, row in rows.items():
            common, gpu = PRE_TRAININGS[name]
            device = f"{gpu} --bf16" if args.device.type == "cuda" else "--use_cpu"
            folder = place / name
            flags = f"{common} {device} --dropout_rate 0 --config_name {args.model} --report_to none --disable_tqdm"
            row["what"] = f"{common} {gpu}".strip()
            words = shlex.split(f"{args.pre_train_args} {flags}")
            with recording(row):
                folder.mkdir(parents=True, exist_ok=True)
                words += ["--output_dir", str(folder), "--overwrite_output_dir"]
                run_script("pre_train_t5.py", words, folder.with_name(f"{name}.log"))
                lines, results = read_metrics(folder / "metrics.jsonl"), read(folder, "all_results.json")
                for key in ("sequences_per_second", "mfu", "peak_memory_gib"):
                    values = [line[key] for line in lines if key in line]
                    row |= {key: median(values)} if values else {}
                row |= dict(eval_loss=results.get("eval_loss"), seconds=results["train_runtime"], curve=lines)
                row["settings"] = {"ours": name == "fast"}
    return setting_of(args) | {"rows": list(rows.values())}
