"""The quickstart model on a real SGLang 0.5.23: the same evaluation as in process. Needs .venv-sglang."""

import pytest
import yaml

from tests.evaluate.inputs import arguments, write_sums
from tests.rollout.sglang.conftest import real_server, serving  # noqa: F401  a server of its own: with the weights it started with
from triage_jax.evaluate.__main__ import main
from triage_jax.evaluate.compare import compare_runs
from triage_jax.evaluate.records import read_records

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900), pytest.mark.xdist_group("sglang")]


def test_served_weights_do_as_well_as_in_process(real_server: str, tmp_path) -> None:  # noqa: F811
    file = write_sums(tmp_path)
    here, there = tmp_path / "here", tmp_path / "there"
    more = ("--samples", "12")
    assert main(arguments(here, file, *more)) == 0
    served = ("--engine", "sglang", "--sglang.urls", real_server, "--sglang.concurrency", "8")
    assert main(arguments(there, file, *more, *served)) == 0
    found = list(read_records(there / "samples.jsonl"))
    assert len({(record.problem, record.sample) for record in found}) == len(found) == 8 * 12
    (difference,) = compare_runs(here, there)
    assert difference.first > 0.5
    assert abs(difference.value) < 0.2, "BF16 both, other seeds in effect: the same policy"
    identity = yaml.safe_load((there / "config.yaml").read_text())["identity"]["model"]["served"]
    assert identity["checksum"]
    assert "SGLang 0.5" in identity["description"]
    assert main(arguments(there, file, *more, *served)) == 0
    assert list(read_records(there / "samples.jsonl")) == found
