#!/usr/bin/env bash
# Starts an SGLang server as the rollout engine of a training run; --help says how.
set -euo pipefail

usage() {
    cat <<'TEXT'
serve_sglang.sh cpu MODEL [OPTIONS] [SGLANG FLAGS]        the CPU test server (scripts/sglang_cpu_env.sh makes it)
serve_sglang.sh blackwell MODEL [OPTIONS] [SGLANG FLAGS]  NVFP4 on Blackwell GPUs
serve_sglang.sh stop [--port PORT]                        ends a server started here, letting running requests finish

MODEL is a Hugging Face directory, or `quickstart`. Returns when the server answers /ready; it then runs on in the
background. Flags not named below go to SGLang as they are, and win over the ones set here.

  --host ADDRESS    default 127.0.0.1: only this machine. Another address needs both keys below, since the weight
                    routes load files for whoever may call them
  --port PORT       default 30000
  --run-dir DIR     for PORT.pid and PORT.log; default build/sglang in the checkout
  --wait SECONDS    how long /ready may take; default 900

Environment
  SGLANG_API_KEY    key that requests must carry (Authorization: Bearer ...); unset: none
  SGLANG_ADMIN_KEY  key of the weight, pause and abort routes; unset: none
                    Both reach SGLang through a private file that is gone when the server is ready, never through the
                    command line, where every user of the machine could read them. SGLang 0.5.23 itself writes both
                    into its log, which is readable by you alone, and shows both to whoever may ask /server_info:
                    the API key opens the admin key there.
  SGLANG_PYTHON     blackwell: the Python that has SGLang installed; default python3

blackwell has never been run by the authors: no such GPU was at hand. Its settings are read from the sources of
SGLang 0.5.23 and from published parity recipes. MODEL is a ModelOpt NVFP4 checkpoint. Set are: NVFP4 weights and
activations (modelopt_fp4), one activation scale per token, the exact quantiser instead of the fast one, BF16 KV
cache and, for a mixture of experts, the routed TRT-LLM runner and the routes in every answer (for
rollout.replay_routing). SGLang 0.5.23 has per-token scales for experts only: dense layers use the checkpoint's
input_scale. Older GPUs would serve such a checkpoint with BF16 activations (Marlin), so anything below compute
capability 10.0 is refused.
For seeds that are honoured add: --enable-deterministic-inference --attention-backend flashinfer
TEXT
}

fail() { echo "serve_sglang: $*" >&2; exit 1; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
host=127.0.0.1 port=30000 run_dir=$root/build/sglang patience=900 extra=()

parse_options() {
    while [ $# -gt 0 ]; do
        case $1 in
            --host | --port | --run-dir | --wait)
                [ $# -gt 1 ] || fail "$1 needs a value"
                case $1 in
                    --host) host=$2 ;;
                    --port) port=$2 ;;
                    --run-dir) run_dir=$2 ;;
                    --wait) patience=$2 ;;
                esac
                shift 2
                ;;
            --api-key* | --admin-api-key*)
                fail "keys are not taken from the command line; set SGLANG_API_KEY or SGLANG_ADMIN_KEY" ;;
            *) extra+=("$1"); shift ;;
        esac
    done
    [[ $port =~ ^[0-9]+$ ]] || fail "--port is '$port'; accepted: a number"
    [[ $patience =~ ^[0-9]+$ ]] || fail "--wait is '$patience'; accepted: whole seconds"
    pid_file=$run_dir/$port.pid log=$run_dir/$port.log
}

# Process id of the server on $port if it was started here and still lives. A reused id must not be signalled.
running() {
    local pid
    pid=$(cat "$pid_file" 2>/dev/null) || return 1
    tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -q sglang && echo "$pid"
}

ready() {
    local status=""
    { exec 3<>"/dev/tcp/$host/$port"; } 2>/dev/null || return 1
    printf 'GET /ready HTTP/1.0\r\n\r\n' >&3
    read -r -t 5 status <&3 || true
    exec 3>&-
    [[ $status == *" 200 "* ]]
}

stop() {
    local pid waited=0
    pid=$(running) || fail "no server of ours on port $port ($pid_file)"
    kill -TERM "$pid"
    while kill -0 "$pid" 2>/dev/null && [ "$waited" -lt 60 ]; do sleep 1; waited=$((waited + 1)); done
    kill -KILL -- "-$pid" 2>/dev/null || true # its own session: takes workers along that outlive it
    rm -f "$pid_file"
}

# SGLang's flags from a file: an argument would be visible to everybody in the process list.
key_file() {
    local file name key
    file=$(mktemp "$run_dir/keys.XXXXXX.yaml")
    for name in api-key:SGLANG_API_KEY admin-api-key:SGLANG_ADMIN_KEY; do
        key=${name#*:}
        [ -z "${!key:-}" ] || printf "%s: '%s'\n" "${name%%:*}" "${!key//\'/\'\'}" >>"$file"
    done
    echo "$file"
}

cpu_settings() {
    python=$root/.venv-sglang/bin/python
    [ -x "$python" ] || fail "no .venv-sglang; make it with scripts/sglang_cpu_env.sh"
    export SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=$root/scripts/sglang_cpu/stand_ins OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    flags=(
        --device cpu --attention-backend torch_native --grammar-backend none --dtype bfloat16
        --mem-fraction-static 0.05 --max-total-tokens 16384 --max-running-requests 64
        --random-seed 1 --sleep-on-idle
    )
}

blackwell_settings() {
    local capability
    python=${SGLANG_PYTHON:-python3}
    "$python" -c 'import sglang' 2>/dev/null || fail "$python has no sglang; name one that has in SGLANG_PYTHON"
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -n | head -n 1)
    [ "${capability%%.*}" -ge 10 ] 2>/dev/null ||
        fail "NVFP4 activations need Blackwell GPUs (compute capability 10.0 or higher); found '${capability:-no GPU}'"
    export SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION=1
    export FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH=1 TRTLLM_DISABLE_FP4_QUANT_FAST_MATH=1
    flags=(--quantization modelopt_fp4 --dtype bfloat16 --kv-cache-dtype bf16)
    if grep -q '"model_type": *"[a-z0-9_]*moe"' "$model/config.json"; then
        flags+=(--moe-runner-backend flashinfer_trtllm_routed --enable-return-routed-experts)
    fi
}

serve() {
    local mode=$1 waited=0 pid keys
    [ "$model" = quickstart ] && model=$root/triage_jax/assets/quickstart
    [ -f "$model/config.json" ] || fail "$model holds no config.json; MODEL is a Hugging Face directory, or quickstart"
    if [[ $host != 127.* && $host != localhost ]] && [[ -z ${SGLANG_API_KEY:-} || -z ${SGLANG_ADMIN_KEY:-} ]]; then
        fail "--host $host is open to other machines; set SGLANG_API_KEY and SGLANG_ADMIN_KEY first"
    fi
    umask 077
    mkdir -p "$run_dir"
    running >/dev/null && fail "port $port already has a server of ours ($pid_file); stop it first"
    "${mode}_settings"
    export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
    keys=$(key_file)
    [ ! -s "$keys" ] || extra+=(--config "$keys")
    env -u SGLANG_API_KEY -u SGLANG_ADMIN_KEY setsid "$python" -m sglang.launch_server --model-path "$model" \
        --host "$host" --port "$port" "${flags[@]}" "${extra[@]}" >"$log" 2>&1 </dev/null &
    pid=$!
    echo "$pid" >"$pid_file"
    trap 'kill -TERM -- "-$pid" 2>/dev/null || true; rm -f "$pid_file" "$keys"' EXIT
    echo "serve_sglang: starting on http://$host:$port, pid $pid, log $log" >&2
    until ready; do
        if ! kill -0 "$pid" 2>/dev/null; then
            tail -n 25 "$log" >&2
            fail "the server ended before it was ready; its log: $log"
        fi
        [ "$waited" -lt "$patience" ] || fail "not ready after $patience s; its log: $log"
        sleep 1
        waited=$((waited + 1))
    done
    rm -f "$keys"
    trap - EXIT
    echo "serve_sglang: ready after $waited s" >&2
}

case ${1:-} in
    -h | --help) usage ;;
    stop) parse_options "${@:2}"; stop ;;
    cpu | blackwell)
        [ $# -gt 1 ] && [[ $2 != -* ]] || fail "$1 needs a MODEL; see --help"
        model=$2
        parse_options "${@:3}"
        serve "$1"
        ;;
    *) usage >&2; exit 2 ;;
esac
