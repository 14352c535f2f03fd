#!/bin/sh
# Make .venv-aot-VERSION, a Python that compiles for GPUs that are not there (`scripts/setup_aot.sh 0.11.2`): that JAX
# with its CUDA plugin and NVIDIA's assembler, without the rest of CUDA, about 1 GB. A stamp inside says what it was made
# from; while that holds there is nothing to do. `make test-aot` calls this.
set -eu
cd "$(dirname "$0")/.."
version=${1:?usage: scripts/setup_aot.sh JAX-VERSION}
venv=.venv-aot-$version
log=$venv/install.log

fail() {
    [ ! -e "$log" ] || tail -n 25 "$log" >&2
    echo "$1" >&2
    exit 1
}

case $(uname -s) in
Linux) ;;
*) fail "JAX's CUDA plugin exists for Linux only: the tests that compile for GPUs cannot run here" ;;
esac

python=$(scripts/find_python.sh)
wanted="$PWD $python $(cat constraints.txt scripts/setup_aot.sh | cksum)"
[ "$(cat "$venv/.ready" 2>/dev/null)" = "$wanted" ] && "$venv/bin/python" -c '' 2>/dev/null && exit

rm -rf "$venv"
mkdir "$venv"
echo "Installing into $venv: JAX $version with its CUDA plugin (about 1 GB; to watch: tail -f $log)"
"$python" -m venv "$venv" >"$log" 2>&1 || fail "$python could not make $venv (see above)"
install() { "$venv/bin/python" -m pip install --disable-pip-version-check "$@" >>"$log" 2>&1; }
# --no-deps: the plugin asks for CUDA's libraries, 3 GB that only a GPU needs. The assembler (ptxas) is pinned, because
# registers and spills are its work; XLA prefers this one to any that is on PATH.
install --no-deps "jax==$version" "jaxlib==$version" "jax-cuda13-plugin==$version" "jax-cuda13-pjrt==$version" \
    nvidia-cuda-nvcc==13.0.88 &&
    install -c constraints.txt numpy scipy ml_dtypes opt_einsum flatbuffers pytest pytest-xdist hypothesis ||
    fail "Installing failed: pip's last lines are above, all of them in $log. No network? Check the connection, the \
proxy (HTTPS_PROXY) or the package index (PIP_INDEX_URL), then run make test-aot again."
echo "$wanted" >"$venv/.ready"
