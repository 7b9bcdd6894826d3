#!/usr/bin/env bash
# Makes .venv with everything the core and its tests need; does nothing when it is up to date.
# Needs some Python 3.12 or 3.13 (on PATH or under pyenv), or any Python 3.9+ from which uv can fetch one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stamp=.venv/.installed
wanted=$(cat requirements.lock pyproject.toml | cksum)
if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

python=$(bash scripts/find_python.sh 3.12 3.13)
rm -rf .venv
if [ -n "$python" ]; then
    echo "setup: $("$python" --version), installing into .venv" >&2
    "$python" -m venv .venv
else
    echo "setup: no Python 3.12 or 3.13 here; asking uv for one" >&2
    bootstrap=$(mktemp -d)
    trap 'rm -rf "$bootstrap"' EXIT
    python3 -m venv "$bootstrap"
    "$bootstrap/bin/python" -m pip install --quiet --disable-pip-version-check uv
    "$bootstrap/bin/uv" venv --quiet --seed --python 3.12 .venv
fi

pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check)
if "${pip[@]}" uv; then
    install=(.venv/bin/uv pip install --quiet --python .venv/bin/python)
else
    install=("${pip[@]}")
fi
"${install[@]}" -r requirements.lock
"${install[@]}" --no-deps -e .
echo "$wanted" >"$stamp"
