#!/usr/bin/env bash
# Makes .aot: what compiling for GPUs that are not here takes (XLA's CUDA plugin of jaxlib's own version, Transformer
# Engine's Python package, `ptxas` where no toolkit has it). 0.4 GB, half a minute; does nothing when it is up to date.
# Only the tests look there, by PYTHONPATH: on a machine without a GPU the plugin complains wherever JAX may choose it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh

jax=$(.venv/bin/python -c 'from importlib.metadata import version; print(version("jax"))')
alone=("jax-cuda13-plugin==$jax" "jax-cuda13-pjrt==$jax" transformer-engine==2.20.2)
command -v ptxas >/dev/null || alone+=(nvidia-cuda-nvcc==13.0.88)
needed_by_transformer_engine=(pydantic==2.14.4 importlib-metadata==10.2.0)

stamp=.aot/.installed
wanted="${alone[*]} ${needed_by_transformer_engine[*]}"
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
rm -rf .aot
if [ -x .venv/bin/uv ]; then
    install=(.venv/bin/uv pip install --quiet --python .venv/bin/python --target .aot)
else
    install=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --target .aot)
fi
"${install[@]}" --no-deps "${alone[@]}"
"${install[@]}" "${needed_by_transformer_engine[@]}"
echo "$wanted" >"$stamp"
