#!/usr/bin/env bash
# What a machine with a card can tell: the CUDA build, the tests that need a card, the benches of
# the store and of attention, and the step bench on a 1B Llama shape under two memory limits. Uses
# the python3 that is there (with torch, triton, transformers, pybind11, cmake, ninja, rich and
# matplotlib), no venv. About 12 minutes; each part by itself stays under 10.
# Results: $1 or build/gpu-check. Parts: $2 or all of "tests store attention step".
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="${1:-build/gpu-check}"
parts=" ${2:-tests store attention step} "
mkdir -p "$out"
export PYTHONUNBUFFERED=1
failures=0

note() { echo "== $* ($SECONDS s)"; }
attempt() { "$@" || { failures=$((failures + 1)); echo "FAILED: $*"; }; }
wanted() { [[ "$parts" == *" $1 "* ]] && note "$1"; }

note build
python3 -m pip install --no-build-isolation --no-deps -e . || exit 1

if wanted tests; then
    FAIL_WITHOUT_CUDA=1 attempt timeout 150 python3 -m pytest tests/test_cuda.py \
        tests/test_cuda_codec.py -q -x
    # Each shape of a kernel is compiled first: this takes processor time.
    FAIL_WITHOUT_CUDA=1 attempt timeout 240 python3 -m pytest tests/ops/test_fused.py \
        tests/ops/test_attention_cuda.py -q -k "not any_intervals"
fi

if wanted store; then
    attempt timeout 60 python3 -m bench store --device cuda --parts allocation,codec,copy \
        --json "$out/store.jsonl"
fi

if wanted attention; then
    attempt timeout 120 python3 -m bench attention --device cuda --lengths 4096,16384,65536 \
        --ways offload,sdpa-flash,sdpa-efficient --json "$out/attention.jsonl"
    attempt timeout 60 python3 -m bench attention --device cuda --lengths 16384 --groups 4 \
        --tiles "" --ways flex,flash-attn --json "$out/attention.jsonl"
fi

if wanted step; then
    for limit in 8GiB 16GiB; do
        note "step bench, limit $limit"
        attempt timeout 135 python3 -m bench step --device cuda --model llama --hidden 2048 \
            --layers 16 --heads 32 --kv-heads 8 --mlp 8192 --vocab 128256 --tokens 16384 \
            --dtype bfloat16 --lora 8 --steps 3 --memory-limit "$limit" \
            --methods plain,checkpoint,checkpoint+loss,save_on_cpu,offload-checkpoint,offload-tiled \
            --json "$out/step.jsonl" --plot "$out/step-$limit.png"
    done
fi

note "done, $failures failed"
exit "$((failures > 0))"
