#!/usr/bin/env bash
# Makes .venv-peers: torch on the CPU, transformers, Model-Optimizer, compressed-tensors and torchao, for benchmarks and
# for the tests marked peers. Does nothing when it is up to date. About 1.5 GB and two minutes; needs a Python 3.11.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

pins=scripts/benchmark/peers/requirements.txt
stamp=.venv-peers/.installed
wanted=$(cksum <"$pins")
say() { echo "peers_env: $*" >&2; }

if [ -x .venv-peers/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

python=$(bash scripts/find_python.sh 3.11)
if [ -z "$python" ]; then
    say "no Python 3.11 on PATH or under pyenv"
    exit 1
fi
rm -rf .venv-peers
"$python" -m venv .venv-peers
pip=(.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check)
# torch goes first: its CPU build may come from a place that only pip's configuration names.
"${pip[@]}" "$(grep '^torch==' "$pins")"
"${pip[@]}" --no-deps -r "$pins"
.venv-peers/bin/python -c 'import compressed_tensors, modelopt, torch, torchao, transformers; print("peers_env: torch", torch.__version__)'
echo "$wanted" >"$stamp"
