"""Programs that failed once, as `make fuzz` wrote them."""

from oracle import Case

CASES: dict[str, Case] = {}
