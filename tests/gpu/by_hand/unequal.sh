#!/bin/bash
# One call of rows P8 and P9 where each call is a machine of its own: takes what earlier calls finished, goes on, packs everything.
#   OUT=out [KEPT=unequal.tgz] bash tests/gpu/by_hand/unequal.sh [options of today.py: --only P9 --models bert-large]
# cwd: repository root; writes $OUT/unequal.tgz (run folders, tuning, compiled kernels, rows), every half minute and at the end, and
# $OUT/unequal.log.  Preparing a compiled BERT-large takes longer than ten minutes: the next call goes on with it.
# Variables: MINUTES (9), after which nothing of it runs any more; QSYNC_COMMIT, where the copy there has no git history.
OUT=${OUT:?}; MINUTES=${MINUTES:-9}; W=/tmp/unequal; mkdir -p "$OUT" "$W/save"; mkdir -p -m 700 "$W/kernels" "$W/tuning"
[ -z "$KEPT" ] || tar xzf "$KEPT" -C "$W" || exit 2
pack() { tar czf "$OUT/unequal.new" -C "$W" save kernels tuning $(cd "$W" && ls -d rows 2> /dev/null) 2> /dev/null; mv "$OUT/unequal.new" "$OUT/unequal.tgz"; }
( while sleep 30; do pack; done ) & PACKING=$!
export QSYNC_KERNEL_CACHE=$W/kernels QSYNC_TUNING=$W/tuning/tuning.sqlite PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
python3 bench/today.py --gpus 0,1 --minutes "$MINUTES" --save "$W/save" --directory "$W/rows" "${@:---only=P9}" 2>&1 | tee "$OUT/unequal.log"
for found in "$W"/save/hybrid/*/measured.json; do [ -f "$found" ] && echo "== $found" && head -c 3000 "$found"; done
kill $PACKING; wait $PACKING 2> /dev/null; pack
