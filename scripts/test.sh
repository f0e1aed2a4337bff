#!/usr/bin/env bash
# Set up .venv, check style and types, run the tests in tiers. CI runs exactly this.
#
#   bash scripts/test.sh                          everything, and what depends on the CPU's kernels once more with AVX2's
#   bash scripts/test.sh --tier unit              one tier: unit, ranks, ray, learning or engines (repeatable);
#                                                 engines installs vLLM and SGLang first
#   bash scripts/test.sh --isa AVX2               the learning and engine tests with the kernels of another CPU
#                                                 (repeatable): AVX512_CORE, AVX2, or COMPATIBLE, the plainest there are
#   bash scripts/test.sh tests/utils -k tracking  further arguments go to pytest; without engines, unless asked for
set -uo pipefail
cd "$(dirname "$0")/.."

tiers=()
levels=()
arguments=()
while [ $# -gt 0 ]; do
    case $1 in
        --tier)
            [ $# -ge 2 ] || { echo "--tier needs one of: unit ranks ray learning engines" >&2; exit 2; }
            case $2 in
                unit | ranks | ray | learning | engines) tiers+=("$2") ;;
                *) echo "--tier $2: no such tier (known: unit ranks ray learning engines)" >&2; exit 2 ;;
            esac
            shift 2
            ;;
        --isa)
            [ $# -ge 2 ] || { echo "--isa needs one of: AVX512_CORE AVX2 COMPATIBLE" >&2; exit 2; }
            case $2 in
                AVX512_CORE | AVX2 | COMPATIBLE) levels+=("$2") ;;
                *) echo "--isa $2: no such level (known: AVX512_CORE AVX2 COMPATIBLE)" >&2; exit 2 ;;
            esac
            shift 2
            ;;
        *) arguments+=("$1"); shift ;;
    esac
done
if [ ${#tiers[@]} = 0 ] && [ ${#levels[@]} = 0 ]; then
    tiers=(unit ranks ray learning)
    if [ ${#arguments[@]} = 0 ]; then tiers+=(engines) levels+=(AVX2); fi
fi

bash scripts/setup_env.sh --test || exit 1

# One thread a process: the tests fork ranks, and spinning threads of several ranks on few cores slow each other down.
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false WANDB_MODE=offline

# oneDNN, torch's own kernels and MKL choose their code by the CPU; each has a variable that makes it choose a lesser one.
use_level() {
    case $1 in
        AVX512_CORE) export ONEDNN_MAX_CPU_ISA=AVX512_CORE ;;
        AVX2) export ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ;;
        COMPATIBLE) export ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ;;
    esac
}

# A test that fits several tiers belongs to the slowest of them.
tests_of() {
    case $1 in
        unit) echo "not ranks and not ray and not learning and not vllm and not sglang" ;;
        ranks) echo "ranks and not ray and not learning and not vllm and not sglang" ;;
        ray) echo "ray and not learning and not vllm and not sglang" ;;
        learning) echo "learning and not vllm and not sglang" ;;
        vllm) echo "vllm" ;;
        sglang) echo "sglang and not vllm" ;;
        isa-*) echo "numerics and not ray and not sglang and not (learning and vllm)" ;;
    esac
}

# One tier and what it costs; a tier of which no test was asked for passes.
run_tier() (
    start=$SECONDS
    echo "== $1"
    use_level "${1#isa-}"
    part=()
    case $1 in
        *-[1-4]of4) part=(--part "${1: -4:1}/4") ;;
        isa-*) part=(--mentions numerics) ;;
        ranks | ray | learning | vllm | sglang) part=(--mentions "$1") ;;
    esac
    if [ "$1" = types ]; then
        .venv/bin/mypy
    else
        .venv/bin/python -m pytest -m "$(tests_of "${1%%-[1-4]of4}")" ${part[@]+"${part[@]}"} --durations=5 --durations-min=5 ${arguments[@]+"${arguments[@]}"}
    fi
    code=$?
    echo "== $1 took $((SECONDS - start)) s"
    if [ $code != 0 ] && [ $code != 5 ]; then touch "$notes/$1.failed"; fi
)

failed=()
.venv/bin/ruff check . || failed+=(ruff)
notes=$(mktemp -d)
trap 'rm -rf "$notes"' EXIT
.venv/bin/python scripts/show_cpu.py ${levels[@]+"${levels[@]}"}
queue=(types)
for tier in ${tiers[@]+"${tiers[@]}"}; do
    if [ "$tier" = unit ] && [ ${#arguments[@]} = 0 ]; then
        queue+=(unit-{1..4}of4)
    elif [ "$tier" != engines ]; then
        queue+=("$tier")
    elif bash scripts/install_engines.sh vllm sglang; then
        queue+=(vllm sglang)
    else
        failed+=("engines (not installed)")
    fi
done
for level in ${levels[@]+"${levels[@]}"}; do queue+=("isa-$level"); done

# A test process computes with one thread, so two workers take tiers off the queue, each as it has time; what the second
# one prints is shown at the end.
work() {
    for tier in "${queue[@]}"; do
        if mkdir "$notes/$tier.taken" 2>/dev/null; then run_tier "$tier"; fi
    done
}
if [ ${#queue[@]} -gt 1 ]; then
    mkdir "$notes/${queue[0]}.taken"
    work >"$notes/second" 2>&1 &
    run_tier "${queue[0]}"
    work
    wait
    cat "$notes/second"
elif [ ${#queue[@]} = 1 ]; then
    work
fi
for tier in ${queue[@]+"${queue[@]}"}; do
    if [ -e "$notes/$tier.failed" ]; then failed+=("$tier"); fi
done

if [ ${#failed[@]} != 0 ]; then
    echo "FAILED: ${failed[*]}" >&2
    exit 1
fi
echo "All passed: ruff ${queue[*]}"
