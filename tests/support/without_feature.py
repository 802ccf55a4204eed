"""What must work in a copy of the tree that lacks a feature's folder:
`python without_feature.py TREE CACHE FLAG ... -- "--flag value" ...`.

In this one process, with nothing of our modules loaded before: every module is imported, --help of every script works,
the flags of the feature are unknown, the values that it gave to flags of the core are refused and, unless CACHE is
empty, a pre-training of four steps and a fine-tuning of two run. Prints a line for each. CACHE: keeps the tokens for
the next tree.
"""

import ast
import contextlib
import importlib
import io
import os
import sys
import tempfile
from pathlib import Path

from warm_python import quick_runs

OWN = {("export_checkpoint", "dtype")}  # (script, flag of its own that a feature has for other scripts)
TINY = "--config_overrides d_model=32,d_kv=8,d_ff=48,num_heads=4,num_layers=1,num_decoder_layers=1 --report_to none"
TINY += " --disable_tqdm true --eval_strategy no --save_strategy no --warmup_steps 0 --per_device_train_batch_size 4"
TINY += " --gradient_accumulation_steps 1 --config_name tiny"


def is_script(path: Path) -> bool:
    tests = (node.test for node in ast.parse(path.read_text()).body if isinstance(node, ast.If))
    return any("__main__" in ast.unparse(test) for test in tests)


def ended(main, words: list[str]) -> tuple[object, str]:
    """(exit code of main(words), None if it returned; what it printed)."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            main(words)
        except SystemExit as stop:
            return stop.code, printed.getvalue()
    return None, printed.getvalue()


def main(tree: str, cache: str, *words: str) -> None:
    flags, values = words[: words.index("--")], words[words.index("--") + 1 :]
    os.chdir(tree)
    sys.path[:] = [tree, *(path for path in sys.path if not (Path(path or ".") / "constants.py").is_file())]
    modules = [path for path in sorted(Path().glob("**/*.py")) if path.parts[0] != "tests" and path.stem != "__init__"]
    scripts = {path.stem: path for path in modules if len(path.parts) == 1 and is_script(path)}
    for path in modules:
        module = importlib.import_module(".".join(path.with_suffix("").parts))
        assert Path(module.__file__).is_relative_to(tree), module.__file__
    print(f"imported {len(modules)} modules")
    for name in scripts:
        words = ["--help_all"] if hasattr(importlib.import_module(name), "parse_arguments") else ["--help"]
        code, printed = ended(importlib.import_module(name).main, words)
        assert code == 0 and "usage" in printed, (name, code, printed[-500:])
        for flag in flags:
            assert f"--{flag} " not in printed or (name, flag) in OWN, (name, flag)
    print(f"--help of {len(scripts)} scripts, without {' '.join(flags) or 'any flag'}")
    pre_train, fine_tune = (importlib.import_module(name).main for name in ("pre_train_t5", "fine_tune_t5"))
    for flag in flags:
        code, printed = ended(pre_train, [f"--{flag}", "1"])
        assert code == 2 and f"--{flag}: no such flag" in printed, (code, printed)
    for value in values:
        code, printed = ended(pre_train, value.split())
        assert code == 2 and f"{value}: " in printed, (value, code, printed)
    if cache:
        train(pre_train, fine_tune, cache)


def train(pre_train, fine_tune, cache: str) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for patch in quick_runs():
            stack.enter_context(patch)
        lines = [f"The word {n} has {n * n} as its square, and {n % 7} is what is left of it." for n in range(400)]
        Path(folder, "text.txt").write_text("\n".join(lines))
        Path(folder, "pairs.tsv").write_text("a\tb\n" + "".join(f"{line}\t{n % 3}\n" for n, line in enumerate(lines)))
        shared = f"{TINY} --data_cache_dir {cache} --output_dir {folder}"
        words = f"{shared}/text --train_file {folder}/text.txt --vocab_size 300 --input_seq_length 32 --max_steps 4"
        code, printed = ended(pre_train, words.split())
        assert code is None and Path(folder, "text", "model.safetensors").is_file(), (code, printed[-2000:])
        print("pre-trained four steps")
        words = f"{shared}/pairs --train_file {folder}/pairs.tsv --source_column a --target_column b --vocab_size 300"
        words += " --max_source_length 32 --max_target_length 4 --max_steps 2 --load_best_model_at_end false"
        code, printed = ended(fine_tune, words.split())
        assert code is None and Path(folder, "pairs", "model.safetensors").is_file(), (code, printed[-2000:])
        print("fine-tuned two steps")


if __name__ == "__main__":
    main(*sys.argv[1:])
