#!/usr/bin/env bash
# The small stability study: BF16, NVFP4, NVFP4 with the Gate alone, and TRIAGE, one seed, into runs/study_small; two trials
# at a time where there are two cores. Interrupted, it goes on where it was.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bash scripts/setup.sh
out=runs/study_small
queue=(.venv/bin/python -m scripts.study.run --arms bf16 naive gate triage --regimes falling --seeds 0
    --results "$out/results" --runs "$out")
read -ra cores <<<"$(.venv/bin/python -c 'import os; print(*sorted(os.sched_getaffinity(0))[:2])')"
queues=()
trap 'kill "${queues[@]}" 2>/dev/null; wait; exit 1' INT TERM
for core in "${cores[@]}"; do
    "${queue[@]}" --core "$core" &
    queues+=("$!")
done
for one in "${queues[@]}"; do
    wait "$one"
done
.venv/bin/python -m scripts.study.report --results "$out/results" --figures "$out" --pages
