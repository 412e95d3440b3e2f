"""The files of the sandbox repository: a small stock-keeping library with tests, and two seeded faults.

Owns text only: `files()` gives every path and its content, the same each time. Knows nothing of running commands, of
the agent or of the server. The core modules are written out; the record modules, their tests and the data come from
templates.

The faults, both real and both found by the tests:
1. `inventory.py`: issuing part of a lot costs the whole lot (`lot.quantity` where `taken` belongs);
2. `period.py`: the last day of a period does not belong to it (`<` where `<=` belongs).
"""

from __future__ import annotations

from string import Template

FAULTY_COST = "cost += lot.quantity * lot.unit_cents"
FIXED_COST = "cost += taken * lot.unit_cents"
FAULTY_PERIOD = "return self.first <= day < self.last"
FIXED_PERIOD = "return self.first <= day <= self.last"

README = """# stockroom

Stock, orders and books of a small warehouse, in plain Python without dependencies.

| module | what it owns |
|---|---|
| `money.py` | amounts: integers, in cents |
| `period.py` | spans of whole days, such as a month |
| `inventory.py` | lots on hand; what came in first goes out first |
| `ledger.py` | double-entry books: every entry balances |
| `report.py` | tables, the margin of a month, `python -m stockroom.report FILE` |
| `customers.py`, `suppliers.py`, `products.py`, `warehouses.py`, `carriers.py` | records and their stores |

Rules of the house:

- An amount is an `int` of cents. Floats never touch money.
- A lot keeps the cost it came in with. Issuing units moves exactly what those units cost.
- The value of the stock on hand and the balance of the account `stock` are the same number, always.
- Both ends of a period belong to it: January runs from the 1st to the 31st.
- Records are frozen; changing one means putting a new one in its place.

Tests: `python -m pytest`. Every fix comes with a test that failed before it.
"""

PYPROJECT = """[project]
name = "stockroom"
version = "0.4.2"
requires-python = ">=3.11"

[tool.pytest.ini_options]
testpaths = ["tests"]
pythonpath = ["."]
addopts = "-p no:cacheprovider"
"""

MONEY = '''"""Amounts of money: integers, in cents, so that adding them never rounds."""

from __future__ import annotations

import re

_AMOUNT = re.compile(r"(-?)(\\d{1,3}(?:,\\d{3})*|\\d+)(?:\\.(\\d{2}))?")


class BadAmount(ValueError):
    """The text is not an amount."""


def parse_cents(text: str) -> int:
    """`"1,234.50"` -> `123450`. No sign but a leading minus, no more than two decimals."""
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise BadAmount(f"not an amount: {text!r}")
    sign, whole, decimals = match.groups()
    cents = int(whole.replace(",", "")) * 100 + int(decimals or 0)
    return -cents if sign else cents


def format_cents(cents: int, *, symbol: str = "") -> str:
    """`123450` -> `"1,234.50"`. The sign comes before the symbol."""
    whole, rest = divmod(abs(cents), 100)
    sign = "-" if cents < 0 else ""
    return f"{sign}{symbol}{whole:,}.{rest:02d}"


def split_cents(cents: int, parts: int) -> list[int]:
    """Split into parts that differ by at most one cent and add up to the whole. Larger parts come first."""
    if parts < 1:
        raise ValueError(f"cannot split into {parts} parts")
    share, rest = divmod(cents, parts)
    return [share + 1] * rest + [share] * (parts - rest)


def percent_of(cents: int, basis_points: int) -> int:
    """Basis points (1/100 of a percent) of an amount, rounded half away from zero."""
    product = abs(cents * basis_points)
    rounded = (product + 5_000) // 10_000
    return rounded if cents * basis_points >= 0 else -rounded


def ratio_basis_points(part: int, whole: int) -> int | None:
    """What share of the whole the part is, in basis points; None where the whole is nothing."""
    if whole == 0:
        return None
    return round(part * 10_000 / whole)
'''

PERIOD = '''"""Periods: spans of whole days. Both ends belong to a period."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta


@dataclass(frozen=True, order=True)
class Period:
    """From `first` to `last`, both included."""

    first: date
    last: date

    def __post_init__(self) -> None:
        if self.last < self.first:
            raise ValueError(f"a period ends before it starts: {self.first} .. {self.last}")

    @classmethod
    def month(cls, year: int, month: int) -> Period:
        first = date(year, month, 1)
        following = date(year + month // 12, month % 12 + 1, 1)
        return cls(first, following - timedelta(days=1))

    @property
    def num_days(self) -> int:
        return (self.last - self.first).days + 1

    def contains(self, day: date) -> bool:
        return self.first <= day < self.last

    def overlaps(self, other: Period) -> bool:
        return self.first <= other.last and other.first <= self.last

    def days(self) -> Iterator[date]:
        for offset in range(self.num_days):
            yield self.first + timedelta(days=offset)

    def following(self) -> Period:
        """The period of the same number of days that starts on the day after this one."""
        first = self.last + timedelta(days=1)
        return Period(first, first + timedelta(days=self.num_days - 1))


def months(first: date, last: date) -> Iterator[Period]:
    """The calendar months that hold any day from first to last."""
    year, month = first.year, first.month
    while (year, month) <= (last.year, last.month):
        yield Period.month(year, month)
        year, month = year + month // 12, month % 12 + 1
'''

INVENTORY = '''"""Stock on hand, kept as lots: what came in first goes out first, at what it cost."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import date


class OutOfStock(Exception):
    """More was asked for than is on hand."""

    def __init__(self, sku: str, wanted: int, on_hand: int) -> None:
        super().__init__(f"{sku}: {wanted} wanted, {on_hand} on hand")
        self.sku = sku
        self.wanted = wanted
        self.on_hand = on_hand


@dataclass
class Lot:
    """Units that came in together, at one cost. `quantity` is what is left of them."""

    sku: str
    quantity: int
    unit_cents: int
    received: date

    @property
    def value_cents(self) -> int:
        return self.quantity * self.unit_cents


@dataclass(frozen=True)
class Movement:
    """One line of the stock book. What came in is positive, what went out is negative."""

    day: date
    sku: str
    quantity: int
    cents: int
    reason: str


class Inventory:
    """Lots by article, and every movement since the beginning."""

    def __init__(self) -> None:
        self._lots: dict[str, deque[Lot]] = {}
        self.movements: list[Movement] = []

    def skus(self) -> list[str]:
        return sorted(self._lots)

    def lots(self, sku: str) -> list[Lot]:
        """The lots that still hold something, oldest first."""
        return list(self._lots.get(sku, ()))

    def on_hand(self, sku: str) -> int:
        return sum(lot.quantity for lot in self._lots.get(sku, ()))

    def value_cents(self, sku: str | None = None) -> int:
        """What the units on hand had cost; of one article, or of all."""
        skus = self.skus() if sku is None else [sku]
        return sum(lot.value_cents for name in skus for lot in self._lots.get(name, ()))

    def receive(self, sku: str, quantity: int, unit_cents: int, day: date) -> Movement:
        """Put a new lot behind the others."""
        if quantity <= 0:
            raise ValueError(f"cannot receive {quantity} units")
        if unit_cents < 0:
            raise ValueError(f"a unit cannot cost {unit_cents} cents")
        self._lots.setdefault(sku, deque()).append(Lot(sku, quantity, unit_cents, day))
        return self._record(day, sku, quantity, quantity * unit_cents, "receipt")

    def issue(self, sku: str, quantity: int, day: date, reason: str = "sale") -> Movement:
        """Take units out, oldest lot first. The movement carries what these units had cost."""
        if quantity <= 0:
            raise ValueError(f"cannot issue {quantity} units")
        if quantity > self.on_hand(sku):
            raise OutOfStock(sku, quantity, self.on_hand(sku))
        lots = self._lots[sku]
        cost = 0
        left = quantity
        while left:
            lot = lots[0]
            taken = min(left, lot.quantity)
            cost += lot.quantity * lot.unit_cents
            lot.quantity -= taken
            left -= taken
            if lot.quantity == 0:
                lots.popleft()
        return self._record(day, sku, -quantity, -cost, reason)

    def adjust(self, sku: str, counted: int, day: date) -> Movement | None:
        """Bring the books to what was counted on the shelf. Found units cost what the newest lot did."""
        difference = counted - self.on_hand(sku)
        if difference == 0:
            return None
        if difference < 0:
            return self.issue(sku, -difference, day, reason="shrinkage")
        newest = self._lots[sku][-1]
        newest.quantity += difference
        return self._record(day, sku, difference, difference * newest.unit_cents, "found")

    def below(self, levels: dict[str, int]) -> list[str]:
        """The articles of which fewer are on hand than their level asks for."""
        return sorted(sku for sku, level in levels.items() if self.on_hand(sku) < level)

    def _record(self, day: date, sku: str, quantity: int, cents: int, reason: str) -> Movement:
        movement = Movement(day, sku, quantity, cents, reason)
        self.movements.append(movement)
        return movement
'''

LEDGER = '''"""Double-entry books. Every entry balances, so the books always do."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import date

from stockroom.inventory import Movement
from stockroom.period import Period

ACCOUNTS = {
    "stock": "asset",
    "receivables": "asset",
    "bank": "asset",
    "payables": "liability",
    "sales": "income",
    "found": "income",
    "cost_of_goods": "expense",
    "shrinkage": "expense",
    "freight": "expense",
}
GROWS_BY_DEBIT = {"asset", "expense"}


class Unbalanced(ValueError):
    """Debits and credits of an entry differ."""


class NoSuchAccount(KeyError):
    """The account is not in the plan."""


@dataclass(frozen=True)
class Line:
    """One line of an entry. A debit is positive, a credit is negative."""

    account: str
    cents: int


@dataclass(frozen=True)
class Entry:
    day: date
    text: str
    lines: tuple[Line, ...]

    @property
    def debit_cents(self) -> int:
        return sum(line.cents for line in self.lines if line.cents > 0)


class Ledger:
    """The entries, in the order in which they were posted."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def post(self, day: date, text: str, **amounts: int) -> Entry:
        """Post one entry; each keyword is an account and its amount (debits positive, credits negative)."""
        for account in amounts:
            if account not in ACCOUNTS:
                raise NoSuchAccount(account)
        if sum(amounts.values()) != 0:
            raise Unbalanced(f"{text}: debits and credits differ by {sum(amounts.values())} cents")
        entry = Entry(day, text, tuple(Line(account, cents) for account, cents in amounts.items() if cents))
        self.entries.append(entry)
        return entry

    def book(self, movement: Movement) -> Entry:
        """Post what a movement of stock means for the books."""
        other = {"receipt": "payables", "sale": "cost_of_goods"}.get(movement.reason, movement.reason)
        text = f"{movement.reason} {movement.sku} x {abs(movement.quantity)}"
        return self.post(movement.day, text, **{"stock": movement.cents, other: -movement.cents})

    def sell(self, day: date, text: str, cents: int) -> Entry:
        return self.post(day, text, receivables=cents, sales=-cents)

    def balance(self, account: str, period: Period | None = None) -> int:
        """The balance of an account, positive on the side where it grows; of one period, or of all time."""
        if account not in ACCOUNTS:
            raise NoSuchAccount(account)
        debits = sum(
            line.cents
            for entry in self.entries
            if period is None or period.contains(entry.day)
            for line in entry.lines
            if line.account == account
        )
        return debits if ACCOUNTS[account] in GROWS_BY_DEBIT else -debits

    def trial_balance(self) -> dict[str, int]:
        """Every account that was used, with its debits less its credits. They add up to nothing."""
        totals: defaultdict[str, int] = defaultdict(int)
        for entry in self.entries:
            for line in entry.lines:
                totals[line.account] += line.cents
        return dict(sorted(totals.items()))
'''

REPORT = '''"""Tables for people: stock on hand, and what each month earned."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from stockroom.inventory import Inventory
from stockroom.ledger import Ledger
from stockroom.money import format_cents, ratio_basis_points
from stockroom.period import Period, months


@dataclass(frozen=True)
class Margin:
    """What a period earned, before everything that is not the cost of the goods."""

    period: Period
    sales_cents: int
    cost_cents: int

    @property
    def cents(self) -> int:
        return self.sales_cents - self.cost_cents

    @property
    def percent(self) -> str:
        share = ratio_basis_points(self.cents, self.sales_cents)
        return "-" if share is None else f"{share / 100:.1f} %"


def margin(ledger: Ledger, period: Period) -> Margin:
    return Margin(period, ledger.balance("sales", period), ledger.balance("cost_of_goods", period))


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns as wide as they need to be; the first to the left, the others to the right."""
    lines = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    ruled = [lines[0], ["-" * width for width in widths], *lines[1:]]
    return "\\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in ruled
    )


def stock_table(inventory: Inventory) -> str:
    rows = [
        (sku, inventory.on_hand(sku), len(inventory.lots(sku)), format_cents(inventory.value_cents(sku)))
        for sku in inventory.skus()
    ]
    rows.append(("total", "", "", format_cents(inventory.value_cents())))
    return table(("article", "on hand", "lots", "value"), rows)


def margin_table(ledger: Ledger, periods: Iterable[Period]) -> str:
    rows = []
    for period in periods:
        earned = margin(ledger, period)
        amounts = (earned.sales_cents, earned.cost_cents, earned.cents)
        rows.append((f"{period.first:%Y-%m}", *map(format_cents, amounts), earned.percent))
    return table(("month", "sales", "cost", "margin", "share"), rows)


def load(path: Path) -> tuple[Inventory, Ledger]:
    """Play a file of movements: `day,sku,kind,quantity,unit_cents`. For a sale the last is the price."""
    inventory, ledger = Inventory(), Ledger()
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            day, sku, quantity = date.fromisoformat(row["day"]), row["sku"], int(row["quantity"])
            if row["kind"] == "receipt":
                ledger.book(inventory.receive(sku, quantity, int(row["unit_cents"]), day))
            else:
                ledger.book(inventory.issue(sku, quantity, day))
                ledger.sell(day, f"{quantity} x {sku}", quantity * int(row["unit_cents"]))
    return inventory, ledger


def main(argv: Sequence[str]) -> int:
    inventory, ledger = load(Path(argv[0]))
    days = [entry.day for entry in ledger.entries]
    print(stock_table(inventory), end="\\n\\n")
    print(margin_table(ledger, months(min(days), max(days))), end="\\n\\n")
    print(f"stock account: {format_cents(ledger.balance('stock'))}")
    print(f"stock on hand: {format_cents(inventory.value_cents())}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
'''

TEST_MONEY = """import pytest

from stockroom.money import BadAmount, format_cents, parse_cents, percent_of, ratio_basis_points, split_cents


@pytest.mark.parametrize(
    ("text", "cents"),
    [("0", 0), ("7", 700), ("0.05", 5), ("1,234.50", 123450), ("-3.10", -310), ("1234567.89", 123456789)],
)
def test_parse(text, cents):
    assert parse_cents(text) == cents


@pytest.mark.parametrize("text", ["", "1.5", "1,23.00", "1.234", "+4", "4 EUR", "--1"])
def test_parse_refuses(text):
    with pytest.raises(BadAmount):
        parse_cents(text)


@pytest.mark.parametrize("cents", [0, 5, -5, 99, 100, -123450, 10**11])
def test_format_and_parse_are_inverse(cents):
    assert parse_cents(format_cents(cents)) == cents


@pytest.mark.parametrize(("cents", "parts"), [(100, 3), (7, 7), (2, 5), (999, 4), (0, 2)])
def test_split_adds_up(cents, parts):
    shares = split_cents(cents, parts)
    assert sum(shares) == cents
    assert len(shares) == parts
    assert max(shares) - min(shares) <= 1


def test_percent_rounds_half_away_from_zero():
    assert percent_of(1000, 1950) == 195
    assert percent_of(1, 5000) == 1
    assert percent_of(-1, 5000) == -1


def test_ratio_of_nothing():
    assert ratio_basis_points(5, 0) is None
    assert ratio_basis_points(1, 4) == 2500
"""

TEST_PERIOD = """from datetime import date

import pytest

from stockroom.period import Period, months


@pytest.mark.parametrize(("month", "num_days"), [(1, 31), (2, 29), (4, 30), (12, 31)])
def test_month_has_its_days(month, num_days):
    assert Period.month(2024, month).num_days == num_days


def test_first_day_belongs_to_it():
    assert Period.month(2024, 3).contains(date(2024, 3, 1))


def test_last_day_belongs_to_it():
    assert Period.month(2024, 3).contains(date(2024, 3, 31))


def test_neighbours_do_not_belong_to_it():
    march = Period.month(2024, 3)
    assert not march.contains(date(2024, 2, 29))
    assert not march.contains(date(2024, 4, 1))


def test_every_day_is_in_one_month():
    year = list(months(date(2024, 1, 1), date(2024, 12, 31)))
    assert len(year) == 12
    assert sum(period.num_days for period in year) == 366


def test_following_touches():
    week = Period(date(2024, 2, 26), date(2024, 3, 3))
    assert week.following().first == date(2024, 3, 4)
    assert not week.overlaps(week.following())


def test_ends_before_it_starts():
    with pytest.raises(ValueError, match="ends before"):
        Period(date(2024, 3, 2), date(2024, 3, 1))
"""

TEST_INVENTORY = '''from datetime import date

import pytest

from stockroom.inventory import Inventory, OutOfStock

JANUARY = date(2024, 1, 15)
FEBRUARY = date(2024, 2, 15)


@pytest.fixture
def inventory():
    """Ten bolts at 1.00, then twenty at 1.20; four hinges at 5.00."""
    inventory = Inventory()
    inventory.receive("bolt", 10, 100, JANUARY)
    inventory.receive("bolt", 20, 120, FEBRUARY)
    inventory.receive("hinge", 4, 500, JANUARY)
    return inventory


def test_on_hand(inventory):
    assert inventory.on_hand("bolt") == 30
    assert inventory.on_hand("hinge") == 4
    assert inventory.on_hand("nail") == 0


def test_value(inventory):
    assert inventory.value_cents("bolt") == 10 * 100 + 20 * 120
    assert inventory.value_cents() == 10 * 100 + 20 * 120 + 4 * 500


def test_whole_lot_costs_what_it_came_in_at(inventory):
    movement = inventory.issue("bolt", 10, FEBRUARY)
    assert movement.cents == -10 * 100
    assert [lot.unit_cents for lot in inventory.lots("bolt")] == [120]


def test_part_of_a_lot_costs_its_part(inventory):
    movement = inventory.issue("bolt", 4, FEBRUARY)
    assert movement.cents == -4 * 100
    assert inventory.value_cents("bolt") == 6 * 100 + 20 * 120


def test_oldest_lot_goes_first(inventory):
    movement = inventory.issue("bolt", 15, FEBRUARY)
    assert movement.cents == -(10 * 100 + 5 * 120)
    assert inventory.on_hand("bolt") == 15


def test_what_came_in_is_on_hand_or_went_out(inventory):
    came_in = inventory.value_cents()
    went_out = 0
    for quantity in (3, 3, 3, 3, 3):
        went_out -= inventory.issue("bolt", quantity, FEBRUARY).cents
    assert went_out + inventory.value_cents() == came_in


def test_more_than_on_hand_changes_nothing(inventory):
    with pytest.raises(OutOfStock, match="hinge: 5 wanted, 4 on hand"):
        inventory.issue("hinge", 5, FEBRUARY)
    assert inventory.on_hand("hinge") == 4
    assert len(inventory.movements) == 3


@pytest.mark.parametrize("quantity", [0, -1])
def test_nothing_is_no_movement(inventory, quantity):
    with pytest.raises(ValueError, match="cannot"):
        inventory.issue("bolt", quantity, FEBRUARY)
    with pytest.raises(ValueError, match="cannot"):
        inventory.receive("bolt", quantity, 100, FEBRUARY)


def test_count_agrees(inventory):
    assert inventory.adjust("hinge", 4, FEBRUARY) is None


def test_count_finds_more(inventory):
    movement = inventory.adjust("hinge", 6, FEBRUARY)
    assert (movement.quantity, movement.cents, movement.reason) == (2, 1000, "found")


def test_below_level(inventory):
    assert inventory.below({"bolt": 30, "hinge": 5, "nail": 1}) == ["hinge", "nail"]
'''

TEST_LEDGER = """from datetime import date

import pytest

from stockroom.inventory import Inventory
from stockroom.ledger import Ledger, NoSuchAccount, Unbalanced
from stockroom.period import Period

DAY = date(2024, 5, 6)


@pytest.fixture
def ledger():
    return Ledger()


def test_entry_must_balance(ledger):
    with pytest.raises(Unbalanced, match="differ by 1 cents"):
        ledger.post(DAY, "wrong", bank=100, sales=-99)
    assert ledger.entries == []


def test_account_must_exist(ledger):
    with pytest.raises(NoSuchAccount):
        ledger.post(DAY, "wrong", petty_cash=100, sales=-100)


def test_balance_is_positive_on_its_own_side(ledger):
    ledger.sell(DAY, "3 hinges", 2400)
    assert ledger.balance("receivables") == 2400
    assert ledger.balance("sales") == 2400


def test_balance_of_a_period(ledger):
    ledger.sell(date(2024, 4, 2), "April", 100)
    ledger.sell(date(2024, 5, 2), "May", 200)
    assert ledger.balance("sales", Period.month(2024, 5)) == 200


def test_stock_account_is_the_value_on_hand(ledger):
    inventory = Inventory()
    ledger.book(inventory.receive("bolt", 50, 130, DAY))
    ledger.book(inventory.receive("bolt", 50, 150, DAY))
    for quantity in (20, 20, 20):
        ledger.book(inventory.issue("bolt", quantity, DAY))
    assert ledger.balance("stock") == inventory.value_cents()


def test_shrinkage_is_an_expense(ledger):
    inventory = Inventory()
    ledger.book(inventory.receive("hinge", 4, 500, DAY))
    ledger.book(inventory.issue("hinge", 4, DAY, reason="shrinkage"))
    assert ledger.balance("shrinkage") == 2000
    assert ledger.balance("stock") == 0


def test_trial_balance_adds_up(ledger):
    inventory = Inventory()
    ledger.book(inventory.receive("bolt", 9, 111, DAY))
    ledger.sell(DAY, "bolts", 1234)
    assert sum(ledger.trial_balance().values()) == 0
"""

TEST_REPORT = '''from datetime import date

import pytest

from stockroom.inventory import Inventory
from stockroom.ledger import Ledger
from stockroom.period import Period
from stockroom.report import load, margin, margin_table, stock_table, table

MAY = Period.month(2024, 5)


@pytest.fixture
def books(tmp_path):
    """Ten bolts at 1.00 come in; four are sold at 2.50 in the middle of May and two on its last day."""
    path = tmp_path / "movements.csv"
    path.write_text(
        "day,sku,kind,quantity,unit_cents\\n"
        "2024-05-01,bolt,receipt,10,100\\n"
        "2024-05-17,bolt,sale,4,250\\n"
        "2024-05-31,bolt,sale,2,250\\n"
    )
    return load(path)


def test_columns_line_up():
    assert table(("a", "bb"), [("x", 1), ("long", 22)]).splitlines() == ["a     bb", "----  --", "x      1", "long  22"]


def test_stock_table_ends_with_the_total():
    inventory = Inventory()
    inventory.receive("bolt", 3, 150, date(2024, 5, 1))
    inventory.receive("hinge", 1, 999, date(2024, 5, 2))
    assert stock_table(inventory).splitlines()[-1].split() == ["total", "14.49"]


def test_margin_before_the_last_day(books):
    _, ledger = books
    until = Period(MAY.first, date(2024, 5, 18))
    assert margin(ledger, until).cents == 4 * (250 - 100)


def test_month_counts_its_last_day(books):
    _, ledger = books
    assert margin(ledger, MAY).sales_cents == 6 * 250


def test_months_add_up_to_all_time(books):
    _, ledger = books
    assert margin(ledger, MAY).cost_cents == ledger.balance("cost_of_goods")


def test_margin_table_of_an_empty_month():
    assert margin_table(Ledger(), [MAY]).splitlines()[-1].split() == ["2024-05", "0.00", "0.00", "0.00", "-"]
'''

RECORD = Template('''"""$Plural: records that never change, and the store that keeps them."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

_CODE = re.compile(r"$prefix-\\d{4}")


class Bad$Name(ValueError):
    """A field of the record cannot be what it is."""


class No$Name(KeyError):
    """Nothing is kept under this code."""


@dataclass(frozen=True)
class $Name:
    """One $name. `code` is its key: `$prefix-` and four digits."""

    code: str
    name: str
    $group: str
    $number: int
    active: bool = True

    def __post_init__(self) -> None:
        if not _CODE.fullmatch(self.code):
            raise Bad$Name(f"code: {self.code!r} is not of the form $prefix-0000")
        if not self.name.strip():
            raise Bad$Name("name: must not be empty")
        if self.$number < 0:
            raise Bad$Name(f"$number: must not be negative, is {self.$number}")

    def renamed(self, name: str) -> $Name:
        return replace(self, name=name)

    def retired(self) -> $Name:
        return replace(self, active=False)

    def to_row(self) -> dict[str, str]:
        row = {key: str(value) for key, value in asdict(self).items()}
        return {**row, "active": "yes" if self.active else "no"}

    @classmethod
    def from_row(cls, row: dict[str, str]) -> $Name:
        try:
            number = int(row["$number"])
        except ValueError:
            raise Bad$Name(f"$number: {row['$number']!r} is not a number") from None
        return cls(row["code"], row["name"], row["$group"], number, row["active"] == "yes")


class ${Name}Store:
    """$Plural by code. Putting one under a code that is taken replaces what was there."""

    def __init__(self, records: Iterable[$Name] = ()) -> None:
        self._records = {record.code: record for record in records}

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[$Name]:
        return iter(sorted(self._records.values(), key=lambda record: record.code))

    def __contains__(self, code: str) -> bool:
        return code in self._records

    def put(self, record: $Name) -> None:
        self._records[record.code] = record

    def get(self, code: str) -> $Name:
        try:
            return self._records[code]
        except KeyError:
            raise No$Name(code) from None

    def retire(self, code: str) -> $Name:
        record = self.get(code).retired()
        self.put(record)
        return record

    def active(self) -> list[$Name]:
        return [record for record in self if record.active]

    def by_$group(self, $group: str) -> list[$Name]:
        wanted = $group.casefold()
        return [record for record in self if record.$group.casefold() == wanted]

    def search(self, text: str) -> list[$Name]:
        """Records whose name has every word of the text, in any order and case."""
        words = text.casefold().split()
        return [record for record in self if all(word in record.name.casefold() for word in words)]

    def total_$number(self) -> int:
        return sum(record.$number for record in self.active())

    def save(self, path: Path) -> None:
        fields = ["code", "name", "$group", "$number", "active"]
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, fields, lineterminator="\\n")
            writer.writeheader()
            writer.writerows(record.to_row() for record in self)

    @classmethod
    def load(cls, path: Path) -> ${Name}Store:
        with path.open(newline="") as file:
            return cls($Name.from_row(row) for row in csv.DictReader(file))
''')

TEST_RECORD = Template("""import pytest

from stockroom.$plural import Bad$Name, No$Name, $Name, ${Name}Store


@pytest.fixture
def store():
    return ${Name}Store(
        [
            $Name("$prefix-0002", "Second of two", "Lisbon", 30),
            $Name("$prefix-0001", "First of two", "Porto", 12),
        ]
    )


@pytest.mark.parametrize("code", ["", "$prefix-1", "$prefix-00001", "XX-0001", "$prefix 0001"])
def test_code_has_a_form(code):
    with pytest.raises(Bad$Name, match="code"):
        $Name(code, "A name", "Lisbon", 1)


@pytest.mark.parametrize(("name", "number"), [("", 1), ("  ", 1), ("A name", -1)])
def test_fields_are_checked(name, number):
    with pytest.raises(Bad$Name):
        $Name("$prefix-0001", name, "Lisbon", number)


def test_in_order_of_code(store):
    assert [record.code for record in store] == ["$prefix-0001", "$prefix-0002"]


def test_put_replaces(store):
    store.put(store.get("$prefix-0001").renamed("Other"))
    assert len(store) == 2
    assert store.get("$prefix-0001").name == "Other"


def test_unknown_code(store):
    assert "$prefix-0009" not in store
    with pytest.raises(No$Name):
        store.get("$prefix-0009")


def test_retired_does_not_count(store):
    store.retire("$prefix-0002")
    assert store.total_$number() == 12
    assert [record.code for record in store.active()] == ["$prefix-0001"]


def test_search_takes_words_in_any_order(store):
    assert [record.code for record in store.search("TWO first")] == ["$prefix-0001"]
    assert [record.code for record in store.by_$group("lisbon")] == ["$prefix-0002"]


def test_file_keeps_everything(store, tmp_path):
    store.retire("$prefix-0001")
    store.save(tmp_path / "records.csv")
    assert list(${Name}Store.load(tmp_path / "records.csv")) == list(store)
""")

RECORDS = [  # name, plural, prefix of its codes, field to group by, number
    ("customer", "customers", "CU", "city", "credit_cents"),
    ("supplier", "suppliers", "SU", "country", "lead_days"),
    ("product", "products", "PR", "category", "reorder_level"),
    ("warehouse", "warehouses", "WH", "city", "capacity"),
    ("carrier", "carriers", "CA", "country", "rate_cents"),
]

ARTICLES = [("bolt-m6", 14), ("bolt-m8", 22), ("hinge-80", 310), ("lock-std", 1240), ("panel-oak", 4890)]


def movements(num_rounds: int = 14) -> str:
    """A year of receipts and sales, as CSV. Every fifth sale falls on the last day of its month."""
    rows = ["day,sku,kind,quantity,unit_cents"]
    month_ends = [31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
    for turn in range(num_rounds):
        sku, cost = ARTICLES[turn % len(ARTICLES)]
        month = turn * 12 // num_rounds + 1
        rows.append(f"2024-{month:02d}-{turn % 5 + 1:02d},{sku},receipt,{40 + turn * 7 % 25},{cost + turn % 4}")
        for sale in range(2):
            day = month_ends[month - 1] if (turn + sale) % 5 == 0 else 9 + sale * 8 + turn % 7
            rows.append(f"2024-{month:02d}-{day:02d},{sku},sale,{5 + (turn * 3 + sale * 4) % 11},{cost * 8 // 5}")
    return "\n".join(rows) + "\n"


def files() -> dict[str, str]:
    """Every file of the repository, by its path."""
    tree = {
        "README.md": README,
        "pyproject.toml": PYPROJECT,
        "data/movements.csv": movements(),
        "stockroom/__init__.py": '"""Stock, orders and books of a small warehouse."""\n',
        "stockroom/money.py": MONEY,
        "stockroom/period.py": PERIOD,
        "stockroom/inventory.py": INVENTORY,
        "stockroom/ledger.py": LEDGER,
        "stockroom/report.py": REPORT,
        "tests/test_money.py": TEST_MONEY,
        "tests/test_period.py": TEST_PERIOD,
        "tests/test_inventory.py": TEST_INVENTORY,
        "tests/test_ledger.py": TEST_LEDGER,
        "tests/test_report.py": TEST_REPORT,
    }
    for name, plural, prefix, group, number in RECORDS:
        words = {
            "name": name,
            "Name": name.capitalize(),
            "plural": plural,
            "Plural": plural.capitalize(),
            "prefix": prefix,
            "group": group,
            "number": number,
        }
        tree[f"stockroom/{plural}.py"] = RECORD.substitute(words)
        tree[f"tests/test_{plural}.py"] = TEST_RECORD.substitute(words)
    assert FAULTY_COST in tree["stockroom/inventory.py"]
    assert FAULTY_PERIOD in tree["stockroom/period.py"]
    return dict(sorted(tree.items()))
