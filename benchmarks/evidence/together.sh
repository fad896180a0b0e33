#!/usr/bin/env bash
# The evidence in several processes on one GPU, which they keep busy while one compiles or writes texts:
#
#   benchmarks/evidence/together.sh DATA OUT COMMIT SECONDS "ar mdlm base" "counts-4 clipped-4" ...
#
# Each list of runs or tables is a process, with OUT/evidence-a.jsonl, -b and so on for its results. Steps are not
# timed. Results that are in OUT already, of a process that had the GPU for itself, are known to all. DATA may be
# tiny: everything at a toy size.
set -u
data=(--data "$1") out=$2 commit=$3 seconds=$4
[ "$1" = tiny ] && data=(--tiny)
shift 4
others=$(($# - 1))
letters=(a b c d e f g h)
shopt -s nullglob
known=("$out"/evidence*.jsonl)
for i in $(seq 0 "$others"); do
    letter=${letters[i]}
    read -ra names <<<"$1"
    shift
    python -m benchmarks.evidence "${data[@]}" --out "$out/$letter" --weights "${TMPDIR:-/tmp}/evidence-$letter" \
        --commit "$commit" --seconds "$seconds" --others "$others" ${known:+--earlier "${known[@]}"} \
        --only "${names[@]}" >"$out/log-$letter" 2>&1 &
done
wait
for i in $(seq 0 "$others"); do
    letter=${letters[i]}
    tail -n 4 "$out/log-$letter"
    for file in "$out/$letter"/*; do mv "$file" "$out/$(basename "${file/evidence/evidence-$letter}")"; done
    rmdir "$out/$letter"
done
cat "$out"/log-? >"$out/log.txt" && rm "$out"/log-?
