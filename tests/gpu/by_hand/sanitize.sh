#!/bin/bash
# compute-sanitizer, memcheck and racecheck, over small cases that together launch every kernel of triton and cutlass.
#   bash tests/gpu/by_hand/sanitize.sh [GPU number, 0]        cwd: repository root; OUT: where sanitize/ is written
# Variables: TOOLS ("memcheck racecheck"), LIMIT (seconds per tool, 100), WARM (seconds of the run without the sanitizer, 100;
# 0: none), JOBS (names, all), COLLECT=1: only list the tests.
# Exit status: 0 if both tools are clean and every process finished.
GPU=${1:-0}; OUT=${OUT:?}/sanitize; LIMIT=${LIMIT:-100}; WARM=${WARM:-100}; TOOLS=${TOOLS:-memcheck racecheck}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd); W=$(mktemp -d /tmp/sanitize.XXXXXX); mkdir -p "$OUT"
G=tests/gpu C="--pyargs qsync_torch.conformance --device cuda --configs 2"
export CUDA_VISIBLE_DEVICES=$GPU PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 PYTHONPATH=$HERE:$PYTHONPATH HF_HUB_OFFLINE=1
export QSYNC_KERNEL_CACHE=${QSYNC_KERNEL_CACHE:-$W/kc}; mkdir -p -m 700 "$QSYNC_KERNEL_CACHE"
PYTEST=(python3 -m pytest -q -ra -p no:cacheprovider -p no:xdist)

# name | files | -k.  No graphs (memory that is not cached cannot be allocated while one is captured), nothing of 2**31 elements.
SMALL="shape2 or shape3 or shape5 or shape7"
JOBS_ALL=(
"triton-quantize|$G/test_triton_quantize.py|(nearest_and_floor and dtype1 and nearest and ($SMALL)) or (stochastic_rounding and ($SMALL)) or float8 or multiplier or many_tensors"
"triton-producers|$G/test_triton_producers.py|copies_have_the_scale or every_configuration"
"triton-random|$G/test_triton_producers.py|test_random_shapes and 100"
"triton-products|$G/test_triton_products.py|(int8_sums and 100-70-90) or (int8_sums and 17-1-5) or (int8_sums and 256-512) or (float_gradients and 100-70-90) or (float8_products and 129-257) or any_strides or convolutions_are_exact or convolution_grad_input"
"triton-conformance|$C --backend triton|test_values and ((batch_norm.grad_input and copy) or (conv2d.grad and 1x1 and from) or (quantize and (copy or maxima)) or (linear and 6x0x4 and not point) or ((layer_norm or gelu) and (30 or 84 or 1050)) or (silu and maxima and 3001))"
"cutlass-linear|$G/test_cutlass_linear.py|(int32_sums and 127 and 129) or (int32_sums and 300 and 513) or sums_in_parts or (fused_dequantization and True-True-True) or (any_strides and second-transposed) or (any_strides and sliced-contiguous) or int8_gradients or (16_bit_gradients and 100 and 77) or (float8_output and 100 and 77) or (float8_gradients and 100 and 77)"
"cutlass-conv2d|$G/test_cutlass_conv2d.py|(sums_are_exact and 48) or (sums_are_exact and 96) or (sums_are_exact and 37 and 41) or (sums_are_exact and 13 and 20) or (errs_no_more and True-True) or gradient or not_channels_last or 1x1"
"cutlass-conformance|$C --backend cutlass|test_values and conv2d.grad and from and not odd"
)
wanted=(); for job in "${JOBS_ALL[@]}"; do [ -z "$JOBS" ] || [[ " $JOBS " == *" ${job%%|*} "* ]] && wanted+=("$job"); done

if [ -n "$COLLECT" ]; then
  for job in "${wanted[@]}"; do IFS='|' read -r name files k <<< "$job"; echo "## $name"; "${PYTEST[@]}" $files -k "$k" --collect-only -q; done; exit
fi
command -v compute-sanitizer > /dev/null || export PATH=$PATH:/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer
command -v compute-sanitizer > /dev/null || { echo "no compute-sanitizer on PATH"; exit 2; }
compute-sanitizer --version | tail -n 1; compute-sanitizer --help > "$W/help" 2>&1
offered() { grep -q -- "--$1\b" "$W/help"; }

# Only our kernels are instrumented. Triton's are called like their functions, exactly; CUTLASS's templates are ours where they are
# not instantiated with cuBLAS's own types (cutlass_80_...), which stand outside CUTLASS's namespace.
FILTER=--kernel-regex; offered kernel-regex || FILTER=--kernel-name
triton=$(python3 - packages/qsync-kernels-triton/src << 'PYTHON'
import ast, pathlib, sys
functions = [node for path in pathlib.Path(sys.argv[1]).rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(one) for one in node.decorator_list)]
used = {node.id for function in functions for part in function.body for node in ast.walk(part) if isinstance(node, ast.Name)}
print(*sorted({function.name for function in functions} - used))   # a kernel is what no other function calls
PYTHON
)
cuda=$(grep -rhoP '__global__ void (__launch_bounds__\([^)]*\) )?\K\w+' packages/qsync-kernels-cutlass/src | sort -u)
filters=(); for name in $triton; do filters+=($FILTER kne=$name); done
for name in $cuda; do filters+=($FILTER kns=${#name}$name); done
filters+=($FILTER kns=_ZN7cutlass13device_kernel $FILTER kns=_ZN7cutlass7Kernel2INS_ $FILTER kns=_ZN7cutlass6KernelINS_)
if compute-sanitizer --tool memcheck "${filters[@]}" true 2>&1 | grep -iE 'unrecogni[sz]ed|unknown option|invalid|more than once|multiple occurrences'; then
  echo "## it does not take ${#filters[@]} words of $FILTER: every kernel is instrumented, which takes longer"; filters=()
fi
common=(--target-processes all --error-exitcode 99 "${filters[@]}")
offered launch-timeout && common+=(--launch-timeout 90)
offered report-api-errors && common+=(--report-api-errors no)   # PyTorch asks for symbols and peers that are not there
offered print-limit && common+=(--print-limit 20)
memcheck=(); offered padding && memcheck+=(--padding 512)   # what lies behind an allocation is not another one
racecheck=(); offered racecheck-report && racecheck+=(--racecheck-report all)

side_by_side() {   # $1: tool or "" ; $2: seconds
  local tool=$1 limit=$2 job name files k prefix=() pids=() names=(); local -n of_tool=${tool:-none}
  [ -n "$tool" ] && prefix=(compute-sanitizer --tool "$tool" "${common[@]}" "${of_tool[@]}")
  for job in "${wanted[@]}"; do
    IFS='|' read -r name files k <<< "$job"
    env $ENVIRONMENT timeout -s INT -k 5 "$limit" "${prefix[@]}" "${PYTEST[@]}" $PLUGIN $files -k "$k" > "$W/$tool.$name" 2>&1 &
    pids+=($!); names+=("$name")
  done
  errors=0; unfinished=0; failed=0
  for i in "${!pids[@]}"; do
    wait "${pids[$i]}"; local rc=$? log=$W/$tool.${names[$i]}
    local tests; tests=$(grep -aE '^[0-9]+ (passed|failed|skipped|deselected)|no tests ran|^ERROR' "$log" | tail -n 1 | cut -c1-110)
    if [ -z "$tool" ]; then echo "  ${names[$i]}: exit status $rc; $tests"; [ $rc = 0 ] || grep -aE '^(FAILED|ERROR|E  )' "$log" | head -n 5 | cut -c1-250; continue; fi
    # Kernels' errors are in the processes' summaries; one without a summary did not finish.
    local summary; summary=$(grep -a 'SUMMARY:' "$log" | sort | uniq -c | sed 's/^ *//; s/=========//' | paste -sd';')
    local n; n=$(grep -aoP '(ERROR SUMMARY: |RACECHECK SUMMARY: )\K[0-9]+' "$log" | awk '{ n += $1 } END { print n + 0 }')
    echo "  $tool ${names[$i]}: exit status $rc; ${summary:-NO SUMMARY (stopped after $limit s, or it did not start)}; $tests"
    errors=$(( errors + n )); [ -n "$summary" ] || unfinished=$(( unfinished + 1 ))
    [ $rc = 0 ] || [ $rc = 99 ] || { failed=$(( failed + 1 )); grep -aE '^(FAILED|ERROR|E  )' "$log" | head -n 3 | cut -c1-250; }
    grep -aE '========= (Invalid|Error|Warning|Race|Out|Misaligned|Internal|Target|Failed|.* hazard)' "$log" | cut -c1-200 | sort | uniq -c | sort -rn | head -n 5
  done
}
none=(); T0=$(date +%s)

if [ "$WARM" -gt 0 ]; then   # compiles what the sanitizer would slow down, and sees what is launched
  export SANITIZE_SEEN=$W/seen; PLUGIN="-p sanitize_seen"; side_by_side "" "$WARM"; unset SANITIZE_SEEN; PLUGIN=
  sort -u "$W/seen" 2>/dev/null > "$OUT/kernels_seen.txt"; unseen=
  for name in $cuda device_kernel Kernel2 Kernel; do grep -q "\b$name[<(]" "$OUT/kernels_seen.txt" || unseen="$unseen cutlass:$name"; done
  for name in $triton; do grep -qx -- "$name" "$OUT/kernels_seen.txt" || unseen="$unseen triton:$name"; done
  echo "## without the sanitizer: $(( $(date +%s) - T0 )) s; kernels that were not launched:${unseen:- none}"
fi
ENVIRONMENT="PYTORCH_NO_CUDA_MEMORY_CACHING=1 CUDA_MODULE_LOADING=LAZY"   # every tensor is an allocation that the tool knows
bad=0
for tool in $TOOLS; do
  PLUGIN=; [ "$tool" = racecheck ] && PLUGIN="-p convolutions_on_cpu"
  T1=$(date +%s); side_by_side "$tool" "$LIMIT"
  for job in "${wanted[@]}"; do n=${job%%|*}; echo "#### $tool $n"; tail -c 400000 "$W/$tool.$n"; done | gzip > "$OUT/$tool.log.gz"
  echo "## $tool: $errors errors in ${#wanted[@]} processes, $unfinished without a summary, $failed whose tests failed; $(( $(date +%s) - T1 )) s"
  [ $(( errors + unfinished + failed )) = 0 ] || bad=1
done
rm -rf "$W"; exit $bad
