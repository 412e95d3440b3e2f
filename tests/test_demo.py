"""The demo: its sandbox and script without a server, its strategies and report end to end against a real one."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import psutil
import pytest
from akv_bench.chat import Endpoint
from akv_bench.lengths import Lengths
from akv_bench.measure import Run, Turn
from akv_bench.server import Server
from akv_bench.strategies import Limits, Truncation
from akv_bench.trajectories import Message
from akv_demo import repository
from akv_demo.main import main, play
from akv_demo.report import closing_line, table, write_json, write_plot
from akv_demo.sandbox import Sandbox
from akv_demo.script import STEPS, SYSTEM, TASK, Recording
from akv_demo.view import View, sparkline
from rich.console import Console

from akv_sdk import Client, ContextLengthExceeded
from tests.processes import hear_interrupts

COST_TESTS = {
    "tests/test_inventory.py::test_part_of_a_lot_costs_its_part",
    "tests/test_inventory.py::test_oldest_lot_goes_first",
    "tests/test_inventory.py::test_what_came_in_is_on_hand_or_went_out",
    "tests/test_ledger.py::test_stock_account_is_the_value_on_hand",
    "tests/test_report.py::test_margin_before_the_last_day",
}
PERIOD_TESTS = {
    "tests/test_period.py::test_last_day_belongs_to_it",
    "tests/test_report.py::test_month_counts_its_last_day",
    "tests/test_report.py::test_months_add_up_to_all_time",
}


def record() -> list[str]:
    with Sandbox() as sandbox:
        recording = Recording(sandbox)
        return [recording.observation(number) for number in range(len(STEPS))]


@pytest.fixture(scope="module")
def outputs() -> list[str]:
    return record()


def output_of(outputs: list[str], thought: str) -> str:
    (number,) = [number for number, step in enumerate(STEPS) if step.thought.startswith(thought)]
    return outputs[number]


def failures(output: str) -> set[str]:
    return set(re.findall(r"^FAILED (\S+)", output, re.MULTILINE))


def test_the_seeded_faults_fail_the_intended_tests_and_the_fixes_mend_them(outputs):
    assert failures(output_of(outputs, "Now the tests.")) == COST_TESTS | PERIOD_TESTS
    assert failures(output_of(outputs, "One line. The whole suite?")) == PERIOD_TESTS
    assert output_of(outputs, "So it does.").splitlines()[-1].startswith("133 passed")


def test_the_new_test_fails_without_the_fixes_and_the_commit_holds_them(outputs):
    assert failures(output_of(outputs, "It must fail")) == {
        "tests/test_report.py::test_sale_on_the_last_day_of_part_of_a_lot"
    }
    diff = output_of(outputs, "What am I about to commit?")
    for line in (f"-            {repository.FAULTY_COST}", f"+            {repository.FIXED_COST}"):
        assert line in diff.splitlines()
    assert "3 files changed, 12 insertions(+), 2 deletions(-)" in outputs[-1]


def test_books_and_stock_agree_only_after_the_fixes(outputs):
    def totals(output: str) -> list[str]:
        return [line.split(": ")[1] for line in output.splitlines()[-2:]]

    before, after = (totals(output_of(outputs, start)) for start in ("What does the acc", "Does the accountant's"))
    assert before[0] != before[1]
    assert after[0] == after[1] == before[1]


def test_every_command_does_what_the_agent_says_it_does(outputs):
    """Only the test runs that are meant to fail do; everything else succeeds."""
    failing = [step.thought for step, output in zip(STEPS, outputs, strict=True) if "[exit status" in output]
    starts = ["Now the tests", "Eight failures", "One line", "It must fail"]
    assert [thought[: len(start)] for thought, start in zip(failing, starts, strict=True)] == starts


def test_the_same_commands_print_the_same(outputs):
    def without_times_and_addresses(output: str) -> str:
        return re.sub(r" in \d+\.\d+s|0x[0-9a-f]+", "", output)

    again = record()
    for number, (first, second) in enumerate(zip(outputs, again, strict=True)):
        assert without_times_and_addresses(first) == without_times_and_addresses(second), STEPS[number].command


def test_the_run_is_long_enough_to_pass_the_window(outputs):
    assert len(STEPS) >= 30
    num_characters = sum(map(len, outputs)) + sum(len(step.text) for step in STEPS)
    assert num_characters >= 50_000  # with the marks around them more than 20,000 tokens; the last test counts them


def test_a_command_runs_once_and_in_order():
    with Sandbox() as sandbox:
        recording = Recording(sandbox, STEPS[:2])
        with pytest.raises(AssertionError):
            recording.observation(1)
        first = recording.observation(0)
        (sandbox.root / "new.py").touch()
        assert recording.observation(0) == first
    assert not sandbox.root.exists()


def test_sandbox_reports_failure_and_silence():
    with Sandbox() as sandbox:
        assert sandbox.run("true") == "[no output]"
        assert sandbox.run("echo out; echo err >&2; exit 3") == "out\nerr\n[exit status 3]"


def made_up_run(name: str, num_turns: int, failure: str | None = None) -> Run:
    turns = [Turn(0.1 * (n + 1), (0.02, 0.03), 100 + n, 50 * n, 500 + n, 150 * n, 3) for n in range(num_turns)]
    return Run(name, "made up", 6, turns, failure)


RUNS = [made_up_run("AKV", 6), made_up_run("Truncation", 6), made_up_run("Append-only", 0, "no [out_of_pages]")]


def test_table_fits_a_terminal_of_80_columns_and_names_the_failure():
    console = Console(width=80, record=True)
    console.print(table(RUNS))
    text = console.export_text()
    assert "…" not in text
    row = next(line for line in text.splitlines() if line.lstrip().startswith("Append-only"))
    assert row.split()[-1] == "Failed"
    row = next(line for line in text.splitlines() if line.lstrip().startswith("AKV"))
    assert row.split() == ["AKV", "350", "ms", "575", "ms", "30", "ms", "615", "750", "505", "6/6"]


def test_json_and_plot_of_a_run(tmp_path):
    write_json(tmp_path / "demo.json", RUNS, {"model": "m"})
    written = json.loads((tmp_path / "demo.json").read_text())
    assert [each["completed_steps"] for each in written["strategies"]] == [6, 6, 0]
    assert written["strategies"][0]["prefilled_tokens"] == sum(range(100, 106))
    assert written["strategies"][2]["ttft_p50_s"] is None
    write_plot(tmp_path / "ttft.png", RUNS, window_tokens=400)
    assert (tmp_path / "ttft.png").read_bytes().startswith(b"\x89PNG")


def test_closing_line_speaks_from_the_figures():
    slow = made_up_run("Truncation", 6)
    slow.turns = [Turn(1.0, (), 700, 0, 700, 700, 1)] * 6
    line = closing_line(RUNS[0], slow)
    assert "a stream of 750 tokens cost 615 prefilled" in line
    assert "prefilled 4,200" in line
    assert "2.9 times as long" in line  # 6 s against 2.1 s


def test_sparkline():
    assert sparkline([0, 1, 2, 4], 4) == "▁▃▅█"
    assert sparkline([0, 0], 0) == "▁▁"


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--steps", "1000"], ["--nonsense"]])
def test_bad_arguments_end_it(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: akv demo" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_an_error_in_words(tmp_path, capsys):
    assert main(["--url", "http://127.0.0.1:9", "--out", str(tmp_path), "--steps", "1"]) == 1
    assert "GET http://127.0.0.1:9/v1/models: cannot connect" in " ".join(capsys.readouterr().out.split())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the demo's own server, with the default model."""
    with Server(Console(quiet=True), tmp_path_factory.mktemp("server") / "server.log") as server:
        yield server.url


def test_the_whole_stream_is_longer_than_twice_the_window(server, outputs):
    with Client(server) as client:
        session = client.session()
        session.system(SYSTEM)
        session.user(TASK)
        for step, output in zip(STEPS, outputs, strict=True):
            session.assistant(step.text)
            session.observe(output, tool="sh")
        assert len(client.render(session.messages).tokens) >= 20_000
        assert client.models()[0].max_model_len == 8192


def test_a_short_full_demo_end_to_end(server, tmp_path, capsys):
    assert main(["--url", server, "--steps", "3", "--full", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "You just saw one agent work through the same 3 steps twice." in " ".join(printed.split())
    written = json.loads((tmp_path / "demo.json").read_text())
    assert (tmp_path / "ttft.png").read_bytes().startswith(b"\x89PNG")
    assert [each["name"] for each in written["strategies"]] == ["AKV", "Truncation", "Summarisation", "Append-only"]
    akv, truncation, _, append_only = written["strategies"]
    for each in written["strategies"]:
        assert each["failure"] is None
        assert each["completed_steps"] == 3
        assert all(turn["ttft_s"] > 0 for turn in each["turns"])
        # Salts keep the strategies apart: the first request finds nothing of another's but how a system prompt opens.
        assert each["turns"][0]["reused_tokens"] <= 8
    for each in (akv, append_only):  # an untouched prefix is never computed twice
        computed = each["prefilled_tokens"] + sum(turn["generated_tokens"] for turn in each["turns"])
        assert computed == pytest.approx(each["turns"][-1]["stream_tokens"], abs=10)
    assert truncation["peak_visible_tokens"] <= akv["peak_visible_tokens"]


class Refusing(Truncation):
    """Refuses its second turn, as a server does whose window is full."""

    async def turn(self, new: Sequence[Message]) -> Turn:
        if len(self._tail) > 0:
            raise ContextLengthExceeded("too long [really]", param="messages")
        return await super().turn(new)


def test_a_refused_step_ends_the_run_as_failed(server):
    console = Console(record=True)

    async def run() -> Run:
        async with Endpoint("demo", server) as endpoint:
            await endpoint.connect()
            strategy = Refusing(endpoint, Lengths(endpoint.client), Limits(4000, 8), remembers=True)
            with Sandbox() as sandbox, View(console, [strategy.name], 3) as view:
                return await play(strategy, Recording(sandbox, STEPS[:3]), view, salt="refusing")

    run_ = asyncio.run(run())
    assert (run_.outcome, len(run_.turns)) == ("Failed", 1)
    assert run_.failure == "messages: too long [really] [context_length_exceeded]"
    assert "too long [really] [context_length_exceeded]" in console.export_text()


def test_the_server_is_gone_when_its_demo_is_told_to_stop(tmp_path):
    demo = subprocess.Popen(
        [sys.executable, "-m", "akv_demo", "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=hear_interrupts,
    )
    log = tmp_path / "server.log"
    while not (log.exists() and "loading" in log.read_text()):
        assert demo.poll() is None
        time.sleep(0.1)
    (server,) = psutil.Process(demo.pid).children()
    assert "serve" in server.cmdline()
    demo.send_signal(signal.SIGINT)
    printed, _ = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert b"stopped" in printed
    assert not server.is_running()
