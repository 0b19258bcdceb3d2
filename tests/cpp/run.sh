#!/bin/sh
# Builds and runs the C++ tests, without Python: run.sh plain|thread|address [part of a test name]
set -eu
kind="${1:?usage: run.sh plain|thread|address [part of a test name]}"
shift
cd "$(dirname "$0")/../.."
case "$kind" in
    plain) sanitize='' flags=-O1 ;; # what compiles soonest
    thread | address) sanitize=$kind flags='-O2 -g' ;;
    *) echo "run.sh: expected plain, thread or address, got '$kind'" >&2; exit 2 ;;
esac

# Where the build requirements were installed into a virtual environment, they are used from there.
if [ -d .venv/bin ]; then PATH="$PWD/.venv/bin:$PATH"; fi
build="build/cpp-$kind"
mkdir -p build
cmake -S . -B "$build" -G Ninja -DOFFLOAD_BUILD_TESTS=ON -DOFFLOAD_CUDA=OFF \
    -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="$flags" \
    -DOFFLOAD_SANITIZE="$sanitize" >"$build.log" 2>&1 \
    || { cat "$build.log"; exit 1; }
cmake --build "$build"

tests="$build/tests/cpp/offload_tests"
case "$kind" in
    # Address randomization of newer kernels collides with the shadow of older runtimes.
    thread) TSAN_OPTIONS="halt_on_error=0 exitcode=66 die_after_fork=0" \
        setarch "$(uname -m)" -R "$tests" "$@" ;;
    address) ASAN_OPTIONS="detect_leaks=1" "$tests" "$@" ;;
    plain) "$tests" "$@" ;;
esac
