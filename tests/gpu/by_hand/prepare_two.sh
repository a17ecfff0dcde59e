#!/bin/bash
# qsync prepare on two GPUs over NCCL, group b under MPS at 50%, of a user's script; then training; then prepare again.
# cwd: repository root; writes $OUT/prepare; about five minutes.  TRY_CPU=1: two CPU workers and a tiny model, no MPS.
# Variables: TUNE (seconds of tuning, 15), LIMIT (seconds in all, 390), SLOWER (each command's time, times this).
OUT=${OUT:?}/prepare; W=$(mktemp -d /tmp/two.XXXXXX); mkdir -p "$OUT" "$W/pipe" "$W/log"
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd); SCRIPT=$HERE/prepare_two_train.py
T0=$(date +%s); LIMIT=${LIMIT:-390}; TUNE=${TUNE:-15}
export PYTHONFAULTHANDLER=1
export QSYNC_TRY=two.$$.$T0 RUN=$W/run QSYNC_RANK_TIMEOUT_S=30 PYTHONUNBUFFERED=1
export PYTHONPATH=$PWD:$PYTHONPATH HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
now() { date +%s.%N; }
since() { python3 -c "print(f'{$(now) - $1:.1f} s')"; }
left() { local l=$(( LIMIT - 8 - $(date +%s) + T0 )); [ "$l" -gt "$1" ] && l=$1; [ "$l" -lt 1 ] && l=1; echo "$l"; }   # at most $1
ours() {   # processes with our mark, but this shell and its parents
  for p in /proc/[0-9]*; do
    [ "${p#/proc/}" = $$ ] || [ "${p#/proc/}" = "$BASHPID" ] && continue
    tr '\0' '\n' 2>/dev/null < "$p/environ" | grep -qx "QSYNC_TRY=$QSYNC_TRY" && echo "${p#/proc/}"
  done
}
finish() {
  trap - EXIT INT TERM
  for p in $(ours); do case "$(cat /proc/$p/comm 2>/dev/null)" in nvidia-cuda-mps*) ;; *) kill -KILL "$p" 2>/dev/null;; esac; done
  [ "$TRY_CPU" = 1 ] || echo quit | timeout 8 nvidia-cuda-mps-control > /dev/null 2>&1
  for p in $(ours); do kill -KILL "$p" 2>/dev/null; done
  cp "$W"/log/control.log "$OUT/mps.log" 2>/dev/null; tail -c 20000 "$OUT/mps.log" > "$W/m" 2>/dev/null && cp "$W/m" "$OUT/mps.log"
  cp "$RUN/report.html" "$RUN/start.txt" "$RUN/cluster.toml" "$OUT/" 2>/dev/null
  mkdir -p "$OUT/run" && cp -r "$RUN"/plans "$RUN"/profiles "$OUT/run/" 2>/dev/null
  rm -rf "$W"; echo "## in all $(( $(date +%s) - T0 )) s"
}
trap finish EXIT INT TERM

mkdir -p "$W/bin"; printf '#!/bin/bash\nexec python3 -m torch.distributed.run "$@"\n' > "$W/bin/torchrun"; chmod +x "$W/bin/torchrun"
export PATH=$W/bin:$PATH
A="QSYNC_GROUP=a" B="QSYNC_GROUP=b" MORE=(--tune "$TUNE" --group b=share:0.5)
if [ "$TRY_CPU" = 1 ]; then
  MORE=(--device cpu); export GLOO_SOCKET_IFNAME=lo
else
  nvidia-smi -L
  A="$A CUDA_VISIBLE_DEVICES=0" B="$B CUDA_VISIBLE_DEVICES=1 CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50"
  export CUDA_MPS_PIPE_DIRECTORY=$W/pipe CUDA_MPS_LOG_DIRECTORY=$W/log
  timeout 20 nvidia-cuda-mps-control -d || echo "## MPS did not start"
  for i in 1 2 3 4 5 6; do echo get_server_list | timeout 5 nvidia-cuda-mps-control > "$W/mps" 2>&1; grep -qi "cannot find" "$W/mps" || break; sleep 1; done
fi
PORT=$(( 20000 + RANDOM % 20000 ))

both() {   # $1: name of the logs; $2: seconds at most; the rest: what torchrun starts on both nodes
  local name=$1 limit; limit=$(left $(( $2 * ${SLOWER:-1} ))); shift 2; PORT=$(( PORT + 1 )); local began; began=$(now); local ra rb
  local t=(torchrun --nnodes 2 --nproc-per-node 1 --master-addr 127.0.0.1 --master-port $PORT)
  env $A timeout -k 4 "$limit" "${t[@]}" --node-rank 0 "$@" > "$OUT/$name.a.log" 2>&1 & local pa=$!
  env $B timeout -k 4 "$limit" "${t[@]}" --node-rank 1 "$@" > "$OUT/$name.b.log" 2>&1 & local pb=$!
  wait $pa; ra=$?; wait $pb; rb=$?
  echo "## $name: $(since "$began"), exit status a $ra, b $rb (124: stopped after $limit s)"
  if [ $ra -ne 0 ] || [ $rb -ne 0 ]; then for f in "$OUT/$name.a.log" "$OUT/$name.b.log"; do echo "$f:"; grep -vE "^ |^Traceback" "$f" | tail -n 40 | cut -c1-300; done; fi
  for p in $(ours); do case " $(tr '\0' ' ' 2>/dev/null < /proc/$p/cmdline)" in *prepare_two_train*) kill -KILL "$p" 2>/dev/null;; esac; done
}

prepare=(-m qsync prepare "$SCRIPT" -o "$RUN" "${MORE[@]}")
( sleep 262; for p in $(pgrep -f "qsync prepare.*prepare_two_train"); do kill -ABRT $p; done ) & WATCH=$!
both prepare1 270 "${prepare[@]}"
grep -v "^$" "$OUT/prepare1.a.log" | grep -v "^  File\|^    \|^Traceback\|\^\^\^" | tail -n 45 | cut -c1-260
if [ -f "$RUN/start.txt" ]; then echo "## start.txt"; cat "$RUN/start.txt"; fi

# both groups under the plan, whatever the verdict is
kill $WATCH 2>/dev/null
both train 30 "$SCRIPT"
grep -h "^STEP" "$OUT"/train.?.log

both prepare2 30 "${prepare[@]}"
tail -n 12 "$OUT/prepare2.a.log" | cut -c1-300

# the lines that prepare said to type, as they stand, where time is left
if [ -f "$RUN/start.txt" ] && [ "$(left 99)" -gt 12 ]; then
  began=$(now); limit=$(left $(( 25 * ${SLOWER:-1} ))); pids=()
  while IFS= read -r line; do
    timeout -k 4 "$limit" bash -c "${line#  }" > "$OUT/typed.$(( ${#pids[@]} )).log" 2>&1 & pids+=($!)
  done < <(grep '^  .*torchrun' "$RUN/start.txt")
  status=(); for p in "${pids[@]}"; do wait "$p"; status+=($?); done
  echo "## lines of start.txt: $(since "$began"), exit statuses ${status[*]}"
  grep -h "^STEP" "$OUT"/typed.*.log || tail -n 8 "$OUT"/typed.*.log | cut -c1-400
fi

# what the plan predicts, in words
plan=$(ls -S "$RUN"/plans/*+* 2>/dev/null | head -1); [ -n "$plan" ] || plan=$(ls -S "$RUN"/plans/* 2>/dev/null | head -1)
if [ -n "$plan" ]; then
  timeout "$(left 10)" python3 -m qsync show "$plan" > "$OUT/show.txt" 2>&1; head -c 3000 "$OUT/show.txt"
  [ "$(left 99)" -gt 4 ] && timeout "$(left 10)" python3 -m qsync explain "$plan" > "$OUT/explain.txt" 2>&1
  [ -f "$OUT/explain.txt" ] && head -n 30 "$OUT/explain.txt" | cut -c1-200
fi
