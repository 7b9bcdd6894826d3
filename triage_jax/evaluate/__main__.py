"""`python -m triage_jax.evaluate`: the benchmarks, resumable sample by sample."""

import sys
from collections.abc import Sequence

from rich.console import Console

from triage_jax.config import ConfigError
from triage_jax.evaluate.cli import Compare, Invocation, Rescore, parse, parse_compare, parse_rescore
from triage_jax.evaluate.compare import compare_runs, comparison_table
from triage_jax.evaluate.plan import print_plan, print_settings
from triage_jax.evaluate.records import RecordError
from triage_jax.evaluate.rescore import rescore
from triage_jax.evaluate.run import evaluate
from triage_jax.evaluate.scores import Result, markdown
from triage_jax.evaluate.subject import read_subject
from triage_jax.metrics import write_atomically
from triage_jax.model import ModelError
from triage_jax.rollout import EngineError
from triage_jax.run import Stop, StopSignal
from triage_jax.tasks.jsonl import DataError

EXIT_FAILED, EXIT_USAGE = 1, 2


def run_evaluation(invocation: Invocation, console: Console) -> int:
    """Evaluate as asked; returns the exit status."""
    subject = read_subject(invocation.config)
    if invocation.dry_run:
        print_settings(subject, console)
        print_plan(subject, console)
        return 0
    stop = StopSignal()
    with stop.installed():
        try:
            result = evaluate(subject, console, stop, overwrite=invocation.overwrite)
        except Stop as signal:
            console.print(
                f"{signal}: every finished sample is in {subject.config.out}; the same command continues",
                markup=False,
                soft_wrap=True,
            )
            return 0
    _print_result(result, console)
    return 0


def run_compare(command: Compare, console: Console) -> int:
    differences = compare_runs(command.first, command.second)
    table = comparison_table(differences, str(command.first), str(command.second))
    console.print(table, markup=False, soft_wrap=True)
    if command.out is not None:
        write_atomically(command.out, table)
    return 0


def run_rescore(command: Rescore, console: Console) -> int:
    result, changed = rescore(command.run, command.data)
    console.print(f"{changed} verdicts changed", markup=False)
    _print_result(result, console)
    return 0


def _print_result(result: Result, console: Console) -> None:
    console.print(markdown(result), markup=False, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 done or stopped by a signal, 1 failed, 2 wrong usage or input."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    console = Console(highlight=False)
    try:
        match arguments[:1]:
            case ["compare"]:
                return run_compare(parse_compare(arguments[1:]), console)
            case ["rescore"]:
                return run_rescore(parse_rescore(arguments[1:]), console)
            case _:
                return run_evaluation(parse(arguments), console)
    except (ConfigError, DataError, ModelError, RecordError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except EngineError as error:
        print(f"error: {error}\nNothing is lost: the same command continues.", file=sys.stderr)
        return EXIT_FAILED
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
