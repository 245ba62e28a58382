"""What a copy says of itself, and when Ctrl-C counts."""

import io
import re
import signal
import threading

import pytest
from rich.console import Console

from telamon.hub.transfer import Transfer, say_expected_peak


def test_the_memory_a_copy_needs_is_three_times_its_largest_tensor():
    screen = io.StringIO()
    say_expected_peak(Console(file=screen, width=300), [5_000_000, 16_000_000, 1000])
    assert re.fullmatch(
        r"memory: at most 48.0 MB beyond the process's own [\d.]+ [MG]B \(3 times the largest tensor, 16.0 MB\)\n", screen.getvalue()
    )


def test_a_terminal_gets_a_bar_with_its_speed_and_a_log_file_one_line():
    bar, line = io.StringIO(), io.StringIO()
    for screen in (bar, line):
        with Transfer(Console(file=screen, width=120, force_terminal=screen is bar), "import", 4_000_000) as transfer:
            for _ in range(4):
                transfer.advance(1_000_000)
    assert re.search(r"━.*4.0/4.0 MB.* [kMG]B/s\x1b", bar.getvalue())
    assert re.fullmatch(r"import: 4.0 MB in \d\.\d s, [\d.]+ GB/s\n", line.getvalue())


def test_ctrl_c_counts_between_two_tensors():
    reached = []
    with pytest.raises(KeyboardInterrupt), Transfer(Console(file=io.StringIO()), "import", 3) as transfer:
        signal.raise_signal(signal.SIGINT)
        reached.append("the end of the tensor")
        transfer.advance(1)
        reached.append("the next tensor")
    assert reached == ["the end of the tensor"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_during_the_last_tensor_counts_too():
    with pytest.raises(KeyboardInterrupt), Transfer(Console(file=io.StringIO()), "import", 3):
        signal.raise_signal(signal.SIGINT)


def test_a_second_ctrl_c_counts_at_once():
    with pytest.raises(KeyboardInterrupt), Transfer(Console(file=io.StringIO()), "import", 3):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("went on after the second")


def test_a_copy_in_another_thread_leaves_ctrl_c_to_the_first():
    done = []

    def copy() -> None:
        with Transfer(Console(file=io.StringIO()), "import", 1) as transfer:
            transfer.advance(1)
        done.append(True)

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    assert done == [True] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
