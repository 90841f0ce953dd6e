#!/usr/bin/env bash
# Everything that needs a GPU, within nine minutes on one card: the tests of the Triton kernels on the real device, then
# the whole matrix of times and memory, the important first. CSV files go to $OUT, or to benchmarks/results.
#
#     bash benchmarks/on_gpu.sh
#     bash benchmarks/on_gpu.sh --dry-run      a tiny matrix on the CPU, to see that the script works
#
# PYTHON names the interpreter (default: python), which needs torch only. Rows of other missing packages are left out,
# with a message.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-benchmarks/results}
python=${PYTHON:-python}
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

kernel_tests() {
    local file=tests/test_triton_kernels.py
    if [[ ! -e $file ]]; then
        echo "$file does not exist: no kernel tests to run"
    elif ! "$python" -c "import pytest" 2>/dev/null; then
        echo "pytest is not installed: the kernel tests in $file are left out"
        failed+=("kernel tests")
    else
        part "kernel tests" 100 env -u TRITON_INTERPRET "$python" -m pytest "$file" -q -p no:cacheprovider
    fi
}

ours=plain,official,checkpoint,shared,shared_keep
efficient=torchvision_efficient,timm_efficient
compiled=compile_plain,compile_shared
if [[ ${1:-} == --dry-run ]]; then
    measure 100 --device cpu --model densenet_bc_10_4 --batch_size 2 --image_size 8 --rounds 1 --methods plain,shared
elif [[ $# -gt 0 ]]; then
    echo "error: unknown option $1: there is --dry-run" >&2
    exit 2
elif ! "$python" -c "import torch; raise SystemExit(not torch.cuda.is_available())"; then
    echo "error: no CUDA device that $python's torch can use: on_gpu.sh needs one; --dry-run tries it out on the CPU" >&2
    exit 1
else
    kernel_tests
    big=(--device cuda --model densenet121 --batch_size 64)
    small=(--device cuda --model densenet_bc_100_12)
    measure 200 "${small[@]}" --batch_size 256 --precision tf32 --methods $ours,$efficient,$compiled
    measure 170 "${big[@]}" --precision tf32 --methods $ours,$efficient,$compiled
    measure 90 "${small[@]}" --batch_size 256 --precision bf16 --methods $ours
    measure 90 "${big[@]}" --precision bf16 --methods $ours
    measure 60 "${small[@]}" --batch_size 64 --precision tf32 --methods $ours
    measure 90 "${small[@]}" --batch_size 256 --precision bf16 --methods plain,$compiled
    measure 90 "${small[@]}" --batch_size 64 --precision bf16 --methods $ours
fi
if ((${#failed[@]})); then
    printf 'did not succeed: %s\n' "${failed[@]}" >&2
    exit 1
fi
echo "all done in $SECONDS s: the results are in $out"
