"""Whether a run that has died is started again. Pure.

Two limits end a crash loop: at most `per_hour` restarts in any 3600 s, and none when the same cause comes
back without progress, because a third try would end like the second.
"""

import re
from dataclasses import dataclass, field

HOUR_SECONDS = 3600.0


@dataclass
class Restarts:
    """`per_hour` = 0: never."""

    per_hour: int
    times: list[float] = field(default_factory=list)  # of the restarts in the last hour, in seconds
    last: tuple[str, int] | None = None  # cause and step of the newest death

    def refusal(self, cause: str, step: int, now: float, gone: bool = False) -> str:
        """Counts a death after trainer step `step` at time `now` (seconds); `gone`: its cause is there no
        more. Returns why the run is not started again, or "" if it is."""
        self.times = [time for time in self.times if now - time < HOUR_SECONDS]
        death = (re.sub(r"\d+", "#", cause), step)  # process ids and times differ between two equal deaths
        repeated = death == self.last and not gone
        self.last = death
        if self.per_hour == 0:
            return "restarts=0"
        if repeated:
            return f"the same happened before, also after step {step}, so another restart would not help"
        if len(self.times) >= self.per_hour:
            return f"restarts={self.per_hour}: so many restarts were made within the last hour"
        self.times.append(now)
        return ""
