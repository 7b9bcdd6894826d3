#!/usr/bin/env bash
# Prints a Python of the first of the given versions that is here and can make environments, or nothing:
# scripts/find_python.sh 3.12 3.13. Looks on PATH and under pyenv.
set -euo pipefail

usable() {
    "$2" -c "import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null
}

for minor in "$@"; do
    candidates=("$(command -v "python$minor" || true)")
    if command -v pyenv >/dev/null; then
        version=$(pyenv versions --bare | grep -E "^${minor//./\\.}\." | tail -n 1 || true)
        candidates+=("$(pyenv root)/versions/$version/bin/python")
    fi
    candidates+=("$(command -v python3 || true)")
    for candidate in "${candidates[@]}"; do
        if [ -n "$candidate" ] && usable "$minor" "$candidate"; then
            echo "$candidate"
            exit 0
        fi
    done
done
