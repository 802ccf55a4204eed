"""What is measured by running a script as a user would: the check of the attention kernels, and pre-training."""

import shlex
import tempfile
from argparse import Namespace
from pathlib import Path
from statistics import median

from benchmarks.material import setting_of
from benchmarks.measure import recording
from benchmarks.settings import read, run_script
from common.reports import read_metrics

PARITY_COLUMNS = {"name": "", "checked": "{:d}", "wrong": "{:d}"}
PRE_TRAIN_COLUMNS = {"name": "", "what": "", "sequences_per_second": "{:,.1f}", "mfu": "{:.1%}"}
PRE_TRAIN_COLUMNS |= {"peak_memory_gib": "{:.2f}", "eval_loss": "{:.3f}", "seconds": "{:,.0f}"}
PRE_TRAININGS = {
    "default": "--attn_implementation sdpa",
    "fast": "--attn_implementation t5_fused --fused_projections --fused_cross_projections",
}


def measure_parity(args: Namespace) -> dict:
    """The report of tests/support/check_attention.py: every attention kernel of this machine against float64."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--device", args.device.type, "--output", f"{folder}/parity.json"]
        code = run_script("tests/support/check_attention.py", words, Path(folder, "log"), wrong=1)
        report = read(Path(folder), "parity.json")
    found = {"error": f"{report['wrong']} of {report['checked']} are wrong"} if code else {}
    row = {"name": "attention kernels", "checked": report["checked"], "wrong": report["wrong"]}
    return report | {"rows": [row | found]} | found


def measure_pre_train(args: Namespace) -> dict:
    """A row for each of PRE_TRAININGS through pre_train_t5.py: its speed as logged, held-out loss and curve.

    "fast" is compiled where args.compile says so, and has a bf16 residual stream where args.bf16 does. Runs lie beside
    --output, in a folder of its name, or are deleted without one.
    """
    common = f"{args.pre_train_args} --config_name {args.model} --per_device_train_batch_size {args.batch} "
    common += f"--input_seq_length {args.source_length} --dropout_rate 0 --bf16 {str(args.bf16).lower()} "
    common += "--overwrite_output_dir --report_to none --disable_tqdm" + " --use_cpu" * (args.device.type == "cpu")
    rows = {name: {"name": name} for name in PRE_TRAININGS}
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(args.output).with_suffix("") if args.output else Path(temporary)
        for name, row in rows.items():
            row["what"], folder = PRE_TRAININGS[name], place / name
            if name == "fast":
                row["what"] += " --torch_compile" * args.compile + " --bf16_residual" * args.bf16
            words = [*shlex.split(f"{common} {row['what']}"), "--output_dir", str(folder)]
            with recording(row):
                folder.mkdir(parents=True, exist_ok=True)
                run_script("pre_train_t5.py", words, folder.with_name(f"{name}.log"))
                lines, results = read_metrics(folder / "metrics.jsonl"), read(folder, "all_results.json")
                for key in ("sequences_per_second", "mfu", "peak_memory_gib"):
                    values = [line[key] for line in lines if key in line]
                    row |= {key: median(values)} if values else {}
                row |= dict(eval_loss=results.get("eval_loss"), seconds=results["train_runtime"], curve=lines)
                row["settings"] = {"ours": True}
    return setting_of(args) | {"rows": list(rows.values())}
