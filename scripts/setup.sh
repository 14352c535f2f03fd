#!/bin/sh
# Make .venv ready to train (`scripts/setup.sh`), or to test as well (`scripts/setup.sh dev`), and keep it so: a stamp
# inside says what it was made from, and while that holds there is nothing to do. `make` calls this.
set -eu
cd "$(dirname "$0")/.."
log=.venv/install.log

fail() {
    [ ! -e "$log" ] || tail -n 25 "$log" >&2
    echo "$1" >&2
    exit 1
}

# .venv/.made has three lines: where the venv was made (it cannot be moved), with which Python, for which accelerator.
made() { sed -n "$1p" .venv/.made 2>/dev/null; }
works() { [ "$(made 1)" = "$PWD" ] && .venv/bin/python -c '' 2>/dev/null; }

if [ -z "${PYTHON:-}" ] && works; then python=$(made 2); else python=$(scripts/find_python.sh); fi
wanted="$PWD $python JAX=${JAX:-} $(cat pyproject.toml constraints.txt | cksum)"

# A venv made on a machine without a GPU must not hide the GPU of the next one (shared home directories).
gpu_appeared() {
    [ "$(made 3)" = cpu ] && [ -z "${JAX:-}" ] && command -v nvidia-smi >/dev/null &&
        [ "$(scripts/find_accelerator.sh 2>/dev/null)" != cpu ]
}
stamp=.venv/.ready${1:+-$1}
[ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && works && ! gpu_appeared && exit

accelerator=$(scripts/find_accelerator.sh)
wanted_made=$(printf '%s\n' "$PWD" "$python" "$accelerator") # nor should two CUDAs share one
if [ -e .venv ] && [ ! -e .venv/.made ]; then
    fail ".venv is not one that make made: move it away or delete it, then run make again"
fi
if [ "$(made 1,3)" != "$wanted_made" ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    rm -rf .venv
    mkdir .venv
    echo unfinished >.venv/.made
    "$python" -m venv .venv >$log 2>&1 || fail "$python could not make .venv (see above)"
    echo "$wanted_made" >.venv/.made
fi

rm -f .venv/.ready*
case $accelerator in
cpu) size='200 MB' extras=${1:-} ;;
*) size='3 GB' extras=$accelerator${1:+,$1} ;;
esac
echo "Installing into .venv with $("$python" --version): JAX for $accelerator${1:+, tools for tests} (about $size the first" \
    "time; to watch: tail -f $log)"
.venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e ".${extras:+[$extras]}" >$log 2>&1 ||
    fail "Installing failed: pip's last lines are above, all of them in $log. No network? Check the connection, the \
proxy (HTTPS_PROXY) or the package index (PIP_INDEX_URL), then run make again."
echo "$wanted" >"$stamp"
[ -z "${1:-}" ] || echo "$wanted" >.venv/.ready # what can test can train
