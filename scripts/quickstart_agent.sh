#!/usr/bin/env bash
# From a clean checkout to an agent that has learned to cross a frozen lake, on a CPU in minutes, from random weights.
#
#   bash scripts/quickstart_agent.sh                    GRPO; success before and after, a trajectory before and after
#   bash scripts/quickstart_agent.sh --estimator gigpo  GiGPO, which also compares turns that began on the same map
#   bash scripts/quickstart_agent.sh --blind            the control: no map to read, and so half of the lakes at most
#   bash scripts/quickstart_agent.sh --steps 50         fewer steps
#   bash scripts/quickstart_agent.sh key=value ...      any option of main_agentic
#   bash scripts/quickstart_agent.sh --dry-run          show the command and do nothing
set -euo pipefail
cd "$(dirname "$0")/.."

estimator=grpo steps=120 dry_run=0
overrides=(trainer.controller=local actor_rollout_ref.actor.strategy=local)
usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' scripts/quickstart_agent.sh; }
value_of() { [ $# -ge 2 ] || { echo "quickstart_agent.sh: $1 needs a value" >&2; exit 2; }; echo "$2"; }
while [ $# -gt 0 ]; do
    case $1 in
        --estimator) estimator=$(value_of "$@"); shift 2 ;;
        --blind) overrides+=(env.registry.FrozenLake.kwargs.show_map=false); shift ;;
        --steps) steps=$(value_of "$@"); shift 2 ;;
        --dry-run) dry_run=1; shift ;;
        -h | --help) usage; exit 0 ;;
        -*) echo "quickstart_agent.sh: unknown option $1" >&2; usage >&2; exit 2 ;;
        *=*) overrides+=("$1"); shift ;;
        *) echo "quickstart_agent.sh: $1 is neither an option nor key=value" >&2; usage >&2; exit 2 ;;
    esac
done
case $steps in
    *[!0-9]* | 0 | '') echo "quickstart_agent.sh: --steps $steps is no positive number" >&2; exit 2 ;;
esac

export MODEL=models/tiny-qwen2-80k ESTIMATOR=$estimator STEPS=$steps
export RUN=${RUN:-runs/quickstart-agent-$(date +%Y%m%d-%H%M%S)}
command=(bash examples/agentic/run_frozen_lake_tiny_cpu.sh "${overrides[@]}")
if [ $dry_run = 1 ]; then
    echo "MODEL=$MODEL ESTIMATOR=$ESTIMATOR STEPS=$STEPS RUN=$RUN ${command[*]}"
    exit 0
fi

echo "== 1/3 environment"
bash scripts/setup_env.sh
export PATH="$PWD/.venv/bin:$PATH" TOKENIZERS_PARALLELISM=false
echo "== 2/3 model (random weights)"
[ -f "$MODEL/model.safetensors" ] || python3 -m verl.utils.tiny_model "$MODEL" --size tiny
echo "== 3/3 training (results in $RUN)"
"${command[@]}"
echo
echo "== one lake before training"
python3 -m verl trajectories "$RUN/validation" --step 0 --index 0
echo
echo "== the same lake after training"
python3 -m verl trajectories "$RUN/validation" --step "$STEPS" --index 0
