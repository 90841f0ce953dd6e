#!/usr/bin/env bash
# Everything that needs a GPU, within nine minutes on one card, the important first: the comparison of every Triton kernel
# with PyTorch's operations, which compiles them in parallel; their tests on the real device; gradients at real sizes;
# times and memory of plain, shared and compiled, CUDA graphs, profiles; then other memory formats, precisions, methods.
#
#     bash benchmarks/on_gpu.sh
#     bash benchmarks/on_gpu.sh --dry-run      the same parts with tiny sizes on the CPU, to see that the script works
#
# CSV and text files, and what each part has printed, go to benchmarks/results. With OUT=<folder> that folder gets two
# files, made anew after each part: summary.txt, a line for each part, and on_gpu.tar.gz with all others.
# LIMIT is the most seconds of all parts together. PYTHON names the interpreter (by default the first python3 or python),
# which needs torch only. Rows of other missing packages are left out, with a message.
set -uo pipefail
cd "$(dirname "$0")/.."
results=benchmarks/results
if [[ -n ${OUT:-} ]]; then
    mkdir -p "$OUT"
    results=$(mktemp -d)
fi
logs=$results/on_gpu
mkdir -p "$logs"
: >"$logs/summary.txt"
python=${PYTHON:-$(command -v python3 || command -v python)}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
end=$((SECONDS + ${LIMIT:-530}))
failed=() parts=0

finish() { # finish <name> <what became of it>: a line of the summary, and the files that $OUT is given so far
    printf '%s: %s\n' "$1" "$2" | tee -a "$logs/summary.txt"
    if [[ -n ${OUT:-} ]]; then
        cp "$logs/summary.txt" "$OUT/summary.txt"
        tar -czf "$OUT/on_gpu.tar.gz.part" -C "$results" . && mv "$OUT/on_gpu.tar.gz.part" "$OUT/on_gpu.tar.gz"
    fi
}

part() { # part <name> <seconds at most> <command>...: within the time left for the whole script
    local name=$1 limit=$2 left=$((end - SECONDS)) start=$SECONDS status log
    shift 2
    if ((left < 10)); then
        failed+=("$name")
        finish "$name" "left out, no time left"
        return
    fi
    echo "== $name"
    log=$logs/$((++parts))_$(tr -cs '[:alnum:]\n' _ <<<"$name" | cut -c 1-100).txt
    timeout --foreground -k 10 $((limit < left ? limit : left)) "$@" 2>&1 | tee "$log"
    status=${PIPESTATUS[0]}
    case $status in
    0) finish "$name" "done in $((SECONDS - start)) s" ;;
    124 | 137)
        failed+=("$name")
        finish "$name" "killed after $((SECONDS - start)) s; its last line: $(tail -n 1 "$log")"
        ;;
    *)
        failed+=("$name")
        finish "$name" "failed with status $status after $((SECONDS - start)) s; its last line: $(tail -n 1 "$log")"
        ;;
    esac
}

measure() { # measure <seconds at most> <options of run.py>...
    part "run.py ${*:2}" "$1" "$python" benchmarks/run.py --folder "$results" --patience 150 "${@:2}"
}

profile() { # profile <seconds at most> <options of run.py>...
    measure "$@" --what profile
}

check() { # check <seconds at most> <options of run.py>...
    measure "$@" --what check --methods shared
}

kernel_tests() { # kernel_tests <file>...: in several processes, since most of their time is Triton's compiler's
    local file files=() shard pids=() log start=$SECONDS count=$(nproc)
    for file in "$@"; do
        if [[ -e $file ]]; then files+=("$file"); else echo "$file does not exist: it is left out"; fi
    done
    if ! "$python" -c "import pytest" 2>/dev/null; then
        failed+=("kernel tests")
        finish "kernel tests" "left out, since pytest is not installed"
        return
    fi
    count=$((count > 16 ? 16 : count))
    echo "== kernel tests in $count processes: ${files[*]}"
    for ((shard = 1; shard <= count; shard++)); do
        # Interrupted, pytest says which tests have failed and why.
        timeout -s INT -k 10 75 "$python" -m pytest "${files[@]}" --shard "$shard/$count" -v -p no:cacheprovider \
            >"$logs/kernel_tests_$shard.txt" 2>&1 &
        pids+=($!)
    done
    for ((shard = 1; shard <= count; shard++)); do
        # A shard without a test ends with 5.
        wait "${pids[shard - 1]}" || (($? == 5)) || failed+=("kernel tests, shard $shard of $count")
        log=$logs/kernel_tests_$shard.txt
        grep -E '^(FAILED|ERROR|E  )' "$log" | head -n 20
        finish "kernel tests, shard $shard of $count" "$(grep -c PASSED "$log") passed, $(grep -c FAILED "$log") lines of \
failures; its last line: $(tail -n 1 "$log")"
    done
    echo "== kernel tests took $((SECONDS - start)) s"
}

prepare() { # prepare <seconds at most> <model and batch size>...: compile their kernels, in processes side by side
    local limit=$1 each
    shift
    part "prepare $*" "$limit" bash -c 'for each in "${@:2}"; do
        "$1" -m efficient_densenet.doctor --model "${each%:*}" --batch_size "${each#*:}" & done
        for each in $(jobs -p); do wait "$each" || status=$?; done; exit ${status:-0}' _ "$python" "$@"
}

tests=(tests/test_triton_kernels.py tests/test_triton_stem.py)
tests+=(tests/test_fused_stem.py tests/test_triton_launch.py tests/test_cuda_graph.py)
graphs=plain,shared,graph_plain,graph_shared
compiled=compile_plain,compile_shared
others=official,checkpoint,shared_keep,torchvision_efficient
if [[ -z $python ]]; then
    echo "error: found neither python3 nor python: name an interpreter that has torch with PYTHON=..." >&2
    exit 1
elif [[ ${1:-} == --dry-run ]]; then
    tiny=(--device cpu --model densenet_bc_10_4 --batch_size 2 --image_size 8)
    part "first contact" 60 "$python" -m efficient_densenet.doctor --compare
    prepare 60 densenet_bc_100_12:1
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
    part "first contact in TF32, cold where Triton's cache is empty" 100 "$python" -c "
import time, torch
from efficient_densenet.kernels import first_contact
start = time.time()
print(first_contact.verdict(0, torch.float32, 'tf32', activation='relu'), f'{time.time() - start:.1f} s')"
    part "first contact" 100 "$python" -m efficient_densenet.doctor --compare
    kernel_tests "${tests[@]}"
    check 90 "${small[@]}" --batch_size 64 --precision tf32,bf16,float32
    measure 90 "${small[@]}" --batch_size 256 --precision tf32 --methods $graphs
    measure 90 "${big[@]}" --precision tf32 --methods $graphs
    profile 40 "${small[@]}" --batch_size 256 --precision tf32 --methods plain,shared
    profile 40 "${big[@]}" --precision tf32 --methods plain,shared
    profile 60 "${small[@]}" --batch_size 64 --precision tf32 --methods $graphs
    part "tiles" 120 "$python" benchmarks/gpu_tiles.py
    measure 40 "${small[@]}" --batch_size 64 --precision tf32 --methods $graphs
    measure 40 "${small[@]}" --batch_size 256 --precision tf32 --layout channels_last --methods plain,shared
    measure 40 "${big[@]}" --precision tf32 --layout channels_last --methods plain,shared
    check 60 "${big[@]}" --precision tf32,float32
    measure 40 "${small[@]}" --batch_size 256 --precision bf16 --methods plain,shared,graph_shared
    measure 40 "${big[@]}" --precision bf16 --methods plain,shared,graph_shared
    measure 140 "${small[@]}" --batch_size 256 --precision tf32 --methods $compiled
    measure 140 "${big[@]}" --precision tf32 --methods $compiled
    measure 60 "${small[@]}" --batch_size 256 --precision tf32 --methods $others
    measure 60 "${big[@]}" --precision tf32 --methods $others
fi
if ((${#failed[@]})); then
    printf 'did not succeed: %s\n' "${failed[@]}" >&2
    [[ -n ${OUT:-} ]] || echo "what each part has printed is in $logs" >&2
    exit 1
fi
echo "all done in $SECONDS s: the results are in ${OUT:-$results}"
