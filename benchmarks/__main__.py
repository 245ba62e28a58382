"""`python -m benchmarks ID`: run one benchmark, write its result, print its table and a last line of JSON."""

import argparse
import importlib
from pathlib import Path

from benchmarks import results

PROGRAMS = {
    "P1": "p1_train_step",
    "P2": "p2_first_step",
    "P3": "p3_beat_gzip",
    "P4": "p4_input",
    "P5": "p5_convert",
    "P6": "p6_generate",
    "P7": "p7_checkpoint",
    "A1": "a1_compile",
    "A2": "a2_compile_large",
    "A3": "a3_predicted_speed",
    "E1": "e1_experts",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=results.__doc__)
    parser.add_argument("id", choices=sorted(PROGRAMS), type=str.upper, help="which benchmark")
    parser.add_argument("--rounds", type=int, help="turns that each side takes; its own number by default, at least 5 for a result to keep")
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="folder that gets ID.md and ID.json (default: %(default)s)")
    parser.add_argument("--rows", nargs="+", help="A2: only these models; the result is shown and not kept")
    arguments = parser.parse_args()
    program = importlib.import_module(f"benchmarks.{PROGRAMS[arguments.id]}")
    rounds = arguments.rounds or program.ROUNDS
    if arguments.rows:
        choices = getattr(program, "CHOICES", ())
        if odd := set(arguments.rows) - set(choices):
            parser.error(f"{arguments.id} has no row {', '.join(sorted(odd))}; its rows: {', '.join(choices) or 'none to choose from'}")
        result = program.run(rounds, arguments.rows)
    else:
        result = program.run(rounds)
        results.write(result, arguments.results)
    results.show(result)


if __name__ == "__main__":
    main()
