"""The scripted agent: what it says and the command it runs, step by step.

Owns the plan and the recording of what the commands really printed. Knows nothing of the server or of strategies. The
plan is fixed; the observations are not: each command runs in the sandbox when the step is first asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from akv_demo.repository import FAULTY_COST, FAULTY_PERIOD, FIXED_COST, FIXED_PERIOD
from akv_demo.sandbox import Sandbox

SYSTEM = (
    "You are a careful software engineer. You work in a git repository, one shell command at a time: say what you are "
    "after, give the command, read what it prints, and go on. Change as little as the fault needs, and prove the "
    "change with the tests. Older output may be taken out of your sight to save room; run a command again if you need "
    "it."
)
TASK = (
    "The accountant says that the account `stock` and the value of the stock on hand differ, and that some months lack "
    "the sales of their last day. Find out why, repair it, and leave all tests passing. `python -m pytest` runs them; "
    "`python -m stockroom.report data/movements.csv` prints the report that the accountant reads. Keep the rules of "
    "the README, add a test for what you repair, and commit."
)


@dataclass(frozen=True)
class Step:
    thought: str
    command: str

    @property
    def text(self) -> str:
        """The assistant turn."""
        return f"{self.thought}\n\n```sh\n{self.command}\n```"


def _replace(path: str, old: str, new: str) -> str:
    """A sed command that works with GNU and BSD sed alike; `*` is the only character to escape in our texts."""
    return f"sed -i.bak 's/{old.replace('*', '[*]')}/{new}/' {path} && rm {path}.bak"


_NEW_TEST = r"""cat >> tests/test_report.py <<'END'


def test_sale_on_the_last_day_of_part_of_a_lot():
    ledger = Ledger()
    inventory = Inventory()
    ledger.book(inventory.receive("bolt", 10, 100, MAY.first))
    ledger.book(inventory.issue("bolt", 3, MAY.last))
    ledger.sell(MAY.last, "3 bolts", 750)
    assert margin(ledger, MAY).cents == 750 - 300
    assert ledger.balance("stock") == inventory.value_cents()
END"""
_REPRODUCE = """python - <<'END'
from datetime import date
from stockroom.inventory import Inventory
stock = Inventory()
stock.receive("bolt", 10, 100, date(2024, 1, 1))
for _ in range(3):
    print(stock.issue("bolt", 2, date(2024, 1, 2)), "left:", stock.value_cents())
END"""
_LAST_DAYS = """python - <<'END'
from stockroom.period import Period
for month in range(1, 13):
    period = Period.month(2024, month)
    print(period, [period.contains(day) for day in (period.first, period.last)])
END"""

STEPS: tuple[Step, ...] = (
    Step("First, what is here?", "git log --stat | head -40 && wc -l stockroom/*.py tests/*.py"),
    Step("The rules of the house, and some data.", "cat README.md pyproject.toml && head -n 22 data/movements.csv"),
    Step("What does the accountant see?", "python -m stockroom.report data/movements.csv"),
    Step(
        "Costs above the sales: that cannot be. How is code written here?",
        "cat stockroom/products.py tests/test_products.py",
    ),
    Step("Now the tests.", "python -m pytest -q --tb=no"),
    Step("Eight failures, and the stock itself fails first.", "python -m pytest -q --tb=short tests/test_inventory.py"),
    Step("I read it from top to bottom.", "cat stockroom/inventory.py"),
    Step("Smallest case by hand: a lot of ten, two out at a time.", _REPRODUCE),
    Step("Every issue costs the whole lot. What do the tests mean it to cost?", "cat tests/test_inventory.py"),
    Step("What the units had cost. Who else computes with lots?", "grep -rn 'lot\\.' stockroom"),
    Step("Only that loop. Are there such sales in the data?", "cat data/movements.csv"),
    Step("Nearly all of them. The loop once more.", "grep -n -B 8 -A 8 'cost +=' stockroom/inventory.py"),
    Step("Could rounding hide the same kind of fault?", "cat stockroom/money.py tests/test_money.py"),
    Step("No: integers throughout. How do movements reach the books?", "cat stockroom/ledger.py"),
    Step(
        "Unchanged. So I repair the cost where it arises.",
        _replace("stockroom/inventory.py", FAULTY_COST, FIXED_COST) + " && git diff",
    ),
    Step("One line. The whole suite?", "python -m pytest -q"),
    Step("Three of eight are left, all about last days. Which ends belong to a month?", _LAST_DAYS),
    Step("The last day never does. Who asks?", "grep -rn 'contains(' stockroom tests"),
    Step("Only the ledger, for the report.", "cat stockroom/report.py"),
    Step("And the period itself.", "cat stockroom/period.py"),
    Step(
        "The README says that both ends belong. One character.",
        _replace("stockroom/period.py", FAULTY_PERIOD, FIXED_PERIOD) + " && git diff stockroom/period.py",
    ),
    Step("The tests of periods and reports.", "python -m pytest -q tests/test_period.py tests/test_report.py"),
    Step("Good. What do the reports' tests cover?", "cat tests/test_report.py"),
    Step("Each fault alone. The whole suite?", "python -m pytest -q"),
    Step("Does the accountant's report add up now?", "python -m stockroom.report data/movements.csv"),
    Step("It does. Do the tests of the books sell part of a lot on a last day?", "cat tests/test_ledger.py"),
    Step("They do not. A test that has both faults in it.", _NEW_TEST),
    Step("It must fail without the repairs.", "git stash -q -- stockroom && python -m pytest -q -k last_day_of_part"),
    Step("So it does. The repairs back in, and the whole suite.", "git stash pop -q && python -m pytest -q"),
    Step("What am I about to commit?", "git status --short && git diff -U1"),
    Step(
        "Commit.", "git commit -qam 'Cost only the units issued, count the last day of a period' && git log --stat -1"
    ),
)


class Recording:
    """What the commands printed. A command runs once, when its step is first asked for, so that every strategy
    after the first meets exactly the same observations; steps are asked for in order."""

    def __init__(self, sandbox: Sandbox, steps: tuple[Step, ...] = STEPS) -> None:
        self.steps = steps
        self._sandbox = sandbox
        self._outputs: list[str] = []

    def observation(self, number: int) -> str:
        """The output of step `number` (from 0). Runs the command if it has not run yet."""
        assert number <= len(self._outputs), "a later command cannot run before the ones it builds on"
        if number == len(self._outputs):
            self._outputs.append(self._sandbox.run(self.steps[number].command))
        return self._outputs[number]
