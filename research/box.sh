#!/usr/bin/env bash
# The model in the box, from text to the files that ship: research/box.sh TEXT OUT [flags of `bd3lm train`]
#
# TEXT holds train, valid and test files as `bd3lm data prepare` reads them (here of Wikipedia); OUT, a new or empty
# folder, gets the weights, config, tokenizer, eval*.json, samples.jsonl and log.txt. Tokens go to data/box and the run
# to runs/box, under the working folder. TEXT may also be what `bd3lm data prepare` wrote, which is used as it is. A try
# that takes minutes on a CPU: a TEXT of some hundred documents, and
#
#   research/box.sh TEXT OUT --train.steps 20 --train.global_batch 4 --data.validation_sequences 4
set -euo pipefail
text=$1 out=$2
shift 2
if [ -e "$out" ] && [ -n "$(ls -A "$out")" ]; then
    echo "OUT must be a new or empty folder, got $out" >&2
    exit 1
fi
export PYTHONUNBUFFERED=1
run() { echo "== ${SECONDS} s: bd3lm $*" && python -m bd3lm "$@"; }

make_box() {
    data=$text
    if [ ! -e "$text/meta.json" ]; then
        data=data/box
        run data train-tokenizer "$text" data/box-tokenizer --vocabulary 6144
        run data prepare "$text" "$data" --tokenizer data/box-tokenizer --workers "$(nproc)"
    fi
    run train box --data.path "$data" "$@"
    tail -n +1 runs/box/{ar,block}/metrics.csv
    run convert runs/box/block runs/box/bfloat16 --dtype bfloat16
    cp runs/box/bfloat16/* "$out"
    # What ships is measured, in the precision that a CPU computes it in.
    run sample runs/box/bfloat16 "" "The city of" "In mathematics," --count 4 --dtype float32 --out "$out/samples.jsonl"
    # In the order that ships, and in others: eval.json has the records of all.
    for lean in 2 0 1 4; do
        run eval runs/box/bfloat16 --data "$data" --split test --lean "$lean" --dtype float32 --batch-size 64 \
            --out "$out/eval-$lean.json"
    done
    python -c 'import json, sys; print(json.dumps([r for f in sys.argv[1:] for r in json.load(open(f))], indent=2))' \
        "$out"/eval-{2,0,1,4}.json >"$out/eval.json"
    echo "== ${SECONDS} s in all" && wc -c "$out"/*
}

mkdir -p "$out"
make_box "$@" 2>&1 | tee "$out/log.txt"
