"""Objects that a table names as "module:name" (features/__init__.py): whoever needs one imports it then."""

import pkgutil
from collections.abc import Iterable
from typing import Any


def resolve(place: str) -> Any:
    """The object: "features.lora:LowRank" -> the class `LowRank` of features/lora/__init__.py."""
    return pkgutil.resolve_name(place)


def resolve_all(places: Iterable[str]) -> list[Any]:
    """The objects, in the order of their table."""
    return [resolve(place) for place in places]
