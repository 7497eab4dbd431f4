"""Reading the fields of a config.json while collecting everything that is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from meshwright.base.errors import Problem, problem, refuse

MOST_HIDDEN: Final = 2**20
MOST_LAYERS: Final = 10_000
MOST_VOCABULARY: Final = 2**24
MOST_HEADS: Final = 2**16
MOST_POSITIONS: Final = 2**31

_ABSENT: Final = object()


class Fields:
    """A view of one config that returns checked values and keeps a list of what is wrong.

    A getter that fails notes a Problem and returns a harmless value, so that one pass finds everything;
    ``refuse`` then raises all of it. ``good`` says whether fields can be compared with each other.
    """

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config = config
        self.name = name
        self.problems: list[Problem] = []
        self._missing: list[str] = []
        self._bad: set[str] = set()

    def _find(self, keys: Sequence[str]) -> tuple[str, Any]:
        for key in keys:
            if key in self.config:
                return key, self.config[key]
        return keys[0], _ABSENT

    def wrong(self, key: str, found: str, needs: str, do: str = "") -> None:
        """Note that the value of ``key`` cannot be (E123)."""
        self._bad.add(key)
        self.problems.append(problem("E123", where=f"{self.name}: {key}", found=found, needs=needs, do=do))

    def not_built(self, key: str, found: str, needs: str) -> None:
        """Note that ``key`` asks for a variant that is not built (E125)."""
        self.problems.append(problem("E125", where=f"{self.name}: {key}", found=found, needs=needs))

    def size(
        self,
        *keys: str,
        default: int | None = None,
        null: int | None = None,
        least: int = 1,
        most: int = MOST_HIDDEN,
    ) -> int:
        """Return a whole number in [least, most] from the first of ``keys`` that is present.

        Without a ``default`` a missing field is noted as such (E122). ``null`` is what an explicit null
        stands for; without it null is read like a missing field.
        """
        key, value = self._find(keys)
        if value is None and null is not None:
            return null
        if value is _ABSENT or value is None:
            if default is not None:
                return default
            self._missing.append(key)
            self._bad.update(keys)
            return max(least, 1)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            self._bad.update(keys)
            self.wrong(key, f"{value!r} ({type(value).__name__})", "a whole number")
            return max(least, 1)
        if not least <= value <= most:
            self._bad.update(keys)
            self.wrong(key, f"{value}", f"a whole number from {least} to {most}")
            return max(least, 1)
        return value

    def optional_size(
        self, *keys: str, default: int | None = None, least: int = 1, most: int = MOST_POSITIONS
    ) -> int | None:
        """Return a size, or None where the field is null; ``default`` where it is absent."""
        _, value = self._find(keys)
        if value is _ABSENT:
            return default
        if value is None:
            return None
        return self.size(*keys, least=least, most=most)

    def flag(self, *keys: str, default: bool) -> bool:
        """Return true or false."""
        key, value = self._find(keys)
        if value is _ABSENT or value is None:
            return default
        if not isinstance(value, bool):
            self.wrong(key, f"{value!r} ({type(value).__name__})", "true or false")
            return default
        return value

    def text(self, *keys: str, default: str) -> str:
        """Return a string."""
        key, value = self._find(keys)
        if value is _ABSENT or value is None:
            return default
        if not isinstance(value, str):
            self.wrong(key, f"{value!r} ({type(value).__name__})", "a string")
            return default
        return value

    def probability(self, *keys: str, default: float) -> float:
        """Return a number in [0, 1)."""
        key, value = self._find(keys)
        if value is _ABSENT or value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            self.wrong(key, f"{value!r}", "a number from 0 up to but not including 1")
            return default
        return float(value)

    def items(self, key: str, kind: type, length: int | None = None) -> tuple[Any, ...] | None:
        """Return a list's items, all of ``kind``, or None where it is absent or null."""
        _, value = self._find((key,))
        if value is _ABSENT or value is None:
            return None
        listed = tuple(cast("list[Any]", value)) if isinstance(value, list | tuple) else None
        if listed is None or not all(isinstance(v, kind) and not isinstance(v, bool) for v in listed):
            self.wrong(key, f"{value!r}"[:80], f"a list of {kind.__name__}")
            return None
        if length is not None and len(listed) != length:
            self.wrong(key, f"{len(listed)} entries", f"{length} entries, one per layer")
            return None
        return listed

    def good(self, *keys: str) -> bool:
        """Return whether none of ``keys`` was missing or wrong."""
        return not self._bad.intersection(keys)

    def refuse(self) -> None:
        """Raise everything noted so far (E122, E123, E125), or return."""
        found = list(self.problems)
        if self._missing:
            names = ", ".join(dict.fromkeys(self._missing))
            found.insert(0, problem("E122", where=self.name, found=f"config.json lacks {names}"))
        refuse(found)
