#!/usr/bin/env bash
# Everything that needs a GPU, on one card. Without names, the parts from `selftest` to `tf32` run in this order within
# eight minutes; one that there is no time left for can be named in the next call.
#
#     bash benchmarks/on_gpu.sh                        selftest tests converge devices users bf16 tf32
#     bash benchmarks/on_gpu.sh fp16 tiles             these parts alone
#     bash benchmarks/on_gpu.sh --dry-run [part]...    what it would run; every command is imported and parsed
#
#     selftest  every Triton kernel is compared with PyTorch's operations: cold where Triton's cache is empty, then warm;
#               where one is refused, nothing is measured afterwards
#     tests     the kernels' tests, in a process for each core
#     converge  DenseNet-BC-100-12 on the images in DATA (by default the digits) in three epochs, by each engine
#     devices   the table that this project began with, on one card, and on two where there are two
#     users     X-rays, volumes and FC-DenseNets in float32, bf16 and fp16: what PyTorch reserves on 8 and 16 GB
#     bf16      under AMP in both memory formats, with torchvision's checkpointing and the portable kernels; so is fp16
#     tf32      host's and device's time of a step: plain, shared, and both as CUDA graphs
#     compiled  plain under torch.compile, by default and with reduce-overhead
#     check     gradients of real sizes beside plain in float64
#     tiles     the time of each convolution with each of several tiles
#     train     DenseNet-BC-100-12 on the images in DATA (by default cifar10_jpeg) in EPOCHS epochs (90: about 8 minutes)
#
# CSV and text files, and what each part has printed, go to benchmarks/results. With OUT=<folder> that folder gets two
# files, made anew after each part: summary.txt, a line for each part, and on_gpu.tar.gz with all others.
# LIMIT is the most seconds of all parts together. PYTHON names the interpreter (by default the first python3 or python),
# which needs torch only. Rows of other missing packages are left out, with a message.
set -uo pipefail
cd "$(dirname "$0")/.."
dry_run=
if [[ ${1:-} == --dry-run ]]; then
    dry_run=yes
    shift
fi
limit=${LIMIT:-$(($# ? 570 : 480))}
[[ $# -gt 0 ]] || set -- selftest tests converge devices users bf16 tf32
known=" selftest tests converge devices users bf16 tf32 fp16 compiled check tiles train "
for name in "$@"; do
    if [[ $known != *" $name "* ]]; then
        echo "error: unknown part or option $name: there are --dry-run and$known" >&2
        exit 2
    fi
done
python=${PYTHON:-$(command -v python3 || command -v python)}
if [[ -z $python ]]; then
    echo "error: found neither python3 nor python: name an interpreter that has torch with PYTHON=..." >&2
    exit 1
elif [[ -z $dry_run ]] && ! "$python" -c "import torch; raise SystemExit(not torch.cuda.is_available())"; then
    echo "error: no CUDA device that $python's torch can use: on_gpu.sh needs one; --dry-run shows what it would do" >&2
    exit 1
fi
results=benchmarks/results
if [[ -n ${OUT:-}$dry_run ]]; then
    results=$(mktemp -d)
fi
logs=$results/on_gpu
mkdir -p "$logs" ${OUT:+"$OUT"}
: >"$logs/summary.txt"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
unset TRITON_INTERPRET
end=$((SECONDS + limit))
failed=() num_parts=0

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
    echo "== $name${dry_run:+, at most $limit s: $*}"
    if [[ -n $dry_run ]]; then
        while [[ $1 != "$python" ]]; do shift; done
        case "$2 $3" in
        "benchmarks/run.py "*) set -- "$@" --what plan ;;
        "-m pytest") set -- "$@" --collect-only -qq ;;
        *) set -- "$python" benchmarks/options.py "${@:2}" ;;
        esac
    fi
    log=$logs/$((++num_parts))_$(tr -cs '[:alnum:]\n' _ <<<"$name" | cut -c 1-100).txt
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

kernel_tests() { # kernel_tests <file>...: in several processes, since most of their time is Triton's compiler's
    local shard pids=() log start=$SECONDS count=$(nproc)
    if [[ -n $dry_run ]]; then
        part "kernel tests" 95 "$python" -m pytest "$@"
        return
    elif ! "$python" -c "import pytest" 2>/dev/null; then
        failed+=("kernel tests")
        finish "kernel tests" "left out, since pytest is not installed"
        return
    fi
    count=$((count > 16 ? 16 : count))
    echo "== kernel tests in $count processes: $*"
    for ((shard = 1; shard <= count; shard++)); do
        # Interrupted, pytest says which tests have failed and why.
        timeout -s INT -k 10 95 "$python" -m pytest "$@" --shard "$shard/$count" -v -p no:cacheprovider \
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

under_amp() { # under_amp <bf16 or fp16>: each model in both memory formats
    local model
    for model in "${small[*]}" "${big[*]}"; do
        measure 200 $model --precision "$1" --layout contiguous,channels_last --rounds 5 \
            --methods $graphs,torchvision_efficient,shared_portable
    done
}

run_part() {
    case $1 in
    selftest)
        for state in cold warm; do
            part "self-test, $state" 100 "$python" -m efficient_densenet.doctor --compare
        done
        if grep -qsE "since (of )?the Triton kernels" "$logs"/*self_test*.txt; then
            refused=yes
        fi
        ;;
    tests)
        kernel_tests tests/test_triton_kernels.py tests/test_triton_stem.py \
            tests/test_triton_launch.py tests/test_training.py
        ;;
    users)
        measure 200 --device cuda --sweep users --card_gb 8,16 --precision float32,bf16,fp16 --rounds 1
        ;;
    converge)
        for engine in plain official checkpoint shared; do
            part "converge, $engine" 60 "$python" demos/cp_demo.py ${DATA:+--data "$DATA"} --engine $engine \
                --n_epochs 3 --depth 100 --seed 0 --save "$results/converge/$engine" --overwrite True
        done
        ;;
    devices)
        measure 90 --device cuda --sweep devices --batch_size 4,256 --rounds 3
        ;;
    tf32)
        measure 150 "${small[@]}" --batch_size 64,256 --precision tf32 --methods $graphs
        measure 90 "${big[@]}" --precision tf32 --methods $graphs
        ;;
    bf16 | fp16) under_amp "$1" ;;
    compiled)
        measure 300 "${small[@]}" --precision bf16 --methods compile_plain,compile_plain_reduce_overhead --rounds 5 \
            --patience 190 --compiler_cache "$(mktemp -d)"
        ;;
    check)
        measure 90 "${small[@]}" --what check --methods shared --precision tf32,bf16,float32
        measure 60 "${big[@]}" --what check --methods shared --precision tf32,float32
        ;;
    tiles)
        part "tiles in bf16" 240 "$python" benchmarks/gpu_tiles.py --precision bf16
        part "tiles in TF32" 240 "$python" benchmarks/gpu_tiles.py --precision tf32 --only conv3x3
        ;;
    train)
        part train 560 "$python" demos/cp_demo.py --data "${DATA:-cifar10_jpeg}" --save "$results/train" \
            --n_epochs "${EPOCHS:-90}" --batch_size 256 --lr 0.2 --weight_decay 5e-4 --recipe one_cycle --amp bf16
        ;;
    esac
}

graphs=plain,shared,graph_plain,graph_shared
big=(--device cuda --model densenet121 --batch_size 64)
small=(--device cuda --model densenet_bc_100_12 --batch_size 256)
refused=
for name in "$@"; do
    if [[ -n $refused && $name != tests ]]; then
        failed+=("$name")
        finish "$name" "left out, since the self-test refused kernels: PyTorch's operations would be measured"
    else
        run_part "$name"
    fi
done
if ((${#failed[@]})); then
    printf 'did not succeed: %s\n' "${failed[@]}" >&2
    [[ -n ${OUT:-} ]] || echo "what each part has printed is in $logs" >&2
    exit 1
fi
echo "all done in $SECONDS s: ${dry_run:+nothing was run; }the results are in ${OUT:-$results}"
