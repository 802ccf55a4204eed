"""Tests of training/runs.py: what is said and checked before a run, and that nothing is lost when it does not begin."""

import contextlib
import io
import tempfile
from pathlib import Path
from unittest import mock

import torture
from absl.testing import absltest, parameterized

import pre_train_t5
from training import runs
from training.checkpoints import checkpoints_of


class BeforeARunTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.workspace = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.argv = torture.changed(torture.material_of(cls.workspace)["pre_train"], "--max_steps", "3")

    def setUp(self):
        super().setUp()
        self.out = Path(self.enter_context(tempfile.TemporaryDirectory())) / "out"
        self.enter_context(mock.patch("signal.signal"))  # the handlers of a run are not those of the tests

    def run_script(self, *flags: str) -> tuple[int, str, str]:
        """(exit code, stdout, stderr)."""
        code = 0
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            try:
                pre_train_t5.main([*self.argv, "--output_dir", str(self.out), *flags])
            except SystemExit as stop:
                code = stop.code
        return code, out.getvalue(), err.getvalue()

    def files(self) -> set[Path]:
        return set(self.out.rglob("*"))

    def test_dry_run_prints_the_plan_and_writes_nothing(self):
        code, out, _ = self.run_script("--dry_run")
        self.assertEqual(code, 0)
        for row in ("model", "text", "tokens", "batch", "optimizer", "memory", "disk"):
            self.assertRegex(out, rf"(?m)^{row} +\S")
        self.assertRegex(out, r"memory +[0-9.]+ .* available")
        self.assertRegex(out, r"disk +[0-9.]+ .* free")
        self.assertIn("--dry_run: nothing was trained or written", out)
        self.assertEmpty(self.files())

    def test_dry_run_keeps_an_earlier_run(self):
        self.assertEqual(self.run_script()[0], 0)
        before = self.files()
        self.assertLen(checkpoints_of(self.out), 2)
        self.assertEqual(self.run_script("--dry_run", "--overwrite_output_dir")[0], 0)
        self.assertEqual(self.files(), before)

    @parameterized.parameters(
        (
            "disk_free",
            r"--output_dir .*out will need [0-9.]+ .* and has .* free: use another disk, a smaller --save_tot",
        ),
        (
            "memory_available",
            r"[0-9.]+ .* are needed for weights, gradients and optimizer alone, and 1000 B are available",
        ),
    )
    def test_too_little_is_refused_before_anything_is_deleted(self, what, message):
        self.assertEqual(self.run_script()[0], 0)
        before = self.files()
        little = mock.patch.object(runs, what, return_value=1000)
        with little, mock.patch.object(runs, "bytes_below", return_value=0):
            code, _, err = self.run_script("--overwrite_output_dir")
        self.assertEqual(code, 2)
        self.assertRegex(err, message)
        self.assertEqual(self.files(), before)

    def test_what_lies_there_is_not_needed_twice(self):
        self.assertEqual(self.run_script()[0], 0)
        with mock.patch.object(runs, "disk_free", return_value=runs.bytes_below(self.out)):
            self.assertEqual(self.run_script("--resume_from_checkpoint")[0], 0)

    def test_disk_of_a_folder_that_is_not_there_yet(self):
        self.assertEqual(runs.disk_free(self.out / "a" / "b"), runs.disk_free(self.out.parent))
        self.assertEqual(runs.bytes_below(self.out), 0)
        self.out.mkdir()
        (self.out / "file").write_bytes(b"12345")
        self.assertEqual(runs.bytes_below(self.out), 5)


if __name__ == "__main__":
    absltest.main()
