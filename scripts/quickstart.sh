#!/usr/bin/env bash
# Sets up .venv if need be and trains the embedded default; arguments go to `python -m triage_jax.train`.
set -euo pipefail
root="$(dirname "${BASH_SOURCE[0]}")/.."
bash "$root/scripts/setup.sh"
exec "$root/.venv/bin/python" -m triage_jax.train "$@"
