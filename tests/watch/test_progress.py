"""What a run prints: one plain line a logged step; on a terminal a bar below the lines."""

import io
import re

from rich.console import Console

from telamon.watch.progress import RunDisplay, format_step, format_validation

METRICS = {
    "loss": 4.213,
    "bits_per_byte": 2.314,
    "learning_rate": 9.6e-4,
    "grad_norm": 0.84,
    "tokens_per_second": 5312.0,
    "mfu": 0.38,
    "step_seconds": 0.188,
    "data_wait": 0.001,
}
LINE = "step 120/1000  loss 4.213  2.31 bits/byte  lr 9.6e-04  |g| 0.84  5,312 tok/s  38 % of peak  188 ms  wait 0.1 %"


def test_a_step_is_one_readable_line():
    assert format_step(120, 1000, METRICS) == LINE


def test_a_metric_that_was_not_measured_is_left_out():
    assert format_step(1, 2, {"loss": 1.0, "other": 3.0}) == "step 1/2  loss 1.000"


def test_validation_stands_beside_gzip():
    assert format_validation(10, 20, 2.5, 2.0) == "step 10/20  validation 2.500 bits/byte  gzip -9 2.000, not yet beaten"
    assert format_validation(10, 20, 1.5, 2.0).endswith("gzip -9 2.000, beaten")
    assert format_validation(10, 20, 1.5, None) == "step 10/20  validation 1.500 bits/byte"


def run(console):
    with RunDisplay(1000, gzip_bits_per_byte=2.0, console=console) as display:
        display.advance(119)
        display.log(120, METRICS)
        display.validation(120, 2.5)
        display.print("[a line] as it is")


def test_a_log_file_gets_plain_lines_and_nothing_else():
    """Unwrapped, though a file counts as 80 columns wide; a line is never split or decorated."""
    out = io.StringIO()
    run(Console(file=out, width=80))
    assert out.getvalue().splitlines() == [LINE, format_validation(120, 1000, 2.5, 2.0), "[a line] as it is"]


def rendered(output):
    """What a terminal shows after `output`; knows the control codes that a bar is drawn with, and no others."""
    screen, row = [""], 0
    for code, text in re.findall(r"(\x1b\[[?0-9;]*[A-Za-z]|\r|\n)|([^\x1b\r\n]+)", output):
        if code == "\n":
            row += 1
            screen += [""] * (row + 1 - len(screen))
        elif code.endswith("A"):
            row -= int(code[2:-1] or 1)
        elif code == "\x1b[2K":
            screen[row] = ""
        elif not code:
            screen[row] += text
        else:
            assert code == "\r" or code[-1] in "mhl", code
    return screen


def test_a_terminal_shows_lines_above_a_bar_and_keeps_foreign_output_whole(capsys):
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True, legacy_windows=False)
    with RunDisplay(1000, gzip_bits_per_byte=2.0, console=console) as display:
        display.log(120, METRICS)
        print("a library prints")
        display.validation(120, 2.5)
    screen = rendered(out.getvalue())
    lines = [line for line in screen if line.strip()]
    assert lines[0] == LINE
    assert lines[1] == "a library prints"
    assert lines[2] == format_validation(120, 1000, 2.5, 2.0)
    assert re.search(r"train .* 120/1000 .* left", lines[3])
    assert lines[4].strip() == "loss 4.213 · val 2.50 bits/byte (gzip 2.00) · 5,312 tok/s · 38 % of peak"
    assert len(lines) == 5


def test_other_processes_print_nothing(capsys):
    with RunDisplay(10, quiet=True) as display:
        display.log(1, {"loss": 1.0})
    assert capsys.readouterr().out == ""
