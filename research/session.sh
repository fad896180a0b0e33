#!/usr/bin/env bash
# What is owed on a GPU, in pieces that each end well within ten minutes:
#
#   COMMIT=... research/session.sh OUT {old-new|peers|drafter|laws|speed|aims} [STEP ...]
#
# Run on the machine itself, from the root of the repository. What travelled in .carry (research/lent.py) is taken in
# first, and kept in LENT, which git ignores and the machine keeps between calls. A step that would not end before LIMIT seconds is left out and said so; by the names of steps
# only these are run. OUT/steps.jsonl has what each took. TINY=1 rehearses all of it on a CPU with a few tokens.
set -u
usage="COMMIT=... research/session.sh OUT {old-new|peers|drafter|laws|speed|aims} [STEP ...]"
out=${1:?$usage} part=${2:?$usage}
shift 2
only=" $* "
: "${COMMIT:?must say what is measured}"
LENT=${LENT:-runs/lent} LIMIT=${LIMIT:-560} PYTHON=${PYTHON:-python3} OLD=${OLD:-006ec99}
tiny=${TINY:-}
mkdir -p "$out" "$LENT"
work=$LENT/work
mkdir -p "$work"
export PYTHONUNBUFFERED=1
"$PYTHON" research/lent.py unpack .carry "$LENT" || exit 1
export PYTHONPATH=src:.:$LENT/site
checkpoint=$LENT/checkpoint.gguf wiki=$work/wiki
failed=0

# step NAME SECONDS COMMAND ...: SECONDS is the estimate of research/README.md
step() {
    local name=$1 need=$2 began=$SECONDS status
    shift 2
    [[ $only == "  " || $only == *" $name "* ]] || return 0
    if ((SECONDS + need > LIMIT)); then
        echo "== $name is left out: $need s are not left of $LIMIT" | tee -a "$out/log"
        return 0
    fi
    echo "== $name" | tee -a "$out/log"
    set -m # a group of its own, all of which can be ended
    ("$@") >"$work/last" 2>&1 &
    local it=$!
    (sleep $((LIMIT + 20 - SECONDS)) && kill -- -"$it") >/dev/null 2>&1 &
    local clock=$!
    set +m
    wait "$it"
    status=$?
    kill -- -"$clock" 2>/dev/null
    cat "$work/last" >>"$out/log"
    tail -n "${TAIL:-12}" "$work/last" | cut -c 1-160
    printf '{"commit": "%s", "part": "%s", "step": "%s", "seconds": %s, "estimate": %s, "status": %s}\n' \
        "$COMMIT" "$part" "$name" $((SECONDS - began)) "$need" "$status" >>"$out/steps.jsonl"
    ((status == 0)) || failed=1
}
bd3lm() { "$PYTHON" -m bd3lm "$@"; }

# --- the old commit and the new one, turn about ---

# in_old and in_new: the flag for the batch is all that has another name
in_old() { PYTHONPATH=$LENT/old/src:$LENT/site "$PYTHON" -m bd3lm bench "${@/--batch-size/--batch}"; }
in_new() { bd3lm bench "$@"; }
turn() {
    local side commit
    for side in old new; do
        commit=$COMMIT
        [[ $side == new ]] || commit=$OLD
        "in_$side" "$@" --out "$work/one.jsonl" || return 1
        sed "s/^{/{\"side\": \"$side\", \"commit\": \"$commit\", /" "$work/one.jsonl" >>"$out/old-new.jsonl"
        rm "$work/one.jsonl"
    done
}
# Both commits compile at the same time, and what they compiled is kept: then a timed run starts in seconds.
compile() {
    local side
    for side in old new; do "in_$side" "$@" --steps 1 >/dev/null 2>&1 & done
    wait
}
ratios() {
    "$PYTHON" - "$out/old-new.jsonl" <<'EOF'
import json, sys
from statistics import median
sides = {}
for line in open(sys.argv[1]):
    record = json.loads(line)
    case, shape = record["case"], record["case"]["shape"]
    batch = case.get("batch_size", case.get("batch"))
    name = f"{record['bench']} {shape['method']} {shape['block_size']}, batch {batch}, {record['variant']}"
    sides.setdefault(name, {}).setdefault(record["side"], []).append(record["seconds"]["median"])
for name, found in sides.items():
    if len(found) == 2:
        old, new = (median(found[side]) for side in ("old", "new"))
        print(f"{name:44} old {1e3 * old:9.2f} ms, new {1e3 * new:9.2f} ms, new/old {new / old:.3f}")
EOF
}
old_new() {
    local small=() train=(--steps 60) sample=(--repeats 7) batches=(1 256)
    if [[ $tiny ]]; then
        small=(--layers 1 --hidden 32 --heads 2 --context 32 --vocabulary 64)
        train=(--steps 2 --batch-size 2) sample=(--repeats 1 --length 8) batches=(1 2)
    fi
    local ar=(--method ar --dropout 0 --variants no-ema) batch
    step compile 60 compile train --block-size 4 "${small[@]}" "${train[@]}"
    step train-4 50 turn train --block-size 4 "${small[@]}" "${train[@]}"
    step compile-ar 45 compile train "${ar[@]}" "${small[@]}" "${train[@]}"
    step train-ar 45 turn train "${ar[@]}" "${small[@]}" "${train[@]}"
    for batch in "${batches[@]}"; do
        step "sample-4-$batch" 40 turn sample --block-size 4 --batch-size "$batch" "${small[@]}" "${sample[@]}"
        step "sample-ar-$batch" 40 turn sample --method ar --batch-size "$batch" "${small[@]}" "${sample[@]}"
    done
    step train-mdlm 90 turn train --method mdlm "${small[@]}" "${train[@]}"
    for batch in "${batches[@]}"; do
        step "sample-16-$batch" 40 turn sample --block-size 16 --batch-size "$batch" "${small[@]}" "${sample[@]}"
    done
    step claims 160 turn train --block-size 4 --variants two-pass dense "${small[@]}" "${train[@]}"
    ratios
}

# --- a network of today beside transformers ---

peers() {
    local small=()
    [[ $tiny ]] && small=(--size tiny --vocabulary 64 --context 16 --batch 2 --sampled 1 2 --length 8 --steps 1 --turns 1)
    local run=("$PYTHON" research/peers.py --commit "$COMMIT" --out "$out/peers.jsonl" "${small[@]}")
    step train 110 "${run[@]}" --works train
    step sample 90 "${run[@]}" --works sample --turns 1
}

# --- a checkpoint becomes a drafter ---

# adapted NAME ARGUMENT ...: begins in an empty folder, so that a step can be given again
adapted() {
    local name=$1
    shift
    rm -rf "${work:?}/$name"
    bd3lm adapt "$@" "${shrunk[@]}" --out "$work/$name" || return 1
    find "$work/$name" -name metrics.csv -exec tail -v -n +1 {} + >>"$out/metrics.txt"
}
shrunk=()
if [[ $tiny ]]; then
    shrunk=(--data.context 48 --train.global_batch 2 --data.validation_sequences 2 --data.validation_batch 2)
fi
own=(--own --own-texts 12000 --own-batch 256) steps=(--steps 1000) short=(--steps 600) aims=(--steps 400)
measured=(--sequences 128) scored=(--sequences 64) cut=(--context 480) cut_blocks=(--context 512)
if [[ $tiny ]]; then
    own=(--own --own-texts 4 --own-length 48 --own-batch 2) steps=(--steps 2) short=(--steps 1) aims=(--steps 1)
    measured=(--sequences 1) scored=(--sequences 1) cut=(--context 48) cut_blocks=(--context 48)
fi
needs() { # what must be there by now
    local file
    for file in "$@"; do
        [[ -e $file ]] || { echo "$part needs $file, which is not there: see research/README.md" >&2; exit 1; }
    done
}
# The additions in bfloat16, in files that are small enough to come back.
bring() {
    "$PYTHON" - "$1" "$out" <<'EOF'
import gzip, sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save
folder, out = map(Path, sys.argv[1:])
(file,) = folder.glob("*.safetensors")
tensors = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in load_file(file).items()}
packed = gzip.compress(save(tensors), 1)
for number in range(0, len(packed), 15 * 2**20):
    (out / f"drafter.gz.{number // (15 * 2**20)}").write_bytes(packed[number : number + 15 * 2**20])
print(f"{len(packed) / 2**20:.1f} MiB of {file.name}")
EOF
}
drafter() {
    needs "$checkpoint"
    step own 110 bd3lm adapt "$checkpoint" --to drafter "${own[@]}" "${steps[@]}" "${shrunk[@]}" --only-text \
        --out "$work/texts"
    step adapt 170 adapted drafter "$checkpoint" --to drafter --data "$work/texts/data" "${steps[@]}"
    step bring 10 bring "$work/drafter/overlap/model"
}

# --- what needs no clock: the tests beside all the rest ---

laws() {
    needs "$checkpoint" "$LENT/wikipedia/train.jsonl" "$work/drafter"
    local tests=0 clock
    if [[ $only == "  " || $only == *" tests "* ]]; then
        set -m
        ("$PYTHON" -m pytest --gpu -m gpu -n "${JOBS:-8}" --timeout 540 -q -p no:cacheprovider tests/gpu ${tiny:+--collect-only} \
            >"$out/tests.txt" 2>&1) &
        tests=$!
        (sleep $((LIMIT + 20 - SECONDS)) && kill -- -"$tests") >/dev/null 2>&1 &
        clock=$!
        set +m
    fi
    TAIL=80 step counts 130 together tokens tokens_box acceptance wiki
    TAIL=20 step trainings 200 together ar joint
    TAIL=20 step eval 60 bd3lm eval "$checkpoint" "$work/ar" "$work/joint" --data "$wiki" "${scored[@]}" \
        "${cut_blocks[@]}" --out "$out/eval.json"
    if ((tests)); then
        wait "$tests" || failed=1
        kill -- -"$clock" 2>/dev/null
        tail -n 3 "$out/tests.txt"
    fi
}
# Each in a process of its own; what they say comes one after the other.
together() {
    local each status=0 of=()
    for each in "$@"; do
        "$each" >"$work/$each.log" 2>&1 &
        of+=($!)
    done
    for each in "${of[@]}"; do wait "$each" || status=1; done
    for each in "$@"; do echo "-- $each" && cat "$work/$each.log"; done
    return $status
}
tokens() {
    "$PYTHON" research/speculation.py "$work/drafter" --base "$checkpoint" --parts tokens \
        --commit "$COMMIT" --out "$out/tokens.jsonl" ${tiny:+--tiny --texts 2 --new 6}
}
tokens_box() {
    "$PYTHON" research/speculation.py box --parts tokens --commit "$COMMIT" --out "$out/tokens-box.jsonl" ${tiny:+--tiny}
}
acceptance() { bd3lm acceptance "$work/drafter" "${measured[@]}" "${cut[@]}" --out "$out/acceptance.json"; }
wiki() { bd3lm data prepare "$LENT/wikipedia" "$wiki" --tokenizer "$checkpoint" --workers 4; }
joint() { adapted joint "$checkpoint" --to joint --data "$wiki" "${short[@]}"; }
# The same checkpoint on the same tokens, in the same order of batches, by its own loss alone.
ar() {
    rm -rf "$work/ar"
    bd3lm train wikipedia-ar --from "$checkpoint" --data.path "$wiki" --network.size checkpoint --data.context 512 \
        --method.score_first false --train.global_batch 32 --train.steps "${short[1]}" --train.ema_decay 0 \
        --optimizer.lr 5e-5 --optimizer.warmup_steps "$((short[1] / 12))" --optimizer.decay_steps null --optimizer.min_lr_ratio 0 \
        --optimizer.betas "[0.9, 0.95]" --data.validation_sequences 256 --data.validation_batch 32 \
        "${shrunk[@]}" --out "$work/ar"
}

# --- speeds of speculation, alone on the card ---

speed() {
    needs "$checkpoint" "$work/drafter"
    local run=("$PYTHON" research/speculation.py "$work/drafter" --base "$checkpoint" --commit "$COMMIT")
    run+=(--out "$out/speed.jsonl" ${tiny:+--tiny --texts 2 --alone 1 --new 6 --batches 1})
    TAIL=30 step one 150 "${run[@]}" --parts one
    TAIL=30 step batches 165 "${run[@]}" --parts batches
}

# --- more of adaptation, where there is more time ---

aims() {
    needs "$checkpoint" "$work/texts"
    local name
    local each=("$checkpoint" --to drafter --data "$work/texts/data" "${aims[@]}")
    for name in hard soft overlap; do
        step "aim-$name" 70 adapted "aim-$name" "${each[@]}" --aim "$name"
    done
    for name in 16 32; do
        step "rank-$name" 70 adapted "rank-$name" "${each[@]}" --aim overlap --rank "$name"
    done
    for name in 4 8; do
        step "masks-$name" 70 adapted "masks-$name" "${each[@]}" --aim overlap --masks "$name"
    done
    local runs=()
    for name in aim-hard aim-soft aim-overlap rank-16 rank-32 masks-4 masks-8; do
        [[ -d $work/$name ]] && runs+=("$work/$name")
    done
    step acceptance 60 bd3lm acceptance "${runs[@]}" --data "$work/texts/data" "${measured[@]}" "${cut[@]}" \
        --out "$out/aims.json"
}

case $part in
old-new) old_new ;;
peers | drafter | laws | speed | aims) "$part" ;;
*) echo "$usage, got $part" >&2; exit 1 ;;
esac
echo "== $SECONDS s, failed $failed" | tee -a "$out/log"
exit $failed
