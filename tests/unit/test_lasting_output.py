"""A closed or full standard output or error ends no script: the output goes on in a file, and one line says so."""

import os
import subprocess
import sys
from pathlib import Path

import torture
from absl.testing import parameterized
from warm_python import warm_python

import constants

ROOT = Path(constants.__file__).parent
SCRIPT = """
import sys
from foundry.common.machine import run_script
def main():
    print("first ü\\u2028", flush=True)
    sys.stderr.write("told\\n")
    for number in range(9000):
        print("a line of the run", number)
    print("last")
    sys.exit(3)
run_script(main)
"""
SAYS = "stdout cannot be written any further ({}): the output goes on in {}"


class OutputTest(parameterized.TestCase):
    def run_shell(self, command: str, python: str = sys.executable, **more: str) -> tuple[int, str, str]:
        """(exit code of $PYTHON, its stderr, what went on in the files)."""
        environment = (
            os.environ | dict(PYTHON=python, XDG_CACHE_HOME=f"{self.folder}/cache", PYTHONPATH=str(ROOT)) | more
        )
        done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=200)
        texts = [path.read_text() for path in self.folder.glob("cache/t5_foundry/output/*")]
        return done.returncode, done.stderr, "".join(texts)

    @parameterized.parameters(
        ("> /dev/full", "No space left on device"),
        (">&-", "Bad file descriptor"),
        ("| head -n 1; exit ${PIPESTATUS[0]}", "Broken pipe"),
        ("> /dev/full 2> /dev/full", None),
        (">&- 2>&-", None),
        ("2> /dev/full > /dev/null", None),
        ("2>&- > /dev/null", None),
    )
    def test_goes_on_in_a_file(self, how, reason):
        for unbuffered in ("", "1"):
            code, error, kept = self.run_shell(f"$PYTHON -c '{SCRIPT}' {how}", PYTHONUNBUFFERED=unbuffered)
            self.assertEqual(code, 3)
            if reason:
                (place,) = self.folder.glob("cache/t5_foundry/output/*")
                self.assertEqual(error.splitlines().count(SAYS.format(reason, place)), 1)
                self.assertEqual(len(error.splitlines()), 2)
            if "/dev/null" in how:
                self.assertIn("told", kept)
            else:
                self.assertRegex(kept, "a line of the run 8999\nlast\n$")
            for path in self.folder.glob("cache/t5_foundry/output/*"):
                path.unlink()

    def test_without_a_buffer_a_killed_process_leaves_what_it_said(self):
        """PYTHONUNBUFFERED, and -u, into a file; a pipe that does not block gets all of a text larger than itself."""
        script = SCRIPT.replace("sys.exit(3)", "print('half a line', end=''); import os; os.kill(os.getpid(), 9)")
        log, whole = self.folder / "log", "first ü\u2028\n" + "".join(f"a line of the run {n}\n" for n in range(9000))
        for how, more in (("$PYTHON", {"PYTHONUNBUFFERED": "1"}), ("$PYTHON -u", {})):
            self.run_shell(f'{how} -c "$SCRIPT" > {log} 2> {self.folder}/errors', SCRIPT=script, **more)
            self.assertEqual(log.read_text(), f"{whole}last\nhalf a line")
        large = "import os; os.set_blocking(1, False)\n" + SCRIPT.replace('"last"', '"x" * 10**6')
        self.run_shell(f'$PYTHON -u -c "$SCRIPT" 2>/dev/null | cat > {log}', SCRIPT=large)
        self.assertEqual(log.read_text(), f"{whole}{'x' * 10**6}\n")

    def test_goes_nowhere_if_the_cache_cannot_be_written(self):
        (self.folder / "cache").touch()
        code, error, _ = self.run_shell(f"$PYTHON -c '{SCRIPT}' > /dev/full")
        self.assertEqual(code, 3)
        self.assertIn(SAYS.format("No space left on device", "/dev/null"), error)

    @parameterized.parameters(
        ("pre_train", "> /dev/full", 0),
        ("fine_tune", "| head -n 5 > /dev/null; exit ${PIPESTATUS[0]}", 0),
        ("pre_train", "> /dev/full 2> /dev/full", 2),
    )
    def test_a_training_saves_as_ever(self, script, how, code):
        flags = torture.small(self.folder, script, 2)
        flags += ["--output_dir", str(self.folder / "out"), *(["--seed", "none"] if code else [])]
        command = f"$PYTHON {ROOT}/{script}_t5.py {' '.join(flags)} {how}"
        ended, error, kept = self.run_shell(command, warm_python())
        self.assertEqual(ended, code, error[-2000:])
        self.assertRegex(kept, "argument --seed: invalid" if code else f"written to +{self.folder}/out: the model")
        self.assertEqual((self.folder / "out" / "model.safetensors").is_file(), not code)
