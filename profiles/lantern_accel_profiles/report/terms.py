"""What a buyer asks for: quality, latency, and what a device and its power cost."""

from __future__ import annotations

from pydantic import Field

from lantern_accel.records import Record
from lantern_accel_profiles.measure.record import Interval, Reading, is_measured

HOURS_PER_YEAR = 8760
JOULES_PER_KWH = 3.6e6


class Cost(Record):
    """What 1,000 images cost on a device, in the currency of the terms."""

    of_1000: Interval
    covers: str = Field(description="what is in it: rent, purchase, power")
    without: str = Field("", description="what is not, and why; empty: nothing is missing")


class Terms(Record):
    """What a buyer asks for; amounts are by the name of a run."""

    tv_budget: float = Field(
        0.0, ge=0, le=1, description="largest total variation per token; 0: exact"
    )
    latency_s: float | None = Field(
        None, gt=0, description="seconds that 95 of 100 requests may take at most"
    )
    rent: dict[str, float] = Field(default_factory=dict, description="of a device for an hour")
    buy: dict[str, float] = Field(default_factory=dict, description="purchase of a device")
    years: float = Field(3.0, gt=0, description="that a bought device runs without pause")
    power: float | None = Field(None, ge=0, description="of a kilowatt-hour")
    overhead: float = Field(
        1.0, ge=1, description="the site's power over the device's (PUE); multiplies joules"
    )
    currency: str = Field("", description="of all amounts; empty: nobody named it")

    def hourly(self, run: str) -> float | None:
        """Return what a run's device costs per hour, its power left out where it was bought."""
        if run in self.buy:
            return self.buy[run] / (self.years * HOURS_PER_YEAR)
        return self.rent.get(run)

    def cost(self, run: str, seconds: Interval, joules: Reading) -> Cost | None:
        """Return what 1,000 images cost that take ``seconds`` and ``joules`` each; None: no amount.

        Power is in a rent. Without a meter it is left out by name, never counted as 0.
        """
        hourly, covers, without, fixed = self.hourly(run), [], "", 0.0
        if hourly is not None:
            covers.append("purchase" if run in self.buy else "rent")
        else:
            without = "the device: no --rent or --buy was given for it"
        if run not in self.rent:
            if self.power is None:
                without = "power: no --power was given"
            elif is_measured(joules):
                covers.append("power")
                fixed = 1e3 * joules * self.overhead / JOULES_PER_KWH * self.power
            else:
                without = "power: no meter was read"
        if not covers:
            return None
        ends = {
            end: fixed + (hourly or 0.0) * getattr(seconds, end) / 3.6
            for end in ("value", "low", "high")
        }
        return Cost(
            of_1000=Interval(**ends, n=seconds.n), covers=" and ".join(covers), without=without
        )

    def words(self) -> str:
        """Say what was asked for in a sentence's words."""
        parts = [
            f"strategies of at most TV {self.tv_budget:g} per token"
            if self.tv_budget
            else "exact decoding",
            "requests of any length"
            if self.latency_s is None
            else f"95 of 100 requests within {self.latency_s:g} s",
        ]
        if self.buy:
            parts.append(f"bought devices that run without pause for {self.years:g} years")
        if self.power is not None:
            more = f", times {self.overhead:g} for the site" if self.overhead > 1 else ""
            parts.append(f"{self.power:g} {self.currency} per kWh{more}")
        return ", ".join(
            parts if self.amounts else [*parts, "no cost of a device given (--buy, --rent)"]
        )

    @property
    def amounts(self) -> bool:
        """Whether anything was said of costs."""
        return bool(self.rent or self.buy or self.power is not None)
