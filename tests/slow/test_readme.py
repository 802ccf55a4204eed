"""Every command of the README and of docs/ is understood by the real parsers, and every file named there exists."""

import ast
import contextlib
import importlib
import re
import shlex
from pathlib import Path
from unittest import mock

from absl.testing import parameterized
from helpers import run_main, write_tiny_model

import create_tokenizer
import evaluate_t5
import export_checkpoint
import fine_tune_t5
import pre_train_t5
import predict_t5
from benchmarks import __main__ as benchmark_t5
from constants import DATASET_VALS
from features.back_translation import back_translate
from features.gemma import adapt_decoder
from features.recombination import recombine_pairs
from features.rerank import rerank_answers
from foundry.common.command_line import parse_arguments
from tasks.entry import TaskEntry
from tools import plot_runs, report_glue, sweep_file, sweep_t5

ROOT = Path(__file__).parents[2]
PATHS = {str(path.relative_to(ROOT)): path for place in ("", "docs/", "results/") for path in ROOT.glob(f"{place}*.md")}
del PATHS["CHANGELOG.md"]  # it names what earlier versions had
PAGES = {name: path.read_text(encoding="utf-8") for name, path in PATHS.items()}
README = PAGES["README.md"]
DATACLASSES = {
    "pre_train_t5.py": pre_train_t5.FLAGS,
    "fine_tune_t5.py": fine_tune_t5.FLAGS,
    "predict_t5.py": predict_t5.DATACLASSES,
    "evaluate_t5.py": evaluate_t5.DATACLASSES,
    "export_checkpoint.py": export_checkpoint.DATACLASSES,
    "features/back_translation/back_translate.py": [back_translate.PairArguments],
    "features/gemma/adapt_decoder.py": adapt_decoder.FLAGS,
    "features/recombination/recombine_pairs.py": [recombine_pairs.RecombinationArguments],
    "features/rerank/rerank_answers.py": rerank_answers.FLAGS,
}


def commands() -> list[str]:
    """The lines of all bash blocks, and the commands in tables; a command that several pages show once."""
    text = "\n".join(PAGES.values())
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    lines = [line.split("  #")[0] for block in blocks for line in block.splitlines()]
    lines = [part.strip() for line in lines for part in line.split(" && ")]
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines += re.findall(r"\| `((?:accelerate|python) [^`]*)` \|", prose)
    lines += [" ".join(code.split()) for code in re.findall(r"`((?:python|torchrun) [^`]*\.py\s[^`]*)`", prose)]
    return list(dict.fromkeys(line for line in lines if line and not line.endswith("...")))


def sections(page: str) -> list[str]:
    """The anchors that GitHub makes of a page's headings: "## Which one?" -> "which-one"."""
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"(?m)^#+ (.*)", prose)]


class ReadmeTest(parameterized.TestCase):
    @parameterized.parameters(*[(command,) for command in commands()])
    @mock.patch.dict(DATASET_VALS, mine={"tickets": {}})  # the entry that docs/experiments.md adds
    def test_command_is_understood(self, command):
        command = re.sub(r"^for .*; do (.*); done$", r"\1", command)
        words = shlex.split(command)
        if words[0] == "source":
            return
        if words[0] == "curl":  # to a server that an earlier command has started
            self.assertRegex(command, r"http://127\.0\.0\.1:8000/v1/")
            return
        if words[0] == "make":
            self.assertRegex((ROOT / "Makefile").read_text(), rf"(?m)^{words[1]}:")
            return
        if words[0] == "sacremoses":  # another's tokens, for one published figure: the page has the reader install it
            self.assertIn("pip install sacremoses", PAGES["results/translation_multi30k.md"])
            return
        if words[0] in ("trackio", "tensorboard", "sacrebleu") or words[:2] == ["wandb", "sync"]:
            self.assertRegex(
                (ROOT / "requirements" / "trackers.txt").read_text() + (ROOT / "requirements.txt").read_text(),
                rf"(?m)^{words[0]}==",
            )
            return
        if words[0] in ("conda", "wandb", "pip"):
            self.assertTrue((ROOT / words[-1]).is_file(), words[-1])
            return
        if words[:2] == ["python", "-c"]:
            compile(words[2], command, "exec")
            return
        if words[1] == "-m":  # a module of ours, or of Python or pytest
            if words[2] in ("venv", "pytest"):
                return
            place = ROOT / words[2].replace(".", "/")
            module = place / "__main__.py" if place.is_dir() else place.with_suffix(".py")
            words[1:3] = [str(module.relative_to(ROOT))]
        if "sbatch" in words:
            job = next(word for word in words if word.endswith(".slurm"))
            self.assertTrue((ROOT / job).is_file(), job)
            words = words[words.index(job) + 1 :]
            if job.endswith("sweep.slurm"):
                words.insert(0, "tools/sweep_t5.py")
        script = next(word for word in words if word.endswith(".py"))
        self.assertTrue((ROOT / script).is_file(), script)
        argv = words[words.index(script) + 1 :]
        if "--" in argv:  # what stands behind it is another script's
            argv = argv[: argv.index("--")]
        if argv == ["--help"]:
            return  # test_first_contact.py
        if script in DATACLASSES:
            self.assertLen(parse_arguments(DATACLASSES[script], argv), len(DATACLASSES[script]))
        elif script == "benchmarks/__main__.py":
            with mock.patch.object(benchmark_t5, "CHECKOUTS", {}):  # the reader's own
                self.assertNotEmpty(vars(benchmark_t5.resolved_part(benchmark_t5.parse_command(argv))))
        elif script == "tools/sweep_t5.py":
            sweep = sweep_file.read_sweep(str(ROOT / argv[0]))
            self.assertTrue(sweep.parameters)
            self.assertLen(parse_arguments([sweep_t5.SweepArguments], argv[1:]), 1)
        elif script == "tools/report_glue.py":
            self.assertNotEmpty(vars(report_glue.parse(argv)))
        elif script == "tools/plot_runs.py":
            self.assertTrue(plot_runs.parse(argv).runs)
        elif script == "create_tokenizer.py":
            flags, *_ = parse_arguments(create_tokenizer.FLAGS, argv)
            found = mock.patch.object(create_tokenizer, "check_pre_training_data")  # looks for the reader's text
            with mock.patch.object(create_tokenizer, "check_folder"), found:
                create_tokenizer.check_tokenizer(flags)
        else:  # a test, or a script of this repository
            self.assertRegex(script, r"^(features|tests|tools)/")
            module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
            if hasattr(module, "FLAGS"):
                self.assertNotEmpty(parse_arguments(module.FLAGS, argv))

    def test_its_plan_is_the_one_that_is_printed(self):
        """Of a tiny model with a tokenizer of the same messages."""
        messages = (ROOT / "examples" / "messages.csv").read_text().splitlines()
        write_tiny_model(self.folder / "model", messages, 900)
        (command,) = [line for line in commands() if "examples/messages.csv" in line and "--target_type class" in line]
        command = command.replace("examples/", f"{ROOT}/examples/").replace("out/demo/pre_train", "model")
        with contextlib.chdir(self.folder):
            _, printed, _ = run_main(fine_tune_t5.main, *shlex.split(command)[2:], "--dry_run", "--use_cpu", code=0)
        (shown,) = re.findall(r"```\n(rows .*?)\n```", README, re.DOTALL)
        for line in shown.splitlines():
            self.assertIn(line, printed.splitlines())

    def test_there_are_commands(self):
        self.assertGreater(len(commands()), 15)

    def test_entries_of_new_tasks_are_whole(self):
        page = "docs/experiments.md"
        registry: dict = {"mine": {}}
        for code in re.findall(r"```python\n(DATASET_VALS.*?)```", PAGES[page], flags=re.DOTALL):
            exec(compile(ast.parse(code), page, "exec"), {"DATASET_VALS": registry, "SMALLER_IS_BETTER": set()})
        self.assertNotEmpty(registry["mine"])
        for name, entry in registry["mine"].items():
            TaskEntry.of(name, entry)

    @parameterized.parameters(*PAGES)
    def test_linked_files_and_sections_are_there(self, page):
        path = PATHS[page]
        links = [link for link in re.findall(r"\]\(([^)]+)\)", PAGES[page]) if "://" not in link]
        self.assertTrue(links or page != "README.md")
        for link in links:
            name, _, section = link.partition("#")
            file = path.parent / name if name else path
            self.assertTrue(file.exists(), link)
            if section:
                self.assertIn(section, sections(file.read_text(encoding="utf-8")), link)

    @parameterized.parameters(*PAGES)
    def test_files_named_are_there(self, page):
        named = re.findall(r"`((?:recipes|sweeps|slurm|launch|results|docs|tests)/[\w./-]+)`", PAGES[page])
        for name in named:
            self.assertTrue((ROOT / name).exists(), name)

    @parameterized.parameters(*PAGES)
    def test_no_placeholder_is_left(self, page):
        self.assertNotRegex(PAGES[page], r"@[A-Z_]+@|TODO")
