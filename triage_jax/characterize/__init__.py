"""The mismatch study: what the gap between learner and sampler looks like, where it sits, what it will do.

Arrays in, numbers out; `python -m triage_jax.characterize RUN_OR_DUMP` for files. Imports nothing else of the package.
"""

from triage_jax.characterize.arrays import gap_of
from triage_jax.characterize.audit import Agreement, sign_audit
from triage_jax.characterize.dilution import Dilution, dilution
from triage_jax.characterize.dumps import Dump, DumpError, dump_path, read_dump, write_dump
from triage_jax.characterize.gaps import GapSums, gap_sums
from triage_jax.characterize.localize import (
    Localization,
    NullCounts,
    OrderTest,
    localization,
    order_test,
    permutation_null,
)
from triage_jax.characterize.outliers import Outlier, outliers
from triage_jax.characterize.regions import Regions, regions
from triage_jax.characterize.remedies import CLASSES, REMEDIES, RemedySums, remedy_sums
from triage_jax.characterize.sketch import GapSketch, gap_sketch
from triage_jax.characterize.stages import Stage, stages
from triage_jax.characterize.stream import Measures, Pool, measure
from triage_jax.characterize.study import Source, Study, StudyConfig, study
from triage_jax.characterize.tails import Segments, tail_segments, tail_threshold

__all__ = [
    "CLASSES",
    "REMEDIES",
    "Agreement",
    "Dilution",
    "Dump",
    "DumpError",
    "GapSketch",
    "GapSums",
    "Localization",
    "Measures",
    "NullCounts",
    "OrderTest",
    "Outlier",
    "Pool",
    "Regions",
    "RemedySums",
    "Segments",
    "Source",
    "Stage",
    "Study",
    "StudyConfig",
    "dilution",
    "dump_path",
    "gap_of",
    "gap_sketch",
    "gap_sums",
    "localization",
    "measure",
    "order_test",
    "outliers",
    "permutation_null",
    "read_dump",
    "regions",
    "remedy_sums",
    "sign_audit",
    "stages",
    "study",
    "tail_segments",
    "tail_threshold",
    "write_dump",
]
