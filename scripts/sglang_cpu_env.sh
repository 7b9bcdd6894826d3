#!/usr/bin/env bash
# Makes .venv-sglang: a real SGLang server for a machine without a GPU, from package registries alone (tests only).
# Does nothing when it is up to date. About 3 GB and 6 minutes; needs Linux on x86_64 and a Python 3.11.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

pins=scripts/sglang_cpu/requirements.txt
stamp=.venv-sglang/.installed
wanted=$(cksum <"$pins")
say() { echo "sglang_cpu_env: $*" >&2; }

if [ -x .venv-sglang/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
if [ "$(uname -sm)" != "Linux x86_64" ]; then
    say "the pinned wheels are for Linux on x86_64; this is $(uname -sm)"
    exit 1
fi

python=$(bash scripts/find_python.sh 3.11)
rm -rf .venv-sglang
if [ -n "$python" ]; then
    say "1/4 $("$python" --version), environment in .venv-sglang"
    "$python" -m venv .venv-sglang
else
    say "1/4 no Python 3.11 here; asking uv for one"
    bootstrap=$(mktemp -d)
    trap 'rm -rf "$bootstrap"' EXIT
    python3 -m venv "$bootstrap"
    "$bootstrap/bin/python" -m pip install --quiet --disable-pip-version-check uv
    "$bootstrap/bin/uv" venv --quiet --seed --python 3.11 .venv-sglang
fi

pip=(.venv-sglang/bin/python -m pip install --quiet --disable-pip-version-check)
# torch goes first and through pip: its CPU build may come from a place that only pip's configuration names.
torch=$(grep '^torch==' "$pins")
say "2/4 $torch, 200 MB"
if ! "${pip[@]}" --no-deps "$torch"; then
    say "no CPU build of torch ($torch) on the configured package index."
    say "Name one that has it (PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS) and run this again; a build for CUDA will not do."
    exit 1
fi

say "3/4 $(grep -c == "$pins") pinned packages, the longest part"
if "${pip[@]}" uv; then
    install=(.venv-sglang/bin/uv pip install --quiet --python .venv-sglang/bin/python)
else
    install=("${pip[@]}")
fi
"${install[@]}" --no-deps -r "$pins"

say "4/4 trying the imports"
SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=scripts/sglang_cpu/stand_ins .venv-sglang/bin/python - <<'PYTHON'
import sglang.launch_server
import sglang
import torch

print(f"sglang_cpu_env: sglang {sglang.__version__} on torch {torch.__version__} imports")
PYTHON
echo "$wanted" >"$stamp"
say "done; start a server with: scripts/serve_sglang.sh cpu MODEL"
