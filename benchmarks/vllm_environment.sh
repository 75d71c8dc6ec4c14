# Sourced by what needs vLLM on a CPU: makes .venv-vllm in the root, apart from .venv, since vLLM asks for an older transformers.
# Safe to run twice. $PYTHON names the interpreter to use (default: python3).

prepare_vllm() { # root
    local root="$1" python="${PYTHON:-python3}" venv="$1/.venv-vllm" wanted torch
    command -v g++ >/dev/null || {
        echo "vLLM compiles its model and needs g++; install it, or leave vLLM out" >&2
        exit 2
    }
    wanted="$(cat "$root/benchmarks/requirements-vllm.txt" "$root/constraints.txt" | cksum)"
    if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ]; then
        [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
        torch="$(grep '^torch==' "$root/constraints.txt")"
        echo "installing $torch and vLLM into .venv-vllm (minutes the first time)"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$torch"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$torch" -r "$root/benchmarks/requirements-vllm.txt"
        # They come with vLLM, built for another torch: importing them fails.
        "$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
        echo "$wanted" >"$venv/.installed"
    fi
}
