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

usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; }

find_python() {
    local minor candidate version
    for minor in 3.12 3.13; do
        candidate=$(command -v "python$minor" || true)
        if [ -n "$candidate" ] && usable "$candidate"; then echo "$candidate"; return; fi
        if command -v pyenv >/dev/null; then
            version=$(pyenv versions --bare | grep -E "^${minor//./\\.}\." | tail -n 1 || true)
            candidate="$(pyenv root)/versions/$version/bin/python"
            if [ -n "$version" ] && usable "$candidate"; then echo "$candidate"; return; fi
        fi
    done
    candidate=$(command -v python3 || true)
    if [ -n "$candidate" ] && usable "$candidate"; then echo "$candidate"; fi
}

python=$(find_python)
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
