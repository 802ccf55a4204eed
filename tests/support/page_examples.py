"""The modules that CONTRIBUTING.md shows, as if they stood in their files."""

import re
import sys
from pathlib import Path
from types import ModuleType

import constants

PAGE = (Path(constants.__file__).parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
_BLOCK = r"`(features/[\w/]+\.py)`:\n\n```python\n(.*?)```"


def page_modules() -> dict[str, ModuleType]:
    """{"features.last.last_tokens": the module, ...}, each importable by that name in this process."""
    modules = {}
    for path, code in re.findall(_BLOCK, PAGE, flags=re.DOTALL):
        name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        module = modules[name] = sys.modules[name] = ModuleType(name)
        exec(compile(code, f"CONTRIBUTING.md, {path}", "exec"), module.__dict__)
    return modules
