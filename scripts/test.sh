#!/usr/bin/env bash
# Set up .venv, check the style, run the tests in tiers. CI runs exactly this.
#
#   bash scripts/test.sh                          everything
#   bash scripts/test.sh --tier unit              one tier: unit, ranks, ray, learning or engines (repeatable);
#                                                 engines installs vLLM and SGLang first
#   bash scripts/test.sh tests/utils -k tracking  further arguments go to pytest; without engines, unless asked for
set -uo pipefail
cd "$(dirname "$0")/.."

tiers=()
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
        *) arguments+=("$1"); shift ;;
    esac
done
if [ ${#tiers[@]} = 0 ]; then
    tiers=(unit ranks ray learning)
    if [ ${#arguments[@]} = 0 ]; then tiers+=(engines); fi
fi

bash scripts/setup_env.sh --test || exit 1

# One thread a process: the tests fork ranks, and spinning threads of several ranks on few cores slow each other down.
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false WANDB_MODE=offline

# A test that fits several tiers belongs to the slowest of them.
tests_of() {
    case $1 in
        unit) echo "not ranks and not ray and not learning and not vllm and not sglang" ;;
        ranks) echo "ranks and not ray and not learning and not vllm and not sglang" ;;
        ray) echo "ray and not learning and not vllm and not sglang" ;;
        learning) echo "learning and not vllm and not sglang" ;;
        vllm) echo "vllm" ;;
        sglang) echo "sglang and not vllm" ;;
    esac
}

# One tier and what it costs; a tier of which no test was asked for passes.
run_tier() {
    local start=$SECONDS code
    echo "== $1"
    .venv/bin/python -m pytest -m "$(tests_of "$1")" --durations=5 --durations-min=5 ${arguments[@]+"${arguments[@]}"}
    code=$?
    echo "== $1 took $((SECONDS - start)) s"
    if [ $code != 0 ] && [ $code != 5 ]; then touch "$notes/$1.failed"; fi
}

failed=()
.venv/bin/ruff check . || failed+=(ruff)
notes=$(mktemp -d)
trap 'rm -rf "$notes"' EXIT
first=() beside=()
for tier in "${tiers[@]}"; do
    if [ "$tier" = unit ] || [ "$tier" = ranks ]; then
        first+=("$tier")
    elif [ "$tier" != engines ]; then
        beside+=("$tier")
    elif bash scripts/install_engines.sh vllm sglang; then
        beside+=(vllm sglang)
    else
        failed+=("engines (not installed)")
    fi
done
run_tiers() { for tier in "$@"; do run_tier "$tier"; done; }
# A test process computes with one thread, so two halves of the tests run side by side; the second is shown at the end.
if [ ${#first[@]} = 0 ]; then
    run_tiers ${beside[@]+"${beside[@]}"}
else
    run_tiers ${beside[@]+"${beside[@]}"} >"$notes/beside" 2>&1 &
    run_tiers "${first[@]}"
    wait
    cat "$notes/beside"
fi
for tier in ${first[@]+"${first[@]}"} ${beside[@]+"${beside[@]}"}; do
    if [ -e "$notes/$tier.failed" ]; then failed+=("$tier"); fi
done

if [ ${#failed[@]} != 0 ]; then
    echo "FAILED: ${failed[*]}" >&2
    exit 1
fi
echo "All passed: ruff ${tiers[*]}"
