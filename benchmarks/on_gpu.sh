#!/usr/bin/env bash
# Everything that needs a GPU, within nine minutes on one card, the important first: the tests of the Triton kernels on
# the real device, gradients at real sizes, times and memory of plain, shared and compiled, CUDA graphs, profiles, then
# other memory formats, precisions and methods. CSV and text files go to $OUT, or to benchmarks/results.
#
#     bash benchmarks/on_gpu.sh
#     bash benchmarks/on_gpu.sh --dry-run      the same parts with tiny sizes on the CPU, to see that the script works
#
# PYTHON names the interpreter (by default the first python3 or python), which needs torch only. Rows of other missing
# packages are left out, with a message.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-benchmarks/results}
python=${PYTHON:-$(command -v python3 || command -v python)}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
end=$((SECONDS + 530))
failed=()

part() { # part <name> <seconds at most> <command>...: within the time left for the whole script
    local name=$1 limit=$2 left=$((end - SECONDS)) start=$SECONDS
    shift 2
    if ((left < 10)); then
        echo "== $name: left out, no time left"
        failed+=("$name")
        return
    fi
    echo "== $name"
    timeout --foreground -k 10 $((limit < left ? limit : left)) "$@" || failed+=("$name")
    echo "== $name took $((SECONDS - start)) s"
}

measure() { # measure <seconds at most> <options of run.py>...
    part "run.py ${*:2}" "$1" "$python" benchmarks/run.py --folder "$out" --patience 150 "${@:2}"
}

profile() { # profile <seconds at most> <options of run.py>...
    measure "$@" --what profile
}

check() { # check <seconds at most> <options of run.py>...
    measure "$@" --what check --methods shared
}

kernel_tests() { # kernel_tests <file>...: in several processes, since most of their time is Triton's compiler's
    local file files=() shard pids=() logs count=$(($(nproc) / 2))
    for file in "$@"; do
        if [[ -e $file ]]; then files+=("$file"); else echo "$file does not exist: it is left out"; fi
    done
    if ! "$python" -c "import pytest" 2>/dev/null; then
        echo "pytest is not installed: the kernel tests are left out"
        failed+=("kernel tests")
        return
    fi
    count=$((count < 1 ? 1 : count > 8 ? 8 : count))
    logs=$(mktemp -d)
    echo "== kernel tests in $count processes: ${files[*]}"
    for ((shard = 1; shard <= count; shard++)); do
        timeout -k 10 60 "$python" -m pytest "${files[@]}" --shard "$shard/$count" -q -p no:cacheprovider \
            >"$logs/$shard" 2>&1 &
        pids+=($!)
    done
    for ((shard = 1; shard <= count; shard++)); do
        # A shard without a test ends with 5.
        wait "${pids[shard - 1]}" || (($? == 5)) || failed+=("kernel tests, shard $shard of $count")
        tail -n 15 "$logs/$shard"
    done
    rm -r "$logs"
}

tests=(tests/test_triton_kernels.py tests/test_triton_conv1x1.py tests/test_triton_conv3x3.py tests/test_triton_stem.py)
tests+=(tests/test_fused_stem.py tests/test_triton_launch.py tests/test_cuda_graph.py)
graphs=plain,shared,graph_plain,graph_shared
compiled=compile_plain,compile_shared
others=official,checkpoint,shared_keep,torchvision_efficient,timm_efficient
if [[ -z $python ]]; then
    echo "error: found neither python3 nor python: name an interpreter that has torch with PYTHON=..." >&2
    exit 1
elif [[ ${1:-} == --dry-run ]]; then
    tiny=(--device cpu --model densenet_bc_10_4 --batch_size 2 --image_size 8)
    part "first contact" 60 "$python" -m efficient_densenet.doctor --compare
    kernel_tests tests/test_triton_launch.py
    check 100 "${tiny[@]}" --precision float32,bf16
    measure 100 "${tiny[@]}" --rounds 1 --methods $graphs
    measure 100 "${tiny[@]}" --rounds 1 --methods plain --layout channels_last
    profile 100 "${tiny[@]}" --methods $graphs
elif [[ $# -gt 0 ]]; then
    echo "error: unknown option $1: there is --dry-run" >&2
    exit 2
elif ! "$python" -c "import torch; raise SystemExit(not torch.cuda.is_available())"; then
    echo "error: no CUDA device that $python's torch can use: on_gpu.sh needs one; --dry-run tries it out on the CPU" >&2
    exit 1
else
    big=(--device cuda --model densenet121 --batch_size 64)
    small=(--device cuda --model densenet_bc_100_12)
    unset TRITON_INTERPRET
    part "first contact" 100 "$python" -m efficient_densenet.doctor --compare
    kernel_tests "${tests[@]}"
    check 40 "${small[@]}" --batch_size 64 --precision float32,tf32,bf16
    measure 140 "${small[@]}" --batch_size 256 --precision tf32 --methods $graphs,$compiled
    measure 140 "${big[@]}" --precision tf32 --methods $graphs,$compiled
    measure 40 "${small[@]}" --batch_size 64 --precision tf32 --methods $graphs
    profile 25 "${small[@]}" --batch_size 64 --precision tf32 --methods $graphs
    profile 25 "${small[@]}" --batch_size 256 --precision tf32 --methods plain,shared
    profile 25 "${big[@]}" --precision tf32 --methods plain,shared
    measure 40 "${small[@]}" --batch_size 256 --precision tf32 --layout channels_last --methods plain,shared
    measure 40 "${big[@]}" --precision tf32 --layout channels_last --methods plain,shared
    check 40 "${big[@]}" --precision float32,tf32
    measure 40 "${small[@]}" --batch_size 256 --precision bf16 --methods plain,shared,graph_shared
    measure 40 "${big[@]}" --precision bf16 --methods plain,shared,graph_shared
    measure 60 "${small[@]}" --batch_size 256 --precision tf32 --methods $others
    measure 60 "${big[@]}" --precision tf32 --methods $others
fi
if ((${#failed[@]})); then
    printf 'did not succeed: %s\n' "${failed[@]}" >&2
    exit 1
fi
echo "all done in $SECONDS s: the results are in $out"
