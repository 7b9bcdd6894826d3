#!/usr/bin/env bash
# Sets up .venv if need be and runs the tests in two processes; arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
exec .venv/bin/python -m pytest -n 2 --dist loadgroup "$@"
