#!/usr/bin/env bash
# Build the kernels with AddressSanitizer and UndefinedBehaviorSanitizer and run the kernel tests on that build.
# The sanitizer's runtime must be loaded before Python, hence LD_PRELOAD; Python itself leaks by design.
set -euo pipefail
python=$1
cd "$(dirname "$0")/.."
build=build/sanitize
purelib=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
"$python" -m pip install --quiet -c constraints.txt nanobind
cmake -S . -B "$build" -DSORTRL_SANITIZE=ON -DCMAKE_BUILD_TYPE=Debug -DPython_EXECUTABLE="$PWD/$python" \
  -Dnanobind_DIR="$purelib/nanobind/cmake" >/dev/null
cmake --build "$build" --parallel 2
rm -rf "$build/site" && mkdir -p "$build/site"
cp -r src/sortrl "$build/site/sortrl"
cp "$build"/_kernels_*.so "$build/site/sortrl/ops/"
preload=$(c++ -print-file-name=libasan.so):$(c++ -print-file-name=libubsan.so):$(c++ -print-file-name=libstdc++.so.6)
# The finder of the editable install would load the ordinary build: remove it, and make sure that it worked.
run='import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
import sortrl.ops._kernels_baseline as kernels
assert "sanitize" in kernels.__file__, kernels.__file__
import pytest
sys.exit(pytest.main(sys.argv[1:]))'
for isa in $("$python" -c 'from sortrl.ops import cpu; print(*cpu.select().module.cpu_supports())'); do
  echo "sanitizing $isa"
  LD_PRELOAD=$preload ASAN_OPTIONS=detect_leaks=0 SORTRL_ISA=$isa PYTHONPATH=$PWD/$build/site \
    "$python" -c "$run" -q -p no:cacheprovider tests/ops/test_ops.py tests/nets/test_packed.py \
    -k "not compile and not forked and not well_formed and not every_instruction and not the_c_example and not allocates and not command"
done
