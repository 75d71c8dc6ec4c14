# Sourced by speedrun.sh, test.sh and .ci/run: makes .venv beside it and installs the project with the named extras.
# Safe to run twice: nothing is done where pyproject.toml, constraints.txt and the extras are those of the last time.
# $PYTHON names the interpreter to use (default: python3).

prepare_environment() { # root, extras
    local root="$1" extras="$2" python="${PYTHON:-python3}" venv stamp wanted pin there
    venv="$root/.venv"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "needs Python 3.11 or newer, found $("$python" --version); set PYTHON to one" >&2
        exit 2
    }
    wanted="$extras $(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum)"
    stamp="$venv/.installed-$extras"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        # pip warns a root user of an environment that is not its own; this one is.
        export PIP_ROOT_USER_ACTION=ignore
        [ -x "$venv/bin/python" ] || { echo "making $venv"; "$python" -m venv "$venv"; }
        # torch by its exact pin first: an open request may pull gigabytes of GPU libraries.
        pin="$(grep '^torch==' "$root/constraints.txt")"
        there="$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch").split("+")[0])' 2>/dev/null)" || there=""
        if [ "torch==$there" != "$pin" ]; then
            echo "installing torch (a few minutes the first time)"
            "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$pin"
        fi
        echo "installing nmoe[$extras]"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
            -c "$root/constraints.txt" -e "$root[$extras]"
        echo "$wanted" >"$stamp"
    fi
    PATH="$venv/bin:$PATH"
    export PATH
}
