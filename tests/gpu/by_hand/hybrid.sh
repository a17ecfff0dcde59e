#!/bin/bash
# One call of gpu_hybrid.py where each call is a machine of its own: takes what earlier calls measured, goes on, packs everything.
#   OUT=out [KEPT=hybrid.tgz] bash tests/gpu/by_hand/hybrid.sh [options of gpu_hybrid.py]
# cwd: repository root; writes $OUT/hybrid.tgz, every half minute and at the end, and $OUT/hybrid.log.
# Variables: MINUTES (9), after which nothing of it runs any more; QSYNC_COMMIT, where the copy there has no git history.
OUT=${OUT:?}; MINUTES=${MINUTES:-9}; W=$(mktemp -d /tmp/hybrid.XXXXXX); mkdir -p "$OUT" "$W/hybrid"
[ -z "$KEPT" ] || tar xzf "$KEPT" -C "$W" || exit 2
pack() { tar czf "$OUT/hybrid.new" -C "$W" hybrid 2> /dev/null; mv "$OUT/hybrid.new" "$OUT/hybrid.tgz"; }
( while sleep 30; do pack; done ) & PACKING=$!
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
python3 bench/gpu_hybrid.py --out "$W/hybrid" --minutes "$MINUTES" --directory "$W/rows" "$@" 2>&1 | tee "$OUT/hybrid.log"
kill $PACKING; wait $PACKING 2> /dev/null; pack; rm -rf "$W"
