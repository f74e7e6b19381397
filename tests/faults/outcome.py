"""What became of a group of cases."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Outcome:
    """The cases of one group: how many were tried, and what was lost in which."""

    name: str
    tried: int = 0
    lost: list[str] = field(default_factory=list)

    def count(self, case: str, problem: str | None) -> None:
        self.tried += 1
        if problem is not None:
            self.lost.append(f"{case}: {problem}")
