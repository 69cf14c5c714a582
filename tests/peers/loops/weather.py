"""The one tool of these agents: a weather station that keeps what it was asked."""

from __future__ import annotations

QUESTION = "Compare the weather of Paris and Rome. Begin with Paris."


class Station:
    """Knows the weather of every city whose name fits its display."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def read(self, city: str) -> str:
        """Returns the weather of a city; the name must be one that a validated call can have."""
        assert isinstance(city, str)
        assert 0 < len(city) <= 12
        self.asked.append(city)
        return f"{10 + len(self.asked)} degrees and rain in {city}"
