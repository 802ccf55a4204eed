"""What every test has: a folder of its own, and one for all of them that goes when they are over."""

import getpass
import os
import shutil
import tempfile
from pathlib import Path

import pytest


def pytest_configure(config):
    """All temporary files, of the tests and of what they start, lie in one folder; compiled kernels are kept."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="t5_tests_")
    config.add_cleanup(lambda: shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True))


@pytest.fixture(autouse=True)
def folder(request):
    """`self.folder`, an empty folder for each test of a class; a class that made one for all its tests keeps it."""
    if request.instance is None or hasattr(request.instance, "folder"):
        yield
        return
    with tempfile.TemporaryDirectory() as name:
        request.instance.folder = Path(name)
        yield
