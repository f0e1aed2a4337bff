#!/usr/bin/env bash
# From a clean checkout to a model that has learned something, in one command.
#
#   bash scripts/quickstart.sh                       SmolLM2-135M learns one-digit addition on a CPU
#   bash scripts/quickstart.sh --task mul1           or: max3, even; digits takes a tiny random model and seconds
#   bash scripts/quickstart.sh --controller local    without Ray
#   bash scripts/quickstart.sh --rollout vllm        responses from vLLM, which is installed first; or: sglang
#   bash scripts/quickstart.sh --task mul1 --sft     taught by examples first, then by reinforcement
#   bash scripts/quickstart.sh --task gsm8k --sft    the same on word problems, half an hour or more; DATA=FOLDER: files at hand
#   bash scripts/quickstart.sh --steps 50            more steps
#   bash scripts/quickstart.sh key=value ...         any option of main_ppo
#   bash scripts/quickstart.sh --dry-run             show the command and do nothing
set -euo pipefail
cd "$(dirname "$0")/.."

task=add1 controller=ray rollout=hf steps='' sft=0 dry_run=0
overrides=()
usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' scripts/quickstart.sh; }
value_of() { [ $# -ge 2 ] || { echo "quickstart.sh: $1 needs a value" >&2; exit 2; }; echo "$2"; }
while [ $# -gt 0 ]; do
    case $1 in
        --task) task=$(value_of "$@"); shift 2 ;;
        --controller) controller=$(value_of "$@"); shift 2 ;;
        --rollout) rollout=$(value_of "$@"); shift 2 ;;
        --steps) steps=$(value_of "$@"); shift 2 ;;
        --sft) sft=1; shift ;;
        --dry-run) dry_run=1; shift ;;
        -h | --help) usage; exit 0 ;;
        -*) echo "quickstart.sh: unknown option $1" >&2; usage >&2; exit 2 ;;
        *=*) overrides+=("$1"); shift ;;
        *) echo "quickstart.sh: $1 is neither an option nor key=value" >&2; usage >&2; exit 2 ;;
    esac
done

case $task in
    add1 | mul1 | max3 | even) recipe=run_arithmetic_smollm2_cpu.sh model=models/SmolLM2-135M-Instruct ;;
    gsm8k) recipe=run_gsm8k_smollm2_cpu.sh model=models/SmolLM2-135M-Instruct ;;
    digits) recipe=run_digits_tiny_cpu.sh model=models/tiny-qwen2-2.5M ;;
    *) echo "quickstart.sh: --task $task is unknown (known: add1 mul1 max3 even gsm8k digits)" >&2; exit 2 ;;
esac
case $controller in
    ray | local) ;;
    *) echo "quickstart.sh: --controller $controller is unknown (known: ray local)" >&2; exit 2 ;;
esac
case $rollout in
    hf) ;;
    vllm | sglang)
        engine=("actor_rollout_ref.rollout.name=$rollout" actor_rollout_ref.rollout.tensor_model_parallel_size=1)
        overrides=("${engine[@]}" ${overrides[@]+"${overrides[@]}"})
        ;;
    *) echo "quickstart.sh: --rollout $rollout is unknown (known: hf vllm sglang)" >&2; exit 2 ;;
esac
case $steps in
    *[!0-9]* | 0) echo "quickstart.sh: --steps $steps is no positive number" >&2; exit 2 ;;
esac

export TASK=$task MODEL=$model DATA=${DATA:-data/$task}
export RUN=${RUN:-runs/quickstart-$task-$(date +%Y%m%d-%H%M%S)}
if [ -n "$steps" ]; then export STEPS=$steps; fi
command=(bash "examples/grpo_trainer/$recipe" "trainer.controller=$controller" ${overrides[@]+"${overrides[@]}"})
if [ $sft = 1 ] && [ "$task" = digits ]; then
    echo "quickstart.sh: --sft needs answers to learn, and --task digits has none (use add1 mul1 max3 even gsm8k)" >&2; exit 2
fi
teach=(env -u STEPS RUN="$RUN/sft" bash "examples/sft/$recipe" trainer.logger=[file])
if [ $dry_run = 1 ]; then
    if [ $sft = 1 ]; then echo "TASK=$TASK MODEL=$MODEL DATA=$DATA ${teach[*]}"; export MODEL=$RUN/sft/huggingface; fi
    echo "TASK=$TASK MODEL=$MODEL DATA=$DATA RUN=$RUN ${STEPS:+STEPS=$STEPS }${command[*]}"
    exit 0
fi

echo "== 1/4 environment"
bash scripts/setup_env.sh
if [ "$rollout" != hf ]; then bash scripts/install_engines.sh "$rollout"; fi
export PATH="$PWD/.venv/bin:$PATH" TOKENIZERS_PARALLELISM=false
echo "== 2/4 model"
if [ "$task" = digits ]; then
    [ -f "$model/model.safetensors" ] || python3 -m verl.utils.tiny_model "$model" --size 2.5M
else
    python3 scripts/prepare_smollm2.py "$model"
fi
echo "== 3/4 data"
if [ ! -f "$DATA/test.parquet" ]; then
    case $task in
        gsm8k) python3 examples/data_preprocess/gsm8k.py --local_save_dir "$DATA" ;;
        *) python3 examples/data_preprocess/arithmetic.py --task "$task" --local_dir "$DATA" ;;
    esac
fi
echo "== 4/4 training (results in $RUN)"
if [ $sft = 1 ]; then "${teach[@]}"; export MODEL=$RUN/sft/huggingface; fi
exec "${command[@]}"
