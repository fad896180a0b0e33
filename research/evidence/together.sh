#!/usr/bin/env bash
# The evidence in several processes on one GPU, which they keep busy while one compiles or writes texts:
#
#   research/evidence/together.sh DATA OUT COMMIT SECONDS "ar mdlm base" "counts-4 clipped-4" ...
#
# Each list of runs or tables is a process, and OUT/a, OUT/b and so on are the folders of their results. Steps are not
# timed. What lies in OUT as evidence*.jsonl, and in the folders of an earlier call, is known to all of them. Weights
# that others start from are kept in WEIGHTS, by default OUT/weights. DATA may be tiny: everything at a toy size.
set -u
data=(--data "$1") out=$2 commit=$3 seconds=$4
[ "$1" = tiny ] && data=(--tiny)
shift 4
letters=(a b c d e f g h)
if [ $# -lt 1 ] || [ $# -gt ${#letters[@]} ]; then
    echo "there must be 1 to ${#letters[@]} lists of runs, got $#" >&2
    exit 1
fi
# Each process would else take every core for itself, to compute and to compile.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-4}
mkdir -p "$out"
shopt -s nullglob
known=("$out"/evidence*.jsonl "$out"/?/evidence.jsonl)
others=$(($# - 1)) processes=()
for letter in "${letters[@]:0:$#}"; do
    read -ra names <<<"$1"
    shift
    python -m research.evidence "${data[@]}" --out "$out/$letter" --weights "${WEIGHTS:-$out/weights}/$letter" \
        --commit "$commit" --seconds "$seconds" --others "$others" ${known:+--earlier "${known[@]}"} \
        --only "${names[@]}" >"$out/log-$letter.txt" 2>&1 &
    processes+=($!)
done
failed=0
for process in "${processes[@]}"; do wait "$process" || failed=1; done
tail -n 4 "$out"/log-?.txt
cat "$out"/log-?.txt >>"$out/log.txt" && rm "$out"/log-?.txt
exit $failed
