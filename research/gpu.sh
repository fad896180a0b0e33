#!/usr/bin/env bash
# The figures of docs/performance.md, on one GPU with nothing beside it:
#
#   research/gpu.sh OUT COMMIT {train|claims|sample|lengths|many|drafting|growth|undone|parity|peers} [DATA]
#
# Appends JSON lines to OUT/PART.jsonl, the first of each run saying what was measured. many times the kernels for many
# texts, drafting passes that speculate, undone the training step without each of its optimisations. parity compares the
# losses of the fast step with those of the plain one on real text, DATA, a folder of `bd3lm data prepare`. peers times
# a network of today beside `transformers`.
set -u
out=$1 commit=$2 part=$3 data=${4:-}
case $part in
train | claims | sample | lengths | many | drafting | growth | undone | peers) ;;
parity) : "${data:?must be the folder of the data}" ;;
*) echo "the part must be train, claims, sample, lengths, many, drafting, growth, undone, parity or peers, got $part" >&2; exit 1 ;;
esac
failed=0
run() { echo "== $*" >&2; python -m bd3lm bench "$@" --out "$out/$part.jsonl" || failed=1; }
printf '{"commit": "%s", "part": "%s", "when": "%s"}\n' "$commit" "$part" "$(date -u +%FT%TZ)" >>"$out/$part.jsonl"

case $part in
train)
    run train --block-size 4 --steps 100 --profile
    run train --method mdlm --steps 100 --profile
    run train --method ar --dropout 0 --variants no-ema --steps 100 --profile
    ;;
claims)
    run train --block-size 4 --variants compiled two-pass dense
    run attention --block-size 4 --variants auto dense
    ;;
sample)
    for batch in 1 256; do
        run sample --block-size 4 --batch-size $batch --repeats 5 --profile
        run sample --block-size 16 --batch-size $batch --repeats 5 --profile
        run sample --method ar --batch-size $batch --repeats 5 --profile
    done
    for batch in 1 256; do
        run sample --block-size 4 --batch-size $batch --repeats 1 --variants cached unreplayed unfused plain
    done
    ;;
lengths)
    for block in 4 16; do
        for length in 2048 4096 8192 16384; do
            run sample --block-size $block --length $length --repeats 5
        done
    done
    ;;
growth)
    run train --block-size 16
    run train --block-size 4 --batch-size 8
    run train --block-size 4 --batch-size 8 --context 4096
    for batch in 8 64; do
        run sample --block-size 4 --batch-size $batch
        run sample --block-size 16 --batch-size $batch
    done
    ;;
many)
    python research/many_texts.py --out "$out/$part.jsonl" || failed=1
    ;;
drafting)
    python research/drafting_passes.py --out "$out/$part.jsonl" || failed=1
    ;;
peers)
    python research/peers.py --commit "$commit" --out "$out/$part.jsonl" || failed=1
    ;;
undone)
    python research/undone.py --commit "$commit" --out "$out/$part.jsonl" || failed=1
    ;;
parity)
    python research/training_parity.py "$data" --steps 200 --out "$out/$part.jsonl" || failed=1
    ;;
esac
exit $failed
