"""Kubernetes quantities: ``5Gi``, ``71168Mi``, ``1500m``, ``1e3``."""

from __future__ import annotations

import re
from fractions import Fraction

_SUFFIX = {
    "": Fraction(1),
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "k": Fraction(10**3),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
    "T": Fraction(10**12),
    "P": Fraction(10**15),
    "E": Fraction(10**18),
    "Ki": Fraction(2**10),
    "Mi": Fraction(2**20),
    "Gi": Fraction(2**30),
    "Ti": Fraction(2**40),
    "Pi": Fraction(2**50),
    "Ei": Fraction(2**60),
}
_QUANTITY = re.compile(
    r"^([+-]?(?:\d+\.?\d*|\.\d+))(?:[eE]([+-]?\d{1,2})|(n|u|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?)$"
)


def parse_quantity(value: object) -> Fraction:
    """The exact number that a quantity stands for.

    Raises ValueError, naming the value and the right form, for anything the API server would refuse too.
    """
    text = str(value).strip() if not isinstance(value, bool) else ""
    match = _QUANTITY.match(text)
    if not match:
        raise ValueError(f"'{value}' is not a Kubernetes quantity; write it like 5Gi, 500Mi or 2")
    number, exponent, suffix = match.groups()
    return Fraction(number) * (Fraction(10) ** int(exponent) if exponent else _SUFFIX[suffix or ""])


def format_quantity(amount: Fraction, like: object) -> str:
    """An amount as the API server writes it back: in the family of units that ``like`` is written in.

    Rounded up to thousandths. An object that holds it in another form looks changed at the next apply.
    """
    binary = str(like).strip().endswith("i")
    milli = -((-amount.numerator * 1000) // amount.denominator)
    whole, rest = divmod(milli, 1000)
    if rest:
        return f"{milli}m"
    base = 1024 if binary and abs(whole) >= 1024 else 1000
    power = 0
    while whole and power < 6 and whole % base == 0:
        whole, power = whole // base, power + 1
    suffix = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei") if base == 1024 else ("", "k", "M", "G", "T", "P", "E")
    return f"{whole}{suffix[power]}"


def parse_bytes(value: object) -> int:
    """A quantity of memory as whole bytes, rounded up as Kubernetes does."""
    number = parse_quantity(value)
    return -((-number.numerator) // number.denominator)


def format_bytes(count: int) -> str:
    """Bytes as people read them: ``5.81 GiB``, ``640 MiB``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{count} B"
