"""How far the clock of another host is ahead of ours, found by round trips."""

from __future__ import annotations

from collections import deque

__all__ = ["Skew"]

TRIPS = 8  # so many of the last ones count: a clock that is put right is followed


class Skew:
    """The other clock was read somewhere in a round trip: the shortest one leaves least open.

    Examples
    --------
    >>> skew = Skew()
    >>> skew.add(sent=100.0, there=105.2, received=100.4)
    >>> skew.seconds
    5.0
    """

    def __init__(self) -> None:
        self._trips: deque[tuple[float, float]] = deque(maxlen=TRIPS)  # how long it took, how far the other was ahead

    def add(self, sent: float, there: float, received: float) -> None:
        """Take one round trip: when it began and ended by our clock, and what the other clock said in between."""
        if received >= sent:  # else our own clock was set meanwhile
            self._trips.append((received - sent, there - (sent + received) / 2))

    @property
    def seconds(self) -> float:
        """How far the other clock is ahead; 0 where that is no more than the trips leave open."""
        took, ahead = min(self._trips, default=(0.0, 0.0))
        return ahead if abs(ahead) > took / 2 else 0.0
