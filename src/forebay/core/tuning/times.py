"""Response times, counted in classes whose width is a sixteenth of what they hold or less: constant time and room."""

from __future__ import annotations

from forebay.core.instant import Instant

_UNIT_BITS = 16  # 2^16 ns, a fifteenth of a millisecond, is the finest
_CLASSES = 640  # the last begins beyond any request


class Times:
    """A histogram that is emptied by reading it."""

    __slots__ = ("_counts", "count")

    def __init__(self) -> None:
        self.count = 0
        self._counts = [0] * _CLASSES

    def add(self, took_ns: Instant) -> None:
        """One more."""
        units = took_ns >> _UNIT_BITS
        shift = units.bit_length() - 5
        self._counts[units if shift <= 0 else (shift << 4) + (units >> shift)] += 1
        self.count += 1

    def percentile_ns(self, share: float) -> int:
        """The upper edge of the class that holds this percentile; 0 when there are none."""
        left = self.count * share
        if not self.count:
            return 0
        for number, count in enumerate(self._counts):
            left -= count
            if left <= 0 and count:
                return _upper_ns(number)
        return _upper_ns(_CLASSES - 1)

    def clear(self) -> None:
        """Begin anew."""
        self.count = 0
        self._counts = [0] * _CLASSES


def _upper_ns(number: int) -> int:
    shift = max(0, (number >> 4) - 1)
    return ((number - (shift << 4)) + 1 << shift) << _UNIT_BITS
