"""Tables and figures from the records: `python -m scripts.study.report` rewrites docs/study.md and README.md."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from scripts.study.figures import write_figures
from scripts.study.records import RESULTS, read_records
from scripts.study.table import finished, update_page


@dataclass(frozen=True, kw_only=True)
class Report:
    """What to read and to write."""

    results: Path = RESULTS
    """Records of finished trials"""
    figures: Path | None = Path("docs/study")
    """Folder of the figures"""
    pages: tuple[Path, ...] = (Path("docs/study.md"), Path("README.md"))
    """Pages whose tables, between their markers, are rewritten"""


def write_report(report: Report) -> None:
    records = read_records(report.results)
    print(finished(records))
    for page in report.pages:
        print(f"{page}: {'rewritten' if update_page(page, records) else 'as it was'}")
    if report.figures is not None:
        report.figures.mkdir(parents=True, exist_ok=True)
        for path in write_figures(records, report.figures):
            print(path)


if __name__ == "__main__":
    write_report(tyro.cli(Report, description=__doc__))
