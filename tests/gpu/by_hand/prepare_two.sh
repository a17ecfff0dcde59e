#!/bin/bash
# qsync prepare on two GPUs over NCCL, group b under MPS at 50%, of a user's script; then training under the plan; then prepare again.
# cwd: repository root; writes $OUT/prepare_two.tar.gz, at most 16 MiB, and the essentials to standard output (under 12,000 characters).
# TRY_CPU=1: two CPU workers and a tiny model, no MPS.
# Variables: TUNE (seconds of tuning, 15), LIMIT (seconds in all, 385), FIRST (of them for prepare at most, 285).
W=$(mktemp -d /tmp/two.XXXXXX); LOGS=$W/prepare_two; mkdir -p "${OUT:?}" "$LOGS" "$W/pipe" "$W/log" "$W/bin"
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd); SCRIPT=$HERE/prepare_two_train.py
T0=$(date +%s); LIMIT=${LIMIT:-385}; FIRST=${FIRST:-285}; TUNE=${TUNE:-15}; MOST=$(( 16 * 1024 * 1024 ))
export QSYNC_TRY=two.$$.$T0 RUN=$W/run QSYNC_RANK_TIMEOUT_S=60 PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
export PYTHONPATH=$PWD:$PYTHONPATH HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
SAID='^ *[0-9]+  (\[ *[0-9]+ s\]|note:|error:|compil|failed)'   # a line of QSync's, behind its stamp
ENDING_S=20   # kept for ending MPS and packing
since() { echo $(( $(date +%s) - T0 )); }
left() { local l=$(( LIMIT - ENDING_S - $(since) )); [ "$l" -gt "$1" ] && l=$1; [ "$l" -lt 1 ] && l=1; echo "$l"; }   # at most $1
ours() {   # processes with our mark, but this shell and its parents
  for p in /proc/[0-9]*; do
    [ "${p#/proc/}" = $$ ] || [ "${p#/proc/}" = "$BASHPID" ] && continue
    tr '\0' '\n' 2>/dev/null < "$p/environ" | grep -qx "QSYNC_TRY=$QSYNC_TRY" && echo "${p#/proc/}"
  done
}
signal() {   # $1: a signal, to every rank of the script that still runs; $2: and to its torchrun
  for p in $(ours); do
    case " $(tr '\0' ' ' 2>/dev/null < /proc/$p/cmdline)" in *torch.distributed.run*) [ -n "$2" ] && kill "-$1" "$p" 2>/dev/null;;
      *python*prepare_two_train*) kill "-$1" "$p" 2>/dev/null;; esac
  done
}
stamped() {   # every line with the seconds since the start
  exec python3 -uc 'import sys, time
for line in sys.stdin: print(f"{time.time() - float(sys.argv[1]):5.0f}  {line}", end="", flush=True)' "$T0"
}
finish() {
  trap - EXIT INT TERM
  for p in $(ours); do case "$(cat /proc/$p/comm 2>/dev/null)" in nvidia-cuda-mps*) ;; *) kill -KILL "$p" 2>/dev/null;; esac; done
  [ "$TRY_CPU" = 1 ] || echo quit | timeout 8 nvidia-cuda-mps-control > /dev/null 2>&1
  for p in $(ours); do kill -KILL "$p" 2>/dev/null; done
  tail -c 200000 "$W/log/control.log" > "$LOGS/mps.control.log" 2>/dev/null; tail -c 200000 "$W/log/server.log" > "$LOGS/mps.server.log" 2>/dev/null
  tar -C "$W" -czf "$OUT/prepare_two.tar.gz" prepare_two $(cd "$W" && [ -d run ] && echo run)
  [ "$(stat -c %s "$OUT/prepare_two.tar.gz")" -le $MOST ] || tar -C "$W" -czf "$OUT/prepare_two.tar.gz" prepare_two
  [ "$(stat -c %s "$OUT/prepare_two.tar.gz")" -le $MOST ] || { for f in "$LOGS"/*; do tail -c 400000 "$f" > "$W/cut" && cp "$W/cut" "$f"; done; tar -C "$W" -czf "$OUT/prepare_two.tar.gz" prepare_two; }
  rm -rf "$W"; echo "## in all $(since) s"
}
trap finish EXIT; trap 'exit 1' INT TERM

printf '#!/bin/bash\nexec python3 -m torch.distributed.run "$@"\n' > "$W/bin/torchrun"; chmod +x "$W/bin/torchrun"
export PATH=$W/bin:$PATH
A="QSYNC_GROUP=a" B="QSYNC_GROUP=b" MORE=(--tune "$TUNE" --group b=share:0.5)
if [ "$TRY_CPU" = 1 ]; then
  MORE=(--device cpu); export GLOO_SOCKET_IFNAME=lo
else
  nvidia-smi -L
  A="$A CUDA_VISIBLE_DEVICES=0" B="$B CUDA_VISIBLE_DEVICES=1 CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50"
  export CUDA_MPS_PIPE_DIRECTORY=$W/pipe CUDA_MPS_LOG_DIRECTORY=$W/log
  timeout 20 nvidia-cuda-mps-control -d > /dev/null || echo "## MPS did not start"
  for i in 1 2 3 4 5 6; do echo get_server_list | timeout 5 nvidia-cuda-mps-control > "$W/mps" 2>&1; grep -qi "cannot find" "$W/mps" || break; sleep 1; done
fi
PORT=$(( 20000 + RANDOM % 20000 ))

both() {   # $1: name of the logs; $2: seconds at most; the rest: what torchrun starts on both nodes
  local name=$1 limit; limit=$(left "$2"); shift 2; PORT=$(( PORT + 1 )); local began; began=$(since); local ra rb watch
  local t=(torchrun --nnodes 2 --nproc-per-node 1 --master-addr 127.0.0.1 --master-port $PORT)
  env $A timeout -k 4 "$limit" "${t[@]}" --node-rank 0 "$@" > >(stamped > "$LOGS/$name.a.log") 2>&1 & local pa=$!
  env $B timeout -k 4 "$limit" "${t[@]}" --node-rank 1 "$@" > >(stamped > "$LOGS/$name.b.log") 2>&1 & local pb=$!
  if [ "$limit" -gt 20 ]; then ( sleep $(( limit - 6 )); signal ABRT ) & watch=$!; fi   # each rank says where it is
  wait $pa; ra=$?; wait $pb; rb=$?
  [ -z "$watch" ] || kill $watch 2>/dev/null
  signal KILL all
  echo "## $name: $(( $(since) - began )) s (from $began s on), exit status a $ra, b $rb, limit $limit s"
  [ $ra = 0 ] && [ $rb = 0 ] && return 0
  for f in "$LOGS/$name.a.log" "$LOGS/$name.b.log"; do
    echo "$(basename "$f"):"; grep -E "$SAID|Error" "$f" | tail -n 8 | cut -c1-260
    grep -A 8 "Current thread" "$f" | grep "File" | head -n 8 | cut -c1-160
  done
  return 1
}

prepare=(-m qsync prepare "$SCRIPT" -o "$RUN" "${MORE[@]}")
both prepare1 "$FIRST" "${prepare[@]}"
# What was finished is kept: where there is time left, the same command continues.
[ -f "$RUN/start.txt" ] || { [ "$(left 999)" -gt 45 ] && both continued "$(( $(left 999) - 30 ))" "${prepare[@]}"; }
grep -hE "$SAID" "$LOGS"/prepare1.a.log "$LOGS"/continued.a.log 2>/dev/null | tail -n 24 | cut -c1-150
grep -hE "^ *[0-9]+  (compil|failed)" "$LOGS"/prepare1.b.log | tail -n 3 | cut -c1-150
echo "## $RUN"; (cd "$RUN" && find . -type f -printf '%9s %P\n' | sort -k2 | head -n 40)
[ -f "$RUN/report.html" ] && python3 - "$RUN/report.html" <<'PY'
import html, re, sys
text = re.sub(r"<(script|style).*?</\1>", "", open(sys.argv[1], encoding="utf-8").read(), flags=re.S)
lines = [line.strip() for line in html.unescape(re.sub(r"<[^>]+>", "\n", text)).splitlines() if line.strip()]
print("## report.html:", *lines[1:14], sep="\n  ")
PY
if [ -f "$RUN/start.txt" ]; then echo "## start.txt"; cut -c1-300 "$RUN/start.txt"; fi

# Both groups under the plan, whatever the verdict is: predicted beside measured.
both train 60 "$SCRIPT"
grep -h "STEP" "$LOGS"/train.?.log | cut -c1-700

both again 40 "${prepare[@]}"
grep -hE "nothing had changed|made|note:" "$LOGS/again.a.log" | tail -n 4 | cut -c1-200

# The lines that prepare said to type, as they stand, where time is left.
if [ -f "$RUN/start.txt" ] && [ "$(left 99)" -gt 15 ]; then
  began=$(since); limit=$(left 45); pids=()
  while IFS= read -r line; do
    timeout -k 4 "$limit" bash -c "${line#  }" > >(stamped > "$LOGS/typed.${#pids[@]}.log") 2>&1 & pids+=($!)
  done < <(grep '^  .*torchrun' "$RUN/start.txt")
  status=(); for p in "${pids[@]}"; do wait "$p"; status+=($?); done
  echo "## lines of start.txt: $(( $(since) - began )) s, exit statuses ${status[*]}"
  grep -h "STEP" "$LOGS"/typed.*.log | cut -c1-700 || tail -qn 4 "$LOGS"/typed.*.log | cut -c1-300
fi

# What the plan says, in words.
plan=$RUN/plans/a+b.qsync
if [ -f "$plan" ] && [ "$(left 99)" -gt 5 ]; then
  timeout "$(left 10)" python3 -m qsync show "$plan" > "$LOGS/show.txt" 2>&1; head -c 2500 "$LOGS/show.txt"
  timeout "$(left 10)" python3 -m qsync explain "$plan" > "$LOGS/explain.txt" 2>&1
fi
