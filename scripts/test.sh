#!/usr/bin/env bash
# Sets up .venv if need be and runs the tests in two processes, those marked slow aside (-m slow); arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
if [ -f .aot/.installed ]; then
    # The compiler for GPUs that are not here, and Transformer Engine: see scripts/aot_packages.sh.
    export PYTHONPATH="$PWD/.aot${PYTHONPATH:+:$PYTHONPATH}" PATH="$PATH:$PWD/.aot/nvidia/cu13/bin" JAX_PLATFORMS=cpu
fi
exec .venv/bin/python -m pytest -n 2 --dist loadgroup --max-worker-restart 0 -m "not slow" "$@"
