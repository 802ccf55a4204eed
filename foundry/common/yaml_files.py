"""YAML files, read as YAML 1.2: the recipes of all scripts."""

import re
from pathlib import Path
from typing import Any

import yaml

from foundry.common.errors import UserError
from foundry.common.reports import record_bytes

# As in YAML 1.2 and JSON. PyYAML follows YAML 1.1: 1e-5 is a text there, 010 is eight, 1:30 is ninety, and no is false.
_VALUES = {
    "tag:yaml.org,2002:bool": r"(true|false)$",
    "tag:yaml.org,2002:int": r"[-+]?[0-9][0-9_]*$",
    "tag:yaml.org,2002:float": r"([-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan)$",
}
MOST_YAML = 2**20  # PyYAML reads about a hundred characters in a millisecond


class _Loader(yaml.SafeLoader):
    """Reads values as YAML 1.2 does, where a date is a text. Refuses a key that is set twice, of which PyYAML silently
    keeps the last, and aliases, by which a few hundred bytes stand for gigabytes."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in kinds if tag == "tag:yaml.org,2002:null"]
        for first, kinds in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"the alias *{self.peek_event().anchor}: write out what it stands for")
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        keys = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in keys:
                    raise yaml.YAMLError(f"key {key.value} is set twice")
                keys.add(key.value)
        return super().construct_mapping(node, deep=deep)


for _tag, _pattern in _VALUES.items():
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern, re.IGNORECASE), list("-+.0123456789tTfF"))
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))


def read_yaml(path: str) -> Any:
    """The content of a YAML file. OSError if it cannot be read, UserError as from parse_yaml and record_bytes."""
    return parse_yaml(record_bytes(Path(path)))


def parse_yaml(text: str | bytes) -> Any:
    """The content of a YAML text. UserError, in one line, if it is broken, nested too deeply, sets a key twice, has an
    alias or is longer than MOST_YAML."""
    if len(text) > MOST_YAML:
        raise UserError(f"not read as YAML: it is longer than {MOST_YAML:,} characters")
    try:
        return yaml.load(text if isinstance(text, str) else text.decode(), Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, a number of thousands of digits
        raise UserError(f"not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise UserError("not valid YAML: its brackets or lists are nested too deeply") from None
