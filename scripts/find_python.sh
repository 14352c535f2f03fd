#!/bin/sh
# Print the path of a Python that JAX is built for: the one named in PYTHON, else the first found where people keep
# them. Where there is none, one line on stderr says how to get one, and the exit status is 1.
set -u
oldest=12 newest=15 # Python 3.12 to 3.15: the versions jaxlib 0.12 has wheels for

# One path a line. pyenv and uv hold Pythons that are installed but not on PATH, so their folders are listed too.
candidates() {
    home=${HOME:-/nowhere}
    for name in python3 python3.15 python3.14 python3.13 python3.12 python; do command -v $name; done
    for dir in "${CONDA_PREFIX:-/nowhere}" "${PYENV_ROOT:-$home/.pyenv}"/versions/3.* \
        "${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$home/.local/share}/uv/python}"/cpython-3.* \
        "$home"/.asdf/installs/python/3.* "$home"/.local/share/mise/installs/python/3.* \
        "$home"/miniforge3 "$home"/miniconda3 "$home"/anaconda3; do
        echo "$dir/bin/python3"
    done
    for dir in ${PYTHON_DIRS-/opt/homebrew/bin /usr/local/bin /usr/bin /home/linuxbrew/.linuxbrew/bin /opt/local/bin \
        /opt/conda/bin /opt/miniconda3/bin /Library/Frameworks/Python.framework/Versions/*/bin}; do
        for name in python3 python3.15 python3.14 python3.13 python3.12; do echo "$dir/$name"; done
    done
}

# Prints the interpreter behind shims. Exit status 3: not a Python for JAX; 4: it is, but lacks a part (printed).
check='
import platform, sys, sysconfig
if not (3, int(sys.argv[1])) <= sys.version_info[:2] <= (3, int(sys.argv[2])): sys.exit(3)
if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"): sys.exit(3)
if (platform.system(), platform.machine()) == ("Darwin", "x86_64"): sys.exit(3)  # no jaxlib for Intel Macs
try: import ensurepip, venv
except ImportError:
    print(f"{sys.executable} has no venv module; on Debian and Ubuntu: sudo apt install python3.{sys.version_info[1]}-venv")
    sys.exit(4)
print(sys.executable)
'

complain() {
    echo "$1" >&2
    exit 1
}

if [ -n "${PYTHON:-}" ]; then
    found=$("$PYTHON" -c "$check" $oldest 99 2>/dev/null) && echo "$found" && exit # newer than we know: their choice
    complain "PYTHON=$PYTHON: ${found:-not a Python 3.$oldest or newer that JAX runs on}"
fi

without_venv=
while read -r python; do
    [ -x "$python" ] || continue
    found=$("$python" -c "$check" $oldest $newest 2>/dev/null </dev/null)
    case $? in
    0) echo "$found" && exit ;;
    4) without_venv=$found ;;
    esac
done <<EOF
$(candidates)
EOF

[ -n "$without_venv" ] && complain "$without_venv"
if [ "$(uname -s)" = Darwin ]; then
    [ "$(uname -m)" = arm64 ] || complain "JAX has no builds for Intel Macs since jaxlib \
0.4.38. On one, work in a Linux container: docker run -it -v \"\$PWD\":/src -w /src python:3.13 make train. On Apple \
silicon this shell runs under Rosetta: arch -arm64 make train"
    get='brew install python@3.13'
elif command -v apt-get >/dev/null; then
    get='sudo apt install python3-venv (Ubuntu 24.04 or Debian 13 and newer)'
elif command -v dnf >/dev/null; then
    get='sudo dnf install python3.13'
fi
complain "No Python 3.$oldest to 3.$newest found on PATH or in pyenv, uv, conda, Homebrew. Get one:\
 ${get:+$get, or }uv python install 3.13 (docs.astral.sh/uv). Or name yours: make train PYTHON=/path/to/python3"
