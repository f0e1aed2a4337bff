#!/usr/bin/env bash
# Print the whole configuration of a run as one YAML file, which is a configuration itself.
#
#   bash scripts/generate_trainer_config.sh > my_run.yaml                      the defaults
#   bash scripts/generate_trainer_config.sh algorithm.adv_estimator=grpo       changed by options
#   bash scripts/generate_trainer_config.sh --config-path "$PWD" --config-name my_run trainer.seed=2
#
# Values that follow others are printed as they were found; --raw leaves ${...} in their place.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
python=python3
if [ -x "$here/.venv/bin/python" ]; then python=$here/.venv/bin/python; fi
resolve=--resolve words=()
for word in "$@"; do
    case $word in
        -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0"; exit 0 ;;
        --raw) resolve='' ;;
        *) words+=("$word") ;;
    esac
done
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m verl.trainer.main_ppo --cfg job $resolve ${words[@]+"${words[@]}"}
