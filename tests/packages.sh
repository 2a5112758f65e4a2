#!/usr/bin/env bash
# Build the sdist and, from it, the wheel; install that where there is no source tree and no compiler's output, and try it there.
# Its dependencies are those of the environment that runs this: fetching torch again would take longer than all the rest.
set -euo pipefail
python=$PWD/$1
cd "$(dirname "$0")/.."
out=$PWD/build/packages
rm -rf "$out" && mkdir -p "$out"
"$python" -m build --outdir "$out/dist" . >"$out/build.log" 2>&1 || { tail -40 "$out/build.log"; exit 1; }
ls -l "$out/dist"
wheel=$(echo "$out"/dist/*.whl)
largest=20000000
size=$(wc -c <"$wheel")
[ "$size" -lt "$largest" ] || { echo "$wheel has $size bytes, expected less than $largest"; exit 1; }
"$python" -m venv --without-pip "$out/clean"
"$python" -m pip --python "$out/clean/bin/python" install --quiet --no-deps --no-index "$wheel"
purelib=$("$out/clean/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
# A path in a .pth file adds packages, but not the .pth files among them: the editable install stays out.
"$python" -c 'import site, sys; print("\n".join(p for p in sys.path if p.endswith("-packages")))' >"$purelib/dependencies.pth"
cd "$out" && "$out/clean/bin/python" -P "$OLDPWD/tests/smoke.py" --kernels
