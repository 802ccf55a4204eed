"""Every planted fault of tests/support/planted_faults.py applies to the code as it is, and its tests are there."""

import ast
from pathlib import Path

from absl.testing import absltest
from planted_faults import FAULTS, ROOT


class PlantedFaultsTest(absltest.TestCase):
    def test_every_fault_applies_and_has_its_tests(self):
        for fault in FAULTS:
            with self.subTest(fault.name):
                self.assertEqual(fault.places(ROOT), 1, f"{fault.file}: has the old text of the fault not once")
                text = (ROOT / fault.file).read_text(encoding="utf-8")
                ast.parse(text.replace(fault.old, fault.new))
                self.assertNotEqual(fault.old, fault.new)
                self.assertEqual([], [name for name in fault.tests if not Path(ROOT, "tests", name).is_file()])

    def test_names_are_given_once(self):
        names = [fault.name for fault in FAULTS]
        self.assertCountEqual(names, set(names))
        self.assertGreaterEqual(len(names), 42)
