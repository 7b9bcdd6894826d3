#!/usr/bin/env bash
# The small stability study: BF16, NVFP4 and TRIAGE, one seed, into runs/study_small. Interrupted, it goes on where it was.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bash scripts/setup.sh
out=runs/study_small
.venv/bin/python -m scripts.study.run --arms bf16 naive triage --regimes falling --seeds 0 \
  --results "$out/results" --runs "$out"
.venv/bin/python -m scripts.study.report --results "$out/results" --figures "$out" --pages
